"""Request bodies. A request's prompt and its sampling parameters are separate types: the router reads only the prompt.

A body is parsed once, by `read_fields`, and everything else is read from its fields. Unknown fields are ignored, since
other engines know more of them than this one.
"""

from __future__ import annotations

import json
import re
from threading import Lock
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, cast

import msgspec

from kvist.openai.errors import RequestError, invalid_field

Message: TypeAlias = dict[str, Any]
Fields: TypeAlias = dict[str, Any]
"""The fields of a body, as JSON values."""
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Prompt: TypeAlias = str | list[int]
Request = TypeVar("Request", bound=msgspec.Struct)
Part = TypeVar("Part")

_described: set[type] = set()
"""The types of which msgspec knows the fields."""
_describing = Lock()

_TEXT_FIELDS = {"refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}


def text_of_part(part: Any) -> str | None:
    """Return the text of a part of a message's content; None if it is for example an image, or malformed."""
    if isinstance(part, dict):
        part = part.get(_TEXT_FIELDS.get(str(part.get("type")), "text"))
    return part if isinstance(part, str) else None


class StreamOptions(msgspec.Struct, frozen=True):
    """Options on what a stream has in addition to the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatCompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `POST /v1/chat/completions`; the names of template fields are vLLM's.

    `swa_scratch` is Kvist's: False keeps a prompt's blocks out of scratch slots, for a prompt that is to be reused.
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    """As the API of the request has it."""
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    cache_salt: str | None = None
    swa_scratch: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `POST /v1/completions`; `prompt` is text or token ids, one or a batch (see `prompts`).

    `swa_scratch` as in chat.
    """

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], msgspec.Meta(min_length=1)]
    model: str | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    swa_scratch: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Return the batch, a single prompt being a batch of one; raises RequestError for a mixed list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))  # one pass over perhaps thousands of token ids
        if kinds == {int}:
            return [cast(list[int], self.prompt)]
        if kinds in ({str}, {list}):
            return cast(list[Prompt], self.prompt)
        raise invalid_field("prompt", "expected all strings, all token ids, or all lists of token ids")


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `POST /tokenize`, without its chat or prompt; the names are vLLM's."""

    messages: list[Message] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `POST /detokenize`, as in vLLM."""

    tokens: list[TokenId]
    model: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, for chat and text completions alike; names and ranges are vLLM's.

    `top_k` counts tokens, 0 or -1 meaning all. `logprobs` is a bool in chat (with `top_logprobs` alternatives) and a
    number of alternatives in text completions: `num_logprobs` reads both. `logit_bias` is by token id.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.0
    seed: int | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: bool | Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool = False
    logit_bias: dict[TokenId, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    bad_words: list[Annotated[str, msgspec.Meta(min_length=1)]] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the texts that end the output, without empty ones."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def is_adjusting(self) -> bool:
        """Return whether the parameters change the logits of every token before it is sampled."""
        has_penalty = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(has_penalty or self.logit_bias or self.allowed_token_ids)

    @property
    def num_logprobs(self) -> int | None:
        """Return how many alternatives to report a token, 0 for the token alone; None without log probabilities."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return self.top_logprobs or 0 if self.logprobs is True else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the same for each token of the prompt after the first; an echoed prompt has those of the output."""
        return self.num_logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens to generate, None for as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class RemoteDecode(msgspec.Struct, frozen=True):
    """Compute the prompt and its first token here; another worker fetches the blocks and computes the rest.

    With `max_cached_tokens` nothing is computed: the cached part of so many first tokens is held, if there is any.
    """

    max_cached_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class RemotePrefill(msgspec.Struct, frozen=True):
    """Fetch the prompt's blocks and first token from another worker, whose ranks have these `remote_endpoints`.

    If `num_tokens` is less than the prompt's length, only the blocks of these first tokens are fetched, and the rest is
    computed here.
    """

    remote_endpoints: tuple[str, ...]
    remote_request_id: str
    num_tokens: Annotated[int, msgspec.Meta(ge=1)]


Handoff: TypeAlias = RemoteDecode | RemotePrefill
"""The part of a request that another worker computes.

To a request with `do_remote_decode` in `kv_transfer_params`, which are vLLM's names, a worker answers with the
`kv_transfer_params` of `do_remote_prefill`, with which the same request continues at another worker.
"""


class _HandoffKind(msgspec.Struct, frozen=True):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False


class _WithHandoff(msgspec.Struct, Generic[Part], frozen=True):
    kv_transfer_params: Part


MAX_DEPTH = 128
"""Levels of arrays and objects in a body; templates and engines walk them by recursion."""

_TOO_DEEP = f"nested too deep, expected at most {MAX_DEPTH} levels of arrays and objects"

_COUNTED_ESCAPE = re.compile(rb"\\u00(?:3[aA]|[57][bB])")
"""Escapes of the characters that are counted in a body."""


