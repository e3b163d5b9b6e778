"""Attention that tree rows can't have, refused before anything is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.trees.tree_layers import TreeLayers


class Attention:
    """As vLLM's, of a backend that honed knows."""

    head_size = 64

    def __init__(self, *, writes_cache: bool = False, **impl: Any) -> None:
        self.attn_backend = SimpleNamespace(get_name=lambda: "TRITON_ATTN", forward_includes_kv_cache_update=writes_cache)
        self.impl = SimpleNamespace(do_kv_cache_update=lambda *_: pytest.fail("something was written"), **impl)


@pytest.mark.fault("attention of trees by layers that attend otherwise")
@pytest.mark.parametrize(
    ("impl", "said"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "its cache is quantised"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "its cache is quantised"),
        ({"chunk_lookback": 0, "sliding_window": (8191, 0)}, "its window is of aligned chunks"),
        ({"sliding_window": (7, 0)}, "its window of 8 tokens is shorter than a tree is deep"),
        ({"alibi_slopes": [1.0]}, "it has ALiBi"),
        ({"logits_soft_cap": 30.0}, "its scores are capped"),
        ({"kv_sharing_target_layer_name": "first"}, "its attention is of another kind"),
        ({"writes_cache": True}, "its attention writes the cache itself"),
    ],
)
def test_a_layer_that_tree_rows_cannot_have_is_refused(impl: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        TreeLayers({"layer": Attention(**impl)}, {"layer": 0}, lambda _: None, 31, None)
