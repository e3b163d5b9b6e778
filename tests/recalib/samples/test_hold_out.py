"""A session is on one side of the hold-out for ever."""

import stat
import threading

import numpy as np

from honed.recalib.samples.hold_out import SALT_BYTES, HoldOut, load_salt
from honed.recalib.samples.stretch import Stretch

SESSIONS = [f"session-{i}" for i in range(4000)]


def test_key_is_made_once_and_kept_private(tmp_path):
    first = load_salt(tmp_path / "state")
    assert load_salt(tmp_path / "state") == first
    (file,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_several_processes_agree_on_one_key(tmp_path):
    salts = []
    threads = [threading.Thread(target=lambda: salts.append(load_salt(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(salts)) == 1


def test_key_that_was_cut_off_is_made_anew(tmp_path):
    load_salt(tmp_path)
    (tmp_path / "hold-out.key").write_bytes(b"abc")
    assert len(load_salt(tmp_path)) == SALT_BYTES


def test_about_the_share_is_held_out_and_keys_differ():
    ours, theirs = HoldOut(b"1" * 16), HoldOut(b"2" * 16)
    held = [s for s in SESSIONS if ours.is_held_out(s)]
    assert 0.17 < len(held) / len(SESSIONS) < 0.23
    assert held == [s for s in SESSIONS if HoldOut(b"1" * 16).is_held_out(s)]
    assert held != [s for s in SESSIONS if theirs.is_held_out(s)]


def test_share_bounds():
    assert not any(HoldOut(b"1" * 16, 0.0).is_held_out(s) for s in SESSIONS)
    assert all(HoldOut(b"1" * 16, 1.0).is_held_out(s) for s in SESSIONS)


def test_digest_tells_rows_apart_in_any_order_and_to_nobody_without_the_key():
    def stretch(first, *tokens):
        return Stretch("s", "w", "v", first, np.array(tokens, np.int32), np.zeros((len(tokens), 2), np.float16))

    one, two, moved = stretch(0, 1, 2), stretch(5, 3), stretch(1, 1, 2)
    rule = HoldOut(b"k" * SALT_BYTES)
    assert rule.digest([one, two]) == rule.digest([two, one])
    digests = {rule.digest(rows) for rows in ([], [one], [one, two], [one, one], [moved, two])}
    digests.add(HoldOut(b"l" * SALT_BYTES).digest([one, two]))
    assert len(digests) == 6


def test_the_folder_that_is_made_for_it_is_no_business_of_others(tmp_path):
    load_salt(tmp_path / "state" / "honed")
    for folder in (tmp_path / "state", tmp_path / "state" / "honed"):
        assert folder.stat().st_mode & 0o777 == 0o750
