"""A service's one configuration: a frozen dataclass whose annotations are types, ranges and help texts at once.

The class, the TOML file and the command line share them, so they cannot disagree. Each field is
`Annotated[type, Meta(description=..., ge=...)]`; `check_fields` belongs in `__post_init__`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvist.errors import InvalidValueError

T = TypeVar("T")

Secret = Annotated[str, Meta(min_length=1, pattern=r"^[\x21-\x7e]*$")]
"""A key, which may stand in a header. No error shows the value of a field that has it in its type."""


def check_fields(config: Any) -> None:
    """Put each field of a frozen configuration into its type; raises InvalidValueError naming the first wrong one."""
    for name, annotation in _annotations(type(config)).items():
        object.__setattr__(config, name, _checked(name, getattr(config, name), annotation, strict=True))


def parse_values(kind: type, values: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Return the values in their keys' types, each checked; with `strict` false, numbers may be given as text."""
    annotations = _annotations(kind)
    for name in values:
        if name not in annotations:
            close = difflib.get_close_matches(name, annotations, n=1)
            raise InvalidValueError(name, values[name], f"a known key{f', such as {close[0]}' if close else ''}")
    return {name: _checked(name, value, annotations[name], strict) for name, value in values.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys of a TOML file; raises InvalidValueError that names the file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidValueError("config", str(path), f"a readable file ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("config", str(path), f"valid TOML ({error})") from None


def read_struct(path: Path, kind: type[T]) -> T:
    """Return what a file of JSON, or of TOML if it is called so, says; raises OSError and ValueError."""
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    return decode(path.read_bytes(), type=kind)


def option_help(kind: type) -> dict[str, str]:
    """Return what each key means, by name, in order."""
    return {name: _description(annotation) for name, annotation in _annotations(kind).items()}


def secret_names(kind: type) -> set[str]:
    """Return the keys whose values are secrets."""
    return {name for name, annotation in _annotations(kind).items() if _is_secret(annotation)}


def _is_secret(annotation: Any) -> bool:
    return annotation == Secret or any(map(_is_secret, get_args(annotation)))


def _annotations(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def _description(annotation: Any) -> str:
    return next(meta.description for meta in annotation.__metadata__ if isinstance(meta, Meta) and meta.description)


def _checked(name: str, value: Any, annotation: Any, strict: bool) -> Any:
    kind = annotation.__origin__
    choices = [each for part in (kind, *get_args(kind)) if get_origin(part) is Literal for each in get_args(part)]
    if choices and isinstance(value, str):
        value = value.lower()
    try:
        return msgspec.convert(value, annotation, strict=strict)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at `$")[0].removeprefix("Expected ").replace("`", "")
        value = "***" if value and _is_secret(annotation) else value
        raise InvalidValueError(name, value, f"one of {', '.join(choices)}" if choices else reason) from None
