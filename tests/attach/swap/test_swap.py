"""A swap refuses what it can't carry out. Real drafters are swapped in the end-to-end tests."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from honed.attach.swap import swap
from honed.attach.swap.swap import SwapError, Swapper
from tests.daemon.conftest import wait_for


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(4), requires_grad=False)


@pytest.fixture
def inner() -> Drafter:
    return Drafter()


@pytest.fixture
def swapper(inner: Drafter) -> Swapper:
    return Swapper(SimpleNamespace(model=inner), torch.device("cpu"))


def staged(swapper: Swapper, folder: Path) -> None:
    save_file({"norm.weight": torch.full((4,), 2.0)}, folder / "model.safetensors")
    swapper.stage([("v2", str(folder), "")])
    wait_for(lambda: swapper.staged("v2") == "", "the staged weights")


def begin_update(inner: Any) -> None:
    """As vLLM does to a drafter that it loads in place."""
    inner.norm.weight = nn.Parameter(inner.norm.weight.to("meta"), requires_grad=False)


def test_what_is_staged_is_copied_in_place(swapper: Swapper, inner: Any, tmp_path: Path) -> None:
    address = inner.norm.weight.data_ptr()
    staged(swapper, tmp_path)
    swapper.apply("v2")
    assert inner.norm.weight.tolist() == [2.0] * 4
    assert inner.norm.weight.data_ptr() == address


def test_nothing_is_swapped_into_a_drafter_whose_update_did_not_end(swapper: Swapper, inner: Any, tmp_path: Path) -> None:
    """The copy did nothing, and the engine told that it ran the version."""
    staged(swapper, tmp_path)
    begin_update(inner)
    for refused in (
        lambda: swapper.apply("v2"),
        lambda: swapper.stage([("v3", str(tmp_path), "")]),
        lambda: swapper.overwrite({"norm.weight": torch.zeros(4)}),
    ):
        with pytest.raises(SwapError, match="through vLLM's own endpoint is under way, or failed"):
            refused()
    assert swapper.stage([]) == "", "what is held is freed nevertheless"
    assert swapper.staged("v2") == "version v2 was never staged"


def test_what_is_asked_for_while_another_is_still_read_is_staged(
    swapper: Swapper, inner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a short sleep of the engine the same version was asked for again, refused, and counted as a failure of its own."""
    go_on, load = threading.Event(), swap.load_file

    def slow(file: Path) -> Any:
        assert go_on.wait(60)
        return load(file)

    monkeypatch.setattr(swap, "load_file", slow)
    save_file({"norm.weight": torch.full((4,), 2.0)}, tmp_path / "model.safetensors")
    assert swapper.stage([("v2", str(tmp_path), "")]) == "staging"
    assert swapper.stage([("v2", str(tmp_path), "")]) == "staging"
    assert swapper.stage([]) == ""
    assert swapper.stage([("v3", str(tmp_path), "")]) == "staging"
    go_on.set()
    wait_for(lambda: swapper.staged("v3") == "", "the staged weights")
    assert swapper.staged("v2") == "version v2 was never staged"
    swapper.apply("v3")
    assert inner.norm.weight.tolist() == [2.0] * 4


def test_a_tensor_without_values_is_refused(swapper: Swapper, inner: Any) -> None:
    with pytest.raises(SwapError, match=r"norm\.weight is on the device `meta`"):
        swapper.part_of("norm.weight", torch.zeros(4, device="meta"))
    assert inner.norm.weight.tolist() == [1.0] * 4


def test_a_checksum_ends_before_vllm_falls_asleep(swapper: Swapper) -> None:
    swapper.begin_checksum()
    swapper.checksum(0)
    swapper.rest(True)
    with pytest.raises(RuntimeError, match="no checksum is under way"):
        swapper.checksum(-1)
