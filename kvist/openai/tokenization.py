"""Requests to tokens exactly as the worker makes them, so that the router's block hashes are the engine's.

Tokenising dominates a router's own work on long prompts (4,096 tokens take milliseconds, a template 14 µs), and most of
a conversation was there last turn: the tokens of each segment between special tokens are remembered (`cut_pattern`).
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from kvist.errors import InvalidValueError
from kvist.openai.chat_template import ChatTemplate
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, Prompt

DEFAULT_MAX_CACHED_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class TokenCacheStatistics:
    """How much tokenising the cache saved; counts since start, `num_tokens` now."""

    hits: int
    misses: int
    num_tokens: int


class ChatTokenizer:
    """One model's tokeniser and chat template. Thread-safe: long prompts belong on a worker thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_cached_tokens: int = DEFAULT_MAX_CACHED_TOKENS,
    ) -> None:
        """Wrap a tokeniser; `template` None refuses chats. The cache holds 4 B a token, least recently used dropped."""
        self._tokenizer = tokenizer
        self._template = template
        self._pattern = cut_pattern(tokenizer)
        self._max_cached_tokens = max_cached_tokens
        self._segments: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = self._num_cached = 0

    @classmethod
    def load(cls, model_dir: Path) -> ChatTokenizer:
        """Return the tokeniser of a Hugging Face directory; raises InvalidValueError that names what is missing."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise InvalidValueError("model path", str(model_dir), "a directory with tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception: re-raised with the file's name
            raise InvalidValueError("tokenizer.json", str(path), f"a tokenizers file ({error})") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(model_dir / "tokenizer_config.json")
        source = _template_source(model_dir, config)
        return cls(tokenizer, ChatTemplate(source, _special_tokens(config)) if source else None)

    def tokenize_chat(self, request: ChatCompletionRequest) -> list[int]:
        """Return the prompt's tokens; raises RequestError (400) when there is no template or it refuses."""
        return self._encode_segments(self.template.render(request))

    @property
    def template(self) -> ChatTemplate:
        """Return how chats become text; raises RequestError (400) when the model has no template."""
        if self._template is None:
            message = "messages: this model has no chat template; use /v1/completions"
            raise RequestError(400, message, param="messages", code="no_chat_template")
        return self._template

    def tokenize_prompt(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text prompt; token ids are returned as they are."""
        if not isinstance(prompt, str):
            return prompt
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, special tokens included."""
        return self.text([token_id])

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; ids that are no token have none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @property
    def added_tokens(self) -> list[str]:
        """Return the texts that are tokens wherever they stand."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def token_strs(self, token_ids: Iterable[int]) -> list[str | None]:
        """Return how the vocabulary spells each token; None for an id that is no token."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def detokenizer(self) -> Detokenizer:
        """Return a fresh incremental decoder for one output."""
        return Detokenizer(self._tokenizer)

    def statistics(self) -> TokenCacheStatistics:
        """Return the cache's counters."""
        return TokenCacheStatistics(self._hits, self._misses, self._num_cached)

    def _encode_segments(self, text: str) -> list[int]:
        if self._pattern is None:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        token_ids: list[int] = []
        for segment in split_segments(text, self._pattern):
            token_ids.extend(self._segment_tokens(segment))
        return token_ids

    def _segment_tokens(self, segment: str) -> array[int]:
        with self._lock:
            cached = self._segments.get(segment)
            if cached is not None:
                self._segments.move_to_end(segment)
                self._hits += 1
                return cached
        token_ids = array("I", self._tokenizer.encode(segment, add_special_tokens=False).ids)
        with self._lock:
            self._misses += 1
            if segment not in self._segments:
                self._segments[segment] = token_ids
                self._num_cached += len(token_ids)
            while self._num_cached > self._max_cached_tokens:
                _, dropped = self._segments.popitem(last=False)
                self._num_cached -= len(dropped)
        return token_ids


class Detokenizer:
    """Turns one output's tokens into text as they come; a character split over tokens comes with its last one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start an output; special tokens give no text."""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._num_chars = 0

    def step(self, token_id: int) -> str:
        """Return the text that this token completes, often empty in the middle of a character."""
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_chars += len(text)
        return text

    def flush(self) -> str:
        """Return what is left at the end: the replacement characters of an unfinished sequence."""
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=True)[self._num_chars :]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidValueError(path.name, str(path), f"valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidValueError(path.name, str(path), "a JSON object")
    return value


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """The file beside the model wins over the old place in tokenizer_config.json, as in transformers."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidValueError(path.name, str(path), f"UTF-8 ({error})") from None
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return where a text may be cut so that the tokens of its pieces are those of the whole; None for nowhere.

    A tokeniser takes its special tokens out of the text before anything else and encodes what lies between them piece
    by piece, each for itself. So a cut right before a special token changes nothing, if that token is matched there for
    certain: no other added token contains it, overlaps its start, or eats the space around it.
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    safe = [token.content for token in added if _is_safe(token, (other.content for other in added))]
    if not safe:
        return None
    return re.compile("(?=" + "|".join(re.escape(content) for content in safe) + ")")


def split_segments(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the text in pieces that join to it, each but the first starting with a special token."""
    cuts = [match.start() for match in pattern.finditer(text)]
    bounds = [0, *(cut for cut in cuts if cut), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def _is_safe(token: AddedToken, contents: Iterable[str]) -> bool:
    if not token.special or token.normalized or token.lstrip or token.single_word or not token.content:
        return False
    return not any(_may_swallow(other, token.content) for other in contents)


def _may_swallow(other: str, content: str) -> bool:
    """Whether a match of `other` may cover the start of `content` where that stands in a text."""
    if other == content:
        return any(content.endswith(content[:size]) for size in range(1, len(content)))
    return content in other or any(other.endswith(content[:size]) for size in range(1, len(content)))
