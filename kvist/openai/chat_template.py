"""Chat templates, which render messages to the text that the model was trained on, as transformers does.

A template gets what vLLM 0.33 gives it (`vllm/renderers`): messages and tools with the fields that vLLM knows, in its
order. Templates come with models and are untrusted code: they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist.errors import InvalidValueError
from kvist.openai.errors import RequestError, invalid_field
from kvist.openai.requests import ChatCompletionRequest, Message, text_of_part

# Marks where the rendered text is cut: at an image, and at the end of the message for `continue_final_message`. No
# conversation contains it. A template that trims the space after it would also have trimmed the text.
_CUT = "\ue000kvist-cut\ue000"

_REFUSALS = (jinja2.TemplateError, TypeError, KeyError, ValueError, ArithmeticError, RecursionError)


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks assistant tokens for training, and renders only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Return the block's statements."""
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Sandbox(ImmutableSandboxedEnvironment):
    """Looks up a dict's items first, which is faster than to catch the error that it has no such attribute."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the value of `obj.attribute` in a template."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


class ChatTemplate:
    """One model's compiled template. Rendering is deterministic, except for templates that print today's date."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; `special_tokens` (bos_token, eos_token…) are visible to it. Raises InvalidValueError."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidValueError("chat template", source[:80], f"jinja2 ({error}, line {error.lineno})") from None
        # Lookups in jinja2's chain of maps would take half of the rendering time.
        self._template.globals = dict(self._template.globals)
        self.source, self.special_tokens = source, dict(special_tokens)
        self._takes_parts = self._loops_over_content(environment.parse(source))
        self._knows_developers = "'developer'" in source or '"developer"' in source

    def render(self, request: ChatCompletionRequest) -> str:
        """Return the prompt's text, up to the first image or other non-text item.

        Raises RequestError (400) if the template refuses the messages.
        """
        return self.render_parts(request)[0]

    def render_parts(self, request: ChatCompletionRequest) -> list[str]:
        """Return the prompt's text up to the first non-text item, and the texts before, between and behind the items.

        An engine puts an item's own tokens where the template puts a mark; if the template takes plain text, vLLM puts
        them before the message's text. Raises RequestError (400) if the template refuses the messages.
        """
        if not has_items(request):
            return [self._rendered(request)]
        text, other = [self._rendered(request, is_marked=is_marked) for is_marked in (True, False)]
        head, other = text.partition(_CUT)[0], other.partition(_CUT)[0]
        if head != other:  # the template puts all items first
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(head, other, strict=False))
            head = "".join(char for char, _ in same)
        return [head, *text[len(head) :].split(_CUT)]

    def _rendered(self, request: ChatCompletionRequest, *, is_marked: bool = True) -> str:
        try:
            return self._filled(request, is_marked)
        except _REFUSALS as error:
            problem = f"the chat template refused them: {error}"
            raise invalid_field("messages", problem, code="template_refused") from None

    def _filled(self, request: ChatCompletionRequest, is_marked: bool) -> str:
        """Return the template's text; raises one of _REFUSALS, or RequestError."""
        messages = self._arranged([self._message(message, is_marked) for message in request.messages])
        if request.continue_final_message:
            messages[-1] = _marked(messages[-1])
        text = self._template.render(self._variables(request) | {"messages": messages})
        if not request.continue_final_message:
            return text
        head, cut, tail = text.rpartition(_CUT)
        if not cut:
            raise RequestError(400, "continue_final_message: the template drops the last message", param="messages")
        return head if tail.startswith(" ") else head.rstrip()

    def _variables(self, request: ChatCompletionRequest) -> dict[str, Any]:
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens}
        if (effort := request.reasoning_effort) is not None:
            variables["enable_thinking"] = effort != "none"
        variables |= (request.chat_template_kwargs or {}) | ({} if effort is None else {"reasoning_effort": effort})
        variables["add_generation_prompt"] = request.add_generation_prompt and not request.continue_final_message
        if request.tools is not None:
            variables["tools"] = [self._tool(tool) for tool in request.tools]
        if request.documents is not None:
            variables["documents"] = request.documents
        return variables

    @functools.cached_property
    def effort_without_thinking(self) -> str:
        """Return the effort that turns thinking off: `none`, or `low` if the template treats `none` like any other."""
        rendered: list[str | None] = []
        for effort in ("none", "low", "medium", "high", "xhigh", "max"):
            request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
            try:
                rendered.append(self.render(request))
            except RequestError:
                rendered.append(None)
        return "low" if rendered[0] is None or rendered[0] in rendered[1:] else "none"

    @functools.cached_property
    def is_system_first(self) -> bool:
        """Return whether it accepts a system message at the start only."""
        return self._with_later_system("t") is None

    def _with_later_system(self, content: str) -> str | None:
        """Return a chat with a second system message, None if it is refused: in the environment that engines try."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        said = (("system", "t"), ("user", "t"), ("system", content), ("user", "t"))
        messages = [{"role": role, "content": text} for role, text in said]
        try:
            return environment.from_string(self.source).render(messages=messages, add_generation_prompt=False)
        except _REFUSALS:
            return None

    def _arranged(self, messages: list[Message]) -> list[Message]:
        """Return the messages with those of developers as the template knows them."""
        if not self._knows_developers and "developer" in [message.get("role") for message in messages]:
            return _with_one_system_message(messages)
        return messages

    def _message(self, message: Message, is_marked: bool) -> Message:
        """Return the message with its known fields, its text in the form that the template takes, arguments as objects.

        A non-text item becomes a cut, and with `is_marked` also an item after it.
        """
        content, role = message.get("content"), message.get("role")
        parts = [content] if isinstance(content, str) else content or []
        if not isinstance(parts, list):
            raise invalid_field("messages", f"got content {content!r:.100}, expected text or parts")
        known: Message = {"role": role}
        texts: list[str] = []
        shown_parts: list[dict[str, str]] = []
        num_items, has_other_parts = 0, role != "tool"
        for part in parts:
            text = text_of_part(part)
            if text is None:
                num_items, has_other_parts = num_items + 1, True
                shown_parts.append({"type": "text", "text": _CUT})
                if is_marked and isinstance(part, dict):
                    shown_parts.append({"type": str(part.get("type")).removeprefix("input_").removesuffix("_url")})
            elif isinstance(part, dict) and part.get("type") == "tool_reference":
                has_other_parts = True
                shown_parts.append({"type": "tool_reference", "name": text})
                texts.append(text)
            elif role != "system" or (text := self._system_text(text)) is not None:
                shown_parts.append({"type": "text", "text": text})
                texts.append(text)
        if self._takes_parts and has_other_parts:
            known["content"] = shown_parts
        else:
            known["content"] = _CUT * num_items + self._joined(texts)
        if role == "assistant":
            if message.get("tool_calls"):
                known["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            thoughts = message.get("reasoning")
            if thoughts is None:
                thoughts = message.get("reasoning_content")
            if thoughts is not None:
                known["reasoning"] = known["reasoning_content"] = known["thinking"] = thoughts
        elif role == "developer":
            known["tools"] = message.get("tools")
        elif role == "tool" and isinstance(message.get("tool_call_id"), str):
            known["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            known["name"] = message["name"]
        return known

    def _joined(self, texts: list[str]) -> str:
        return "\n".join(texts if self._takes_parts else filter(None, texts))

    def _system_text(self, text: str) -> str | None:
        return without_billing_header(text)

    def _call(self, call: Any) -> Any:
        """Return a call with its arguments, a JSON string in OpenAI's API, as an object before the name."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        if not isinstance(function.get("arguments"), dict):
            function = {"arguments": parsed_arguments(function.get("arguments")), "name": function.get("name")}
        return {"id": call.get("id"), "function": function, "type": "function"}

    def _tool(self, tool: Any) -> Any:
        """Return a tool with the fields that vLLM knows, in its order, because templates print the whole tool."""
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            return tool
        deferral = tool.get("defer_loading")
        known = {name: function.get(name) for name in ("name", "description", "parameters")}
        for name, value in (("strict", None), ("defer_loading", deferral)):
            if (value := function.get(name, value)) is not None:
                known[name] = value
        shown = {"type": "function", "function": known}
        return shown if deferral is None else shown | {"defer_loading": deferral}

    def _loops_over_content(self, tree: jinja2.nodes.Template) -> bool:
        """Return whether the template iterates over a message's content, and so takes parts; any other takes text."""
        for loop in tree.find_all(jinja2.nodes.For):
            match loop.iter:
                case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Name(name="content"):
                    return True
                case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
                    return True
        return False


