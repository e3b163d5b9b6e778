from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from honed.adapt.control.settings import ControllerSettings
from honed.adapt.protocol.attach_variables import VARIABLES
from honed.daemon.errors import SettingsError
from honed.daemon.settings.sections import Section, default_runtime_dir, default_state_dir
from honed.daemon.settings.settings import Settings, load
from honed.daemon.settings.variables import keys_of


def check_refusal(path: Path, toml: str, says: str) -> None:
    """Check that a settings file of this content is refused in one line that says so."""
    path.write_text(toml)
    with pytest.raises(SettingsError) as caught:
        load(path, env={})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_relative_folders_become_absolute_since_vllm_gets_paths_below_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "honed.toml").write_text('[paths]\nruntime_dir = "run"\n')
    for paths in (
        load(flags={"paths": {"state_dir": Path("state")}}, env={"HONED_RUNTIME_DIR": "run"}).paths,
        load(Path("honed.toml"), env={"HONED_STATE_DIR": "state"}).paths,
    ):
        assert (paths.registry, paths.runtime_dir) == (tmp_path / "state" / "registry", tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_state_dir({"XDG_STATE_HOME": "."}) == default_runtime_dir({"XDG_RUNTIME_DIR": "."}) == tmp_path / "honed"


def test_variables_of_the_side_inside_vllm_are_let_be() -> None:
    load(env=dict.fromkeys(VARIABLES, "1") | {"PATH": "/bin", "HONEDX": "1", "HONED_LOG_LEVEL": "debug"})


@pytest.mark.parametrize(
    "controller",
    [
        {"captured_lengths": [3, 7]},
        {"captured_lengths": [0, 3], "max_k": 3},
        {"captured_lengths": [30], "max_k": 7, "equal_lengths": "never"},
        {"captured_lengths": [30], "max_k": 7, "mode": "off"},
        {"captured_lengths": [3, 7], "static_k": 2},  # of mode "static" only
        {"captured_lengths": [3, 7], "mode": "static", "static_k": 0},
    ],
)
def test_captured_lengths_that_leave_one_to_choose_or_do_not_matter_are_taken(controller: dict[str, Any]) -> None:
    assert load(flags={"controller": controller}, env={}).controller_settings().captured_lengths


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"env": {"HONED_STORE__MAX_RAW_BITES": "1"}}, "BITES in the environment; did you mean HONED_STORE__MAX_RAW_BYTES?"),
        ({"env": {"HONED_STROE__MAX_RAW_BYTES": "1"}}, "STROE__MAX_RAW_BYTES in the environment; did you mean HONED_STORE__M"),
        ({"env": {"HONED_STORE_MAX_RAW_BYTES": "1"}}, "did you mean HONED_STORE__MAX_RAW_BYTES?"),
        ({"env": {"HONED_CONTROLLER__DRIFT__LOWGAP": "1"}}, "did you mean HONED_CONTROLLER__DRIFT__LOW_GAP?"),
        ({"env": {"HONED_STATEDIR": "/x"}}, "did you mean HONED_STATE_DIR?"),
        ({"env": {"HONED_LOG_LEVLE": "debug"}}, "HONED_LOG_LEVLE in the environment; did you mean HONED_LOG_LEVEL?"),
        ({"env": {"HONED_ENGINE_DI": "a"}}, "HONED_ENGINE_DI in the environment; did you mean HONED_ENGINE_ID?"),
        ({"env": {"HONED_CAPTURE_": "1"}}, "did you mean HONED_CAPTURE?"),
        ({"env": {"HONED_RING_BITES": "1"}}, "did you mean HONED_RING_BYTES?"),
        ({"flags": {"stor": {}}}, "unknown setting 'stor' in the flags; did you mean store"),
        ({"env": {"HONED_STORE__MAX_RAW_BYTES": "many"}}, "setting 'store.max_raw_bytes'"),
        ({"env": {"HONED_STORE__SYNCHRONOUS": "OFF"}}, "'FULL'"),
        ({"env": {"HONED_CONTROLLER__MOED": "off"}}, "did you mean HONED_CONTROLLER__MODE?"),
        ({"env": {"HONED_CONTROLLER__MODE": "fast"}}, "'controller.mode' is 'fast': must be one of goodput"),
        ({"env": {"HONED_CONTROLLER__MODE": "table"}}, 'settings [controller]: mode "table" needs a table'),
        (
            {"env": {"HONED_CONTROLLER__CAPTURED_LENGTHS": "[30]", "HONED_CONTROLLER__MAX_K": "7"}},
            "settings [controller]: captured_lengths begins at 30, and max_k is 7: "
            "nothing would ever be drafted; capture graphs",
        ),
        ({"env": {"HONED_CONTROLLER__CAPTURED_LENGTHS": "[0]"}}, "captured_lengths has only 0: nothing would ever be drafted"),
        (
            {"flags": {"controller": {"captured_lengths": [3, 7], "mode": "static", "static_k": 2}}},
            "captured_lengths begins at 3, and static_k is 2",
        ),
        ({"env": {"HONED_CONTROLLER__TABLE": "4=5"}}, "HONED_CONTROLLER__TABLE='4=5' in the environment isn't JSON"),
        ({"env": {"HONED_CONTROLLER__TABLE": "[[4,-5]]"}}, "(from HONED_CONTROLLER__TABLE in the environment)"),
        (
            {"env": {"HONED_CONTROLLER__TABLE": "[[16,1],[4,5]]"}},
            "each once, not ((16, 1), (4, 5)) (from HONED_CONTROLLER__TABLE",
        ),
        (
            {"env": {"HONED_CONTROLLER__REQUEST_STRENGTH": "0.004"}},
            "settings [controller]: request_strength must be 0 or at least 0.1, not 0.004 (from HONED_CONTROLLER__REQUEST_STR",
        ),
        ({"env": {"HONED_CONTROLLER__TABLE": "4=5"}}, "write it like [[4, 5], [16, 2]]"),
        (
            {"env": {"HONED_TRAINER__YIELDS_TO": "chat-0"}},
            'isn\'t JSON; write it like ["chat-0"]',
        ),
        ({"env": {"HONED_TRAINER__BLENDS": "1,"}}, "write it like [0.5, 0.25]"),
        ({"env": {"HONED_GATE": "no"}}, "HONED_GATE='no' in the environment isn't JSON"),
        ({"env": {"HONED_STORE": '{"max_raw_bytes": -1}'}}, "must be at least 0 (from HONED_STORE in the environment)"),
        ({"env": {"HONED_STORE__COMMIT_INTERVAL_S": "nan"}}, "must be from 0 to 5"),
        ({"env": {"HONED_TRAINER__MIN_ROWS": "5000"}}, "settings [trainer]: min_rows (5000) must not be more than max_rows"),
        ({"env": {"HONED_TRAINER__BLENDS": "[]"}}, "blends is empty: at least one candidate must be judged"),
        ({"env": {"HONED_TRAINER__BLENDS": "[0.5, 3]"}}, "'trainer.blends' is [0.5, 3]: must be above 0 and at most 1"),
        ({"env": {"HONED_HTTP__METRICS_LISTEN": "127.0.0.1:99999"}}, "has port 99999; a port is from 0 to 65535"),
        ({"env": {"HONED_HTTP__METRICS_LISTEN": "0.0.0.0:9464"}}, "isn't a loopback address"),
        ({"env": {"HONED_HTTP__ADMIN_LISTEN": "0.0.0.0:9465"}}, "loopback only, with or without tokens"),
        (
            {"flags": {"http": {"metrics_listen": "127.0.0.1:9465", "admin_listen": "localhost:9465"}}},
            "settings [http]: metrics_listen and admin_listen both take port 9465 of 127.0.0.1: change one",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(**({"env": {}} | given))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.fault("values of another kind taken as settings")
@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("store.max_raw_bytes = false", "'store.max_raw_bytes' is False: must be at least 0, not true or false (from"),
        ("registry.keep_versions = true", "'registry.keep_versions' is True: must be at least 0, not true or false"),
        ("controller.static_k = true", "must be from -1 to 1_024, not true or false"),
        ("controller.capture_share = true", "must be from 0 to 1, not true or false"),
        ("controller.table = [[true, 5]]", "'controller.table' is [[True, 5]]: must not be true or false"),
        ("trainer.blends = [0.5, true]", "must be above 0 and at most 1, not true or false"),
        ("controller.drift.low_gap = false", "must be at least 0 and below 1, not true or false"),
        ('paths.state_dir = ""', "'paths.state_dir' is '': must not be empty; leave it out for the default"),
        ('http.read_token_file = ""', "'http.read_token_file' is '': must not be empty"),
        ('http.admin_listen = "127.0.0.1:9_465"', "isn't host:port"),
        ('http.admin_listen = "127.0.0.1:９４６５"', "isn't host:port"),
        ('http.metrics_listen = "127.0.0.1:+9464"', "isn't host:port"),
    ],
)
def test_a_value_of_another_kind_is_refused(tmp_path: Path, toml: str, says: str) -> None:
    check_refusal(tmp_path / "honed.toml", toml, says)


