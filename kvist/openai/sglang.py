"""Chats as SGLang 0.5.23 reads them where vLLM does otherwise: a template gets what the client sent, in its order.

After `sglang/srt/entrypoints/openai` (`serving_chat.py`, `serving_responses.py`, `protocol.py`),
`entrypoints/anthropic/serving.py` and `parser/jinja_template_utils.py`. What cannot be converted here raises
RequestError (400).
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import jinja2.nodes
from msgspec.structs import replace

from kvist.openai.chat_template import ChatTemplate, parsed_arguments
from kvist.openai.chats import (
    FREE_TEXT,
    MESSAGES_PATH,
    blocks_of,
    chat_with,
    image_part,
    objects_in,
    tool_reference,
    unknown_kind,
)
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, Fields, Message

_TOOL_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")
_OPTIONAL_FIELDS = ("strict", "defer_loading")
_MEDIA = ("image", "audio", "video", "vision")
_PACKED, _MAX_THOUGHTS_BYTES = "sglang-reasoning-v1.", 2**20
_SENTINEL = "later-system-message"


class SglangTemplate(ChatTemplate):
    """One model's template, as SGLang fills it."""

    @functools.cached_property
    def takes_later_systems(self) -> bool:
        """Return whether it shows system messages wherever they are."""
        return _SENTINEL in (self._with_later_system(_SENTINEL) or "")

    def _loops_over_content(self, tree: jinja2.nodes.Template) -> bool:
        loops = (loop.iter for loop in tree.find_all(jinja2.nodes.For))
        return any(word in self.source for word in _MEDIA) or any(map(_is_content_of_message, loops))

    def _filled(self, request: ChatCompletionRequest, is_marked: bool) -> str:
        """Return the prompt; an assistant's last message begins the answer if it is to be continued, or is a user's."""
        *others, last = request.messages
        content = self._message(last, is_marked)["content"]
        if last.get("role") != "assistant" or not isinstance(content, str):
            others, content = request.messages, ""
        elif not request.continue_final_message:
            others, content = [*others, {"role": "user", "content": content}], ""
        whole = {"continue_final_message": False, "add_generation_prompt": True}
        return (
            super()._filled(replace(request, messages=others, tools=_shown_tools(request), **whole), is_marked)
            + content
        )

    def _variables(self, request: ChatCompletionRequest) -> dict[str, Any]:
        thinking = {} if request.reasoning_effort is None else {"thinking": request.reasoning_effort != "none"}
        return thinking | super()._variables(request)

    def _arranged(self, messages: list[Message]) -> list[Message]:
        return messages

    def _message(self, message: Message, is_marked: bool) -> Message:
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            content = [part for part in content if not _is_reference(part)]
        known = super()._message(message | {"content": content, "reasoning": None}, is_marked)
        if not isinstance(message.get("content"), list):
            known["content"] = message.get("content") or ""
        if known["role"] == "user":
            known.pop("name", None)
        return known

    def _joined(self, texts: list[str]) -> str:
        return " ".join(texts)

    def _system_text(self, text: str) -> str:
        return text

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        arguments = function.get("arguments")
        shown = arguments if isinstance(arguments, dict) else parsed_arguments(arguments)
        named = {"name": function.get("name"), "arguments": shown}
        return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": named}

    def _tool(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            return tool
        deferral = tool.get("defer_loading")
        known = {"defer_loading": deferral} | function
        names = [*(name for name in function if name in _TOOL_FIELDS), *_TOOL_FIELDS]
        shown = {name: known.get(name) for name in dict.fromkeys(names)}
        shown = {name: value for name, value in shown.items() if value is not None or name not in _OPTIONAL_FIELDS}
        return {"type": tool.get("type", "function"), "function": shown, "defer_loading": deferral}


def chat_of(
    api: str, fields: Fields, template: SglangTemplate, previous: Sequence[Message] = ()
) -> ChatCompletionRequest:
    """Return the chat of a request to the API's endpoint, as `chats.chat_of` does for vLLM."""
    try:
        return _of_messages(fields, template) if api == MESSAGES_PATH else _of_response(fields, template, previous)
    except (AttributeError, TypeError) as error:
        raise RequestError(400, f"body: not as {api} has it ({error})") from None


def _of_messages(fields: Fields, template: SglangTemplate) -> ChatCompletionRequest:
    turns, thinking, output = objects_in(fields, "messages"), fields.get("thinking"), fields.get("output_config")
    texts = list(_texts(fields.get("system") or []))
    if not template.takes_later_systems:
        texts += [
            text.strip() for turn in turns if turn.get("role") == "system" for text in _texts(turn.get("content"))
        ]
        turns = [turn for turn in turns if turn.get("role") != "system"]
    messages: list[Message] = [{"role": "system", "content": "\n".join(texts)}] if any(map(str.strip, texts)) else []
    for turn in turns:
        messages += _turn(turn.get("role"), turn.get("content"), template)
    effort = output.get("effort") if isinstance(output, dict) else None
    if isinstance(thinking, dict):
        is_on = dict.fromkeys(("thinking", "enable_thinking"), thinking.get("type") != "disabled")
        fields = fields | {"chat_template_kwargs": is_on | (fields.get("chat_template_kwargs") or {})}
    own = [tool for tool in _tools(fields) if "input_schema" in tool]  # others are the server's
    tools = [_tool(tool, tool.get("description") or "", _object_schema(tool["input_schema"])) for tool in own]
    return chat_with(fields, messages, tools or None, "max" if effort == "xhigh" else effort)


def _of_response(fields: Fields, template: SglangTemplate, previous: Sequence[Message]) -> ChatCompletionRequest:
    instructions, prompt, reasoning = (fields.get(name) for name in ("instructions", "input", "reasoning"))
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages += previous
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else objects_in(fields, "input")
    for message in filter(None, map(_message_of, items)):
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _with_more(messages[-1], message)
        else:
            messages.append(message)
    if not template.takes_later_systems:
        systems = [text for each in messages if each["role"] == "system" for text in _texts(each.get("content"))]
        messages = [each for each in messages if each["role"] != "system"]
        messages[:0] = [{"role": "system", "content": "\n\n".join(systems)}] if systems else []
    tools = list(_functions(_tools(fields)))
    return chat_with(
        fields, messages, tools or None, reasoning.get("effort", "medium") if isinstance(reasoning, dict) else None
    )


def _functions(tools: Sequence[Fields]) -> Iterator[Fields]:
    """Yield the tools that the template shows; SGLang leaves out all others, also those in namespaces."""
    for tool in tools:
        match tool.get("type"):
            case "function":
                yield _tool(tool, tool.get("description"), tool.get("parameters"))
            case "custom" if tool.get("name"):
                form, texts = tool.get("format"), [tool.get("description")]
                if isinstance(form, dict) and form.get("type") == "grammar":
                    grammar = f"this {form.get('syntax') or 'lark'} grammar:\n{form.get('definition') or ''}"
                    texts.append(f"The payload must conform to {grammar}")
                yield _tool(tool, "\n\n".join(filter(None, texts)) or None, FREE_TEXT)


def _shown_tools(request: ChatCompletionRequest) -> list[Fields] | None:
    """Return the tools of a chat that may be called: none, one that `tool_choice` names, or all."""
    choice = request.tool_choice if isinstance(request.tool_choice, dict) else {"type": request.tool_choice}
    if choice.get("type") == "none":
        return None
    if choice.get("type") not in ("function", "custom", "tool"):
        return request.tools
    return [tool for tool in request.tools or [] if _name_of(tool) == _name_of(choice)] or None


def _name_of(tool: Fields) -> Any:
    """Return the name of a tool, or of one that is chosen, None if it has none."""
    function = tool.get("function")
    return tool.get("name") or (function.get("name") if isinstance(function, dict) else None)


def _tools(fields: Fields) -> list[Fields]:
    return objects_in({"tools": fields.get("tools") or []}, "tools")


def _tool(tool: Fields, description: Any, parameters: Any) -> Fields:
    """Return a tool of the two other APIs in the form of a chat's."""
    function = {"name": tool.get("name"), "description": description, "parameters": parameters}
    function["strict"] = tool.get("strict", False)
    return {"type": "function", "function": function, "defer_loading": tool.get("defer_loading")}


def _object_schema(schema: Any) -> Any:
    return {**schema, "type": schema.get("type", "object")}


def _texts(content: Any) -> Iterator[str]:
    for block in blocks_of(content):
        if isinstance(text := block.get("text"), str) and text:
            yield text


def _turn(role: Any, content: Any, template: SglangTemplate) -> Iterator[Message]:
    """Yield the chat messages of one of Anthropic's; tool results stand where they stood."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks, parts, calls = blocks_of(content), list[Fields](), list[Fields]()
    thoughts = [block["thinking"] for block in blocks if block.get("type") == "thinking" and block.get("thinking")]
    if thoughts and "</think>" in template.source:
        parts.append(_text_part("<think>" + "\n".join(thoughts) + "\n</think>"))
    for block in blocks:
        match block.get("type"):
            case "text" if block.get("text") is not None:
                parts.append(_text_part(block["text"]))
            case "image" if block.get("source"):
                parts.append(image_part(block))
            case "tool_use":
                function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                if parts:
                    yield {"role": role, "content": _content(parts)}
                    parts = []
                shown = list(_result_parts(block.get("content") or []))
                groups = [list(group) for _, group in groupby(shown, _is_reference)]
                for group in groups or [[]]:
                    yield {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": _content(group)}
            case "tool_result":
                parts.append(_text_part("Tool result: " + "\n".join(_texts(block.get("content") or []))))
            case "text" | "image" | "thinking":
                pass
            case kind:
                raise unknown_kind(kind, "messages")
    if parts or role != "user":
        yield {"role": role, "content": _content(parts)} | ({"tool_calls": calls} if calls else {})


def _result_parts(content: Any) -> Iterator[Fields]:
    for block in blocks_of(content):
        match block.get("type"):
            case "text" if block.get("text"):
                yield _text_part(block["text"])
            case "image":
                yield image_part(block)
            case "tool_reference":
                yield from filter(None, [tool_reference(block)])
            case kind if kind != "text":
                raise unknown_kind(kind, "messages")


def _is_reference(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_reference"


def _text_part(text: str) -> Fields:
    return {"type": "text", "text": text}


def _content(parts: list[Fields]) -> Any:
    """Return the content of a message: the parts, or the text if there is but one."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _message_of(item: Fields) -> Message | None:
    """Return the chat message of one of a response's input items, None for one without any content."""
    content = item.get("content")
    match item.get("type", "message"):
        case "message" if item.get("role") == "developer":
            first, *others = [*_texts(content), ""]
            parts = [_text_part(text) for text in (f"Developer instructions:\n{first}", *others) if text]
            return {"role": "system", "content": _content(parts)}
        case "message":
            return {"role": item.get("role"), "content": content}
        case "function_call" | "custom_tool_call" as kind:
            is_free = kind == "custom_tool_call"
            arguments = {"input": item.get("input") or ""} if is_free else item.get("arguments")
            function = {"name": item.get("name"), "arguments": arguments}
            call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output" | "custom_tool_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": "".join(_texts(item.get("output")))}
        case "reasoning":
            texts = list(_texts(item.get("summary") or [])) or list(_texts(content or []))
            texts = texts or [*filter(None, [_unpacked_thoughts(item.get("encrypted_content"))])]
            return {"role": "assistant", "reasoning_content": "\n".join(texts)} if texts else None
        case kind:
            raise unknown_kind(kind, "input")


def _unpacked_thoughts(packed: Any) -> str | None:
    """Return the thoughts that SGLang packed for clients that keep them, None for anything else."""
    if not isinstance(packed, str) or not packed.startswith(_PACKED):
        return None
    try:
        data = base64.urlsafe_b64decode(packed.removeprefix(_PACKED))
        return zlib.decompressobj().decompress(data, _MAX_THOUGHTS_BYTES).decode()
    except (ValueError, zlib.error):
        return None


def _with_more(earlier: Message, later: Message) -> Message:
    """Return two messages of the assistant as one."""
    both = earlier | {name: value for name, value in later.items() if not earlier.get(name)}
    contents = [each["content"] for each in (earlier, later) if each.get("content")]
    if len(contents) == 2:
        are_texts = all(isinstance(content, str) for content in contents)
        parts = [part for content in contents for part in blocks_of(content)]
        both["content"] = "\n\n".join(contents) if are_texts else parts
    for name, glue in (("tool_calls", []), ("reasoning_content", "\n")):
        if earlier.get(name) and later.get(name):
            both[name] = earlier[name] + glue + later[name]
    return both


def _is_content_of_message(node: jinja2.nodes.Node | None) -> bool:
    match node:
        case jinja2.nodes.Filter() | jinja2.nodes.Test() | jinja2.nodes.Getitem(arg=jinja2.nodes.Slice()):
            return _is_content_of_message(node.node)
        case jinja2.nodes.Getattr(node=jinja2.nodes.Name(name=name), attr="content"):
            return name in ("message", "msg", "m")
        case jinja2.nodes.Getitem(node=jinja2.nodes.Name(name=name), arg=jinja2.nodes.Const(value="content")):
            return name in ("message", "msg", "m")
    return False
