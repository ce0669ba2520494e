"""Outputs that follow a JSON schema, a regular expression, a choice or a grammar, by `llguidance`.

Requests ask for them with vLLM's `structured_outputs`, its older `guided_*`, or OpenAI's `response_format`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kvist.engine.request import TokenMatcher
from kvist.openai.errors import invalid_field
from kvist.openai.requests import Fields
from kvist.openai.tokenization import ChatTokenizer

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
Kind = Literal["json_schema", "regex", "choice", "grammar"]
_KINDS: dict[str, Kind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The names in `structured_outputs` and after `guided_`, with llguidance's names for them."""
_EXPECTED: dict[Kind, tuple[Any, str]] = {
    "json_schema": (dict | str, "a JSON schema"),
    "choice": (list, "a list of texts"),
}


class Grammar(msgspec.Struct, frozen=True):
    """The grammar that an output must follow, and the field of the request that asks for it."""

    field: str
    kind: Kind
    text: str
    is_compact: bool = False
    """Whether JSON is written without optional white space."""


def read_grammar(fields: Fields) -> Grammar | None:
    """Return the grammar of the request's output, None if it has none; raises RequestError that names the field."""
    grammars = list(_read_grammars(fields))
    if len(grammars) > 1:
        names = [each.field for each in grammars]
        raise invalid_field(names[1], f"expected one structure of an output, not {names[0]} as well")
    return grammars[0] if grammars else None


def _read_grammars(fields: Fields) -> Iterator[Grammar]:
    structured = dict(_object(fields, "structured_outputs"))
    is_compact = structured.pop("disable_any_whitespace", False) is True
    for name, value in structured.items():
        field = f"structured_outputs.{name}"
        if name == "json_object" and value is True:
            yield _grammar(field, "json_schema", _ANY_OBJECT, is_compact)
        elif name in _KINDS and value is not None:
            yield _grammar(field, _KINDS[name], value, is_compact)
        elif value:
            raise invalid_field(field, f"got {value!r:.100}, expected it left out")
    for name, kind in _KINDS.items():
        if (value := fields.get(f"guided_{name}")) is not None:
            yield _grammar(f"guided_{name}", kind, value)
    response_format = _object(fields, "response_format")
    match response_format.get("type", "text"):
        case "text":
            pass
        case "json_object":
            yield _grammar("response_format", "json_schema", _ANY_OBJECT)
        case "json_schema":
            yield _grammar(
                "response_format.json_schema.schema",
                "json_schema",
                _object(response_format, "json_schema").get("schema"),
            )
        case kind:
            expected = "text, json_object or json_schema"
            raise invalid_field("response_format", f"got type {kind!r:.100}, expected {expected}")


def _object(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_field(name, f"got {value!r:.100}, expected an object")
    return value


def _grammar(field: str, kind: Kind, value: Any, is_compact: bool = False) -> Grammar:
    types, expected = _EXPECTED.get(kind, (str, "text"))
    if not isinstance(value, types) or not value:
        raise invalid_field(field, f"got {value!r:.100}, expected {expected}")
    return Grammar(field, kind, value if isinstance(value, str) else msgspec.json.encode(value).decode(), is_compact)


class GrammarCompiler:
    """Compiles grammars to constraints on one model's tokens. Thread-safe; reads the vocabulary at first use."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> TokenMatcher:
        """Return the constraint of a grammar; raises RequestError (400) if the grammar is not valid.

        A large schema takes up to a second.
        """
        import llguidance  # here, because it takes a while

        with self._lock:
            if self._vocabulary is None:
                ends = self._end_token_ids or None
                self._vocabulary = llguidance.LLTokenizer(self._tokenizer.to_json(), self._vocab_size, ends)
        try:
            if grammar.is_compact and grammar.kind == "json_schema":
                text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, {"whitespace_flexible": False})
            else:
                text = llguidance.grammar_from(grammar.kind, grammar.text)
            matcher = llguidance.LLMatcher(self._vocabulary, text)
        except ValueError as error:
            reason = str(error)
        else:
            reason = " ".join(matcher.get_error().split())
        if reason:
            raise invalid_field(grammar.field, f"got {grammar.text:.100}, {reason:.300}")
        return TokenMatcher(matcher, self._vocab_size)
