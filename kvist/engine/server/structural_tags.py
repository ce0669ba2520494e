"""Translates xgrammar's structural tags, which are structured parts in free text, to grammars of `llguidance`.

What such a grammar cannot express exactly is refused: some formats and options, and free text without an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

_Nothing = Annotated[list[str], msgspec.Meta(max_length=0)]


class _Format(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """A part of an output."""


class _ConstString(_Format, tag="const_string"):
    value: str


class _JsonSchema(_Format, tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class _Regex(_Format, tag="regex"):
    pattern: str


class _AnyText(_Format, tag="any_text"):
    excludes: _Nothing = []


class _Sequence(_Format, tag="sequence"):
    elements: list[_AnyFormat]


class _Or(_Format, tag="or"):
    elements: list[_AnyFormat]


class _Tag(_Format, tag="tag"):
    begin: str
    content: _AnyFormat
    end: str | list[str]


class _TriggeredTags(_Format, tag="triggered_tags"):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: _Nothing = []


_AnyFormat = _ConstString | _JsonSchema | _Regex | _AnyText | _Sequence | _Or | _Tag | _TriggeredTags


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTag(msgspec.Struct):
    """Either a `format` or, as in older versions of vLLM, `structures` that begin with `triggers`."""

    format: _AnyFormat | None = None
    structures: list[_Structure] = []
    triggers: list[str] = []


_decode = msgspec.json.Decoder(_StructuralTag).decode


def structural_tag_grammar(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return llguidance's Lark grammar of a structural tag in JSON; raises ValueError for what Lark cannot express."""
    root = _decode(text)
    tags = [_Tag(each.begin, _JsonSchema(each.schema), each.end) for each in root.structures]
    writer = _Writer(special_tokens)
    start = writer.write(root.format or _TriggeredTags(root.triggers, tags), is_last=True)
    return "\n".join(["%llguidance {}", f"start: {start}", "TEXT: /(?s:.*)/", *writer.rules])


class _Writer:
    """Writes formats as expressions of a grammar, and collects the additional `rules` that they need."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special_tokens = special_tokens
        self._specials = re.compile(f"({'|'.join(map(re.escape, special_tokens))})" if special_tokens else "(?!)")

    def write(self, node: _AnyFormat, is_last: bool = False) -> str:
        """Return the expression of a format; free text without an end is possible only where it `is_last`."""
        match node:
            case _ConstString(value):
                return self._literal(value)
            case _JsonSchema(schema):
                return f"%json {msgspec.json.encode(schema).decode()}"
            case _Regex(pattern):
                return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern) + "/"
            case _Sequence(elements):
                last = len(elements) - 1
                return " ".join(self.write(each, is_last and i == last) for i, each in enumerate(elements))
            case _Or(elements):
                return _any_of(self.write(each, is_last) for each in elements)
            case _Tag():
                return self._tag(node, node.begin)
            case _TriggeredTags() if is_last:
                return self._triggered_tags(node)
            case _AnyText() if is_last:
                return "TEXT"
        raise ValueError(f"{node.__struct_config__.tag}: expected at the end, or any text alone in a tag")

    def _tag(self, tag: _Tag, begin: str) -> str:
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if isinstance(tag.content, _AnyText):
            return f"{self._literal(begin)} {_any_of(map(self._text_until, ends))}"
        return f"{self._literal(begin)} {self.write(tag.content)} {_any_of(map(self._literal, ends))}"

    def _triggered_tags(self, node: _TriggeredTags) -> str:
        of_trigger: dict[str, list[str]] = {}
        for tag in node.tags:
            trigger = next(filter(tag.begin.startswith, node.triggers), None)
            if trigger is None:
                raise ValueError(f"begin: got {tag.begin!r:.100}, expected one of the triggers in front of it")
            of_trigger.setdefault(trigger, []).append(self._tag(tag, tag.begin.removeprefix(trigger)))
        called = _any_of(f"{self._text_until(trigger)} {_any_of(tags)}" for trigger, tags in of_trigger.items())
        rest = "" if node.stop_after_first else f" {called}* TEXT"
        if node.at_least_one:
            return _any_of(map(self.write, node.tags)) + rest
        return f"(TEXT | {called}{rest})"

    def _text_until(self, end: str) -> str:
        """Return the expression of text up to and including the first `end`."""
        if not end:
            raise ValueError("got '', expected what ends a text")
        if self._specials.match(end):  # a special token, which text never contains
            return f"TEXT {self._literal(end)}"
        self.rules.append(f"until_{len(self.rules)}[lazy]: TEXT {self._literal(end)}")
        return f"until_{len(self.rules) - 1}"

    def _literal(self, text: str) -> str:
        """Return the expression of a text in which special tokens stand for themselves."""
        parts = [part for part in self._specials.split(text) if part]
        ids = self._special_tokens
        return " ".join(f"<[{ids[part]}]>" if part in ids else msgspec.json.encode(part).decode() for part in parts)


def _any_of(options: Iterable[str]) -> str:
    if not (rule := " | ".join(options)):
        raise ValueError("expected at least one of elements, ends, tags or structures")
    return f"({rule})"
