"""Both ends of many transfers, on a wire that drops, doubles, delays and reorders; real bytes are written late."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq

from kvist.transfer.agents import Write as Steps
from kvist.transfer.agents import WriteFailedError
from kvist.transfer.commands import (
    Computed,
    Fetch,
    FetchCompleted,
    FetchFailed,
    FetchReleased,
    Offer,
    OfferReleased,
    Report,
    TransferLimits,
)
from kvist.transfer.heads import Part, heads_of
from kvist.transfer.messages import (
    GroupShape,
    Hello,
    Message,
    PoolPlace,
    Result,
    ResultStatus,
    decode_message,
    encode_message,
)
from kvist.transfer.receiver import Receiver
from kvist.transfer.sender import Sender

LIMITS = TransferLimits(transfer_timeout_s=20.0, hold_timeout_s=40.0, cancel_retry_s=3.0, max_remembered=64)
GROUP = GroupShape(None, 4, 1, "float32", 1, (0,))
HEAD, NUM_HEADS = GROUP.head_bytes(1), GROUP.num_kv_heads
BLOCK = NUM_HEADS * HEAD
NUM_PIECES = 2  # blocks of a prompt
NUM_REGIONS, NUM_PLACES = 3, 4
REGION_BYTES = NUM_PIECES * BLOCK  # which a rank of several needs a part of
BLOCKS_AT = NUM_REGIONS * REGION_BYTES  # regions lie at 0
LAST_BYTE = 0xA5


def hello(worker: str, part: Part, base_address: int) -> Hello:
    pools = (PoolPlace(base_address, GROUP.slot_bytes(1, part), 1 << 16),)
    return Hello(worker, "tiny", 1, 7, (GROUP,), part.num_ranks, part.rank, "any", worker.encode(), pools)


def content(idx: int, piece: int, head: int) -> bytes:
    """Return the KV of a prompt's block in one head."""
    return bytes([idx % 251, piece, head, LAST_BYTE])


@dataclass(eq=False)
class Write:
    """A write that is under way: what is still to land, from where, to where and how much, and how it ends."""

    peer: str
    pieces: list[tuple[int, int, int]]
    is_doomed: bool
    is_ended: bool = False

    def steps(self) -> Steps:
        while not self.is_ended:
            yield False
        if self.is_doomed or self.pieces:
            raise WriteFailedError("doomed")


@dataclass(eq=False)
class Connection:
    """A decode rank's to a prefill rank, by the wire."""

    endpoint: str
    rank: Decode
    inbox: list[list[bytes]] = field(default_factory=list)
    is_dead: bool = False
    used_at_s: float = 0.0

    def send(self, message: Message) -> None:
        world, name, payload = self.rank.world, self.rank.name, encode_message(message)

        def arrive() -> None:
            rank = world.ranks.get(self.endpoint)
            if rank is not None:
                rank.sender.handle([[name.encode(), payload]], world.now_s)

        world.wire.append(arrive)

    def receive(self) -> Iterator[list[bytes]]:
        while self.inbox:
            yield self.inbox.pop(0)


