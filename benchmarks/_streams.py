"""The streams that both indexers are fed: conversations in vLLM's events, published from a process of its own.

`Conversations` is engine, oracle and encoder at once: it makes messages ahead of time and knows what the engine holds
after them. `Publisher` is the handle on a process with one ZMQ socket a stream and side, which sends what was made.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

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


class _Encoder:
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


class _Server:
    """What runs in the publisher's process; `Publisher` calls its methods by name."""

    def __init__(self, pipe: Connection, spec: StreamSpec) -> None:
        self._pipe = pipe
        self._spec = spec
        self._rng = random.Random(spec.seed)
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 2048)
        self._sockets = {
            side: [_bound(context, spec.high_water_mark) for _ in range(spec.num_streams)] for side in spec.forms
        }
        self._engines = [Conversations(spec, idx) for idx in range(spec.num_streams)]
        self._encoders = {
            side: [_Encoder(form, idx) for idx in range(spec.num_streams)] for side, form in spec.forms.items()
        }
        self._numbers = {side: [0] * spec.num_streams for side in spec.forms}
        self._made: dict[str, list[Frames]] = {side: [] for side in spec.forms}
        self._kept = self._made

    def endpoints(self) -> dict[str, list[str]]:
        """Return where each side's streams are."""
        return {
            side: [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets]
            for side, sockets in self._sockets.items()
        }

    def await_subscribers(self, side: str, numbers: Sequence[int] | None = None) -> None:
        """Return when each stream of a side has that many subscribers, or one."""
        sockets = self._sockets[side]
        for socket, number in zip(sockets, numbers or [1] * len(sockets), strict=True):
            for _ in range(number):
                if not socket.poll(20_000):
                    raise TimeoutError(f"{side}: no subscriber")
                socket.recv()

    def make(self, num_steps: int, streams: Sequence[int] | None = None) -> tuple[list[Probe], dict[str, list[float]]]:
        """Make messages of some steps, the streams taking turns, and last a block for each to tell when all is visible.

        Returns these blocks, and for each side the number of messages and their mean size.
        """
        self._made = {side: [] for side in self._spec.forms}
        streams = range(self._spec.num_streams) if streams is None else streams
        for stream_idx in islice(cycle(streams), num_steps):
            self._add(stream_idx, *self._engines[stream_idx].step())
        probes = []
        for stream_idx in streams:
            event, token_ids = self._engines[stream_idx].sentinel()
            self._add(stream_idx, [], event, is_last=True)
            probes.append(Probe(stream_idx, token_ids, len(token_ids)))
        sizes = {
            side: [len(frames), sum(len(one.payload) for one in frames) / max(1, len(frames))]
            for side, frames in self._made.items()
        }
        return probes, sizes

    def _add(self, stream_idx: int, removed: list[int], stored: EngineStored, is_last: bool = False) -> None:
        for side, encoders in self._encoders.items():
            self._made[side] += encoders[stream_idx].add(removed, stored, is_last)

    def make_prompts(self, num_tokens: Sequence[int], num_streams: int, has_common_seed: bool) -> list[list[int]]:
        """Make the storing of prompts, stream i of N holding the first (i + 1) / N of each; return their tokens.

        With a common seed all engines give a block the same hash, as with the same PYTHONHASHSEED.
        """
        prompts = [[self._rng.randrange(VOCABULARY) for _ in range(num)] for num in num_tokens]
        self._made = {side: [] for side in self._spec.forms}
        rng = np.random.default_rng(self._spec.seed)
        for token_ids in prompts:
            common = engine_hashes(rng, len(token_ids) // BLOCK_SIZE)
            for stream_idx in range(num_streams):
                num_held = len(token_ids) * (stream_idx + 1) // num_streams // BLOCK_SIZE
                hashes = common if has_common_seed else engine_hashes(rng, num_held)
                for event in self._engines[stream_idx].prompt(token_ids[: num_held * BLOCK_SIZE], hashes[:num_held]):
                    self._add(stream_idx, [], event)
        return prompts

    def _send(self, side: str, frames: Frames) -> None:
        stream_idx, topic, payload = frames
        number = self._numbers[side][stream_idx]
        self._numbers[side][stream_idx] = number + 1
        send = self._sockets[side][stream_idx].send
        send(topic, zmq.SNDMORE)
        send(number.to_bytes(8, "big"), zmq.SNDMORE)
        send(payload)

    def burst(self, side: str) -> float:
        """Send everything made, as fast as the sockets take it; return when the first was sent."""
        started_s = time.monotonic()
        for frames in self._made[side]:
            self._send(side, frames)
        return started_s

    def paced(self, side: str, duration_s: float) -> float:
        """Send everything made, one by one and evenly over a time; return when the first was sent."""
        started_s = time.monotonic()
        interval_s = duration_s / len(self._made[side])
        for number, frames in enumerate(self._made[side]):
            _sleep_until(started_s + number * interval_s)
            self._send(side, frames)
        return started_s

    def keep(self) -> None:
        """Keep what was made for `endless`."""
        self._kept = self._made

    def endless(self, side: str, interval_s: float) -> int:
        """Send what was kept again and again until the next call comes; return how many messages."""
        started_s = time.monotonic()
        for number, frames in enumerate(cycle(self._kept[side])):
            if number % 16 == 0 and self._pipe.poll(0):
                return number
            _sleep_until(started_s + number * interval_s)
            self._send(side, frames)
        return 0

    def mark(self, side: str, interval_s: float, num_around: int) -> float:
        """Send what was kept for a while, what was made in the middle of it; return when that was sent."""
        started_s = time.monotonic()
        marked_s = started_s
        around = list(islice(cycle(self._kept[side]), 2 * num_around))
        for number, frames in enumerate([*around[:num_around], *self._made[side], *around[num_around:]]):
            _sleep_until(started_s + number * interval_s)
            if number == num_around:
                marked_s = time.monotonic()
            self._send(side, frames)
        return marked_s

    def probes(self, num_probes: int) -> list[Probe]:
        """Return prompts of all kinds: whole, cut within and between blocks, going on unknown, wrong in the middle."""
        return [self._probe() for _ in range(num_probes)]

    def whole_prompts(self, num_prompts: int) -> list[Probe]:
        """Return conversations that have ended, of all streams."""
        found = []
        while len(found) < num_prompts:
            stream_idx = self._rng.randrange(self._spec.num_streams)
            conversation = self._rng.choice(self._engines[stream_idx].all)
            if conversation.num_held >= MAX_BLOCKS:
                token_ids = conversation.token_ids.tolist()
                found.append(Probe(stream_idx, token_ids, len(token_ids)))
        return found

    def _probe(self) -> Probe:
        stream_idx = self._rng.randrange(self._spec.num_streams)
        conversations = self._engines[stream_idx].all
        conversation = self._rng.choice(conversations[-256:] if self._rng.random() < 0.7 else conversations)
        tokens = conversation.token_ids.tolist()
        num_known = len(tokens)
        kind = self._rng.randrange(5)
        if kind == 1:
            num_known = self._rng.randrange(num_known + 1)
            del tokens[num_known:]
        elif kind == 2:
            num_known = self._rng.randrange(num_known + 1) // BLOCK_SIZE * BLOCK_SIZE
            del tokens[num_known:]
        elif kind == 3:
            tokens += [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randrange(100))]
        elif kind == 4 and tokens:
            num_known = self._rng.randrange(num_known)
            tokens[num_known] ^= 1
        num_held = min(num_known // BLOCK_SIZE, conversation.num_held) * BLOCK_SIZE
        return Probe(stream_idx, tokens, num_held)


def _bound(context: zmq.Context[zmq.Socket[bytes]], high_water_mark: int) -> zmq.Socket[bytes]:
    """Return a PUB socket that also tells of its subscribers and, at its high-water mark, waits."""
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.XPUB_NODROP, 1)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("tcp://127.0.0.1:*")
    return socket


def _sleep_until(time_s: float) -> None:
    wait_s = time_s - time.monotonic()
    if wait_s > 0:
        time.sleep(wait_s)


def _serve(pipe: Connection, spec: StreamSpec) -> None:
    server = _Server(pipe, spec)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(server, name)(*arguments))


class Publisher:
    """A process that publishes; `call` is one of the methods above, `begin` the same without waiting for its end."""

    def __init__(self, spec: StreamSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, spec), daemon=True)
        self._process.start()
        child.close()
        self.endpoints: dict[str, list[str]] = self.call("endpoints")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the process and return its result."""
        self.begin(name, *arguments)
        return self.result()

    def begin(self, name: str, *arguments: Any) -> None:
        """Call a method; `result` waits for it, unless the next call does."""
        self._pipe.send((name, arguments))

    def result(self) -> Any:
        """Return what the call that was begun first gave."""
        return self._pipe.recv()

    def stop(self) -> Any:
        """End the `endless` that was begun, and return what it gave."""
        self.begin("endpoints")
        result = self.result()
        self.result()
        return result

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
