"""Answers as Anthropic's messages spell them, whole or as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from kvist.engine.request import RequestOutput
from kvist.engine.server.answers import Body, TypedShape, UsageCounter

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesShape(TypedShape):
    """Answers of /v1/messages: one message of text and calls, which a stream opens and closes one by one."""

    _num_blocks = 0

    def whole(self, outputs: Sequence[RequestOutput], usage: Body) -> Body:
        text, calls, _ = self._read(0, outputs[0])
        content: list[Body] = [{"type": "text", "text": text}] if text or not calls else []
        content += [_tool_use(call) | {"input": _input(call)} for call in calls]
        return self._message(usage) | {"content": content, **self._stop(outputs[0])}

    def events(self, index: int, output: RequestOutput, counter: UsageCounter) -> Iterator[Body]:
        if not self._is_open:
            self._is_open = True
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
            spent = {"output_tokens": counter.usage()["completion_tokens"]}
            yield {"type": "message_delta", "delta": self._stop(output), "usage": spent}
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
        spent = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        about = {"id": self._heading.id, "type": "message", "role": "assistant", "model": self._heading.model}
        return about | {"content": [], "usage": spent | {"output_tokens": usage["completion_tokens"]}}

    def _stop(self, output: RequestOutput) -> Body:
        reason = self._reason(0, output)
        sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        kind = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": _STOP_REASONS.get(str(reason), kind), "stop_sequence": sequence}


def _input(call: Body) -> Any:
    """Return what a tool is called with, nothing where that was cut off."""
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return {}


def _tool_use(call: Body) -> Body:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
