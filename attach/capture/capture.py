"""Training samples from live traffic: committed rows of a share of the requests, brought to the sample ring.

Each of these hazards would silently teach the drafter something false. Each has its remedy here:
- Rejected drafts have rows too, at the end of a request's slice: `num_rejected` rows are cut off. That count is on the device.
  So a step's rows are committed when its copy has arrived, one or more steps later on CUDA, and a request's end behind them.
- Drafts accepted behind a token that ends the answer aren't the answer's, nor is a round that was scheduled before vLLM saw
  that token: such rows are cut off too (`captured_rows`).
- The next step overwrites the runner's buffers: rows are gathered on the main stream before control returns.
- Prefix-cache hits, preemption and late sampling leave holes: a record whose first position isn't the expected one carries
  FLAG_GAP.
- Token ids and positions come from the same rows as the features; they are never reconstructed.

A thread compiles the kernel that gathers rows and allocates all pinned memory, from the attachment on: no step waits for a
compiler, nor for the driver. Requests that start before it is ready aren't captured. Rows for which there is no pinned memory
left are skipped: the ring's thread is behind.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from honed.adapt.protocol.capture_limit import MOST_CAPTURED
from honed.attach.capture.captured_rows import CapturedRequest, CapturedRows, RowWriter
from honed.attach.capture.pinned_arena import PinnedArena, Slot
from honed.attach.capture.ring_writer import RingWriter
from honed.attach.events.labels import read_labels
from honed.attach.events.request_book import key_of
from honed.attach.events.steering import is_steered
from honed.attach.runner.runner import StepView
from honed.attach.runner.top_tokens import TopTokens
from honed.attach.swap.staging import use_device
from honed.kernels.capture.context_features import context_features

logger = logging.getLogger("honed.attach")

LEAST_PINNED, MOST_PINNED = 256 << 20, 1 << 30
"""Bytes of pinned memory for rows on their way to the ring; as many as the rows of one step take, within these limits."""
RETRY_S = 600.0
"""Time to wait after a ring couldn't be made."""


