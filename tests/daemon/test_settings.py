from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from honed.adapt.controller import ControllerSettings
from honed.daemon.errors import SettingsError
from honed.daemon.settings import all_keys, load


def test_without_anything_the_defaults_of_the_owners_count() -> None:
    settings = load(env={})
    assert settings.controller_settings() == ControllerSettings()
    assert settings.store.synchronous == "FULL"
    assert settings.http.metrics_listen == "127.0.0.1:9464"


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "honed.toml"
    path.write_text("[store]\nmax_raw_bytes = 1\nmax_raw_age_s = 1\nmax_age_1s_s = 1\n[controller.drift]\nlow_gap = 0.5\n")
    env = {"HONED_CONFIG": str(path), "HONED_STORE__MAX_RAW_AGE_S": "2", "HONED_STORE__MAX_AGE_1S_S": "2"}
    settings = load(flags={"store": {"max_age_1s_s": 3}}, env=env)
    assert (settings.store.max_raw_bytes, settings.store.max_raw_age_s, settings.store.max_age_1s_s) == (1, 2, 3)
    assert settings.controller_settings().drift.low_gap == 0.5


def test_the_short_names_of_the_paths_count_below_the_long_ones(tmp_path: Path) -> None:
    env = {"HONED_STATE_DIR": "/a", "HONED_RUNTIME_DIR": "/b", "HONED_PATHS__RUNTIME_DIR": "/c"}
    paths = load(env=env).paths
    assert (paths.state_dir, paths.runtime_dir) == (Path("/a"), Path("/c"))
    assert paths.engine_socket == Path("/c/engine.sock")


def test_variables_of_the_side_inside_vllm_are_let_be() -> None:
    names = ("ENGINE_ID", "CAPTURE", "RING_BYTES", "QUEUE_BYTES", "FEATURES")
    load(env={f"HONED_{name}": "1" for name in names} | {"PATH": "/bin", "HONEDX": "1"})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"env": {"HONED_STORE__MAX_RAW_BITES": "1"}}, "'store.max_raw_bites'; did you mean store.max_raw_bytes"),
        ({"env": {"HONED_STROE__MAX_RAW_BYTES": "1"}}, "HONED_STROE__MAX_RAW_BYTES in the environment; did you mean"),
        ({"env": {"HONED_STATEDIR": "/x"}}, "did you mean HONED_STATE_DIR"),
        ({"flags": {"stor": {}}}, "unknown setting 'stor'; did you mean store"),
        ({"env": {"HONED_STORE__MAX_RAW_BYTES": "many"}}, "setting 'store.max_raw_bytes'"),
        ({"env": {"HONED_STORE__SYNCHRONOUS": "OFF"}}, "'FULL'"),
        ({"env": {"HONED_CONTROLLER__MOED": "off"}}, "controller.mode"),
        ({"env": {"HONED_CONFIG": "/does/not/exist"}}, "No such file"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(**({"env": {}} | given))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "honed.toml"
    path.write_text("[store\n")
    with pytest.raises(SettingsError, match=r"honed\.toml"):
        load(path, env={})


def test_every_section_lists_its_keys() -> None:
    assert {key.partition(".")[0] for key in all_keys()} == {
        "paths", "store", "events", "http", "recalibration", "controller", "watch", "trainer", "gate",
    }  # fmt: skip
