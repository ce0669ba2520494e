"""Calls of tools: which a request may have, and those that an answer makes, whole or as they come.

Models spell calls as their templates do: Qwen and Hermes in `<tool_call>` tags, Mistral behind `[TOOL_CALLS]`, Llama as
JSON alone, Gemma 4 and FunctionGemma in tags with quotes of their own, gpt-oss in channels (harmony), which reasoning
has too. Where a call is required or named, the output follows a grammar instead, whatever the model.
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

from kvist.engine.request import held_for
from kvist.engine.server.structured import Grammar
from kvist.openai.chat_template import ChatTemplate
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, Fields

Body = dict[str, Any]

_NAMED_CALL = re.compile(r"([\w.-]+)(?:\[ARGS\])?(?=\{)")
_QUOTED_CALL_ENDS = ("<tool_call|>", "<end_function_call>")
_QUOTED_CALL = re.compile(rf"call:([\w.-]+)(\{{.*?\}})(?={'|'.join(map(re.escape, _QUOTED_CALL_ENDS))})", re.DOTALL)
_HEADER_MARKS = ("<|channel|>", "<|start|>", " to=")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MESSAGE_END = re.compile("|".join(map(re.escape, _MESSAGE_ENDS)))
_RECIPIENT = re.compile(r" to=(?:functions\.)?([\w.-]+)")


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a model spells calls: behind `begin`, with what `between` matches around each; or in place of any text.

    `quote` stands on both sides of a string where arguments are not JSON.
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
"""By what the templates of their models have."""


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat says of calls; its tools themselves are the template's."""

    tool_choice: Literal["none", "auto", "required"] | Body | None = None
    parallel_tool_calls: bool = True


class ToolRules(NamedTuple):
    """How calls are found in an output: by a syntax, or all of it as the arguments of the tool that was named."""

    syntax: ToolSyntax | None
    name: str | None
    is_parallel: bool
    has_tools: bool = True


class Reading(NamedTuple):
    """What a piece of an output adds to its text, to its calls, as a chat's chunk has them, and to its reasoning."""

    text: str = ""
    calls: Sequence[Body] = ()
    reasoning: str = ""


def read_tools(
    choice: ToolChoice, request: ChatCompletionRequest, template: ChatTemplate
) -> tuple[ToolRules | None, Grammar | None]:
    """Return how an answer's calls are found, and what the output follows for it; raises RequestError (400)."""
    wanted = choice.tool_choice
    functions = {function["name"]: function for function in map(_function, request.tools or [])}
    if isinstance(wanted, dict):
        function = wanted.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in functions:
            message = f"tool_choice: got {wanted!r:.100}, expected one of the tools, {sorted(functions)!r:.200}"
            raise RequestError(400, message, param="tool_choice")
        return ToolRules(None, name, False), _grammar(_parameters(functions[name]))
    if wanted == "required":
        if not functions:
            raise RequestError(400, "tool_choice: got 'required', expected tools as well", param="tool_choice")
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
        raise RequestError(400, f"tools: got {tool!r:.100}, expected a function with a name", param="tools")
    return function


def _parameters(function: Fields) -> Fields:
    return function.get("parameters") or {"type": "object", "additionalProperties": False}


