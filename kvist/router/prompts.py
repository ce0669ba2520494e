"""Parses requests as far as routing needs it: their model and their prompt's tokens, as the worker will see them.

A body is parsed here, once and strictly, and refused if it has fields that only the router may set.

A prompt that cannot be tokenised here (no tokeniser, a template that fails, an unknown endpoint) is not refused: it is
routed by load, and `untokenized_reason` says why. Chats of all three APIs are rendered alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvist.events import WorkerRank
from kvist.openai import sglang
from kvist.openai.chats import MESSAGES_PATH, RESPONSES_PATH, chat_of
from kvist.openai.errors import RequestError, invalid_field
from kvist.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Fields,
    Message,
    Prompt,
    TokenId,
    convert,
    count_of,
    read_fields,
)
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.conversations import Conversations, StoredResponse
from kvist.router.reserved import model_in_form, refuse_fields

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
GENERATE_PATH = "/generate"  # SGLang's own
APIS = {
    CHAT_PATH: "chat",
    COMPLETION_PATH: "completions",
    MESSAGES_PATH: "messages",
    RESPONSES_PATH: "responses",
    GENERATE_PATH: "generate",
}
"""Endpoints whose prompts are read, and their names in metrics."""
FORM_PATHS = frozenset(
    {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations"}
)
"""Endpoints that take a form; all others take JSON, whatever content type a request has."""

_REWRITING = {
    CHAT_PATH: ("chat_template", "add_special_tokens", "truncate_prompt_tokens"),
    COMPLETION_PATH: ("suffix", "truncate_prompt_tokens"),
    RESPONSES_PATH: (),
    MESSAGES_PATH: (),
    GENERATE_PATH: (
        *("lora_path", "extra_key", "session_params", "input_embeds"),
        *("image_data", "video_data", "audio_data"),
    ),
}
"""Fields that make an engine use other tokens than those of the model's template and the text.

Those that only cut a prompt beyond the model's context, as `truncation` of responses, are none of them.
"""

_TOKEN_IDS = {COMPLETION_PATH: "prompt", GENERATE_PATH: "input_ids"}
"""The fields with a prompt's tokens."""

INLINE_BODY_BYTES = 24 * 1024
INLINE_CONVERSATION_BYTES = 256 * 1024
INLINE_VALUES = 800
"""JSON up to the first length is parsed and rendered on the event loop, and up to the second with so few arrays and
objects: 0.7 ms for 50,000 tokens, 2 for 60 calls of tools; 800 messages take 5."""
MAX_WAITING_PARSED = 64
"""While so many prompts wait for a thread, further ones up to the second length wait as bodies, a third of the size."""

INLINE_TOKENIZED_BODY_BYTES = 2 * 2**20
"""Prompts of token ids up to here are read on the event loop if there is an index: 300,000 ids take 3 to 4 ms."""

INLINE_FORM_BYTES = 2**20
"""A form up to here is read on the event loop: that takes 0.6 ms."""

CHARS_PER_TOKEN = 4
"""For estimating prompts that are not tokenised."""

BYTES_PER_TOKEN_ID = 6
"""The same for prompts of token ids that are not read."""

FORM_BYTES_PER_TOKEN = 320
"""The same for forms: speech at 128 kbit/s, of which models make 50 tokens a second. Estimated, not measured."""


