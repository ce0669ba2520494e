"""Does an index say what real engines would reuse from their caches, and if not, does it say that it does not know?

vLLM's own cache manager, hashing and publisher, and SGLang's own radix cache and publisher, run requests: prompts in
chunks, answers token by token, shared beginnings, eviction, preemption, resets. No model and no GPU is needed to decide
what is stored, evicted and reported. The events go over ZMQ to `kvist index`, to another one through a sidecar, and to
`dynamo.indexer`. After every few steps all get the same prompts, and the engine itself says what is right: vLLM's
`get_computed_blocks`, SGLang's `match_prefix`. An answer is *short* if the engine would reuse more of its cache, *long*
if it would reuse less. A wrong answer is *partial* if the rank was said to be, and else *blind*. A side is *deaf* if
it did not show a block that was reported to it; it is queried all the same. *Events* is what vLLM's events say by
themselves if none was lost: copies counted, and a hit found by the rule that its groups follow.

Requests to a rank of vLLM that an index knows only in part ask for a full report, as Kvist's router has them ask, and
an engine gets as many requests as it can run. Where events are lost for good, or came before anybody followed, no
replay brings them, and a prompt's blocks become known when it is requested: the second total is without these.

    make engines                    # once: downloads the engines' wheels, keeps their Python files
    python benchmarks/verify_engines.py [--quick] [--save] [--only PART]
"""

from __future__ import annotations

import argparse
import atexit
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import _sglang_cache
import _vllm_manager
import zmq
from _common import report, table
from _engine_files import FOLDER, MISSING, versions
from _engine_followers import SIDES, Healing, IndexService, Stream, free_ports, start_sidecar
from _engine_traffic import Engine, Mix, Prompt, Traffic
from _sglang_cache import SglangEngine, SglangModel
from _vllm_manager import VllmEngine, VllmModel
from _vllm_rule import CountedBlocks

from kvist.events.session import SourceState
from kvist.router.index import RankStatus

