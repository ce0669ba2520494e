"""Response bodies: completions, chat completions, models; and chunks as server-sent events, `[DONE]` last."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvist.openai.requests import KvTransferParams

FinishReason = Literal["stop", "length", "abort"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """Return the counts with their total."""
        return cls(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens),
        )


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token, its natural log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A chosen token and the most likely ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a message, a token each."""

    content: list[ChatTokenLogprob]


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's answer."""

    content: str
    role: str = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of `n`."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer to a chat request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    kv_transfer_params: KvTransferParams | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream; the last may carry only `usage`."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    object: str = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a text, in four parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text; in a stream, what an event adds to it."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a text completion, or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    object: str = "text_completion"
    kv_transfer_params: KvTransferParams | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A served model; `max_model_len` as vLLM reports it, in tokens."""

    id: str
    created: int
    owned_by: str = "kvist"
    max_model_len: int | None = None
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    """The answer to `GET /v1/models`."""

    data: list[Model]
    object: str = "list"


DONE = b"data: [DONE]\n\n"
_LAST = (b"[DONE]", b'{"type":"message_stop"}')  # by which OpenAI and Anthropic end a stream

_encoder = msgspec.json.Encoder()


def encode_event(value: Any) -> bytes:
    """Return one event with the value as JSON."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def last_event_data(tail: bytes) -> bytes | None:
    """Return the data of the last complete event that says something in the tail of a stream; None when cut off."""
    for event in reversed(tail.replace(b"\r\n", b"\n").split(b"\n\n")):
        lines = [line.removeprefix(b"data: ") for line in event.split(b"\n") if line.startswith(b"data: ")]
        if lines and lines[-1][:64].strip().replace(b" ", b"") not in _LAST:
            return lines[-1]
    return None
