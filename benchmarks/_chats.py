"""Chats whose tokens are known without tokenising them: text of Python's own library, in pieces of 25 tokens each.

A byte-level BPE is trained on that text. It tokenises words separately, so a chat of pieces is tokenised by looking
them up: workers can report what they cached, and generators make a chat of 8,000 tokens in some 0.2 ms.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MODEL = "m"
NUM_EVENTS = 20
"""Of an answer that is streamed."""
VOCABULARY = 32_000
PIECE_TOKENS = 25
START, END = "<|im_start|>", "<|im_end|>"
OPENING = "Read"  # a message's first word has no space before it, and other tokens than further on
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Work:
    """Chats of one kind: the tokens of each message, the first of them the system's."""

    name: str
    message_tokens: tuple[int, ...]
    num_pooled: int
    """Messages at the beginning that are taken from a pool; the others are no other chat's."""
    pool_size: int = 127  # odd, so that round robin does not bring a prompt to the worker it was at
    is_stream: bool = False
    event_s: float = 0.0
    """Between the events of a stream; 0 for as fast as they can be sent."""
    num_clients: int = 64
    """That keep a router busy."""


WORKS = {
    work.name: work
    for work in (
        Work("unary, 100 tokens, half shared", (50, 50), 1),
        Work("unary, 1,000 tokens, half shared", (500, 500), 1),
        Work("unary, 8,000 tokens, seen before", (1000,) * 8, 8, pool_size=31),
        Work("unary, 8,000 tokens, wholly fresh", (1000,) * 8, 0),
        Work("stream, 100 tokens, half shared", (50, 50), 1, is_stream=True),
        Work("stream, 1,000 tokens, half shared", (500, 500), 1, is_stream=True),
        Work("stream at 50 events a second, 100 tokens", (50, 50), 1, is_stream=True, event_s=0.02, num_clients=256),
        Work("stream, 2.7 kB, half shared", (300, 300), 1, is_stream=True),
    )
}


class Chats:
    """The numbered chats of each work, equal in every process that loads the folder."""

    def __init__(self, folder: Path) -> None:
        made = json.loads((folder / "pieces.json").read_text())
        self._texts: list[str] = made["texts"]
        self._ids = np.array(made["ids"], np.uint32)
        self._frames = {role: [np.array(ids, np.uint32) for ids in frame] for role, frame in made["frames"].items()}
        self._prompt_end = np.array(made["prompt_end"], np.uint32)

    def body(self, work: Work, number: int) -> bytes:
        """Return the request, which names itself as its user."""
        messages = ",".join(
            f'{{"role":"{role}","content":"{OPENING} {" ".join([self._texts[idx] for idx in pieces.tolist()])}"}}'
            for role, pieces in self._messages(work, number)
        )
        stream = "true" if work.is_stream else "false"
        return f'{{"model":"{MODEL}","messages":[{messages}],"stream":{stream},"user":"{work.name}/{number}"}}'.encode()

    def token_ids(self, user: str) -> NDArray[np.uint32]:
        """Return the tokens of the prompt that a request says it is."""
        name, _, number = user.partition("/")
        parts = []
        for role, pieces in self._messages(WORKS[name], int(number)):
            before, after = self._frames[role]
            parts += [before, self._ids[pieces].ravel(), after]
        return np.concatenate([*parts, self._prompt_end])

    def _messages(self, work: Work, number: int) -> list[tuple[str, NDArray[np.int64]]]:
        messages = []
        for idx, num_tokens in enumerate(work.message_tokens):
            seed = (idx, 0, number % work.pool_size) if idx < work.num_pooled else (idx, 1, number)
            pieces = np.random.default_rng(seed).integers(0, len(self._texts), num_tokens // PIECE_TOKENS)
            messages.append((ROLES[(idx - 1) % 2] if idx else "system", pieces))
        return messages


def make_model(folder: Path) -> None:
    """Write a model's tokenizer and chat template, as Hugging Face has them, and the pieces of chats beside them."""
    words = _library_words()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[START, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(words[at : at + 1000]) for at in range(0, len(words), 1000)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))
    texts, ids = _pieces(tokenizer, words)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    frames = {role: [encode(f"{START}{role}\n{OPENING}"), encode(f"{END}\n")] for role in ("system", *ROLES)}
    made = {"texts": texts, "ids": ids, "frames": frames, "prompt_end": encode(f"{START}assistant\n")}
    (folder / "pieces.json").write_text(json.dumps(made))
    _check(tokenizer, Chats(folder))


def _library_words() -> list[str]:
    """Return the words of Python's standard library, of its source files by name."""
    texts = (path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return [word for text in texts for word in text.split() if word.isascii() and word.isprintable()]


def _pieces(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Return texts, ready to stand in JSON, of exactly `PIECE_TOKENS` tokens, and those."""
    distinct = list(dict.fromkeys(words))
    encodings = tokenizer.encode_batch([f" {word}" for word in distinct], add_special_tokens=False)
    ids_of = {word: encoding.ids for word, encoding in zip(distinct, encodings, strict=True)}
    texts: dict[str, list[int]] = {}
    taken: list[str] = []
    ids: list[int] = []
    for word in words:
        taken.append(word)
        ids += ids_of[word]
        if len(ids) == PIECE_TOKENS:
            texts[json.dumps(" ".join(taken))[1:-1]] = ids
        if len(ids) >= PIECE_TOKENS:
            taken, ids = [], []
    return list(texts), list(texts.values())


def _check(tokenizer: Tokenizer, chats: Chats) -> None:
    """Raise ValueError unless the tokens of a chat of each work are those that its text encodes to."""
    for work in WORKS.values():
        messages = json.loads(chats.body(work, 7))["messages"]
        text = "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
        encoded = tokenizer.encode(f"{text}{START}assistant\n", add_special_tokens=False).ids
        if encoded != chats.token_ids(f"{work.name}/7").tolist():
            raise ValueError(f"{work.name}: the tokens of a chat are not those of its pieces")