NUM_ROUNDS, NUM_STEPS, NUM_PROBES = 60, 24, 10
NUM_LATE_STEPS = 300
MAX_WAITING = 6
"""What a router gives a worker beside what it runs."""
SETTLE_S, LATE_S = 15.0, 0.2
"""How long a side may take to show what was sent; one that never does is given a little while each time."""
PLAIN = Mix()
EVENTS = "events"
VERDICTS = ("probes", "exact", "short", "long", "over a block long", "partial", "blind")
RESET_SHARE = 0.05
"""Of rounds that begin with the cache dropped."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """An engine, what is asked of it, and what happens to it."""

    model: VllmModel | SglangModel
    mix: Mix = PLAIN
    num_ranks: int = 1
    lost: float = 0.0
    """Share of messages that do not arrive."""
    has_replay: bool = True
    is_late: bool = False
    """Whether the engine has served for a while when it is first followed."""
    restarts: float = 0.0
    """Share of rounds that begin with an engine that has just started."""
    is_short: bool = False
    """Whether hits need what an index has no place for: it says so, and nothing that an engine could report helps."""

    @property
    def loses_for_good(self) -> bool:
        """Return whether there are events that no follower can come to know.

        vLLM does not report whether a reset of its GPU's blocks left those in the host's memory.
        """
        is_silent = isinstance(self.model, VllmModel) and not self.model.resets_host
        return is_silent or (not self.has_replay and (self.is_late or self.lost > 0))

    @property
    def has_full_reports(self) -> bool:
        """Return whether requests ask the engine to report again what it has, which who follows has to be told."""
        return self.mix.reported > 0

    @property
    def engine(self) -> str:
        """Return whose cache it is."""
        return "vllm" if isinstance(self.model, VllmModel) else "sglang"

    def start(self, rng: random.Random) -> Engine:
        """Return a rank."""
        return VllmEngine(self.model, rng) if isinstance(self.model, VllmModel) else SglangEngine(self.model, rng)


SCENARIOS = {
    "full attention, blocks of 16": Scenario(VllmModel()),
    "full attention, blocks of 32": Scenario(VllmModel(((32, None),), 90), Mix(aligned=32)),
    "full attention, blocks of 64": Scenario(VllmModel(((64, None),), 60), Mix(aligned=64)),
    "concurrent duplicates": Scenario(VllmModel(), Mix(twice_at_once=0.6)),
    "full + sliding": Scenario(VllmModel(((16, None), (16, 64)), 300)),
    "full + three sliding": Scenario(VllmModel(((16, None), *[(16, 128)] * 3), 600)),
    "two sliding": Scenario(VllmModel(((16, 64), (16, 256)), 300)),
    "sliding only": Scenario(VllmModel(((16, 96),))),
    "EAGLE, last block computed again": Scenario(VllmModel(eagle="drop")),
    "EAGLE, lookahead hashes": Scenario(VllmModel(eagle="lookahead")),
    "full + sliding, EAGLE": Scenario(VllmModel(((16, None), (16, 64)), 300, "drop")),
    "LoRA": Scenario(VllmModel(), Mix(loras=(None, "a", "b"))),
    "cache salts": Scenario(VllmModel(), Mix(salts=(None, "x", "y"))),
    "images": Scenario(VllmModel(num_blocks=220), Mix(images=0.4)),
    "three data-parallel ranks": Scenario(VllmModel(), num_ranks=3),
    "full reports": Scenario(VllmModel(), Mix(reported=0.3)),
    "full + sliding, full reports": Scenario(VllmModel(((16, None), (16, 64)), 300), Mix(reported=0.3)),
    "blocks of 32 full, 16 sliding": Scenario(VllmModel(((32, None), (16, 64)), 300), Mix(aligned=32)),
    "blocks of 64 full, 16 sliding": Scenario(VllmModel(((64, None), (16, 65)), 500), Mix(aligned=64)),
    "blocks of 16 full, 32 sliding": Scenario(VllmModel(((16, None), (32, 128)), 300), Mix(aligned=32)),
    "full + sliding, sparsely kept": Scenario(VllmModel(((16, None), (16, 64)), 300, retention=0)),
    "full attention + states": Scenario(VllmModel(((16, None), (16, 0)), 300)),
    "full attention + states of larger blocks": Scenario(VllmModel(((16, None), (64, 0)), 300)),
    "full attention + states, hits within blocks": Scenario(
        VllmModel(((16, None), (16, 0)), 300, match_unit=8), is_short=True
    ),
    "context parallelism": Scenario(VllmModel(num_context_ranks=2), Mix(aligned=32)),
    "hashes as bytes": Scenario(VllmModel(sends_bytes=True)),
    "offloaded, by hash": Scenario(VllmModel(num_blocks=90, num_host_blocks=260)),
    "offloaded, with tokens": Scenario(VllmModel(num_blocks=90, num_host_blocks=260, describes_host_blocks=True)),
    "offloaded, not reset": Scenario(
        VllmModel(num_blocks=90, num_host_blocks=260, describes_host_blocks=True, resets_host=False)
    ),
    "followed late, replayed": Scenario(VllmModel(), is_late=True),
    "full + sliding, followed late, replayed": Scenario(VllmModel(((16, None), (16, 64)), 300), is_late=True),
    "followed late, not replayed": Scenario(VllmModel(), is_late=True, has_replay=False),
    "the engine restarts": Scenario(VllmModel(), restarts=0.2),
    "messages lost, replayed": Scenario(VllmModel(), lost=0.05),
    "messages lost for good": Scenario(VllmModel(), lost=0.02, has_replay=False),
    "SGLang": Scenario(SglangModel()),
    "SGLang, pages of 64": Scenario(SglangModel(64, 5_120), Mix(aligned=64)),
    "SGLang, EAGLE": Scenario(SglangModel(is_eagle=True)),
    "SGLang, LoRA and salts": Scenario(SglangModel(loras=("a", "b")), Mix(loras=(None, "a"), salts=(None, "x"))),
    "SGLang, HiCache": Scenario(SglangModel(num_tokens=1_600, num_host_tokens=4_096)),
    "SGLang, HiCache of few tokens": Scenario(SglangModel(num_tokens=1_600, num_host_tokens=2_048)),
    "SGLang restarts": Scenario(SglangModel(), restarts=0.2),
    "SGLang, messages lost, replayed": Scenario(SglangModel(), lost=0.05),
    "SGLang, messages lost for good": Scenario(SglangModel(), lost=0.02, has_replay=False),
}
QUICK = ("full attention, blocks of 16", "full + sliding", "EAGLE, lookahead hashes", "cache salts", "SGLang")


class LossyWire:
    """An engine's socket, some of whose messages never arrive."""

    def __init__(self, wire: zmq.Socket[bytes], rng: random.Random) -> None:
        self._wire, self._rng = wire, rng
        self.share = 0.0

    def send_multipart(self, frames: Any) -> None:
        """Send a message, or lose it."""
        if not self.share or self._rng.random() >= self.share:
            self._wire.send_multipart(frames)

    def close(self, linger: int) -> None:
        """Close the socket."""
        self._wire.close(linger)