class ParsedRequest(msgspec.Struct, frozen=True, eq=False):
    """One request, as far as routing needs it."""

    model: str | None
    num_tokens: int
    """Of all prompts of a batch; an estimate where `token_ids` is None."""
    token_ids: NDArray[np.uint32] | None = None
    """Of the prompt, the longest one of a batch."""
    cache_salt: str | None = None
    untokenized_reason: str | None = None
    num_prompts: int = 1
    fields: Fields = {}
    """The whole body, but for token ids, which may be in `token_ids` or in the body alone."""
    chat: ChatCompletionRequest | None = None
    """The chat that was rendered."""
    worker: str | None = None
    """The only worker that has the conversation which the request continues."""
    obstacle: str | None = None
    """A word for why the tokens are not known, or not all of the prompt's."""
    is_renamed: bool = False
    """Whether the body names an alias of the model."""
    path: str = COMPLETION_PATH
    """Of the endpoint."""
    prefill_rank: WorkerRank | None = None
    """The rank that computes the same prompt for another answer."""
    num_exact_tokens: int | None = None
    """How many leading tokens are the engine's own, where `token_ids` has stand-ins for an image or another item."""

    @property
    def outcome(self) -> str:
        """Return how well the prompt could be read: `tokens` (all of them), `partly`, or `load only`."""
        if self.token_ids is None:
            return "load only"
        return "tokens" if self.obstacle is None else "partly"

    @property
    def is_computed_whole(self) -> bool:
        """Return whether an engine computes all of the prompt, cached or not, for its log probabilities."""
        get = self.fields.get
        return get("prompt_logprobs") is not None or bool(get("echo") and get("logprobs") is not None)


class KnownModels(Protocol):
    """The models that are served, as far as reading prompts needs them."""

    def tokenizer(self, model: str | None) -> ChatTokenizer | None:
        """Return the model's tokeniser, None where its text cannot be read."""

    def engine(self, model: str | None) -> str | None:
        """Return the engine whose way of reading chats counts for the model: vLLM if it has any such worker."""

    def resolve_alias(self, fields: Fields) -> str | None:
        """Return the model of a request that names an alias, None if it names none."""


@dataclass(frozen=True, slots=True)
class OneModel:
    """A `KnownModels` where all prompts are of one model, which may have no tokeniser here."""

    only: ChatTokenizer | None
    only_engine: str | None = None

    def tokenizer(self, _: str | None) -> ChatTokenizer | None:
        return self.only

    def engine(self, _: str | None) -> str | None:
        return self.only_engine

    def resolve_alias(self, _: Fields) -> str | None:
        return None


Reading: TypeAlias = Generator[None, None, ParsedRequest]
"""Reads a request; yields in front of what takes too long for an event loop."""


