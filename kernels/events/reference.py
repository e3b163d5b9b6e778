"""Plain PyTorch twin of `pack_events`.

Letters: B = requests, K = draft tokens, P = path, D = depths, m = candidates.
"""

from __future__ import annotations

import torch

from honed.kernels.events.layout import EventLayout


def pack_events(
    data: torch.Tensor,  # [size_bytes] uint8
    layout: EventLayout,
    step: torch.Tensor,  # [1] int64
    num_requests: torch.Tensor,  # [1]
    num_draft_tokens: torch.Tensor,  # [B]
    num_accepted: torch.Tensor,  # [B]
    bonus_token_ids: torch.Tensor,  # [B]
    draft_tokens: torch.Tensor,  # [B, K]
    parents: torch.Tensor | None,  # [B, K]
    path: torch.Tensor | None,  # [B, P]
    candidates: torch.Tensor | None,  # [B, D, m]
    log_probs: torch.Tensor | None,  # [B, D, m]
) -> None:
    """Fill the columns of kernels/events/layout.py, and the header's number of requests and step."""
    words = data.view(torch.int32)
    words[8] = num_requests.reshape(()).clamp(0, layout.num_requests)
    low_high = step.reshape(1).view(torch.int32)
    words[9], words[10] = low_high[0], low_high[1]
    is_draft = torch.arange(layout.num_draft_tokens, device=data.device) < num_draft_tokens[:, None]
    parts = (
        num_draft_tokens.to(torch.int16),
        num_accepted.to(torch.int16),
        bonus_token_ids.to(torch.int32),
        torch.where(is_draft, draft_tokens, -1).to(torch.int32),
        None if parents is None else torch.where(is_draft, parents, -1).to(torch.int16),
        None if path is None else path.to(torch.int16),
        None if candidates is None else candidates.to(torch.int32),
        None if log_probs is None else log_probs.to(torch.float16),
    )
    for offset, size, part in zip(layout.offsets, layout.columns, parts, strict=True):
        if size:
            assert part is not None
            data[offset : offset + size] = part.contiguous().view(-1).view(torch.uint8)