class Rank:
    """An engine's rank and its publisher."""

    def __init__(self, scenario: Scenario, stream: Stream, number: int, rng: random.Random, healing: Healing) -> None:
        self._scenario, self._stream, self._number, self._rng = scenario, stream, number, rng
        self.traffic, self.healing = Traffic(rng, scenario.mix), healing
        self._start()

    def _start(self) -> None:
        self.engine = self._scenario.start(self._rng)
        model = self._scenario.model
        self._told = CountedBlocks(model) if isinstance(model, VllmModel) else None
        module = _vllm_manager if self._scenario.engine == "vllm" else _sglang_cache
        for num_tries in count():
            try:
                self._publisher = module.publisher(self._stream.port, self._stream.replay_port, self._number)
                break
            except zmq.ZMQError:  # the one before lets go of its ports a little later
                if num_tries == 50:
                    raise
                time.sleep(0.1)
        self._wire = LossyWire(self._publisher._pub, random.Random(self._number))
        self._publisher._pub = self._wire

    def restart(self) -> None:
        """End the engine; another one starts in its place."""
        self.close()
        self._start()

    def run(self, num_steps: int) -> None:
        """Let the engine serve for some steps, and publish what it has to tell of each."""
        self._wire.share = self._scenario.lost
        for _ in range(num_steps):
            if self._rng.random() < 0.7 and self.engine.num_waiting < MAX_WAITING:
                for prompt in self.traffic.request():
                    self.engine.submit(self.healing.send(prompt, self.engine), self._rng.randint(1, 40))
            self.traffic.ended(self.engine.step())
            self._publish(self.engine.take_batch())
        self._await_sent()
        self._wire.share = 0.0

    def mark(self, token_ids: list[int]) -> None:
        """Tell of a block of nobody's."""
        self._publish(self.engine.take_batch())
        self._publish(self.engine.mark(token_ids, random.getrandbits(63)))

    def _publish(self, batch: Any | None) -> None:
        if batch is not None:
            self._publisher.publish(batch)
            if self._told is not None:
                self._told.receive(batch)

    def told_hits(self, prompt: Prompt) -> list[int] | None:
        """Return the hit that the events tell of, on the GPU."""
        if self._told is None or not isinstance(self.engine, VllmEngine):
            return None
        return [self._told.hit(self.engine.wire_hashes(prompt), len(prompt.token_ids))]

    def _await_sent(self) -> None:
        while self._publisher._event_queue.unfinished_tasks:
            time.sleep(0.001)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.shutdown()
        atexit.unregister(self._publisher.shutdown)


