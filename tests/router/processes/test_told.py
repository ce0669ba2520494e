"""What fronts learn of workers and tell each other: whom to spare, and that a circuit's trial is under way."""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from lives import seeds

from kvist.events import WorkerRank
from kvist.router.admission import Admission
from kvist.router.config import RouterConfig
from kvist.router.doors.keeper import Keeper, Question
from kvist.router.fleet.board import LoadBoard, board_bytes
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.worker import CircuitBreaker, CircuitState, HealthGauge, Worker
from kvist.router.index import RankStatus
from kvist.router.metrics import RouterMetrics
from kvist.router.processes.front import RemoteKeeper
from kvist.router.processes.keeper import FrontMetrics, KeeperProcess
from kvist.router.processes.messages import Answered, ToFront, ToKeeper
from kvist.router.processes.supervisor import Part

CONFIG = RouterConfig(policy="round-robin", port=0, breaker_failures=2, breaker_cooldown_s=1.0)
URLS = ("http://a", "http://b")
NUM_FRONTS, NUM_STEPS = 3, 300


class Wire:
    """One side of a link: what it tells is on its way until it is delivered, in order."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.send = self.frames.append


class Life:
    """A keeper and fronts that are told by workers, and tell each other whenever it comes to that."""

    def __init__(self, seed: int, tmp_path: Path) -> None:
        self.random, self.now_s = Random(seed), 1000.0
        loads = [LoadTracker(LoadBoard(num_fronts=NUM_FRONTS)) for _ in range(1 + NUM_FRONTS)]
        self.keeper = KeeperProcess(CONFIG, tmp_path, loads[0], 0.0)
        nothing: Any = None
        self.keeper._keeper = Keeper(CONFIG, nothing, 0.0, loads[0], registry=FrontMetrics())
        for url in URLS:
            self.keeper._keeper.fleet.put(Worker(url, (), HealthGauge(is_healthy=True), CircuitBreaker(2, 1.0)))
        self.fronts: list[RemoteKeeper] = []
        self.admissions: list[Admission] = []
        self.down: list[Any] = []
        self.up: list[Any] = []
        for number, load in enumerate(loads[1:]):
            part = Part(number, "", -1, (-1,) * NUM_FRONTS, 0)
            front = RemoteKeeper(CONFIG, part, load, nothing, RouterMetrics(), lambda: iter(()))
            self.down.append(Wire())
            self.up.append(Wire())
            front._link = self.up[-1]
            self.keeper._fronts[self.down[-1]] = number
            self.fronts.append(front)
            self.admissions.append(Admission(front.fleet, load, lambda: self.now_s, nothing, 100))
        self.asked: dict[tuple[int, str], float] = {}
        """Until when a front was asked to spare a worker, at the latest."""
        self.running: list[tuple[CircuitBreaker, bool]] = []
        self.keeper._send_changes()
        while self.deliver():
            pass

    def be_told(self) -> None:
        """A worker answers a front 429 or 503."""
        number, url = self.random.randrange(NUM_FRONTS), self.random.choice(URLS)
        said = self.random.choice([None, b"0", b"1", b"5", b"7", b"30", b"3600", b"soon", b"-3", b"Fri, 31 Dec 1999"])
        seconds = {None: 1, b"soon": 1, b"-3": 1, b"Fri, 31 Dec 1999": 1, b"3600": 60}.get(said)
        until_s = self.now_s + (int(said or 0) if seconds is None else seconds)
        self.asked[number, url] = max(until_s, self.asked.get((number, url), 0.0))
        front = self.fronts[number]
        worker = front.fleet.get(url)
        assert worker is not None
        self.admissions[number].pause(worker, said)

    def begin(self) -> None:
        """A front asks a worker, if its circuit lets it."""
        worker = self.random.choice(self.fronts).fleet.get(self.random.choice(URLS))
        assert worker is not None
        if worker.breaker.allows(self.now_s):
            self.running.append((worker.breaker, worker.breaker.begin()))

    def end(self) -> None:
        """The answer comes, or the client leaves."""
        if self.running:
            breaker, is_trial = self.running.pop(self.random.randrange(len(self.running)))
            outcome = self.random.choice(["fail", "fail", "succeed", "abandon"])
            if outcome == "fail":
                breaker.fail(self.now_s)
            elif outcome == "succeed":
                breaker.succeed(is_trial=is_trial)
            elif is_trial:
                breaker.abandon()

    def check_trials(self) -> None:
        """Once all has ended and is delivered, no circuit waits for a trial."""
        while self.running:
            self.end()
        while self.deliver():
            pass
        for fleet in (self.keeper._keeper.fleet, *(front.fleet for front in self.fronts)):
            assert all(worker.breaker.state is not CircuitState.HALF_OPEN for worker in fleet.workers)

    def change(self) -> None:
        """The keeper finds out something else, and tells it with what it knows of pauses."""
        worker = self.keeper._keeper.fleet.get(self.random.choice(URLS))
        assert worker is not None
        worker.last_failure = str(self.random.random())
        self.keeper._send_changes()

    def pass_time(self) -> None:
        self.now_s += self.random.choice([0.001, 0.5, 3.0])

    def deliver(self, only: Any = None) -> bool:
        """Deliver what was told first to, or by, some front, or on one wire only; return whether there was anything."""
        ways = [(wire, number, wire in self.up) for number in range(NUM_FRONTS) for wire in self.wires(number)]
        ways = [way for way in ways if only in (None, way[0])]
        if not ways:
            return False
        wire, number, is_up = self.random.choice(ways)
        frame = wire.frames.popleft()
        if is_up:
            self.keeper._on_message(self.down[number], msgspec.msgpack.decode(frame, type=ToKeeper))
        else:
            self.fronts[number]._on_message(self.up[number], msgspec.msgpack.decode(frame, type=ToFront))
        return True

    def wires(self, number: int) -> list[Any]:
        return [wire for wire in (self.up[number], self.down[number]) if wire.frames]

    def latest(self, url: str) -> float:
        return max((until_s for (_, each), until_s in self.asked.items() if each == url), default=0.0)

    def check(self) -> None:
        """No front forgets what it was asked itself, and none makes anything up."""
        for url in URLS:
            latest = self.latest(url)
            for number, front in enumerate(self.fronts):
                worker = front.fleet.get(url)
                assert worker is not None
                assert self.asked.get((number, url), 0.0) <= worker.capacity.paused_until_s <= latest

    def check_all_told(self) -> None:
        """Once all is delivered, all spare a worker as long."""
        while self.deliver():
            pass
        for url in URLS:
            latest, known = self.latest(url), self.keeper._keeper.fleet.get(url)
            assert known is not None
            assert known.capacity.paused_until_s == latest  # for fronts that start later
            for front, admission in zip(self.fronts, self.admissions, strict=True):
                worker = front.fleet.get(url)
                assert worker is not None
                assert worker.capacity.paused_until_s == latest
                assert admission.has_room(worker) == (latest <= self.now_s)
                assert url in front.fleet.bounded or not latest


@pytest.mark.parametrize("seed", seeds(8))
async def test_all_fronts_spare_a_worker_until_the_latest_time_that_any_was_told(seed: int, tmp_path: Path) -> None:
    life = Life(seed, tmp_path)
    acts = {life.be_told: 3, life.change: 2, life.pass_time: 3, life.deliver: 12, life.check_all_told: 1}
    for act in life.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
        act()
        life.check()
    life.check_all_told()


@pytest.mark.parametrize("seed", seeds(8))
async def test_whatever_comes_between_a_trial_that_has_ended_is_waited_for_by_nobody(seed: int, tmp_path: Path) -> None:
    life = Life(seed, tmp_path)
    acts = {life.begin: 6, life.end: 6, life.change: 3, life.pass_time: 3, life.deliver: 14, life.check_trials: 1}
    for act in life.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
        act()
    life.check_trials()


async def test_outsiders_learn_only_whether_the_router_is_ready_also_while_the_keeper_is_away(tmp_path: Path) -> None:
    front = Life(0, tmp_path).fronts[0]
    front._link = None
    for is_outsider in (True, False):
        answer = await front.answer(Question("GET", "/readiness", [], b"", None, is_outsider=is_outsider))
        page = msgspec.json.decode(answer.body)
        assert (answer.status, page["ready"]) == (200, True)
        assert (page.keys() == {"ready"}) == is_outsider


async def test_scrapes_that_come_together_ask_fronts_for_their_metrics_together(
    tmp_path: Path, monkeypatch: Any
) -> None:
    keeper, asked = KeeperProcess(CONFIG, tmp_path, LoadTracker(), 0.0), list[int]()

    async def read(_: Any, front: int) -> None:
        asked.append(front)

    nothing: Any = None
    keeper._keeper = Keeper(CONFIG, nothing, 0.0, registry=FrontMetrics(), refresh=keeper._read_fronts)
    link: Any = Wire()
    keeper._fronts[link] = 0
    monkeypatch.setattr(keeper, "_read_metrics", read)
    question = Question("GET", "/metrics", [], b"", None)
    await asyncio.gather(*(keeper._answer(link, number, question) for number in range(20)))
    assert 1 <= len(asked) <= 2
    told = [msgspec.msgpack.decode(frame, type=ToFront) for frame in link.frames]
    assert [each.number for each in told if isinstance(each, Answered)] == [*range(20)]


async def test_the_keeper_asks_for_a_model_that_a_front_does_not_know(tmp_path: Path) -> None:
    life, asked = Life(0, tmp_path), list[str]()
    life.keeper._keeper.fleet.on_unknown_model = lambda: asked.append("workers")
    life.fronts[1].fleet.on_unknown_model()
    while life.deliver():
        pass
    assert asked == ["workers"]


async def test_a_trial_that_succeeds_is_told_also_where_its_circuit_was_closed_meanwhile(tmp_path: Path) -> None:
    life = Life(0, tmp_path)
    one, other = (life.fronts[number].fleet.get(URLS[0]).breaker for number in (0, 1))

    def deliver(wire: Any) -> None:
        while life.deliver(wire):
            pass

    for _ in range(2):
        other.fail(life.now_s)
    deliver(life.up[1])
    deliver(life.down[0])
    deliver(life.down[1])
    life.now_s += 3.0
    assert one.begin()
    assert other.begin()
    other.succeed()
    deliver(life.up[1])
    deliver(life.down[0])
    for _ in range(2):
        other.fail(life.now_s)
    deliver(life.up[1])
    one.succeed(is_trial=True)
    life.check_trials()


async def test_the_next_keeper_frees_the_columns_of_all_ranks_of_a_worker_that_is_gone(
    tmp_path: Path, until: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    memory, url = mmap.mmap(-1, board_bytes(1)), "http://127.0.0.1:9"
    ranks = [WorkerRank(url, number) for number in range(3)]
    before = LoadBoard(memory)
    columns = [before.column(rank) for rank in ranks]
    front = LoadBoard(memory, names_columns=False)
    assert [front.column(rank) for rank in ranks] == columns
    async with KeeperProcess(CONFIG, tmp_path, LoadTracker(LoadBoard(memory)), 0.0) as keeper:
        news = keeper._news_of(Worker(url, (), HealthGauge(is_healthy=True), CircuitBreaker()))
        known = msgspec.structs.replace(news, ranks=[*map(RankStatus, ranks)])
        keeper._adopt([known])
        assert keeper._keeper.fleet.get(url) is not None
        await until(lambda: keeper._keeper.fleet.get(url) is None)
    assert [LoadBoard(memory, names_columns=False).column(rank) for rank in ranks] == [None, None, None]


async def test_fronts_are_told_of_a_rank_when_its_first_events_are_read(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvist.router.processes.keeper._RESCAN_S", 1000.0)
    config, board = replace(CONFIG, policy="kv"), LoadBoard(mmap.mmap(-1, board_bytes(1)))
    async with KeeperProcess(config, tmp_path, LoadTracker(board), 0.0) as keeper:
        index, told = keeper._keeper.index, asyncio.Queue[list[RankStatus]]()
        assert index is not None
        monkeypatch.setattr(keeper, "_send_changes", lambda: told.put_nowait(index.ranks("http://a")))
        with engine("a") as stored:
            index.follow("http://a", [stored.publisher.endpoint], 16)
            stored.store([*range(64)])
            async with asyncio.timeout(180):
                while not any(rank.num_blocks == 4 for rank in await told.get()):
                    pass
