"""Random lives of workers that compute prompts for each other, as seeds have them: over a wire that loses, doubles and
reorders, with writes that are slow or fail and workers that die, each answer is that of one engine alone."""

from __future__ import annotations

import ctypes
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import add
from typing import Any

import msgspec
import pytest
import torch
import zmq
from late_device import LateDevice, late_devices
from lives import seeds
from lone_answers import Ask, Asker, LoneEngine
from memory_invariants import check_engine

from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore
from kvist.engine.loading import load_engine
from kvist.engine.request import RequestOutput, RequestTimes
from kvist.engine.runner import Runner
from kvist.openai.requests import Handoff, RemoteDecode, RemotePrefill, SamplingParams
from kvist.transfer.agents import Write, WriteFailedError
from kvist.transfer.bounce import Bounce
from kvist.transfer.commands import (
    CancelFetch,
    Command,
    Computed,
    Fetch,
    Offer,
    Report,
    TransferLimits,
    WithdrawOffer,
)
from kvist.transfer.copier import TorchCopier
from kvist.transfer.messages import Message, PoolPlace, encode_message, group_shapes
from kvist.transfer.receiver import Receiver
from kvist.transfer.sender import Sender
from kvist.transfer.service import make_hello

LIVES = seeds(6)
NUM_ACTS = 500
MAX_LEN, VOCAB_SIZE, B = 96, 512, 4
FAMILIES = ("gemma3", "llama")
KINDS = ("alone", "handed", "handed", "handed", "handed", "pulled", "pulled", "longer", "left", "other")
REACHED = (
    *KINDS,
    "compared",
    "pieces written",
    "fetched",
    "fallbacks",
    "given up",
    "preempted",
    "aborted",
    "killed",
    "looked ahead",
)
LIMITS = TransferLimits(transfer_timeout_s=20.0, hold_timeout_s=40.0, cancel_retry_s=3.0)


@dataclass(eq=False)
class Connection:
    """A worker's to another, by the wire."""

    world: World
    source: str
    endpoint: str
    inbox: deque[list[bytes]] = field(default_factory=deque)
    is_dead: bool = False
    used_at_s: float = 0.0

    def send(self, message: Message) -> None:
        payload = encode_message(message)

        def arrive() -> None:
            worker = self.world.workers.get(self.endpoint)
            if worker is not None:
                worker.run_commands()  # what was offered before is known
                worker.sender.handle([[self.source.encode(), payload]], self.world.now_s)

        self.world.wire.append(arrive)

    def receive(self) -> Iterator[list[bytes]]:
        while self.inbox:
            yield self.inbox.popleft()


