"""What processes share of loads, tenants and prompts in flight is read right while others write it.

Two processes write to their rows without a pause, and another reads all. Run as a script, this file is one of them.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

import kvist.router.compiled.loops  # noqa: F401 - as fronts do
from kvist.events import WorkerRank
from kvist.router.fleet.board import LoadBoard, board_bytes
from kvist.router.fleet.load import LoadTracker
from kvist.router.policy.decision import Load, Prompt
from kvist.router.policy.settings import PriceSettings
from kvist.router.policy.work import CONTEXT, QUEUED, UNSTREAMED
from kvist.router.tenants.rows import Field

NUM_WRITERS, NUM_RANKS, NUM_PROMPTS, NUM_BLOCKS, BLOCK_SIZE = 2, 4, 8, 8, 256
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
TARGETS = [WorkerRank(f"http://{number}", 0) for number in range(NUM_RANKS)]
IS_OVER_AT = board_bytes(NUM_WRITERS + 1)
"""Behind the board is a number that tells the reader to stop."""


def blocks_of(rank: int, prompt: int) -> NDArray[np.uint64]:
    """Return the blocks of a prompt that only this rank gets; the marks of all prompts share the same few slots."""
    return np.arange(1, NUM_BLOCKS + 1, dtype=np.uint64) | np.uint64(rank + 1 << 40 | prompt + 1 << 20)


class Front:
    """A process that takes requests; the last of them names the columns."""

    def __init__(self, memory: int, front: int) -> None:
        self.memory, self.rng, is_keeper = mmap.mmap(memory, 0), random.Random(front), front == NUM_WRITERS
        board = LoadBoard(self.memory, num_fronts=NUM_WRITERS + 1, names_columns=is_keeper)
        self.tracker = LoadTracker(board, front)
        self.policy = self.tracker.pricing(PriceSettings(), BLOCK_SIZE)
        for target in TARGETS:
            self.tracker.register(target)
        self.columns = np.array([self.tracker.column(target) for target in TARGETS])

    def write(self, number: int) -> None:
        """Take a request from a queue to its end; the numbers of a tenant are equal, and those of the queue's head."""
        rank, tracker, now_s = self.rng.randrange(NUM_RANKS), self.tracker, time.monotonic()
        tracker.set_queue_head(1, number, number, number, now_s)
        tracker.tenants.write("a", Field.AT, *[now_s] * 4)
        tracker.tenants.count("a", 1)
        blocks, is_streamed = blocks_of(rank, self.rng.randrange(NUM_PROMPTS)), self.rng.random() < 0.5
        prices = self.policy.weigh(now_s, NUM_TOKENS, blocks, [0], self.columns[[rank]])
        priced = self.policy.dispatched(now_s, int(self.columns[rank]), prices, 0, is_streamed=is_streamed)
        request = tracker.begin(TARGETS[rank], Prompt(NUM_TOKENS, BLOCK_SIZE), 0, priced)
        request.end_prefill()
        request.on_first_token(now_s + 0.1)
        request.add_tokens(5)
        request.finish(now_s + 0.2, 5)
        tracker.tenants.count("a", -1)

    def read(self, seen: Counter[str]) -> None:
        """Read all once."""
        rank, tracker, now_s = self.rng.randrange(NUM_RANKS), self.tracker, time.monotonic()
        state, head = tracker.tenants.read("a"), tracker.other_queue_head(now_s)
        assert len({*state}) == 1, state
        assert 0 <= tracker.tenants.num_running("a") <= NUM_WRITERS
        seen["heads of which half was another's"] += head is not None and len({*head[:3]}) > 1
        for target in TARGETS:
            load = tracker.load(target)
            assert 0 <= load.running_requests <= NUM_WRITERS
            assert 0 <= load.prefill_tokens <= NUM_WRITERS * NUM_TOKENS
        blocks = blocks_of(rank, self.rng.randrange(NUM_PROMPTS))
        prices = self.policy.weigh(now_s, NUM_TOKENS, blocks, [0] * NUM_RANKS, self.columns)
        assert np.isfinite(prices.cost_s).all()
        assert (prices.load.by_rank >= 0).all()
        seen["rounds"] += 1
        seen["hits"] += bool(prices.cached_tokens[rank])
        seen["hits of another rank's prompt"] += bool(np.delete(prices.cached_tokens, rank).any())

    def run(self, num_rounds: int) -> None:
        """Write for so many rounds; or, the last front, read until it is over."""
        print("ready", flush=True)
        seen = Counter[str]()
        if num_rounds:
            for number in range(num_rounds):
                self.write(number)
        else:
            while not self.memory[IS_OVER_AT]:
                self.read(seen)
        print(json.dumps(seen))


def stress(num_rounds: int) -> dict[str, int]:
    """Return how often the reader saw what."""
    memory, pipe, started = os.memfd_create("rows"), subprocess.PIPE, list[subprocess.Popen[str]]()
    os.ftruncate(memory, IS_OVER_AT + 8)
    try:
        for front in reversed(range(NUM_WRITERS + 1)):  # first who names the columns
            command = [sys.executable, __file__, *map(str, (memory, front, num_rounds * (front < NUM_WRITERS)))]
            started.append(subprocess.Popen(command, pass_fds=(memory,), stdout=pipe, stderr=pipe, text=True))
            assert started[-1].stdout is not None
            assert started[-1].stdout.readline() == "ready\n", started[-1].communicate()
        ended = [(process.communicate(), process.returncode) for process in started[1:]]
        mmap.mmap(memory, 0)[IS_OVER_AT] = 1
        ended.append((started[0].communicate(timeout=60), started[0].returncode))
        front = Front(memory, NUM_WRITERS)
    finally:
        os.close(memory)
        for process in started:
            process.kill()
            process.communicate()
    assert not any(code for _, code in ended), ended
    board = front.tracker.board
    assert [front.tracker.load(target) for target in TARGETS] == [Load()] * NUM_RANKS
    assert not board.work[:, [QUEUED, CONTEXT, UNSTREAMED]].any()
    assert front.tracker.tenants.num_running("a") == 0
    seen: dict[str, int] = json.loads(ended[-1][0][0])
    return seen


def test_what_others_write_is_never_read_by_halves_where_that_matters() -> None:
    seen = stress(5000)
    assert min(seen["rounds"], seen["hits"]) > 0, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_soak_of_shared_rows() -> None:
    print(stress(1_000_000))


if __name__ == "__main__":
    shared, own_number, rounds = map(int, sys.argv[1:])
    Front(shared, own_number).run(rounds)
