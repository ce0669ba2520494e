"""Requests of other APIs as the chats that vLLM 0.33 makes of them, so that their prompts are rendered as a chat's.

Anthropic's messages go as in `vllm/entrypoints/anthropic/serving.py`, OpenAI's responses as in
`vllm/entrypoints/openai/responses/utils.py`. What cannot be made a chat of here raises RequestError (400).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvist.openai.chat_template import ChatTemplate, parsed_arguments, without_billing_header
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, Fields, Message, convert, is_text_part

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"

_FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What a tool that takes free text is shown to take."""


def chat_of(
    api: str, fields: Fields, template: ChatTemplate, previous: Sequence[Message] = ()
) -> ChatCompletionRequest:
    """Return the chat that a request to the API's endpoint is, to a worker with this template.

    `previous` is the conversation of the response that it goes on with, and what that said (`said_in_response`).
    """
    try:
        return _of_messages(fields, template) if api == MESSAGES_PATH else _of_response(fields, previous)
    except (AttributeError, TypeError) as error:
        raise RequestError(400, f"body: not as {api} has it ({error})") from None


def _of_messages(fields: Fields, template: ChatTemplate) -> ChatCompletionRequest:
    asked, system = _objects(fields, "messages"), fields.get("system")
    texts = [system] if isinstance(system, str) else list(_system_texts(system or []))
    if template.is_system_first:
        for message in asked:
            if message.get("role") == "system":
                texts += _system_texts(message.get("content"))
        asked = [message for message in asked if message.get("role") != "system"]
    messages: list[Message] = [{"role": "system", "content": "".join(texts)}] if any(texts) else []
    for message in asked:
        messages += _anthropic_turn(message.get("role"), message.get("content"))
    thinking, output = fields.get("thinking"), fields.get("output_config")
    effort = output.get("effort") if isinstance(output, dict) else None
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        effort = template.effort_without_thinking
    tools = None if fields.get("tools") is None else [_anthropic_tool(tool) for tool in _objects(fields, "tools")]
    return _chat(fields, messages, tools, effort)


def _of_response(fields: Fields, previous: Sequence[Message]) -> ChatCompletionRequest:
    instructions, asked = fields.get("instructions"), fields.get("input")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages += [message for message in previous if message.get("role") != "system"]
    items: list[Fields] = [] if isinstance(asked, str) else _objects(fields, "input")
    messages += [{"role": "user", "content": asked}] if isinstance(asked, str) else _turns(items)
    last = items[-1] if items else {}
    is_open = last.get("status") in ("in_progress", "incomplete") and last.get("type", "message") in _CONTINUED
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    tools = list(_functions(_objects(fields, "tools"))) if fields.get("tools") else None
    return _chat(fields, messages, tools, effort, is_open=is_open)