class Worker:
    """An engine with both halves of its transfers; what these need of sockets and of an agent is in here."""

    kind, name = "any", "any"

    def __init__(self, world: World, config: EngineConfig, *, is_fallback_allowed: bool, has_bounce: bool) -> None:
        self.world = world
        world.num_workers += 1
        self.endpoint = f"tcp://worker-{world.num_workers}:1"
        self.follower = world.new_follower()
        self.loaded = load_engine(config, self.follower)
        self.core: EngineCore = self.loaded.core
        self.is_fallback_allowed = is_fallback_allowed
        self.connections: dict[str, Connection] = {}
        self.commands: deque[Command] = deque()
        self.reports: deque[Report] = deque()
        ends: Any = self
        self.pools = self.loaded.tensors.pools
        places = tuple(PoolPlace(pool.data_ptr(), pool[0].nbytes, len(pool)) for pool in self.pools)
        hello = make_hello("m", B, group_shapes(self.loaded.whole_plan), places, ends)
        self.name = hello.worker
        bounce = None
        if has_bounce:
            bounce = Bounce(ends, TorchCopier(self.pools), lambda: torch.zeros(1 << 17, dtype=torch.uint8))
            bounce.max_fragment_bytes = 1 << 40
        self.bounce = bounce
        self.sender = Sender(ends, ends, hello, LIMITS, self.reports.append, bounce)
        self.receiver = Receiver(ends, hello, LIMITS, self.reports.append, bounce)
        self.core.handoffs.attach(self.command, is_fallback_allowed=is_fallback_allowed)

    def command(self, command: Command) -> None:
        if self.world.devices is not None:
            self.world.devices(self.core._runner).check(command, B)
        self.commands.append(command)

    def run_commands(self) -> None:
        while self.commands:
            match self.commands.popleft():
                case Offer() as offer:
                    self.sender.offer(offer, self.world.now_s)
                case Computed() as computed:
                    self.sender.on_computed(computed, self.world.now_s)
                case Fetch() as fetch:
                    self.receiver.fetch(fetch, self.world.now_s)
                case CancelFetch(request_id):
                    self.receiver.cancel(request_id, self.world.now_s)
                case WithdrawOffer(remote_request_id):
                    self.sender.withdraw(remote_request_id)

    def hear(self, count: int) -> None:
        """Tell the engine of what has ended, the first reports first."""
        for _ in range(min(count, len(self.reports))):
            self.core.on_report(self.reports.popleft())

    @property
    def is_idle(self) -> bool:
        return not (self.core.has_work or self.commands or self.reports or self.sender.has_writes)

    # The ROUTER socket, and the DEALER ones.

    def send_multipart(self, frames: list[bytes], _: int) -> None:
        world, name, payload = self.world, frames[0].decode(), frames[1]
        target = world.named(name)
        if target is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

        def arrive() -> None:
            connection = target.connections.get(self.endpoint)
            if connection is not None and world.named(name) is target:
                connection.inbox.append([payload])
                target.receiver.receive(world.now_s)

        world.wire.append(arrive)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self.connections.values()))

    def connect(self, where: Any, now_s: float = 0.0) -> Any:
        """Reach a worker's memory by its metadata, or its socket by its endpoint."""
        if isinstance(where, bytes):
            return where.decode()
        connection = self.connections.setdefault(where, Connection(self.world, self.name, where))
        connection.used_at_s = now_s
        return connection

    def drop(self, connection: Connection) -> None:
        del self.connections[connection.endpoint]

    def find_lost(self, connection: Connection, transfer_ids: set[int]) -> set[int]:
        return transfer_ids if connection.is_dead else set()

    # The agent.

    def metadata(self) -> bytes:
        return self.endpoint.encode()

    def register(self, *_: Any) -> None:
        """Do nothing: all memory is one process's."""

    deregister = register

    def disconnect(self, peer: str) -> None:
        assert all(write.transfer.request.hello.agent_metadata.decode() != peer for write in self.sender._writes)

    def write(self, peer: str, fragments: Any) -> Write:
        """Write a piece now and then; each is still wanted there, and held here."""
        rng, is_doomed = self.world.random, self.world.is_lossy and self.world.random.random() < 0.05
        for source, destination, size in fragments.tolist():
            while rng.random() < 0.3:
                yield False
            target = self.world.workers.get(peer)
            if target is None or (is_doomed and rng.random() < 0.3):
                raise WriteFailedError("the peer is gone" if target is None else "doomed")
            handoffs, theirs = self.core.handoffs, target.core.handoffs
            assert handoffs is not None
            assert theirs is not None
            self.check(source, [held.blocks for held in handoffs._held.values()])
            receiving = [each.blocks for each in target.core._scheduler.receiving.values() if each.blocks is not None]
            target.check(destination, [*receiving, *theirs._abandoned.values()], is_written=True)
            ctypes.memmove(destination, source, size)
            self.world.reached["pieces written"] += 1
            yield True
        if is_doomed:
            raise WriteFailedError("doomed")

    def check(self, address: int, sequences: list[Any], *, is_written: bool = False) -> None:
        """Assert that an address in a pool is of a block that one of these holds, and if it is written, alone."""
        for group_id, pool in enumerate(self.pools):
            block_id, _ = divmod(address - pool.data_ptr(), pool[0].nbytes)
            if 0 <= block_id < len(pool):
                tables = [each.tables[group_id] for each in sequences if each.tables]
                assert any(block_id in table.held() for table in tables), "not held any more"
                kv_cache = self.core.kv_cache.pools[group_id]
                assert not is_written or kv_cache._num_references[block_id] == 1, "written under another's eyes"


