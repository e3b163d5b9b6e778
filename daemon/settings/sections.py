"""The sections of the settings: the daemon's own, and those made from frozen dataclasses of other folders.

Unknown keys, values of another kind and numbers out of range are refused. `RANGES`, here and in the dataclasses, has each
number's range.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator, model_validator

from honed.adapt.control.settings import ControllerSettings
from honed.adapt.monitor.canary import CanarySettings
from honed.adapt.protocol.ranges import SECONDS, Range, Ranges
from honed.daemon.settings.listen import NOT_PROTECTED, check_address
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.gate.gate import GateSettings

D = TypeVar("D")
_SHARED_PLACE = re.compile(r"/|(file|local):///|([a-z][a-z0-9+.-]*::)*(?!file:|local:)[a-z][a-z0-9+.-]*://.", re.IGNORECASE)
"""How an absolute path or a URL begins; protocols may be chained (`simplecache::s3://…`)."""


def home() -> Path:
    """The user's home folder. Raises ValueError if nothing names it."""
    try:
        return Path.home()
    except RuntimeError as error:
        text = f"user {os.geteuid()} has no home folder (no HOME, no entry in the user database)"
        raise ValueError(f"{text}: set HONED_STATE_DIR or --state-dir to a folder of its own") from error


def default_state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """/var/lib/honed for root, else the user's XDG state folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/honed")
    return Path(env.get("XDG_STATE_HOME") or home() / ".local" / "state").absolute() / "honed"


def default_runtime_dir(env: Mapping[str, str] = os.environ) -> Path:
    """/run/honed for root, else the user's XDG runtime folder, else the user's folder in the temporary directory."""
    if os.geteuid() == 0:
        return Path("/run/honed")
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]).absolute() / "honed"
    return Path(tempfile.gettempdir()) / f"honed-{os.geteuid()}"


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    RANGES: ClassVar[Ranges] = {}
    OWNER: ClassVar[type[Any] | None] = None
    """The dataclass that it was made from."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would turn into something else: true would be 1, and "" the working directory."""
        kind, allowed = cls.model_fields[info.field_name or ""].annotation, cls.RANGES.get(info.field_name or "")
        if kind is not bool and _has_truth_value(value):
            raise ValueError(f"must be {allowed}, not true or false" if allowed else "must not be true or false")
        if value == "" and Path in (kind, *get_args(kind)):
            raise ValueError("must not be empty; leave it out for the default")
        return value

    @field_validator("*")
    @classmethod
    def _is_in_range(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = cls.RANGES.get(info.field_name or "")
        if allowed is not None and not allowed.holds(value):
            raise ValueError(f"must be {allowed}")
        return value

    @model_validator(mode="after")
    def _suits_its_owner(self) -> Self:
        """Check the owner's other rules at the start, such as those between two fields."""
        if self.OWNER is not None:
            value_of(self.OWNER, self)
        return self


def _has_truth_value(value: Any) -> bool:
    """Whether a value, or a part of a list, is true or false."""
    return any(map(_has_truth_value, value)) if isinstance(value, tuple | list) else isinstance(value, bool)


class PathSettings(Section):
    """Folders of the daemon: persistent (state) and temporary (runtime)."""

    state_dir: Path = Field(default_factory=default_state_dir)
    """Persistent data: the database and the registry of drafters."""
    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    """Temporary data: sockets, rings and flags. vLLM needs the same folder, as HONED_RUNTIME_DIR."""

    @field_validator("state_dir", "runtime_dir")
    @classmethod
    def _suits_any_process(cls, path: Path) -> Path:
        """Make it absolute: vLLM and the trainer get paths below it, and have their own working directories."""
        return path.absolute()

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
    """Limits of stored data by size and age; 0: no limit."""

    max_raw_bytes: int = 4 << 30
    """Size limit of compressed raw batches; the oldest are deleted first."""
    max_raw_age_s: float = 7 * 86400.0
    """Age up to which raw batches are kept."""
    max_rollup_bytes: int = 2 << 30
    """Size limit of all sums together, about; the finest and oldest are deleted first."""
    max_age_1s_s: float = 6 * 3600.0
    """Age up to which sums by second are kept."""
    max_age_1min_s: float = 30 * 86400.0
    """Age up to which sums by minute are kept."""
    max_age_1h_s: float = 5 * 366 * 86400.0
    """Age up to which sums by hour are kept."""
    synchronous: Literal["FULL", "EXTRA"] = "FULL"
    """NORMAL isn't offered: in WAL mode it loses acknowledged commits when the power fails."""
    queue_bytes: int = 64 << 20
    """Limit of received, uncommitted batches, half of it for an engine alone. Further ones stay with their engines,
    unacknowledged."""
    commit_interval_s: float = 0.05
    """Time for which the writer gathers batches for one commit; many end it early."""

    @property
    def max_rollup_age_s(self) -> dict[int, float]:
        """Ages up to which sums are kept, by resolution in seconds."""
        ages = {1: self.max_age_1s_s, 60: self.max_age_1min_s, 3600: self.max_age_1h_s}
        return {resolution: age_s or math.inf for resolution, age_s in ages.items()}

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("max_raw_bytes", "max_rollup_bytes"), Range(0)),
        **dict.fromkeys(("max_raw_age_s", "max_age_1s_s", "max_age_1min_s", "max_age_1h_s"), Range(0, 1e10)),
        "queue_bytes": Range(1 << 20),
        "commit_interval_s": Range(0, 5),
    }


