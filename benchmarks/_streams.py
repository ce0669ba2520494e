"""The streams that both indexers follow, published from a separate process.

`Publisher` is the handle on a process with one ZMQ socket for each stream and indexer, which prepares messages and then
sends them.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Sequence
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from _engines import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    VOCABULARY,
    Conversations,
    Encoder,
    Frames,
    Probe,
    StreamSpec,
    engine_hashes,
)

from kvist.events import EngineStored


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
            side: [Encoder(form, idx) for idx in range(spec.num_streams)] for side, form in spec.forms.items()
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