@dataclass(eq=False)
class Part:
    """What one worker was asked of a request: its name there, and what came of it."""

    worker: Worker
    name: str
    num_tokens: int
    times: RequestTimes = field(default_factory=RequestTimes)
    outputs: list[RequestOutput] = field(default_factory=list)
    is_dropped: bool = False

    @property
    def is_ended(self) -> bool:
        return self.is_dropped or bool(self.outputs and self.outputs[-1].is_last)


@dataclass(eq=False)
class Handed:
    """A request whose prompt one worker begins, and where and how it goes on once that says where it is."""

    ask: Ask
    first: Part | None
    target: Worker
    kind: str
    last: Part | None = None


class World:
    """Some workers, the wire between them, and their clients."""

    def __init__(self, seed: int, open_worker: Callable[..., Worker], new_follower: Any, reached: Counter[str]) -> None:
        self.random = rng = random.Random(seed)
        self.reached = reached
        self.new_follower = new_follower
        self.now_s = 0.0
        self.is_lossy = True
        self.num_workers = self.num_parts = 0
        self.devices: Callable[[Runner], LateDevice] | None = None
        self.wire: list[Callable[[], None]] = []
        self.workers: dict[str, Worker] = {}
        self.parts: dict[tuple[Worker, str], Part] = {}
        self.requests: list[Handed] = []
        self.has_deaths = rng.random() < 0.3
        self.family = FAMILIES[seed % len(FAMILIES)]
        self.asker = Asker(rng, VOCAB_SIZE, MAX_LEN)
        is_fallback_allowed, has_bounce = rng.random() < 0.8, rng.random() < 0.4

        def start() -> None:
            max_num_seqs = rng.randint(2, 6)
            worker = open_worker(
                self,
                self.family,
                is_fallback_allowed=is_fallback_allowed,
                has_bounce=has_bounce,
                num_blocks=rng.choice((26, 40, 80)),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + rng.choice((5, 20, 60)),
                has_prefix_cache=rng.random() < 0.9,
                has_swa_scratch=rng.random() < 0.4,
            )
            self.workers[worker.endpoint] = worker

        self.start = start
        for _ in range(rng.choice((2, 2, 3))):
            start()

    def named(self, name: str) -> Worker | None:
        return next((worker for worker in self.workers.values() if worker.name == name), None)

    def live(self) -> None:
        acts = {
            self.compute: 12 if self.devices is not None else 0,
            self.ask: 3,
            self.step: 36,
            self.run_commands: 16,
            self.deliver: 24,
            self.write: 30,
            self.hear: 12,
            self.pass_time: 2,
            self.abort: 1,
            self.kill: 0.4 if self.has_deaths else 0,
            self.notice_the_dead: 1,
        }
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_ACTS):
            act()
            self.check()
        self.settle()
        assert all(part.is_ended for part in self.parts.values())
        for worker in self.workers.values():
            statistics = worker.core.statistics()
            self.reached["preempted"] += statistics.scheduler.num_preemptions
            self.reached["fetched"] += statistics.handoffs.num_fetched
            self.reached["fallbacks"] += statistics.handoffs.num_fallbacks
            self.reached["given up"] += statistics.handoffs.num_given_up
            assert statistics.kv_cache.num_used == 0
            handoffs = statistics.handoffs
            assert (handoffs.num_held, statistics.scheduler.num_receiving, handoffs.num_abandoned) == (0, 0, 0)
            assert not worker.core._requests
            assert (len(worker.sender._held), worker.sender.num_writing, len(worker.receiver._transfers)) == (0, 0, 0)
            assert worker.bounce is None or worker.bounce.statistics().used_bytes == 0

    def check(self) -> None:
        for worker in self.workers.values():
            check_engine(worker.core)
            worker.follower.assert_equals(worker.core.kv_cache)

    def any_worker(self, but: Worker | None = None) -> Worker:
        return self.random.choice([worker for worker in self.workers.values() if worker is not but])

    # --- What may happen next ---------------------------------------------------------------------------------------

    def ask(self) -> None:
        rng = self.random
        for ask in self.asker.ask():
            kind = rng.choice(KINDS)
            if rng.random() < 0.8:  # with log probabilities no prompt is fetched
                params = msgspec.structs.replace(ask.params, logprobs=None, prompt_logprobs=None, echo=False)
                ask = replace(ask, params=params)
                if self.devices is not None:  # they look ahead where nothing but the model decides on a token
                    kept = ("max_tokens", "temperature", "seed", "top_k", "top_p", "min_p", "ignore_eos", "stop")
                    params = SamplingParams(
                        **{name: getattr(params, name) for name in kept},
                        stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice((0, 60))),
                    )
                    ask = replace(ask, params=params, bad_words=(), has_grammar=False)
            source = self.any_worker()
            target = self.any_worker(but=source)
            self.reached[kind] += 1
            request = Handed(ask, None, target, kind)
            self.requests.append(request)
            if kind == "alone":
                request.last = self.send(target, ask)
            elif kind == "pulled":
                request.first = self.send(source, ask, RemoteDecode(rng.randint(1, len(ask.prompt) + 5)))
            elif kind == "longer":
                num_tokens = rng.randint(1, len(ask.prompt))
                request.first = self.send(source, replace(ask, prompt=ask.prompt[:num_tokens]), RemoteDecode())
            else:
                request.first = self.send(source, ask, RemoteDecode())

    def send(self, worker: Worker, ask: Ask, handoff: Handoff | None = None) -> Part:
        self.num_parts += 1
        part = Part(worker, str(self.num_parts), len(ask.prompt))
        self.parts[worker, part.name] = part
        worker.core.add_request(part.name, ask.sequence(handoff), part.times)
        return part

    def step(self) -> None:
        worker = self.any_worker()
        self.reached["looked ahead"] += worker.core._ahead is not None
        if worker.core.has_work:
            for output in worker.core.step():
                part = self.parts[worker, output.request_id]
                if not part.is_dropped:  # what the engine said before it heard of that
                    part.outputs.append(output)
        for request in self.requests:
            self.go_on(request)

    def go_on(self, request: Handed) -> None:
        """Ask the second worker once the first says where a prompt is."""
        first, ask = request.first, request.ask
        if first is None or request.last is not None or first.is_dropped or not first.outputs:
            return
        told = [output.remote_request_id for output in first.outputs]
        remote_request_id = next(filter(None, told), None)
        if request.target.endpoint not in self.workers:
            request.target = self.any_worker(but=first.worker)
        if remote_request_id is None:
            if first.is_ended:
                request.last = self.send(request.target, ask)
            return
        num_tokens = len(ask.prompt)
        if request.kind == "pulled":
            num_tokens = first.outputs[0].num_cached_tokens
        elif request.kind == "longer":
            num_tokens = first.num_tokens
        handoff = RemotePrefill((first.worker.endpoint,), remote_request_id, num_tokens)
        if request.kind == "other":
            handoff = RemotePrefill((first.worker.endpoint,), remote_request_id, self.random.randint(1, num_tokens))
        if request.kind != "left":
            request.last = self.send(request.target, ask, handoff)

    def compute(self) -> None:
        """Let a device compute some of what was launched."""
        assert self.devices is not None
        self.devices(self.any_worker().core._runner).compute(self.random.randint(1, 9))

    def run_commands(self) -> None:
        self.any_worker().run_commands()

    def deliver(self) -> None:
        """Let a message arrive, not at all, or one more time; not always the first."""
        if self.wire:
            idx = self.random.choice((0, self.random.randrange(len(self.wire))))
            fate = self.random.random()
            if fate < 0.08:
                self.wire[idx]()
            elif (message := self.wire.pop(idx)) and fate > 0.12:
                message()

    def write(self) -> None:
        self.any_worker().sender.advance_writes(lambda: self.now_s)

    def hear(self) -> None:
        self.any_worker().hear(self.random.randint(1, 3))

    def pass_time(self) -> None:
        self.now_s += self.random.choice((0.1, 1.0, 6.0))
        for worker in self.workers.values():
            worker.receiver.tick(self.now_s)
            worker.sender.tick(self.now_s)

    def abort(self) -> None:
        """Leave, as clients do: the worker drops the request, and what is held of it."""
        if open_parts := [part for part in self.parts.values() if not part.is_ended]:
            part = self.random.choice(open_parts)
            part.is_dropped = True
            part.worker.core.abort(part.name)
            if part.times.remote_request_id is not None:
                part.worker.core.handoffs.withdraw(part.times.remote_request_id)
            self.reached["aborted"] += 1

    def kill(self) -> None:
        worker = self.any_worker()
        del self.workers[worker.endpoint]
        for part in self.parts.values():
            part.is_dropped |= part.worker is worker
        self.start()
        self.reached["killed"] += 1

    def notice_the_dead(self) -> None:
        for worker in self.workers.values():
            for connection in worker.connections.values():
                connection.is_dead = connection.endpoint not in self.workers
            worker.sender.ping()

    def settle(self) -> None:
        """Let everything arrive and end: nothing is lost any more, and the dead are known to be."""
        self.is_lossy = False
        for _ in range(60):
            self.notice_the_dead()
            for _ in range(1000):
                for worker in self.workers.values():
                    worker.run_commands()
                    worker.sender.advance_writes(lambda: self.now_s)
                    worker.hear(100)
                self.step()
                self.check()
                wire, self.wire = self.wire, []
                for message in wire:
                    message()
                if not self.wire and all(worker.is_idle for worker in self.workers.values()):
                    break
            self.pass_time()

    def compare(self, lone: LoneEngine) -> None:
        """Raise AssertionError unless every answer is that of a lone engine, as far as it went."""
        for request in self.requests:
            last = request.last
            if last is None or not last.outputs:
                continue
            output = reduce(add, last.outputs)
            has_failed = output.error is not None and output.error.startswith("kv transfer failed")
            assert not (has_failed and last.worker.is_fallback_allowed)
            expected = lone.answer(request.ask)
            self.reached["compared"] += expected.num_sure >= len(expected.output.token_ids)
            expected.check(output, is_whole=last.is_ended and not last.is_dropped and not has_failed)


@pytest.fixture
def open_worker(checkpoint: Callable[[str], Any]) -> Callable[..., Worker]:
    def open_(world: World, family: str, *, is_fallback_allowed: bool, has_bounce: bool, **settings: Any) -> Worker:
        config = EngineConfig(model_dir=checkpoint(family), block_size=B, max_model_len=MAX_LEN, **settings)
        return Worker(world, config, is_fallback_allowed=is_fallback_allowed, has_bounce=has_bounce)

    return open_


def test_whoever_computes_a_prompt_and_whatever_is_lost_each_answer_is_that_of_one_engine(
    make_core, open_worker, new_follower
) -> None:
    reached: Counter[str] = Counter()
    lone = cache(
        lambda family: LoneEngine(make_core(family, max_model_len=MAX_LEN, num_blocks=64, has_prefix_cache=False))
    )
    for seed in LIVES:
        world = World(seed, open_worker, new_follower, reached)
        try:
            with late_devices() if world.random.random() < 0.7 else nullcontext() as world.devices:
                world.live()
            world.compare(lone(world.family))
        except BaseException as error:
            error.add_note(f"life {seed}")
            raise
    assert min(reached[each] for each in REACHED) >= len(LIVES) // 6, reached
