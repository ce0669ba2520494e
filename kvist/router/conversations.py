"""Which worker made a response, and the conversation up to it, by the response's id.

A request that continues a response names it, and only the worker that made it has it: vLLM keeps responses in its own
memory, if `VLLM_ENABLE_RESPONSES_API_STORE` is set. The conversation gives the tokens of the prompt that follows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvist.openai.chats import messages_of_response
from kvist.openai.requests import ChatCompletionRequest, Message

MAX_BYTES = 64 * 2**20
"""Of ids and messages, in all conversations; the least recently used are dropped."""

MAX_RESPONSES = 100_000


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The worker that made a response, and the conversation up to it as JSON, None where that is not known."""

    worker: str
    messages_json: bytes | None

    @property
    def messages(self) -> list[Message] | None:
        if self.messages_json is None:
            return None
        messages: list[Message] = msgspec.json.decode(self.messages_json)
        return messages


class _Response(msgspec.Struct, frozen=True):
    id: str
    status: str | None = None
    output: Any = None


class _LastEvent(msgspec.Struct, frozen=True):
    response: _Response


_decode = msgspec.json.Decoder(_Response | None).decode
_decode_last_event = msgspec.json.Decoder(_LastEvent).decode


class Conversations:
    """Bounded in bytes and in number. Thread-safe: long prompts are read on other threads."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.on_stored: Callable[[str, str, bytes | None], None] = lambda *_: None
        """Called with the arguments of `store`, for each response that is recorded here."""

    def get(self, response_id: str) -> StoredResponse | None:
        """Return what is known of a response, None if nothing."""
        with self._lock:
            stored = self._stored.get(response_id)
            if stored is not None:
                self._stored.move_to_end(response_id)
            return stored

    def record(self, worker: str, chat: ChatCompletionRequest | None, answer: bytes | None, *, is_event: bool) -> None:
        """Record the response in a worker's answer, which is the JSON of the response or of a stream's last event.

        `chat` is the request, None where it could not be read as one.
        """
        try:
            response = None if not answer else _decode_last_event(answer).response if is_event else _decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if response is None:
            return
        messages_json = None
        if chat is not None and response.status in ("completed", "incomplete"):
            asked = [message for message in chat.messages if message.get("role") != "system"]
            messages_json = msgspec.json.encode([*asked, *messages_of_response(response.output)])
        self.store(response.id, worker, messages_json)
        self.on_stored(response.id, worker, messages_json)

    def store(self, response_id: str, worker: str, messages_json: bytes | None) -> None:
        """Keep a response, which may come from another process."""
        with self._lock:
            self._drop(response_id)
            self._stored[response_id] = StoredResponse(worker, messages_json)
            self._num_bytes += len(response_id) + len(messages_json or b"")
            while self._num_bytes > MAX_BYTES or len(self._stored) > MAX_RESPONSES:
                self._drop(next(iter(self._stored)))

    def _drop(self, response_id: str) -> None:
        if (dropped := self._stored.pop(response_id, None)) is not None:
            self._num_bytes -= len(response_id) + len(dropped.messages_json or b"")
