"""The keys of a config class as text: for `--help`, and as the example files in deploy/."""

from __future__ import annotations

import dataclasses
import enum
import textwrap
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config import ConfigKey, config_keys
from kvstore.units import Bytes, Nanos

_COMMENT_WIDTH = 110


def help_text(cls: type[Any], *, program: str) -> str:
    keys = config_keys(cls)
    lines = [
        f"usage: python -m {program} [--config FILE] [--key=value ...] [--example]",
        "",
        "Every key may stand in the TOML file, in the environment or on the command line; the later one wins.",
        "--example prints a file with every key.",
        "",
    ]
    width = max((len(key.name) for key in keys), default=0) + 2
    for key in keys:
        lines.append(f"  --{key.name:<{width}} {default_text(key):<28} {key.env_name}")
        if key.help:
            lines.append(f"    {'':<{width}} {key.help}")
    return "\n".join(lines)


def default_text(key: ConfigKey) -> str:
    """The default of a key as it would be written in TOML; "(required)" for one that has none."""
    value = key.default
    if value is dataclasses.MISSING:
        return "(required)"
    if key.type is Bytes:
        return next(
            (f'"{value >> shift}{unit}"' for shift, unit in ((30, "GiB"), (20, "MiB")) if value and not value % (1 << shift)), str(value)
        )
    if key.type is Nanos:
        return f'"{value // 10**6}ms"' if value % 10**9 else f'"{value // 10**9}s"'
    if value is None:
        return "(off)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{name}" = "{item}"' for name, item in value.items()) + "}"
    if isinstance(value, Path) and value.is_relative_to(Path.home()):
        return f'"~/{value.relative_to(Path.home())}"'
    return f'"{value}"'


def example_toml(cls: type[Any], *, program: str) -> str:
    """A config file that lists every key at its default, commented out, with its help text. Loads as it is."""
    lines = [f"# python -m {program} --config THIS_FILE", "#", "# Every key stands at its default; take the # away to change one."]
    section = ""
    keys = config_keys(cls)
    tables = list(dict.fromkeys(["", *(key.name.rpartition(".")[0] for key in keys)]))
    # In TOML, what follows the name of a table belongs to it.
    for key in sorted(keys, key=lambda key: tables.index(key.name.rpartition(".")[0])):
        table, _, name = key.name.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        lines.append("")
        lines += textwrap.wrap(key.help, _COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ")
        choices = _choices(key.type)
        if choices:
            lines.append(f"# One of: {', '.join(choices)}.")
        default = default_text(key)
        lines.append(f"# {name} =" if default in ("(off)", "(required)") else f"#{name} = {default}")
    return "\n".join(lines) + "\n"


def _choices(kind: Any) -> list[str]:
    if typing.get_origin(kind) is typing.Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(member.value) for member in kind]
    return []
