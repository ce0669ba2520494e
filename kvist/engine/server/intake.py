"""Reads request bodies into generation jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec

from kvist.engine.request import SequenceInput, TokenMatcher
from kvist.engine.server.fields import REFUSED_OF_RESPONSES, check_fields
from kvist.engine.server.structured import Grammar, GrammarCompiler, read_grammar
from kvist.engine.server.tools import ToolChoice, ToolRules, read_tools
from kvist.openai import requests as api
from kvist.openai.chats import MESSAGES_PATH, RESPONSES_PATH, chat_fields, chat_of
from kvist.openai.errors import RequestError, invalid_field
from kvist.openai.tokenization import ChatTokenizer

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat may fill the context


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a request on its prompt's length and its answer's format; names and ranges are vLLM's."""

    request_id: str | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What one request asks to generate: `params.n` choices for each prompt; choices of a prompt are consecutive."""

    prompts: tuple[list[int], ...]
    params: api.SamplingParams
    options: AnswerOptions
    cache_salt: str | None
    swa_scratch: bool | None
    is_stream: bool
    stream_options: api.StreamOptions
    handoff: api.Handoff | None = None
    constraint: TokenMatcher | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    tools: ToolRules | None = None
    call_fields: Mapping[str, api.Fields] = field(default_factory=dict)
    """What a response says otherwise of calls, by the name in the prompt: of tools in a namespace, or of free text."""

    @property
    def is_output_dropped(self) -> bool:
        """Return whether only the prompt was asked for; one token is generated nevertheless."""
        return self.params.token_limit == 0

    def sequences(self, tokenizer: ChatTokenizer) -> list[SequenceInput]:
        """Return one input for each choice; with a seed, each choice of a prompt gets a seed of its own."""
        syntax = None if self.tools is None else self.tools.syntax
        skips = self.options.skip_special_tokens and not (syntax is not None and syntax.has_special_tokens)
        return [
            SequenceInput(
                prompt,
                self._choice_params(choice),
                tokenizer.detokenizer(skip_special_tokens=skips),
                self.cache_salt,
                self.swa_scratch,
                self.handoff,
                None if self.constraint is None else self.constraint.copy(),
                self.bad_words,
            )
            for prompt in self.prompts
            for choice in range(self.params.n)
        ]

    def _choice_params(self, choice: int) -> api.SamplingParams:
        changes: dict[str, int | None] = {}
        if self.params.seed is not None and choice:
            changes["seed"] = self.params.seed + choice
        if self.is_output_dropped:
            changes |= {"max_tokens": 1, "max_completion_tokens": None}
        return msgspec.structs.replace(self.params, **changes) if changes else self.params


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads requests to one model, under any of `model_names`. Methods raise RequestError that names the field."""

    tokenizer: ChatTokenizer
    model_names: tuple[str, ...]
    max_model_len: int
    grammars: GrammarCompiler

    async def read_chat(self, body: bytes) -> Job:
        fields = api.read_fields(body)
        return await self._read_chat(fields, api.convert(fields, api.ChatCompletionRequest))

    async def read_messages(self, body: bytes) -> Job:
        """Return the job of a request to Anthropic's API."""
        fields = api.read_fields(body)
        if fields.get("max_tokens") is None:
            raise invalid_field("max_tokens", "expected how many tokens to generate at most")
        return await self._read_as_chat(MESSAGES_PATH, fields)

    async def read_response(self, body: bytes) -> Job:
        """Return the job of a request to OpenAI's responses."""
        fields = api.read_fields(body)
        check_fields(fields, REFUSED_OF_RESPONSES)
        job = await self._read_as_chat(RESPONSES_PATH, fields)
        return replace(job, call_fields=dict(_call_fields(fields.get("tools") or ())))

    async def _read_as_chat(self, path: str, fields: api.Fields) -> Job:
        if fields.get("kv_transfer_params") is not None:
            problem = "expected it left out: only chats and completions are handed over"
            raise invalid_field("kv_transfer_params", problem)
        chat = chat_of(path, fields, self.tokenizer.template)
        chat = msgspec.structs.replace(chat, stream=bool(fields.get("stream")))
        return await self._read_chat(chat_fields(path, fields), chat)

    async def _read_chat(self, fields: api.Fields, request: api.ChatCompletionRequest) -> Job:
        params = api.decode_sampling_params(fields)
        choice = api.convert(fields, ToolChoice)
        tools, grammar = read_tools(choice, request, self.tokenizer.template)
        prompt = await self._tokenize_chat(fields, request)
        return await self._job(fields, request, params, (prompt,), tools, grammar)

    async def read_completion(self, body: bytes) -> Job:
        fields = api.read_fields(body)
        request = api.convert(fields, api.CompletionRequest)
        self.check_model(request.model)
        params = api.decode_sampling_params(fields)
        if params.token_limit is None:
            params = msgspec.structs.replace(params, max_tokens=max(_DEFAULT_COMPLETION_TOKENS, params.min_tokens))

        def tokenize() -> tuple[list[int], ...]:
            return tuple(
                prompt if isinstance(prompt, list) else self._tokens(prompt, request.add_special_tokens)
                for prompt in request.prompts
            )

        return await self._job(fields, request, params, await asyncio.to_thread(tokenize))

    async def read_tokenize(self, body: bytes) -> tuple[list[int], list[str | None] | None]:
        """Return the tokens of a chat or a text, and their texts in the vocabulary if the request asks for them."""
        fields = api.read_fields(body)
        request = api.convert(fields, api.TokenizeRequest)
        if request.messages is not None:
            prompt = await self._tokenize_chat(fields, api.convert(fields, api.ChatCompletionRequest))
        else:
            text = api.convert(fields, api.CompletionRequest)
            self.check_model(text.model)
            if not isinstance(text.prompt, str):
                raise invalid_field("prompt", "expected text")
            prompt = await asyncio.to_thread(self._tokens, text.prompt, text.add_special_tokens)
        return prompt, self.tokenizer.token_strs(prompt) if request.return_token_strs else None

    async def count_tokens(self, body: bytes) -> int:
        """Return how many tokens the prompt of a request to Anthropic's API has."""
        fields = api.read_fields(body)
        return len(await self._tokenize_chat(fields, chat_of(MESSAGES_PATH, fields, self.tokenizer.template)))

    def read_detokenize(self, body: bytes) -> str:
        request = api.convert(api.read_fields(body), api.DetokenizeRequest)
        self.check_model(request.model)
        return self.tokenizer.text(request.tokens)

    def check_model(self, model: str | None) -> None:
        """Raise RequestError (404) for another model than the one that is served."""
        if model is not None and model not in self.model_names:
            message = f"model: got {model!r:.100}, expected one of {list(self.model_names)}"
            raise RequestError(404, message, param="model", code="model_not_found")

    async def _tokenize_chat(self, fields: api.Fields, request: api.ChatCompletionRequest) -> list[int]:
        self.check_model(request.model)
        _check_chat(fields, request)
        tokens: list[int] = await asyncio.to_thread(lambda: self.tokenizer.tokenize_chat(request).tolist())
        return tokens

    async def _job(
        self,
        fields: api.Fields,
        request: api.ChatCompletionRequest | api.CompletionRequest,
        params: api.SamplingParams,
        prompts: tuple[list[int], ...],
        tools: ToolRules | None = None,
        grammar: Grammar | None = None,
    ) -> Job:
        check_fields(fields)
        handoff = api.decode_handoff(fields)
        if handoff is not None and len(prompts) * params.n != 1:
            problem = f"got {len(prompts)} prompts and n={params.n}, expected one of each"
            raise invalid_field("kv_transfer_params", problem)
        if request.stream and params.prompt_logprobs is not None:
            raise invalid_field("prompt_logprobs", "expected it left out in a stream")
        options = api.convert(fields, AnswerOptions)
        structure = read_grammar(fields)
        if structure is not None and grammar is not None:
            raise invalid_field(structure.field, f"expected it left out beside {grammar.field}")
        grammar = structure or grammar
        if grammar is not None and (params.allowed_token_ids or params.bad_words):
            name = "allowed_token_ids" if params.allowed_token_ids else "bad_words"
            raise invalid_field(name, f"expected it left out beside {grammar.field}")
        return Job(
            tuple(self._truncated(prompt, options) for prompt in prompts),
            params,
            options,
            request.cache_salt,
            request.swa_scratch,
            bool(request.stream),
            request.stream_options or api.StreamOptions(),
            handoff,
            None if grammar is None else await asyncio.to_thread(self.grammars.compile, grammar),
            tuple(self._bad_words(params.bad_words or ())),
            tools,
        )

    def _truncated(self, prompt: list[int], options: AnswerOptions) -> list[int]:
        """Return the end of the prompt or, with `truncation_side` right, its beginning."""
        limit = options.truncate_prompt_tokens
        if limit is None:
            return prompt
        limit = self.max_model_len - 1 if limit == -1 else limit
        return prompt[:limit] if options.truncation_side == "right" else prompt[max(0, len(prompt) - limit) :]

    def _bad_words(self, words: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each word at the beginning of a text and, if those differ, its tokens within a text."""
        for word in words:
            first = self._tokens(word.lstrip(), False)
            if not first:
                raise invalid_field("bad_words", f"got {word!r:.100}, expected more than spaces")
            yield tuple(first)
            within = self._tokens(" " + word.lstrip(), False)
            if within[0] != first[0] and len(within) == len(first):
                yield tuple(within)

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self.tokenizer.tokenize_text(text, add_special_tokens=add_special_tokens).tolist()
        return tokens


def _call_fields(tools: Iterable[api.Fields]) -> Iterator[tuple[str, api.Fields]]:
    for tool in tools:
        match tool.get("type"):
            case "custom":
                if isinstance(form := tool.get("format"), dict) and form.get("type") == "grammar":
                    raise invalid_field("tools", f"{tool.get('name')!r:.100}: got a grammar, expected free text")
                yield str(tool.get("name")), {"type": "custom_tool_call"}
            case "namespace":
                for name in (inner.get("name") for inner in tool["tools"]):
                    yield f"{tool.get('name')}__{name}", {"namespace": tool.get("name"), "name": name}


def _check_chat(fields: api.Fields, request: api.ChatCompletionRequest) -> None:
    if fields.get("add_special_tokens"):
        problem = "got true, expected it left out: a chat has those of its template"
        raise invalid_field("add_special_tokens", problem)
    if fields.get("echo"):
        raise invalid_field("echo", "got true, expected false: a chat's prompt is not its messages")
    for message_idx, message in enumerate(request.messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, str) or api.text_of_part(part) is None:
                kind = part.get("type") if isinstance(part, dict) else part
                message_field = f"messages[{message_idx}].content"
                raise RequestError(400, f"{message_field}: got a part {kind!r:.100}, expected text", param="messages")
