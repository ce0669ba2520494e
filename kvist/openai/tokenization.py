"""Tokenises requests exactly as the worker does, so that the router's block hashes are the engine's.

`fastokens` tokenises if it supports the model: 8,000 tokens of new text in 0.2 ms, where `tokenizers` takes 12, and it
caches the texts between special tokens, so that only the last turn of a conversation is new. At load its tokens are
compared with those of `tokenizers`, which is used if they differ or `fastokens` fails.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, takewhile, zip_longest
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvist.errors import InvalidValueError
from kvist.openai.chat_template import ChatTemplate, items_of
from kvist.openai.errors import RequestError, invalid_field
from kvist.openai.requests import ChatCompletionRequest
from kvist.openai.sglang import SglangTemplate
from kvist.settings import read_json_object

if TYPE_CHECKING:
    import fastokens

logger = logging.getLogger(__name__)

SEGMENT_CACHE_BYTES = 64 * 2**20
"""Size of the cache of `fastokens` for texts between special tokens, and their tokens."""

MAX_INLINE_BYTES = 24 * 1024
"""So much new text is tokenised on an event loop: 8,000 tokens of a chat take 0.3 ms, but random words or one character
repeated to this length 5, and the latter to 64 KiB 13. Measured with the bundled tokeniser and with pre-tokenisers of
Llama 3, Qwen 2 and Gemma 3 on a 2-core Xeon, where a hop to a thread and back takes 0.12 ms."""

MAX_INLINE_BYTES_WITHOUT_FASTOKENS = 2048
"""The same if `tokenizers` tokenises, which takes 1.5 ms for this length, and 6 for spaces alone."""

_PIECE_CHARS = 4096
_NUM_PIECES = 4096
"""Of known beginnings: 16 million characters, which with their tokens fit into the segment cache."""

_COMPARED = (
    "",
    "It's naïve, they'LL say: 1234567.89 ﬁ ſ K ǅ",
    " two  spaces,\ttabs\t\t and\r\n\r\n lines \n \u00a0\u3000\u200b ",
    "e\u0301 \u1e9b\u0323 한글 日本語テキスト हिन्दी עברית 🌞👩\u200d🚀🇸🇪 \U00020000\x00\x7f\ufffd\ufeff",
    'def f(x: int = 0) -> dict[str, int]:\n    return {"x": x**2}  # §\n\n\n\tpass',
    "<|im_start|>user\n[INST] </s><bos> <0x0A> ▁a▁▁b Ġ" + "=" * 70 + " " * 70 + "aaaa" * 20,
)

ITEM_TOKENS = 512
"""What an image or another item is taken to cost: models make 256 (Gemma 3) to some thousands (Qwen 2.5 VL) of one."""
_MAX_ITEMS = 64
"""What is behind so many is not read, so that a short body full of items takes no milliseconds."""

REPLACEMENT = "\ufffd"
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF_CHAR |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))}
"""The bytes by the characters that byte-level vocabularies, GPT-2's first, use for them.

