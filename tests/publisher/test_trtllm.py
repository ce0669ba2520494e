"""TensorRT-LLM is polled: what it hands out is published, and what it dropped is not believed in."""

from __future__ import annotations

import asyncio
import json
from itertools import count

import pytest

from kvist.events import Cleared, Tier
from kvist.events.hashing import block_hashes
from kvist.publisher import AsyncTrtllmPoller, KvEventPublisher, PublisherLimits
from kvist.publisher.trtllm import next_idle_s

CREATED = {"type": "created", "num_blocks_per_cache_level": [8, 0]}


def stored(number: int):
    tokens = [{"token_id": number * 4 + idx, "token_extra_id": 0} for idx in range(4)]
    block = {"block_hash": number, "tokens": tokens, "cache_level": 0, "priority": 35}
    return {"type": "stored", "parent_hash": None, "blocks": [block]}


def held_blocks(*numbers: int):
    return {(int(block_hashes([number * 4 + idx for idx in range(4)], 4)[0]), Tier.GPU) for number in numbers}


@pytest.fixture
def publisher(publication):
    limits = PublisherLimits(coalesce_s=0)
    with KvEventPublisher(publication, worker="w", block_size=4, limits=limits) as publisher:
        yield publisher


def test_the_wait_grows_while_the_engine_is_idle_and_ends_with_data():
    waits_s = [0.0]
    for num_events in (0, 0, 0, 0, 0, 0, 3, 0):
        waits_s.append(next_idle_s(waits_s[-1], num_events))
    assert waits_s[1:] == pytest.approx([0.005, 0.0075, 0.01125, 0.016875, 0.02, 0.02, 0.0, 0.005])


class FakeAsyncLlm:
    """The engine's queue in its event loop, and the one iterator over it, which rests while nothing comes."""

    def __init__(self, timeout_s: float | None = 0.02) -> None:
        self.queue: asyncio.Queue[object] = asyncio.Queue()
        self.num_iterators = 0
        self._timeout_s = timeout_s
        self._event_ids = count()

    def hands_out(self, *items: object) -> None:
        for item in items:
            self.queue.put_nowait(item)

    def happens(self, *data: object, window: int = 4096) -> None:
        self.hands_out(*({"event_id": next(self._event_ids), "data": each, "window_size": window} for each in data))

    def events(self):
        self.num_iterators += 1
        return self

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            async with asyncio.timeout(self._timeout_s):
                item = await self.queue.get()
        except TimeoutError:
            raise StopAsyncIteration from None
        if isinstance(item, Exception):
            raise item
        return item


RECORDED = [
    json.loads(line)
    for line in (
        '{"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [101, 0]}, "window_size": 512}',
        '{"event_id": 1, "data": {"type": "created", "num_blocks_per_cache_level": [77, 0]}, "window_size": 4096}',
        '{"event_id": 2, "data": {"type": "stored", "parent_hash": null, "blocks": [{"type": "stored_block", '
        '"block_hash": 1, "tokens": [{"type": "unique_token", "token_id": 4, "token_extra_id": 0}, {"type": '
        '"unique_token", "token_id": 5, "token_extra_id": 0}, {"type": "unique_token", "token_id": 6, '
        '"token_extra_id": 0}, {"type": "unique_token", "token_id": 7, "token_extra_id": 0}], "cache_level": 0, '
        '"priority": 35, "mm_keys": []}]}, "window_size": 4096, "attention_dp_rank": 0}',
        '{"event_id": 3, "data": {"type": "updated", "block_hash": 1, "cache_level": null, "priority": '
        '{"type": "event_diff", "new_value": 30, "old_value": 35}}, "window_size": 4096}',
    )
]
"""What the engine's serialiser makes of its events: two layer groups, a block, and a change of its priority."""


async def test_events_are_reported_as_they_come_and_the_iterator_is_asked_for_anew(publisher, publication, until):
    llm = FakeAsyncLlm()
    async with AsyncTrtllmPoller(llm.events, publisher, block_size=4) as poller:
        llm.hands_out(*RECORDED)
        await until(lambda: publication.held() == held_blocks(1))
        await until(lambda: llm.num_iterators > 2)
        llm.hands_out({"event_id": 4, "data": {"type": "removed", "block_hashes": [1]}, "window_size": 4096})
        await until(lambda: publication.held() == set())
    assert (poller.num_gaps, poller.num_malformed) == (0, 0)