class Capturer:
    """Decides which requests are captured and moves their rows.

    Args:
        make_ring: (feature_size, feature_dtype) -> the ring; called at the first captured step.
        norm: () -> (weight [H], eps) of a DFlash drafter's `hidden_norm`; None for a drafter whose fused rows aren't normed.
        feature_kind: "fused" or "layers".
        secret: key of this boot's request keys; request ids themselves never reach the ring.
        top_tokens: asked for those of steps in which a sampled answer is captured. None: the emitted ones are to be learned,
            since the drafter's tokens are drawn at random, too.
    """

    def __init__(
        self,
        make_ring: Callable[[int, str], RingWriter],
        norm: Callable[[], tuple[torch.Tensor, float]] | None,
        feature_kind: str,
        secret: bytes,
        top_tokens: TopTokens | None,
    ) -> None:
        self._norm, self._top_tokens = norm, top_tokens
        self._kind = feature_kind
        self._secret = secret
        self.writer = RowWriter(make_ring)
        self.share = self._wanted_share = 0.0
        self.num_media = 0
        """Requests that weren't captured since they bring media or embeddings: their tokens alone don't say what was read."""
        self._retry_at_s = 0.0
        self._drafter_version = ""
        self._requests: dict[str, CapturedRequest] = {}
        self._pending: deque[CapturedRows | CapturedRequest] = deque()
        """Rows on their way to the host, in the order of steps; a request stands for its end, behind its rows."""
        self._side: Any = None
        self._arena: PinnedArena | None = None
        """Where there is one, rows are copied beside the steps."""
        self._preparing: threading.Thread | None = None

    def prepare(self, device: torch.device, step_bytes: int = 0) -> None:
        """Begin to make what a step needs on a GPU: pinned memory, and the kernel.

        Args:
            step_bytes: most bytes of a step's rows; 0: unknown.
        """
        if device.type == "cuda":
            num_bytes = min(max(step_bytes, LEAST_PINNED), MOST_PINNED)
            task = device, num_bytes
            self._preparing = threading.Thread(target=self._prepare, args=task, name="honed-prepare", daemon=True)
            self._preparing.start()

    def _prepare(self, device: torch.device, num_bytes: int) -> None:
        try:
            use_device(device)
            arena = PinnedArena(num_bytes)
        except Exception as error:
            logger.warning(
                "honed: nothing is captured, since the driver gives no %d MiB of pinned memory: %s; see `ulimit -l`, and the "
                "memory limit of vLLM's service or container",
                num_bytes >> 20,
                error,
            )
            return
        if self._kind == "fused" and self._norm is not None:
            _compile(*self._norm())
        self._arena = arena

    @property
    def is_ready(self) -> bool:
        """Whether a step has all that it needs."""
        return self._preparing is None or self._arena is not None

    def set_share(self, share: float, drafter_version: str) -> None:
        """Capture this share of the requests that start from now on; 0 stops new ones, running ones go on."""
        self._wanted_share, self._drafter_version = min(max(share, 0.0), 1.0), drafter_version
        self._take_share()
        self._commit()  # said when the engine becomes idle, too: no step would do it

    def label(self, drafter_version: str) -> None:
        """From now on another version drafts."""
        self._drafter_version = drafter_version

    def begin_anew(self) -> None:
        """The target has other weights: running requests are of both, so drop what they still bring."""
        self._forget()

    def _take_share(self) -> None:
        """Capture what is wanted, unless no ring could be made lately."""
        self.share = self._wanted_share if time.monotonic() >= self._retry_at_s else 0.0
        if self.share:
            self.writer.retry()

    def on_schedule(self, scheduler_output: Any) -> None:
        """Note new and finished requests; runs before each step."""
        if self._wanted_share and not self.share:  # the daemon says it once
            self._take_share()
        for request_id in scheduler_output.finished_req_ids:
            ended = self._requests.pop(request_id, None)
            if ended is not None:
                self._pending.append(ended)
        if self.share > 0.0 and self.is_ready:
            for new in scheduler_output.scheduled_new_reqs:
                self._consider(new)
        if self._top_tokens is not None:
            scheduled = scheduler_output.num_scheduled_tokens
            self._top_tokens.begin(any(one.has_likely and name in scheduled for name, one in self._requests.items()))
        self._commit()

    def _consider(self, new: Any) -> None:
        params = new.sampling_params
        labels = read_labels(params)
        if not labels.is_captured or not new.prompt_token_ids:
            return
        if (known := self._requests.get(new.req_id)) is not None:
            # Back after a preemption, or with more input of a session's client, which must not be taken for the target's words.
            if len(new.prompt_token_ids) > known.prompt_tokens:
                self._pending.append(self._requests.pop(new.req_id))
            return
        if len(self._requests) >= MOST_CAPTURED:
            return
        digest = key_of(new.req_id, self._secret)
        if int.from_bytes(digest) / 2.0**64 >= self.share:
            return
        if new.mm_features or getattr(new, "prompt_embeds", None) is not None:
            self.num_media += 1
            return
        self._requests[new.req_id] = CapturedRequest(
            key=digest.hex(),
            session=_session(labels.session, new.prompt_token_ids),
            workload=labels.workload,  # the engine has bounded their number
            prompt_tokens=len(new.prompt_token_ids),
            stop_ids=_stop_ids(params),
            has_likely=self._top_tokens is not None and getattr(params, "temperature", 0.0) > 0.0 and not is_steered(params),
        )

    def on_step(self, view: StepView) -> None:
        """Take the captured requests' rows of a step; runs right after the draft pass, without waiting for the device."""
        try:
            self._take(view)
        finally:  # the device's results of an earlier step have arrived
            self._commit()

    def _take(self, view: StepView) -> None:
        if not self._requests:
            return
        chosen = [(i, c) for i, r in enumerate(view.req_ids) if (c := self._requests.get(r)) is not None]
        if not chosen:
            return
        starts, ends = view.row_starts[:-1], view.row_starts[1:]
        counts = [int(ends[i] - starts[i]) for i, _ in chosen]
        rows = [np.arange(starts[i], ends[i]) for i, _ in chosen]
        ids = torch.from_numpy(np.concatenate([*rows, np.array([i for i, _ in chosen])]))
        slot = None
        if self._arena is not None and (slot := self._arena.take([ids.nbytes])) is None:
            self.writer.skip(sum(counts))
            return
        taken = None
        try:
            moved = _moved(ids, view.positions.device, slot)
            index, batch = moved[: sum(counts)], moved[sum(counts) :]
            taken = self._to_host(
                [c for _, c in chosen],
                counts,
                self._features(view, index),
                view.token_ids.index_select(0, index),
                view.positions.index_select(0, index),
                view.num_rejected.index_select(0, batch) if view.num_rejected is not None else None,
                view.top_tokens.index_select(0, index) if view.top_tokens is not None else None,
                slot,
            )
        finally:
            if taken is not None:
                self._pending.append(taken)
            elif slot is not None:
                self._pending.append(self._nothing(slot))

    def _features(self, view: StepView, index: torch.Tensor) -> torch.Tensor:  # [N, F]
        if self._kind == "fused" and self._norm is not None:
            states, (weight, eps) = view.states(), self._norm()
            return context_features(states, index, weight, eps, states.dtype)
        aux = view.aux
        if isinstance(aux, torch.Tensor):
            rows = aux.index_select(0, index)
        elif aux:
            rows = torch.cat([layer.index_select(0, index) for layer in aux], dim=-1)
        else:
            raise ValueError("this drafter gets no hidden states of the target")
        # Not what the drafter holds: a pass after the first has overwritten rows of it.
        return view.fuse(rows) if self._kind == "fused" else rows

    def _to_host(
        self,
        requests: list[CapturedRequest],
        counts: list[int],
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        num_rejected: torch.Tensor | None,
        likely: torch.Tensor | None,
        ids_slot: Slot | None = None,
    ) -> CapturedRows | None:
        """Begin to copy the rows; None: there is no pinned memory for them.

        Args:
            ids_slot: what the main stream copied the rows' numbers from.
        """
        version = self._drafter_version
        if self._arena is None or ids_slot is None:
            return CapturedRows(requests, counts, features, token_ids, positions, num_rejected, None, version, likely)
        tensors = [each for each in (features, token_ids, positions, num_rejected, likely) if each is not None]
        slot = self._arena.take([tensor.nbytes for tensor in tensors])
        if slot is None:
            self.writer.skip(len(features))
            return None
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host = [slot.tensor(t.shape, t.dtype).copy_(t, non_blocking=True) for t in tensors]
            for tensor in tensors:
                tensor.record_stream(self._side)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        rejected = host[3] if num_rejected is not None else None
        held, tops = (slot, ids_slot), host[-1] if likely is not None else None
        return CapturedRows(requests, counts, host[0], host[1], host[2], rejected, arrived, version, tops, held)

    def _nothing(self, slot: Slot) -> CapturedRows:
        """Stands for rows that aren't captured, until the main stream has read the slot."""
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record()
        none = torch.empty(0, 0)
        return CapturedRows([], [], none, none, none, None, read, self._drafter_version, held=(slot,))

    def _commit(self) -> None:
        """Write what has arrived."""
        try:
            while self._pending and self._pending[0].has_arrived:
                next_one = self._pending.popleft()
                if isinstance(next_one, CapturedRows):
                    self.writer.take(next_one)
                else:
                    self.writer.take_end(next_one)
            self.writer.raise_failure()
        except Exception:
            if not self.writer.has_ring:
                self._give_up()
            raise

    def _give_up(self) -> None:
        """Stop capturing for a while: no ring can be made, usually for lack of room."""
        self._retry_at_s, self.share = time.monotonic() + RETRY_S, 0.0
        self._forget()

    def _forget(self) -> None:
        self._requests.clear()
        rows = [one for one in self._pending if isinstance(one, CapturedRows)]
        self._pending.clear()
        for one in rows:
            if one.has_arrived:
                one.release()
            else:  # a copy may still write their pinned memory
                self._pending.append(replace(one, requests=[]))


