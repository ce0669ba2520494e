"""Tool calls: which ones a request allows, and how they are found in an output, whole or while it is generated.

Each model writes calls as its template does: Qwen and Hermes in `<tool_call>` tags, Mistral after `[TOOL_CALLS]`, Llama
as JSON alone, Gemma 4 and FunctionGemma in tags with quotes of their own, gpt-oss in channels (harmony), which it also
uses for reasoning. If a request requires a call or names a tool, the output follows a grammar instead.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from kvist.engine.request import partial_match_length
from kvist.engine.server.structured import Grammar
from kvist.openai.chat_template import ChatTemplate
from kvist.openai.errors import invalid_field
from kvist.openai.requests import ChatCompletionRequest, Fields

Body = dict[str, Any]

_NAMED_CALL = re.compile(r"([\w.-]+)(?:\[ARGS\])?(?=\{)")
_QUOTED_CALL_ENDS = ("<tool_call|>", "<end_function_call>")
_QUOTED_CALL = re.compile(rf"call:([\w.-]+)(\{{.*?\}})(?={'|'.join(map(re.escape, _QUOTED_CALL_ENDS))})", re.DOTALL)
_HEADER_MARKS = ("<|channel|>", "<|start|>", " to=")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MESSAGE_END = re.compile("|".join(map(re.escape, _MESSAGE_ENDS)))
_RECIPIENT = re.compile(r" to=(?:functions\.)?([\w.-]+)")
_DECODER = json.JSONDecoder(parse_constant=str)  # NaN becomes a string, since it is not JSON


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a model writes calls: after `begin`, with `between` matching what is around each call.

    With `is_alone`, an output has either text or calls. If arguments are not JSON, `quote` surrounds strings.
    """

    begin: str
    between: re.Pattern[str]
    has_special_tokens: bool = False
    is_alone: bool = False
    quote: str | None = None


