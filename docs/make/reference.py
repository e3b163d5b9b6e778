"""Writes docs/reference.md and daemon/openapi.json out of the code: every setting, variable, endpoint and command.

`python -m docs.make.reference FOLDER` writes both below a checkout; a test fails when what is checked in differs.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from honed.adapt.protocol.attach_variables import VARIABLES
from honed.daemon.settings import variables
from honed.daemon.settings.sections import Section
from honed.daemon.settings.settings import Settings, load

if TYPE_CHECKING:
    from honed.daemon.service import Service

MARKDOWN, OPENAPI = "docs/reference.md", "daemon/openapi.json"
HEAD = """# Reference

`make reference` writes this page from the code, and a test keeps it true.
"""
PATHS = {
    "paths.state_dir": "`/var/lib/honed` for root and the services, else `$XDG_STATE_HOME/honed`",
    "paths.runtime_dir": "`/run/honed` for root and the services, else `$XDG_RUNTIME_DIR/honed`",
}
"""Defaults that depend on who asks."""
OF_VLLM = {
    "HONED_RUNTIME_DIR": "The daemon's runtime directory. Without it nothing of honed is loaded.",
    "HONED_ENGINE_ID": "Name of this engine, where a host has several; the data-parallel rank is appended. Default `engine`.",
    "HONED_CAPTURE": "`0`: capture no samples, so train on none. Default `1`.",
    "HONED_RING_BYTES": "Size of the shared-memory ring of samples. Default 67108864.",
    "HONED_QUEUE_BYTES": "Most bytes of events kept while the daemon is away; beyond, the oldest are lost. Default 33554432.",
    "HONED_FEATURES": '`fused` (default) or `layers`: what is captured; `recalibration.scope = "full"` needs `layers`.',
    "HONED_TREES": "`1`: draft trees; draft tokens are slots for their nodes. `graphs`: also beside CUDA graphs. Default `0`.",
}
OTHERS = {
    "HONED_CONFIG": "Settings file (TOML).",
    "HONED_STATE_DIR": "Short for `paths.state_dir`.",
    "HONED_RUNTIME_DIR": "Short for `paths.runtime_dir`.",
    "HONED_LOG_LEVEL": "debug, info (default), warning, error or critical.",
}


def markdown() -> str:
    """The page."""
    return "\n".join([HEAD, *_settings(), *_variables(), *_endpoints(openapi()), *_metrics(), *_commands()]) + "\n"


def openapi() -> dict[str, Any]:
    """The document that the daemon answers at /openapi.json."""
    from honed.daemon.api.app import make_app

    with _service() as service:
        document: dict[str, Any] = make_app(service).openapi()
    return document


@contextlib.contextmanager
def _service() -> Iterator[Service]:
    """A daemon's service that no engine has met."""
    from honed.daemon.service import Service

    with tempfile.TemporaryDirectory(prefix="honed") as folder:
        paths = {"state_dir": f"{folder}/state", "runtime_dir": folder}
        Path(paths["state_dir"]).mkdir()
        service = Service(load(None, {"paths": paths}, env={}), daemon_id="reference")
        try:
            yield service
        finally:
            service.router.stop()
            service.store.close()


def write(root: Path) -> None:
    """Write both files below a checkout."""
    (root / "docs").mkdir(exist_ok=True)
    (root / MARKDOWN).write_text(markdown())
    (root / OPENAPI).write_text(openapi_text())


