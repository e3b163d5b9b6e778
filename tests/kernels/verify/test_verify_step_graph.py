"""A whole verify step: build trees, attend, verify, move K/V, pack events; its twins here, and in one CUDA graph on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from honed.adapt.protocol.step_packet import StepPacket, unpack
from honed.adapt.trees.draft_tree import build_tree
from honed.kernels.cache.compact_kv import KvPlanes, compact_kv
from honed.kernels.events.layout import EventLayout
from honed.kernels.events.pack_events import EventBuffer, pack_events
from honed.kernels.trees.reference import PagedPrefix, unpack_bits
from honed.kernels.trees.top_candidates import top_candidates
from honed.kernels.trees.tree_attention import tree_attention
from honed.kernels.trees.tree_build import allocate, tree_build
from honed.kernels.verify.verify_tree import verify_tree
from tests.kernels.interpreting import needs_gpu

B, D, M, N, V = 5, 4, 3, 9, 60  # requests, depths, candidates, nodes, vocabulary
HEADS, KV_HEADS, SIZE, PAGE, PAGES = 4, 2, 16, 8, 4
ROWS = N + 1


@dataclass
class Inputs:
    """What changes from step to step; a graph reads it where it lies."""

    draft_logits: torch.Tensor  # [B, D, V]
    embeddings: torch.Tensor  # [V, (HEADS + 2 · KV_HEADS) · SIZE]: q, k and v of a token
    head: torch.Tensor  # [V, HEADS · SIZE]
    anchors: torch.Tensor  # [B]
    budgets: torch.Tensor  # [B]
    temperature: torch.Tensor  # [B]
    seeds: torch.Tensor  # [B]
    lengths: torch.Tensor  # [B] of the prefixes
    step: torch.Tensor  # [1]

    @classmethod
    def random(cls, seed: int, device: str) -> Inputs:
        make = torch.Generator().manual_seed(seed)
        made = cls(
            3.0 * torch.randn(B, D, V, generator=make),
            torch.randn(V, (HEADS + 2 * KV_HEADS) * SIZE, generator=make),
            torch.randn(V, HEADS * SIZE, generator=make),
            torch.randint(V, (B,), generator=make),
            torch.tensor([N, 0, 3, N, 1], dtype=torch.int32).roll(seed),
            torch.tensor([0.0, 1.0, 0.0, 0.7, 0.0]).roll(seed),
            torch.arange(B) + seed,
            torch.tensor([0, 5, 8, 13, PAGE * PAGES - ROWS], dtype=torch.int32).roll(seed),
            torch.tensor([seed]),
        )
        return cls(*(value.to(device) for value in vars(made).values()))


class Step:
    """Buffers at fixed addresses, and the ops on them."""

    def __init__(self, device: str) -> None:
        make = torch.Generator().manual_seed(99)
        caches = [torch.randn(B * PAGES, PAGE, KV_HEADS, SIZE, generator=make).to(device) for _ in range(2)]
        self.planes = KvPlanes.of(caches)
        self.table = torch.randperm(B * PAGES, generator=make).view(B, PAGES).int().to(device)
        self.trees = allocate(B, N, device)
        self.buffer = EventBuffer.of(EventLayout(B, N, max_depth=D, depths=D, candidates=M), device)
        self.starts = torch.arange(0, B * ROWS + 1, ROWS, dtype=torch.int32, device=device)
        self.live = torch.tensor([B], device=device)
        self.tokens: torch.Tensor
        self.log_probs: torch.Tensor
        self.logits: torch.Tensor
        self.slots: torch.Tensor

    def run(self, given: Inputs) -> None:
        """All that a step does on the device between the drafter's logits and the copy to the host."""
        self.log_probs, ids = top_candidates(given.draft_logits, M)
        tree_build(self.log_probs, ids, given.budgets, N, out=self.trees)
        trees = self.trees
        self.tokens = torch.cat((given.anchors[:, None].int(), trees.tokens), dim=1)  # [B, ROWS]
        rows = given.embeddings[self.tokens].flatten(0, 1)  # [B · ROWS, …]
        q, k, v = (part.unflatten(1, (-1, SIZE)) for part in rows.split([x * SIZE for x in (HEADS, KV_HEADS, KV_HEADS)], dim=1))
        node = torch.arange(ROWS, device=q.device)
        position = given.lengths[:, None] + node
        self.slots = self.table.gather(1, (position // PAGE).long()) * PAGE + position % PAGE  # [B, ROWS]
        for cache, values in zip(self.planes.tensors, (k, v), strict=True):
            cache.view(-1, KV_HEADS, SIZE)[self.slots.flatten()] = values
        prefix = PagedPrefix(*self.planes.tensors, self.table, given.lengths)
        out, _ = tree_attention(q, k, v, self.starts, trees.row_masks, ROWS, prefix=prefix)
        # A target that mostly thinks as its drafter does, so that walks get somewhere.
        depths = torch.nn.functional.pad(trees.depths, (1, 0))
        next_depth = depths.long().clamp(max=D - 1)[:, :, None].expand(-1, -1, V)
        self.logits = 0.15 * (out.flatten(1) @ given.head.T).view(B, ROWS, V) + given.draft_logits.gather(1, next_depth)
        verdict = verify_tree(
            self.logits, trees.tokens, trees.parents, trees.depths, given.temperature, given.seeds, given.lengths.long() + 1, D
        )
        compact_kv(self.planes, self.slots, verdict.path, verdict.num_accepted)
        pack_events(
            self.buffer,
            given.step,
            self.live,
            trees.num_nodes,
            verdict.num_accepted,
            verdict.bonus_token_ids,
            trees.tokens,
            parents=trees.parents,
            path=verdict.path,
            candidates=ids,
            log_probs=self.log_probs,
        )

    def packet(self) -> StepPacket:
        """What the host reads."""
        return unpack(self.buffer.data.cpu().numpy())


def test_the_trees_walked_are_adapts_and_the_path_is_theirs() -> None:
    step, given = Step("cpu"), Inputs.random(0, "cpu")
    step.run(given)
    packet = step.packet()
    assert packet.num_draft_tokens.tolist() == given.budgets.tolist()
    assert packet.parents is not None
    assert packet.path is not None
    for b in range(B):
        tree = build_tree(step.log_probs[b].numpy(), int(given.budgets[b]))
        assert packet.parents[b, : len(tree)].tolist() == tree.parent.tolist()
        accepted = int(packet.num_accepted[b])
        path = [0, *packet.path[b, :accepted].tolist()]
        assert [int(tree.parent[row - 1]) + 1 for row in path[1:]] == path[:-1]
        if given.temperature[b] == 0:  # every token emitted is the target's best at its node
            assert packet.emitted(b).tolist() == step.logits[b, path].argmax(-1).tolist()
        keys = step.planes.tensors[0].view(-1, KV_HEADS, SIZE)[step.slots[b, : accepted + 1]]
        own = given.embeddings[step.tokens[b, path]][:, HEADS * SIZE : (HEADS + KV_HEADS) * SIZE]
        assert torch.equal(keys.flatten(1), own)
    assert packet.num_accepted.max() > 1
    assert any((packet.path[b, :n] != range(1, n + 1)).any() for b, n in enumerate(packet.num_accepted))  # rows moved


def test_a_node_attends_to_what_a_chain_of_its_path_would() -> None:
    """So a tree's logits are those that the target gives along each branch."""
    step, given = Step("cpu"), Inputs.random(3, "cpu")
    step.run(given)
    attends = unpack_bits(step.trees.row_masks)
    for b in range(B):
        for row in range(int(step.trees.num_nodes[b]) + 1):
            above, path = row, [row]
            while above:
                above = int(step.trees.parents[b, above - 1]) + 1
                path.append(above)
            assert attends[b, row].nonzero()[:, 0].tolist() == sorted(path)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_is_the_twins_step_by_step() -> None:
    on_gpu, on_cpu, given = Step("cuda"), Step("cpu"), Inputs.random(0, "cuda")
    Step("cuda").run(given)  # Triton compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.run(given)
    for seed in range(4):
        fresh = Inputs.random(seed, "cpu")
        for place, value in zip(vars(given).values(), vars(fresh).values(), strict=True):
            place.copy_(value)
        graph.replay()
        on_cpu.run(fresh)
        made, wanted = on_gpu.packet(), on_cpu.packet()
        assert made.step == seed
        for name in ("num_draft_tokens", "num_accepted", "bonus_token_ids", "draft_tokens", "parents", "path", "candidates"):
            assert (getattr(made, name) == getattr(wanted, name)).all(), name
        for cache, twin in zip(on_gpu.planes.tensors, on_cpu.planes.tensors, strict=True):
            torch.testing.assert_close(cache.cpu(), twin)