class Judge:
    """One scenario, with everyone who follows it."""

    def __init__(self, stack: ExitStack, name: str, services: dict[str, IndexService]) -> None:
        self._scenario, self._services, self._model = SCENARIOS[name], services, name.replace(" ", "-")
        self._rng = random.Random(name)
        scenario = self._scenario
        block_size = scenario.start(self._rng).block_size
        replay_port = free_ports(scenario.num_ranks) if scenario.has_replay else None
        ports, is_dropping = free_ports(scenario.num_ranks + 1), getattr(scenario.model, "eagle", None) == "drop"
        self._stream = Stream(scenario.engine, block_size, scenario.num_ranks, ports, replay_port, is_dropping)
        self._ranks = [
            Rank(scenario, self._stream, number, self._rng, Healing(services["index"], self._model, number))
            for number in range(scenario.num_ranks)
        ]
        self._marks = count(1)
        self._deaf: set[str] = set()
        self.counts = {side: Counter[str]() for side in services}
        for rank in self._ranks:
            stack.callback(rank.close)
            if scenario.is_late:
                rank.run(NUM_LATE_STEPS)
        for side, service in services.items():
            url = start_sidecar(stack, self._stream, scenario.has_full_reports) if side == "sidecar" else None
            for number in range(scenario.num_ranks if url is None else 1):
                service.register(self._model, self._stream, number, url)
            stack.callback(service.unregister, self._model)

    def run(self, num_rounds: int) -> dict[str, Counter[str]]:
        """Let the engines live; return the verdicts by side."""
        self._settle()
        for _ in range(num_rounds):
            for rank in self._ranks:
                if self._rng.random() < self._scenario.restarts:
                    rank.restart()
                elif self._rng.random() < RESET_SHARE:
                    rank.engine.reset()
                rank.run(NUM_STEPS)
            self._settle()
            statuses = {side: service.ranks(self._model) for side, service in self._services.items()}
            for number, rank in enumerate(self._ranks):
                # The index that hears the engine itself counts copies on where blocks may be kept, and asks nothing.
                rank.healing.status = replace(statuses["sidecar"][number], is_counted=self._scenario.is_short)
                for _ in range(NUM_PROBES):
                    self._probe(number, rank, statuses)
        return self.counts

    def _probe(self, number: int, rank: Rank, statuses: dict[str, dict[int, RankStatus]]) -> None:
        prompt, engine = rank.traffic.probe(), rank.engine
        true = engine.hits(prompt)
        told = rank.told_hits(prompt)
        if told is not None:
            self._note(EVENTS, told, true[:1], engine.block_size, is_live=True)
        for side in self._services:
            given = self._ask(side, prompt, engine).get(number, [0] * 3)[: engine.num_tiers]
            status = statuses[side].get(number)
            is_live = status is None or status.state is SourceState.LIVE
            self._note(side, given, true, engine.block_size, is_live=is_live)

    def _note(self, side: str, given: list[int], true: list[int], block_size: int, *, is_live: bool) -> None:
        counts = self.counts.setdefault(side, Counter())
        too_many = max(told - held for told, held in zip(given, true, strict=True))
        verdict = "exact" if given == true else "long" if too_many > 0 else "short"
        counts["probes"] += 1
        counts[verdict] += 1
        if verdict != "exact":
            counts["blind" if is_live else "partial"] += 1
        counts["over a block long"] += too_many > block_size
        counts["hit tokens"] += true[-1]
        counts["missed tokens"] += max(0, true[-1] - given[-1])

    def _ask(self, side: str, prompt: Prompt, engine: Engine) -> dict[int, list[int]]:
        looks_at_last = self._scenario.engine == "vllm"  # for the name of a block that ends before it; SGLang does not
        return self._services[side].ask(self._model, prompt, engine.block_size, engine.names_ahead, looks_at_last)

    def _settle(self) -> None:
        """Return once every side shows a block that each rank told of last, as far as it shows any."""
        for number, rank in enumerate(self._ranks):
            self._settle_rank(number, rank)
        if self._deaf:
            time.sleep(LATE_S)

    def _settle_rank(self, number: int, rank: Rank) -> None:
        started_s = sent_s = time.monotonic() - 1.0
        mark = Prompt((1 << 20 | next(self._marks), *range(1 << 21, (1 << 21) + 80)))
        waiting = [side for side in self._services if side not in self._deaf]
        while waiting:
            now_s = time.monotonic()
            if now_s - sent_s > 0.5:  # again: who has just subscribed may have missed it
                rank.mark([*mark.token_ids])
                sent_s = now_s
            waiting = [side for side in waiting if not self._ask(side, mark, rank.engine).get(number, [0])[0]]
            if now_s - started_s > SETTLE_S:
                self._deaf.update(waiting)
                break
            time.sleep(0.002)
        for side in self._deaf:
            self.counts[side]["deaf"] = 1


