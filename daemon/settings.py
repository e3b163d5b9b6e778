"""All settings of the daemon and where each comes from: defaults < honed.toml < HONED_* environment < flags.

`adapt` and `recalib` own their settings as frozen dataclasses; this module nests them. A key that doesn't exist stops the
start with one line that names it and what was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from honed.adapt.canary import CanarySettings
from honed.adapt.controller import ControllerSettings
from honed.daemon.errors import SettingsError
from honed.recalib.gate import GateSettings
from honed.recalib.trainer_settings import TrainerSettings

NOT_SETTINGS = frozenset(
    {"HONED_CONFIG", "HONED_ENGINE_ID", "HONED_CAPTURE", "HONED_RING_BYTES", "HONED_QUEUE_BYTES", "HONED_FEATURES"}
)
"""HONED_* variables that other parts of honed read (the side inside vLLM, the command line)."""
ENGINE_PREFIXES = ("HONED_ENGINE_", "HONED_CAPTURE_", "HONED_RING_", "HONED_LOG_", "HONED_TEST_", "HONED_ATTACH_")
"""Prefixes reserved for the side inside vLLM; one environment file may serve both."""
PATH_VARIABLES = {"HONED_STATE_DIR": "state_dir", "HONED_RUNTIME_DIR": "runtime_dir"}

D = TypeVar("D")


def default_state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """/var/lib/honed for root, else the user's XDG state folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/honed")
    return Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "honed"


def default_runtime_dir(env: Mapping[str, str] = os.environ) -> Path:
    """/run/honed for root, else the user's XDG runtime folder, else a folder of the user in the temporary directory."""
    if os.geteuid() == 0:
        return Path("/run/honed")
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "honed"
    return Path(tempfile.gettempdir()) / f"honed-{os.geteuid()}"


class Section(BaseModel):
    """A group of settings; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PathSettings(Section):
    """Where the daemon keeps what must survive (state) and what must not (runtime)."""

    state_dir: Path = Field(default_factory=default_state_dir)
    runtime_dir: Path = Field(default_factory=default_runtime_dir)

    @property
    def database(self) -> Path:
        return self.state_dir / "honed.db"

    @property
    def registry(self) -> Path:
        return self.state_dir / "registry"

    @property
    def engine_socket(self) -> Path:
        return self.runtime_dir / "engine.sock"

    @property
    def admin_socket(self) -> Path:
        return self.runtime_dir / "admin.sock"


class StoreSettings(Section):
    """How much is kept, and for how long; 0 means without limit."""

    max_raw_bytes: Annotated[int, Field(ge=0)] = 4 << 30
    """Compressed raw batches kept; the oldest go first."""
    max_raw_age_s: Annotated[float, Field(ge=0)] = 7 * 86400.0
    max_age_1s_s: Annotated[float, Field(ge=0)] = 6 * 3600.0
    max_age_1min_s: Annotated[float, Field(ge=0)] = 30 * 86400.0
    max_age_1h_s: Annotated[float, Field(ge=0)] = 5 * 366 * 86400.0
    synchronous: Literal["FULL", "EXTRA"] = "FULL"
    """NORMAL isn't offered: in WAL mode it loses acknowledged commits when the power fails."""
    queue_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Received and not yet committed; beyond this batches stay with their engines, unacknowledged."""
    commit_interval_s: Annotated[float, Field(ge=0, le=5)] = 0.05
    """How long the writer gathers batches for one commit."""


class EventSettings(Section):
    """The socket that engines and trainers connect to."""

    max_frame_bytes: Annotated[int, Field(ge=1 << 16)] = 64 << 20
    engine_lost_s: Annotated[float, Field(gt=0)] = 5.0
    """Silence after which an engine counts as disconnected."""
    log_token_ids: bool = False
    """Ask engines to log token ids. They are prompts in disguise: off unless the operator says so."""
    max_workloads: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Distinct workload labels kept apart; those beyond are counted as "other"."""


class HttpSettings(Section):
    """The read-only listener and limits of the admin API."""

    metrics_listen: str = "127.0.0.1:9464"
    """host:port of /metrics, /healthz, /readyz; "" for none. Only loopback addresses."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 << 10
    mutations_per_minute: Annotated[int, Field(ge=1)] = 120


class RecalibrationSettings(Section):
    """When a drafter is retrained without being asked, and how long each part may take."""

    automatic: bool = True
    """Recalibrate when a workload's acceptance drifts."""
    min_interval_s: Annotated[float, Field(ge=0)] = 900.0
    """Between the end of one recalibration and the automatic start of the next."""
    max_seconds: Annotated[float, Field(gt=0)] = 600.0
    scope: Literal["kv-frozen", "full"] = "kv-frozen"
    grace_s: Annotated[float, Field(gt=0)] = 120.0
    """Beyond `max_seconds`, for gating and writing, before the operation is given up."""
    trainer_lost_s: Annotated[float, Field(gt=0)] = 30.0
    swap_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    collect_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are captured while a recalibration is under way."""
    watch_max_s: Annotated[float, Field(gt=0)] = 3600.0
    """A version that nothing was found against for so long stays."""


def section_of(settings_class: type[Any]) -> type[Section]:
    """Make a section out of a frozen dataclass: same fields, same defaults, unknown keys refused, nested ones alike."""
    hints = get_type_hints(settings_class)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(settings_class):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            nested = section_of(kind)  # type: ignore[arg-type]
            fields[field.name] = (nested, Field(default_factory=nested))
        elif field.default_factory is not dataclasses.MISSING:
            fields[field.name] = (kind, Field(default_factory=field.default_factory))
        else:
            fields[field.name] = (kind, ... if field.default is dataclasses.MISSING else field.default)
    return create_model(settings_class.__name__, __base__=Section, __doc__=settings_class.__doc__, **fields)


def value_of(settings_class: type[D], section: Section) -> D:
    """The dataclass that a section was made of, with the section's values."""
    hints = get_type_hints(settings_class)
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return settings_class(**{n: value_of(hints[n], v) if isinstance(v, Section) else v for n, v in fields.items()})


