"""Cores that a process may use, by the files of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.recalib.process.cores import usable_cores


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8),
        ({"": "max 100000"}, 8),
        ({"": "200000 100000"}, 2),  # in a container, whose own group is the root
        ({"honed.slice/trainer.service": "150000 100000"}, 2),
        ({"honed.slice/trainer.service": "max 100000", "honed.slice": "300000 100000"}, 3),
        ({"honed.slice/trainer.service": "400000 100000", "honed.slice": "250000 50000"}, 4),
        ({"honed.slice/trainer.service": "1000 100000"}, 1),
        ({"honed.slice/trainer.service": "6400000 100000"}, 8),
        ({"other.service": "100000 100000"}, 8),
        ({"": "not a limit"}, 8),
    ],
    ids=str,
)
def test_no_more_cores_than_the_quotas_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/elsewhere\n0::/honed.slice/trainer.service\n")
    for group, text in limits.items():
        (tmp_path / "root" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / group / "cpu.max").write_text(f"{text}\n")
    assert usable_cores(membership, tmp_path / "root") == expected
    assert usable_cores(tmp_path / "none", tmp_path / "none") == 8
