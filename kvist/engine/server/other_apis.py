"""Answers in the formats of Anthropic's messages and OpenAI's responses, whole or as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist.engine.request import RequestOutput
from kvist.engine.server.answers import Shape, UsageCounter
from kvist.engine.server.tools import Body
from kvist.openai.responses import encode_event

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class TypedShape(Shape):
    """An answer of one choice, streamed as typed events, with at most one block of content open at a time."""

    is_ended_by_done = False
    _has_begun = False
    _block: str | None = None

    def encode(self, body: Body) -> bytes:
        return b"event: %b\n%b" % (body["type"].encode(), encode_event(body))


class MessagesShape(TypedShape):
    """Answers of /v1/messages: one message, whose blocks are text and calls."""

    _num_blocks = 0

    def whole(self, outputs: Sequence[RequestOutput], usage: Body) -> Body:
        text, calls, _ = self._read(0, outputs[0])
        content: list[Body] = [{"type": "text", "text": text}] if text or not calls else []
        content += [_tool_use(call) | {"input": _input(call)} for call in calls]
        return self._message(usage) | {"content": content, **self._stop(outputs[0])}

    def events(self, index: int, output: RequestOutput, counter: UsageCounter) -> Iterator[Body]:
        if not self._has_begun:
            self._has_begun = True
            message = self._message(counter.usage() | {"completion_tokens": 0})
            yield {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None}}
        text, calls, _ = self._read(index, output)
        if text or (output.is_last and not calls and not self._num_blocks):
            if self._block != "text":
                yield from self._open_block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in calls:
            if "id" in call:
                yield from self._open_block(call["id"], _tool_use(call) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
        if output.is_last:
            yield from self._close_block()
            usage = {"output_tokens": counter.usage()["completion_tokens"]}
            yield {"type": "message_delta", "delta": self._stop(output), "usage": usage}
            yield {"type": "message_stop"}

    def _open_block(self, block: str, content: Body) -> Iterator[Body]:
        yield from self._close_block()
        self._block, self._num_blocks = block, self._num_blocks + 1
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": content}

    def _close_block(self) -> Iterator[Body]:
        if self._block is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._block = None

    def _delta(self, delta: Body) -> Body:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _message(self, usage: Body) -> Body:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        input_counts = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        message = {"id": self._heading.id, "type": "message", "role": "assistant", "model": self._heading.model}
        return message | {"content": [], "usage": input_counts | {"output_tokens": usage["completion_tokens"]}}

    def _stop(self, output: RequestOutput) -> Body:
        reason = self._reason(0, output)
        sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        kind = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": _STOP_REASONS.get(str(reason), kind), "stop_sequence": sequence}


def _input(call: Body) -> Any:
    """Return a call's arguments; an empty object if they were cut off."""
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return {}


def _tool_use(call: Body) -> Body:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