def read_fields(body: bytes) -> Fields:
    """Return the fields of a body that all JSON parsers read alike; raises RequestError (400) for any other body.

    The body is one JSON object in UTF-8 without a byte order mark, or empty. It has no duplicate names, no NaN, no
    infinity and no half of a surrogate pair, and at most `MAX_DEPTH` levels, also in the JSON text of `arguments`.
    """
    try:
        fields = msgspec.json.decode(body) if body else {}
    except RecursionError:
        raise RequestError(400, f"body: {_TOO_DEEP}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"body: not valid JSON in UTF-8 ({error})") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "body: expected `object`")
    has_escapes = b"\\u00" in body and _COUNTED_ESCAPE.search(body) is not None
    if has_escapes or count_of(b"[", body) + count_of(b"{", body) > MAX_DEPTH:
        _check_depth("body", fields)
    # Each pair has a colon, so a pair that was dropped because its name is a duplicate makes fewer colons.
    encoded = msgspec.json.encode(fields)
    if has_escapes or (encoded != body and count_of(b":", body) != count_of(b":", encoded)):
        json.loads(body, object_pairs_hook=_check_names)
    return fields


def without_field(body: bytes, fields: Fields, name: str, *inner: str) -> bytes:
    """Return the body without a field, or without an inner field of that; the same object if it has no such field.

    Other values are not decoded, so that a long prompt does not block the event loop.
    """
    if name not in fields or (inner and not isinstance(fields[name], dict)):
        return body
    whole = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if inner:
        part = bytes(whole[name])
        rest = without_field(part, fields[name], *inner)
        if rest is part:
            return body
        whole[name] = msgspec.Raw(rest)
    else:
        del whole[name]
    return msgspec.json.encode(whole)


def with_fields(body: bytes, fields: Fields) -> bytes:
    """Return the body with these fields set, and its other values unchanged."""
    return msgspec.json.encode(msgspec.json.decode(body, type=dict[str, msgspec.Raw]) | fields)


def count_of(char: bytes, text: bytes) -> int:
    """Return how often a character occurs; for rare ones this takes a sixth of the time of `bytes.count`."""
    return len(text) - len(text.replace(char, b""))


def _check_depth(name: str, value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        for outer in level:
            if isinstance(outer, dict) and isinstance(arguments := outer.get("arguments"), str):
                _check_arguments(arguments)
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))  # a union would be made anew for each
        ]
    if level:
        raise RequestError(400, f"{name}: {_TOO_DEEP}", param=None if name == "body" else name)


def _check_arguments(text: str) -> None:
    """Raise RequestError if a text is JSON that nests too deep, since templates get it decoded."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    try:
        _check_depth("arguments", json.loads(text))
    except RecursionError:
        raise invalid_field("arguments", _TOO_DEEP) from None
    except ValueError:
        pass


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        name = max(names, key=names.count)
        raise RequestError(400, f"body: {name!r:.100} is there more than once", param=name)


def decode_sampling_params(fields: Fields) -> SamplingParams:
    """Return the sampling parameters of a request; raises RequestError (400) that names the field."""
    params = convert(fields, SamplingParams)
    limit = params.token_limit
    if limit is not None and params.min_tokens > limit:
        raise invalid_field("min_tokens", f"got {params.min_tokens}, expected at most max_tokens={limit}")
    if limit == 0 and not params.echo:
        raise invalid_field("max_tokens", "got 0, expected at least 1 without echo")
    if params.top_logprobs and params.logprobs is not True:
        raise invalid_field("top_logprobs", "expected only together with logprobs=true")
    return params


def decode_handoff(fields: Fields) -> Handoff | None:
    """Return the `kv_transfer_params` of a request, None without; raises RequestError (400) that names the field."""
    if fields.get("kv_transfer_params") is None:
        return None
    kind = convert(fields, _WithHandoff[_HandoffKind]).kv_transfer_params
    if kind.do_remote_decode == kind.do_remote_prefill:
        got = "both" if kind.do_remote_decode else "neither"
        problem = f"got {got}, expected one of do_remote_decode and do_remote_prefill"
        raise invalid_field("kv_transfer_params", problem)
    if kind.do_remote_decode:
        return convert(fields, _WithHandoff[RemoteDecode]).kv_transfer_params
    return convert(fields, _WithHandoff[RemotePrefill]).kv_transfer_params


def convert(fields: Fields, kind: type[Request]) -> Request:
    """Return a request's fields as a value of type `kind`; raises RequestError (400) that names the field."""
    if kind not in _described:
        with _describing:  # msgspec 0.22 crashes where two threads are the first to use a type
            msgspec.json.Decoder(kind)
        _described.add(kind)
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        reason = error
    if None in fields.values():  # to OpenAI a null is a missing field, and some clients send every field
        try:
            return msgspec.convert(
                {name: value for name, value in fields.items() if value is not None}, kind, str_keys=True
            )
        except msgspec.ValidationError as error:
            reason = error
    raise _as_request_error(fields, str(reason))


def _as_request_error(fields: Fields, error: str) -> RequestError:
    """Return msgspec's error (`Expected … - at `$.field``) with the field, its value and what was expected."""
    reason, _, path = error.partition(" - at `$")
    expected = reason[:1].lower() + reason[1:]
    param = path.removesuffix("`").lstrip(".") or None
    if param is None:
        return RequestError(400, f"body: {expected}")
    if param in fields:
        return invalid_field(param, f"got {fields[param]!r:.100}, {expected}")
    return invalid_field(param, expected)
