"""A vLLM worker whose events were lost is asked to report what it finds cached, and left alone once that is known."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events import Batch, Heartbeat, WorkerRank
from kvist.events.codec import encode_batch
from kvist.events.dialects.block_events import REPORT_SESSION
from kvist.events.session import SourceState
from kvist.events.transports import Message, open_publication
from kvist.openai.requests import read_fields, without_field
from kvist.router import healing
from kvist.router.healing import REPORT_MODE, Healer, ask_full_report
from kvist.router.index import RankStatus
from kvist.router.metrics import RouterMetrics
from kvist.router.prompts import ParsedRequest
from kvist.router.usage import ReportedUsage

FULL = {"kv_cache_report_mode": "full"}
VLLM = [{"id": "m", "object": "model", "owned_by": "vllm"}]
PROMPT = list(range(33))


def block(number: int) -> list[int]:
    return [100 * number + idx for idx in range(16)]


@pytest.mark.parametrize("body", [b"", b'{"vllm_xargs": null}', b'{"vllm_xargs": [1]}', b'{"session_id": "mine"}'])
def test_a_body_that_is_empty_or_has_its_own_way_stays_as_it_is(body):
    assert ask_full_report(body, read_fields(body)) is body


def test_what_else_a_body_says_is_as_it_came():
    body = b' {"prompt": "\\u00e9", "n" : 1.0, "vllm\\u005fxargs": {"x": 123456789012345678901}}'
    asking = (
        b'{"prompt":"\\u00e9","n":1.0,"vllm_xargs":{"x":123456789012345678901,"kv_cache_report_mode":"full"},'
        b'"session_id":"kvist-full-report"}'
    )
    assert ask_full_report(body, read_fields(body)) == asking


@pytest.mark.parametrize(
    "body", [b"", b'{"vllm_xargs": {"x": 1}}', b'{"vllm_xargs": 3}', b'{"kv_cache_report_mode": 1}']
)
def test_a_body_that_says_nothing_of_reports_is_the_very_same(body):
    assert without_field(body, read_fields(body), *REPORT_MODE) is body


def test_what_a_client_says_of_reports_is_left_out_and_nothing_else():
    said = {"vllm_xargs": {"x": 1.0, **FULL}, "prompt": "é", "n": 123456789012345678901}
    body = json.dumps(said, ensure_ascii=False).encode()
    assert json.loads(without_field(body, read_fields(body), *REPORT_MODE)) == said | {"vllm_xargs": {"x": 1.0}}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), _JSON), st.none() | st.dictionaries(st.text(max_size=5), _JSON, max_size=2))
def test_any_object_is_the_same_but_for_the_argument(fields, arguments):
    sent: dict[str, Any] = fields if arguments is None else fields | {"vllm_xargs": arguments}
    received = json.loads(ask_full_report(json.dumps(sent, indent=1).encode(), sent))
    assert received.pop("vllm_xargs") == (arguments or {}) | FULL
    assert received.pop("session_id") == REPORT_SESSION
    assert received == {name: value for name, value in sent.items() if name != "vllm_xargs"}


@pytest.fixture(autouse=True)
def fresh_ranks(monkeypatch):
    """Let the router know each rank as it is now, not as it was a moment ago."""
    monkeypatch.setattr("kvist.router.fleet.fleet.RANKS_MAX_AGE_S", -1.0)


@pytest.fixture
def engine(start_vllm, free_port):
    """An engine that keeps two messages for replay."""
    engine = start_vllm(free_port(), num_kept=2)
    engine.store(1, block(1))
    return engine


async def lose(engine, front, url: str) -> None:
    """Have the engine lose more than it keeps, and the router notice."""
    number = engine.next_sequence + 1
    for lost in range(3):
        engine.store(number + lost, block(number + lost), is_lost=True)
    engine.store(number + 3, block(number + 3))
    await front.until_overlap(url, [*block(number + 3), 0], 1)
    assert await state_of(front, url) == ["partial"]


async def state_of(front, url: str) -> list[str]:
    """Return the states of the worker's ranks, as the router knows them from now on."""
    return [rank["state"] for rank in (await front.workers())[url]["kv_events"]["ranks"]]


def asked(worker) -> list[bool]:
    """Return, for each request the worker got, whether it asked for a full report."""
    return [json.loads(received.body).get("vllm_xargs") == FULL for received in worker.completions]


