"""Random lives of an engine, read directly and behind a sidecar: where a rank is live, its answers are exact.

No sockets and no clock: messages, questions and answers are handed over and lost as a seed has it. Sidecar and index
end at any moment, and go on from what they saved, or from a peer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from index_invariants import check_invariants
from lives import seeds

from kvist.events import WorkerRank
from kvist.events.dialects.block_events import REPORT_SESSION
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.transports import Endpoint, Message, ReplayRequest
from kvist.indexer.dumps.dumper import write_dump
from kvist.indexer.dumps.format import DumpReader, NamespaceHead, StreamState
from kvist.indexer.dumps.takeover import Takeover
from kvist.indexer.source import Source
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.publisher.sidecar import SidecarFeed
from kvist.publisher.state import SidecarState, pack, unpack
from kvist.radix import RadixIndex

LIVES = seeds(80)
NUM_STEPS = 80
SIZE, MAX_DEPTH = 4, 4
FULL, STATE = 1 << 62, 0
GROUPS = {0: (FULL, SIZE), 1: (9, SIZE), 2: (FULL, SIZE), 3: (STATE, SIZE), 4: (17, 2 * SIZE)}
DIRECT, BESIDE = "direct", "beside"
CONNECTED = {"num_connects": 1, "num_malformed": 0, "is_caught_up": True, "is_peer_gone": False, "problem": None}
LETTERS = (5, 1000, (1 << 32) - SIZE)
"""The first tokens of the blocks that there are."""


class Process:
    """What one endpoint of an engine's process sent, of which it keeps the last messages, or can be asked nothing."""

    def __init__(self, number: int, num_kept: int | None) -> None:
        self._number, self._num_kept = number, num_kept
        self.payloads: list[bytes] = []

    def say(self, events: Sequence[Any], rank: int | None) -> Message:
        timestamp_s = 1000.0 * self._number + len(self.payloads)
        self.payloads.append(msgspec.msgpack.encode([timestamp_s, events, rank]))
        return Message(b"", len(self.payloads) - 1, self.payloads[-1])

    def replay(self, request: ReplayRequest) -> list[Message] | None:
        if self._num_kept is None or request.epoch is not None or request.topic is not None:
            return None
        first = max(request.start_sequence, len(self.payloads) - self._num_kept)
        return [Message(b"", number, self.payloads[number]) for number in range(first, len(self.payloads))]


