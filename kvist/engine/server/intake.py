"""From a request's body to what the engine shall generate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request

from kvist.engine.request import SequenceInput
from kvist.openai import requests as api
from kvist.openai.errors import RequestError
from kvist.openai.tokenization import ChatTokenizer

_T = TypeVar("_T")

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat may fill the context


@dataclass(frozen=True, slots=True)
class Job:
    """What one client asked for: `params.n` choices for each prompt, choices of a prompt side by side."""

    prompts: tuple[list[int], ...]
    params: api.SamplingParams
    cache_salt: str | None
    swa_scratch: bool | None
    is_stream: bool
    has_stream_usage: bool
    handoff: api.Handoff | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n

    def sequences(self, tokenizer: ChatTokenizer) -> list[SequenceInput]:
        """Return one input a choice; with a seed, each choice of a prompt gets its own."""
        return [
            SequenceInput(
                prompt,
                self._choice_params(choice),
                tokenizer.detokenizer(),
                self.cache_salt,
                self.swa_scratch,
                self.handoff,
            )
            for prompt in self.prompts
            for choice in range(self.params.n)
        ]

    def _choice_params(self, choice: int) -> api.SamplingParams:
        if self.params.seed is None or choice == 0:
            return self.params
        return msgspec.structs.replace(self.params, seed=self.params.seed + choice)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body; raises RequestError (413) once it is known to be longer than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    pieces, num_bytes = [], int(declared) if declared.isdecimal() else 0
    if num_bytes <= max_bytes:
        num_bytes = 0
        async for piece in request.stream():
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                break
        else:
            return b"".join(pieces)
    raise RequestError(413, f"body: longer than {max_bytes} bytes", code="body_too_large")


async def read_chat(body: bytes, tokenizer: ChatTokenizer, model_names: tuple[str, ...]) -> Job:
    """Return the job of a chat request; raises RequestError that names the field."""
    fields = api.read_fields(body)
    request = api.decode_chat_request(fields)
    params = _check(request, api.decode_sampling_params(fields), model_names)
    _check_is_text(request)
    prompt = await _off_loop(tokenizer, body, lambda: tokenizer.tokenize_chat(request).tolist())
    return _job(request, params, (prompt,), api.decode_handoff(fields))


async def read_completion(body: bytes, tokenizer: ChatTokenizer, model_names: tuple[str, ...]) -> Job:
    """Return the job of a text completion request; raises RequestError that names the field."""
    fields = api.read_fields(body)
    request = api.decode_completion_request(fields)
    params = _check(request, api.decode_sampling_params(fields), model_names)
    if params.token_limit is None:
        params = msgspec.structs.replace(params, max_tokens=max(_DEFAULT_COMPLETION_TOKENS, params.min_tokens))

    def tokenize() -> tuple[list[int], ...]:
        add = request.add_special_tokens
        return tuple(
            prompt if isinstance(prompt, list) else tokenizer.tokenize_text(prompt, add_special_tokens=add).tolist()
            for prompt in request.prompts
        )

    return _job(request, params, await _off_loop(tokenizer, body, tokenize), api.decode_handoff(fields))


async def read_tokenize(
    body: bytes, tokenizer: ChatTokenizer, model_names: tuple[str, ...]
) -> tuple[list[int], list[str | None] | None]:
    """Return the tokens of a chat or a text, and how they are spelt if that is asked for; raises RequestError."""
    fields = api.read_fields(body)
    asked = api.decode_tokenize_request(fields)
    if asked.messages is not None:
        chat = api.decode_chat_request(fields)
        _check_model(chat, model_names)
        _check_is_text(chat)
        if asked.add_special_tokens:
            message = "add_special_tokens: got true, expected it left out: a chat has those of its template"
            raise RequestError(400, message, param="add_special_tokens")
        prompt = await _off_loop(tokenizer, body, lambda: tokenizer.tokenize_chat(chat).tolist())
    else:
        text = api.decode_completion_request(fields)
        _check_model(text, model_names)
        if not isinstance(text.prompt, str):
            raise RequestError(400, "prompt: expected text", param="prompt")
        add, given = text.add_special_tokens, text.prompt
        prompt = await _off_loop(
            tokenizer, body, lambda: tokenizer.tokenize_text(given, add_special_tokens=add).tolist()
        )
    return prompt, tokenizer.token_strs(prompt) if asked.return_token_strs else None


def _check_model(request: api.ChatCompletionRequest | api.CompletionRequest, model_names: tuple[str, ...]) -> None:
    if request.model is not None and request.model not in model_names:
        message = f"model: got {request.model!r}, expected one of {list(model_names)}"
        raise RequestError(404, message, param="model", code="model_not_found")


def _check(
    request: api.ChatCompletionRequest | api.CompletionRequest, params: api.SamplingParams, model_names: tuple[str, ...]
) -> api.SamplingParams:
    _check_model(request, model_names)
    for field, value in _unsupported(params):
        message = f"{field}: got {value!r:.100}, expected it left out: this engine cannot do it"
        raise RequestError(400, message, param=field)
    return params


def _check_is_text(request: api.ChatCompletionRequest) -> None:
    for message_idx, message in enumerate(request.messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not api.is_text_part(part):
                kind = part.get("type") if isinstance(part, dict) else part
                message_field = f"messages[{message_idx}].content"
                raise RequestError(400, f"{message_field}: got a part {kind!r:.100}, expected text", param="messages")


def _unsupported(params: api.SamplingParams) -> Iterator[tuple[str, object]]:
    """Yield what is asked for and would change the answer, but is not done here: to ignore it were a wrong answer."""
    for field in ("echo", "suffix", "logit_bias"):
        if value := getattr(params, field):
            yield field, value
    if params.best_of not in (None, params.n):
        yield "best_of", params.best_of
    if params.response_format and params.response_format.get("type") != "text":
        yield "response_format", params.response_format


def _job(
    request: api.ChatCompletionRequest | api.CompletionRequest,
    params: api.SamplingParams,
    prompts: tuple[list[int], ...],
    handoff: api.Handoff | None,
) -> Job:
    if handoff is not None and len(prompts) * params.n != 1:
        message = f"kv_transfer_params: got {len(prompts)} prompts and n={params.n}, expected one of each"
        raise RequestError(400, message, param="kv_transfer_params")
    if isinstance(handoff, api.RemoteDecode) and request.stream:
        raise RequestError(400, "stream: got true, expected false with do_remote_decode", param="stream")
    has_usage = request.stream_options is not None and request.stream_options.include_usage
    return Job(prompts, params, request.cache_salt, request.swa_scratch, bool(request.stream), has_usage, handoff)


async def _off_loop(tokenizer: ChatTokenizer, body: bytes, tokenize: Callable[[], _T]) -> _T:
    """Tokenise here or, when it would hold up other requests, in a thread."""
    return tokenize() if len(body) <= tokenizer.inline_body_bytes else await asyncio.to_thread(tokenize)