_HARMONY = ToolSyntax("<|channel|>", re.compile(""), has_special_tokens=True)
_REQUIRED = ToolSyntax("", re.compile(r"[\s,\[\]]*"))
_SYNTAXES = {
    "<tool_call>": ToolSyntax("<tool_call>", re.compile(r"(?:\s|</?tool_call>)*")),
    "[TOOL_CALLS]": ToolSyntax("[TOOL_CALLS]", re.compile(r"(?:\[TOOL_CALLS\]|[\s,\[\]])*"), has_special_tokens=True),
    "<|tool_call>": ToolSyntax(
        "<|tool_call>", re.compile(r"(?:\s|<\|tool_call>|<tool_call\|>)*"), has_special_tokens=True, quote='<|"|>'
    ),
    "<start_function_call>": ToolSyntax(
        "<start_function_call>",
        re.compile(r"(?:\s|<(?:start|end)_function_call>)*"),
        has_special_tokens=True,
        quote="<escape>",
    ),
    "<|channel|>": _HARMONY,
    "<|python_tag|>": ToolSyntax('{"name":', re.compile(r"[\s;]*"), is_alone=True),
}
"""By a text that the templates of these models contain."""


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a chat on how tools are called; the template renders the tools themselves."""

    tool_choice: Literal["none", "auto", "required"] | Body | None = None
    parallel_tool_calls: bool = True


class ToolRules(NamedTuple):
    """How calls are found in an output: by a syntax; with a `name`, all of it is the arguments of that tool."""

    syntax: ToolSyntax | None
    name: str | None
    is_parallel: bool
    has_tools: bool = True


class Reading(NamedTuple):
    """What a piece of an output adds to its text, its calls (in the form of a chat's chunk) and its reasoning."""

    text: str = ""
    calls: Sequence[Body] = ()
    reasoning: str = ""


def read_tools(
    choice: ToolChoice, request: ChatCompletionRequest, template: ChatTemplate
) -> tuple[ToolRules | None, Grammar | None]:
    """Return how calls are found in the answer, and the grammar that it must follow; raises RequestError (400)."""
    wanted = choice.tool_choice
    functions = {function["name"]: function for function in map(_function, request.tools or [])}
    if isinstance(wanted, dict):
        function = wanted.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in functions:
            problem = f"got {wanted!r:.100}, expected one of the tools, {sorted(functions)!r:.200}"
            raise invalid_field("tool_choice", problem)
        return ToolRules(None, name, False), _grammar(_parameters(functions[name]))
    if wanted == "required":
        if not functions:
            raise invalid_field("tool_choice", "got 'required', expected tools as well")
        calls = [_call_of(function) for function in functions.values()]
        most = {} if choice.parallel_tool_calls else {"maxItems": 1}
        grammar = _grammar({"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most})
        return ToolRules(_REQUIRED, None, choice.parallel_tool_calls), grammar
    syntax = next((each for mark, each in _SYNTAXES.items() if mark in template.source), None)
    has_tools = wanted != "none" and bool(functions)
    if syntax is None or not (has_tools or syntax is _HARMONY):
        return None, None
    return ToolRules(syntax, None, choice.parallel_tool_calls, has_tools), None


def _function(tool: Fields) -> Fields:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_field("tools", f"got {tool!r:.100}, expected a function with a name")
    return function


def _parameters(function: Fields) -> Fields:
    return function.get("parameters") or {"type": "object", "additionalProperties": False}


def _call_of(function: Fields) -> Fields:
    properties = {"name": {"const": function["name"]}, "parameters": _parameters(function)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _grammar(schema: Fields) -> Grammar:
    return Grammar("tool_choice", "json_schema", msgspec.json.encode(schema).decode(), is_compact=True)


def make_reader(rules: ToolRules) -> Reader:
    return (HarmonyReader if rules.syntax is _HARMONY else ToolReader)(rules)


class Reader(ABC):
    """Splits one output into text, calls and reasoning while it is generated."""

    def __init__(self, rules: ToolRules) -> None:
        self._rules = rules
        self._held = ""
        self.num_calls = 0

    @abstractmethod
    def feed(self, text: str, is_last: bool) -> Reading:
        """Return what the next piece of the output adds."""

    @property
    def has_called(self) -> bool:
        """Return whether the model chose to make a call."""
        return self.num_calls > 0 and self._rules.name is None

    def _new_call(self, name: str, arguments: str) -> Body:
        self.num_calls += 1
        call = {"index": self.num_calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return call | {"function": {"name": name, "arguments": arguments}}


class HarmonyReader(Reader):
    """Reads gpt-oss's messages, each a header and a body: ` to=` in a header marks a call, its channel the reasoning.

    An output without headers is text: a structured output. The format is in openai/harmony's `docs/format.md`.
    """

    _header: str | None = None
    _is_first = True

    def feed(self, text: str, is_last: bool) -> Reading:
        self._held += text
        content, reasoning, calls = "", "", []
        while self._read_header(is_last):
            assert self._header is not None
            end = _MESSAGE_END.search(self._held)
            num_held = 0 if is_last else max(partial_match_length(self._held, mark) for mark in _MESSAGE_ENDS)
            recipient = _RECIPIENT.search(self._header) if self._rules.has_tools else None
            if recipient is not None and end is None and not is_last:
                break
            body = self._held[: len(self._held) - num_held if end is None else end.start()]
            if recipient is not None:
                if not _is_json(body):
                    content += body
                elif self._rules.is_parallel or not self.num_calls:
                    calls.append(self._new_call(recipient[1], body.strip()))
            elif "analysis" in self._header:
                reasoning += body
            else:
                content += body
            self._held = self._held[len(body) if end is None else end.end() :]
            if end is None:
                break
            self._header = None
        return Reading(content, calls, reasoning)

    def _read_header(self, is_last: bool) -> bool:
        """Remove a message's header, once it is complete, from the held text; return whether there is a message."""
        if self._header is None:
            held = self._held
            if self._is_first and not any(
                held.startswith(mark) or (not is_last and mark.startswith(held)) for mark in _HEADER_MARKS
            ):
                self._header = ""
            elif "<|message|>" in held:
                self._header, _, self._held = held.partition("<|message|>")
            self._is_first = self._is_first and self._header is None
        return self._header is not None


class ToolReader(Reader):
    """Finds calls in one output. Held text that turns out to have no call is returned at the output's end."""

    _is_in_calls = False
    _has_text = False

    def feed(self, text: str, is_last: bool) -> Reading:
        if self._rules.name is not None and self.num_calls:
            return Reading("", [{"index": 0, "function": {"arguments": text}}] if text else [])
        if self._rules.name is not None:
            return Reading("", [self._new_call(self._rules.name, text)])
        syntax = self._rules.syntax
        assert syntax is not None
        self._held += text
        content = ""
        if not self._is_in_calls:
            at = self._held.find(syntax.begin)
            self._is_in_calls = at >= 0 and not (syntax.is_alone and (self._has_text or self._held[:at].strip()))
            if not self._is_in_calls:
                at = len(self._held) - partial_match_length(self._held, syntax.begin)
            content, self._held = self._held[:at], self._held[at:]
            self._has_text = self._has_text or bool(content.strip())
        calls = self._pop_calls(syntax) if self._is_in_calls else []
        if is_last and not self.num_calls:
            content, self._held = content + self._held, ""
        return Reading(content, calls)

    def _pop_calls(self, syntax: ToolSyntax) -> list[Body]:
        """Remove the complete calls from the held text, and return them."""
        calls = []
        while True:
            rest = self._held[syntax.between.match(self._held).end() :]  # type: ignore[union-attr]
            # Without this check the pattern would search all of an incomplete call again with each token.
            has_end = any(end in rest for end in _QUOTED_CALL_ENDS)
            if syntax.quote is not None and has_end and (quoted := _QUOTED_CALL.match(rest)):
                rest = f"{quoted[1]}{_as_json(quoted[2], syntax.quote)}{rest[quoted.end() :]}"
            named = _NAMED_CALL.match(rest)
            try:
                found, end = _DECODER.raw_decode(rest, named.end() if named else 0)
            except (RecursionError, ValueError):
                break
            if named:
                found = {"name": named[1], "arguments": found}
            if not isinstance(found, dict) or not isinstance(found.get("name"), str):
                break
            self._held = rest[end:]
            arguments = found.get("arguments", found.get("parameters", {}))
            if self._rules.is_parallel or not self.num_calls:
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                calls.append(self._new_call(found["name"], text))
        return calls


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (RecursionError, ValueError, msgspec.DecodeError):
        return False
    return True


def _as_json(arguments: str, quote: str) -> str:
    """Return arguments as JSON: quoted strings, keys, and bare words that are no JSON value, become JSON strings."""
    mark = re.escape(quote)

    def spell(found: re.Match[str]) -> str:
        quoted, bare, colon = found.groups(default="")
        return bare if bare and not colon and _is_json(bare) else json.dumps(bare.strip() or quoted) + colon

    pattern = rf"{mark}(.*?){mark}|([^\s{{}}\[\],:<][^{{}}\[\],:<]*)(:?)"
    return re.sub(pattern, spell, arguments, flags=re.DOTALL)