def run(names: list[str], num_rounds: int, show: Callable[[str], None]) -> dict[str, dict[str, Counter[str]]]:
    """Run scenarios one after the other; return the verdicts by scenario and side."""
    results = {}
    with ExitStack() as stack:
        services: dict[bool, dict[str, IndexService]] = {}
        for name in names:
            is_told = SCENARIOS[name].has_full_reports
            if is_told not in services:
                services[is_told] = {side: IndexService(stack, side, is_told) for side in SIDES}
            with ExitStack() as scene:
                started_s = time.monotonic()
                results[name] = Judge(scene, name, services[is_told]).run(num_rounds)
                exact = ", ".join(f"{side} {counts['exact']}" for side, counts in results[name].items())
                show(f"{time.monotonic() - started_s:5.1f} s  {name}: exact {exact}")
    return results


def total_of(results: dict[str, dict[str, Counter[str]]]) -> dict[str, Counter[str]]:
    """Return the verdicts of some scenarios by side."""
    return {
        side: sum((sides.get(side, Counter()) for sides in results.values()), Counter()) for side in (*SIDES, EVENTS)
    }


def rows_of(results: dict[str, dict[str, Counter[str]]]) -> list[list[object]]:
    """Return a row a scenario and side."""
    rows: list[list[object]] = []
    told = {name: sides for name, sides in results.items() if not SCENARIOS[name].loses_for_good}
    totals = {"all": results, "all whose events came through": told}
    for name, sides in [*results.items(), *((name, total_of(some)) for name, some in totals.items())]:
        for side, counts in sides.items():
            missed = counts["missed tokens"] / max(1, counts["hit tokens"])
            is_deaf = name not in totals and counts["deaf"]
            rows.append(
                [name, f"{side}, deaf" if is_deaf else side, *(counts[each] for each in VERDICTS), f"{missed:.1%}"]
            )
    return rows


def main() -> None:
    """Judge every scenario and report; says what to do where the engines' files are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few scenarios, a third of the rounds")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    parser.add_argument("--only", metavar="PART", help="only the scenarios whose name contains this")
    args = parser.parse_args()
    if not versions():
        sys.exit(MISSING)
    if not _sglang_cache.HAS_TORCH:
        print("HiCache is left out: it needs torch", file=sys.stderr)
        for name in [name for name in SCENARIOS if "HiCache" in name]:
            del SCENARIOS[name]
    names = [name for name in SCENARIOS if (args.only or "") in name and (args.only or not args.quick or name in QUICK)]
    results = run(names, NUM_ROUNDS // 3 if args.quick else NUM_ROUNDS, lambda line: print(line, file=sys.stderr))
    headers = ["scenario", "side", *VERDICTS, "hit tokens missed"]
    sys.path.append(str(FOLDER))
    facts = {"is_quick": args.quick, "results": results}
    text = f"# What real engines would hit, and what the index says\n\n{table(headers, rows_of(results))}"
    report("verify_engines", text, facts, (*versions(), "pyzmq", "msgspec"), args.save)


if __name__ == "__main__":
    main()
