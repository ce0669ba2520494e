"""The workers of a simulated fleet: an engine with our publisher in it and one with its own stream."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from fault_harness.engine import BLOCK_SIZE, Engine, Held, digest_of
from fault_harness.publisher import SteppedPublisher
from fault_harness.virtual import World
from fault_harness.wire import Link, WirePublication
from kvist.events.engine_events import FULL, EngineCleared, EngineCreated, EngineEvent, EngineStored
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import Tier

Digest = tuple[int, int]


class Account:
    """What a rank's stream amounts to at each of its numbers, by whoever publishes it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], Held | None] = {}
        self._digests: dict[tuple[int, int, int], Digest] = {}
        self.ever: set[tuple[int, Digest]] = set()
        """Each rank's digests at any time."""

    def note(self, rank: int, epoch: int, next_sequence: int, held: Held | None, digest: Digest) -> None:
        """Note what a rank holds before a number; the first note counts."""
        if (rank, epoch, next_sequence) not in self._digests:
            self._digests[rank, epoch, next_sequence] = digest
            self._held[rank, epoch, next_sequence] = held
            self.ever.add((rank, digest))

    def digest(self, rank: int, epoch: int, next_sequence: int) -> Digest | None:
        return self._digests.get((rank, epoch, next_sequence))

    def held(self, rank: int, epoch: int, next_sequence: int) -> Held | None:
        return self._held.get((rank, epoch, next_sequence))


class Worker:
    """What all have in common: an address, engines by rank that come and go, and an account of the stream there."""

    has_snapshots = True
    """Whether whatever was lost can be learnt again."""
    tells_groups_first = True
    """Whether its engines may say which layer groups they have, before anything else."""
    has_copies = False
    """Whether they report each copy of a block, as vLLM does."""

    def __init__(self, name: str, link: Link, world: World, rng: random.Random, settings: dict[str, Any]) -> None:
        self.name = name
        self.link = link
        self.account = Account()
        self.engines: list[Engine] = []
        self.num_blocks = 0
        self.was_taken_over = False
        """Whether a router was restored from a dump, which tells of an engine's own blocks only what has one name."""
        self._world = world
        self._rng = rng
        self._settings = settings

    @property
    def url(self) -> str:
        return f"memory://{self.name}"

    @property
    def is_up(self) -> bool:
        return bool(self.engines)

    def start(self, *, clock_offset_s: float = 0.0) -> None:
        """Start a process whose clock is off by so much, with empty caches."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the process at once."""
        self.num_blocks += sum(engine.num_stored for engine in self.engines)
        self.engines = []

    def stop(self) -> None:
        """End the process in an orderly way."""
        self.kill()

    def live(self, num_steps: int) -> None:
        """Have each engine do something."""
        for engine in self.engines:
            for _ in range(self._rng.randint(0, num_steps)):
                engine.live()

    def is_followed_to(self, position: tuple[int, int] | None) -> bool:
        """Return whether a stream that is followed to there was followed to its end."""
        return position is not None

    def is_of_now(self, position: tuple[int, int] | None) -> bool:  # noqa: ARG002
        """Return whether what a router has of a stream followed to there cannot be of a process that is gone."""
        return True

    def speak(self) -> None:
        """Do something that shows on the wire if nothing else would tell of what was lost."""
        self.live(3)

    def _new_engines(self, report: Any) -> list[Engine]:
        return [
            Engine(
                random.Random(self._rng.getrandbits(32)),
                rank,
                report,
                has_groups=self._settings["has_groups"],
                has_created=self._settings["has_created"] and self.tells_groups_first,
                has_copies=self.has_copies,
            )
            for rank in range(self._settings["num_ranks"])
        ]


class EmbeddedWorker(Worker):
    """An engine with our publisher inside."""

    publisher: SteppedPublisher | None = None

    def start(self, *, clock_offset_s: float = 0.0) -> None:
        self._world.wall_offset_s = clock_offset_s
        self.publisher = SteppedPublisher(
            WirePublication(self.link),
            worker="its-own-name",
            block_size=BLOCK_SIZE,
            num_ranks=self._settings["num_ranks"],
            limits=self._settings["limits"],
        )
        self._world.wall_offset_s = 0.0
        self.engines = self._new_engines(self.publisher.report)
        self.publisher.noted = self._note
        self._note(self.publisher)

    def kill(self) -> None:
        super().kill()
        if self.publisher is not None:
            self.publisher.kill()
            self.publisher = None

    def stop(self) -> None:
        if self.publisher is not None:
            self.publisher.finish()
        self.kill()

    def _note(self, publisher: SteppedPublisher) -> None:
        if publisher.statistics().num_waiting_events:
            return
        for engine in self.engines:
            stream = publisher.streams[engine.rank]
            if self.account.digest(engine.rank, publisher.epoch, stream.next_sequence) is None:
                held = engine.held
                digest = digest_of(held)
                assert (stream.residency.num_blocks, stream.residency.digest) == digest, (
                    "the publisher holds what its engine does"
                )
                self.account.note(engine.rank, publisher.epoch, stream.next_sequence, held, digest)


