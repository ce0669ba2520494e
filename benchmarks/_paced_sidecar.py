"""A whole sidecar between real sockets: an emulated vLLM in another process sends at a given rate, or all at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from kvist.events.transports import Endpoint
from kvist.publisher.sidecar import Sidecar

ENGINE_HWM = 100_000
"""vLLM's default: messages that its socket keeps for a slow subscriber before it drops."""
BLOCK_SIZE = 16
NUM_REQUESTS, MAX_BLOCKS = 256, 128
"""Requests that an engine decodes at the same time, each growing by an event in its turn, and where they end."""
MAX_LAG_S = 300.0


class PacedStream(NamedTuple):
    """What the engine sends: `rate` is in blocks a second, None for all at once."""

    num_blocks: int
    num_blocks_an_event: int
    num_events_a_message: int
    rate: float | None
    num_cached_blocks: int = 50_000
    """What it holds before each event removes as many blocks as it stores, an event for each."""

    @property
    def num_messages(self) -> int:
        """How many messages that is."""
        return self.num_blocks // (self.num_blocks_an_event * self.num_events_a_message)

    def payloads(self) -> Iterator[bytes]:
        """Yield the messages, in the form of vLLM 0.33."""
        rng = np.random.default_rng(1)
        encode = msgspec.msgpack.Encoder().encode
        held: deque[int] = deque()
        requests: deque[list[int]] = deque([] for _ in range(NUM_REQUESTS))
        for _ in range(self.num_messages):
            events: list[dict[str, object]] = []
            for _ in range(self.num_events_a_message):
                while len(held) > self.num_cached_blocks - self.num_blocks_an_event:
                    hashes = [held.popleft()]
                    events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0})
                request = requests.popleft()
                hashes = rng.integers(1 << 63, (1 << 64) - 1, self.num_blocks_an_event, np.uint64).tolist()
                events.append(_stored(rng, hashes, request[-1] if request else None))
                request += hashes
                held += hashes
                requests.append(request if len(request) < MAX_BLOCKS else [])
            yield encode([time.time(), events, 0])


def _stored(rng: np.random.Generator, hashes: list[int], parent: int | None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": rng.integers(0, 128_256, len(hashes) * BLOCK_SIZE).tolist(),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


class Outcome(NamedTuple):
    """What became of a stream in the sidecar."""

    cpu_us_per_block: float
    sent_per_s: float
    lag_s: float
    """From the engine's last message on, until the sidecar had published everything."""
    peak_waiting: int
    num_missing: int
    """Messages, by their sequence numbers, and events that did not become part of what was published."""
    num_held: int
    """Blocks that the sidecar holds in the end: as many as the engine."""


def follow_paced(stream: PacedStream, num_cores: int | None = None) -> Outcome:
    """Run a sidecar beside an engine that sends the stream; on so many of the first cores, the engine on the last."""
    cores = sorted(os.sched_getaffinity(0))
    with _engine(stream, None if num_cores is None else {cores[-1]}) as pipe:
        endpoint = pipe.recv()
        try:
            os.sched_setaffinity(0, cores if num_cores is None else cores[:num_cores])
            return asyncio.run(_follow(stream, endpoint, pipe))
        finally:
            os.sched_setaffinity(0, cores)


async def _follow(stream: PacedStream, endpoint: str, pipe: Connection) -> Outcome:
    with Sidecar([Endpoint.parse(endpoint)], to="tcp://127.0.0.1:0", worker="bench", block_size=BLOCK_SIZE) as sidecar:
        running = asyncio.get_running_loop().create_task(sidecar.run())
        await asyncio.to_thread(pipe.recv)  # the engine has a subscriber
        cpu_s, peak_waiting = time.process_time(), 0
        pipe.send(None)
        while not pipe.poll():
            peak_waiting = max(peak_waiting, sidecar.statistics().published.num_waiting_events)
            await asyncio.sleep(0.02)
        sent_s, ended_s = pipe.recv(), time.monotonic()
        while not _is_done(sidecar, stream) and time.monotonic() - ended_s < MAX_LAG_S:
            peak_waiting = max(peak_waiting, sidecar.statistics().published.num_waiting_events)
            await asyncio.sleep(0.01)
        lag_s, cpu_s = time.monotonic() - ended_s, time.process_time() - cpu_s
        statistics = sidecar.statistics()
        running.cancel()
    num_missing = stream.num_messages - statistics.num_engine_batches + statistics.published.num_lost_events
    num_held = statistics.published.ranks[0].num_blocks
    per_block_us = cpu_s / stream.num_blocks * 1e6
    return Outcome(per_block_us, stream.num_blocks / sent_s, lag_s, peak_waiting, num_missing, num_held)


def _is_done(sidecar: Sidecar, stream: PacedStream) -> bool:
    statistics = sidecar.statistics()
    is_read = statistics.num_engine_batches >= stream.num_messages
    return is_read and statistics.published.num_waiting_events == statistics.published.num_waiting_batches == 0


@contextmanager
def _engine(stream: PacedStream, cores: set[int] | None) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, stream, cores), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _send(pipe: Connection, stream: PacedStream, cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    messages = [(b"", idx.to_bytes(8, "big"), payload) for idx, payload in enumerate(stream.payloads())]
    socket = zmq.Context().socket(zmq.XPUB)
    socket.set(zmq.SNDHWM, ENGINE_HWM)
    socket.bind("tcp://127.0.0.1:*")
    pipe.send(socket.get_string(zmq.LAST_ENDPOINT))
    socket.recv()
    pipe.send(None)
    pipe.recv()
    interval_s = 0.0 if stream.rate is None else stream.num_blocks / stream.num_messages / stream.rate
    started_s = time.monotonic()
    for idx, message in enumerate(messages):
        wait_s = started_s + idx * interval_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        socket.send_multipart(message)
    pipe.send(time.monotonic() - started_s)
    pipe.recv()