class PromptReader:
    """Parses request bodies; refuses those that could be read in two ways, and leaves all else to the worker."""

    def __init__(
        self,
        models: KnownModels,
        has_index: Callable[[], bool] = lambda: False,
        needs_tokens: Callable[[], bool] = lambda: True,
    ) -> None:
        """Use each model's tokeniser, unless `needs_tokens` returns False: then text is not tokenised.

        Once `has_index` returns True, prompts of token ids are read by compiled code, as the index's is.
        """
        self._models = models
        self._has_index = has_index
        self._needs_tokens = needs_tokens
        self._num_waiting = 0
        self.conversations = Conversations()

    async def read(self, path: str | None, body: bytes) -> ParsedRequest:
        """Parse the body of a request to this endpoint; raises RequestError (400) that names the field.

        Without a path it may be a chat's, a completion's, or `{"token_ids": […]}`. What takes too long for the event
        loop is done on a thread.
        """
        read = self.read_now(path, body)
        return read if isinstance(read, ParsedRequest) else await self.finish(read)

    def read_now(self, path: str | None, body: bytes) -> ParsedRequest | Reading:
        """Return what `read` does, or, in front of what would block the event loop, what `finish` goes on with."""
        reading = self._reading(path, body)
        try:
            next(reading)
        except StopIteration as done:
            parsed: ParsedRequest = done.value
            return parsed
        return reading

    async def finish(self, reading: Reading) -> ParsedRequest:
        """Do the rest of a `read` on a thread."""
        self._num_waiting += 1
        try:
            return await asyncio.to_thread(_rest_of, reading)
        finally:
            self._num_waiting -= 1

    def _reading(self, path: str | None, body: bytes) -> Reading:
        if path in FORM_PATHS:
            if len(body) > INLINE_FORM_BYTES:
                yield
            return self._read_form(path, body)
        if len(body) > INLINE_TOKENIZED_BODY_BYTES:
            yield
        tokenized = self._read_tokenized(path, body)
        if tokenized is not None:
            return tokenized
        most = INLINE_CONVERSATION_BYTES if self._num_waiting < MAX_WAITING_PARSED else INLINE_BODY_BYTES
        if len(body) > most or (
            len(body) > INLINE_BODY_BYTES and count_of(b"{", body) + count_of(b"[", body) > INLINE_VALUES
        ):
            yield
        ids_matter = path is None or (path in APIS and (path not in _TOKEN_IDS or self._needs_tokens()))
        reads_all = ids_matter or len(body) <= INLINE_BODY_BYTES
        rest, num_prompts = (body, {}) if reads_all else _without_token_ids(body)
        fields = _client_fields(rest)
        is_renamed = self._rename(fields)
        if path in _TOKEN_IDS and (num := num_prompts.get(_TOKEN_IDS[path])):
            parsed = _read_other(fields, len(body) * CHARS_PER_TOKEN // BYTES_PER_TOKEN_ID, _NOT_NEEDED)
            return msgspec.structs.replace(parsed, num_prompts=num, path=path, is_renamed=is_renamed)
        if path is None and fields.get("token_ids") is not None:
            return _read_tokens(fields)
        if path is None:
            path = COMPLETION_PATH if fields.get("messages") is None else CHAT_PATH
        parsed = yield from self._read_fields(path, fields, len(body))
        return msgspec.structs.replace(parsed, path=path, is_renamed=is_renamed)

    def _read_form(self, path: str, body: bytes) -> ParsedRequest:
        named = model_in_form(body)
        model = None if named is None else body[named].decode(errors="replace")
        # Each form is a conversation of its own.
        target = self._models.resolve_alias({"model": model, "prompt": xxh3_64_hexdigest(body)})
        parsed = _read_other({"model": target or model}, len(body) * CHARS_PER_TOKEN // FORM_BYTES_PER_TOKEN)
        return msgspec.structs.replace(parsed, path=path, is_renamed=target is not None)

    def _rename(self, fields: Fields) -> bool:
        """Replace an alias by the model, and return whether there was one."""
        target = self._models.resolve_alias(fields)
        if target is not None:
            fields["model"] = target
        return target is not None

    def _read_fields(self, path: str, fields: Fields, num_bytes: int) -> Reading:
        if path in (COMPLETION_PATH, GENERATE_PATH):
            return (yield from self._read_completion(path, fields, num_bytes))
        if path.startswith(RESPONSES_PATH + "/"):
            stored = self.conversations.get(path.split("/")[3])
            return _read_other(fields, num_bytes, worker=None if stored is None else stored.worker)
        if path not in APIS:
            return _read_other(fields, num_bytes)
        return (yield from self._read_chat(path, fields, num_bytes))

    def _read_tokenized(self, path: str | None, body: bytes) -> ParsedRequest | None:
        """Parse a request to complete prompts of token ids, in a tenth of the time; return None for any other."""
        if path is None or path not in _TOKEN_IDS or not self._has_index():
            return None
        from kvist.indexer.compiled.json_tokens import MARK, split_token_ids

        name = _TOKEN_IDS[path]
        split = split_token_ids(body, name.encode())
        if split is None or len(split.token_ids) == 0:
            return None
        token_ids, ends = split.token_ids, split.ends
        try:
            fields = _client_fields(split.rest)
            if fields.get(name) != [MARK] or fields.get("text") is not None:
                return None
            fields[name] = [_stand_in(token_ids.data)]
            is_renamed = self._rename(fields)
            _check_is_plain(path, fields)
            request = _completion_of(path, fields)
        except RequestError:  # parsing the whole body raises one that says where
            return None
        num_tokens, num_prompts = len(token_ids), 1
        if ends is not None:
            lengths = np.diff(ends, prepend=np.uint32(0))
            longest, num_prompts = int(lengths.argmax()), len(ends)
            token_ids = token_ids[ends[longest] - lengths[longest] : ends[longest]]
        return ParsedRequest(
            request.model,
            num_tokens,
            token_ids,
            request.cache_salt,
            num_prompts=num_prompts,
            fields=fields,
            obstacle="batch" if num_prompts > 1 else None,
            is_renamed=is_renamed,
            path=path,
        )

    def _read_chat(self, api: str, fields: Fields, num_bytes: int) -> Reading:
        previous_id = fields.get("previous_response_id") if api == RESPONSES_PATH else None
        stored = self.conversations.get(previous_id) if isinstance(previous_id, str) else None
        worker = None if stored is None else stored.worker
        try:
            _check_is_plain(api, fields)
            tokenizer, engine = self._loaded_tokenizer(fields), self._models.engine(fields.get("model"))
            template = tokenizer.template_of(engine)
            if api == CHAT_PATH:
                chat = convert(fields, ChatCompletionRequest)
            else:
                previous = _messages_of(previous_id, stored)
                if isinstance(template, sglang.SglangTemplate):
                    chat = sglang.chat_of(api, fields, template, previous)
                else:
                    chat = chat_of(api, fields, template, previous)
            # To a response's prompt, rendered by a template or not, vLLM has the tokeniser add its special tokens.
            adds_special_tokens = api == RESPONSES_PATH and engine == "vllm"
            rendered = template.render_parts(chat)
            if not tokenizer.is_quick(rendered):
                yield
            token_ids, num_exact = tokenizer.tokenize_parts(rendered, chat, add_special_tokens=adds_special_tokens)
        except RequestError as error:
            return _read_other(fields, num_bytes, error, worker)
        num_tokens, salt = len(token_ids), chat.cache_salt
        parsed = ParsedRequest(chat.model, num_tokens, token_ids, salt, None, 1, fields, chat, worker)
        if num_exact == num_tokens:
            return parsed
        return msgspec.structs.replace(parsed, obstacle="image", num_exact_tokens=num_exact)

    def _read_completion(self, api: str, fields: Fields, num_bytes: int) -> Reading:
        try:
            request = _completion_of(api, fields)
            prompts = request.prompts
        except RequestError as error:
            return _read_other(fields, num_bytes, error)
        longest = max(prompts, key=_length_in_tokens)
        num_other_tokens = sum(map(_length_in_tokens, prompts)) - _length_in_tokens(longest)
        token_ids, reason, obstacle = None, None, "batch" if len(prompts) > 1 else None
        try:
            _check_is_plain(api, fields)
            if isinstance(longest, list):
                token_ids = np.array(longest, np.uint32)
            else:
                tokenizer = self._loaded_tokenizer(fields)
                if num_bytes > tokenizer.max_inline_bytes:
                    yield
                token_ids = tokenizer.tokenize_text(longest, add_special_tokens=request.add_special_tokens)
        except RequestError as error:
            reason, obstacle = error.message, error.code
        num_tokens = num_other_tokens + (_length_in_tokens(longest) if token_ids is None else len(token_ids))
        salt, num_prompts = request.cache_salt, len(prompts)
        return ParsedRequest(
            request.model, num_tokens, token_ids, salt, reason, num_prompts, fields, None, None, obstacle
        )

    def _loaded_tokenizer(self, fields: Fields) -> ChatTokenizer:
        model = fields.get("model")
        tokenizer = self._models.tokenizer(model if isinstance(model, str) else None)
        if tokenizer is None:
            raise RequestError(400, "the router has no tokeniser of the model", code="no_tokenizer")
        if not self._needs_tokens():
            raise _NOT_NEEDED
        return tokenizer


def _completion_of(api: str, fields: Fields) -> CompletionRequest:
    """Return what a body of SGLang's own API or of completions asks to be completed."""
    if api == GENERATE_PATH:
        prompt = fields.get("input_ids") if fields.get("text") is None else fields["text"]
        fields = {"prompt": prompt, "model": fields.get("model"), "cache_salt": fields.get("cache_salt")}
    return convert(fields, CompletionRequest)


def _rest_of(reading: Reading) -> ParsedRequest:
    while True:
        try:
            next(reading)
        except StopIteration as done:
            parsed: ParsedRequest = done.value
            return parsed


def with_model(body: bytes, parsed: ParsedRequest) -> bytes:
    """Return the body with an alias replaced by the model itself."""
    if not parsed.is_renamed:
        return body
    assert parsed.model is not None
    if parsed.path in FORM_PATHS:
        alias = model_in_form(body)
        assert alias is not None
        return body[: alias.start] + parsed.model.encode() + body[alias.stop :]
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"model": parsed.model})