class StockProcess:
    """The event side of a vLLM process: numbered batches, the last of which it sends again."""

    def __init__(self, link: Link, world: World, num_kept: int | None, account: Account, incarnation: int) -> None:
        self._publication = WirePublication(link)
        self._world = world
        self._kept: deque[Message] = deque(maxlen=num_kept)
        self._pending: list[EngineEvent] = []
        self._account = account
        self._incarnation = incarnation
        self.next_sequence = 0
        if num_kept != 0:
            self._publication.serve_replay(self)

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        return iter([message for message in self._kept if message.sequence >= request.start_sequence])

    def report(self, event: EngineEvent) -> None:
        self._pending.append(event)

    def step(self, engines: list[Engine], *, is_lost: bool = False) -> None:
        """Publish, one batch a rank, what happened."""
        for engine in engines:
            events = [event for event in self._pending if event.rank == engine.rank]
            for other in engines:
                if other is engine or not events:
                    continue
                held = self._account.held(other.rank, self._incarnation, self.next_sequence)
                self._account.note(
                    other.rank, self._incarnation, self.next_sequence + 1, held, digest_of(held or Held())
                )
            if events:
                self._publish([as_vllm(event) for event in events], engine.rank, is_lost=is_lost)
                self._account.note(
                    engine.rank, self._incarnation, self.next_sequence, engine.held, digest_of(engine.held)
                )
        self._pending.clear()

    def _publish(self, events: list[dict[str, Any]], rank: int, *, is_lost: bool) -> None:
        payload = msgspec.msgpack.encode([self._world.time.time(), events, rank])
        message = Message(b"", self.next_sequence, payload)
        self.next_sequence += 1
        self._kept.append(message)
        if not is_lost:
            self._publication.send(message)

    def kill(self) -> None:
        self._publication.close()


class StockWorker(Worker):
    """An engine that streams events of its own, which the index follows."""

    tells_groups_first = False
    has_copies = True
    process: StockProcess | None = None
    _num_starts = 0

    @property
    def has_snapshots(self) -> bool:  # type: ignore[override]
        return self._settings["num_kept"] is None and not self.was_taken_over

    @property
    def url(self) -> str:
        return f"tcp://{self.name}:5557" + ("?replay_port=none" if self._settings["num_kept"] == 0 else "")

    def start(self, *, clock_offset_s: float = 0.0) -> None:  # noqa: ARG002 - an engine's clock decides nothing
        self._num_starts += 1
        self.link.speaks_engine = True
        self.process = StockProcess(self.link, self._world, self._settings["num_kept"], self.account, self._num_starts)
        for rank in range(self._settings["num_ranks"]):
            self.account.note(rank, self._num_starts, 0, Held(), digest_of(Held()))
        self.engines = self._new_engines(self.process.report)

    def live(self, num_steps: int) -> None:
        super().live(num_steps)
        if self.process is not None:
            self.process.step(self.engines)

    def is_followed_to(self, position: tuple[int, int] | None) -> bool:
        return position is not None and self.process is not None and position[1] == self.process.next_sequence

    def speak(self) -> None:
        """Publish something: what an engine that answers no questions lost last shows with its next message."""
        assert self.process is not None
        before = self.process.next_sequence
        while self.process.next_sequence == before:
            self.live(3)

    def kill(self) -> None:
        super().kill()
        if self.process is not None:
            self.process.kill()
            self.process = None


def as_vllm(event: EngineEvent) -> dict[str, Any]:
    """Return an event as vLLM's encoder makes it."""
    if isinstance(event, EngineCleared):
        return {"type": "AllBlocksCleared"}
    assert not isinstance(event, EngineCreated)
    made: dict[str, Any] = {
        "block_hashes": list(event.block_hashes),
        "medium": "CPU" if event.tier is Tier.HOST else "GPU",
    }
    if event.group is not None:
        made["group_idx"] = event.group
    if not isinstance(event, EngineStored):
        return {"type": "BlockRemoved", **made}
    made |= {
        "type": "BlockStored",
        "parent_block_hash": event.parent_block_hash,
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "lora_id": None,
        "lora_name": event.lora_name,
    }
    if event.group is not None:
        is_full = event.window is FULL
        made["kv_cache_spec_kind"] = "full_attention" if is_full else "sliding_window"
        made["kv_cache_spec_sliding_window"] = None if is_full else event.window
    return made
