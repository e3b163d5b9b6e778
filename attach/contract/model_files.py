"""Where the files of an engine's models are."""

from __future__ import annotations

import os
from typing import Any


def draft_folder(vllm_config: Any) -> str:
    """Folder of the draft model's files; "" if it has none of its own.

    For ngram and other methods without weights vLLM sets the draft model's configuration to the target's. The layers of MTP are
    in the target's files.
    """
    draft_model = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft_model is None or str(draft_model.model) == str(vllm_config.model_config.model):
        return ""
    return folder_of(draft_model, vllm_config.load_config)


def folder_of(model_config: Any, load_config: Any) -> str:
    """Folder of a model's files, as an absolute path, since daemon and trainer have their own working directories.

    For a name on the Hugging Face hub: the snapshot in the cache that vLLM has loaded, or the name itself if there is none.
    """
    model = str(model_config.model)
    if os.path.isdir(model):
        return os.path.abspath(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        revision, folder = getattr(model_config, "revision", None), getattr(load_config, "download_dir", None)
        found = try_to_load_from_cache(model, "config.json", cache_dir=folder, revision=revision)
    except (ImportError, ValueError, OSError):  # ValueError: the hub can't have such a name
        return model
    return os.path.dirname(found) if isinstance(found, str) else model
