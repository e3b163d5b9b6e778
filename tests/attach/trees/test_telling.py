"""The rounds of a step's trees come to the host with its tokens, and no earlier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from honed.attach.events.step_log import TREES
from honed.attach.trees.telling import tell, to_host
from honed.attach.trees.tree_step import TreeStep, tree_step
from honed.attach.trees.walk import Walk, describe, walk
from tests.attach.trees.test_walk import DEPTHS, ROOM, random_trees


def walked_step() -> tuple[TreeStep, Walk]:
    """Three requests, and a walk down their trees."""
    trees, drawn = random_trees(3, 2), torch.zeros(3, ROOM + 1, dtype=torch.int64)
    drawn[:, 0] = trees.tokens[:, 0]
    step = tree_step(["a", "b", "c"], [0, 1, 2], [0, 6, 16], torch.tensor([4, 9, 2]), [5, 9, ROOM], trees)
    return step, walk(trees, step.num_verified, drawn, DEPTHS)


COPIES: list[str] = []


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU, and notes what waits for that."""

    is_cuda = True

    def cpu(self, *_: Any, **__: Any) -> Any:
        COPIES.append("cpu")
        return super().cpu()

    def tolist(self) -> Any:
        COPIES.append("tolist")
        return super().tolist()


def test_without_a_stream_for_it_nothing_is_copied_before_the_tokens_are_there() -> None:
    step, walked = walked_step()
    wanted = describe(step.trees.parents, step.trees.ranks, step.num_verified, walked.path)
    assert any(one.nodes for one in wanted)
    parents, ranks, counts, path = (
        part.as_subclass(OnDevice) for part in (step.trees.parents, step.trees.ranks, step.num_verified, walked.path)
    )
    trees = step.trees._replace(parents=parents, ranks=ranks)
    on_device: Any = SimpleNamespace(request_ids=step.request_ids, trees=trees, num_verified=counts)
    COPIES.clear()
    told = to_host(on_device, walked._replace(path=path), None)
    assert COPIES == []  # vLLM launches the draft pass first
    output = SimpleNamespace()
    tell(output, told, set(), False)
    assert getattr(output, TREES) == dict(zip("abc", wanted, strict=True))
    assert len(COPIES) == 4
