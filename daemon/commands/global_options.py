"""The `honed` command as a whole: its help by sections, and its own options given after a command.

`honed status --socket S` is `honed --socket S status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperGroup

SECTIONS = {
    "See": (
        *("status", "top", "workloads", "engines", "drafters", "explain", "operations", "canary"),
        *("marks", "events", "audit", "config"),
    ),
    "Change": ("recalibrate", "promote", "rollback", "verify", "cancel", "pause", "resume", "override", "purge"),
    "Set up": ("doctor", "install", "uninstall", "vllm-args", "dashboards", "version"),
    "Run": ("serve", "train"),
    "Study": ("calibrate", "retention", "replay"),
}
"""The help's sections, and their commands in the order of use."""


class GlobalOptionsGroup(TyperGroup):
    """Commands of an app whose own options may stand before or after a command's name."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by section."""
        for title, names in SECTIONS.items():
            most = formatter.width - 6 - max(map(len, names))
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(most)) for name in names])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with the app's own options moved first."""
        rest: list[str] = super().parse_args(ctx, moved(self, args))
        return rest


def moved(group: Any, args: Sequence[str]) -> list[str]:
    """Arguments with the group's own options at the front. An option that the command also has stays with the command."""
    own = {name for option in group.params for name in option.opts if not option.is_flag}
    front: list[str] = []
    back: list[str] = []
    command, left = group, list(args)
    while left:
        token = left.pop(0)
        if token == "--":
            return [*front, *back, token, *left]
        name, has_value, _ = token.partition("=")
        if name in own and (command is group or not any(name in option.opts for option in command.params)):
            if not has_value and not left:
                return [token]  # click then reports the missing value
            front += [token] if has_value else [token, left.pop(0)]
        else:
            command = getattr(command, "commands", {}).get(token, command)
            back.append(token)
    return front + back
