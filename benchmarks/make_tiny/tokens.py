"""The tiny pair's tokenizer, byte-level BPE over both domains, and the corpus as token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from benchmarks.make_tiny.corpus import Document, Domain, Split

VOCAB_SIZE = 4096
END_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|mask|>"
END_TOKEN_ID, MASK_TOKEN_ID = 0, 1
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def train_tokenizer(documents: Iterable[Document]) -> Tokenizer:
    """Train byte-level BPE on the training split; ids 0 and 1 are the end of text and the drafter's mask."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents if d.split == "train"), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers and vLLM read them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "mask_token": MASK_TOKEN,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def token_stream(tokenizer: Tokenizer, documents: list[Document], domain: Domain, split: Split) -> Tensor:  # [T] int64
    """Concatenate documents of one domain and split in a fixed random order, each followed by the end token."""
    chosen = [d for d in documents if d.domain == domain and d.split == split]
    random.Random(0).shuffle(chosen)
    ids: list[int] = []
    for document in chosen:
        ids += [*tokenizer.encode(document.text).ids, END_TOKEN_ID]
    return torch.tensor(ids, dtype=torch.int64)
