"""Configuration of a process: a frozen dataclass, filled from defaults < TOML file < LARDER_* environment < flags.

A section is a nested dataclass. What a key accepts follows from its annotation, so a config class is the only place where a
key is declared; a string literal below a field is its help text (shown by `--help`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import inspect
import itertools
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvstore.errors import ConfigError
from kvstore.units import Bytes, Nanos, parse_duration, parse_size

Cfg = TypeVar("Cfg")

ENV_PREFIX = "LARDER_"
_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key of a config class, as an operator sees it."""

    name: str
    """Dotted path: "port", "lease.ttl"."""
    type: Any
    default: Any
    """dataclasses.MISSING when the key must be given."""
    help: str

    @property
    def env_name(self) -> str:
        return ENV_PREFIX + self.name.replace(".", "_").upper()

    @property
    def is_switch(self) -> bool:
        return self.type is bool


def config_keys(cls: type[Any]) -> tuple[ConfigKey, ...]:
    """Every key of a config class, sections flattened to dotted names, in the order declared."""
    return tuple(_walk(cls, ""))


def load_config(cls: type[Cfg], *, file: Path | None, flags: Mapping[str, str], env: Mapping[str, str]) -> Cfg:
    """Fill `cls`. Raises ConfigError, one line: what is wrong, where, and what would be right.

    `flags` maps dotted key names to text. An environment name that belongs to no key of `cls` is ignored, since the processes
    of one host share an environment; an unknown key in the file or on the command line is refused.
    """
    keys = {key.name: key for key in config_keys(cls)}
    values: dict[str, Any] = {}
    if file is not None:
        for name, raw in _flatten(_read_toml(file), keys, where=str(file)):
            values[name] = convert(keys[name].type, raw, where=f"{file}: {name}")
    for key in keys.values():
        if key.env_name in env:
            values[key.name] = convert(key.type, env[key.env_name], where=key.env_name)
    for name, text in flags.items():
        if name not in keys:
            raise unknown_key("flag --", name, keys)
        values[name] = convert(keys[name].type, text, where=f"--{name}")
    return typing.cast("Cfg", _build(cls, values, ""))


def unknown_key(what: str, name: str, known: Mapping[str, Any]) -> ConfigError:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ConfigError(f"{what}{name} is not known{hint} (known: {', '.join(sorted(known))})")


def convert(kind: Any, raw: Any, *, where: str) -> Any:
    """The value of `raw` (text of a flag or variable, or a TOML value) as the annotation `kind` asks for. Raises ConfigError."""
    if kind is Bytes or kind is Nanos:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise _wrong(where, raw, "a size such as 512MiB" if kind is Bytes else "a duration such as 30s")
        try:
            return parse_size(typing.cast("str | int", raw)) if kind is Bytes else parse_duration(raw)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if isinstance(kind, typing.NewType):
        return convert(kind.__supertype__, raw, where=where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not type(None)]
        if isinstance(raw, str) and raw.strip().lower() in ("", "none"):
            return None
        return convert(inner[0], raw, where=where)
    if origin is typing.Literal:
        return _one_of(raw, {str(argument): argument for argument in arguments}, where=where)
    if origin is tuple:
        items = [item.strip() for item in raw.split(",") if item.strip()] if isinstance(raw, str) else raw
        if not isinstance(items, list):
            raise _wrong(where, raw, "a list")
        return tuple(convert(arguments[0], item, where=where) for item in items)
    if origin in (dict, Mapping):
        return _convert_table(arguments[1], raw, where=where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _one_of(raw, {str(member.value): member for member in kind}, where=where)
    return _convert_plain(kind, raw, where=where)


def _convert_plain(kind: Any, raw: Any, *, where: str) -> Any:
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.strip().lower() in _TRUE | _FALSE:
            return raw.strip().lower() in _TRUE
        raise _wrong(where, raw, "true or false")
    if kind in (int, float):
        if isinstance(raw, bool) or not isinstance(raw, str | int | float) or (kind is int and isinstance(raw, float)):
            raise _wrong(where, raw, "a whole number" if kind is int else "a number")
        try:
            return kind(raw)
        except ValueError:
            raise _wrong(where, raw, "a whole number" if kind is int else "a number") from None
    if kind in (str, Path):
        if not isinstance(raw, str):
            raise _wrong(where, raw, "text in quotes")
        return Path(raw).expanduser() if kind is Path else raw
    raise AssertionError(f"a config key of type {kind} has no conversion")


def _convert_table(kind: Any, raw: Any, *, where: str) -> dict[str, Any]:
    if isinstance(raw, str):
        pairs = [item.partition("=") for item in raw.split(",") if item.strip()]
        if any(not separator for _, separator, _ in pairs):
            raise _wrong(where, raw, "pairs such as name=value,name=value")
        raw = {name.strip(): value.strip() for name, _, value in pairs}
    if not isinstance(raw, dict):
        raise _wrong(where, raw, "a table")
    return {name: convert(kind, value, where=f"{where}.{name}") for name, value in raw.items()}


def _one_of(raw: Any, choices: Mapping[str, Any], *, where: str) -> Any:
    if str(raw) not in choices:
        raise _wrong(where, raw, "one of " + ", ".join(choices))
    return choices[str(raw)]


def _wrong(where: str, raw: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{where}: {raw!r} is not {wanted}")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None  # the message ends with line and column


def _flatten(table: Mapping[str, Any], keys: Mapping[str, ConfigKey], *, where: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    sections = {name.rpartition(".")[0] for name in keys}
    for name, value in table.items():
        dotted = prefix + name
        if dotted in keys:
            yield dotted, value
        elif dotted in sections and isinstance(value, dict):
            yield from _flatten(value, keys, where=where, prefix=dotted + ".")
        else:
            raise unknown_key(f"{where}: key ", dotted, keys)


def _build(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        dotted = prefix + field.name
        if _is_section(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], values, dotted + ".")
        elif dotted in values:
            arguments[field.name] = values[dotted]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            key = ConfigKey(name=dotted, type=None, default=None, help="")
            raise ConfigError(f"{dotted} must be given: in the config file, as --{dotted} or as {key.env_name}")
    return cls(**arguments)


def _walk(cls: type[Any], prefix: str) -> Iterator[ConfigKey]:
    hints = typing.get_type_hints(cls)
    texts = _help_texts(cls)
    for field in dataclasses.fields(cls):
        if _is_section(hints[field.name]):
            yield from _walk(hints[field.name], prefix + field.name + ".")
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        yield ConfigKey(name=prefix + field.name, type=hints[field.name], default=default, help=texts.get(field.name, ""))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _help_texts(cls: type[Any]) -> dict[str, str]:
    """The string literals below the fields of a class and of its bases; empty where the source is not at hand."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = typing.cast("ast.ClassDef", tree.body[0]).body
        for field, literal in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(literal, ast.Expr):
                value = literal.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[field.target.id] = " ".join(value.value.split())
    return texts