def without_billing_header(text: str) -> str | None:
    """Return a system prompt without Claude Code's first line, which changes with each request; None if empty."""
    if not text.startswith("x-anthropic-billing-header"):
        return text
    return text.partition("\n")[2] or None


def items_of(request: ChatCompletionRequest) -> Iterator[Any]:
    """Yield the parts of messages that are not text, but for example images."""
    contents = [message.get("content") for message in request.messages]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (part for part in parts if text_of_part(part) is None)


def has_items(request: ChatCompletionRequest) -> bool:
    """Return whether some part of a message is not text."""
    return next(items_of(request), None) is not None


def _with_one_system_message(messages: list[Message]) -> list[Message]:
    """Turn developer messages into system messages; unless there is one, at the start, join them all into one there."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    if len(systems) == 1 and systems[0] is messages[0]:
        return [{name: systems[0][name] for name in systems[0] if name != "tools"} | {"role": "system"}, *others]
    contents = [message["content"] for message in systems]
    texts = [text if isinstance(text, str) else "\n".join(part["text"] for part in text) for text in contents]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def parsed_arguments(text: Any) -> dict[str, Any]:
    """Return the arguments of a call, a JSON object, decoded; an empty object if they are anything else."""
    try:
        arguments = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _marked(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": f"{content}{_CUT} "}
    if isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        return message | {"content": [*content[:-1], content[-1] | {"text": f"{content[-1]['text']}{_CUT} "}]}
    raise RequestError(400, "continue_final_message: expected a last message that ends in text", param="messages")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter, on which no model was trained."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
