"""What results say of the machine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.server.measured import stolen_s


def test_stolen_time_is_read_by_core(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 0 9 9 9 0 9 975 0 0\ncpu0 1 0 2 3 4 5 6 700 0 0\ncpu12 1 0 2 3 4 5 6 275 0 0\nintr 5 6\nctxt 8\n")
    assert stolen_s(stat) == {0: 7.0, 12: 2.75}


def test_where_nobody_says_there_is_none(tmp_path: Path) -> None:
    assert stolen_s(tmp_path / "stat") == {}
    (tmp_path / "stat").write_text("cpu0 1 0 2 3 4\n")  # an old kernel
    assert stolen_s(tmp_path / "stat") == {}


def test_this_machine_tells() -> None:
    assert all(seconds >= 0.0 for seconds in stolen_s().values())