def openapi_text() -> str:
    """The document as it is checked in: sorted, so that a diff shows what changed and nothing else."""
    return json.dumps(openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def field_docs(owner: type[Any]) -> dict[str, str]:
    """The docstring below each field of a class and its bases, as one line; those without aren't in it."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("honed."):
            found |= _docs_in(textwrap.dedent(inspect.getsource(base)))
    return found


def _docs_in(source: str) -> dict[str, str]:
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        if is_doc and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = " ".join(after.value.value.split())  # type: ignore[attr-defined]
    return found


def _settings() -> Iterator[str]:
    yield "## Settings\n"
    yield "Defaults < `honed.toml` < `HONED_<SECTION>__<KEY>` < flags. A key that doesn't exist stops the start.\n"
    for name, field in Settings.model_fields.items():
        yield from _section(name, _model_of(field))


def _section(prefix: str, section: type[Section]) -> Iterator[str]:
    owner = section.OWNER or section
    docs, nested = field_docs(owner), []
    yield f"### [{prefix}]\n"
    if owner.__doc__:
        yield f"{' '.join((owner.__doc__ or '').split())}\n"
    yield "| key | default | takes | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        if _is_section(field):
            nested.append((f"{prefix}.{name}", _model_of(field)))
            continue
        takes = str(section.RANGES.get(name, "")) or _kind(field.annotation)
        default = PATHS.get(f"{prefix}.{name}") or _default(field)
        yield f"| `{name}` | {default} | {_cell(takes)} | {_cell(docs.get(name, ''))} |"
    yield ""
    for key, model in nested:
        yield from _section(key, model)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _model_of(field: FieldInfo) -> type[Section]:
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, Section)
    return field.annotation


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{json.dumps(value, default=str)}`"


def _kind(annotation: Any) -> str:
    """What a field takes, in a word."""
    if get_origin(annotation) is not None and "Literal" in str(get_origin(annotation)):
        return ", ".join(f'"{value}"' for value in get_args(annotation))
    names = {bool: "true or false", str: "text", Path: "path", int: "whole number", float: "number"}
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is tuple:
        return "list"
    return " or ".join(names.get(one, "") for one in get_args(annotation) if one is not type(None))


def _variables() -> Iterator[str]:
    for title, known in (
        ("Variables of the daemon, the trainer and the commands", OTHERS),
        ("Variables of vLLM's processes", OF_VLLM),
    ):
        yield f"## {title}\n\n| variable | |\n|---|---|"
        yield from (f"| `{name}` | {_cell(text)} |" for name, text in known.items())
        yield ""
    assert set(OF_VLLM) == set(VARIABLES)
    assert set(OTHERS) == {*variables.PATHS, *variables.OTHERS}


def _endpoints(document: dict[str, Any]) -> Iterator[str]:
    yield "## Endpoints\n"
    yield (
        "The unix socket `admin.sock` has all of them, and so has `http.admin_listen` with a bearer token. GET takes the\n"
        "read or the admin token, all else the admin token. `http.metrics_listen` has `/metrics`, `/healthz`, `/readyz` and\n"
        "a status page at `/`, without a token. Changes take `Idempotency-Key` and `If-Match`. Errors are problem documents\n"
        "(RFC 9457) with a `cure`.\n"
    )
    yield "| | what | takes |\n|---|---|---|"
    for path, methods in sorted(document["paths"].items()):
        for method, operation in sorted(methods.items()):
            what = operation.get("description") or operation.get("summary") or ""
            takes = ", ".join([*_query(operation), *_body(operation, document)])
            yield f"| `{method.upper()} {path}` | {_cell(what)} | {_cell(takes)} |"
    yield ""


def _query(operation: dict[str, Any]) -> list[str]:
    return [f"`?{p['name']}`" for p in operation.get("parameters", []) if p["in"] == "query"]


def _body(operation: dict[str, Any], document: dict[str, Any]) -> list[str]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    names = [one["$ref"].rpartition("/")[2] for one in [schema, *schema.get("anyOf", [])] if "$ref" in one]
    return [f"`{field}`" for name in names for field in document["components"]["schemas"][name].get("properties", {})]


def _metrics() -> Iterator[str]:
    from honed.adapt.protocol.wire import TrainerStatus
    from honed.daemon.metrics.render import LiveCollector

    yield "## Metrics\n"
    yield "`/metrics` adds `_total` to a counter's name, and `_info` to an info's.\n"
    yield "| metric | kind | labels | |\n|---|---|---|---|"
    with _service() as service:  # some families begin with the first status or batch
        service.trainer.hear(b"", TrainerStatus(trainer_id="reference", state="idle"))
        service.ingest.figures.batches = 1
        families = sorted(LiveCollector(service).collect(), key=lambda family: family.name)
    for family in families:
        found = {name for sample in family.samples for name in sample.labels} - {"le"}
        labels = ", ".join(f"`{name}`" for name in getattr(family, "_labelnames", ()) or sorted(found))
        yield f"| `{family.name}` | {family.type} | {labels} | {_cell(family.documentation)} |"
    yield ""


def _commands() -> Iterator[str]:
    from honed.daemon.commands.main import app

    root = typer.main.get_command(app)
    yield "## Commands\n"
    yield "Exit codes: 0 done, 1 failed or not found, 2 wrong usage or settings, 3 no daemon answers,"
    yield "78 wrong settings of `serve` and `train`, after which their units don't start them again."
    yield "`status --check`, `doctor` and `install` end with 4 when there are only warnings.\n"
    yield "Every command takes these options, before its name, or after it unless it has an option of the same name:\n"
    yield from _options(root)
    yield from _walk(root, "honed")


def _walk(command: Any, name: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for child, found in sorted(command.commands.items()):
            yield from _walk(found, f"{name} {child}")
        return
    assert isinstance(command, TyperCommand)
    arguments = [_metavar(param) for param in command.params if isinstance(param, TyperArgument)]
    yield f"### `{' '.join([name, *arguments])}`\n"
    yield f"{' '.join((command.help or '').split())}\n"
    yield from _options(command)


def _metavar(argument: TyperArgument) -> str:
    name = argument.metavar or str(argument.name).upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _options(command: Any) -> Iterator[str]:
    rows = []
    for param in command.params:
        if isinstance(param, TyperOption) and not param.hidden and param.name != "help":
            names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
            is_shown = isinstance(param.default, str | int | float) and not param.is_flag and param.default != ""
            rows.append(f"| {names} | {_cell(param.help or '')}{f' Default `{param.default}`.' if is_shown else ''} |")
    if rows:
        yield "| option | |\n|---|---|"
        yield from rows
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
