"""Data kept for each request while it runs: a key that means nothing outside this boot, its labels, its temperature."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from honed.adapt.protocol.fields import MAX_TEMPERATURE
from honed.adapt.protocol.workloads import DEFAULT_WORKLOAD, MAX_LABEL_CHARS, WorkloadNames
from honed.attach.events.labels import WORKLOAD, Labels, read_labels


@dataclass(slots=True)
class Tracked:
    """A running request as the publisher's thread follows it."""

    key: int
    workload: str
    temperature: float
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output so far, by the logged steps."""


class RequestBook:
    """Running requests, each with one of a bounded set of workloads and a key.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.secret = secrets.token_bytes(16)
        self._monotonic = monotonic
        self._running: dict[str, str] = {}
        """Request id -> its workload."""
        self.workloads = WorkloadNames(is_in_use=lambda name: name in self._running.values())

    def add(
        self, request_id: str, sampling_params: Any, num_prompt_tokens: int = 0, adapter: str = ""
    ) -> tuple[Labels, Tracked]:
        """Add a request; return its labels, with a workload of a bounded set, and its entry for the log.

        Args:
            adapter: name of the LoRA adapter that answers it, which is its workload unless the client named one; "": none.
        """
        labels = read_labels(sampling_params)
        named = adapter[:MAX_LABEL_CHARS] if adapter and labels.workload == DEFAULT_WORKLOAD else labels.workload
        if (workload := self.workloads(named, self._monotonic())) != labels.workload:
            labels = replace(labels, workload=workload)
            if sampling_params is not None:  # the workers read the label here, for the samples
                sampling_params.extra_args = {**(sampling_params.extra_args or {}), WORKLOAD: workload}
        given = float(sampling_params.temperature) if sampling_params is not None else 0.0
        temperature = min(max(0.0, given), MAX_TEMPERATURE)  # in this order NaN, which vLLM takes, becomes 0
        self._running[request_id] = workload
        key = int.from_bytes(key_of(request_id, self.secret))
        return labels, Tracked(key, labels.workload, temperature, num_prompt_tokens, num_prompt_tokens)

    def __len__(self) -> int:
        return len(self._running)

    def remove(self, request_id: str) -> None:
        """Remove a finished request."""
        self._running.pop(request_id, None)


def key_of(request_id: str, secret: bytes) -> bytes:
    """8 bytes that stand for a request id: equal within a boot, meaningless outside it."""
    return hashlib.blake2b(request_id.encode(), digest_size=8, key=secret).digest()
