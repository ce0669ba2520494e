"""No reader in another process sees half a change, whatever happens to the streams that the index is written from.

A process plays fault histories without a pause, with the index in shared memory, as a router's keeper has it; others
match there all the time, as its fronts do. After many of its changes the writer notes what it finds itself: whoever
matches at that generation must find the same. Run as a script, this file is one of these processes.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvist.radix import RadixIndex, RadixReader
from kvist.radix.memory import index_bytes

SEGMENT_BITS, NUM_PROMPTS, NUM_NOTES, NUM_SAMPLES = 1, 16, 1 << 16, 400
NOTE = np.dtype([("generation", "i8"), ("digests", "u8", NUM_PROMPTS)])
"""What each prompt's match finds at a generation."""
NOTES_AT = index_bytes(SEGMENT_BITS)
NUM_OPEN = 50
"""Indexes whose file is still open once there are newer ones: readers may be about to open it."""
OVER, NUM_READERS = -1, 2


def prompts() -> list[Any]:
    from fault_harness.engine import MAX_DEPTH, NUM_BRANCHES, Path, canonical

    rng = random.Random(5)
    paths = [
        (rng.choice((None, None, "sql")), rng.choices(range(NUM_BRANCHES), k=MAX_DEPTH)) for _ in range(NUM_PROMPTS)
    ]
    return [
        np.array([canonical(Path(name, tuple(steps[:depth]))) for depth in range(1, MAX_DEPTH + 1)], np.uint64)
        for name, steps in paths
    ]


def digest_of(depths: Iterable[tuple[int | None, Iterable[int]]]) -> int:
    found = sorted((clearing, *map(int, each)) for clearing, each in depths)
    return xxh3_64_intdigest(repr(found).encode())