@pytest.fixture
def vllm(worker, engine, http_bytes):
    """A worker and its engine, as vLLM is: caches what it computed, tells what it hits, reports it again if asked."""
    one = worker(models=VLLM)
    one.cache = Cache(engine)

    async def answer(received, writer):
        body = json.loads(received.body)
        num_cached_tokens = one.cache.serve(body["prompt"], is_full=body.get("vllm_xargs") == FULL)
        writer.write(http_bytes.response(http_bytes.completion(num_cached_tokens)))

    one.answer = answer
    return one


class Cache:
    """The prefix cache of a vLLM process; `unreported` are blocks that are hit and of which no event tells."""

    def __init__(self, engine) -> None:
        self.held: set[tuple[int, ...]] = set()
        self.unreported: set[tuple[int, ...]] = set()
        self._engine = engine

    def serve(self, prompt: list[int], *, is_full: bool) -> int | None:
        """Cache a prompt; return how many tokens of it were cached, None for none, as vLLM tells it."""
        prefixes = [tuple(prompt[:end]) for end in range(16, len(prompt), 16)]
        num_hits = next((idx for idx, prefix in enumerate(prefixes) if prefix not in self.held), len(prefixes))
        for idx, prefix in enumerate(prefixes):
            if prefix not in self.unreported and (idx >= num_hits or is_full):
                self.store(prefix)
        return 16 * num_hits or None

    def store(self, prefix: tuple[int, ...], *, is_lost: bool = False) -> None:
        parent = hash(prefix[:-16]) & _U64 if len(prefix) > 16 else None
        self._engine.store(hash(prefix) & _U64, list(prefix[-16:]), parent, is_lost=is_lost)
        self.held.add(prefix)


_U64 = (1 << 64) - 1


def chat(number: int, num_turns: int) -> list[int]:
    """Return a prompt that begins as the chat's earlier ones do: two blocks a turn behind a common one, and a token."""
    return [*block(0), *(token for turn in range(num_turns) for token in (*block(1000 * number + turn), *block(7))), 1]


async def predicted(front, url: str, prompt: list[int]) -> int:
    candidates = (await front.explain(prompt))["candidates"]
    return next(16 * each["overlap_blocks"]["gpu"] for each in candidates if each["worker"] == url)


async def until_partial(front, url: str) -> None:
    async def is_so() -> bool:
        return await state_of(front, url) == ["partial"]

    await front.until(is_so)


async def ask_until_it_ends(front, one, prompts: list[list[int]]) -> int:
    """Send the prompts in turn until one does not ask; return how many did."""
    num_before = len(one.completions)
    for num_asked in range(200):
        prompt = prompts[num_asked % len(prompts)]
        await front.complete(prompt)
        if not asked(one)[-1]:
            return num_asked
    raise AssertionError(f"healing never ends: {sum(asked(one)[num_before:])} full reports")


async def test_healing_ends_once_the_index_predicts_all_that_the_engine_has_of_the_prompts(
    vllm, router, engine, monkeypatch, caplog, logged
):
    caplog.set_level("INFO", "kvist.router.healing")
    monkeypatch.setattr(healing, "NUM_UNCHANGED_IN_A_ROW", 8)
    prompts = [chat(number, num_turns) for number in range(3) for num_turns in (1, 2)]
    for prompt in prompts:
        vllm.cache.serve(prompt, is_full=False)  # whose last two blocks the router hears of, and has no place for
    async with vllm as one, router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front:
        await until_partial(front, one.url)
        assert [await predicted(front, one.url, prompt) for prompt in prompts] == [0] * len(prompts)
        num_asked = await ask_until_it_ends(front, one, prompts)
        assert num_asked <= len(prompts) + 8
        for prompt in prompts:
            await front.until_overlap(one.url, prompt, len(prompt) // 16)
        assert (await front.metrics())[f'kvist_router_healed_total{{reason="stable",worker="{one.url}"}}'] == 1
        text = f"stable worker={one.url} rank=0 num_asked={num_asked} num_hits={len(vllm.cache.held)}"
        assert logged("kvist.router.healing")[-1].endswith(text)


async def test_an_engine_whose_hits_no_report_brings_is_left_alone_once_they_are_the_same_ones(
    vllm, router, engine, monkeypatch
):
    monkeypatch.setattr(healing, "NUM_UNCHANGED_IN_A_ROW", 8)
    prompts = [chat(number, 2) for number in range(3)]
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(16, len(prompt), 16)}
    vllm.cache.held |= prefixes  # as of a store beside the engine
    vllm.cache.unreported |= prefixes
    async with vllm as one, router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front:
        await lose(engine, front, one.url)
        assert await ask_until_it_ends(front, one, prompts) == len(prompts) + 8
        assert [await predicted(front, one.url, prompt) for prompt in prompts] == [0, 0, 0]
        metrics = await front.metrics()
        assert metrics[f'kvist_router_full_reports_total{{report="lacking",worker="{one.url}"}}'] == len(prompts) + 8
        assert metrics[f'kvist_router_healed_total{{reason="stable",worker="{one.url}"}}'] == 1


