"""All settings of the daemon and their sources: defaults < honed.toml < HONED_* environment < flags.

`adapt` and `recalib` own their settings as frozen dataclasses; `sections` makes sections of them, this module nests those.
Any error, such as an unknown key or a value out of range, stops the start; all errors are reported at once.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from honed.adapt.control.settings import ControllerSettings
from honed.adapt.monitor.canary import CanarySettings
from honed.daemon.errors import SettingsError, refused
from honed.daemon.settings import variables
from honed.daemon.settings.sections import (
    CanarySection,
    ControllerSection,
    EventSettings,
    GateSection,
    HttpSettings,
    PathSettings,
    RecalibrationSettings,
    RegistrySettings,
    StoreSettings,
    TrainerSection,
    value_of,
)
from honed.daemon.settings.setting_errors import Given, explain
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.gate.gate import GateSettings


class Settings(BaseSettings):
    """All settings, in sections."""

    model_config = SettingsConfigDict(
        env_prefix="HONED_", env_nested_delimiter="__", extra="forbid", frozen=True, case_sensitive=False
    )

    paths: PathSettings = Field(default_factory=PathSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    registry: RegistrySettings = Field(default_factory=RegistrySettings)
    recalibration: RecalibrationSettings = Field(default_factory=RecalibrationSettings)
    controller: ControllerSection = Field(default_factory=ControllerSection)
    canary: CanarySection = Field(default_factory=CanarySection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    gate: GateSection = Field(default_factory=GateSection)

    @field_validator("controller")
    @classmethod
    def _leave_a_length(cls, section: ControllerSection) -> ControllerSection:
        if why := value_of(ControllerSettings, section).why_no_drafts():
            raise ValueError(why)
        return section

    def controller_settings(self) -> ControllerSettings:
        """adapt's own settings, from the section of the same name."""
        return value_of(ControllerSettings, self.controller)

    def canary_settings(self) -> CanarySettings:
        """Settings for trials of versions."""
        return value_of(CanarySettings, self.canary)

    def trainer_settings(self) -> TrainerSettings:
        """For the trainer process."""
        return value_of(TrainerSettings, self.trainer)

    def gate_settings(self) -> GateSettings:
        """For the trainer process."""
        return value_of(GateSettings, self.gate)


def load(config: Path | None = None, flags: Mapping[str, Any] | None = None, env: Mapping[str, str] = os.environ) -> Settings:
    """Read all sources into one value.

    Args:
        config: the TOML file; default: HONED_CONFIG's, else none.
        flags: nested like the sections; override all else.
        env: the environment.

    Raises:
        SettingsError: all errors, a line each, with the source and the allowed values.
        StartError: the file can't be read now.
    """
    path = config or (Path(env["HONED_CONFIG"]) if env.get("HONED_CONFIG") else None)
    given = Given(flags or {}, env, path, _read_toml(path) if path else {})
    not_json = variables.not_json(env, Settings)
    wrong = [*variables.unknown(env, Settings), *not_json.values()]
    # pydantic would stop at the first of these and name only its section.
    environment = {name.lower(): value for name, value in env.items() if name not in not_json}
    shorthand = {"paths": {field: env[name] for name, field in variables.PATHS.items() if env.get(name)}}

    class Sources(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            from_environment = EnvSettingsSource(settings_cls)
            from_environment.env_vars = environment
            return (
                init_settings,
                from_environment,
                InitSettingsSource(settings_cls, shorthand),
                InitSettingsSource(settings_cls, given.toml),
            )

    try:
        made = Sources(**given.flags)
    except ValidationError as error:
        raise SettingsError(_lines([*wrong, *explain(error, given, Settings)])) from error
    except ValueError as error:
        raise SettingsError(_lines([*wrong, f"settings: {error}"])) from error
    if wrong:
        raise SettingsError(_lines(wrong))
    return made


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise refused(f"settings file {path}: {error.strerror}", error) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path}: {error}") from error


def _lines(wrong: list[str]) -> str:
    """One line for one error; a list for several."""
    return wrong[0] if len(wrong) == 1 else "\n  ".join([f"{len(wrong)} settings are wrong:", *wrong])
