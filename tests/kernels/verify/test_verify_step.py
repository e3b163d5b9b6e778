"""The ops of a verify round one after the other: walk the tree, move its K/V rows, pack the events, read them on the host."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from honed.adapt.protocol.step_packet import unpack
from honed.kernels.cache.compact_kv import KvPlanes, compact_kv
from honed.kernels.cache.gather_kv import gather_kv
from honed.kernels.cache.reference import PagedPlane
from honed.kernels.events.layout import EventLayout
from honed.kernels.events.pack_events import EventBuffer, pack_events
from honed.kernels.verify.verify_tree import TreeVerdict, verify_tree
from tests.kernels.interpreting import needs_gpu

NUM, NODES, VOCAB, DEPTH, KV_BLOCK = 5, 7, 300, 4, 16


@dataclass
class Step:
    """Five requests with the same tree; a K/V row holds its number and its request's."""

    logits: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    planes: KvPlanes
    table: torch.Tensor
    buffer: EventBuffer
    out: TreeVerdict
    rows: torch.Tensor

    @classmethod
    def on(cls, device: str) -> Step:
        make = torch.Generator().manual_seed(9)
        tokens = torch.arange(NODES) + 10 * torch.arange(NUM)[:, None]
        parents = torch.tensor([-1, -1, 0, 1, 1, 3, 5]).expand(NUM, NODES)
        depths = torch.tensor([1, 1, 2, 2, 2, 3, 4]).expand(NUM, NODES)
        logits = torch.randn(NUM, NODES + 1, VOCAB, generator=make)
        for node in (1, 3, 5, 6):
            logits[torch.arange(NUM), parents[:, node] + 1, tokens[:, node]] += 9.0
        names = (torch.arange(NUM)[:, None] * 100 + torch.arange(KV_BLOCK)).float()
        rows = names[..., None, None].expand(NUM, KV_BLOCK, 2, 4).to(device)
        planes = [rows + 1000.0 * i for i in range(4)]
        shapes = ((NUM,), (NUM, DEPTH), (NUM, DEPTH + 1), (NUM,))
        return cls(
            logits.to(device),
            tokens.to(device),
            parents.to(device),
            depths.to(device),
            KvPlanes.of(planes),
            torch.arange(NUM, device=device)[:, None],
            EventBuffer.of(EventLayout(NUM, NODES, max_depth=DEPTH), device),
            TreeVerdict(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)),
            torch.zeros(NUM * (DEPTH + 1), 2, 4, device=device),
        )

    def inputs(self) -> list[torch.Tensor]:
        """Temperatures, seeds, positions, slots, number of drafts, step, live requests, starts, row starts."""
        device = self.logits.device
        return [
            torch.tensor([0.0, 1.0, 0.7, 1.0, 0.0], device=device),
            torch.arange(NUM, device=device),
            torch.arange(NUM, device=device) + 50,
            torch.arange(NUM, device=device)[:, None] * KV_BLOCK + 3 + torch.arange(NODES + 1, device=device),
            torch.full((NUM,), NODES, device=device),
            torch.tensor([77], device=device),
            torch.tensor([NUM], device=device),
            torch.full((NUM,), 3, device=device),
            torch.arange(NUM + 1, device=device) * (DEPTH + 1),
        ]

    def run(self, inputs: list[torch.Tensor]) -> None:
        temperature, seeds, positions, slots, lengths, step, live, starts, row_starts = inputs
        out = self.out
        verify_tree(self.logits, self.tokens, self.parents, self.depths, temperature, seeds, positions, DEPTH, out=out)
        compact_kv(self.planes, slots, out.path, out.num_accepted)
        gather_kv(PagedPlane(self.planes.tensors[1]), self.table, starts, row_starts, self.rows, DEPTH + 1)
        pack_events(
            self.buffer,
            step,
            live,
            lengths,
            out.num_accepted,
            out.bonus_token_ids,
            self.tokens,
            parents=self.parents,
            path=out.path,
        )

    def check(self) -> None:
        """K/V rows after the anchor's are those of the path, and the host reads what the walk emitted."""
        packet = unpack(self.buffer.data.cpu().numpy())
        assert (len(packet), packet.step) == (NUM, 77)
        assert packet.num_accepted[0] == packet.num_accepted[4] == DEPTH
        rows = self.rows.view(NUM, DEPTH + 1, 8).cpu()
        for b in range(NUM):
            accepted = int(self.out.num_accepted[b])
            assert packet.emitted(b).tolist() == self.out.tokens[b, : accepted + 1].tolist()
            wanted = [0, *self.out.path[b, :accepted].tolist()]
            assert rows[b, : accepted + 1].tolist() == [[1000.0 + 100 * b + 3 + row] * 8 for row in wanted]


def test_a_step_of_trees() -> None:
    step = Step.on("cpu")
    step.run(step.inputs())
    step.check()


@pytest.mark.gpu
@needs_gpu
def test_a_step_of_trees_in_a_cuda_graph() -> None:
    compiled, step = Step.on("cuda"), Step.on("cuda")
    compiled.run(compiled.inputs())  # Triton compiles outside the capture
    inputs = step.inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(inputs)
    graph.replay()
    step.check()
