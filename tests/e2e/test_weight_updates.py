"""Other weights for a running engine that don't come from honed: through vLLM's own endpoints for reinforcement learning.

They are carried by a weight-transfer engine of this test's, since vLLM's own need a GPU; all the rest is vLLM's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.adapt.protocol.wire import FOREIGN_DRAFTER
from honed.attach.contract.model_files import content_crc
from honed.daemon.errors import ConflictError
from honed.daemon.views.views import engines
from honed.recalib.registry.weights_digest import weights_digests
from honed.recalib.samples.ring_reader import RingReader
from tests.e2e.engine import DRAFTER, TARGET, TestEngine, engine, held_out
from tests.e2e.logged import set_policy
from tests.e2e.swapping import perturbed_drafter, renamed_drafter, swap, wait_for, worker_of
from tests.e2e.test_engine_modes import late_daemon

pytestmark = pytest.mark.e2e
BACKEND = "files-of-a-test"


def register() -> None:
    """Have vLLM know a way for weights: as files."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine as Base
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        pass

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        path: str = ""

    class FilesTransfer(Base[InitInfo, UpdateInfo]):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            files = sorted(Path(update_info.path).glob("*.safetensors"))
            self.model.load_weights((name, tensor) for file in files for name, tensor in load_file(file).items())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FilesTransfer)


def send(running: TestEngine, start: str, checkpoint: Path) -> None:
    """As vLLM's server does when it is told to: start, the weights, finish."""
    running.llm.collective_rpc(start)
    running.llm.collective_rpc("update_weights", kwargs={"update_info": {"path": str(checkpoint)}})
    running.llm.collective_rpc("finish_weight_update")


def part_of(checkpoint: Path, folder: Path, names: str, **changed: torch.Tensor) -> Path:
    """A checkpoint of the tensors whose names hold a text, and of others beside."""
    tensors = {name: tensor for name, tensor in load_file(checkpoint / "model.safetensors").items() if names in name}
    folder.mkdir()
    save_file(tensors | changed, folder / "model.safetensors")
    return folder


def test_a_drafter_through_vllms_own_endpoint_drafts_as_after_honeds_swap(tmp_path: Path) -> None:
    """In place, all or nothing; also when it comes in part."""
    other = perturbed_drafter(tmp_path / "other")
    prompts = held_out(4, 200)
    register()
    with engine(tmp_path / "run", max_model_len=256, weight_transfer_config={"backend": BACKEND}) as running:

        def drafted() -> tuple[dict[str, int], list[list[int]]]:
            before = running.counters()
            answers = running.generate(prompts, temperature=0.0, max_tokens=24)
            after = running.counters()
            return {name: after[name] - before[name] for name in after}, answers

        send(running, "start_draft_weight_update", other)  # before anything else
        set_policy(running)
        sent = running.checksum(), drafted()
        assert swap(running, "stock", DRAFTER, takes_over=True).ok
        stock = running.checksum(), drafted()
        assert stock[1][0] != sent[1][0], "it drafts as the other one: this test shows nothing"
        assert swap(running, "other", other).ok
        assert (running.checksum(), drafted()) == sent
        assert swap(running, "stock", DRAFTER).ok

        inner = worker_of(running)._honed_side.runner.draft_model.model
        address = inner._fused_kv_weight.data_ptr()
        send(running, "start_draft_weight_update", renamed_drafter(other, tmp_path / "renamed"))
        assert (running.checksum(), drafted()) == sent
        assert inner._fused_kv_weight.data_ptr() == address, "captured graphs know no other"

        for text, changed in (
            ("has no", {"layers.7.odd": torch.zeros(2)}),
            ("is [3] in the checkpoint", {"norm.weight": torch.zeros(3)}),
        ):
            wrong = part_of(DRAFTER, tmp_path / text[:3], "layers.", **changed)
            with pytest.raises(Exception, match=re.escape(text)):
                send(running, "start_draft_weight_update", wrong)
        assert (running.checksum(), drafted()) == sent

        for names in ("layers.1.", "layers.0.", "layers.2.", "norm", "fc"):
            assert running.checksum() != stock[0]
            send(running, "start_draft_weight_update", part_of(DRAFTER, tmp_path / names, names))
        assert (running.checksum(), drafted()) == stock
        assert running.honed.errors.count == 0


def test_a_drafter_that_somebody_else_brought_is_left_alone_until_a_version_is_promoted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, other = tmp_path_factory.mktemp("d"), perturbed_drafter(tmp_path / "other")
    service = late_daemon(folder)
    prompts = held_out(4, 200)
    register()
    try:
        with engine(folder, max_model_len=256, weight_transfer_config={"backend": BACKEND}) as running:

            def seen(name: str) -> Any:
                return next(iter(engines(service)), {}).get(name)

            def answer() -> list[list[int]]:
                return running.generate(prompts, temperature=0.0, max_tokens=24)

            expected = answer()
            wait_for(lambda: seen("drafter_version"))
            version, weights = seen("drafter_version"), running.checksum()

            send(running, "start_draft_weight_update", other)
            assert running.checksum() in weights_digests(other / "model.safetensors")
            wait_for(lambda: seen("drafter_version") == FOREIGN_DRAFTER)
            labelled = worker_of(running)._honed_side.capturer
            assert labelled._drafter_version == FOREIGN_DRAFTER, "what is captured is of these weights"
            assert answer() == expected, "whoever drafts, the target's tokens are the target's"
            report = running.honed.commands._report
            refused = swap(running, version, DRAFTER)
            running.honed.commands._report = report
            assert (refused.ok, refused.detail) == (False, {"foreign": "1"})
            with service.lock:
                service.tick(service.monotonic())
                assert not service.swaps.versions, "the daemon wants to overwrite it"
                with pytest.raises(ConflictError, match="vLLM's own endpoint"):
                    service.checksums.verify(seen("engine_id"), reason="", actor="test")
                promoted = service.lifecycle.promote(version, reason="", actor="test", force=True)

            def is_over() -> bool:
                running.honed.before_schedule()  # an engine in this process has no thread of its own that is idle
                return promoted.is_finished

            wait_for(is_over)
            assert promoted.state == "succeeded", promoted.error
            wait_for(lambda: seen("drafter_version") == version)
            assert running.checksum() == weights
            assert labelled._drafter_version == version
            assert answer() == expected
            assert seen("target_updates") == 0
            side = worker_of(running)._honed_side
            assert side._target() == content_crc(str(TARGET))

            send(running, "start_weight_update", TARGET)
            running.llm.collective_rpc("reload_weights")
            wait_for(lambda: seen("target_updates") == 2)
            labelled.set_share(1.0, version)
            assert answer() == expected
            assert seen("drafter_version") == version
            assert running.checksum() == weights
            reader = RingReader(running.honed._settings.ring_path)
            reader.poll(0)
            assert reader.header is not None
            assert reader.header.target == content_crc(str(TARGET)), "earlier samples would be dropped"
            assert running.honed.errors.count == 0
    finally:
        service.stop()
