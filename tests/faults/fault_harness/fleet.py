"""A fleet that lives through a plan, and a router whose index is looked at all the time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from fault_harness.engine import Engine, digest_of
from fault_harness.plan import Plan, Step
from fault_harness.router import Router
from fault_harness.sidecar import SidecarWorker
from fault_harness.virtual import World
from fault_harness.wire import Network, Weather
from fault_harness.workers import EmbeddedWorker, StockWorker, Worker
from kvist.events import Tier
from kvist.events.session import SourceState
from kvist.events.types import MAX_RANKS

QUIET_S = 240.0
"""How long after the last fault everything must be exact, at the latest: questions become ever rarer."""

BAD_ANSWERS = (
    "replay refused",
    "replay interrupted",
    "replay late",
    "replay cut short",
    "replay with a hole",
    "replay repeated",
    "replay reordered",
    "replay garbled",
    "snapshot cut short",
    "snapshot with a hole",
)
# What a transport does to an engine's own stream; answers there carry nothing that tells what they lack.
HONEST_BAD_ANSWERS = ("replay refused", "replay interrupted", "replay late")


@dataclass(slots=True)
class Tally:
    """What was played."""

    num_histories: int = 0
    num_blocks: int = 0
    num_checks: int = 0
    num_ranks: int = 0
    num_partial: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    until_exact_s: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.num_histories += other.num_histories
        self.num_blocks += other.num_blocks
        self.num_checks += other.num_checks
        self.num_ranks += other.num_ranks
        self.num_partial += other.num_partial
        self.faults += other.faults
        self.until_exact_s += other.until_exact_s


class Fleet:
    """Workers, the wires to them, and a router; does what the steps say and looks at the index all the time."""

    def __init__(self, plan: Plan, world: World, folder: Path) -> None:
        self.tally = Tally(num_histories=1)
        self._plan = plan
        self._world = world
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(plan.seed)
        settings = plan.settings
        self._network = Network(self._rng, self.tally.faults, in_blocks=settings["in_blocks"])
        self.workers = [self._new_worker(number, kind) for number, kind in enumerate(plan.kinds)]
        for link in self._network.links.values():
            link.tells_departure = settings["tells_departure"]
            link.queue_capacity = settings["queue_capacity"]
        self._lost: set[tuple[int, int]] = set()
        self._is_restarting = False
        self._lost_ever: set[tuple[int, int]] = set()

    def _new_worker(self, number: int, kind: str) -> Worker:
        name, rng = f"{kind}-{number}", random.Random(self._rng.getrandbits(32))
        if kind == "embedded":
            return EmbeddedWorker(name, self._network.link(f"memory://{name}"), self._world, rng, self._plan.settings)
        if kind == "sidecar":
            link = self._network.link(f"memory://{name}")
            return SidecarWorker(name, link, self._world, rng, self._plan.settings, self._network)
        link = self._network.link(f"tcp://{name}:5557")
        return StockWorker(name, link, self._world, rng, self._plan.settings)

    async def play(self) -> Tally:
        """Do all steps, then have quiet, and see that everything becomes exact."""
        with _opening(self._network.open_subscription):
            for worker in self.workers:
                worker.start()
            self._router = self._new_router()
            await self._router.start()
            watching = self._loop.create_task(self._watch())
            for step in self._plan.steps:
                rng = random.Random(step.number)
                await self._do(step, rng)
                await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.1, 0.5)) * rng.random())
                if watching.done():
                    break
            await self._become_quiet(watching)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await self._router.kill()
            for worker in self.workers:
                worker.kill()
                self.tally.num_blocks += worker.num_blocks
        return self.tally

    def _new_router(self, *, has_state: bool = True) -> Router:
        folder = self._folder / "state" if has_state and self._plan.settings["has_state"] else None
        return Router([worker.url for worker in self.workers], folder, self._rng.choice((0.3, 1.0, 5.0)))

    async def _do(self, step: Step, rng: random.Random) -> None:
        worker = self.workers[step.worker % len(self.workers)]
        does = getattr(self, f"_{step.kind}")
        done = does(worker, rng)
        if asyncio.iscoroutine(done):
            await done

    def _live(self, worker: Worker, rng: random.Random) -> None:
        worker.live(rng.choice((1, 3, 10)))

    async def _wait(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        await asyncio.sleep(rng.choice((0.1, 1.0, 4.0, 15.0)) * rng.random())

    def _weather(self, worker: Worker, rng: random.Random) -> None:
        weather = Weather()
        # An engine's own stream is one connection, which keeps the order and alters nothing.
        is_engines = isinstance(worker, StockWorker)
        names = ("drop", "duplicate") if is_engines else ("drop", "duplicate", "delay", "reorder", "garble")
        kind = rng.choice((*names, "all"))
        for name in names:
            if kind in (name, "all"):
                setattr(weather, name, rng.choice((0.05, 0.3, 0.9)))
        worker.link.weather = weather

    def _clear_up(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        worker.link.weather = Weather()

    async def _lose_the_last(self, worker: Worker, rng: random.Random) -> None:
        await asyncio.sleep(0.1)
        worker.link.drops_next = rng.randint(1, 3)
        worker.live(1)
        await asyncio.sleep(rng.choice((0.01, 0.5, 8.0)))
        worker.link.drops_next = 0

    def _cut(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        worker.link.cut()

    def _mend(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        if worker.link.is_cut:
            worker.link.mend()

    def _stall(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        self.tally.faults["subscriber stalled"] += 1
        for subscription in worker.link.subscriptions:
            subscription.stall()

    def _go_on(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        for subscription in worker.link.subscriptions:
            subscription.resume()

    async def _jam(self, worker: Worker, rng: random.Random) -> None:
        worker.link.is_jammed = not isinstance(worker, StockWorker)
        for _ in range(rng.randint(1, 5)):
            worker.live(3)
            await asyncio.sleep(rng.random())
        worker.link.is_jammed = False

    def _answer_badly(self, worker: Worker, rng: random.Random) -> None:
        worker.link.bad_answers = HONEST_BAD_ANSWERS if isinstance(worker, StockWorker) else BAD_ANSWERS
        worker.link.bad_answer_rate = rng.choice((0.3, 0.7, 1.0))

    def _answer_well(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        worker.link.bad_answer_rate = 0.0

    def _resend(self, worker: Worker, rng: random.Random) -> None:
        kept = [*worker.link.kept]
        if kept and not isinstance(worker, StockWorker):
            for message in rng.sample(kept, min(len(kept), rng.randint(1, 5))):
                worker.link.resend(message)

    def _kill_publisher(self, worker: Worker, rng: random.Random) -> None:
        if worker.is_up:
            self.tally.faults["publisher killed"] += 1
            worker.kill()
            if rng.random() < 0.6:
                worker.start()

    def _stop_publisher(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        if worker.is_up:
            self.tally.faults["publisher stopped"] += 1
            worker.stop()

    def _start_publisher(self, worker: Worker, rng: random.Random) -> None:  # noqa: ARG002
        if not worker.is_up:
            worker.start()

    def _turn_back_the_clock(self, worker: Worker, rng: random.Random) -> None:
        self.tally.faults["clock turned back"] += 1
        worker.kill()
        worker.start(clock_offset_s=-rng.choice((0.001, 5.0, 4000.0)))

    async def _kill_router(self, worker: Worker, rng: random.Random) -> None:
        """Kill it, or stop it; the next one finds what is in the folder, if there is one."""
        self._is_restarting = True
        is_killed = rng.random() < 0.7
        self.tally.faults["router killed" if is_killed else "router stopped"] += 1
        await (self._router.kill() if is_killed else self._router.stop())
        if rng.random() < 0.5:
            worker.live(5)
            await asyncio.sleep(rng.random() * 3)
        self._router = self._new_router()
        await self._router.start()
        self._is_restarting = False
        self._note_new_router(is_from_state=self._plan.settings["has_state"])

    async def _take_over_a_dump(self, worker: Worker, rng: random.Random) -> None:
        """Start a router from what the other one has, which then ends."""
        self.tally.faults["router started from a peer's dump"] += 1
        peer, router = self._router, self._new_router(has_state=False)
        starting = self._loop.create_task(router.start(peer))
        while not starting.done():
            if rng.random() < 0.3:
                worker.live(2)
            await asyncio.sleep(rng.random() * 0.05)
        await starting
        await peer.kill()
        self._router = router
        self._note_new_router(is_from_state=True)

    def _note_new_router(self, *, is_from_state: bool) -> None:
        """Take note that what the index has may be another's, who may have lost some of it."""
        if not is_from_state:
            self._lost.clear()
            return
        self._lost |= self._lost_ever
        for each in self.workers:
            each.was_taken_over = True

    def _lose_a_rank(self, worker: Worker, rng: random.Random) -> None:
        if isinstance(worker, StockWorker):  # whose stream tells nothing that could show it
            return
        self.tally.faults["index diverged"] += 1
        number, rank = self.workers.index(worker), rng.randrange(self._plan.settings["num_ranks"])
        self._lost.add((number, rank))
        self._lost_ever.add((number, rank))
        self._router.lose(number, rank)

    async def _watch(self) -> None:
        """Look at the index now and then: what it says is live is what was true at the place it says it is."""
        while True:
            await asyncio.sleep(self._rng.random() * 0.2)
            for number, worker in enumerate(self.workers):
                for rank in range(self._plan.settings["num_ranks"]):
                    if not self._is_restarting:
                        self._look(number, worker, rank)

    def _look(self, number: int, worker: Worker, rank: int) -> None:
        state, position = self._router.state(number, rank), self._router.position(number, rank)
        if state is not SourceState.LIVE or position is None:
            return
        digest = self._router.digest(number, rank)
        if isinstance(worker, StockWorker):
            is_right = (rank, digest) in worker.account.ever
            expected: object = "what the engine held at some time"
        else:
            expected = worker.account.digest(rank, *position)
            is_right = expected is None or expected == digest
        self.tally.num_checks += 1
        if is_right:
            if expected is not None:
                self._lost.discard((number, rank))
        else:
            assert (number, rank) in self._lost, f"{worker.name} rank {rank} at {position}: {digest}, not {expected}"

    async def _become_quiet(self, watching: asyncio.Task[None]) -> None:
        for worker in self.workers:
            worker.link.clear_up()
            if not worker.is_up:
                worker.start()
        await asyncio.sleep(0.5)  # what an engine says before it is connected to is lost
        for worker in self.workers:
            worker.speak()
        began_at_s = self._loop.time()
        await self._until_right(watching)
        self.tally.until_exact_s.append(self._loop.time() - began_at_s)
        states = [self._router.state(number, engine.rank) for number, _, engine in self._ranks()]
        self.tally.num_ranks += len(states)
        self.tally.num_partial += sum(state is not SourceState.LIVE for state in states)
        # What was right by chance is not for long: an epoch whose clock went back is believed after 3 s.
        await asyncio.sleep(5.0)
        await self._until_right(watching)
        if not {step.kind for step in self._plan.steps} & {"lose_a_rank", "answer_badly"}:
            for number in range(len(self.workers)):
                assert not self._router.statistics(number).num_diverged, "an index that nothing happened to differs"
        held = self._router.held()
        for number, worker, engine in self._ranks():
            said = held.pop((number, engine.rank), frozenset())
            companions = held.pop((number, engine.rank + MAX_RANKS), frozenset())
            assert {block for block, _ in companions} <= {block for block, tier in said if tier is Tier.GPU}
            if not self._may_lack(number, worker):
                assert said == engine.held
            elif worker.is_followed_to(self._router.position(number, engine.rank)):
                assert said <= engine.held | engine.held_in_part, "a block that its engine does not hold"
        assert not held, "blocks of nobody"

    async def _until_right(self, watching: asyncio.Task[None]) -> None:
        """Return once every rank is what it must be; raises AssertionError after `QUIET_S`."""
        began_at_s = self._loop.time()
        while wrong := [each for each in self._ranks() if not self._is_right(*each)]:
            assert self._loop.time() < began_at_s + QUIET_S, self._complaint(*wrong[0])
            await asyncio.sleep(0.1)
            if watching.done():
                watching.result()

    def _ranks(self) -> list[tuple[int, Worker, Engine]]:
        return [(number, worker, engine) for number, worker in enumerate(self.workers) for engine in worker.engines]

    def _is_right(self, number: int, worker: Worker, engine: Engine) -> bool:
        state, digest = self._router.state(number, engine.rank), self._router.digest(number, engine.rank)
        is_nothing_known = state is None or (state is SourceState.PARTIAL and isinstance(worker, SidecarWorker))
        if digest == digest_of(engine.held) and (state is SourceState.LIVE or (is_nothing_known and not engine.held)):
            return True
        is_unheard = state is None and digest == (0, 0)
        is_partial = state is SourceState.PARTIAL and worker.is_of_now(self._router.position(number, engine.rank))
        return self._may_lack(number, worker) and (is_partial or is_unheard)

    def _may_lack(self, number: int, worker: Worker) -> bool:
        """Return whether blocks may be missing: an engine of others was asked in vain, or no longer knew."""
        return not worker.has_snapshots or (isinstance(worker, StockWorker) and self._router.num_lost(number) > 0)

    def _complaint(self, number: int, worker: Worker, engine: Engine) -> str:
        state, digest = self._router.state(number, engine.rank), self._router.digest(number, engine.rank)
        return (
            f"{worker.name} rank {engine.rank} is {state} with {digest} at "
            f"{self._router.position(number, engine.rank)}, expected {digest_of(engine.held)}"
        )


@contextlib.contextmanager
def _opening(open_subscription: Any) -> Any:
    with mock.patch("kvist.indexer.indexer.open_subscription", open_subscription):
        yield