class Decode:
    """A rank of a worker that decodes: its connections, its memory and the regions to bounce through."""

    def __init__(self, world: World, name: str, part: Part) -> None:
        self.world, self.name, self.part = world, name, part
        self.prompt_bytes = NUM_PIECES * GROUP.slot_bytes(1, part)
        self.memory = bytearray(BLOCKS_AT + NUM_PLACES * self.prompt_bytes)
        self.connections: dict[str, Connection] = {}
        self.free_regions, self.free_places = list(range(NUM_REGIONS)), list(range(NUM_PLACES))
        self.places: dict[int, int] = {}  # of fetches under way
        self.seen: dict[int, list[str]] = {}
        ends: Any = self
        self.receiver = Receiver(ends, hello(name, part, BLOCKS_AT), LIMITS, self.report, ends)

    def report(self, report: Report) -> None:
        assert isinstance(report, FetchCompleted | FetchFailed | FetchReleased)
        idx = int(report.request_id)
        seen = self.seen.setdefault(idx, [])
        seen.append(type(report).__name__.removeprefix("Fetch"))
        assert seen in (["Completed"], ["Failed"], ["Failed", "Released"])
        self.world.outcomes[seen[0]] += len(seen) == 1
        place = self.places[idx]
        if seen[-1] == "Completed":
            heads = heads_of(NUM_HEADS, self.part)
            expected = b"".join(content(idx, piece, head) for piece in range(NUM_PIECES) for head in heads)
            at = BLOCKS_AT + place * self.prompt_bytes
            assert self.memory[at : at + len(expected)] == expected, "complete before every byte was in its place"
        if seen[-1] != "Failed":
            self.free_places.append(self.places.pop(idx))

    # Connections.

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self.connections.values()))

    def connect(self, endpoint: str, now_s: float) -> Connection:
        connection = self.connections.setdefault(endpoint, Connection(endpoint, self))
        connection.used_at_s = now_s
        return connection

    def drop(self, connection: Connection) -> None:
        del self.connections[connection.endpoint]

    def find_lost(self, connection: Connection, transfer_ids: set[int]) -> set[int]:
        return transfer_ids if connection.is_dead else set()

    # Bouncing.

    def reserve(self, size_bytes: int, _: int) -> int | None:
        assert size_bytes == self.prompt_bytes
        if self.world.rng.random() < 0.4 or not self.free_regions:
            return None
        return self.free_regions.pop() * REGION_BYTES

    def quarantine(self, room: int) -> None:
        assert room // REGION_BYTES not in self.free_regions

    def release(self, room: int) -> None:
        assert room // REGION_BYTES not in self.free_regions, "released twice"
        self.free_regions.append(room // REGION_BYTES)

    def scatter(self, parts: list[tuple[int, Any]]) -> None:
        if self.world.has_fault(0.1):
            raise RuntimeError("bad copy")
        for start, pieces in parts:
            at = start
            for target, size in pieces.tolist():
                self.memory[target : target + size] = self.memory[at : at + size]
                at += size


class Rank:
    """A rank of a worker that prefills: its socket, its agent, which writes late, and its memory."""

    kind = "any"

    def __init__(self, world: World, endpoint: str, part: Part) -> None:
        self.world, self.endpoint, self.part = world, endpoint, part
        self.slot_bytes = GROUP.slot_bytes(1, part)
        self.memory = bytearray()
        self.tables: dict[str, tuple[int, ...]] = {}
        self.computed: dict[str, int] = {}
        self.freed: Counter[str] = Counter()
        self.writes: list[Write] = []
        ends: Any = self
        self.sender = Sender(ends, ends, hello(endpoint, part, 0), LIMITS, self.report, ends)

    def offer(self, name: str) -> None:
        first = len(self.memory) // self.slot_bytes
        self.tables[name] = tuple(range(first, first + NUM_PIECES))
        self.memory += bytes(NUM_PIECES * self.slot_bytes)
        self.sender.offer(Offer(name, NUM_PIECES), self.world.now_s)
        self.compute_to(name, self.world.rng.randint(0, NUM_PIECES))

    def compute_to(self, name: str, num_blocks: int) -> None:
        self.computed[name] = num_blocks
        if self.freed[name]:
            return
        for piece, slot in enumerate(self.tables[name][:num_blocks]):
            heads = b"".join(content(int(name), piece, head) for head in heads_of(NUM_HEADS, self.part))
            self.memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] = heads
        table = self.tables[name][:num_blocks]
        self.sender.on_computed(Computed(name, (table,), num_blocks == NUM_PIECES), self.world.now_s)

    def report(self, report: Report) -> None:
        """Use the blocks for something else as soon as they are free: a write that still reads them is found out."""
        assert isinstance(report, OfferReleased)
        self.freed[report.remote_request_id] += 1
        for slot in self.tables[report.remote_request_id]:
            self.memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] = bytes(self.slot_bytes)

    # The socket.

    def send_multipart(self, frames: list[bytes], _: int) -> None:
        world, name, payload = self.world, frames[0].decode(), frames[1]
        worker = world.decodes.get(name)
        if worker is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        message = decode_message(payload, "")
        if isinstance(message, Result) and message.status is ResultStatus.SUCCESS and world.has_fault(0.03):
            # Which it has not where it has no room; where it has one, nobody may believe what is in it.
            is_bounced = not self.has_room(worker, message.transfer_id)
            payload = encode_message(Result(message.transfer_id, ResultStatus.BOUNCED)) if is_bounced else payload

        def arrive() -> None:
            connection = worker.connections.get(self.endpoint)
            if connection is not None and name in world.decodes:
                connection.inbox.append([payload])
                worker.receiver.receive(world.now_s)

        world.wire.append(arrive)

    def has_room(self, worker: Decode, transfer_id: int) -> bool:
        transfer = worker.receiver._transfers.get(transfer_id)
        return transfer is None or transfer.rooms[self.part.rank] is not None

    # The agent, and bouncing.

    def connect(self, metadata: bytes) -> str:
        return metadata.decode()

    def disconnect(self, peer: str) -> None:
        assert peer not in [write.peer for write in self.writes], "let go of while it is written to"

    def write(self, peer: str, fragments: Any) -> Steps:
        return self.begin(peer, [(local, remote, size) for local, remote, size in fragments.tolist()])

    def send(self, peer: str, fragments: Any, base: int) -> Steps | None:
        if self.world.rng.random() < 0.2:
            return None  # it lacks a slot of its own
        ends, at = [], base
        for local, _, size in fragments.tolist():
            ends.append((local, at, size))
            at += size
        return self.begin(peer, ends)

    def begin(self, peer: str, fragments: list[tuple[int, int, int]]) -> Steps:
        """Begin a write that lands in pieces of a head or more; to a worker that is dead there is nothing to land."""
        pieces = []
        for local, remote, size in fragments if peer in self.world.decodes else ():
            step = max(HEAD, size // NUM_PIECES)
            pieces += [(local + at, remote + at, step) for at in range(0, size, step)]
        self.writes.append(Write(peer, pieces, is_doomed=self.world.has_fault(0.1)))
        return self.writes[-1].steps()

    def advance(self) -> None:
        """Let a piece of a write land, or the write end."""
        write = self.world.rng.choice(self.writes)
        if write.pieces and not (write.is_doomed and self.world.rng.random() < 0.5):
            local, address, size = write.pieces.pop()
            data, target = bytes(self.memory[local : local + size]), self.world.decodes[write.peer]
            assert data[-1] == LAST_BYTE, "read before it was computed, or when it was free"
            self.world.check_target(target, address, data)
            target.memory[address : address + len(data)] = data
            return
        self.writes.remove(write)
        write.is_ended = True
        self.sender.advance_writes(lambda: self.world.now_s)


class World:
    """Ranks of a worker that decodes and, one after the other, of workers that prefill; any may be killed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.has_faults = True
        self.now_s = 0.0
        self.wire: list[Callable[[], None]] = []
        self.num_ids = self.num_prefills = self.num_decodes = 0
        self.outcomes: Counter[str] = Counter()
        self.ranks: dict[str, Rank] = {}
        self.start_prefill()
        self.start_decode()

    def start_prefill(self) -> None:
        self.num_prefills += 1
        num_ranks = self.rng.choice((1, 2, 4))
        self.prefill = tuple(f"tcp://prefill-{self.num_prefills}:{1 + rank}" for rank in range(num_ranks))
        for rank, endpoint in enumerate(self.prefill):
            self.ranks[endpoint] = Rank(self, endpoint, Part(rank, num_ranks))

    def start_decode(self) -> None:
        self.num_decodes += 1
        num_ranks = self.rng.choice((1, 2))
        names = [f"decode-{self.num_decodes}-{rank}" for rank in range(num_ranks)]
        self.decodes = {name: Decode(self, name, Part(rank, num_ranks)) for rank, name in enumerate(names)}

    def has_fault(self, share: float) -> bool:
        return self.has_faults and self.rng.random() < share

    def held(self) -> list[tuple[Rank, str]]:
        return [(rank, name) for rank in self.ranks.values() for name in rank.tables]

    # What may happen next; each is one event of the test's.

    def open(self) -> None:
        free_places = set.intersection(*(set(decode.free_places) for decode in self.decodes.values()))
        if not free_places:
            return
        self.num_ids += 1
        name, place = f"{self.num_ids}", min(free_places)
        for endpoint in self.prefill:
            self.ranks[endpoint].offer(name)
        block_ids = tuple(range(place * NUM_PIECES, (place + 1) * NUM_PIECES))
        for decode in self.decodes.values():
            decode.free_places.remove(place)
            decode.places[self.num_ids] = place
            decode.receiver.fetch(Fetch(name, self.prefill, name, NUM_PIECES, (block_ids,)), self.now_s)

    def compute(self) -> None:
        """Fill the next block of a prompt, if one is not whole."""
        behind = [(rank, name) for rank, name in self.held() if rank.computed[name] < NUM_PIECES]
        if behind:
            rank, name = self.rng.choice(behind)
            rank.compute_to(name, rank.computed[name] + 1)

    def deliver(self) -> None:
        """Let a message arrive, not at all, or one more time; not always the first."""
        if not self.wire:
            return
        idx = self.rng.choice((0, self.rng.randrange(len(self.wire))))
        fate = self.rng.random()
        if fate < 0.1:
            self.wire[idx]()
        elif (message := self.wire.pop(idx)) and fate > 0.2:
            message()

    def write(self) -> None:
        writing = [rank for rank in self.ranks.values() if rank.writes]
        if writing:
            self.rng.choice(writing).advance()

    def cancel(self) -> None:
        decode = self.rng.choice(list(self.decodes.values()))
        if decode.places:
            decode.receiver.cancel(f"{self.rng.choice(list(decode.places))}", self.now_s)

    def withdraw(self) -> None:
        if held := self.held():
            rank, name = self.rng.choice(held)
            rank.sender.withdraw(name)

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.1, 1.0, 5.0))
        for decode in self.decodes.values():
            decode.receiver.tick(self.now_s)
        for rank in self.ranks.values():
            rank.sender.tick(self.now_s)

    def kill_a_prefill_rank(self) -> None:
        """Its writes end where they are; that it is dead is known at some later time."""
        del self.ranks[self.rng.choice(self.prefill)]
        self.start_prefill()

    def kill_the_decode(self) -> None:
        """Its memory goes with it: writes that are under way land nowhere."""
        self.start_decode()
        for rank in self.ranks.values():
            for write in rank.writes:
                write.pieces.clear()
            rank.sender.ping()

    def notice_the_dead(self) -> None:
        for decode in self.decodes.values():
            for connection in decode:
                connection.is_dead |= connection.endpoint not in self.ranks
            decode.receiver.tick(self.now_s)

    # What must hold.

    def check_target(self, decode: Decode, address: int, data: bytes) -> None:
        """Raise AssertionError unless these bytes are of the prompt that the memory is for."""
        transfers = decode.receiver._transfers.values()
        if address >= BLOCKS_AT:
            places = {place: idx for idx, place in decode.places.items()}
            idx = places.get((address - BLOCKS_AT) // decode.prompt_bytes)
        else:
            rooms = {each.room: int(each.fetch.request_id) for each in transfers if each.room is not None}
            idx = rooms.get(address // REGION_BYTES * REGION_BYTES)
        assert idx is not None, "written after its memory was released"
        assert idx % 251 == data[0], "overwritten"

    def settle(self) -> None:
        """Let everything arrive and end; nothing is lost any more, and the dead are known to be."""
        for _ in range(40):
            self.notice_the_dead()
            while self.wire or any(rank.writes for rank in self.ranks.values()):
                self.compute()
                if self.wire:
                    self.wire.pop(0)()
                self.write()
            self.pass_time()

    def check_nothing_is_left(self) -> None:
        for decode in self.decodes.values():
            assert not decode.receiver._transfers
            assert (len(decode.free_regions), len(decode.free_places)) == (NUM_REGIONS, NUM_PLACES)
            assert all(seen in (["Completed"], ["Failed", "Released"]) for seen in decode.seen.values())
        for rank in self.ranks.values():
            assert rank.freed == dict.fromkeys(rank.tables, 1)
            assert (len(rank.sender._held), rank.sender.num_writing) == (0, 0)


EVENTS: dict[Callable[[World], None], int] = {
    World.open: 8,
    World.deliver: 30,
    World.write: 30,
    World.compute: 12,
    World.pass_time: 6,
    World.cancel: 1,
    World.withdraw: 1,
    World.notice_the_dead: 2,
    World.kill_a_prefill_rank: 1,
    World.kill_the_decode: 1,
}


@pytest.mark.parametrize("faults", ["all", "no deaths", "slow"])
def test_whatever_is_lost_late_doubled_or_killed_nothing_is_overwritten_and_nothing_leaks(faults: str) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(120):
        world = World(seed)
        weights = dict(EVENTS)
        if faults != "all":
            weights[World.kill_a_prefill_rank] = weights[World.kill_the_decode] = 0
        if faults == "slow":  # writes that outlive timeouts and cancels
            weights[World.write], weights[World.pass_time], weights[World.cancel] = 6, 12, 3
        for event in world.rng.choices(list(weights), list(weights.values()), k=300):
            event(world)
        world.settle()
        world.check_nothing_is_left()
        outcomes += world.outcomes
    assert min(outcomes["Completed"], outcomes["Failed"]) > 50, outcomes


@pytest.mark.parametrize("num_events", range(0, 60, 3))
@pytest.mark.parametrize("end", [World.cancel, World.kill_a_prefill_rank, World.kill_the_decode, World.withdraw])
def test_an_end_at_any_point_leaves_a_worker_that_serves_the_next_request(
    num_events: int, end: Callable[[World], None]
) -> None:
    world = World(num_events)
    world.open()
    for event in world.rng.choices([World.deliver, World.write, World.compute], k=num_events):
        event(world)
    end(world)
    world.settle()
    world.check_nothing_is_left()
    world.has_faults = False
    before = world.outcomes["Completed"]
    for _ in range(8):
        world.open()
        world.settle()
    assert world.outcomes["Completed"] == before + 8 * len(world.decodes)
    world.check_nothing_is_left()