def _session(label: str, prompt: list[int]) -> str:
    """Return a digest of the label, or else of the prompt: copies of one text are not independent sessions.

    It has no key: the held-out sessions must be the same after a restart.
    """
    own = label.encode() if label else np.array(prompt, np.int32).tobytes()
    return hashlib.blake2b(own, digest_size=8, person=b"" if label else b"prompt").hexdigest()


def _stop_ids(params: Any) -> frozenset[int]:
    """Tokens that end a request's answer, as vLLM's `check_stop` reads them."""
    if params is None:
        return frozenset()
    eos = params.eos_token_id
    return frozenset([*(params.stop_token_ids or ()), *(() if eos is None else (eos,))])


def _moved(ids: torch.Tensor, device: torch.device, slot: Slot | None) -> torch.Tensor:
    """Copy to the device, from pinned memory: a copy from any other memory waits for the device."""
    return ids if slot is None else slot.tensor(ids.shape, ids.dtype).copy_(ids).to(device, non_blocking=True)


def _compile(weight: torch.Tensor, eps: float) -> None:
    """Run the kernel once, on its own row and beside the engine's work."""
    try:
        use_device(weight.device)
        side: Any = torch.cuda.Stream(weight.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(side):
            row = torch.zeros(1, dtype=torch.int64, device=weight.device)
            context_features(torch.zeros_like(weight)[None], row, weight, eps, weight.dtype)
    except Exception as error:  # the first captured step will fail as well
        logger.warning("honed: the kernel that captures rows can't be compiled: %s: %s", type(error).__name__, error)