@dataclass(eq=False)
class ResponsesShape(TypedShape):
    """Answers of /v1/responses, whose items are a message and calls. None is stored."""

    _num_events = 0
    _items: list[Body] = field(default_factory=list, init=False)
    _texts: list[str] = field(default_factory=list, init=False)
    _call: Body = field(default_factory=dict, init=False)

    def whole(self, outputs: Sequence[RequestOutput], usage: Body) -> Body:
        text, calls, _ = self._read(0, outputs[0])
        items = [self._text_item(text)] if text or not calls else []
        return self._response(self._status(outputs[0]), items + [self._call_item(call) for call in calls], usage)

    def encode(self, body: Body) -> bytes:
        self._num_events += 1
        return super().encode(body | {"sequence_number": self._num_events - 1})

    def events(self, index: int, output: RequestOutput, counter: UsageCounter) -> Iterator[Body]:
        if not self._has_begun:
            self._has_begun = True
            for kind in ("response.created", "response.in_progress"):
                yield {"type": kind, "response": self._response({"status": "in_progress"}, [], None)}
        text, calls, _ = self._read(index, output)
        if text or (output.is_last and not calls and not self._items and self._block is None):
            if self._block != "text":
                yield from self._open_block("text", self._text_item("") | {"content": [], "status": "in_progress"})
                yield self._text_event("response.content_part.added") | {"part": _text_part("")}
            self._texts.append(text)
            yield self._text_event("response.output_text.delta") | {"delta": text, "logprobs": []}
        for call in calls:
            if "id" in call:
                empty = {"name": call["function"]["name"], "arguments": ""}
                yield from self._open_block(
                    call["id"], self._call_item(call | {"function": empty}) | {"status": "in_progress"}
                )
                self._call = call | {"function": empty}
            arguments = call["function"]["arguments"]
            self._call["function"]["arguments"] += arguments
            if "input" not in self._call_item(self._call):
                yield self._call_event("response.function_call_arguments.delta") | {"delta": arguments}
        if output.is_last:
            yield from self._close_block()
            status = self._status(output)
            kind = "response.completed" if status["status"] == "completed" else "response.incomplete"
            yield {"type": kind, "response": self._response(status, self._items, counter.usage())}

    def _open_block(self, block: str, item: Body) -> Iterator[Body]:
        yield from self._close_block()
        self._block = block
        yield {"type": "response.output_item.added", "output_index": len(self._items), "item": item}

    def _close_block(self) -> Iterator[Body]:
        if self._block is None:
            return
        if self._block == "text":
            text = "".join(self._texts)
            item = self._text_item(text)
            yield self._text_event("response.output_text.done") | {"text": text, "logprobs": []}
            yield self._text_event("response.content_part.done") | {"part": _text_part(text)}
        else:
            item = self._call_item(self._call)
            if "input" in item:
                yield self._call_event("response.custom_tool_call_input.delta") | {"delta": item["input"]}
                yield self._call_event("response.custom_tool_call_input.done") | {"input": item["input"]}
            else:
                call = {"name": item["name"], "arguments": item["arguments"]}
                yield self._call_event("response.function_call_arguments.done") | call
        yield {"type": "response.output_item.done", "output_index": len(self._items), "item": item}
        self._items.append(item)
        self._texts, self._block = [], None

    def _text_event(self, kind: str) -> Body:
        return {
            "type": kind,
            "item_id": f"msg_{self._heading.id}",
            "output_index": len(self._items),
            "content_index": 0,
        }

    def _call_event(self, kind: str) -> Body:
        return {"type": kind, "item_id": self._call["id"], "output_index": len(self._items)}

    def _text_item(self, text: str) -> Body:
        item = {"type": "message", "id": f"msg_{self._heading.id}", "role": "assistant", "status": "completed"}
        return item | {"content": [_text_part(text)]}

    def _call_item(self, call: Body) -> Body:
        item = {"type": "function_call", "id": call["id"], "call_id": call["id"], "status": "completed"}
        item |= call["function"]
        item |= self._job.call_fields.get(item["name"], {})
        return item | {"input": _free_text(item.pop("arguments"))} if item["type"] == "custom_tool_call" else item

    def _status(self, output: RequestOutput) -> Body:
        if output.finish_reason == "length":
            return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {"status": "completed", "incomplete_details": None}

    def _response(self, status: Body, items: list[Body], usage: Body | None) -> Body:
        heading, job = self._heading, self._job
        return {
            "id": heading.id,
            "object": "response",
            "created_at": heading.created,
            "model": heading.model,
            **status,
            "error": None,
            "output": items,
            "usage": None if usage is None else _usage(usage),
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
            "max_output_tokens": job.params.token_limit,
            "parallel_tool_calls": job.tools is None or job.tools.is_parallel,
            "tool_choice": "auto",
            "tools": [],
            "metadata": {},
            "instructions": None,
        }


def _text_part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _free_text(arguments: str) -> str:
    """Return the text that a tool of free text is called with; all that was written if that is something else."""
    try:
        text = json.loads(arguments).get("input")
    except (ValueError, AttributeError):
        text = None
    return text if isinstance(text, str) else arguments


def _usage(usage: Body) -> Body:
    details = {"input_tokens_details": usage["prompt_tokens_details"], "output_tokens_details": {"reasoning_tokens": 0}}
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    return counts | {"total_tokens": usage["total_tokens"], **details}
