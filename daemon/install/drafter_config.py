"""A drafter's config.json, wherever vLLM would find it, and what it says of a server's command."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from honed.adapt.models.trainable import drafts_from_anchor, is_dspark, is_eagle3, is_mtp, is_plain
from honed.recalib.config.drafter import EAGLE3_TOKENS
from honed.recalib.config.speculators import is_speculators
from honed.recalib.registry.durable import is_missing

HUB_TIMEOUT_S = 5.0
_CURE = "set the draft length with --draft-tokens"
_BLOCK_IN_NAME = re.compile(r"(?:-b|_block)(\d{1,3})$")
"""As drafters are named: Qwen3-8B-DFlash-b16, dspark_qwen3_8b_block7."""
_METHODS_BY_NAME = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a drafter's name or path, in vLLM's order. Source: vllm/config/speculative.py (0.32), `__post_init__`."""
_REFUSALS = {
    401: "the Hugging Face hub has no such name, or wants a token in HF_TOKEN",  # it doesn't tell which
    403: "the Hugging Face hub gives it to those with access only; HF_TOKEN may name one",
    404: "the Hugging Face hub has no such file",
}


def read(drafter: str) -> dict[str, Any]:
    """Read a drafter's config.json: of a folder, or else in the cache of the Hugging Face hub, or on the hub.

    `HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN` and `HF_ENDPOINT` apply.

    Raises:
        ValueError: it isn't found, can't be read, or is no JSON object. The message names the cure.
    """
    path = Path(drafter) / "config.json"
    if is_there := not is_missing(path):
        what = str(path)
    elif drafter.startswith((".", "/", "~")) or drafter.count("/") != 1 or os.path.isdir(drafter):
        raise ValueError(f"there is no {path}: {drafter!r} is misspelt, or not a folder on this machine; else {_CURE}")
    else:
        what = f"the config.json of {drafter!r}, which isn't a folder on this machine,"
    try:
        found = json.loads(path.read_bytes() if is_there else _of_hub(drafter))
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{what} can't be read ({error}): {_CURE}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} can't be read (it holds no JSON object): {_CURE}")
    return found


def _of_hub(name: str) -> bytes:
    """Read a config.json from the hub's cache or the hub. Raises LookupError, OSError or ValueError; the message says why."""
    try:
        from huggingface_hub import constants, get_session, get_token, hf_hub_url, try_to_load_from_cache
    except ImportError:
        raise LookupError("huggingface-hub isn't installed here; it is in vLLM's environment") from None
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).read_bytes()
    if constants.HF_HUB_OFFLINE:
        raise LookupError("it isn't in the Hugging Face hub's cache, and HF_HUB_OFFLINE is set")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = get_session().get(hf_hub_url(name, "config.json"), headers=headers, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # of httpx or requests, by the package's version
        raise LookupError(f"the Hugging Face hub can't be reached: {error}") from None
    if answer.status_code != 200:
        raise LookupError(_REFUSALS.get(answer.status_code, f"the Hugging Face hub answers {answer.status_code}"))
    return bytes(answer.content)


def method_by_name(drafter: str) -> str:
    """The method that vLLM takes by a drafter's name or path."""
    return next((method for part, method in _METHODS_BY_NAME.items() if part in drafter.lower()), "draft_model")


def method_of(drafter: str, raw: Mapping[str, Any] | None) -> str:
    """vLLM's method for a drafter, by its config.json, or by its name if that isn't known or tells nothing."""
    if raw is None:
        return next((name for name in ("eagle3", "dspark") if name in drafter.lower()), "dflash")
    if _is_eagle3(raw):
        return "eagle3"
    if is_mtp(raw):
        return "mtp"
    return "dspark" if _is_dspark(raw) else method_by_name(drafter) if is_plain(raw) else "dflash"


def draft_tokens_of(drafter: str, raw: Mapping[str, Any] | None, method: str = "") -> int:
    """Draft tokens of a round that a drafter was made for; 0 if neither its config.json nor its name tells.

    Args:
        method: vLLM's; "": by `method_of`.
    """
    if raw is None:
        found = _BLOCK_IN_NAME.search(drafter)
        return max(int(found[1]) - (method_of(drafter, None) != "dspark"), 0) if found else 0
    # As vllm-project/speculators writes them.
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    proposed = int(methods[0].get("speculative_tokens") or 0)
    if (method or method_of(drafter, raw)) == "eagle3":
        return proposed or EAGLE3_TOKENS
    block_size = raw.get("block_size") or (raw.get("dflash_config") or {}).get("block_size")
    anchor_drafts = raw.get("sample_from_anchor", False) if is_speculators(raw) else drafts_from_anchor(raw)
    if isinstance(block_size, int) and anchor_drafts:
        return block_size
    return block_size - 1 if isinstance(block_size, int) and block_size >= 2 else proposed


def _is_dspark(raw: Mapping[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "dspark" or is_dspark(raw)


def _is_eagle3(raw: Mapping[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "eagle3" or is_eagle3(raw)