@pytest.mark.fault("a misspelt place to share that becomes a local folder")
@pytest.mark.parametrize(
    "url",
    ["s3:/bucket/honed", "s3//bucket/honed", "bucket/honed", "file:/mnt/honed", "file://mnt/honed", "s3://", "://x", " /mnt"],
)
def test_a_place_to_share_is_a_url_or_an_absolute_path(url: str) -> None:
    with pytest.raises(SettingsError, match=r"'registry.url' is .*: isn't a URL or an absolute path; write s3://bucket/honed"):
        load(env={"HONED_REGISTRY__URL": url})


@pytest.mark.parametrize(
    "url",
    ["", "/mnt/honed", "file:///mnt/honed", "s3://bucket", "s3://key:se/cret@bucket", "simplecache::s3://bucket", "memory://x"],
)
def test_places_to_share(url: str) -> None:
    assert load(env={"HONED_REGISTRY__URL": url}).registry.url == url


def test_a_wrong_place_to_share_is_shown_without_its_credentials() -> None:
    with pytest.raises(SettingsError, match="…@bucket") as caught:
        load(env={"HONED_REGISTRY__URL": "s3:/key:se/cret@bucket"})
    assert "cret" not in str(caught.value)


@pytest.mark.fault("values of another kind taken as settings")
@pytest.mark.parametrize(
    ("env", "says"),
    [
        (
            {"honed_stor__max_raw_bytes": "1"},
            "unknown setting honed_stor__max_raw_bytes in the environment; did you mean HONED_S",
        ),
        ({"honed_store__max_raw_bites": "1"}, "honed_store__max_raw_bites in the environment; did you mean HONED_STORE__MAX_R"),
        ({"honed_state_dir": "/a"}, "unknown setting honed_state_dir in the environment; did you mean HONED_STATE_DIR?"),
        ({"honed_trainer__blends": "1,"}, "honed_trainer__blends='1,' in the environment isn't JSON"),
        ({"HONED_PATHS__STATE_DIR": ""}, "must not be empty"),
        ({"HONED_STORE": '{"max_raw_bytes": false}'}, "must be at least 0, not true or false (from HONED_STORE in"),
    ],
)
def test_a_variable_that_would_not_count_is_refused(env: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(env=env)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_are_texts_of_any_case() -> None:
    env = {
        "honed_store__max_raw_bytes": "4_000",
        "Honed_Store__Max_Raw_Age_S": "1e3",
        "HONED_EVENTS__LOG_TOKEN_IDS": "true",
        "HONED_CONTROLLER__TABLE": "[[4, 5]]",
    }
    settings = load(env=env)
    assert (settings.store.max_raw_bytes, settings.store.max_raw_age_s, settings.events.log_token_ids) == (4000, 1000.0, True)
    assert settings.controller_settings().table == ((4, 5),)


@pytest.mark.fault("a library's own words about a wrong value")
@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("store = 5", "setting 'store' is 5: must be a group of keys with values (from settings file"),
        ("store.max_raw_bytes = 1.5", "must be a whole number, at least 0 (from settings file"),
        ("store.synchronous = 'X'", "'store.synchronous' is 'X': must be 'FULL' or 'EXTRA' ("),
        ("events.log_token_ids = 'maybe'", "must be true or false ("),
        ("http.read_token_file = 5", "must be a path ("),
        (
            "controller.captured_lengths = [1.5]",
            "'controller.captured_lengths' is 1.5: must be a whole number, from 0 to",
        ),
        ("controller.table = [[1]]", "'controller.table' is [1]: has too few items ("),
        ("trainer.yields_to = 'x'", "'trainer.yields_to' is 'x': must be a list ("),
    ],
)
def test_a_wrong_value_is_one_plain_sentence(tmp_path: Path, toml: str, says: str) -> None:
    check_refusal(tmp_path / "honed.toml", toml, says)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "honed.toml"
    path.write_text("[store\n")
    with pytest.raises(SettingsError, match=r"honed\.toml"):
        load(path, env={})


