"""Sockets that are read together, against the bytes that were sent to each."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator

import pytest

from kvist.events.transports.zmtp import Reads


class End:
    """One end of a pair, which is read through `reads`, `at_most` bytes at a time; the test writes to the other."""

    def __init__(self, reads: Reads, at_most: int = 64) -> None:
        self._reads, self._at_most = reads, at_most
        self.other, self._sock = socket.socketpair()
        self._sock.setblocking(False)
        self.received = b""
        self.num_calls = 0
        self.is_broken = False
        self.add()

    def add(self) -> None:
        self._reads.add(self._sock.fileno(), self.read)

    def remove(self) -> None:
        self._reads.remove(self._sock.fileno())

    def read(self) -> bool:
        self.num_calls += 1
        if self.is_broken:
            self.remove()
            raise RuntimeError("a bug")
        try:
            piece = self._sock.recv(self._at_most)
        except BlockingIOError:
            return False
        self.received += piece
        return len(piece) == self._at_most

    def close(self) -> None:
        self.remove()
        self._sock.close()
        self.other.close()


@pytest.fixture
async def reads() -> AsyncIterator[Reads]:
    reads = Reads(0.01)
    yield reads
    reads.close()


@pytest.mark.parametrize("seed", range(5))
async def test_every_byte_is_read_whoever_comes_goes_or_pauses(reads, until, seed):
    rng = random.Random(seed)
    ends, sent, paused = [End(reads, rng.choice([1, 7, 64])) for _ in range(100)], {}, set()
    for _ in range(400):
        end = rng.choice(ends)
        match rng.choice(["send"] * 6 + ["pause", "resume", "replace", "wait"]):
            case "send":
                piece = rng.randbytes(rng.choice([1, 20, 300]))
                end.other.send(piece)
                sent[end] = sent.get(end, b"") + piece
            case "pause" if end not in paused:
                end.remove()
                paused.add(end)
            case "resume" if end in paused:
                end.add()
                paused.discard(end)
            case "replace" if end not in paused:
                end.close()  # its descriptor is likely to be that of the new one
                sent.pop(end, None)
                ends[ends.index(end)] = End(reads)
            case "wait":
                await asyncio.sleep(rng.choice([0, 0.001, 0.02]))
    for end in paused:
        end.add()
    await until(lambda: all(end.received == sent.get(end, b"") for end in ends))
    for end in ends:
        end.close()


async def test_what_comes_for_many_within_the_delay_is_read_in_one_go(reads, until):
    ends = [End(reads) for _ in range(20)]
    loop, num_reads = asyncio.get_running_loop(), 0
    select = reads._selector.select

    def counting(timeout):
        nonlocal num_reads
        num_reads += 1
        return select(timeout)

    reads._selector.select = counting
    began_s = loop.time()
    for number in range(500):
        ends[number % 20].other.send(b"x")
        await asyncio.sleep(0.0002)
    await until(lambda: sum(len(end.received) for end in ends) == 500)
    # Each beat reads once, and asks once in vain when nothing has come for a while; starting to wait asks, too.
    assert num_reads <= 2 * ((loop.time() - began_s) / 0.01 + 2)
    for end in ends:
        end.close()


async def test_a_lone_arrival_is_read_without_delay(until):
    reads = Reads(1e6)  # longer than a test waits
    end = End(reads)
    await until(lambda: reads._is_watching)
    end.other.send(b"x")
    await until(lambda: end.received == b"x")
    end.close()
    reads.close()


async def test_those_who_always_have_more_do_not_keep_others_from_being_read(reads, until):
    busy = [End(reads, at_most=1) for _ in range(100)]
    for end in busy:
        end.other.send(bytes(5_000))
    lone = End(reads)
    lone.other.send(b"x")
    await until(lambda: lone.received == b"x")
    assert min(end.num_calls for end in busy) >= max(end.num_calls for end in busy) - 2
    for end in (*busy, lone):
        end.close()


async def test_a_bug_in_one_reader_stops_no_other(reads, until):
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
    broken, well = End(reads), End(reads)
    broken.is_broken = True
    broken.other.send(b"x")
    await until(lambda: seen)
    well.other.send(b"x")
    await until(lambda: well.received == b"x")
    assert [str(error) for error in seen] == ["a bug"]
    well.close()
    for sock in (broken.other, broken._sock):
        sock.close()
