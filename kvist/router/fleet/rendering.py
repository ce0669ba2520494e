"""Checks whether workers tokenise chats as the router does: both tokenise a few probes, and the tokens are compared.

There is a probe for each kind of chat that templates may treat differently, which shows the difference as early as a
chat can. If a worker's tokens of a probe differ, chats of that kind are matched there only up to the first difference.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from kvist.contexts import BackgroundTasks
from kvist.errors import MalformedMessageError
from kvist.http import UpstreamError, UpstreamPool
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, TokenId, convert, text_of_part
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.config import RouterConfig
from kvist.router.fleet.identity import fetch
from kvist.router.fleet.worker import Worker
from kvist.router.prompts import KnownModels

logger = logging.getLogger(__name__)

RECHECK_S = 300.0
"""How long a verdict holds: a worker may have been restarted between two health checks."""

TIMEOUT_S = 10.0
MAX_ASKED_AT_ONCE = 8
_USUAL_FIELDS = ["name", "description", "parameters"]
"""The fields of a tool's function, in the order that vLLM always puts them in; SGLang keeps the client's order."""

_NUM_SHOWN = 8
"""How many tokens from a difference on are shown, and how many before it."""


class Kind(StrEnum):
    """Features of a request that templates may treat differently; every chat is plain, and may have others as well."""

    PLAIN = "plain"
    SYSTEM = "system"
    DEVELOPER = "developer"
    PARTS = "text in parts"
    TOOLS = "tools"
    ODD_TOOLS = "tools with other fields"
    TOOL_RESULTS = "tool results"
    TURNS = "several turns"
    REASONING = "reasoning"
    UNICODE = "unicode"
    SPECIAL_TOKENS = "special tokens"
    SPACES = "spaces"
    PROMPT = "prompt"


class Shown(msgspec.Struct, frozen=True):
    """Some of the tokens of a probe."""

    tokens: list[int]
    text: str


class Difference(msgspec.Struct, frozen=True):
    """The index of the first token of a probe that differs, and the tokens of both sides around it."""

    token: int
    router: Shown
    worker: Shown


class RenderingState(StrEnum):
    """Whether a worker's tokens are the same as the router's."""

    SAME = "same"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class Rendering(msgspec.Struct, frozen=True):
    """A verdict on a worker, its reason, and the first difference in each kind of chat that differs."""

    state: RenderingState = RenderingState.UNKNOWN
    reason: str | None = "not asked yet"
    differences: dict[Kind, Difference] = {}


class _Tokenized(msgspec.Struct, frozen=True):
    tokens: list[TokenId]
    count: int


_decode_tokenized = msgspec.json.Decoder(_Tokenized).decode


class Renderings:
    """For each worker the kinds of chats that it renders differently, and how many leading tokens are the same.

    All methods belong to the event loop.
    """

    def __init__(self) -> None:
        self.differing: dict[str, Mapping[Kind, int]] = {}
        self._special_starts: frozenset[str] = frozenset()

    def add_special_tokens(self, tokenizer: ChatTokenizer) -> None:
        """Recognise this model's special tokens in chats, too, by the characters that they begin with."""
        self._special_starts |= frozenset(token[0] for token in _special_tokens(tokenizer)) | {"<", "["}

    def set_differing(self, url: str, num_same_tokens: Mapping[Kind, int]) -> None:
        """Set how many leading tokens are the same, for each kind of chat that a worker renders differently."""
        self.differing.pop(url, None)
        if num_same_tokens:
            self.differing[url] = num_same_tokens

    def limits(self, chat: ChatCompletionRequest | None, fields: Mapping[str, Any]) -> dict[str, int]:
        """Return, by its URL, each worker that may render the request differently, and how many tokens are the same."""
        if not self.differing:
            return {}
        kinds = self._kinds_of(chat, fields)
        same = {
            url: [num_same for kind, num_same in differences.items() if kind in kinds]
            for url, differences in self.differing.items()
        }
        return {url: min(numbers) for url, numbers in same.items() if numbers}

    def _kinds_of(self, chat: ChatCompletionRequest | None, fields: Mapping[str, Any]) -> set[Kind]:
        if chat is None:
            prompt = fields.get("prompt")
            first = prompt[0] if isinstance(prompt, list) and prompt else prompt
            return {Kind.PROMPT} if isinstance(first, str) else set()
        messages, roles = chat.messages, [message.get("role") for message in chat.messages]
        contents = [message.get("content") for message in messages]
        texts = [text for content in contents for text in _texts_of(content)]
        functions = [tool.get("function") for tool in chat.tools or ()]
        found = {
            Kind.PLAIN: True,
            Kind.SYSTEM: "system" in roles,
            Kind.DEVELOPER: "developer" in roles,
            Kind.PARTS: any(isinstance(content, list) for content in contents),
            Kind.TOOLS: bool(functions),
            Kind.ODD_TOOLS: any(not isinstance(each, dict) or [*each][:3] != _USUAL_FIELDS for each in functions),
            Kind.TOOL_RESULTS: "tool" in roles or any(message.get("tool_calls") for message in messages),
            Kind.TURNS: "assistant" in roles or roles.count("user") > 1,
            Kind.REASONING: any(each.get("reasoning") or each.get("reasoning_content") for each in messages),
            Kind.UNICODE: not all(map(str.isascii, texts)),
            Kind.SPECIAL_TOKENS: any(start in text for text in texts for start in self._special_starts),
            Kind.SPACES: any(text != text.strip() for text in texts),
        }
        return {kind for kind, is_so in found.items() if is_so}


