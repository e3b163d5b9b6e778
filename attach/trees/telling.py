"""What rounds say of their trees: copied beside the step's tokens, or after them, and told with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from honed.attach.events.step_log import TREES, TREES_ARE_OFF, UNWALKED
from honed.attach.trees.tree_step import TreeStep
from honed.attach.trees.walk import Walk, describe

Told = tuple[list[str], list[torch.Tensor]]
"""Requests, and what `describe` takes. Nothing is written to these tensors any more."""


def to_host(step: TreeStep, walked: Walk, side: Any) -> Told:
    """Copy it to the host without waiting, on the stream that carries the step's tokens.

    Args:
        side: None: nothing is copied yet, since drafts are still to be launched. `tell` copies when vLLM has the tokens.
    """
    wanted = [step.trees.parents, step.trees.ranks, step.num_verified, walked.path]
    if side is None or not walked.path.is_cuda:
        return step.request_ids, wanted
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for tensor in wanted:
            tensor.record_stream(side)
        return step.request_ids, [tensor.to("cpu", non_blocking=True) for tensor in wanted]


def tell(output: Any, told: Told | None, wanted: set[str], is_off: bool) -> None:
    """Note on vLLM's output of a step which rounds had trees, and whether there will be none any more.

    Args:
        wanted: requests whose drafts were nodes, or padding. Those that `told` lacks weren't verified as a tree.
    """
    if is_off:
        setattr(output, TREES_ARE_OFF, True)
    names, tensors = told or ([], [])
    if unwalked := wanted.difference(names):
        setattr(output, UNWALKED, unwalked.union(getattr(output, UNWALKED, ())))
    if told is not None:
        setattr(output, TREES, dict(zip(names, describe(*tensors), strict=True)))


def tell_later(output: Any, told: Told | None, wanted: set[str], is_off: bool, on_error: Callable[[str], None]) -> None:
    """Do it once the tokens of vLLM's asynchronous output have come."""
    get_output = output.get_output

    def get_output_with_trees() -> Any:
        found = get_output()
        try:
            tell(found, told, wanted, is_off)
        except Exception:
            on_error("telling of trees")
        return found

    output.get_output = get_output_with_trees
