"""Loops of decisions say the same compiled and plain, and leave the same behind."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvist.router.compiled import loops
from kvist.router.policy.in_flight import NUM_SLOTS, SLOT
from kvist.router.policy.work import NUM_FIELDS

NUM_RANKS = 12


def both(function: Any) -> tuple[Any, Any]:
    return function.py_func, function


@pytest.mark.parametrize("seed", range(10))
def test_marks_of_prompts_in_flight(seed: int) -> None:
    random = Random(seed)
    memories = [np.zeros((2, NUM_SLOTS + 1), SLOT) for _ in range(2)]
    plain, compiled = (memory[:, :NUM_SLOTS] for memory in memories)  # rows of the board lie apart
    add, settle, read = both(loops.add_marks), both(loops.settle_marks), both(loops.read_depths)
    depths, columns, added = np.arange(1, 9), np.full(NUM_RANKS, -1), []
    for step in range(1, 80):
        # Some are in the same slot.
        marks = np.array([random.randrange(6) + NUM_SLOTS * random.randrange(2) for _ in range(8)], np.uint64)
        row, rank, until_s = random.randrange(2), random.randrange(NUM_RANKS), float(step + random.randrange(20))
        for each, table in zip(add, (plain, compiled), strict=True):
            each(table[row], marks, rank, until_s, float(step), float(step % 2))
        added.append((row, marks, rank, until_s))
        if random.random() < 0.5:
            row, *of = added.pop(random.randrange(len(added)))
            for each, table in zip(settle, (plain, compiled), strict=True):
                each(table[row], *of, step + 3.0)
        assert plain.tobytes() == compiled.tobytes()
        ranks = np.array(random.sample(range(NUM_RANKS), random.randrange(1, NUM_RANKS)))
        found = [np.arange(len(ranks)) % 3 for _ in range(2)]
        num_requests = np.zeros((2, len(marks)))
        for each, table, *into in zip(read, (plain, compiled), found, num_requests, strict=True):
            each(table, marks, depths, float(step), columns, ranks, *into)
            assert (columns == -1).all()
        assert found[0].tolist() == found[1].tolist()
        assert num_requests[1] == pytest.approx(num_requests[0])
    assert not any(memory[:, NUM_SLOTS:]["hash"].any() for memory in memories)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_work(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    rows = numbers.exponential(100.0, (3, NUM_FIELDS, NUM_RANKS)) * numbers.integers(0, 2, (3, NUM_FIELDS, NUM_RANKS))
    ranks = numbers.permutation(NUM_RANKS)[:5]
    found = np.empty((2, 4, len(ranks)))
    plain, compiled = (
        each(rows, ranks, 500.0, 40e-6, into) for each, into in zip(both(loops.read_rows), found, strict=True)
    )
    assert compiled == pytest.approx(plain)
    assert found[1] == pytest.approx(found[0])


@pytest.mark.parametrize("seed", range(10))
def test_costs_of_ranks(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    work = numbers.exponential(1.0, (4, NUM_RANKS)) * np.array([[1.0], [40e-6], [1e5], [1e4]])
    held = np.sort(numbers.integers(0, 40, (NUM_RANKS, 2)), axis=1)
    running = np.maximum(held[:, 0], numbers.integers(0, 40, NUM_RANKS))
    marked = np.arange(2, 2 + 2 * int(numbers.integers(0, 15)), 2)
    num_requests = np.sort(numbers.exponential(20.0, len(marked)))[::-1].copy()
    weighed, cached = np.empty((2, 5, NUM_RANKS)), np.empty((2, NUM_RANKS), np.int64)
    weights = (1.5e-5, 1.0, 0.8, 0.5)
    for each, *into in zip(both(loops.weigh_ranks), weighed, cached, strict=True):
        query = (work, running, marked, num_requests, 50.0, held, np.array([1.0, 0.75]), 30, 128, 4000)
        each(*query, *weights, *into)
    assert weighed[1] == pytest.approx(weighed[0])
    assert cached[1].tolist() == cached[0].tolist()
    _, compute, _, *parts = weighed[0]
    for part in parts:
        assert (part >= 0).all()
        assert (part <= compute).all()
