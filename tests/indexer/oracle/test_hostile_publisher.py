"""A publisher gone wrong: whatever it sends, another worker's blocks stay exact and the service does not grow."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from kvist.events import Batch, Cleared, Heartbeat, Removed, Stored
from kvist.events.codec import encode_batch
from kvist.events.hashing import block_hashes

BLOCK_SIZE = 4
MODEL = "fuzzed"
NUM_ROUNDS = int(os.environ.get("KVIST_ORACLE_ROUNDS", "2"))
MAX_GROWTH_BYTES = 24 << 20
DEADLINE_S = 180.0
U64_MAX = (1 << 64) - 1
_numbers = count(1)


def tokens_of(number: int) -> list[int]:
    return [number, 1, 2, 3]


def until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"never became true: {condition}"
        time.sleep(0.002)


class Honest:
    """A worker that tells the truth, and what must be answered about it at any moment."""

    def __init__(self, service: Any, engine: Any, port: int, truth: Any) -> None:
        self._service = service
        self._engine = engine
        self._truth = truth
        self._held: list[int] = []
        register(service, 1, port, replay_endpoint=f"tcp://127.0.0.1:{port + 1}")

    def check(self) -> None:
        """Change something, and compare everything once it is seen."""
        truth = self._truth.rank(MODEL, 1, 0)
        if len(self._held) > 5:
            self._engine.remove(self._held[0])
            truth.removed(self._held[:1])
        number = next(_numbers)
        self._engine.store(number, tokens_of(number))
        truth.stored([number], tokens_of(number))
        self._held = [*self._held, number][-6:]
        until(lambda: "1" in self.query(number)["instances"])
        for held in range(max(1, number - 7), number + 1):
            mine = self.query(held)
            mine["scores"].pop("2", None)
            mine["instances"].pop("2", None)
            assert mine == self._truth.answer(MODEL, tokens_of(held))

    def query(self, number: int) -> Any:
        status, answer = self._service.call("POST", "/query", {"model_name": MODEL, "token_ids": tokens_of(number)})
        assert status == 200
        return answer


def register(service: Any, instance_id: int, port: int | str, **options: Any) -> None:
    body = {"instance_id": instance_id, "model_name": MODEL, "endpoint": f"tcp://127.0.0.1:{port}"}
    assert service.call("POST", "/register", body | {"block_size": BLOCK_SIZE} | options)[0] == 201


def unregister(service: Any, instance_id: int) -> None:
    assert service.call("POST", "/unregister", {"instance_id": instance_id, "model_name": MODEL})[0] == 200


@pytest.fixture
def honest(
    service: Any, start_vllm: Callable[..., Any], free_port: Callable[[], int], make_fleet_truth: Callable[..., Any]
) -> Iterator[Honest]:
    port = free_port()
    yield Honest(service, start_vllm(port), port, make_fleet_truth({MODEL: BLOCK_SIZE}))
    unregister(service, 1)


class Publisher:
    """A PUB socket that sends any frames at all; registered as worker 2."""

    def __init__(self, service: Any, port: int, is_canonical: bool) -> None:
        self._service = service
        self._is_canonical = is_canonical
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._next_sequence = 0
        register(service, 2, f"{port}?replay_port=none")
        self.come_back()

    def send(self, payload: bytes) -> None:
        """Send a payload in proper frames, next in sequence."""
        self.send_frames([b"", self._next_sequence.to_bytes(8, "big"), payload])
        self._next_sequence += 1

    def send_frames(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def come_back(self) -> None:
        """Tell the truth, in a new process's words, until it is believed; a stock engine's is known by a gap."""

        def is_believed() -> bool:
            number = next(_numbers)
            self._next_sequence += 1
            self.send(self._canonical(number) if self._is_canonical else self._stock(number))
            give_up_s = time.monotonic() + 0.2
            body = {"model_name": MODEL, "token_ids": tokens_of(number)}
            while "2" not in self._service.call("POST", "/query", body)[1]["instances"]:
                if time.monotonic() > give_up_s:
                    return False
                time.sleep(0.002)
            return True

        until(is_believed)

    @staticmethod
    def _stock(number: int) -> bytes:
        event = ["BlockStored", [number], None, tokens_of(number), BLOCK_SIZE, None, "GPU"]
        return msgspec.msgpack.encode([time.time(), [["AllBlocksCleared"], event], 0])

    @staticmethod
    def _canonical(number: int) -> bytes:
        hashes = block_hashes(tokens_of(number), BLOCK_SIZE).tobytes()
        epoch = (1 << 62) + number
        return encode_batch(Batch("w", 0, epoch, 0, BLOCK_SIZE, time.time(), (Cleared(), Stored(hashes))))

    def close(self) -> None:
        unregister(self._service, 2)
        self._context.destroy(linger=0)


@pytest.fixture
def make_publisher(
    service: Any,
    honest: Honest,  # noqa: ARG001 - its model must be there, and be left last
    free_port: Callable[[], int],
) -> Iterator[Callable[..., Publisher]]:
    publishers: list[Publisher] = []

    def make(*, is_canonical: bool = False) -> Publisher:
        publishers.append(Publisher(service, free_port(), is_canonical))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.close()


def stock_payloads(wires: Any) -> Iterator[bytes]:
    """Yield what engines send, in every form."""
    for wire in wires:
        for events in (
            [wire.stored([11, 12], range(8), block_size=BLOCK_SIZE)],
            [wire.stored([U64_MAX, 14], [1 << 31, 5, 6, 7, 300, 70_000, 2, 1], 12, 1, block_size=BLOCK_SIZE)],
            [wire.removed([11, 12]), wire.cleared(), wire.stored([15], range(4), block_size=BLOCK_SIZE)],
        ):
            yield msgspec.msgpack.encode([time.time(), events, 0])


def canonical_payloads(wires: Any) -> Iterator[bytes]:  # noqa: ARG001
    """Yield what Kvist's publisher sends, of two ranks."""
    hashes = bytes(range(32))
    for rank in range(2):
        events = (Stored(hashes), Removed(hashes[:8]), Stored(hashes[:8], 5), Cleared(), Stored(hashes))
        for sequence in range(4):
            yield encode_batch(Batch("w", rank, 1, sequence, BLOCK_SIZE, time.time(), events))
        yield encode_batch(Batch("w", rank, 1, 4, BLOCK_SIZE, time.time(), (Heartbeat(4, 5),)))


