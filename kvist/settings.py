"""A service's configuration: a frozen dataclass whose annotations have each field's type and allowed range.

The class, the TOML file and the command line share them, and the docstring of each field, which is its help: so they
cannot disagree. Call `check_fields` in `__post_init__`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvist.errors import InvalidValueError

T = TypeVar("T")

Secret = Annotated[str, Meta(min_length=1, pattern=r"^[\x21-\x7e]*$")]
"""A key that can be sent in a header. Errors never show the value of a field with this in its type."""
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]


def check_fields(config: Any) -> None:
    """Convert each field of a frozen configuration to its type; raises InvalidValueError naming the first bad one."""
    for name, annotation in _annotations(type(config)).items():
        object.__setattr__(config, name, _checked(name, getattr(config, name), annotation, strict=True))


def parse_values(kind: type, values: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Return the values, checked and converted to their keys' types; with `strict` false, numbers may be text."""
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


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model's directory; raises InvalidValueError."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        expected = f"a directory with {path.name} ({error.strerror})"
        raise InvalidValueError("model path", str(path.parent), expected) from None
    except ValueError as error:
        raise InvalidValueError(path.name, str(path), f"valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidValueError(path.name, str(path), "a JSON object")
    return value


def read_struct(path: Path, kind: type[T]) -> T:
    """Return a file's contents, in TOML if its name ends so, else in JSON; raises OSError and ValueError."""
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    return decode(path.read_bytes(), type=kind)


def option_help(kind: type) -> dict[str, str]:
    """Return the help of each key, by name, in order: the docstring below it in its class."""
    texts = {}
    for each in reversed(kind.__mro__[:-1]):
        definition: Any = ast.parse(inspect.getsource(each)).body[0]
        for pair in pairwise(definition.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def secret_names(kind: type) -> set[str]:
    return {name for name, annotation in _annotations(kind).items() if _is_secret(annotation)}


def _is_secret(annotation: Any) -> bool:
    return annotation == Secret or any(map(_is_secret, get_args(annotation)))


def _annotations(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def _choices(annotation: Any) -> list[Any]:
    parts = get_args(annotation)
    return [*parts] if get_origin(annotation) is Literal else [each for part in parts for each in _choices(part)]


def _checked(name: str, value: Any, annotation: Any, strict: bool) -> Any:
    choices = _choices(annotation)
    if choices and isinstance(value, str):
        value = value.lower()
    try:
        converted = msgspec.convert(value, annotation, strict=strict)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at `$")[0].removeprefix("Expected ").replace("`", "")
        reason = reason.replace("Object contains unknown field", "known keys alone, not")
        value = "***" if value and _is_secret(annotation) else value
        if choices and reason.startswith("Invalid enum value"):
            has_number = any(get_origin(part) is Annotated for part in get_args(annotation))
            reason = f"one of {', '.join([*choices, 'a number'] if has_number else choices)}"
        raise InvalidValueError(name, value, reason) from None
    if isinstance(converted, str) and "\0" in converted:  # opening such a path raises ValueError
        raise InvalidValueError(name, converted, "text without NUL")
    return converted