A printable byte is its own character; the others have the characters from 256 on.
"""


class ChatTokenizer:
    """One model's tokeniser and chat template. Thread-safe; it releases the GIL while it tokenises."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Wrap a tokeniser; without a `template`, chats are refused."""
        self._tokenizer = tokenizer
        self._template = template
        self._fast = _fast_tokenizer(tokenizer)
        self.max_inline_bytes = MAX_INLINE_BYTES if self._fast else MAX_INLINE_BYTES_WITHOUT_FASTOKENS
        self._beginnings = Beginnings()
        marks = () if template is None else (template.source, *template.special_tokens.values())
        self._separators = [token for token in self.added_tokens if any(token in mark for mark in marks)]

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
        path = model_dir / "tokenizer_config.json"
        config = read_json_object(path) if path.is_file() else {}
        source = _template_source(model_dir, config)
        return cls(tokenizer, ChatTemplate(source, _special_tokens(config)) if source else None)

    def tokenize_chat(self, request: ChatCompletionRequest) -> NDArray[np.uint32]:
        """Return the prompt's tokens; raises RequestError (400) when there is no template or it refuses."""
        return self.tokenize_text(self.template.render(request), add_special_tokens=False)

    def tokenize_with_items(
        self, request: ChatCompletionRequest, template: ChatTemplate, *, add_special_tokens: bool = False
    ) -> tuple[NDArray[np.uint32], int]:
        """Return a chat's tokens, with ITEM_TOKENS in place of each non-text item, and how many precede the first item.

        Raises RequestError (400).
        """
        rendered = template.render_parts(request)
        return self.tokenize_parts(rendered, request, add_special_tokens=add_special_tokens)

    def tokenize_parts(
        self, rendered: Sequence[str], request: ChatCompletionRequest, *, add_special_tokens: bool
    ) -> tuple[NDArray[np.uint32], int]:
        """Return what `tokenize_with_items` does, of the template's texts between items."""
        head, *texts = rendered
        parts = [self.tokenize_text(head, add_special_tokens=add_special_tokens)]
        for text, item in islice(zip_longest(texts, items_of(request) if texts else ()), _MAX_ITEMS):
            if text:
                parts.append(self.tokenize_text(text, add_special_tokens=False))
            if item is not None:
                digest = xxh3_64_digest(msgspec.json.encode(item))
                parts.append(np.resize(np.frombuffer(digest, np.uint32), ITEM_TOKENS))
        self._beginnings.add(head)
        return parts[0] if len(parts) == 1 else np.concatenate(parts), len(parts[0])

    def is_quick(self, rendered: Sequence[str]) -> bool:
        """Return whether a chat's texts may be tokenised on an event loop, as few of them are new.

        The segment cache has all in front of the last special token in a beginning that was tokenised before.
        """
        head, begins_at = rendered[0], 0
        if len(head) > self.max_inline_bytes and self._fast is not None:
            known = self._beginnings.num_known(head)
            begins_at = max((head.rfind(token, 0, known) for token in self._separators), default=0)
        new = (head[max(0, begins_at) :], *rendered[1:])
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in new) <= self.max_inline_bytes

    @property
    def template(self) -> ChatTemplate:
        """Return the model's chat template; raises RequestError (400) if it has none."""
        if self._template is None:
            problem = "this model has no chat template; use /v1/completions"
            raise invalid_field("messages", problem, code="no_chat_template")
        return self._template

    def template_of(self, engine: str | None) -> ChatTemplate:
        """Return the template as the engine fills it: as vLLM does, for all but SGLang; raises as `template`."""
        return self._sglang_template if engine == "sglang" else self.template

    @cached_property
    def _sglang_template(self) -> SglangTemplate:
        return SglangTemplate(self.template.source, self.template.special_tokens)

    def tokenize_text(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.uint32]:
        """Return the tokens of a text prompt; raises RequestError (400) if it is not valid Unicode."""
        if self._fast is not None:
            try:
                return np.frombuffer(self._fast.encode_batch_flat([text], add_special_tokens)[0], np.uint32)
            except ValueError:  # beyond a limit of its matcher, or as below
                pass
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, np.uint32)
        except TypeError:
            raise RequestError(400, "the prompt has half of a surrogate pair", code="not_unicode") from None

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens; unknown ids have none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def added_tokens(self) -> list[str]:
        """Return the texts of added tokens, which are tokens wherever they occur."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be an incomplete character."""
        text = self.text([token_id])
        spelt = self._tokenizer.id_to_token(token_id)
        if spelt is None or REPLACEMENT not in text:
            return text.encode()
        if fallback := re.fullmatch("<0x([0-9A-F]{2})>", spelt):
            return bytes.fromhex(fallback[1])
        return bytes(_BYTE_OF_CHAR[char] for char in spelt) if _BYTE_OF_CHAR.keys() >= set(spelt) else text.encode()

    def to_json(self) -> str:
        """Return the tokeniser in the format of `tokenizer.json`."""
        return self._tokenizer.to_str()

    def token_strs(self, token_ids: Iterable[int]) -> list[str | None]:
        """Return each token's text in the vocabulary; None for an unknown id."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh incremental decoder for one output."""
        return Detokenizer(self._tokenizer, skip_special_tokens)


class Beginnings:
    """The beginnings of texts that were seen lately, in pieces; shorter texts have none. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: dict[int, None] = {}  # each the hash of a piece and all before it, the last seen last
        self._lock = Lock()

    def num_known(self, text: str) -> int:
        """Return how long the known beginning of a text is."""
        return _PIECE_CHARS * sum(1 for _ in takewhile(self._pieces.__contains__, _pieces(text)))

    def add(self, text: str) -> None:
        """Know this text from now on, and forget what was not seen for longest."""
        with self._lock:
            for piece in _pieces(text):
                self._pieces.pop(piece, None)
                self._pieces[piece] = None
            while len(self._pieces) > _NUM_PIECES:
                del self._pieces[next(iter(self._pieces))]


def _pieces(text: str) -> Iterator[int]:
    digest = 0
    for at in range(0, len(text) - _PIECE_CHARS + 1, _PIECE_CHARS):
        digest = xxh3_64_intdigest(text[at : at + _PIECE_CHARS].encode("utf-8", "surrogatepass"), digest)
        yield digest


class Detokenizer:
    """Turns one output's tokens into text incrementally; a character of several tokens comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """Start an output; special tokens have no text if they are skipped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_chars = 0

    def step(self, token_id: int) -> str:
        """Return the text that this token completes; empty within a character."""
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_chars += len(text)
        return text

    def flush(self) -> str:
        """Return the rest at the end of the output: replacement characters for an incomplete character."""
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)[self._num_chars :]


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """Return the template's source: of its own file or else of tokenizer_config.json, as in transformers."""
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


def _fast_tokenizer(tokenizer: Tokenizer) -> fastokens.Tokenizer | None:
    """Return a faster tokeniser with the same tokens; None, with a warning that says why, if there is none."""
    try:
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        fast.enable_segment_cache(SEGMENT_CACHE_BYTES)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        for text in (*_COMPARED, "".join(added), " a  ".join(["", *added, ""])):
            for add_special_tokens in (False, True):
                token_ids = np.frombuffer(fast.encode_batch_flat([text], add_special_tokens)[0], np.uint32).tolist()
                if token_ids != tokenizer.encode(text, add_special_tokens=add_special_tokens).ids:
                    raise ValueError(f"other tokens of {text!r:.100}")
    except (ImportError, ValueError) as error:
        logger.warning("tokens are made by tokenizers, not by fastokens, at 20 times the cost reason=%s", error)
        return None
    return fast
