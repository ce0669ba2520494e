"""Chat templates: messages to the text that the model was trained on, as transformers renders them.

Templates come with models and are untrusted code: they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist.errors import InvalidValueError
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, Message, is_text_part

# Marks the end of the last message, where `continue_final_message` cuts; no text of a conversation contains it.
_CUT = "\ue000kvist-cut\ue000"


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks assistant tokens for training, and renders only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Return the block's statements in its place."""
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class ChatTemplate:
    """One model's template, compiled. Rendering is deterministic but for templates that print today's date."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `special_tokens` (bos_token, eos_token…) are visible to it. Raises InvalidValueError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidValueError("chat template", source[:80], f"jinja2 ({error}, line {error.lineno})") from None
        self._special_tokens = dict(special_tokens)
        self._takes_parts = _loops_over_content(environment.parse(source))

    def render(self, request: ChatCompletionRequest) -> str:
        """Return the prompt's text; raises RequestError (400) with the template's own words when it refuses."""
        messages = [self._message(message) for message in request.messages]
        if request.continue_final_message:
            messages[-1] = _marked(messages[-1])
        try:
            text = self._template.render(
                messages=messages,
                tools=request.tools,
                documents=request.documents,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                **self._special_tokens | (request.chat_template_kwargs or {}),
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, ArithmeticError, RecursionError) as error:
            raise RequestError(400, f"messages: the chat template refused them: {error}", param="messages") from None
        if not request.continue_final_message:
            return text
        head, cut, _ = text.rpartition(_CUT)
        if not cut:
            raise RequestError(400, "continue_final_message: the template drops the last message", param="messages")
        return head

    def _message(self, message: Message) -> Message:
        """Return the message as templates expect it: parts joined to text, arguments of tool calls as objects."""
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            message = message | {"content": "\n".join(_texts(content))}
        if message.get("tool_calls"):
            message = message | {"tool_calls": [_with_parsed_arguments(call) for call in message["tool_calls"]]}
        return message


def _texts(parts: Sequence[Any]) -> list[str]:
    return [part["text"] for part in parts if is_text_part(part)]


def _with_parsed_arguments(call: Any) -> Any:
    """OpenAI sends the arguments of a call as a JSON string; templates print them as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _marked(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + _CUT}
    if isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + _CUT}]}
    raise RequestError(400, "continue_final_message: expected a last message that ends in text", param="messages")


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """A template that iterates over a message's content takes parts; any other prints the content, so it takes text."""
    for loop in tree.find_all(jinja2.nodes.For):
        iterated = loop.iter
        if isinstance(iterated, jinja2.nodes.Getattr) and iterated.attr == "content":
            return True
        if isinstance(iterated, jinja2.nodes.Getitem) and isinstance(iterated.arg, jinja2.nodes.Const):
            if iterated.arg.value == "content":
                return True
        elif isinstance(iterated, jinja2.nodes.Name) and iterated.name == "content":
            return True
    return False


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