def test_all_mistakes_are_named_at_once_with_their_sources(tmp_path: Path) -> None:
    path = tmp_path / "honed.toml"
    path.write_text(
        '[gate]\nmax_loss = -3\n[controller]\ncapture_share = 7\nmode = "fast"\n[trainer]\nheld_out_share = 2\nnise = 1\n'
        "[controller.drift]\nlow_gap = 2\n"
    )
    env = {"HONED_CONFIG": str(path), "HONED_LOG_LEVLE": "x", "HONED_RECALIBRATION__TRAINER_LOST_S": "-1"}
    with pytest.raises(SettingsError) as caught:
        load(env=env)
    first, *lines = str(caught.value).splitlines()
    assert first == "8 settings are wrong:"
    for line in (
        "  unknown setting HONED_LOG_LEVLE in the environment; did you mean HONED_LOG_LEVEL?",
        f"  setting 'gate.max_loss' is -3: must be from 0 to 1 (from settings file {path})",
        f"  setting 'controller.capture_share' is 7: must be from 0 to 1 (from settings file {path})",
        f"  setting 'controller.drift.low_gap' is 2: must be at least 0 and below 1 (from settings file {path})",
        f"  setting 'trainer.held_out_share' is 2: must be above 0 and below 1 (from settings file {path})",
        f"  unknown setting 'trainer.nise' in settings file {path}; did you mean trainer.nice?",
        "  setting 'recalibration.trainer_lost_s' is '-1': must be above 0 and at most 1_000_000_000"
        " (from HONED_RECALIBRATION__TRAINER_LOST_S in the environment)",
    ):
        assert line in lines
    assert any(line.startswith("  setting 'controller.mode' is 'fast': must be one of goodput") for line in lines)