if TYPE_CHECKING:  # made at run time, so a type checker only knows what they have in common
    class ControllerSection(Section): ...

    class WatchSection(Section): ...

    class TrainerSection(Section): ...

    class GateSection(Section): ...
else:
    ControllerSection, WatchSection = section_of(ControllerSettings), section_of(CanarySettings)
    TrainerSection, GateSection = section_of(TrainerSettings), section_of(GateSettings)


class Settings(BaseSettings):
    """Everything that can be set, in sections."""

    model_config = SettingsConfigDict(
        env_prefix="HONED_", env_nested_delimiter="__", extra="forbid", frozen=True, case_sensitive=False
    )

    paths: PathSettings = Field(default_factory=PathSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    recalibration: RecalibrationSettings = Field(default_factory=RecalibrationSettings)
    controller: ControllerSection = Field(default_factory=ControllerSection)
    watch: WatchSection = Field(default_factory=WatchSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    gate: GateSection = Field(default_factory=GateSection)

    def controller_settings(self) -> ControllerSettings:
        """adapt's own settings value, out of the section of the same name."""
        return value_of(ControllerSettings, self.controller)

    def watch_settings(self) -> CanarySettings:
        """How a fresh version is watched."""
        return value_of(CanarySettings, self.watch)

    def trainer_settings(self) -> TrainerSettings:
        """For the trainer process."""
        return value_of(TrainerSettings, self.trainer)

    def gate_settings(self) -> GateSettings:
        """For the trainer process."""
        return value_of(GateSettings, self.gate)


def load(
    config: Path | None = None, flags: Mapping[str, Any] | None = None, env: Mapping[str, str] = os.environ
) -> Settings:
    """Read all sources into one value.

    Args:
        config: the TOML file; default: what HONED_CONFIG names, else none.
        flags: nested like the sections, strongest of all.
        env: the environment.

    Raises:
        SettingsError: one line naming the first offending key, with near matches.
    """
    path = config or (Path(env["HONED_CONFIG"]) if env.get("HONED_CONFIG") else None)
    toml = _read_toml(path) if path else {}
    _check_environment(env)
    shorthand = {"paths": {field: env[name] for name, field in PATH_VARIABLES.items() if env.get(name)}}

    class Sources(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            environment = EnvSettingsSource(settings_cls)
            environment.env_vars = {name.lower(): value for name, value in env.items()}
            return (
                init_settings,
                environment,
                InitSettingsSource(settings_cls, shorthand),
                InitSettingsSource(settings_cls, toml),
            )

    try:
        return Sources(**(flags or {}))
    except ValidationError as error:
        raise SettingsError(_explain(error, path)) from error
    except ValueError as error:
        raise SettingsError(f"settings: {error}") from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path}: {error}") from error


def _check_environment(env: Mapping[str, str]) -> None:
    """pydantic-settings ignores environment names of no section; a typo there must not pass silently either."""
    sections = tuple(f"HONED_{name.upper()}" for name in Settings.model_fields)
    for name in sorted(env):
        if not name.startswith("HONED_") or name in NOT_SETTINGS or name in PATH_VARIABLES:
            continue
        if name.startswith(ENGINE_PREFIXES) or name.partition("__")[0] in sections:
            continue
        near = difflib.get_close_matches(name, [*PATH_VARIABLES, *sorted(NOT_SETTINGS), *_environment_names()], n=3)
        raise SettingsError(f"unknown setting {name} in the environment{_did_you_mean(near)}")


def _environment_names() -> list[str]:
    return ["HONED_" + key.upper().replace(".", "__") for key in all_keys()]


def all_keys() -> list[str]:
    """Every setting as "section.name"."""
    keys = []
    for section, field in Settings.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            keys += [f"{section}.{name}" for name in model.model_fields]
    return keys


def _explain(error: ValidationError, path: Path | None) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        candidates = all_keys() if "." in key else [*Settings.model_fields, *all_keys()]
        return f"unknown setting {key!r}{_did_you_mean(difflib.get_close_matches(key, candidates, n=3, cutoff=0.6))}"
    where = f" (settings file {path}, environment or flags)" if path else ""
    return f"setting {key!r}: {first['msg']}, got {first['input']!r}{where}"


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""
