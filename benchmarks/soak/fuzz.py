"""Part "fuzz": mutated frames and requests without end, while an honest engine must be served."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import socket
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import zmq

from benchmarks.server.measured import percentile
from benchmarks.server.processes import Processes
from benchmarks.soak.daemon import Daemon, samples
from benchmarks.soak.fleet import Fleet
from benchmarks.soak.mutants import Frames, Requests

HONEST_EVERY_S = 0.1
MOST_ACK_MS = 1000.0
FRAMES_OF_A_BOOT = 1000
"""Frames between two good hellos of an attacker, which make its next frames those of a new boot."""
ATTACKERS = (1, 2)
"""Their engine numbers; 0 is the honest one's. The second one never reads an answer."""
ANSWER_S = 30.0
ODD_ANSWER_S = 0.02
"""Wait for the answer to a request whose end can't be told."""
RAW_BYTES = 256 << 20
"""Raw batches kept, so that pruning has work."""
DRAIN_S = 60.0


def run(processes: Processes, folder: Path, num_frames: int, num_requests: int, seed: int = 0) -> dict[str, Any]:
    """Return the part's figures; times in milliseconds, memory in MB."""
    daemon = Daemon(
        processes,
        folder,
        HONED_HTTP__MUTATIONS_PER_MINUTE="1000000",  # else nearly all changes would be refused unread
        HONED_STORE__MAX_RAW_BYTES=str(RAW_BYTES),
    )
    daemon.start()
    daemon.wait_ready()
    seconds: dict[str, float] = {}
    rss_mb = [daemon.rss_mb()]
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Barrier(4)  # importing isn't the daemon's work
    with ProcessPoolExecutor(3, spawn, initializer=_wait, initargs=(ready,)) as pool, ExitStack() as stack:
        attacks: dict[str, Future[Counter[int]]] = {
            "frames": pool.submit(send_frames, str(daemon.engine_socket), num_frames, seed),
            "admin": pool.submit(
                send_requests, str(daemon.runtime_dir / "admin.sock"), num_requests - num_requests // 2, 2 * seed + 1
            ),
            "port": pool.submit(send_requests, daemon.port, num_requests // 2, 2 * seed + 2),
        }
        stack.push(_end_attacks)
        ready.wait()
        honest = stack.enter_context(Fleet(daemon.engine_socket, 1, HONEST_EVERY_S))
        began_s = shown_s = time.monotonic()
        while len(seconds) < len(attacks):
            honest.pump(0.25, 1, 8)
            daemon.child.check()
            rss_mb.append(daemon.rss_mb())
            seconds |= {name: time.monotonic() - began_s for name, one in attacks.items() if one.done() and name not in seconds}
            if time.monotonic() - shown_s > 60.0:
                shown_s = time.monotonic()
                print(
                    f"fuzz: {shown_s - began_s:.0f} s, {rss_mb[-1]:.0f} MB, acknowledged within {max(honest.ack_s):.3f} s",
                    flush=True,
                )
        sent = {name: one.result() for name, one in attacks.items()}
        waiting_s = honest.engines[0].waiting_s()
        is_drained = honest.drain(DRAIN_S)
        with daemon.reader() as reader:
            codes = samples(reader.text("/metrics"), "honed_admin_requests_total", "code")
        exit_code = daemon.stop()
        ack_ms = max(*honest.ack_s, waiting_s) * 1e3
    unhandled = daemon.unhandled()
    failed = sum(count for code, count in codes.items() if code >= "500" and code != "503")
    answers = sent["admin"] + sent["port"]
    return {
        "passed": not (unhandled or failed or exit_code) and is_drained and ack_ms <= MOST_ACK_MS and not answers[0],
        "seed": seed,
        "frames": sent["frames"].total(),
        "frames_per_s": round(sent["frames"].total() / seconds["frames"]),
        "requests": answers.total(),
        "requests_per_s": round(answers.total() / max(seconds["admin"], seconds["port"])),
        "seconds": round(max(seconds.values()), 1),
        "unhandled": len(unhandled) + failed,
        "honest_ack_ms_most": round(ack_ms, 1),
        "honest_ack_ms_p50": round(percentile(honest.ack_s, 0.5) * 1e3, 1),
        "honest_ack_ms_p99": round(percentile(honest.ack_s, 0.99) * 1e3, 1),
        "honest_batches": len(honest.ack_s),
        "answers": {code: codes[code] for code in sorted(codes)},
        "unanswered": answers[0],
        "rss_mb_start": round(rss_mb[0], 1),
        "rss_mb_end": round(rss_mb[-1], 1),
        "rss_mb_most": round(max(rss_mb), 1),
        "exit_code": exit_code,
        "first_unhandled": unhandled[:3],
    }


def _end_attacks(kind: type[BaseException] | None, *_: object) -> None:
    """End the attackers when an exception ends the run: the pool would wait for the last of their frames."""
    for attacker in multiprocessing.active_children() if kind is not None else ():
        attacker.terminate()


def _wait(ready: Barrier) -> None:
    """Begin together, and leave the cores to daemon and honest engine first: their waits for one aren't the daemon's."""
    os.nice(10)
    ready.wait()


def send_frames(path: str, count: int, seed: int) -> Counter[int]:
    """Send mutated frames as fast as they are taken, from two connections in turns; return their number by attacker."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rng, sent = random.Random(seed), Counter[int]()
    sides = []
    for number in ATTACKERS:
        peer = context.socket(zmq.DEALER)
        peer.set(zmq.SNDTIMEO, 60_000)
        peer.set(zmq.LINGER, 60_000)
        peer.connect(f"ipc://{path}")
        sides.append((number, peer, Frames(number, rng)))
    for turn in range(count // len(sides) + 1):
        for number, peer, frames in sides:
            if sent.total() >= count:
                break
            if turn % FRAMES_OF_A_BOOT == 0:
                peer.send(frames.hello(turn))
            peer.send(frames.frame())
            sent[number] += 1
            if number == ATTACKERS[0] and turn % 100 == 0:
                while peer.poll(0):
                    peer.recv()
    context.destroy(linger=60_000)
    return sent


def send_requests(where: str | int, count: int, seed: int) -> Counter[int]:
    """Send mutated requests one after the other to a unix socket, or to a port; return how many were answered by status.

    Status 0: no answer to a request that needs one; 1: none to another.
    """
    requests, answers = Requests(random.Random(seed)), Counter[int]()
    connection: socket.socket | None = None
    for _ in range(count):
        request, has_end = requests.request()
        if connection is None or not has_end:
            if connection is not None:
                connection.close()
            connection = connect(where)
        status, is_open = exchange(connection, request, has_end)
        if status < 100 and has_end:  # it was closed between two requests, as a server may
            connection.close()
            connection = connect(where)
            status, is_open = exchange(connection, request, has_end)
        answers[status] += 1
        if not is_open:
            connection.close()
            connection = None
    return answers


def connect(where: str | int) -> socket.socket:
    """Connect to a unix socket's path or to a port."""
    if isinstance(where, int):
        return socket.create_connection(("127.0.0.1", where), ANSWER_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    connection.connect(where)
    return connection


def exchange(connection: socket.socket, request: bytes, has_end: bool) -> tuple[int, bool]:
    """Send a request and read its answer; return its status, and whether the connection can take another request."""
    connection.settimeout(ANSWER_S if has_end else ODD_ANSWER_S)
    received = b""
    with contextlib.suppress(OSError):
        connection.sendall(request)
        while b"\r\n\r\n" not in received and (data := connection.recv(1 << 16)):
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if has_end and length:
            left = int(length[1]) - len(body)
            while left > 0 and (data := connection.recv(1 << 16)):
                left -= len(data)
            return status_in(head), left == 0 and b"\r\nconnection: close" not in head.lower()
    return status_in(received) or int(not has_end), False


def status_in(head: bytes) -> int:
    """Return the status of an answer; 0 if it is none."""
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
    return int(found[1]) if found else 0
