"""What a request asks, as far as routing needs it: its model and its prompt's tokens, as the worker will see them.

A body is parsed here, once and strictly, and a client that says in it what only the router may say is refused.

A prompt that cannot be tokenised here (no tokeniser, a template that refuses, an unknown endpoint) is not refused: it
is routed by load, and `untokenized_reason` says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.openai.errors import RequestError
from kvist.openai.requests import (
    ChatCompletionRequest,
    Fields,
    Message,
    Prompt,
    TokenId,
    decode_chat_request,
    decode_completion_request,
    is_text_part,
    read_fields,
)
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.reserved import refuse_fields

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
FORM_PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"})
"""Endpoints that take a form; all others take JSON, whatever a request says of its content."""

INLINE_BODY_BYTES = 2048
"""Up to here a body is tokenised on the event loop, at a cost of at most 0.5 ms; 32 kB would cost 20 ms. Measured with
the bundled tokeniser on a 2-core Xeon; a hop to a thread and back takes 0.05 ms, and more on a busy machine."""

CHARS_PER_TOKEN = 4
"""For estimating prompts that are not tokenised."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request's prompt. `num_tokens` counts all prompts of a batch, of which the longest is in `token_ids`.

    `fields` is the whole body, but for a prompt that is in `token_ids` alone.
    """

    model: str | None
    num_tokens: int
    token_ids: list[int] | NDArray[np.uint32] | None = None
    cache_salt: str | None = None
    untokenized_reason: str | None = None
    num_prompts: int = 1
    fields: Fields = field(default_factory=dict)


class PromptReader:
    """Turns request bodies into what routing needs; refuses only what no worker would accept."""

    def __init__(self, tokenizer: ChatTokenizer | None, has_index: Callable[[], bool] = lambda: False) -> None:
        """Read with this model's tokeniser; without one only prompts given as token ids are known.

        Compiled code as the index's reads those, into arrays, where that `has_index`.
        """
        self._tokenizer = tokenizer
        self._has_index = has_index

    async def read(self, path: str | None, body: bytes) -> Ask:
        """Return what the body of this endpoint asks; raises RequestError (400) that names the field.

        Without a path it may be a chat's, a completion's, or `{"token_ids": […]}`.
        """
        if path in FORM_PATHS:
            return _read_other({}, len(body))
        if path == COMPLETION_PATH and self._has_index():
            ask = _read_tokenized_completion(body)
            if ask is not None:
                return ask
        if len(body) <= INLINE_BODY_BYTES or self._tokenizer is None:
            return self._read(path, body)
        return await asyncio.to_thread(self._read, path, body)

    def _read(self, path: str | None, body: bytes) -> Ask:
        fields = _client_fields(body)
        if path is None:
            if fields.get("token_ids") is not None:
                return _read_tokens(fields)
            path = COMPLETION_PATH if fields.get("messages") is None else CHAT_PATH
        if path == CHAT_PATH:
            return self._read_chat(fields, len(body))
        return self._read_completion(fields) if path == COMPLETION_PATH else _read_other(fields, len(body))

    def _read_chat(self, fields: Fields, num_bytes: int) -> Ask:
        request = decode_chat_request(fields)
        try:
            token_ids = self._loaded_tokenizer().tokenize_chat(_text_before_first_image(request))
        except RequestError as error:
            num_tokens, reason = num_bytes // CHARS_PER_TOKEN, error.message
            return Ask(request.model, num_tokens, None, request.cache_salt, reason, fields=fields)
        return Ask(request.model, len(token_ids), token_ids, request.cache_salt, fields=fields)

    def _read_completion(self, fields: Fields) -> Ask:
        request = decode_completion_request(fields)
        prompts = request.prompts
        longest = max(prompts, key=_length_in_tokens)
        num_other_tokens = sum(map(_length_in_tokens, prompts)) - _length_in_tokens(longest)
        try:
            token_ids = (
                longest if isinstance(longest, list) else self._tokenize_text(longest, request.add_special_tokens)
            )
        except RequestError as error:
            num_tokens = num_other_tokens + _length_in_tokens(longest)
            return Ask(request.model, num_tokens, None, request.cache_salt, error.message, len(prompts), fields)
        num_tokens = num_other_tokens + len(token_ids)
        return Ask(request.model, num_tokens, token_ids, request.cache_salt, None, len(prompts), fields)

    def _tokenize_text(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._loaded_tokenizer().tokenize_prompt(text, add_special_tokens=add_special_tokens)

    def _loaded_tokenizer(self) -> ChatTokenizer:
        if self._tokenizer is None:
            raise RequestError(400, "the router has no model path, so text is not tokenised")
        return self._tokenizer


class _Tokens(msgspec.Struct, frozen=True):
    token_ids: list[TokenId]
    model: str | None = None
    cache_salt: str | None = None


def _read_tokens(fields: Fields) -> Ask:
    try:
        prompt = msgspec.convert(fields, _Tokens)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"body: {error}") from None
    return Ask(prompt.model, len(prompt.token_ids), prompt.token_ids, prompt.cache_salt, fields=fields)


def _read_tokenized_completion(body: bytes) -> Ask | None:
    """Return what a completion of one prompt of token ids asks, in a tenth of the time; None for any other body."""
    from kvist.indexer.compiled.json_tokens import split_integer_array

    split = split_integer_array(body, b"prompt", np.uint32, placeholder=b"[0]")
    if split is None or len(split[0]) == 0:
        return None
    token_ids, rest = split
    try:
        fields = _client_fields(rest)
        request = decode_completion_request(fields)
    except RequestError:  # that of the whole body says where
        return None
    return Ask(request.model, len(token_ids), token_ids, request.cache_salt, fields=fields)


def _client_fields(body: bytes) -> Fields:
    fields = read_fields(body)
    refuse_fields(fields)
    return fields


def _read_other(fields: Fields, num_bytes: int) -> Ask:
    """Take the model from a body of unknown shape, if it says one; the worker judges the rest."""
    model = fields.get("model")
    known_model = model if isinstance(model, str) else None
    reason = "the endpoint is not routed by prefix"
    return Ask(known_model, num_bytes // CHARS_PER_TOKEN, None, None, reason, fields=fields)


def _length_in_tokens(prompt: Prompt) -> int:
    return len(prompt) if isinstance(prompt, list) else len(prompt) // CHARS_PER_TOKEN + 1


def _text_before_first_image(request: ChatCompletionRequest) -> ChatCompletionRequest:
    """Return the request cut right before its first part that is not text.

    The engine goes on with the item's own hash where the template now ends the prompt, so only blocks before it match.
    """
    for message_idx, message in enumerate(request.messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part_idx, part in enumerate(content):
            if not is_text_part(part):
                texts = content[:part_idx]
                kept: list[Message] = request.messages[:message_idx]
                if texts or not kept:
                    kept = [*kept, message | {"content": texts or ""}]
                return msgspec.structs.replace(request, messages=kept, add_generation_prompt=False)
    return request