async def test_what_is_lost_after_healing_has_ended_is_healed_anew(vllm, router, engine, monkeypatch):
    monkeypatch.setattr(healing, "NUM_UNCHANGED_IN_A_ROW", 4)
    prompt = chat(1, 3)
    async with vllm as one, router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front:
        for _ in range(2):
            await lose(engine, front, one.url)  # few blocks are left, of few: the drop alone would not tell
            assert await predicted(front, one.url, prompt) == 0
            assert await ask_until_it_ends(front, one, [prompt]) in (
                5,
                6,
            )  # of which the first, uncached, tells nothing
            await front.until_overlap(one.url, prompt, len(prompt) // 16)
        assert (await front.metrics())[f'kvist_router_healed_total{{reason="stable",worker="{one.url}"}}'] == 2


class OneRank:
    """A healer of one rank of a vLLM worker, whose state is set, and what it told the metrics."""

    target = WorkerRank("w", 0)

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(healing, "NUM_UNCHANGED_IN_A_ROW", 2)
        self.state, self.clearing, self.is_counted = SourceState.PARTIAL, 1, False
        self.metrics, self.num_hits = RouterMetrics(), []
        worker = SimpleNamespace(engine="vllm")
        self.healer = Healer(SimpleNamespace(get=lambda _: worker, ranks=self.ranks), self.metrics)

    def ranks(self, *_: object) -> list[RankStatus]:
        return [RankStatus(self.target, self.state, 0, self.clearing, is_counted=self.is_counted)]

    def counted(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"kvist_router_{name}", {"worker": "w"} | labels)

    @property
    def reports(self) -> list[float | None]:
        return [self.counted("full_reports_total", report=report) for report in ("lacking", "known", "unreported")]

    @property
    def ends(self) -> list[str]:
        return [end for end in ("stable", "report limit") if self.counted("healed_total", reason=end)]

    def asks(self) -> bool:
        return self.healer.body_for(self.target, ParsedRequest("m", 1), b"{}") != b"{}"

    def answer(self, num_cached_tokens: int | None, num_predicted_tokens: int = 0) -> None:
        prompt = SimpleNamespace(is_exact=True, block_size=16)
        chosen = SimpleNamespace(target=self.target)
        decision = SimpleNamespace(chosen=chosen, prompt=prompt, overlap_tokens=num_predicted_tokens)
        usage = ReportedUsage(64, num_cached_tokens)
        self.healer.on_answer(decision, usage, lambda first, last: range(first // 16, last // 16))
        self.num_hits.append(self.healer._ranks[self.target].num_hits)


def test_a_rank_that_was_known_again_is_healed_anew_and_one_that_was_in_doubt_is_not(monkeypatch):
    rank = OneRank(monkeypatch)
    assert rank.asks()
    for _ in range(2):
        rank.answer(0)
    assert (rank.asks(), rank.ends) == (False, ["stable"])
    for state, is_begun_anew in ((SourceState.RESYNCING, False), (SourceState.LIVE, True)):
        rank.state = state
        assert not rank.asks()
        rank.state = SourceState.PARTIAL
        assert rank.asks() == is_begun_anew


def test_a_hit_that_is_new_to_a_rank_which_was_left_alone_begins_healing_again(monkeypatch):
    rank = OneRank(monkeypatch)
    assert rank.asks()
    for num_cached_tokens, is_asked in ((0, True), (0, False), (16, True), (16, True), (16, False), (16, False)):
        rank.answer(num_cached_tokens)
        assert rank.asks() == is_asked
    assert rank.counted("healed_total", reason="stable") == 2


def test_a_rank_whose_copies_are_counted_is_not_asked_though_it_is_partial(monkeypatch):
    rank = OneRank(monkeypatch)
    rank.is_counted = True
    assert not rank.asks()
    rank.is_counted = False
    assert rank.asks()


def test_hits_are_the_blocks_behind_those_that_the_index_had(monkeypatch):
    rank = OneRank(monkeypatch)
    assert rank.asks()
    for num_cached_tokens, num_predicted_tokens in ((64, 32), (64, 16), (16, 16)):
        rank.answer(num_cached_tokens, num_predicted_tokens)
    assert (rank.reports, rank.num_hits) == ([2, 1, None], [2, 3, 3])


def test_each_hit_counts_once_of_as_many_as_are_remembered(monkeypatch):
    monkeypatch.setattr(healing, "MAX_HITS", 3)
    rank = OneRank(monkeypatch)
    assert rank.asks()
    for num_cached_tokens in (32, 48, 48, 64, 64):
        rank.answer(num_cached_tokens)
    assert (rank.num_hits, rank.ends) == ([2, 3, 3, 4, 5], [])


def test_an_engine_that_told_once_has_nothing_cached_where_it_says_nothing(monkeypatch):
    rank = OneRank(monkeypatch)
    assert rank.asks()
    for num_cached_tokens in (None, 16, None, None):
        rank.answer(num_cached_tokens)
    assert rank.reports == [1, 2, 1]
    assert rank.ends == ["stable"]


def test_requests_that_are_not_answered_yet_count_among_those_that_may_ask(monkeypatch):
    monkeypatch.setattr(healing, "MAX_ASKED", 3)
    rank = OneRank(monkeypatch)
    assert [rank.asks() for _ in range(5)] == [True, True, True, False, False]
    rank.answer(None)
    assert rank.ends == ["report limit"]


async def test_requests_to_a_partial_rank_ask_until_nothing_new_is_hit(worker, router, engine, monkeypatch):
    monkeypatch.setattr(healing, "NUM_UNCHANGED_IN_A_ROW", 2)
    async with (
        worker(models=VLLM, cached_tokens=0) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await front.until_overlap(one.url, [*block(1), 0], 1)
        await front.complete(PROMPT)
        await lose(engine, front, one.url)
        one.cached_tokens = 16  # of which the index knows nothing
        await front.complete(PROMPT)
        one.cached_tokens = 0
        for _ in range(3):
            await front.complete(PROMPT)
        assert asked(one) == [False, True, True, True, False]
        metrics = await front.metrics()
        name = "kvist_router_full_reports_total"
        assert metrics[f'{name}{{report="lacking",worker="{one.url}"}}'] == 1
        assert metrics[f'{name}{{report="known",worker="{one.url}"}}'] == 2
        assert await state_of(front, one.url) == ["partial"]


async def test_an_engine_that_does_not_tell_is_asked_a_bounded_number_of_times(worker, router, engine, monkeypatch):
    monkeypatch.setattr(healing, "MAX_ASKED", 2)
    async with (
        worker(models=VLLM) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await lose(engine, front, one.url)
        for _ in range(3):
            await front.complete(PROMPT)
        assert asked(one) == [True, True, False]
        assert (await front.metrics())[
            f'kvist_router_full_reports_total{{report="unreported",worker="{one.url}"}}'
        ] == 2


async def test_engines_that_are_not_vllm_get_the_clients_bytes(worker, router, engine):
    sglang = [{"id": "m", "object": "model", "owned_by": "sglang"}]
    async with (
        worker(models=sglang, cached_tokens=0) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await lose(engine, front, one.url)
        answer = await front.complete(PROMPT)
        assert one.completions[0].body == answer.request.content


async def test_other_endpoints_of_a_partial_worker_get_the_clients_bytes(worker, router, engine):
    async with (
        worker(models=VLLM) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await lose(engine, front, one.url)
        answer = await front.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert one.completions[0].body == answer.request.content


async def test_a_worker_whose_sidecar_lacks_blocks_is_asked_too(worker, router, free_port):
    url = f"tcp://127.0.0.1:{free_port()}"
    publication = open_publication(url)
    heartbeat = encode_batch(Batch("w", 0, 1, 0, 16, 1.0, (Heartbeat(0, 0, is_complete=False),)))
    async with (
        worker(models=VLLM) as one,
        router(one.url, kv_event_sources={one.url: (url,)}, block_size=16) as front,
    ):
        async with asyncio.timeout(60):
            while await state_of(front, one.url) != ["partial"]:
                publication.send(Message(b"kv/w/0", 0, heartbeat))
        await front.complete(PROMPT)
        assert asked(one) == [True]
    publication.close()
