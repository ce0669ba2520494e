"""A fleet of engines and both index services that follow it, grown step by step and measured at each size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from _engines import BLOCK_SIZE, Probe, StreamSpec
from _indexers import CANONICAL, SIDES, Indexer, compare, query_of, start_both
from _streams import Publisher

NUM_STEPS_A_CHUNK = 40_000
BLOCKS_A_STEP = 8


@dataclass(frozen=True, slots=True)
class Dump:
    """What reading a whole dump took."""

    seconds: float
    size_bytes: int
    peak_bytes: int
    """Of the service's memory, beyond what it had before."""
    num_changes: int
    waits_ms: list[float]
    """Of queries asked meanwhile."""


class Fleet:
    """Engines with a stream each, 8 new blocks a message; `indexers` hear them, all told the same."""

    def __init__(self, stack: ExitStack, num_workers: int, *, has_canonical: bool = False) -> None:
        forms = dict.fromkeys(SIDES, "map") | ({CANONICAL: "canonical/8"} if has_canonical else {})
        spec = StreamSpec(BLOCKS_A_STEP, forms, num_streams=num_workers, num_open=4)
        self.publisher = stack.enter_context(Publisher(spec))
        self.indexers = start_both(stack, self.publisher.endpoints, list(forms))
        for side in self.indexers:
            self.publisher.call("await_subscribers", side)
        self._before = {side: indexer.memory_bytes()[0] for side, indexer in self.indexers.items()}
        self.num_blocks = 0

    def fill(self, num_blocks: int) -> dict[str, float]:
        """Store blocks, each side in its turn; return the CPU µs a step of an engine, which is a message of it."""
        cpu_s = dict.fromkeys(self.indexers, 0.0)
        num_left = num_blocks // BLOCKS_A_STEP
        while num_left > 0:
            num_steps = min(num_left, NUM_STEPS_A_CHUNK)
            probes, _ = self.publisher.call("make", num_steps)
            num_left -= num_steps
            for side, indexer in self.indexers.items():
                started_s = indexer.cpu_s()
                self.publisher.call("burst", side)
                indexer.await_visible(probes)
                cpu_s[side] += indexer.cpu_s() - started_s
        self.num_blocks += num_blocks
        return {side: seconds / (num_blocks // BLOCKS_A_STEP) * 1e6 for side, seconds in cpu_s.items()}

    def bytes_a_block(self, side: str) -> tuple[float, float]:
        """Return what the process has grown by since its start, now and at its peak."""
        resting, peak = self.indexers[side].memory_bytes()
        return (resting - self._before[side]) / self.num_blocks, (peak - self._before[side]) / self.num_blocks

    def visible_ms(self, side: str, num_events: int) -> list[float]:
        """Return how long single events take from their sending to their being visible."""
        times_ms = []
        for _ in range(num_events):
            probes, _ = self.publisher.call("make", 0, [0])
            time.sleep(0.01)
            self.publisher.begin("mark", side, 0.0, 0)
            visible_s = self.indexers[side].await_visible(probes, poll_s=0.0)
            times_ms.append((visible_s - self.publisher.result()) * 1e3)
        return times_ms

    def num_wrong(self, prompts: list[Probe]) -> int:
        """Return how many of some prompts are not answered as the engines have it, or not alike by all."""
        return len(compare(self.indexers, prompts))

    def dump(self, side: str, num_steps: int = 0, duration_s: float = 0.0, prompts: list[Probe] | None = None) -> Dump:
        """Read a dump, while an engine stores more over some time and prompts are asked again and again."""
        indexer = self.indexers[side]
        if num_steps:
            self.publisher.call("make", num_steps)
        indexer.forget_peak()
        resting, _ = indexer.memory_bytes()
        if num_steps:
            self.publisher.begin("paced", side, duration_s)
        reader = indexer.begin_dump()
        waits_ms = []
        requests = [query_of(prompt.token_ids[: 8 * BLOCK_SIZE]) for prompt in prompts or ()]
        while reader.poll() is None:
            waits_ms += query_times_ms(indexer, requests)
            time.sleep(0.005)
        output, _ = reader.communicate()
        if reader.returncode:
            raise RuntimeError(f"{side}: the dump could not be read")
        _, peak = indexer.memory_bytes()
        if num_steps:
            self.publisher.result()
        size_bytes, seconds = output.split()
        return Dump(float(seconds), int(size_bytes), max(0, peak - resting), num_steps * BLOCKS_A_STEP, waits_ms)

    @contextmanager
    def restored(self, side: str) -> Iterator[Indexer]:
        """Start another service from the dump of one, and let it catch up; `start_s` says when it answered."""
        endpoints = dict(enumerate(self.publisher.endpoints[side], 1))
        indexer = Indexer(side, endpoints, peer=self.indexers[side])
        try:
            self.publisher.call("await_subscribers", side)
            probes, _ = self.publisher.call("make", 0)  # so that every stream proves to go on
            self.publisher.call("burst", side)
            indexer.await_visible(probes)
            yield indexer
        finally:
            indexer.close()


def query_times_ms(indexer: Indexer, requests: list[bytes]) -> list[float]:
    """Return the times of queries, each asked once."""
    times_ms = []
    for request in requests:
        started_s = time.perf_counter()
        indexer.connection.exchange(request)
        times_ms.append((time.perf_counter() - started_s) * 1e3)
    return times_ms


def quantile(values: list[float], share: float) -> float:
    """Return a quantile, of no fewer than one value."""
    return statistics.median(values) if share == 0.5 else sorted(values)[min(int(share * len(values)), len(values) - 1)]