class RenderingChecks:
    """Checks workers when they join and when they may have been restarted; all methods belong to the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        pool: UpstreamPool,
        known: Renderings,
        models: KnownModels,
        now_s: Callable[[], float],
    ) -> None:
        """Compare with the tokeniser of a worker's first model, and write what differs to `known`."""
        self.config, self._pool, self._known, self._now_s = config, pool, known, now_s
        self._models = models
        self._asked: dict[str, tuple[float, str | None]] = {}
        self._turns = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_health_check(self, worker: Worker, tasks: BackgroundTasks) -> None:
        """Start to check a worker that passed its health check, in a task of its own, if a check is due."""
        url, now_s = worker.url, self._now_s()
        model = _model_of(worker)
        tokenizer = self._models.tokenizer(model) if self.config.policy == "kv" else None
        asked_at_s, engine_then = self._asked.get(url, (-math.inf, None))
        engine = self._models.engine(model)
        if worker.last_failure is not None:
            self.expire(url)
        elif tokenizer is None or url in self._tasks or worker.is_draining:
            return
        elif now_s - asked_at_s >= RECHECK_S or engine != engine_then:
            self._asked[url] = now_s, engine
            task = tasks.create_task(self._check(worker, tokenizer, engine), name=f"kvist-rendering {url}")
            self._tasks[url] = task
            task.add_done_callback(lambda ended: self._tasks.get(url) is ended and self._tasks.pop(url))

    def expire(self, url: str) -> None:
        """Let the worker be checked again: another process may answer next."""
        self._asked.pop(url, None)

    def forget(self, url: str) -> None:
        """Drop the state of a removed worker, and cancel its check."""
        self.expire(url)
        if (task := self._tasks.pop(url, None)) is not None:
            task.cancel()

    async def _check(self, worker: Worker, tokenizer: ChatTokenizer, engine: str | None) -> None:
        earlier = worker.rendering
        worker.rendering = earlier or Rendering()
        async with self._turns:
            found = worker.rendering = await self._compare(worker, tokenizer, engine)
        self._known.set_differing(worker.url, {kind: each.token for kind, each in found.differences.items()})
        if earlier is None or earlier.state is not found.state:
            level = logging.INFO if found.state is RenderingState.SAME else logging.WARNING
            logger.log(level, "worker renders chats: %s url=%s reason=%s", found.state, worker.url, found.reason)

    async def _compare(self, worker: Worker, tokenizer: ChatTokenizer, engine: str | None) -> Rendering:
        probes, model = _make_probes(_special_tokens(tokenizer)), _model_of(worker)
        named = {} if model is None else {"model": model}
        own = partial(_own_tokens, tokenizer, engine)
        expected = await asyncio.to_thread(lambda: {kind: own(probe) for kind, probe in probes.items()})
        differences: dict[Kind, Difference] = {}
        refused = []
        for kind, probe in probes.items():
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    tokens = await self._worker_tokens(worker.url, probe | named)
            except TimeoutError:
                return Rendering(reason=f"{kind}: no answer to POST /tokenize within {TIMEOUT_S:g} s")
            except (UpstreamError, MalformedMessageError) as error:
                return Rendering(reason=f"{kind}: {error}")
            if not tokens:  # none are vLLM's of a model that transcribes speech
                refused += [] if expected[kind] is None else [kind.value]
            elif (difference := _first_difference(tokenizer, expected[kind] or [], tokens)) is not None:
                differences[kind] = difference
        if differences:
            kind, first = next(iter(differences.items()))
            reason = f"{kind}: token {first.token}: {first.worker.text!r}, expected {first.router.text!r}"
            return Rendering(RenderingState.DIFFERS, reason, differences)
        if refused:
            return Rendering(reason=f"the worker refuses to tokenise: {', '.join(refused)}")
        return Rendering(RenderingState.SAME, None)

    async def _worker_tokens(self, url: str, probe: dict[str, Any]) -> list[int] | None:
        """Return the worker's tokens of a probe, None if it refuses to tokenise it."""
        status, answer = await fetch(
            self._pool, url, "/tokenize", self.config.authorization(url), msgspec.json.encode(probe)
        )
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            return None
        if status != HTTPStatus.OK:
            raise UpstreamError(url, f"POST /tokenize answered {status}")
        try:
            found = _decode_tokenized(answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedMessageError(f"{url}/tokenize", str(error)) from None
        if found.count != len(found.tokens):
            raise MalformedMessageError(f"{url}/tokenize", f"{len(found.tokens)} tokens, and count {found.count}")
        return found.tokens


def _model_of(worker: Worker) -> str | None:
    """Return the first model that the worker says it serves."""
    models = worker.identity.models
    return models[0].id if models else None


def _special_tokens(tokenizer: ChatTokenizer) -> list[str]:
    return [token for token in tokenizer.added_tokens if token]


def _make_probes(special_tokens: Sequence[str]) -> dict[Kind, dict[str, Any]]:
    special = "".join(special_tokens[:4]) + "<|im_end|>[INST]</s><think>"
    unicode = "Smörgåsbord 🌞 e\u0301 👩\u200d🚀 日本語"
    hi, hello = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
    call = {
        "id": "abc123456",
        "type": "function",
        "function": {"name": "now", "arguments": '{"zone": "Malmö", "n": 1}'},
    }
    results = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    results.append({"role": "tool", "tool_call_id": "abc123456", "content": '{"hour": 9}'})
    schema = {"type": "object", "properties": {"zone": {"type": "string", "description": "<b> & ö"}}}
    usual = {"type": "function", "function": {"name": "now", "description": "The hour", "parameters": schema}}
    odd = {"function": {"parameters": schema, "name": "now"}, "type": "function"}
    chats: dict[Kind, list[dict[str, Any]]] = {
        Kind.PLAIN: [hi],
        Kind.SYSTEM: [{"role": "system", "content": "Be terse."}, hi],
        Kind.DEVELOPER: [{"role": "developer", "content": "Be terse."}, hi],
        Kind.PARTS: [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Hi", "there")]}],
        Kind.TOOLS: [hi],
        Kind.ODD_TOOLS: [hi],
        Kind.TOOL_RESULTS: [hi, *results],
        Kind.TURNS: [hi, hello, hi],
        Kind.REASONING: [hi, hello | dict.fromkeys(("reasoning", "reasoning_content"), "A greeting."), hi],
        Kind.UNICODE: [{"role": "user", "content": unicode}],
        Kind.SPECIAL_TOKENS: [{"role": "user", "content": special}],
        Kind.SPACES: [{"role": "user", "content": " \n  spaces  \n\n\t "}],
    }
    probes: dict[Kind, dict[str, Any]] = {kind: {"messages": messages} for kind, messages in chats.items()}
    probes[Kind.TOOLS] |= {"tools": [usual]}
    probes[Kind.ODD_TOOLS] |= {"tools": [odd]}
    return probes | {Kind.PROMPT: {"prompt": f"Hi {unicode} {special} "}}


def _own_tokens(tokenizer: ChatTokenizer, engine: str | None, probe: dict[str, Any]) -> list[int] | None:
    """Return the router's tokens of a probe, None if its template refuses it."""
    try:
        if "prompt" in probe:
            tokens = tokenizer.tokenize_text(probe["prompt"])
        else:
            template = tokenizer.template_of(engine)
            tokens, _ = tokenizer.tokenize_with_items(convert(probe, ChatCompletionRequest), template)
    except RequestError:
        return None
    token_ids: list[int] = tokens.tolist()
    return token_ids


def _first_difference(tokenizer: ChatTokenizer, expected: list[int], tokens: list[int]) -> Difference | None:
    if expected == tokens:
        return None
    pairs = enumerate(zip(expected, tokens, strict=False))
    at = next((idx for idx, (ours, theirs) in pairs if ours != theirs), min(len(expected), len(tokens)))
    shown = slice(max(0, at - _NUM_SHOWN), at + _NUM_SHOWN)
    return Difference(at, *(Shown(each[shown], tokenizer.text(each[shown])) for each in (expected, tokens)))


def _texts_of(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    return [text for text in map(text_of_part, parts) if text is not None]