async def test_the_largest_windows_blocks_are_published_in_order(publisher, publication, until):
    llm = FakeAsyncLlm()
    async with AsyncTrtllmPoller(llm.events, publisher, block_size=4):
        llm.happens(CREATED, window=512)
        llm.happens(CREATED, window=4096)
        llm.happens(stored(1), window=512)
        llm.happens(stored(2), stored(3))
        await until(lambda: publication.held() == held_blocks(2, 3))
        llm.happens({"type": "removed", "block_hashes": [2]})
        await until(lambda: publication.held() == held_blocks(3))


async def test_malformed_events_are_counted_and_the_others_published(publisher, publication, until, caplog):
    llm = FakeAsyncLlm()
    async with AsyncTrtllmPoller(llm.events, publisher, block_size=4) as poller:
        llm.happens("nonsense", {"type": "stored"}, stored(1))
        await until(lambda: publication.held() == held_blocks(1))
        llm.happens("nonsense", stored(2))
        await until(lambda: publication.held() == held_blocks(1, 2))
    assert poller.num_malformed == 3
    assert caplog.text.count("malformed events skipped") == 1


async def test_an_engine_that_has_no_queue_before_its_first_request_is_waited_for(
    publisher, publication, until, caplog
):
    llm = FakeAsyncLlm()
    has_request = asyncio.Event()

    def events():
        assert has_request.is_set(), "KV Event IterationResult is not properly instantiated."
        return llm.events()

    caplog.set_level("INFO")
    async with AsyncTrtllmPoller(events, publisher, block_size=4):
        await until(lambda: "no events before the engine's first request" in caplog.text)
        llm.happens(stored(1))
        has_request.set()
        await until(lambda: publication.held() == held_blocks(1))
    assert caplog.text.count("no events before the engine's first request") == 1


async def test_an_iterator_may_bring_lists_of_events(publisher, publication, until):
    llm = FakeAsyncLlm()
    async with AsyncTrtllmPoller(llm.events, publisher, block_size=4):
        llm.hands_out(RECORDED, [])
        await until(lambda: publication.held() == held_blocks(1))


async def test_a_gap_in_the_engines_numbers_clears_the_rank(publisher, publication, until):
    llm = FakeAsyncLlm()
    async with AsyncTrtllmPoller(llm.events, publisher, block_size=4) as poller:
        llm.hands_out(*RECORDED)
        await until(lambda: publication.held() == held_blocks(1))
        llm.hands_out({"event_id": 9, "data": stored(2), "window_size": 4096})
        await until(lambda: publication.held() == held_blocks(2))
    assert poller.num_gaps == 1


@pytest.mark.parametrize("error", [IndexError("empty"), asyncio.QueueEmpty()])
async def test_an_empty_queue_is_no_failure_however_the_engine_says_so(publisher, publication, until, error):
    llm = FakeAsyncLlm()
    async with AsyncTrtllmPoller(llm.events, publisher, block_size=4):
        llm.hands_out(error, *RECORDED)
        await until(lambda: publication.held() == held_blocks(1))


async def test_what_the_engine_still_hands_out_is_reported_before_closing_ends(publisher, publication):
    llm = FakeAsyncLlm()
    async with AsyncTrtllmPoller(llm.events, publisher, block_size=4):
        await asyncio.sleep(0)
        llm.hands_out(*RECORDED)
    publisher.close()
    assert publication.held() == held_blocks(1)


async def test_an_iterator_that_never_ends_does_not_hold_up_closing(publisher, publication, until, monkeypatch):
    monkeypatch.setattr("kvist.publisher.trtllm.CLOSE_TIMEOUT_S", 0.05)
    llm = FakeAsyncLlm(timeout_s=None)
    async with asyncio.timeout(60), AsyncTrtllmPoller(llm.events, publisher, block_size=4):
        llm.hands_out(*RECORDED)
        await until(lambda: publication.held() == held_blocks(1))
    assert Cleared() not in publication.events()


async def test_an_engine_that_fails_is_published_as_cleared_and_close_raises_its_error(publisher, publication, until):
    llm = FakeAsyncLlm()
    poller = AsyncTrtllmPoller(llm.events, publisher, block_size=4)
    await poller.__aenter__()
    llm.hands_out(*RECORDED)
    await until(lambda: publication.held() == held_blocks(1))
    llm.hands_out(RuntimeError("engine is gone"))
    await until(lambda: Cleared() in publication.events())
    with pytest.raises(RuntimeError, match="engine is gone"):
        await poller.close()
    await poller.close()