class SteppedPublisher(KvEventPublisher):
    """The real one, but for its thread, whose work is done by `step`."""

    def step(self) -> None:
        while self._inbox or self._outbox:
            self._publish_pass()
        self._send_heartbeats()

    def call_between_batches(self, function: Any, *, is_urgent: bool = False) -> Any:
        result = super().call_between_batches(function, is_urgent=is_urgent)
        while not result.done():
            self._publish_pass()
        return result

    def replay(self, request: ReplayRequest) -> list[Message]:
        return [*self._responder.replay(request)]

    def kill(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        self._closing.wait()


class Pipe:
    """A publication that keeps what is sent until it is taken."""

    endpoint = "pipe://"

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def serve_replay(self, source: Any) -> None:
        """Be asked in another way."""

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing is open."""


class OneSidecar:
    """The feeds of a sidecar and its publisher."""

    def __init__(self, endpoints: Sequence[Endpoint], saved: bytes | None, now_s: float, **options: Any) -> None:
        self.pipe = Pipe()
        self.publisher = SteppedPublisher(
            self.pipe,
            worker="w",
            block_size=SIZE,
            num_ranks=0,
            limits=PublisherLimits(replay_max_batches=options.pop("num_kept")),
            **options,
        )
        self.feeds = [SidecarFeed(endpoint, self.publisher) for endpoint in endpoints]
        state = None if saved is None else unpack(saved)
        for feed in self.feeds:
            for stream in () if state is None else state.streams:
                if stream.name == feed.name:
                    ranks = {rank: state.ranks[rank] for rank in stream.ranks if rank in state.ranks}
                    feed.restore(stream, ranks, now_s)
            feed.on_reconnect(now_s)

    def save(self) -> bytes | None:
        """Return what would be on disk now, None if nothing can be saved."""
        streams = tuple(stream for feed in self.feeds if (stream := feed.progress()) is not None)
        if not streams or not all(feed.is_settled for feed in self.feeds):
            return None
        states = self.publisher.call_between_batches(lambda each: {rank: each[rank].state() for rank in each})
        ranks = states.result(20)
        wanted = {rank for stream in streams for rank in stream.ranks}
        return pack(SidecarState(SIZE, "", streams, {rank: ranks[rank] for rank in wanted & ranks.keys()}))


class OneIndex:
    """An index that follows streams, and what stands for its indexer towards dumps."""

    namespace = ("", "")

    def __init__(self, streams: Sequence[tuple[str, str, int]], *, is_connected: bool, now_s: float) -> None:
        self.index = RadixIndex(segment_bits=0)
        self.indexer, self.parked = self, list[Source]()
        self.resyncing: set[WorkerRank] = set()
        self.sources = [Source(name, url, SIZE, self.index, self.resyncing, rank) for name, url, rank in streams]
        for source in self.sources:
            source.subscription = SimpleNamespace(**CONNECTED)
            if is_connected:
                source.on_reconnect(now_s)

    def endpoint_of(self, source: Source) -> str:
        return source.url

    def dump(self) -> bytes:
        parts: list[bytes] = []

        async def write(part: bytes) -> None:
            parts.append(part)

        asyncio.run(write_dump([self], write))
        return b"".join(parts)

    def take_over(self, dump: bytes, now_s: float, *, is_old: bool) -> None:
        """Go on from a dump, of some time ago or of a peer, with whose process one was connected before."""

        def resume(_: object, state: StreamState) -> Source | None:
            (source,) = (each for each in self.sources if each.worker == state.worker and each.public_url == state.url)
            assert state.progress is not None
            source.resume(state.progress, now_s)
            return source

        def find(_: NamespaceHead) -> OneIndex:
            return self

        takeover = Takeover(SimpleNamespace(find=find, resume=resume), "dump", is_old=is_old)
        for frame in DumpReader("dump").feed(dump):
            takeover.load_frame(frame)
        for source in self.sources:
            if not is_old:
                source.record_connects()
            if not source.num_known_connects:
                source.on_reconnect(now_s)


class Life:
    """Drives an engine, its followers and the oracle side by side, as a seed has it."""

    def __init__(self, seed: int, make_truth: Callable[[], Any], wires: Sequence[Any], make_scope: Any) -> None:
        self.random = rng = random.Random(seed)
        self.make_truth, self.make_scope = make_truth, make_scope
        self.wire = rng.choice(wires)
        self.is_vllm = self.wire.engine == "vllm"
        self.is_hybrid = self.is_vllm and rng.random() < 0.6
        self.groups = [0, *rng.sample([1, 2, 3, 4], rng.randint(1, 3))] if self.is_hybrid else [None]
        self.has_lookahead = (self.wire.is_map or not self.is_vllm) and rng.random() < 0.25
        self.num_ahead = int(self.is_vllm and not self.has_lookahead and rng.random() < 0.3)
        self.has_tiers = rng.random() < 0.6
        self.has_all_groups = rng.random() < 0.7
        self.is_lossy = rng.random() < 0.4
        self.num_kept = rng.choice([1000, 4, None]) if self.is_lossy else 1000
        self.num_kept_beside = rng.choice([1000, 3])
        self.ranks = rng.choice([(0,), (0,), (0, 3)])
        self.has_endpoint_a_rank = rng.random() < 0.5
        self.endpoint_ranks = self.ranks if self.has_endpoint_a_rank else self.ranks[:1]
        query = {"engine": self.wire.engine} | ({"eagle": "drop"} if self.num_ahead else {})
        query |= {"replay_port": "none"} if self.num_kept is None else {}
        options = "&".join(f"{name}={value}" for name, value in query.items())
        self.urls = {rank: f"tcp://h:{rank + 1}?{options}" for rank in self.endpoint_ranks}
        self.now_s = 0.0
        self.num_processes = 0
        self.prompts: dict[Any, set[Any]] = {}
        self.to_lose: Counter[str] = Counter()
        self.told: list[str] = []
        self.tally: Counter[str] = Counter()
        self.saved_sidecar: bytes | None = None
        self.saved_index: bytes | None = None
        self.index: OneIndex
        self.sidecar: OneSidecar
        self._start_engine()
        self.new_sidecar(None)
        self.new_index(is_connected=True)

    def live(self) -> None:
        acts: dict[Callable[[], None], float] = {
            self.store: 14,
            self.store_again: 6,
            self.store_below_what_nobody_knows: 0.5,
            self.offload_by_hash_alone: 4 * self.has_tiers,
            self.report: 5 * (self.is_vllm and self.wire.is_map),
            self.remove: 14,
            self.clear: 2.5,
            self.lose: 2 * self.is_lossy,
            self.say_nothing_new: 1,
            self.save_sidecar: 3,
            self.restart_sidecar: 3,
            self.save_index: 3,
            self.restart_index: 2,
            self.take_over_index: 2,
            self.restart_engine: 0.5,
            self.reconnect: 0.5,
            self.settle: 3,
            self.agree: 4,
        }
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
            self.told.append(act.__name__)
            act()
            self.look()
        self.agree()

    # --- Who is there -----------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        self.num_processes += 1
        self.lossy: set[tuple[str, int]] = set()
        self.processes = {rank: Process(self.num_processes, self.num_kept) for rank in self.endpoint_ranks}
        self.truths = {rank: self.make_truth() for rank in self.ranks}
        for truth in self.truths.values():
            truth.is_vllm, truth.num_ahead, truth.tells_groups = self.is_vllm, self.num_ahead, True

    def restart_engine(self) -> None:
        self._start_engine()
        for _ in range(self.random.choice([0, 0, 3, 30])):
            self.store()  # which nobody hears: they are not connected yet
        self.reconnect()

    def reconnect(self) -> None:
        self.now_s += 1.0
        for feed in self.sidecar.feeds:
            feed.on_reconnect(self.now_s)
        for source in self.index.sources:
            if source.worker == DIRECT:
                source.on_reconnect(self.now_s)

    def new_sidecar(self, saved: bytes | None) -> None:
        options: dict[str, Any] = {"counts_copies": self.is_vllm, "has_all_groups": self.has_all_groups}
        options |= {"num_ahead": self.num_ahead, "num_kept": self.num_kept_beside}
        endpoints = [Endpoint.parse(url) for url in self.urls.values()]
        self.sidecar = OneSidecar(endpoints, saved, self.now_s, **options)

    def save_sidecar(self) -> None:
        self.saved_sidecar = self.sidecar.save() or self.saved_sidecar

    def restart_sidecar(self) -> None:
        """End at once, and start from what was saved last, or from nothing."""
        self.sidecar.publisher.kill()
        self.now_s += 1.0
        is_kept = self.random.random() < 0.8
        if not is_kept and self.random.random() < 0.3:
            self.has_all_groups, self.saved_sidecar = not self.has_all_groups, None
        self.new_sidecar(self.saved_sidecar if is_kept else None)
        self.index.sources[-1].on_reconnect(self.now_s)

    def new_index(self, *, is_connected: bool) -> None:
        self.now_s += 1.0
        streams = [(DIRECT, url, rank) for rank, url in self.urls.items()] + [(BESIDE, "tcp://h:9", 0)]
        self.index = OneIndex(streams, is_connected=is_connected, now_s=self.now_s)
        self.unread: dict[int, list[Message]] = {}

    def save_index(self) -> None:
        self.saved_index = self.index.dump()

    def restart_index(self) -> None:
        """End at once, and start from what was saved some time ago, or from nothing."""
        saved = self.saved_index if self.random.random() < 0.8 else None
        self.new_index(is_connected=saved is None)
        if saved is not None:
            self.index.take_over(saved, self.now_s, is_old=True)

    def take_over_index(self) -> None:
        """Have another index, which began to listen some events ago, go on from what this one says now."""
        former = self.index
        self.new_index(is_connected=False)
        successor = self.index
        self.index, self.unread = former, {number: [] for number in range(len(former.sources))}
        for _ in range(self.random.randrange(4)):
            self.random.choice([self.store, self.remove])()
        unread, self.unread = self.unread, {}
        self.index = successor
        successor.take_over(former.dump(), self.now_s, is_old=False)
        for number, messages in unread.items():
            self.deliver(number, messages)

    # --- What is told -----------------------------------------------------------------------------------------------

    def say(self, rank: int, *events: Any) -> None:
        """Have the engine send a message, which is lost for some."""
        endpoint = rank if self.has_endpoint_a_rank else self.ranks[0]
        must_say = not self.has_endpoint_a_rank or rank != 0
        says_rank = must_say or self.random.random() < 0.5
        message = self.processes[endpoint].say(events, rank if says_rank else None)
        number = self.endpoint_ranks.index(endpoint)
        for path in (DIRECT, BESIDE):
            if self.to_lose[path]:
                self.to_lose[path] -= 1
            elif path == DIRECT:
                self.deliver(number, [message])
            else:
                self.drain(self.sidecar.feeds[number].receive_all([message], self.now_s))

    def deliver(self, number: int, messages: Sequence[Message]) -> None:
        if number in self.unread:
            self.unread[number] += messages
        if messages:
            self.drain(self.index.sources[number].receive_all(messages, self.now_s))

    def publish(self) -> None:
        """Hand over what the sidecar has published, but for what is lost."""
        self.sidecar.publisher.step()
        sent = self.sidecar.pipe.sent
        self.sidecar.pipe.sent = []
        for message in sent:
            if self.to_lose["published"] and b"heartbeat" not in message.payload:
                self.to_lose["published"] -= 1
            else:
                self.deliver(len(self.index.sources) - 1, [message])

    def tell_stored(
        self, rank: int, hashes: Sequence[int], tokens: Sequence[int], parent: int | None, tier: int, **options: Any
    ) -> None:
        options |= {"block_size": GROUPS[options["group"] or 0][1]}
        self.truths[rank].stored(hashes, tokens, parent, tier, **options)
        self.say(rank, self.wire.stored(hashes, tokens, parent, tier, **options))

    def tell_block(self, rank: int, above: int | None, block: Any, start: int, tier: int, alias: int = 0) -> None:
        """Tell that a chain was stored that ends with a block, in one of the groups."""
        group = self.random.choice([self.groups[0], *self.groups])
        self.prompts.setdefault(block[-1][0], set()).add(block)
        window, size = GROUPS[group or 0]
        stride = size // SIZE
        places = [place for place in range(start, len(block)) if (place + 1) % stride == 0]
        if group not in (None, 0, 2) and places:  # these skip blocks
            places = sorted(self.random.sample(places, self.random.randint(1, len(places))))
        hashes = [self.name_of(rank, block[: place + 1], alias) for place in places]
        links = [tokens for _, tokens in block[start:]]
        options: dict[str, Any] = {"scope": block[-1][0], "group": group, "window": window}
        if self.has_lookahead:
            options["lookahead"] = [block[place][1][SIZE] for place in places]
        if hashes and not (group and tier):
            self.tell_stored(rank, hashes, [token for each in links for token in each[:SIZE]], above, tier, **options)

    def store(self) -> None:
        rank = self.random.choice(self.ranks)
        truth = self.truths[rank]
        names = sorted({name for held in truth.tiers for name, block in held.items() if len(block) < MAX_DEPTH})
        above = self.random.choice(names) if names and self.random.randrange(3) else None
        block = () if above is None else self.truths[rank].find(above)
        scopes = [(), (), (), (), (), ("adapter",), (None, "salt")]
        scope = self.make_scope(*self.random.choice(scopes)) if above is None else block[-1][0]
        start = len(block)
        tier = self.random.choice([0, 0, 0, 1, 2, 3]) if self.has_tiers else 0
        alias = 0 if self.is_hybrid else self.random.choice([0, 0, 0, 1])
        num_blocks = self.random.randint(1, MAX_DEPTH - start)
        self.tell_block(rank, above, self.grown(block, scope, num_blocks), start, tier, alias)

    def grown(self, block: Any, scope: Any, num_blocks: int) -> Any:
        firsts = self.random.choices([0, 0, 0, 1, 2], k=num_blocks + 1)
        if block and self.has_lookahead:
            firsts[0] = LETTERS.index(block[-1][1][-1])
        for letter, following in pairwise(firsts):
            tokens = tuple(range(LETTERS[letter], LETTERS[letter] + SIZE))
            block = (*block, (scope, tokens + ((LETTERS[following],) if self.has_lookahead else ())))
        return block

    def store_again(self) -> None:
        """Store what is held once more: a copy, under another name, in another tier or group."""
        rank = self.random.choice(self.ranks)
        truth = self.truths[rank]
        held = sorted({block for held in truth.tiers for block in held.values()}, key=repr)
        if not held:
            return
        block = self.random.choice(held)
        start = self.random.randrange(len(block))
        above = next((n for held in truth.tiers for n, b in held.items() if start and b == block[:start]), None)
        tier = self.random.choice([0, 0, 1]) if self.has_tiers else 0
        alias = 0 if self.is_hybrid else self.random.choice([0, 0, 1])
        self.tell_block(rank, above, block, start if above is not None else 0, tier, alias)

    def store_below_what_nobody_knows(self) -> None:
        rank = self.random.choice(self.ranks)
        block = self.grown((), self.make_scope(), 2)
        self.tell_block(rank, self.name_of(rank, ("nobody",)), block, 1, 0)

    def offload_by_hash_alone(self) -> None:
        """Only blocks below a held one, as engines do."""
        rank = self.random.choice(self.ranks)
        truth = self.truths[rank]
        blocks = {block for held in truth.tiers for block in held.values()}
        names = sorted({n for held in truth.tiers for n, b in held.items() if len(b) == 1 or b[:-1] in blocks})
        if names:
            options = {"scope": self.make_scope(), "group": truth._group, "window": truth._window}
            self.tell_stored(rank, [self.random.choice(names)], [], None, self.random.randint(1, 3), **options)

    def report(self) -> None:
        """Report the blocks of a hit anew, which nobody may take for copies: those that each group needs."""
        rank = self.random.choice(self.ranks)
        truth = self.truths[rank]
        block = self.random.choice(sorted(truth.tiers[0].values(), key=repr) or [()])
        blocks = [block[: end + 1] for end in range(len(block))]
        num_hit = truth.depths(blocks)[0] if block else 0
        names = {held: name for name, held in truth.tiers[0].items()}
        if not num_hit or any(each not in names for each in blocks[:num_hit]):
            return
        for group in self.groups:
            window, size = GROUPS[group or 0]
            if group not in truth.others and group != truth._group:
                continue
            places = [*range(size // SIZE - 1, num_hit, size // SIZE)]
            num_needed = {FULL: num_hit, STATE: 1}.get(window, -(-(window - 1) // size))
            places = places[max(0, len(places) - num_needed) :]
            named = [names[blocks[place]] for place in places]
            options: dict[str, Any] = {"scope": block[0][0], "group": group, "window": window, "block_size": size}
            if self.has_lookahead:
                options["lookahead"] = [block[place][1][SIZE] for place in places]
            tokens = [token for _, each in block[:num_hit] for token in each[:SIZE]]
            if named:
                self.tally["reported"] += 1
                self.say(rank, self.wire.stored(named, tokens, None, 0, **options, session_id=REPORT_SESSION))

    def remove(self) -> None:
        rank = self.random.choice(self.ranks)
        truth, group = self.truths[rank], self.random.choice([self.groups[0], *self.groups])
        tier = self.random.choice([0, 0, 0, 1, 2, 3]) if self.has_tiers and not group else 0
        held = truth.others[group][2] if group in truth.others else truth.tiers[tier]
        known = sorted(held) or [self.name_of(rank, ("nobody",))]
        hashes = self.random.choices(known, k=self.random.randint(1, 4))
        events = [hashes] if self.random.random() < 0.5 else [[each] for each in hashes]
        for each in events:
            truth.removed(each, tier, group=group)
        self.say(rank, *[self.wire.removed(each, tier, group=group) for each in events])

    def clear(self) -> None:
        rank = self.random.choice(self.ranks)
        self.truths[rank].cleared()
        self.say(rank, self.wire.cleared())

    def say_nothing_new(self) -> None:
        for rank in self.ranks:
            self.say(rank, self.wire.removed([self.name_of(rank, ("nobody",))], 0, group=self.groups[0]))

    def lose(self) -> None:
        self.to_lose[self.random.choice([DIRECT, BESIDE, "published"])] = self.random.randint(1, 4)

    # --- What is asked ----------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Answer questions until nothing is in doubt, for which the engine may have to speak; return whether it is."""
        self.to_lose.clear()
        for num_rounds in range(40):
            self.now_s += 1.0
            for process, feed in zip(self.processes.values(), self.sidecar.feeds, strict=True):
                for question in feed.questions(self.now_s):
                    self.drain(feed.on_answer(question, process.replay(question.request), self.now_s))
            self.publish()
            peers = *self.processes.values(), self.sidecar.publisher
            for source, peer in zip(self.index.sources, peers, strict=True):
                for question in source.questions(self.now_s):
                    answer = peer.replay(question.request)
                    self.drain(source.on_answer(question, answer, self.now_s))
            states = [state for source in self.index.sources for state in source.states().values()]
            is_settled = all(feed.is_settled for feed in self.sidecar.feeds)
            if num_rounds > 2 and is_settled and SourceState.RESYNCING not in states:
                return True
        return False

    def agree(self) -> None:
        """Let everybody hear that nothing was lost last, and compare all answers."""
        self.settle()
        self.say_nothing_new()
        assert self.settle() or self.settle()
        self.note_losses()
        check_invariants(self.index.index)
        for name in (DIRECT, BESIDE):
            states = self.states(name)
            assert states.keys() <= {*self.ranks}
            for rank in self.ranks:
                self.check(name, rank, states.get(rank))
        statistics = self.index.sources[-1].statistics(self.now_s)
        assert (statistics.num_diverged, statistics.num_malformed, statistics.num_refused_events) == (0, 0, 0)

    def states(self, name: str) -> dict[int, SourceState]:
        return {
            rank: state for each in self.index.sources if each.worker == name for rank, state in each.states().items()
        }

    def check(self, name: str, rank: int, state: SourceState | None) -> None:
        truth = self.truths[rank]
        endpoint = self.endpoint_ranks.index(rank if self.has_endpoint_a_rank else self.ranks[0])
        # Who has lost something does not know of blocks beside the GPU, nor of groups, that it has not heard of since.
        is_sure = (name, endpoint) not in self.lossy or (self.knows_groups(name, rank) and not self.has_tiers)
        is_exact = is_sure and state is SourceState.LIVE
        assert not (is_exact and truth.has_forgotten), (rank, self.told)
        may_lack = self.is_vllm and self.has_tiers and "clear" in self.told
        if name == BESIDE and (name, endpoint) not in self.lossy and not may_lack:
            assert state is not SourceState.PARTIAL, (rank, self.told)
        self.tally[f"{name} {state} {'exact' if is_exact else 'at most'}"] += 1
        for block in sorted((each for some in self.prompts.values() for each in some), key=repr):
            blocks = [block[: end + 1] for end in range(len(block))]
            is_largest = name == BESIDE and not self.has_all_groups
            expected = truth.leading(blocks) if is_largest else truth.depths(blocks)
            found = [*self.match(name, rank, block)]
            if is_exact:
                assert found == expected, (name, rank, state, block, self.told)
            elif state is not None and self.knows_groups(name, rank):
                assert found[0] <= expected[0], (name, rank, block, found, expected, self.told)

    def match(self, name: str, rank: int, block: Any) -> Iterator[int]:
        tokens = [token for _, each in block for token in each[:SIZE]] + [*block[-1][1][SIZE:]]
        scope = block[-1][0]
        hashes = block_hashes(
            tokens, SIZE, lora_name=scope.lora_name, cache_salt=scope.cache_salt, is_eagle=self.has_lookahead
        )
        found = self.index.index.match(hashes)
        assert all(each.rank in self.ranks for each in found if each not in self.index.resyncing)
        source = WorkerRank(name, rank)
        yield from found.get(source, (0, 0, 0, 0))

    def sessions(self, name: str) -> list[Any]:
        """Return who judges each endpoint of the engine for a follower, None where nobody does."""
        if name == BESIDE:
            return [feed.feed.session for feed in self.sidecar.feeds]
        return [source.engine and source.engine.sessions[0] for source in self.index.sources[:-1]]

    def look(self) -> None:
        """Look at the index between two acts, when much is not known: at least nobody is there who must not be."""
        for prompts in self.prompts.values():
            [*self.match(DIRECT, 0, self.random.choice(sorted(prompts, key=repr)))]
        self.note_losses()

    def note_losses(self) -> None:
        for name in (DIRECT, BESIDE):
            for number, session in enumerate(self.sessions(name)):
                if session is not None and (session.num_lost or not session.is_complete):
                    self.lossy.add((name, number))

    def knows_groups(self, name: str, rank: int) -> bool:
        """Return whether a follower that lost something has heard of each group since."""
        if not self.is_hybrid:
            return True
        truth = self.truths[rank]
        if name == DIRECT:
            endpoint = self.endpoint_ranks.index(rank if self.has_endpoint_a_rank else self.ranks[0])
            engine = self.index.sources[endpoint].engine
            stream: Any = None if engine is None else engine._ranks.get(rank)
        else:
            stream = self.sidecar.publisher._streams.get(rank)
        if stream is None:
            return True
        if name == BESIDE and not self.has_all_groups:
            return stream._filter.state.group == truth._group
        splitter = stream.splitter if name == DIRECT else stream._splitter
        return len(splitter.other_rules) == len(truth.others)

    @staticmethod
    def name_of(rank: int, block: Any, alias: int = 0) -> int:
        """Return the engine's hash of a block: always the same on a rank, of the upper half of u64 or the lower."""
        return int.from_bytes(hashlib.sha256(repr((rank, alias, block)).encode()).digest()[:8])

    @staticmethod
    def drain(steps: Iterator[None]) -> None:
        for _ in steps:
            pass


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every loss is logged, as it should be; thousands of lines slow the lives down."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", LIVES[::10])
def test_a_followed_engine_is_answered_for_as_the_oracle_says(
    first: int, make_rank_truth: Callable[[], Any], wires: Sequence[Any], make_scope: Any
) -> None:
    for seed in range(first, min(first + 10, LIVES.stop)):
        life = Life(seed, lambda: make_rank_truth(SIZE), wires, make_scope)
        try:
            life.live()
        except BaseException as error:
            error.add_note(f"life {seed}")
            raise
        finally:
            life.sidecar.publisher.kill()