class _Tokens(msgspec.Struct, frozen=True):
    token_ids: list[TokenId]
    model: str | None = None
    cache_salt: str | None = None


def _read_tokens(fields: Fields) -> ParsedRequest:
    prompt = convert(fields, _Tokens)
    token_ids = np.array(prompt.token_ids, np.uint32)
    return ParsedRequest(prompt.model, len(token_ids), token_ids, prompt.cache_salt, fields=fields)


def _client_fields(body: bytes) -> Fields:
    fields = read_fields(body)
    refuse_fields(fields)
    if not isinstance(model := fields.get("model"), str | None):
        raise invalid_field("model", f"got {model!r:.100}, expected a string")
    if model == "":  # to vLLM the same as none
        del fields["model"]
    return fields


def _check_is_plain(api: str, fields: Fields) -> None:
    for name in _REWRITING[api]:
        if fields.get(name) not in (None, False, "", -1):
            raise RequestError(400, f"{name}: changes how the prompt is tokenised", param=name, code="rewritten")


def _messages_of(response_id: Any, stored: StoredResponse | None) -> list[Message]:
    """Return the conversation that a request continues; raises RequestError if it is not known here."""
    if response_id is None:
        return []
    messages = None if stored is None else stored.messages
    if messages is None:
        message = f"previous_response_id: got {response_id!r:.100}, which is not known here"
        raise RequestError(400, message, param="previous_response_id", code="unknown_conversation")
    return messages


