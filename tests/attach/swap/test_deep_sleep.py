"""A drafter is whole after a sleep in which vLLM threw its weights away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from honed.attach.swap.deep_sleep import keep_through_sleep


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(2, 8, bias=False)


class Drafter(nn.Module):
    """Has the target's head, and an embedding and a table of its own."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed_tokens, self.layer, self.lm_head = nn.Embedding(8, 2), nn.Linear(2, 2), target.lm_head
        self.draft_id_to_target_id = nn.Parameter(torch.arange(8), requires_grad=False)


class Worker:
    """A worker whose device gives back zeros, as soon as the weights' memory is there again."""

    def __init__(self, drafter: Drafter) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: drafter.lm_head)
        self._drafter = drafter
        self.levels: list[int] = []

    def sleep(self, level: int = 1) -> None:
        self.levels.append(level)
        if level > 1:
            for parameter in self._drafter.parameters():
                parameter.data.zero_()

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


@pytest.fixture
def noted() -> list[str]:
    return []


@pytest.fixture
def drafter() -> Drafter:
    return Drafter(Target())


@pytest.fixture
def worker(drafter: Drafter, noted: list[str]) -> Worker:
    made = Worker(drafter)
    qkv = drafter.layer.weight.data  # a view of it, as of a stack
    keep_through_sleep(made, drafter, lambda: [qkv[:1], qkv[1:], drafter.layer.bias.data], noted.append)
    return made


def test_what_no_swap_brings_back_is_there_again(worker: Worker, drafter: Drafter, noted: list[str]) -> None:
    embedding = drafter.embed_tokens.weight.data.clone()
    worker.sleep(level=2)
    assert not drafter.embed_tokens.weight.any()
    worker.wake_up(tags=["kv_cache"])
    assert not drafter.embed_tokens.weight.any(), "the weights' memory isn't there yet"
    worker.wake_up(tags=["weights"])
    assert torch.equal(drafter.embed_tokens.weight, embedding)
    assert drafter.draft_id_to_target_id.tolist() == list(range(8))
    assert not drafter.lm_head.weight.any(), "vLLM is told to load the target's"
    assert not drafter.layer.weight.any(), "a swap sets it"
    assert noted == []


def test_what_comes_after_the_wake_up_stays(worker: Worker, drafter: Drafter) -> None:
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    drafter.embed_tokens.weight.data.fill_(3.0)
    worker.wake_up(tags=["kv_cache"])
    worker.sleep(level=1)
    worker.wake_up()
    assert worker.levels == [2, 1]
    assert (drafter.embed_tokens.weight == 3.0).all()


def test_vllm_sleeps_and_wakes_up_though_nothing_can_be_kept(worker: Worker, noted: list[str]) -> None:
    del worker.model_runner.get_model
    worker.sleep(level=2)
    worker.wake_up()
    assert worker.levels == [2]
    assert noted == ["keeping the drafter's own parameters in vLLM's sleep"]