def _call_of(function: Fields) -> Fields:
    properties = {"name": {"const": function["name"]}, "parameters": _parameters(function)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _grammar(schema: Fields) -> Grammar:
    return Grammar("tool_choice", "json_schema", msgspec.json.encode(schema).decode(), is_compact=True)


def make_reader(rules: ToolRules) -> Reader:
    """Return what reads one output."""
    return (HarmonyReader if rules.syntax is _HARMONY else ToolReader)(rules)


class Reader(ABC):
    """Reads one output as it comes."""

    def __init__(self, rules: ToolRules) -> None:
        self._rules = rules
        self._held = ""
        self.num_calls = 0

    @abstractmethod
    def feed(self, text: str, is_last: bool) -> Reading:
        """Return what the next piece adds."""

    @property
    def has_called(self) -> bool:
        """Return whether the output made a call of its own accord."""
        return self.num_calls > 0 and self._rules.name is None

    def _body(self, name: str, arguments: str) -> Body:
        self.num_calls += 1
        about = {"index": self.num_calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return about | {"function": {"name": name, "arguments": arguments}}


class HarmonyReader(Reader):
    """Reads gpt-oss's messages, each a header and a body: the channel says whether it is text, and ` to=` a call.

    What has no header is text: a structured output. The format is openai/harmony's `docs/format.md`.
    """

    _header: str | None = None
    _is_first = True
    _num_searched = 0  # of the characters that are held: no message ends there

    def feed(self, text: str, is_last: bool) -> Reading:
        self._held += text
        said, reasoning, calls = "", "", []
        while self._read_header(is_last):
            assert self._header is not None
            end = _MESSAGE_END.search(self._held, self._num_searched)
            num_held = 0 if is_last else max(held_for(self._held, mark) for mark in _MESSAGE_ENDS)
            recipient = _RECIPIENT.search(self._header) if self._rules.has_tools else None
            if recipient is not None and end is None and not is_last:
                self._num_searched = len(self._held) - num_held
                break
            self._num_searched = 0
            body = self._held[: len(self._held) - num_held if end is None else end.start()]
            if recipient is not None:
                if not _is_json(body):
                    said += body
                elif self._rules.is_parallel or not self.num_calls:
                    calls.append(self._body(recipient[1], body.strip()))
            elif "analysis" in self._header:
                reasoning += body
            else:
                said += body
            self._held = self._held[len(body) if end is None else end.end() :]
            if end is None:
                break
            self._header = None
        return Reading(said, calls, reasoning)

    def _read_header(self, is_last: bool) -> bool:
        """Return whether the message that is held is known to begin, and take its header."""
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
    """Finds calls in one output. What turns out to be none is text after all, at the output's end."""

    def __init__(self, rules: ToolRules) -> None:
        super().__init__(rules)
        self._is_in_calls = False
        self._decoder = json.JSONDecoder(parse_constant=str)  # NaN is no JSON
        self._has_said = False

    def feed(self, text: str, is_last: bool) -> Reading:
        if self._rules.name is not None:
            return Reading("", self._arguments(self._rules.name, text))
        syntax = self._rules.syntax
        assert syntax is not None
        self._held += text
        said, was_outside = "", not self._is_in_calls
        if was_outside:
            at = self._held.find(syntax.begin)
            self._is_in_calls = at >= 0 and not (syntax.is_alone and (self._has_said or self._held[:at].strip()))
            if not self._is_in_calls:
                at = len(self._held) - held_for(self._held, syntax.begin)
            said, self._held = self._held[:at], self._held[at:]
            self._has_said = self._has_said or bool(said.strip())
        # Where arguments are JSON, a call ends with a brace: between them nothing is read again.
        has_end = was_outside or syntax.quote is not None or "}" in text
        calls = self._take_calls(syntax) if self._is_in_calls and has_end else []
        if is_last and not self.num_calls:
            said, self._held = said + self._held, ""
        return Reading(said, calls)

    def _arguments(self, name: str, text: str) -> list[Body]:
        if self.num_calls:
            return [{"index": 0, "function": {"arguments": text}}] if text else []
        return [self._body(name, text)]

    def _take_calls(self, syntax: ToolSyntax) -> list[Body]:
        """Take what is whole from what is held."""
        calls = []
        while True:
            rest = self._held[syntax.between.match(self._held).end() :]  # type: ignore[union-attr]
            # Until its end is there the pattern would look through all of it again with each token.
            has_end = any(end in rest for end in _QUOTED_CALL_ENDS)
            if syntax.quote is not None and has_end and (quoted := _QUOTED_CALL.match(rest)):
                rest = f"{quoted[1]}{_as_json(quoted[2], syntax.quote)}{rest[quoted.end() :]}"
            named = _NAMED_CALL.match(rest)
            try:
                found, end = self._decoder.raw_decode(rest, named.end() if named else 0)
            except (RecursionError, ValueError):
                break
            if named:
                found = {"name": named[1], "arguments": found}
            if not isinstance(found, dict) or not isinstance(found.get("name"), str):
                break
            self._held = rest[end:]
            arguments = found.get("arguments", found.get("parameters", {}))
            if self._rules.is_parallel or not self.num_calls:
                spelt = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                calls.append(self._body(found["name"], spelt))
        return calls


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (RecursionError, ValueError, msgspec.DecodeError):
        return False
    return True


def _as_json(arguments: str, quote: str) -> str:
    """Return arguments as JSON: quoted strings, keys and what else is no number, true, false or null become strings."""
    mark = re.escape(quote)

    def spell(found: re.Match[str]) -> str:
        quoted, bare, colon = found.groups(default="")
        return bare if bare and not colon and _is_json(bare) else json.dumps(bare.strip() or quoted) + colon

    pattern = rf"{mark}(.*?){mark}|([^\s{{}}\[\],:<][^{{}}\[\],:<]*)(:?)"
    return re.sub(pattern, spell, arguments, flags=re.DOTALL)
