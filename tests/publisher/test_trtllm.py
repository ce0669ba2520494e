"""TensorRT-LLM is polled: what it hands out is published, and what it dropped is not believed in."""

from __future__ import annotations

import threading

import pytest

from kvist.events import Cleared, Tier
from kvist.events.hashing import block_hashes
from kvist.publisher import KvEventPublisher, PublisherLimits, TrtllmPoller
from kvist.publisher.trtllm import next_idle_s


class FakeLlm:
    """An engine that hands out what it is told to, once, or raises it."""

    def __init__(self) -> None:
        self._waiting: list[object] = []
        self._lock = threading.Lock()
        self._next_event_id = 0

    def happens(self, *data, window: int = 4096) -> None:
        with self._lock:
            for each in data:
                self._waiting.append({"event_id": self._next_event_id, "data": each, "window_size": window})
                self._next_event_id += 1

    def drops(self) -> None:
        self._next_event_id += 1

    def breaks(self) -> None:
        with self._lock:
            self._waiting.append(RuntimeError("engine is gone"))

    def poll(self):
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            if isinstance(each, Exception):
                raise each
        return waiting


CREATED = {"type": "created", "num_blocks_per_cache_level": [8, 0]}


def stored(number: int):
    tokens = [{"token_id": number * 4 + idx, "token_extra_id": 0} for idx in range(4)]
    block = {"block_hash": number, "tokens": tokens, "cache_level": 0, "priority": 35}
    return {"type": "stored", "parent_hash": None, "blocks": [block]}


def held_blocks(*numbers: int):
    return {(int(block_hashes([number * 4 + idx for idx in range(4)], 4)[0]), Tier.GPU) for number in numbers}


@pytest.fixture
def llm():
    return FakeLlm()


@pytest.fixture
def publisher(publication):
    limits = PublisherLimits(coalesce_s=0)
    with KvEventPublisher(publication, worker="w", block_size=4, limits=limits) as publisher:
        yield publisher


def test_the_largest_windows_blocks_are_published_in_order(llm, publisher, publication, until_true):
    llm.happens(CREATED, window=512)
    llm.happens(CREATED, window=4096)
    with TrtllmPoller(llm.poll, publisher, block_size=4) as poller:
        llm.happens(stored(1), window=512)
        llm.happens(stored(2), stored(3))
        until_true(lambda: publication.held() == held_blocks(2, 3))
        llm.happens({"type": "removed", "block_hashes": [2]})
        until_true(lambda: publication.held() == held_blocks(3))
        llm.happens(stored(4))
    until_true(lambda: publication.held() == held_blocks(3, 4))
    assert (poller.num_gaps, poller.num_malformed) == (0, 0)


def test_events_that_the_engine_dropped_clear_the_rank(llm, publisher, publication, until_true):
    with TrtllmPoller(llm.poll, publisher, block_size=4) as poller:
        llm.happens(stored(1))
        until_true(lambda: publication.held() == held_blocks(1))
        llm.drops()
        llm.happens(stored(2))
        until_true(lambda: publication.held() == held_blocks(2))
    assert poller.num_gaps == 1


def test_malformed_events_are_counted_and_the_others_published(llm, publisher, publication, until_true, caplog):
    with TrtllmPoller(llm.poll, publisher, block_size=4) as poller:
        llm.happens("nonsense", {"type": "stored"}, stored(1))
        until_true(lambda: publication.held() == held_blocks(1))
        llm.happens("nonsense", stored(2))
        until_true(lambda: publication.held() == held_blocks(1, 2))
    assert poller.num_malformed == 3
    assert caplog.text.count("malformed events skipped") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_is_published_as_cleared_and_close_raises_its_error(
    llm, publisher, publication, until_true
):
    poller = TrtllmPoller(llm.poll, publisher, block_size=4)
    llm.happens(stored(1))
    until_true(lambda: publication.held() == held_blocks(1))
    llm.breaks()
    until_true(lambda: Cleared() in publication.events())
    with pytest.raises(RuntimeError, match="engine is gone"):
        poller.close()
    poller.close()


def test_the_wait_grows_while_the_engine_is_idle_and_ends_with_data():
    waits_s = [0.0]
    for num_events in (0, 0, 0, 0, 0, 0, 3, 0):
        waits_s.append(next_idle_s(waits_s[-1], num_events))
    assert waits_s[1:] == pytest.approx([0.005, 0.0075, 0.01125, 0.016875, 0.02, 0.02, 0.0, 0.005])
