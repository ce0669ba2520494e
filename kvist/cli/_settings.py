"""A service's configuration on the command line: a flag for each key, and a TOML file with the same keys."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvist.settings import option_help, parse_values, read_toml


def add_settings(parser: argparse.ArgumentParser, kind: type, special: Mapping[str, Mapping[str, Any]]) -> None:
    """Declare a flag for each key of the configuration `kind`; `special` has what argparse is told beside for a key.

    A `flag` there replaces the key's name. Keys that are tuples take several values.
    """
    parser.add_argument("--config", type=Path, help="TOML file with the same keys (underscores for dashes); flags win")
    hints = get_type_hints(kind)
    for name, text in option_help(kind).items():
        default = kind.__dataclass_fields__[name].default  # type: ignore[attr-defined]
        options: dict[str, Any] = {"help": f"{text} (default: {_shown(default)})", "default": argparse.SUPPRESS}
        if get_origin(hints[name]) is Literal:
            options |= {"type": str.lower, "choices": get_args(hints[name])}
        else:
            options["metavar"] = "VALUE"
        if get_origin(hints[name]) is tuple and name not in special:
            options["nargs"] = "+"
        options |= special.get(name, {})
        parser.add_argument(options.pop("flag", "--" + name.replace("_", "-")), dest=name, **options)


def read_settings(args: argparse.Namespace, kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the file overridden by those `given` as flags; raises InvalidValueError."""
    from_file = read_toml(args.config) if args.config is not None else {}
    # A file has types, so its values are checked as they are; flags are text.
    return parse_values(kind, from_file) | parse_values(kind, given, strict=False)


def given_flags(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return what was given on the command line, by key."""
    return {name: value for name, value in vars(args).items() if name in option_help(kind)}


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return str(default) if isinstance(default, str | int | float) else "none"