def _stand_in(token_ids: bytes | memoryview) -> int:
    """Return a token id that stands for all of a prompt's, so that an alias still tells prompts apart."""
    return xxh3_64_intdigest(token_ids) % 2**32


def _without_token_ids(body: bytes) -> tuple[bytes, dict[str, int]]:
    """Return a body with a stand-in for each long array, or batch of arrays, of integers; they are not read.

    Also how many arrays stood under each of these names. 300,000 integers take 3 ms of the interpreter, and as lists
    30. A body that may not be valid stays as it is.
    """
    try:
        whole = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body, {}
    stand_ins, num_arrays = dict[str, msgspec.Raw](), dict[str, int]()
    for name, value in whole.items():
        text = bytes(value) if len(memoryview(value)) > INLINE_BODY_BYTES else b""
        brackets = text.translate(None, b"0123456789, \t\r\n")
        if brackets and brackets in (b"[]", b"[%b]" % (b"[]" * (len(brackets) // 2 - 1))):
            stand_ins[name], num_arrays[name] = msgspec.Raw(b"[%d]" % _stand_in(text)), max(1, len(brackets) // 2 - 1)
    rest = msgspec.json.encode(whole | stand_ins) if stand_ins else body
    # Else a name may be there twice, which an escaped colon in another name, no escape any more, would hide.
    is_same = count_of(b":", rest) == count_of(b":", body) and b"\\u003" not in body
    return (rest, num_arrays) if is_same else (body, {})


_NOT_NEEDED = RequestError(400, "the policy does not use prompts, so they are not read", code="not_needed")
_OTHER = RequestError(400, "the endpoint is not routed by prefix", code="other_endpoint")


def _read_other(
    fields: Fields, num_bytes: int, error: RequestError = _OTHER, worker: str | None = None
) -> ParsedRequest:
    """Parse only the model of a body that cannot be tokenised; the worker checks the rest."""
    model, salt = [each if isinstance(each, str) else None for each in map(fields.get, ("model", "cache_salt"))]
    num_tokens, obstacle = num_bytes // CHARS_PER_TOKEN, error.code or "not_understood"
    return ParsedRequest(model, num_tokens, None, salt, error.message, 1, fields, None, worker, obstacle)


def _length_in_tokens(prompt: Prompt) -> int:
    return len(prompt) if isinstance(prompt, list) else len(prompt) // CHARS_PER_TOKEN + 1
