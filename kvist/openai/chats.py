"""Converts requests of other APIs to chats, as vLLM 0.33 does, so that prompts are rendered by the chat template.

Anthropic's messages follow `vllm/entrypoints/anthropic/serving.py`, OpenAI's responses
`vllm/entrypoints/openai/responses/utils.py`. What cannot be converted here raises RequestError (400).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvist.openai.chat_template import ChatTemplate, parsed_arguments, without_billing_header
from kvist.openai.errors import RequestError, invalid_field
from kvist.openai.requests import ChatCompletionRequest, Fields, Message, convert, text_of_part

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"

FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters that the template shows for a tool that takes free text."""


def chat_of(
    api: str, fields: Fields, template: ChatTemplate, previous: Sequence[Message] = ()
) -> ChatCompletionRequest:
    """Return the chat of a request to the API's endpoint, for a worker with this template.

    `previous` is the conversation of the response that the request continues, with its answer (`messages_of_response`).
    """
    try:
        return _of_messages(fields, template) if api == MESSAGES_PATH else _of_response(fields, previous)
    except (AttributeError, TypeError) as error:
        raise RequestError(400, f"body: not as {api} has it ({error})") from None


def _of_messages(fields: Fields, template: ChatTemplate) -> ChatCompletionRequest:
    turns, system = objects_in(fields, "messages"), fields.get("system")
    tools = _tools_in_effect(fields, turns)
    texts = [system] if isinstance(system, str) else list(_system_texts(system or []))
    if template.is_system_first:
        for message in turns:
            if message.get("role") == "system":
                texts += _system_texts(message.get("content"))
        turns = [message for message in turns if message.get("role") != "system"]
    messages: list[Message] = [{"role": "system", "content": "".join(texts)}] if any(texts) else []
    for message in turns:
        messages += _anthropic_turn(message.get("role"), message.get("content"))
    thinking, output = fields.get("thinking"), fields.get("output_config")
    effort = output.get("effort") if isinstance(output, dict) else None
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        effort = template.effort_without_thinking
    return chat_with(fields, messages, None if tools is None else [*map(_anthropic_tool, tools)], effort)


def _of_response(fields: Fields, previous: Sequence[Message]) -> ChatCompletionRequest:
    instructions, prompt = fields.get("instructions"), fields.get("input")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages += [message for message in previous if message.get("role") != "system"]
    items: list[Fields] = [] if isinstance(prompt, str) else objects_in(fields, "input")
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _turns(items)
    last = items[-1] if items else {}
    is_open = last.get("status") in ("in_progress", "incomplete") and last.get("type", "message") in _CONTINUED
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    tools = list(_functions(objects_in(fields, "tools"))) if fields.get("tools") else None
    return chat_with(fields, messages, tools, effort, is_open=is_open)


def chat_fields(api: str, fields: Fields) -> Fields:
    """Return the fields of a request other than its conversation, in the form of a chat's."""
    chat, choice = {**fields, "n": 1}, fields.get("tool_choice")
    outer = fields.get("output_config" if api == MESSAGES_PATH else "text")
    if isinstance(outer, dict) and isinstance(outer.get("format"), dict):
        chat["response_format"] = {"type": outer["format"].get("type"), "json_schema": outer["format"]}
    if api == RESPONSES_PATH:
        chat["max_completion_tokens"] = fields.get("max_output_tokens")
        if isinstance(choice, dict):
            chat["tool_choice"] = {"function": {"name": choice.get("name")}}
        return chat
    chat["stop"] = fields.get("stop_sequences")
    if isinstance(choice, dict):
        kind = choice.get("type")
        named = {"function": {"name": choice.get("name")}}
        chat["tool_choice"] = named if kind == "tool" else "required" if kind == "any" else kind
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return chat


def messages_of_response(output: Any) -> list[Message]:
    """Return the messages that a response adds to its conversation: those of its message items, but no calls."""
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    contents = [item.get("content") for item in items if item.get("type") == "message"]
    texts = [text_of_part(part) for content in contents if isinstance(content, list) for part in content]
    return [{"role": "assistant", "content": text} for text in texts if text is not None]


_CONTINUED = ("message", "reasoning")


def chat_with(
    fields: Fields, messages: list[Message], tools: list[Any] | None, effort: Any, *, is_open: bool = False
) -> ChatCompletionRequest:
    """Return a chat of these messages and tools, with the rest of a request of another API."""
    given = {name: fields.get(name) for name in ("model", "cache_salt", "chat_template_kwargs", "tool_choice")}
    given |= {"messages": messages, "tools": tools, "reasoning_effort": effort}
    given |= {"continue_final_message": is_open, "add_generation_prompt": not is_open}
    return convert(given, ChatCompletionRequest)