def cut(real: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    for payload in real:
        for end in range(len(payload)):
            yield payload[:end]
        yield payload + bytes([rng.randrange(256)])


def flipped(real: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    for payload in real:
        for _ in range(300):
            flipped = bytearray(payload)
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                flipped[rng.randrange(len(flipped))] = rng.choice(
                    (rng.randrange(256), 0xDD, 0xDF, 0xC6, 0xDB, 0xC1, 0xCF)
                )
            yield bytes(flipped)


def boasting(real: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Claim arrays, maps, strings and bytes of up to 2**32 - 1 items, wherever one can stand, and nest without end."""
    for payload in real:
        for claim in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
            for size in (1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
                at = rng.randrange(1, len(payload))
                yield payload[:at] + claim + size.to_bytes(4, "big") + payload[at + 1 :]
    for opening in (b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\xa1a"):
        for prefix in (b"", b"\x93\xcb" + bytes(8), b"\x93\xcb" + bytes(8) + b"\x91", b"\x98\xa6kvist1"):
            yield prefix + opening * 20_000


def wrong_values(good: dict[str, Any]) -> Iterator[bytes]:
    """Yield batches with a value of every kind at every place of an event."""
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_id", "lora_name")
    names += ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality")
    for value in (-1, 1 << 32, U64_MAX, -(1 << 63), 1.5, float("nan"), True, None, "7", b"7", [7], {"a": 1}, []):
        for name in names:
            for wrong in (
                good | {name: value},
                good | {name: [value] * 8},
                good | {name: [1, 2, 3, value, 4, 5, 6, 7]},
            ):
                for events in ([wrong], [list(wrong.values())], [good, wrong, good]):
                    yield msgspec.msgpack.encode([time.time(), events, 0])
        now_s = time.time()
        for batch in ([value, [good], 0], [now_s, value, 0], [now_s, [value], 0], [now_s, [good], value], value):
            yield msgspec.msgpack.encode(batch)
    for block_size in (0, 1, 3, 5, 8, 1 << 31, U64_MAX):
        yield msgspec.msgpack.encode([time.time(), [good | {"block_size": block_size}], 0])


def survive(honest: Honest, publisher: Publisher, rounds: Callable[[random.Random], Iterable[bytes]]) -> None:
    """Send rounds of payloads; after the first, memory must have stopped growing."""
    process = psutil.Process()
    before_bytes = 0
    for round_number in range(NUM_ROUNDS):
        for idx, payload in enumerate(rounds(random.Random(round_number))):
            publisher.send(payload)
            if idx % 500 == 0:
                honest.check()
        publisher.come_back()
        honest.check()
        before_bytes = before_bytes or process.memory_info().rss
    assert process.memory_info().rss - before_bytes < MAX_GROWTH_BYTES


@pytest.mark.parametrize("mangle", [cut, flipped, boasting])
@pytest.mark.parametrize("is_canonical", [False, True])
def test_no_mangled_payload_hurts_anybody_else(
    honest: Honest, make_publisher: Callable[..., Publisher], wires: Any, is_canonical: bool, mangle: Callable[..., Any]
) -> None:
    real = list((canonical_payloads if is_canonical else stock_payloads)(wires))
    survive(honest, make_publisher(is_canonical=is_canonical), lambda rng: mangle(real, rng))


def test_no_value_of_a_wrong_kind_hurts_anybody_else(
    honest: Honest, make_publisher: Callable[..., Publisher], wires: Any
) -> None:
    good = wires[0].stored([21, 22], range(8), block_size=BLOCK_SIZE)
    survive(honest, make_publisher(), lambda _: wrong_values(good))


def test_no_frames_hurt_anybody_else(honest: Honest, make_publisher: Callable[..., Publisher], wires: Any) -> None:
    publisher = make_publisher()
    payload = next(stock_payloads(wires))
    for num_frames in (1, 2, 4, 5, 100, 1500):
        publisher.send_frames([payload] * num_frames)
        honest.check()
    for size in (*range(8), 9, 16, 300):
        publisher.send_frames([b"", bytes(size), payload])
    for sequence in (U64_MAX, U64_MAX - 1, 1 << 63, (1 << 63) - 1, 0, 1 << 32):
        publisher.send_frames([b"x" * 70_000, sequence.to_bytes(8, "big"), payload])
        honest.check()
    publisher.come_back()
    honest.check()
