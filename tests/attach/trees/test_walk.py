from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from honed.attach.trees.tree_step import tree_step
from honed.attach.trees.walk import describe, walk
from honed.kernels.trees.reference import DraftTrees, tree_build
from honed.kernels.verify import walk_tree
from tests.kernels.draft_tree import ROOT, build_tree

DEPTHS, CANDIDATES, ROOM = 4, 3, 12


def random_trees(count: int, seed: int) -> DraftTrees:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(count, DEPTHS, CANDIDATES, generator=generator).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.stack([torch.randperm(6, generator=generator)[:CANDIDATES] for _ in range(count * DEPTHS)])
    return tree_build(log_probs, ids.view(count, DEPTHS, CANDIDATES), torch.full((count,), ROOM), ROOM)


def walked_by_hand(trees: DraftTrees, b: int, num_nodes: int, drawn: list[int]) -> tuple[list[int], list[int]]:
    row, path, emitted = 0, list[int](), list[int]()
    while True:
        emitted.append(drawn[row])
        children = [
            n for n in range(num_nodes) if int(trees.parents[b, n]) == row - 1 and int(trees.tokens[b, n]) == drawn[row]
        ]
        if not children:
            return path, emitted
        row = children[0] + 1
        path.append(row)


def test_a_walk_goes_where_the_target_drew() -> None:
    generator, longest = torch.Generator().manual_seed(1), 0
    for seed in range(40):
        trees = random_trees(3, seed)
        num_nodes = torch.randint(1, ROOM + 1, (3,), generator=generator)
        drawn = torch.randint(0, 6, (3, ROOM + 1), generator=generator)
        found = walk(trees, num_nodes, drawn, DEPTHS)
        for b in range(3):
            path, emitted = walked_by_hand(trees, b, int(num_nodes[b]), drawn[b].tolist())
            assert [row for row in found.path[b].tolist() if row > 0] == path
            assert [token for token in found.emitted[b].tolist() if token >= 0] == emitted
            assert int(found.num_accepted[b]) == len(path)
            longest = max(longest, len(path))
    assert longest >= 3


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Asked(TorchDispatchMode):
    """Notes each operation of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **kwargs or {})


def test_on_a_gpu_a_walk_is_one_launch_however_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    trees, launches = random_trees(3, 0), list[Any]()
    num_nodes, drawn = torch.full((3,), ROOM), torch.zeros(3, ROOM + 1, dtype=torch.int64)
    made = walk(trees, num_nodes, drawn, 15)
    monkeypatch.setattr(walk_tree, "launch", lambda *given: launches.append(given) or tuple(made))
    on_device = drawn.as_subclass(OnDevice)
    with Asked() as asked:
        found = walk(trees, num_nodes, on_device, 15)
    assert found == made
    assert len(launches) == 1
    assert asked.names == []


def test_a_round_says_what_the_chain_alone_would_have_got() -> None:
    log_probs = [[math.log(p) for p in depth] for depth in ((0.6, 0.3), (0.7, 0.2), (0.5, 0.4))]
    tree = build_tree(torch.tensor(log_probs).numpy(), 7)
    chain = [node for node in range(len(tree)) if all(rank == 0 for rank in ranks_to(tree, node))]
    trees = DraftTrees(
        torch.tensor([[10 * int(d) + int(r) for d, r in zip(tree.depth, tree.rank, strict=True)]]),
        torch.tensor([tree.rank.tolist()]),
        torch.tensor([tree.parent.tolist()]),
        torch.tensor([tree.depth.tolist()]),
        torch.zeros(1, len(tree) + 1, 1, dtype=torch.int32),
        torch.tensor([len(tree)]),
    )
    step = tree_step(["r"], [0], [0], torch.tensor([5]), [len(tree)], trees)
    for first, second, kept in ((10, 20, 2), (10, 21, 1), (11, 20, 0)):
        drawn = torch.full((1, len(tree) + 1), 99)
        drawn[0, 0] = first
        for node in range(len(tree)):
            if int(trees.tokens[0, node]) == first and int(tree.parent[node]) == ROOT:
                drawn[0, node + 1] = second
        found = walk(trees, step.num_nodes, drawn, 3)
        (told,) = describe(trees.parents, trees.ranks, step.num_nodes, found.path)
        assert told.chain_tokens == len(chain)
        assert told.chain_accepted == min(kept, len(chain))
        assert [node + 1 for node in told.nodes] == [row for row in found.path[0].tolist() if row > 0]


def ranks_to(tree: object, node: int) -> list[int]:
    ranks = []
    while node != ROOT:
        ranks.append(int(tree.rank[node]))  # type: ignore[attr-defined]
        node = int(tree.parent[node])  # type: ignore[attr-defined]
    return ranks


def test_rows_of_a_step_are_the_anchors_and_their_nodes() -> None:
    trees = random_trees(2, 0)
    step = tree_step(["a", "b"], [3, 0], [10, 2], torch.tensor([40, 7]), [2, 4], trees)
    assert step.rows.tolist() == [10, 11, 12, 2, 3, 4, 5, 6]
    assert step.request.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert step.row_starts.tolist() == [0, 3, 8]
    assert step.max_rows == 5
    wanted = [0, *trees.depths[0, :2].tolist(), 0, *trees.depths[1, :4].tolist()]
    assert step.depths.tolist() == wanted
    slots = step.slots(torch.arange(100, 120))
    assert slots.tolist() == [[110, 111, 112, -1, -1], [102, 103, 104, 105, 106]]


def test_a_row_follows_its_path_and_what_leads_up_to_the_anchor() -> None:
    trees, taps = random_trees(2, 3), 4
    step = tree_step(["a", "b"], [0, 1], [4, 30], torch.tensor([9, 9]), [8, 12], trees)
    followed, count = step.followed(taps), len(step.rows)
    for row, (b, place) in enumerate(zip(step.request.tolist(), step.place.tolist(), strict=True)):
        path, start = list[int](), int(step.row_starts[b])
        while place:
            path.insert(0, start + place)
            place = int(trees.parents[b, place - 1]) + 1
        before = [count + b * (taps - 1) + column for column in range(taps - 2)]  # its last one is the anchor's own
        wanted = [*before, start, *path][-taps:]
        assert followed[row].tolist()[-len(wanted) :] == wanted
        assert path or len(wanted) == taps - 1
    assert int(step.depths.max()) >= taps - 1, "no path is long enough to leave the anchor behind"