def objects_in(fields: Fields, name: str) -> list[Fields]:
    """Return the list of objects in a field; raises RequestError (400)."""
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid_field(name, f"got {value!r:.100}, expected a list of objects")
    return value


def unknown_kind(kind: object, param: str) -> RequestError:
    """Return the refusal of a part that cannot be rendered here."""
    return invalid_field(param, f"got {kind!r:.100}, which has no place in a chat here", code="unknown_part")


def _system_texts(content: Any) -> Iterator[str]:
    """Yield the texts of a system prompt, without Claude Code's, which changes with each request."""
    for block in blocks_of(content):
        text = block.get("text") if block.get("type") == "text" else None
        if text and without_billing_header(text) == text:
            yield text


def blocks_of(content: Any) -> list[Fields]:
    """Return the blocks of a content, which may be one text; raises RequestError (400)."""
    return (
        [{"type": "text", "text": content}] if isinstance(content, str) else objects_in({"content": content}, "content")
    )


def _anthropic_turn(role: Any, content: Any) -> Iterator[Message]:
    """Yield the chat messages of one of Anthropic's: tool results first, then the message itself."""
    if role == "system":
        if text := "".join(_system_texts(content)):
            yield {"role": role, "content": text}
        return
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    message: Message = {"role": role}
    parts: list[Fields] = []
    for block in blocks_of(content):
        match block.get("type"):
            case "text":
                parts += [{"type": "text", "text": block["text"]}] if block.get("text") else []
            case "image":
                parts += [image_part(block)] if block.get("source") else []
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
                raise unknown_kind(kind, "messages")
    if parts:
        is_text = len(parts) == 1 and "text" in parts[0]
        message["content"] = parts[0]["text"] if is_text else parts
    if role != "user" or parts:
        yield message


def _tool_result(call_id: str, content: Any) -> Iterator[Message]:
    blocks = blocks_of(content)
    texts = [block.get("text", "") for block in blocks if block.get("type") == "text"]
    yield {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    if images := [image_part(block) for block in blocks if block.get("type") == "image"]:
        yield {"role": "user", "content": images}
    if references := [part for part in map(tool_reference, blocks) if part is not None]:
        yield {"role": "tool", "tool_call_id": call_id, "content": references}


def image_part(block: Fields) -> Fields:
    """Return the part of a chat's message for an image, which differs from those for other images."""
    return {"type": "image_url", "image_url": block.get("source")}


def tool_reference(block: Fields) -> Fields | None:
    """Return the part of a chat's message that names a deferred tool, None for any other block of a tool's result."""
    name = block.get("tool_name") or block.get("name") if block.get("type") == "tool_reference" else None
    return {"type": "tool_reference", "name": name} if name else None


def _tools_in_effect(fields: Fields, turns: Sequence[Fields]) -> list[Fields] | None:
    """Return the tools of a request after all that system messages in the conversation add and remove."""
    tools = None if fields.get("tools") is None else objects_in(fields, "tools")
    blocks = [block for turn in turns if isinstance(turn.get("content"), list) for block in turn["content"]]
    changes = [block for block in blocks if block.get("type") in ("tool_addition", "tool_removal")]
    if not changes:
        return tools
    known, removed = {tool.get("name"): tool for tool in tools or []}, set[Any]()
    for change in changes:
        named = change["tool"] if isinstance(change.get("tool"), dict) else {}
        tool = named.get("definition") or known.get(named.get("name"))
        if tool is None:
            raise invalid_field("messages", f"{change['type']}: got {named!r:.100}, expected a known tool")
        name = tool.get("name")
        if change["type"] == "tool_removal":
            removed.add(name)
        else:
            known[name] = tool if named.get("definition") else tool | {"defer_loading": None}
            removed.discard(name)
    return [tool for name, tool in known.items() if name not in removed]


def _anthropic_tool(tool: Fields) -> Fields:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise invalid_field("tools", f"got input_schema {schema!r:.100}, expected an object")
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": function | {"parameters": schema | {"type": schema.get("type", "object")}}}


def _turns(items: Sequence[Fields]) -> list[Message]:
    """Return the messages of a response's input items; consecutive items of the assistant become one message."""
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
    """Return an item's field and value in an assistant's message, or None and a whole message."""
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
    raise unknown_kind(kind, "input")


def _functions(tools: Sequence[Fields]) -> Iterator[Fields]:
    """Yield the tools that the template shows, in the form of a chat's; the server runs the others."""
    for tool in tools:
        match tool.get("type"):
            case "function":
                yield {"type": "function", "function": tool}
            case "custom":
                yield {"type": "function", "function": {**tool, "parameters": FREE_TEXT}}
            case "namespace":
                for inner in objects_in(tool, "tools"):
                    if inner.get("type") == "function":
                        name = f"{tool.get('name')}__{inner.get('name')}"
                        yield {"type": "function", "function": {**inner, "name": name}}
