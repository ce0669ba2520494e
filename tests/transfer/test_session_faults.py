"""Both ends of many transfers, on a wire that drops, doubles, delays and reorders; real bytes are written late."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvist.transfer.commands import Computed, TransferLimits
from kvist.transfer.heads import WHOLE
from kvist.transfer.messages import (
    Cancel,
    Extent,
    Hello,
    Progress,
    ReceiveRequest,
    Refusal,
    Result,
    ResultStatus,
    decode_message,
    encode_message,
)
from kvist.transfer.receiver_protocol import (
    Complete,
    Fail,
    ReceiverAction,
    ReceiverProtocol,
    Release,
    SendCancel,
    StartScatter,
)
from kvist.transfer.sender_protocol import Answer, Free, SenderAction, SenderProtocol, StartWrite

LIMITS = TransferLimits(transfer_timeout_s=20.0, hold_timeout_s=40.0, cancel_retry_s=3.0, max_remembered=64)
MAX_NUM_RANKS = 4
PIECE = 4
NUM_PIECES = 2
PART = PIECE * NUM_PIECES  # what one rank writes of one transfer
BLOCK = PART * MAX_NUM_RANKS
NUM_REGIONS, NUM_BLOCKS = 3, 4
BLOCKS_AT = 0x1000  # regions lie at 0


@dataclass
class Write:
    """A write that is under way: what is still to land, piece by piece, and what it will report."""

    rank: int
    prefill: str
    receiver: str
    request: ReceiveRequest
    pieces: list[tuple[int, bytes]]
    num_written: int
    is_bounced: bool
    is_doomed: bool


@dataclass
class Task:
    """One transfer as its engine sees it."""

    transfer_id: int
    senders: tuple[str, ...]
    rooms: tuple[Extent | None, ...]
    block_idx: int
    region_idx: int | None
    seen: list[str] = field(default_factory=list)


def content(transfer_id: int, rank: int, piece: int) -> bytes:
    return bytes([transfer_id % 251, rank, piece, 0xA5])


class World:
    """One worker that decodes and, one after the other, workers of one to four ranks that prefill; any may be killed.

    The wire carries a sender's own name, `prefill-1/0` for rank 0.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.wire: list[Callable[[], None]] = []
        self.num_ids = self.num_prefills = self.num_decodes = 0
        self.freed: Counter[tuple[str, int, str]] = Counter()
        self.held: list[tuple[str, int, str]] = []
        self.computed: dict[tuple[str, int, str], int] = {}
        self.outcomes: Counter[str] = Counter()
        self.senders: dict[tuple[str, int], SenderProtocol] = {}
        self.writes: list[Write] = []
        self.start_prefill()
        self.start_decode()

    def start_prefill(self) -> None:
        self.num_prefills += 1
        self.prefill = f"prefill-{self.num_prefills}"
        self.ranks = range(self.rng.randint(1, MAX_NUM_RANKS))
        self.senders |= {(self.prefill, rank): SenderProtocol(LIMITS) for rank in self.ranks}

    def start_decode(self) -> None:
        self.num_decodes += 1
        self.decode = f"decode-{self.num_decodes}"
        self.receiver = ReceiverProtocol(LIMITS)
        self.memory = bytearray(BLOCKS_AT + NUM_BLOCKS * BLOCK)
        self.tasks: dict[int, Task] = {}
        self.free_regions, self.free_blocks = list(range(NUM_REGIONS)), list(range(NUM_BLOCKS))
        self.scatters: list[StartScatter] = []

    # What may happen next; each is one event of the test's.

    def open(self) -> None:
        if not self.free_blocks:
            return
        self.num_ids += 1
        is_bounced = self.rng.random() < 0.6 and self.free_regions
        block_idx, region_idx = self.free_blocks.pop(), self.free_regions.pop() if is_bounced else None
        # Sometimes one rank of several has none: it writes as it is.
        parts = [None if region_idx is None else Extent(region_idx * BLOCK + rank * PART, PART) for rank in self.ranks]
        if len(parts) > 1 and self.rng.random() < 0.2:
            parts[self.rng.choice(self.ranks)] = None
        names = tuple(f"{self.prefill}/{rank}" for rank in self.ranks)
        task = self.tasks[self.num_ids] = Task(self.num_ids, names, tuple(parts), block_idx, region_idx)
        for rank in self.ranks:
            self.senders[self.prefill, rank].hold(f"r{self.num_ids}", self.now_s)
            self.held.append((self.prefill, rank, f"r{self.num_ids}"))
            self.compute_to(self.held[-1], self.rng.randint(0, NUM_PIECES))
        self.receiver.open(self.num_ids, names, [rank for rank in self.ranks if parts[rank]], self.now_s)
        for rank in self.ranks:
            self.to_sender(task, rank, self.request_of(task, rank))

    def compute(self) -> None:
        """Fill the next blocks of a prompt, if one is not whole."""
        behind = [each for each in self.held if self.computed[each] < NUM_PIECES]
        if behind:
            held = self.rng.choice(behind)
            self.compute_to(held, self.computed[held] + 1)

    def compute_to(self, held: tuple[str, int, str], num_pieces: int) -> None:
        self.computed[held] = num_pieces
        name, rank, request_id = held
        if (name, rank) in self.senders:
            told = Computed(request_id, (), num_pieces == NUM_PIECES)
            actions = self.senders[name, rank].computed(told, num_pieces, self.now_s)
            self.obey_sender(name, rank, actions)

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
        """Let a piece of a write land, or the write end."""
        if self.writes:
            self.advance(self.rng.choice(self.writes))

    def scatter(self) -> None:
        if not self.scatters:
            return
        scatter = self.scatters.pop(self.rng.randrange(len(self.scatters)))
        is_ok = self.rng.random() < 0.9
        task = self.tasks[scatter.transfer_id]
        for rank in scatter.ranks if is_ok else ():
            place, room = BLOCKS_AT + task.block_idx * BLOCK + rank * PART, task.rooms[rank]
            assert room is not None
            self.memory[place : place + PART] = self.memory[room.base : room.base + PART]
        self.obey(self.receiver.scattered(scatter.transfer_id, None if is_ok else "bad copy", self.now_s))

    def cancel(self) -> None:
        if self.tasks:
            self.obey(self.receiver.fail(self.rng.choice(list(self.tasks)), "client left", self.now_s))

    def withdraw(self) -> None:
        if self.held:
            name, rank, request_id = self.rng.choice(self.held)
            if (name, rank) in self.senders:
                self.obey_sender(name, rank, self.senders[name, rank].give_up(request_id))

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.1, 1.0, 5.0))
        self.obey(self.receiver.tick(self.now_s))
        for (name, rank), sender in list(self.senders.items()):
            self.obey_sender(name, rank, sender.tick(self.now_s))

    def kill_a_prefill_rank(self) -> None:
        """Its writes end where they are; that it is dead is known at some later time."""
        victim = (self.prefill, self.rng.choice(self.ranks))
        del self.senders[victim]
        self.writes = [write for write in self.writes if (write.prefill, write.rank) != victim]
        self.start_prefill()

    def kill_the_decode(self) -> None:
        """Its memory goes with it: writes that are under way land nowhere."""
        gone = self.decode
        self.start_decode()
        for write in self.writes:
            if write.receiver == gone:
                write.pieces.clear()
        for (name, rank), sender in list(self.senders.items()):
            self.obey_sender(name, rank, sender.receiver_gone(gone))

    def notice_the_dead(self) -> None:
        for name in {name for task in self.tasks.values() for name in task.senders}:
            prefill, _, rank = name.partition("/")
            if (prefill, int(rank)) not in self.senders:
                self.obey(self.receiver.sender_gone(name, list(self.tasks), self.now_s))

    # What the two ends ask for.

    def obey(self, actions: list[ReceiverAction]) -> None:
        for action in actions:
            task = self.tasks[action.transfer_id]
            match action:
                case SendCancel(transfer_id=transfer_id, rank=rank):
                    self.to_sender(task, rank, Cancel(transfer_id, f"r{transfer_id}"))
                case StartScatter():
                    self.scatters.append(action)
                case Complete() | Fail():
                    task.seen.append("complete" if isinstance(action, Complete) else "fail")
                    self.outcomes[task.seen[-1]] += 1
                    if isinstance(action, Complete):
                        self.check_bytes(task)
                        self.free_blocks.append(task.block_idx)  # its engine has read it
                case Release():
                    assert "release" not in task.seen, "released twice"
                    assert action.transfer_id not in [scatter.transfer_id for scatter in self.scatters], "still read"
                    task.seen.append("release")
                    if task.region_idx is not None:
                        self.free_regions.append(task.region_idx)
                    if "fail" in task.seen:
                        self.free_blocks.append(task.block_idx)
            assert sorted(task.seen) in ([], ["fail"], ["release"], ["complete", "release"], ["fail", "release"])

    def obey_sender(self, name: str, rank: int, actions: list[SenderAction]) -> None:
        for action in actions:
            match action:
                case StartWrite(receiver=receiver, request=request, num_written=num_written):
                    self.writes.append(self.write_of(name, rank, receiver, request, num_written))
                case Answer(receiver, Result() as result):
                    self.report(name, rank, receiver, result)
                case Answer(receiver, Progress() as progress):
                    self.to_receiver(name, rank, receiver, progress)
                case Answer(receiver, Refusal() as refusal):
                    self.refuse(name, rank, receiver, refusal)
                case Free(request_id=request_id):
                    self.freed[name, rank, request_id] += 1
                    reads = [write.request.request_id for write in self.writes_of(name, rank)]
                    assert request_id not in reads, "freed what a write still reads"

    def writes_of(self, name: str, rank: int) -> list[Write]:
        return [write for write in self.writes if (write.prefill, write.rank) == (name, rank)]

    def request_of(self, task: Task, rank: int) -> ReceiveRequest:
        hello = Hello(self.decode, "tiny", 4, 7, (), 1, 0, "any", b"", ())
        name = f"r{task.transfer_id}"
        return ReceiveRequest(3, task.transfer_id, hello, WHOLE, name, 4, ((task.block_idx,),), task.rooms[rank])

    def write_of(self, name: str, rank: int, receiver: str, request: ReceiveRequest, num_written: int) -> Write:
        """Bounce if there is a region for all of it, and sometimes not even then: a sender may lack its own slot."""
        num_computed = self.computed[name, rank, request.request_id]
        block = BLOCKS_AT + request.block_ids_per_group[0][0] * BLOCK
        places = tuple(block + rank * PART + piece * PIECE for piece in range(NUM_PIECES))
        parts = [content(request.transfer_id, rank, piece) for piece in range(NUM_PIECES)]
        is_whole = (num_written, num_computed) == (0, NUM_PIECES)
        addresses, is_bounced = places, request.room is not None and is_whole and self.rng.random() < 0.8
        if request.room is not None and is_bounced:
            addresses = tuple(request.room.base + piece * PIECE for piece in range(NUM_PIECES))
        pieces = list(zip(addresses, parts, strict=True))[num_written:num_computed] if receiver == self.decode else []
        is_doomed = self.rng.random() < 0.1
        return Write(rank, name, receiver, request, pieces, num_computed, is_bounced, is_doomed)

    def advance(self, write: Write) -> None:
        if write.pieces and not (write.is_doomed and self.rng.random() < 0.5):
            address, piece = write.pieces.pop()
            assert "release" not in self.tasks[write.request.transfer_id].seen, "written after its memory was released"
            self.memory[address : address + PIECE] = piece
            return
        sender = self.senders[write.prefill, write.rank]
        done = ResultStatus.BOUNCED if write.is_bounced else ResultStatus.SUCCESS
        status = ResultStatus.FAILED if write.is_doomed or write.pieces else done
        actions = sender.written(write.receiver, write.request.transfer_id, status, write.num_written)
        self.writes.remove(write)
        self.obey_sender(write.prefill, write.rank, actions)

    # The wire: everything goes over it as bytes.

    def to_sender(self, task: Task, rank: int, message: ReceiveRequest | Cancel) -> None:
        name, decode, payload = task.senders[rank].partition("/")[0], self.decode, encode_message(message)

        def arrive() -> None:
            sender = self.senders.get((name, rank))
            received = decode_message(payload, decode)
            if sender is not None and isinstance(received, ReceiveRequest):
                self.obey_sender(name, rank, sender.requested(decode, received, self.now_s))
            elif sender is not None and isinstance(received, Cancel):
                self.obey_sender(name, rank, sender.cancelled(decode, received))

        self.wire.append(arrive)

    def report(self, name: str, rank: int, decode: str, result: Result) -> None:
        task = self.tasks.get(result.transfer_id)
        if task is not None and task.rooms[rank] is None and self.rng.random() < 0.03:
            result = Result(result.transfer_id, ResultStatus.BOUNCED)  # though it has no room: the sender is broken
        self.to_receiver(name, rank, decode, result)

    def to_receiver(self, name: str, rank: int, decode: str, message: Result | Progress) -> None:
        payload = encode_message(message)

        def arrive() -> None:
            if decode != self.decode:
                return
            match decode_message(payload, name):
                case Progress(transfer_id=transfer_id):
                    self.receiver.progressed(f"{name}/{rank}", transfer_id, self.now_s)
                case Result() as told:
                    self.obey(self.receiver.reported(f"{name}/{rank}", told, self.now_s))

        self.wire.append(arrive)

    def refuse(self, name: str, rank: int, decode: str, refusal: Refusal) -> None:
        payload = encode_message(refusal)

        def arrive() -> None:
            received = decode_message(payload, name)
            assert isinstance(received, Refusal)
            if decode == self.decode and received.transfer_id is not None:
                reason = str(received)
                self.obey(self.receiver.refused(f"{name}/{rank}", received.transfer_id, reason, self.now_s))

        self.wire.append(arrive)

    # What must hold.

    def check_bytes(self, task: Task) -> None:
        base = BLOCKS_AT + task.block_idx * BLOCK
        for rank, piece in itertools.product(range(len(task.senders)), range(NUM_PIECES)):
            place = base + rank * PART + piece * PIECE
            expected = content(task.transfer_id, rank, piece)
            assert self.memory[place : place + PIECE] == expected, "complete before every byte was in its place"

    def settle(self) -> None:
        """Let everything arrive and end; nothing is lost any more, and the dead are known to be."""
        for _ in range(40):
            self.notice_the_dead()
            while self.wire or self.writes or self.scatters:
                self.compute()
                if self.wire:
                    self.wire.pop(0)()
                self.write()
                self.scatter()
            self.pass_time()

    def check_nothing_is_left(self) -> None:
        assert self.receiver.num_active == 0
        assert (len(self.free_regions), len(self.free_blocks)) == (NUM_REGIONS, NUM_BLOCKS)
        for task in self.tasks.values():
            assert sorted(task.seen) in (["complete", "release"], ["fail", "release"])
        for name, rank, request_id in self.held:
            is_alive = (name, rank) in self.senders
            assert self.freed[name, rank, request_id] == 1 or not is_alive
        assert max(self.freed.values(), default=1) == 1
        for sender in self.senders.values():
            assert (sender.num_held, sender.num_writing) == (0, 0)


EVENTS: dict[Callable[[World], None], int] = {
    World.open: 8,
    World.deliver: 30,
    World.write: 30,
    World.scatter: 6,
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
    assert min(outcomes["complete"], outcomes["fail"]) > 50, outcomes


@pytest.mark.parametrize("num_events", range(0, 60, 3))
@pytest.mark.parametrize("end", [World.cancel, World.kill_a_prefill_rank, World.kill_the_decode, World.withdraw])
def test_an_end_at_any_point_leaves_a_worker_that_serves_the_next_request(
    num_events: int, end: Callable[[World], None]
) -> None:
    world = World(num_events)
    world.open()
    for event in world.rng.choices([World.deliver, World.write, World.scatter, World.compute], k=num_events):
        event(world)
    end(world)
    world.settle()
    world.check_nothing_is_left()
    world.rng = random.Random(1)  # in which no write and no copy fails
    before = world.outcomes["complete"]
    for _ in range(8):
        world.open()
        world.settle()
    assert world.outcomes["complete"] > before
    world.check_nothing_is_left()
