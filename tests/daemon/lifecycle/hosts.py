"""Hosts with a daemon and an engine each, which share versions at a URL."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from honed.daemon.service import Service
from honed.daemon.settings.settings import load
from honed.daemon.store.operations import Operation
from honed.recalib.registry.manifest import Manifest
from tests.daemon.conftest import flags_in, wait_for
from tests.daemon.fake_engine import ServingEngine
from tests.daemon.lifecycle.test_lifecycle import write_checkpoint


@dataclasses.dataclass
class Host:
    """One of them."""

    service: Service
    engine: ServingEngine
    target: Path

    def make(self, value: float) -> Manifest:
        """A version as the trainer would make it."""
        registry = self.service.drafters.registry
        parent = self.service.drafters.active
        return registry.create(
            lambda folder: write_checkpoint(folder, value), parent=parent, scope="kv-frozen", target_path=str(self.target)
        )

    def promote(self, version: str) -> None:
        with self.service.lock:
            operation = self.service.lifecycle.promote(version, reason="test", actor="test", force=True)
        self.engine.answer_swap()
        wait_for(lambda: operation.state == "succeeded", "the promotion")

    def try_out(self, version: str) -> None:
        """Let it take turns with the active version, as after a recalibration."""
        with self.service.lock:
            operation = self.service.operations.create("recalibrate", "canary", "test", "test", None, version=version)
            self.service.lifecycle.try_out(operation, version)

    def prove(self, version: str) -> None:
        """Let it take turns with the active version, and do so much better that it is promoted."""
        self.engine.acceptance = {self.service.drafters.active: 0.4, version: 0.7}
        self.try_out(version)
        self.engine.serve(lambda: self.service.drafters.active == version, f"the promotion of {version}")

    def adoptions(self) -> list[Operation]:
        with self.service.lock:
            return [operation for operation in self.service.operations.listing() if operation.kind == "adopt"]

    def shared(self) -> dict[str, Any]:
        with self.service.lock:
            found = self.service.sharing.view()
        assert found is not None
        return found


@contextmanager
def hosts(folder: Path, url: str) -> Iterator[Callable[..., Host]]:
    """Yield what makes a host of a name; all are stopped at the end."""
    with ExitStack() as stack:

        def make(name: str, **registry: Any) -> Host:
            root = folder / name
            for part in ("state", "run", "target"):
                (root / part).mkdir(parents=True, exist_ok=True)
            (root / "target" / "config.json").write_text(json.dumps({"hidden_size": 4}))
            save_file({"model.norm.weight": np.ones(4, np.float32)}, root / "target" / "model.safetensors")
            write_checkpoint(root / "drafter", 0.0)
            settings = load(None, flags_in(root) | {"registry": {"url": url, "poll_s": 0.5} | registry}, env={})
            service = Service(settings, daemon_id=name)
            service.start()
            stack.callback(service.stop)
            engine = ServingEngine(settings.paths.engine_socket, checkpoint=str(root / "drafter"))
            stack.callback(engine.close)
            engine.attach(target_path=str(root / "target"), capture_path="/ring")
            return Host(service, engine, root / "target")

        yield make