def test_the_source_that_counts_is_the_one_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "honed.toml"
    path.write_text("[gate]\nmax_loss = -3\n")
    with pytest.raises(SettingsError, match=r"is '9': .* \(from HONED_GATE__MAX_LOSS in the environment\)"):
        load(path, env={"HONED_GATE__MAX_LOSS": "9"})
    assert load(path, env={"HONED_GATE__MAX_LOSS": "0.5"}).gate_settings().max_loss == 0.5


def sections(model: type[BaseModel]) -> Iterator[type[Section]]:
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield field.annotation
            yield from sections(field.annotation)


@pytest.mark.parametrize("section", list(sections(Settings)), ids=lambda section: section.__name__)
def test_every_number_has_a_range_that_its_default_is_in(section: type[Section]) -> None:
    numbers = (int, float, tuple[int, ...], tuple[float, ...])
    assert set(section.RANGES) - {"mode"} == {n for n, f in section.model_fields.items() if f.annotation in numbers}
    for name, allowed in section.RANGES.items():
        assert allowed.holds(section.model_fields[name].get_default(call_default_factory=True)), name


def test_every_section_lists_its_keys() -> None:
    keys = keys_of(Settings)
    assert {key.partition(".")[0] for key in keys} == {
        "paths",
        "store",
        "events",
        "http",
        "registry",
        "recalibration",
        "controller",
        "canary",
        "trainer",
        "gate",
    }
    assert "controller.drift.low_gap" in keys


@pytest.mark.fault("a user without a home folder")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes a user that doesn't exist")
def test_a_user_without_a_home_gets_one_line(tmp_path: Path) -> None:
    code = "import os; os.setuid(61234); from honed.daemon.commands.main import main; main()"
    env = {name: value for name, value in os.environ.items() if name != "HOME" and not name.startswith(("HONED_", "XDG_"))}
    for command in ("status", "serve", "train"):
        words = [sys.executable, "-c", f"import honed.daemon.settings.settings, honed.daemon.commands.main; {code}", command]
        made = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert made.returncode == (2 if command == "status" else 78)
        line = "user 61234 has no home folder (no HOME, no entry in the user database): set HONED_STATE_DIR"
        assert made.stderr.startswith("honed: ")
        assert line in made.stderr
        assert "Traceback" not in made.stderr
