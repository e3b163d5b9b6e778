from __future__ import annotations

from contextlib import closing

from tests.daemon.conftest import wait_for
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import ServingEngine
from tests.daemon.lifecycle.test_lifecycle import Stage, stage, write_checkpoint  # noqa: F401 (a fixture, used by name)

ENGINE = "engine=engine-0 model_name=tiny"
TWO = {ENGINE, "engine=code-0 model_name=other"}


def roles(found: dict[str, float]) -> dict[str, str]:
    labels = [dict(part.split("=") for part in key.split()) for key in found]
    return {one["role"]: one["version"] for one in labels}


def test_a_promotion_and_the_way_back(stage: Stage) -> None:  # noqa: F811
    first, second = stage.first, stage.version(1.0)
    assert roles(scrape(stage.service)["honed_drafter_info"]) == {"active": first, "floor": first}
    answer = stage.client.post(f"/v1/drafters/{second}:promote", json={}).json()
    stage.engine.answer_swap()
    stage.wait_state(answer["operation_id"], "succeeded")
    found = scrape(stage.service)
    assert roles(found["honed_drafter_info"]) == {"active": second, "previous": first, "floor": first}
    assert found["honed_engine_drafter_info"] == {f"{ENGINE} version={second}": 1}
    assert found["honed_swaps_total"] == {"result=ok": 1, "result=turn": 0, "result=postponed": 0, "result=failed": 0}
    assert found["honed_promotions_total"] == {"reason=promote": 1, "reason=recalibrate": 0, "reason=adopt": 0}
    assert found["honed_swap_pause_seconds"] == {"": 0.0015}
    assert found["honed_canary_active"] == {"": 1}
    answer = stage.client.post("/v1/drafters:rollback", json={}).json()
    assert stage.finish(answer["operation_id"], rounds=0)["state"] == "succeeded"
    found = scrape(stage.service)
    assert roles(found["honed_drafter_info"]) == {"active": first, "floor": first}
    assert found["honed_rollbacks_total"] == {"reason=canary": 0, "reason=operator": 1}
    assert found["honed_canary_active"] == {"": 0}
    ended = {labels: value for labels, value in found["honed_operations_total"].items() if value}
    assert ended == {"kind=promote result=succeeded": 1, "kind=rollback result=succeeded": 1}
    assert found["honed_promotions_total"]["reason=promote"] == 1


def test_a_swap_that_an_engine_refuses(stage: Stage) -> None:  # noqa: F811
    answer = stage.client.post(f"/v1/drafters/{stage.version(1.0)}:promote", json={})
    stage.engine.answer_swap(ok=False, error="no room")
    stage.wait_state(answer.json()["operation_id"], "failed")
    found = scrape(stage.service)
    assert found["honed_swaps_total"] == {"result=ok": 0, "result=turn": 0, "result=postponed": 0, "result=failed": 1}
    assert found["honed_promotions_total"]["reason=promote"] == 0
    assert found["honed_operations_total"]["kind=promote result=failed"] == 1


def test_weights_that_came_through_vllms_own_endpoints(stage: Stage) -> None:  # noqa: F811
    stage.engine.send_status(drafter_version="foreign", target_updates=2)
    wait_for(lambda: scrape(stage.service).get("honed_target_updates_total") == {ENGINE: 2}, "the status")
    found = scrape(stage.service)
    assert found["honed_engine_drafter_info"] == {f"{ENGINE} version=foreign": 1}
    assert found["honed_engine_fits_active"] == {ENGINE: 1}, "it should run the active version, and doesn't"


def test_the_active_version_fits_no_engine_of_another_model(stage: Stage) -> None:  # noqa: F811
    write_checkpoint(stage.folder / "other", 5.0)
    socket = stage.service.settings.paths.engine_socket
    with closing(ServingEngine(socket, checkpoint=str(stage.folder / "other"), engine_id="code-0")) as other:
        other.attach(target_path="/models/other", model_name="other")
        found = wait_for(lambda: (f := scrape(stage.service)).get("honed_engine_fits_active", {}).keys() >= TWO and f, "both")
        version = other.live_version
    assert found["honed_engine_fits_active"] == {ENGINE: 1, "engine=code-0 model_name=other": 0}
    assert found["honed_engine_drafter_info"][f"engine=code-0 model_name=other version={version}"] == 1
