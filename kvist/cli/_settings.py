"""A service's configuration on the command line: a flag for each key, and a TOML file with the same keys."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from kvist.errors import InvalidValueError
from kvist.settings import option_help, parse_values, read_toml, secret_names

T = TypeVar("T")

SECRET_PLACES = "; env:NAME or file:PATH to read it from there"
SEVERAL = {"nargs": "+", "action": "extend"}
"""Options of a flag that takes several values, and may be repeated with more."""


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type,
    special: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, str] = MappingProxyType({}),
    has_file: bool = True,
) -> None:
    """Declare a flag for each key of the configuration `kind`; `special` has more options for argparse, by key.

    A `flag` there replaces the key's name. Keys that are tuples take several values; keys that are mappings have no
    flag, only a place in the file, unless `special` has them. `groups` has titles for the help: each holds from its key
    on.
    """
    if has_file:
        text = "TOML file with the same settings, underscores for dashes; flags override it"
        parser.add_argument("--config", type=Path, help=text)
    hints, secrets = get_type_hints(kind), secret_names(kind)
    titled = {title: parser.add_argument_group(title) for title in dict.fromkeys(groups.values())}
    group: argparse._ActionsContainer = parser
    for name, text in option_help(kind).items():
        group = titled[groups[name]] if name in groups else group
        if get_origin(hints[name]) is dict and name not in special:
            continue
        default = kind.__dataclass_fields__[name].default  # type: ignore[attr-defined]
        text += SECRET_PLACES if name in secrets else ""
        text += "" if "by default" in text else f" (default: {_format(default)})"
        options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        if get_origin(hints[name]) is Literal:
            options |= {"type": str.lower, "choices": get_args(hints[name])}
        elif hints[name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif "action" not in special.get(name, {}):
            options["metavar"] = "VALUE"
        if get_origin(hints[name]) is tuple and name not in special:
            options |= SEVERAL
        options |= special.get(name, {})
        group.add_argument(options.pop("flag", "--" + name.replace("_", "-")), dest=name, **options)


def read_config(args: argparse.Namespace, kind: type[T], parsers: Mapping[str, Callable[[Any], Any]]) -> T:
    """Return the file's values overridden by flags, whose texts `parsers` convert; raises InvalidValueError."""
    given = {name: value for name, value in vars(args).items() if name in get_type_hints(kind)}
    given |= {name: parse(given[name]) for name, parse in parsers.items() if name in given}
    from_file = read_toml(args.config) if getattr(args, "config", None) is not None else {}
    secrets = secret_names(kind)
    for values in (from_file, given):
        values |= {name: resolve_secret(name, value) for name, value in values.items() if name in secrets}
    # A file has types, so its values are checked as they are; flags are text.
    return kind(**parse_values(kind, from_file) | parse_values(kind, given, strict=False))


def resolve_secret(name: str, value: Any) -> Any:
    """Return a key, or a mapping of keys, from the variable or file that it names; InvalidValueError shows no key."""
    if isinstance(value, dict):
        return {each: resolve_secret(f"{name}.{each}", inner) for each, inner in value.items()}
    place, found, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if found and place == "env":
        if rest not in os.environ:
            raise InvalidValueError(name, value, "the name of a variable that is set")
        return os.environ[rest]
    if found and place == "file":
        try:
            return Path(rest).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValueError(name, value, f"a file that can be read ({type(error).__name__})") from None
    return value


def _format(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return str(default) if isinstance(default, str | int | float) else "none"
