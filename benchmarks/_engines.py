"""The engines that both indexers follow: conversations as vLLM's events, or as Kvist's publisher would send them.

`Conversations` is engine and oracle: it says what a step stores and removes, and knows what is held afterwards.
`Encoder` encodes steps as messages.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvist.events import FULL, EngineRemoved, EngineStored, WorkerRank
from kvist.events.codec import encode_batch
from kvist.publisher.stream import RankStream, topic_of

BLOCK_SIZE = 16
VOCABULARY = 128_256
MAX_BLOCKS = 128
"""Of a conversation, unless an event has more than a quarter of it."""
ENGINE_HWM = 100_000
"""What vLLM's socket keeps for a slow subscriber. Bursts are shorter; where they are not, the publisher waits."""

_encode = msgspec.msgpack.Encoder().encode


class Frames(NamedTuple):
    """A message as ZMQ carries it, but for the number that it gets when it is sent, and the stream that carries it."""

    stream_idx: int
    topic: bytes
    payload: bytes


class Probe(NamedTuple):
    """A prompt, and how many of its tokens the engine of a stream holds."""

    stream_idx: int
    token_ids: list[int]
    num_held: int


@dataclass(frozen=True)
class StreamSpec:
    """What is made: events of `num_blocks` new blocks for each side in its form.

    A form is "map", "array", or "canonical/K", which is what Kvist's publisher makes of K events. Beyond `capacity`
    blocks a stream's oldest are removed, one event a hash, before a message stores new ones.
    """

    num_blocks: int
    forms: dict[str, str]
    capacity: int | None = None
    num_streams: int = 1
    num_open: int = 64
    """Conversations that go on at the same time."""
    high_water_mark: int = ENGINE_HWM
    seed: int = 1


@dataclass
class _Conversation:
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    num_held: int = 0


class Conversations:
    """One engine: a few dozen conversations at a time, each grown by an event in its turn."""

    def __init__(self, spec: StreamSpec, stream_idx: int) -> None:
        self._num_blocks = spec.num_blocks
        self._max_blocks = max(MAX_BLOCKS, 4 * spec.num_blocks)
        self._capacity = spec.capacity
        self._rng = np.random.default_rng((spec.seed, stream_idx))
        self._open: deque[_Conversation] = deque(_Conversation() for _ in range(spec.num_open))
        self._evictable: deque[_Conversation] = deque()
        self._num_held = 0
        self.all: list[_Conversation] = list(self._open)

    def step(self) -> tuple[list[int], EngineStored]:
        """Return what the engine's next step removes and stores."""
        conversation = self._open.popleft()
        if len(conversation.hashes) >= self._max_blocks:
            self._evictable.append(conversation)
            conversation = _Conversation()
            self.all.append(conversation)
        self._open.append(conversation)
        return self._evict(self._num_blocks), self._grow(conversation, self._num_blocks)

    def sentinel(self) -> tuple[EngineStored, list[int]]:
        """Return the event of a conversation of one block, and its tokens."""
        conversation = _Conversation()
        return self._grow(conversation, 1), conversation.token_ids.tolist()

    def prompt(self, token_ids: Sequence[int], hashes: Sequence[int]) -> list[EngineStored]:
        """Return the events of a prompt, in chunks of 64 blocks as from a chunked prefill."""
        conversation = _Conversation()
        events = []
        for start in range(0, len(token_ids) // BLOCK_SIZE, 64):
            tokens = list(token_ids[start * BLOCK_SIZE : (start + 64) * BLOCK_SIZE])
            events.append(self._extend(conversation, tokens, list(hashes[start : start + len(tokens) // BLOCK_SIZE])))
        return events

    def _grow(self, conversation: _Conversation, num_blocks: int) -> EngineStored:
        tokens = self._rng.integers(0, VOCABULARY, num_blocks * BLOCK_SIZE).tolist()
        return self._extend(conversation, tokens, engine_hashes(self._rng, num_blocks))

    def _extend(self, conversation: _Conversation, tokens: list[int], hashes: list[int]) -> EngineStored:
        parent = conversation.hashes[-1] if conversation.hashes else None
        conversation.token_ids.extend(tokens)
        conversation.hashes.extend(hashes)
        conversation.num_held += len(hashes)
        self._num_held += len(hashes)
        return EngineStored(hashes, tokens, BLOCK_SIZE, parent, window=FULL, group=0)

    def _evict(self, num_blocks: int) -> list[int]:
        """Return the hashes that make room: the ends of the oldest conversations first, as in vLLM's free queue."""
        removed: list[int] = []
        while self._capacity is not None and self._evictable and self._num_held + num_blocks > self._capacity:
            conversation = self._evictable[0]
            conversation.num_held -= 1
            self._num_held -= 1
            removed.append(conversation.hashes[conversation.num_held])
            if conversation.num_held == 0:
                self._evictable.popleft()
        return removed


def engine_hashes(rng: np.random.Generator, num_blocks: int) -> list[int]:
    """Return block hashes as an engine names them: opaque, and of 64 bits."""
    hashes: list[int] = rng.integers(1 << 63, (1 << 64) - 1, num_blocks, np.uint64).tolist()
    return hashes


def encode_vllm(form: str, removed: Sequence[int], stored: EngineStored) -> bytes:
    """Return one engine step as vLLM encodes it: a removal event a hash, then the stored chain."""
    events: list[Any]
    hashes, parent, tokens = stored.block_hashes, stored.parent_block_hash, stored.token_ids
    if form == "array":
        events = [["BlockRemoved", [block_hash], "GPU"] for block_hash in removed]
        events.append(["BlockStored", hashes, parent, tokens, BLOCK_SIZE, None, "GPU", None])
    else:
        events = [
            {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU", "group_idx": 0}
            for block_hash in removed
        ]
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
    return _encode([time.time(), events, 0])


class Encoder:
    """One stream for one side: each step is a message, or some of them a batch of Kvist's publisher."""

    def __init__(self, form: str, stream_idx: int) -> None:
        self._form, _, num_steps = form.partition("/")
        self._stream_idx = stream_idx
        self._num_steps = int(num_steps or 1)
        self._num_waiting = 0
        source = WorkerRank(str(stream_idx + 1), 0)
        self._stream = RankStream(source, BLOCK_SIZE, epoch=1)
        self._topic = topic_of(source) if self._form == "canonical" else b""

    def add(self, removed: Sequence[int], stored: EngineStored, is_last: bool = False) -> list[Frames]:
        """Return the messages that are complete with this step; with `is_last` also the one that is not."""
        if self._form != "canonical":
            return [Frames(self._stream_idx, self._topic, encode_vllm(self._form, removed, stored))]
        for block_hash in removed:
            self._stream.admit(EngineRemoved([block_hash], FULL, 0))
        self._stream.admit(stored)
        self._num_waiting += 1
        if self._num_waiting < self._num_steps and not is_last:
            return []
        self._num_waiting = 0
        batches = self._stream.close_batches(time.time())
        return [Frames(self._stream_idx, self._topic, encode_batch(batch)) for batch in batches]
