"""What does the live page cost a router of 256 workers, 10 M blocks and 2,000 requests a second, and a browser?

Bounds: all but 20 requests a second cost a comparison; those 20 cost the terms of their decision over 256 candidates.
The page's data cost reading and encoding each worker, once for all viewers; if that took t, it is done again no sooner
than 79 t later. Load, index, regret and policy are a router's own; of event streams only the counters are made,
as the indexer makes them. Viewers get an update every 0.25 s, in which every worker has changed. CPU time of one
thread; shares are of a core. Then Chromium shows the page, at 60 frames a second at best: how many it draws, and the
longest time one took.

    python benchmarks/bench_page.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import monotonic, thread_time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from _common import report, table
from playwright.async_api import async_playwright

from kvist.events import Tier, WorkerRank
from kvist.events.session import SourceState
from kvist.http import HttpServer, Request, Responder
from kvist.indexer.statistics import SourceStatistics
from kvist.radix import RadixIndex
from kvist.router.config import RouterConfig
from kvist.router.doors import journal, live
from kvist.router.doors.keeper import Answer
from kvist.router.doors.page import EVENTS_PATH, INTERVAL_S, show_file, stream
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.identity import Identity, ServedModel
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.worker import CircuitBreaker, HealthGauge, Worker
from kvist.router.index import FleetIndex, RankStatus
from kvist.router.policy.decision import Candidate, Decision, Prompt, Weighing
from kvist.router.policy.settings import PriceSettings
from kvist.router.prompts import ParsedRequest
from kvist.router.regret import Regret, Routed
from kvist.router.routing import Prefix
from kvist.router.usage import ReportedUsage

NUM_WORKERS, REQUESTS_A_SECOND, PROMPT_BLOCKS, BLOCK_SIZE = 256, 2000, 128, 16
URLS = [f"http://10.0.{number >> 8}.{number & 255}:8000" for number in range(NUM_WORKERS)]


class Index(FleetIndex):
    """A fleet's index without sockets: each worker has a stream that tells."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(RouterConfig(block_size=BLOCK_SIZE), monotonic)
        self.radix, self.joined_at_s = RadixIndex(max_blocks=2 * num_blocks), 0.0
        for number, url in enumerate(URLS):
            own = np.arange(num_blocks // NUM_WORKERS, dtype=np.uint64) + np.uint64(number << 40 | 1)
            for chain in np.array_split(own * np.uint64(0x9E3779B97F4A7C15), max(1, len(own) // 1000)):
                self.radix.store(WorkerRank(url, 0), Tier.GPU, None, chain)

    def source_statistics(self) -> Iterator[SourceStatistics]:
        for url in URLS:
            states = {0: SourceState.LIVE}
            yield SourceStatistics(url, "tcp://10.0.0.1:5557", states, last_event_age_s=0.0, lag_s=0.002)

    def ranks(self, worker: str) -> list[RankStatus]:
        target = WorkerRank(worker, 0)
        return [self._status(target, SourceState.LIVE, target)]


FRAMES = """(lastsMs) => new Promise((done) => {
  let frames = 0, longestMs = 0;
  const note = (each) => (longestMs = Math.max(longestMs, each.duration));
  new PerformanceObserver((list) => list.getEntries().forEach(note)).observe({ entryTypes: ["longtask"] });
  const count = () => { frames++; requestAnimationFrame(count); };
  count();
  setTimeout(() => done([frames, longestMs]), lastsMs);
})"""
"""Counts; tasks of less than 50 ms have no length here."""


def cost_s(function: Callable[[], object], number: int) -> float:
    """Return the CPU time of a call, on average."""
    begin_s = thread_time()
    for _ in range(number):
        function()
    return (thread_time() - begin_s) / number


async def watched(state: live.LiveState, go_on: Callable[[], None], lasts_s: float) -> dict[str, dict[str, float]]:
    """Return frames a second of a browser and the longest task of its page, in seconds, by view."""

    async def answer(question: Any) -> Answer:
        return Answer(200, state.state(question.query))

    def handle(request: Request, responder: Responder) -> Any:
        if request.path == EVENTS_PATH:
            return stream(request, responder, answer, lambda: None)
        return show_file(request, responder)

    async def traffic() -> None:
        while True:
            go_on()
            await asyncio.sleep(INTERVAL_S)

    found, chromium = {}, shutil.which("chromium")
    async with HttpServer(handle) as server, async_playwright() as driver, asyncio.TaskGroup() as group:
        moving = group.create_task(traffic())
        page = await (await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])).new_page()
        for view in live.VIEWS:
            await page.goto(f"http://127.0.0.1:{server.port}/ui#{view}")
            await page.locator("#connection.good").wait_for()
            frames, longest_ms = await page.evaluate(FRAMES, 1000 * lasts_s)
            found[view] = {"frames_a_second": frames / lasts_s, "longest_task_s": longest_ms / 1000}
        moving.cancel()
    return found


def measure(num_blocks: int, number: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return seconds a request, a request that is looked at, and an answer by view; and what a browser comes to."""
    random, config = np.random.default_rng(1), RouterConfig(worker_urls=(URLS[0],))
    index, load, regret = Index(num_blocks), LoadTracker(), Regret()
    fleet = Fleet(BLOCK_SIZE, index, monotonic)
    models = Models(config, fleet, lambda _: None)
    identity = Identity("vllm", "0.12", BLOCK_SIZE, models=(ServedModel("m", {}),), cache_size_tokens=800_000)
    for url in URLS:
        worker = Worker(url, (), HealthGauge(is_healthy=True), CircuitBreaker())
        worker.set_identity(identity)
        fleet.put(worker)
        load.register(WorkerRank(url, 0))
    pricing = load.pricing(PriceSettings(), BLOCK_SIZE)
    columns = np.array([load.column(WorkerRank(url, 0)) for url in URLS])
    shared = [random.integers(0, 1 << 63, PROMPT_BLOCKS, np.uint64) for _ in range(20)]

    def request() -> Any:
        hashes = np.concatenate([shared[random.integers(20)][:96], random.integers(0, 1 << 63, 32, np.uint64)])
        prompt = Prompt(len(hashes) * BLOCK_SIZE + 5, BLOCK_SIZE)
        held = np.full(NUM_WORKERS, 96)
        prices = pricing.weigh(monotonic(), prompt.num_tokens, hashes, held, columns)
        chosen, weighing = Candidate(WorkerRank(URLS[7], 0)), Weighing("price", [1 / NUM_WORKERS] * NUM_WORKERS)

        def weighed() -> tuple[list[Candidate], Weighing]:
            return [Candidate(WorkerRank(url, 0), overlap_blocks=(96, 96, 96, 96)) for url in URLS], weighing

        decision = Decision("kv", prompt, chosen, 7, 96 * BLOCK_SIZE, weighed, prices)
        parsed = ParsedRequest("m", prompt.num_tokens, np.zeros(prompt.num_tokens, np.uint32))
        attempt = SimpleNamespace(decision=decision, usage=ReportedUsage(1, 1, 1), sent_s=0.0, first_byte_s=0.1)
        router = SimpleNamespace(now_s=lambda: now[0], fleet=fleet)
        return SimpleNamespace(
            router=router,
            parsed=parsed,
            attempt=attempt,
            prefix=Prefix({}, hashes),
            handover=None,
            place=None,
            request_id=b"0" * 32,
            request=SimpleNamespace(path="/v1/chat/completions"),
            tenant=SimpleNamespace(name="default"),
            responder=SimpleNamespace(status=200),
            started_s=0.0,
            tried={URLS[7]},
        )

    now = [0.0]
    state = live.LiveState(fleet, models, load, index, regret, dict)
    recorder = journal.Journal(models, state.add, shows_prompts=False)
    seen = [request() for _ in range(100)]
    for each in range(4000):  # two minutes of regret
        sampled = Routed(
            "m", URLS[each % NUM_WORKERS], 2000, held_tokens=1600, routed_tokens=1500, reported_tokens=1500
        )
        regret.add(each * 0.03, [sampled], num_blocks)
    numbers = iter(range(1, 1 << 62))

    def look() -> None:
        now[0] += 1.0  # there is room for one more
        number = next(numbers)
        ended = seen[number % 100]
        ended.request_id = b"%032x" % number
        recorder.record(ended, None)

    found = {"looked at": cost_s(look, number * 20)}
    recorder._allowance = 0.0
    found["not looked at"] = cost_s(lambda: recorder.record(seen[0], None), number * 1000)
    rests = {section: section._rest for section in (state._base, *state._views.values())}
    live.MIN_INTERVAL_S = 0.0
    for section in rests:
        section._rest = 0
    known = dict.fromkeys(live.VIEWS, 0)

    def change() -> None:
        for url in URLS:
            load.begin(WorkerRank(url, 0), Prompt(100, BLOCK_SIZE), 0)

    def ask(view: str) -> None:
        change()
        known[view] = msgspec.json.decode(state.state(f"view={view}&since={known[view]}"))["number"]

    for view in live.VIEWS:
        ask(view)  # for the first time, when all is told
        found[view] = cost_s(partial(ask, view), number) - cost_s(change, number)
    live.MIN_INTERVAL_S = 0.25
    for section, rest in rests.items():
        section._rest = rest

    def go_on() -> None:
        change()
        for _ in range(int(journal.RATE * INTERVAL_S)):
            look()

    return found, asyncio.run(watched(state, go_on, number / 3))


def _paced(took_s: float, rest: int) -> tuple[float, float]:
    """Return how often it is made, as somebody asks for it, and which share of a core that is."""
    every_s = max(INTERVAL_S, (rest + 1) * took_s)
    return every_s, took_s / every_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    num_blocks = 1_000_000 if args.quick else 10_000_000
    costs, seen_by = measure(num_blocks, 3 if args.quick else 30)
    requests = REQUESTS_A_SECOND * costs["not looked at"] + journal.RATE * costs["looked at"]
    base_s, rows, shares = median(costs[view] for view in ("fleet", "requests", "health")), [], {}
    rows.append(["requests", f"{1e6 * costs['looked at']:.0f} µs, 20 a second", f"{requests:.2%}", "", "", ""])
    for view in live.VIEWS:
        every_s, share = _paced(base_s, live.BASE_REST)
        if view in ("prefixes", "regret"):
            own_s, own_share = _paced(max(0.0, costs[view] - base_s), live.VIEW_REST)
            every_s, share = max(every_s, own_s), share + own_share
        shares[view] = requests + share
        seen = f"{every_s + INTERVAL_S:.2f} s"
        frames, longest_s = seen_by[view].values()
        longest = f"{1e3 * longest_s:.0f} ms" if longest_s else "< 50 ms"
        row = [f"one watches {view}", f"{1e3 * costs[view]:.2f} ms", f"{shares[view]:.2%}", seen]
        rows.append([*row, f"{frames:.0f}", longest])
    head = ["what", "costs", "of a core in all", "a change is visible within", "frames a second", "longest task"]
    figures = {"costs_s": costs, "shares": shares, "browser": seen_by}
    report("bench_page", table(head, rows), figures, ["msgspec", "numpy", "numba", "playwright"], args.save)


if __name__ == "__main__":
    main()
