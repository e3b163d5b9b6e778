"""Steps to pack, of chains and of trees."""

from __future__ import annotations

import torch

from honed.kernels.events.layout import EventLayout

LAYOUTS = [
    EventLayout(0, 3),
    EventLayout(1, 0),
    EventLayout(5, 3),
    EventLayout(4, 7, depths=3, candidates=5),
    EventLayout(3, 9, max_depth=4),
    EventLayout(6, 11, max_depth=5, depths=4, candidates=8),
]


def step_inputs(layout: EventLayout, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """What `pack_events` takes, in its order; the last request is padding."""
    room, drafts, longest = layout.num_requests, layout.num_draft_tokens, layout.max_depth
    make = torch.Generator().manual_seed(room + drafts)
    lengths = torch.randint(drafts + 1, (room,), generator=make)
    most = lengths.clamp(max=longest) if longest else lengths
    accepted = (torch.rand(room, generator=make) * (most + 1)).long()
    parents = torch.arange(-1, drafts - 1).expand(room, drafts)
    path = torch.where(torch.arange(longest) < accepted[:, None], torch.arange(1, longest + 1), -1)
    cells = (room, layout.depths, layout.candidates)
    log_probs = (-1e5 * torch.rand(cells, generator=make) ** 9).to(dtype)
    has_candidates = layout.depths * layout.candidates > 0
    return [
        torch.tensor([2**40 + 7]),
        torch.tensor([max(room - 1, 0)]),
        lengths,
        accepted.int(),
        torch.randint(150_000, (room,), generator=make),
        torch.randint(150_000, (room, drafts), generator=make),
        parents if longest else None,
        path if longest else None,
        torch.randint(150_000, cells, generator=make) if has_candidates else None,
        log_probs if has_candidates else None,
    ]