class NotedIndex(RadixIndex):
    """An index in shared memory that notes what matches find after a part of its changes.

    With `is_silent` readers are not told of some changes: what they then find must not pass.
    """

    def __init__(self, writer: Writer, **options: Any) -> None:
        self._writer, self._file = writer, os.memfd_create("index")
        os.ftruncate(self._file, NOTES_AT + NUM_NOTES * NOTE.itemsize)
        memory = mmap.mmap(self._file, 0)
        super().__init__(segment_bits=SEGMENT_BITS, memory=memory, **options)
        self._notes = np.frombuffer(memory, NOTE, NUM_NOTES, NOTES_AT)
        self._told, self.writing = self.writing, self  # type: ignore[assignment]
        self._is_told = True
        writer.show(self._file)

    def __enter__(self) -> None:
        self._is_told = not self._writer.is_silent or self._writer.rng.random() < 0.9
        if self._is_told:
            self._told.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._is_told:
            self._told.__exit__()
            self._writer.num_changes += 1
            if self._writer.rng.random() < 0.3:
                self._note()

    def _note(self) -> None:
        generation = int(self.core["generation"][0])
        note = self._notes[generation // 2 % NUM_NOTES]
        for idx, hashes in enumerate(self._writer.prompts):
            found = self.match(hashes).items()
            note["digests"][idx] = digest_of((self.clearing_of(rank), depths) for rank, depths in found)
        note["generation"] = generation
        self._writer.num_notes += 1


class Writer:
    """Plays histories one after another; `shown` has the number of the newest index, its file, and whose file it is."""

    def __init__(self, shown: int, *, is_silent: bool) -> None:
        self.is_silent, self.rng, self.prompts = is_silent, random.Random(1), prompts()
        self.num_changes = self.num_notes = 0
        self._shown, self._files = np.frombuffer(mmap.mmap(shown, 0), np.int64), deque[int]()
        self._shown[2] = os.getpid()

    def show(self, file: int) -> None:
        self._files.append(file)
        self._shown[1] = file
        self._shown[0] += 1
        if len(self._files) > NUM_OPEN:
            os.close(self._files.popleft())

    def run(self, seeds: range) -> None:
        from fault_harness.fleet import Tally
        from fault_harness.plan import plan_of
        from fault_harness.play import play

        tally = Tally()
        with mock.patch("fault_harness.play.RadixIndex", partial(NotedIndex, self)):
            for seed in seeds:
                tally.add(play(plan_of(seed, ("embedded", "stock", "sidecar"))))
        self._shown[0] = OVER
        played = {"histories": tally.num_histories, "faults": sum(tally.faults.values())}
        print(json.dumps(played | {"changes": self.num_changes, "notes": self.num_notes}))


class Generations:
    """The generation as a reader sees it: how often it looked, and what it saw last."""

    def __init__(self, generation: Any) -> None:
        self._generation = generation
        self.num_looks = self.last = 0

    def __getitem__(self, idx: int) -> int:
        self.num_looks += 1
        self.last = int(self._generation[idx])
        return self.last


def read(shown_file: int) -> None:
    """Match all the time, in the newest index; ends with an AssertionError at an answer that its generation has not."""
    shown, asked, counts = np.frombuffer(mmap.mmap(shown_file, 0), np.int64), prompts(), Counter[str]()
    rng, number = random.Random(os.getpid()), 0
    print("reads", flush=True)
    while shown[0] == 0:
        time.sleep(0.001)
    while shown[0] != OVER:
        if number != shown[0]:
            number = int(shown[0])
            with Path(f"/proc/{shown[2]}/fd/{shown[1]}").open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            reader, notes = RadixReader(memory), np.frombuffer(memory, NOTE, NUM_NOTES, NOTES_AT)
            reader._generation = looks = Generations(reader._generation)  # type: ignore[assignment]
            counts["indexes"] += 1
        samples = []
        for _ in range(NUM_SAMPLES):
            idx, num_looks = rng.randrange(NUM_PROMPTS), looks.num_looks
            found = reader.match(asked[idx], len(asked[idx]))
            counts["retries"] += looks.num_looks - num_looks > 2
            counts["disturbed" if found is None else "matches"] += 1
            if found is not None:
                samples.append((looks.last, idx, digest_of(found.items())))
                counts["hits"] += bool(found)
        for generation, idx, digest in samples:
            note = notes[generation // 2 % NUM_NOTES]
            if note["generation"] == generation > 0:
                assert note["digests"][idx] == digest, (number, generation, idx)
                counts["compared"] += 1
    print(json.dumps(counts))


def stress(seeds: range, *, is_silent: bool = False) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Return what the writer did, and what each reader found."""
    shown = os.memfd_create("shown")
    os.ftruncate(shown, mmap.PAGESIZE)
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}

    def start(*arguments: object) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, __file__, *map(str, arguments)], subprocess.PIPE
        return subprocess.Popen(command, pass_fds=(shown,), stdout=pipe, stderr=pipe, text=True, env=environment)

    started = [start("read", shown) for _ in range(NUM_READERS)]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "reads\n", process.communicate()
        writer = start("write", shown, seeds.start, seeds.stop, int(is_silent))
        started.insert(0, writer)
        wrote = writer.communicate()
        assert writer.returncode == 0, wrote
        found = [process.communicate(timeout=60) for process in started[1:]]
    finally:
        os.close(shown)
        for process in started:
            process.kill()
            process.communicate()
    errors = [error for (_, error), process in zip(found, started[1:], strict=True) if process.returncode]
    if errors:
        raise AssertionError("\n".join(errors))
    return json.loads(wrote[0]), [json.loads(text) for text, _ in found]


def test_no_reader_sees_half_a_change_while_streams_fail(seeds: range | None) -> None:
    wrote, found = stress(seeds or range(30))
    assert wrote["faults"] > 0
    for counts in found:
        assert min(counts["compared"], counts["hits"]) > 0, counts


def test_a_change_of_which_readers_are_not_told_is_found() -> None:
    with pytest.raises(AssertionError, match=r"AssertionError: \("):
        stress(range(30), is_silent=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_soak_of_readers(seeds: range | None) -> None:
    print(*stress(seeds or range(100_000, 106_000)), sep="\n")


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    role, shown_file, *rest = sys.argv[1], *map(int, sys.argv[2:])
    if role == "write":
        Writer(shown_file, is_silent=rest[2] == 1).run(range(*rest[:2]))
    else:
        read(shown_file)