class EventSettings(Section):
    """The socket that engines and trainers connect to."""

    engine_lost_s: float = 5.0
    """Silence after which an engine counts as disconnected."""
    log_token_ids: bool = False
    """Ask engines to log token ids. They reveal prompts, so this is off by default."""

    RANGES: ClassVar[Ranges] = {
        "engine_lost_s": SECONDS,
    }


class HttpSettings(Section):
    """The read-only listener and limits of the admin API."""

    metrics_listen: str = "127.0.0.1:9464"
    """host:port of the status page, /metrics, /healthz and /readyz; "": none. A loopback address, unless one of the next two is
    set."""
    metrics_web_config: Path | None = None
    """File in the web-config form of Prometheus and its exporters, with TLS and passwords for `metrics_listen`."""
    metrics_plaintext: bool = False
    """`metrics_listen` may be any address without TLS. Every host that reaches it can read the status page and the metrics."""
    admin_listen: str = ""
    """host:port of the admin API besides its unix socket, with tokens; "": none. Only loopback addresses."""
    read_token_file: Path | None = None
    """File of the read token; default: systemd's credential honed-read-token, else there is no read token."""
    admin_token_file: Path | None = None
    """File of the admin token; default: systemd's credential honed-admin-token."""
    mutations_per_minute: int = 120
    """Most changes a minute on each listener of the admin API."""

    RANGES: ClassVar[Ranges] = {"mutations_per_minute": Range(1, 1_000_000)}

    @field_validator("admin_listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value:
            check_address(value)
        return value

    @model_validator(mode="after")
    def _is_protected(self) -> Self:
        if self.metrics_listen:
            try:
                check_address(self.metrics_listen, why_only_loopback="" if self.is_metrics_remote else NOT_PROTECTED)
            except ValueError as error:
                raise ValueError(f"metrics_listen = {self.metrics_listen!r} {error}") from error
        return self

    @model_validator(mode="after")
    def _has_two_addresses(self) -> Self:
        """Refuse one address for both listeners: only the first could be bound."""
        if self.metrics_listen and self.admin_listen:
            host, port = check_address(self.metrics_listen, why_only_loopback="")
            admin_host, admin_port = check_address(self.admin_listen)
            if port == admin_port != 0 and host in (admin_host, "0.0.0.0", "::"):
                raise ValueError(f"metrics_listen and admin_listen both take port {port} of {admin_host}: change one")
        return self

    @property
    def is_metrics_remote(self) -> bool:
        """Whether `metrics_listen` may be another address than loopback."""
        return self.metrics_plaintext or self.metrics_web_config is not None


class RegistrySettings(Section):
    """Keeping and sharing of drafter versions."""

    keep_versions: int = 16
    """Newest versions to keep, besides those with an alias or in use. 0: keep all."""
    url: str = ""
    """fsspec URL of a registry that hosts share ("file:///mnt/nfs/honed", "s3://bucket/honed"), or an absolute path;
    "": none."""
    publish: bool = True
    """Copy versions made here to `url` when they become active."""
    try_fetched: bool = True
    """Try other hosts' versions for the same target on live traffic, like a candidate made here."""
    poll_s: float = 300.0
    """Interval of checks of `url`."""
    pool_evidence: bool = False
    """Hosts tell each other at `url` how the versions on trial do, and decide together, each as far as its own traffic points
    the same way. Whoever may write there can then hasten a promotion or a roll-back."""

    RANGES: ClassVar[Ranges] = {"keep_versions": Range(0), "poll_s": Range(0, 1e9, excludes_low=True)}

    @field_validator("url")
    @classmethod
    def _names_one_place(cls, value: str) -> str:
        """Refuse what fsspec would take for a path in the working directory."""
        if value and not _SHARED_PLACE.match(value):
            raise ValueError(
                "isn't a URL or an absolute path; write s3://bucket/honed, file:///mnt/nfs/honed or /mnt/nfs/honed"
            )
        return value


class RecalibrationSettings(Section):
    """Automatic recalibration, and time limits of each part."""

    automatic: bool = True
    """Recalibrate when a workload's acceptance drifts."""
    min_interval_s: float = 900.0
    """Shortest time from one recalibration's end to the next automatic start. If a recalibration for drift fails, it is retried
    after this time, then after twice as long, and so on, six times in all."""
    max_seconds: float = 600.0
    """Longest training if the request sets no limit. Waiting for samples and idle time doesn't count; see
    `trainer.deadline_s`."""
    scope: Literal["kv-frozen", "full"] = "kv-frozen"
    """"full" trains all weights; its swap resets the prefix cache, and vLLM must run with HONED_FEATURES=layers.
    "kv-frozen" keeps the weights that cached keys depend on."""
    trainer_lost_s: float = 30.0
    """Silence after which the trainer counts as gone and its work as failed."""
    on_target_update: Literal["keep", "purge"] = "keep"
    """Handling of samples when vLLM gets new target weights without a restart. "keep" suits reinforcement learning, where a
    step changes little; "purge" suits a switch to a fine-tuned target."""

    RANGES: ClassVar[Ranges] = {
        "min_interval_s": Range(0, 1e9),
        **dict.fromkeys(("max_seconds", "trainer_lost_s"), SECONDS),
    }


def section_of(settings_class: type[Any]) -> type[Section]:
    """Make a section from a frozen dataclass, nested ones included: same fields, defaults and ranges; no unknown keys."""
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
    made = create_model(settings_class.__name__, __base__=Section, __doc__=settings_class.__doc__, **fields)
    made.OWNER, made.RANGES = settings_class, settings_class.RANGES
    return made


def value_of(settings_class: type[D], section: Section) -> D:
    """The dataclass of a section, with the section's values. Raises ValueError for values that it refuses."""
    hints = get_type_hints(settings_class)
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return settings_class(**{n: value_of(hints[n], v) if isinstance(v, Section) else v for n, v in fields.items()})


if TYPE_CHECKING:  # made at run time; a type checker only knows their common base

    class ControllerSection(Section): ...

    class CanarySection(Section): ...

    class TrainerSection(Section): ...

    class GateSection(Section): ...
else:
    ControllerSection, CanarySection = section_of(ControllerSettings), section_of(CanarySettings)
    TrainerSection, GateSection = section_of(TrainerSettings), section_of(GateSettings)