def chat_fields(api: str, fields: Fields) -> Fields:
    """Return what a request asks beside its conversation, as a chat has it."""
    asked, choice = {**fields, "n": 1}, fields.get("tool_choice")
    outer = fields.get("output_config" if api == MESSAGES_PATH else "text")
    if isinstance(outer, dict) and isinstance(outer.get("format"), dict):
        asked["response_format"] = {"type": outer["format"].get("type"), "json_schema": outer["format"]}
    if api == RESPONSES_PATH:
        asked["max_completion_tokens"] = fields.get("max_output_tokens")
        if isinstance(choice, dict):
            asked["tool_choice"] = {"function": {"name": choice.get("name")}}
        return asked
    asked["stop"] = fields.get("stop_sequences")
    if isinstance(choice, dict):
        kind = choice.get("type")
        named = {"function": {"name": choice.get("name")}}
        asked["tool_choice"] = named if kind == "tool" else "required" if kind == "any" else kind
        asked["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return asked


def said_in_response(output: Any) -> list[Message]:
    """Return what a response adds to the conversation that goes on with it: the texts of its messages alone."""
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    contents = [item.get("content") for item in items if item.get("type") == "message"]
    parts = [part for content in contents if isinstance(content, list) for part in content if is_text_part(part)]
    return [{"role": "assistant", "content": part["text"]} for part in parts]


_CONTINUED = ("message", "reasoning")


def _chat(
    fields: Fields, messages: list[Message], tools: list[Any] | None, effort: Any, *, is_open: bool = False
) -> ChatCompletionRequest:
    given = {name: fields.get(name) for name in ("model", "cache_salt", "chat_template_kwargs")}
    given |= {"messages": messages, "tools": tools, "reasoning_effort": effort}
    given |= {"continue_final_message": is_open, "add_generation_prompt": not is_open}
    return convert(given, ChatCompletionRequest)


def _objects(fields: Fields, name: str) -> list[Fields]:
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RequestError(400, f"{name}: got {value!r:.100}, expected a list of objects", param=name)
    return value


def _unknown(kind: object, param: str) -> RequestError:
    message = f"{param}: got {kind!r:.100}, which has no place in a chat here"
    return RequestError(400, message, param=param, code="unknown_part")


def _system_texts(content: Any) -> Iterator[str]:
    """Yield the texts of a system prompt, but for the one that changes with each request."""
    for block in _blocks(content):
        if block.get("type") != "text":
            raise _unknown(block.get("type"), "system")
        text = block.get("text")
        if text and without_billing_header(text) == text:
            yield text


def _blocks(content: Any) -> list[Fields]:
    return (
        [{"type": "text", "text": content}] if isinstance(content, str) else _objects({"content": content}, "content")
    )


def _anthropic_turn(role: Any, content: Any) -> Iterator[Message]:
    """Yield a message of Anthropic's as chats have it, behind the results of tools that it brings."""
    if role == "system":
        if text := "".join(_system_texts(content)):
            yield {"role": role, "content": text}
        return
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    message: Message = {"role": role}
    parts: list[Fields] = []
    for block in _blocks(content):
        match block.get("type"):
            case "text":
                parts += [{"type": "text", "text": block["text"]}] if block.get("text") else []
            case "image":
                parts += [{"type": "image_url"}] if block.get("source") else []
            case "thinking":
                message["reasoning"] = message.get("reasoning", "") + (block.get("thinking") or "")
            case "tool_use":
                function = {"arguments": block.get("input") or {}, "name": block.get("name") or ""}
                call = {"id": block.get("id"), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "tool_result" if role == "user":
                yield from _tool_result(block.get("tool_use_id") or "", block.get("content") or "")
            case "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
            case "redacted_thinking" | "tool_reference":
                pass
            case kind:
                raise _unknown(kind, "messages")
    if parts:
        is_text = len(parts) == 1 and "text" in parts[0]
        message["content"] = parts[0]["text"] if is_text else parts
    if role != "user" or parts:
        yield message


def _tool_result(call_id: str, content: Any) -> Iterator[Message]:
    blocks = _blocks(content)
    texts = [block.get("text", "") for block in blocks if block.get("type") == "text"]
    yield {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    if images := [{"type": "image_url"} for block in blocks if block.get("type") == "image"]:
        yield {"role": "user", "content": images}
    if any(block.get("type") == "tool_reference" for block in blocks):
        raise _unknown("tool_reference", "messages")


def _anthropic_tool(tool: Fields) -> Fields:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(400, f"tools: got input_schema {schema!r:.100}, expected an object", param="tools")
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": function | {"parameters": schema | {"type": schema.get("type", "object")}}}


def _turns(items: Sequence[Fields]) -> list[Message]:
    """Return the messages that a response's input items are: what an assistant does in one go is one message."""
    messages: list[Message] = []
    for item in items:
        name, value = _assistants_part(item)
        if name is None:
            messages.append(value)
        elif not messages or messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", name: value})
        elif name == "tool_calls":
            messages[-1].setdefault(name, []).extend(value)
        elif messages[-1].get(name) is None:
            messages[-1][name] = value
        else:
            messages.append({"role": "assistant", name: value})
    return messages


def _assistants_part(item: Fields) -> tuple[str | None, Any]:
    """Return a field of an assistant's message and its value, or None and a message that stands for itself."""
    content, kind = item.get("content"), item.get("type", "message")
    match kind:
        case "function_call" | "custom_tool_call":
            name, arguments = item.get("name"), parsed_arguments(item.get("arguments"))
            if kind == "custom_tool_call":
                arguments = {"input": item.get("input") or ""}
            elif item.get("namespace"):
                name = f"{item['namespace']}__{name}"
            function = {"name": name, "arguments": arguments}
            return "tool_calls", [{"id": item.get("call_id"), "type": "function", "function": function}]
        case "function_call_output" | "custom_tool_call_output":
            return None, {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        case "reasoning" if not item.get("encrypted_content"):
            texts = [part.get("text") for part in content or item.get("summary") or [] if isinstance(part, dict)]
            return "reasoning", texts[0] if texts else ""
        case "message" if item.get("role") == "assistant":
            text = content[0].get("text") if isinstance(content, list) and content else content
            return ("content", text) if isinstance(text, str) else (None, item)
        case "message" if "role" in item:
            return None, item
    raise _unknown(kind, "input")


def _functions(tools: Sequence[Fields]) -> Iterator[Fields]:
    """Yield the tools that the model is shown, as chats have them; others of a response's are for the server."""
    for tool in tools:
        match tool.get("type"):
            case "function":
                yield {"type": "function", "function": tool}
            case "custom":
                yield {"type": "function", "function": {**tool, "parameters": _FREE_TEXT}}
            case "namespace":
                for inner in _objects(tool, "tools"):
                    if inner.get("type") == "function":
                        name = f"{tool.get('name')}__{inner.get('name')}"
                        yield {"type": "function", "function": {**inner, "name": name}}
