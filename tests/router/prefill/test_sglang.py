"""Pairs of SGLang's workers meet in a room: whatever a client asks for, both are told the same, or neither works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from kvist.openai.requests import Fields
from kvist.router.prefill.dialect import LocalReason, Side
from kvist.router.prefill.sglang import SglangDialect, with_input_logprobs
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, GENERATE_PATH, ParsedRequest

SHORT = list(range(1000, 1020))
TOKENS = ["a", "b", "c", "d"]
PORT = 9123


def info(mode: str, **more: Any) -> dict[str, Any]:
    """Some of the settings that a worker tells."""
    settings = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": PORT, "page_size": 64}
    return settings | {"kv_cache_dtype": "auto", "version": "0.5.23", "max_total_num_tokens": 100_000} | more


class Rooms:
    """Where workers meet: a request goes on when the other worker of its pair has come to each of its rooms."""

    def __init__(self, http_bytes: Any) -> None:
        self.bytes = http_bytes
        self.met: dict[tuple[str, int, int], dict[str, asyncio.Event]] = {}

    def worker(self, mode: str, num_ranks: int = 1) -> Any:
        """What a worker of this mode answers to a request."""

        async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
            body = json.loads(received.body)
            prompt = body.get("prompt", body.get("input_ids", body.get("text")))
            num_prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list | str) else None
            if mode == "null":
                writer.write(self.bytes.response(b'{"choices": [{"text": "whole"}]}'))
                return
            if body.get("bootstrap_room") is None:
                text = b'{"message": "Disaggregated request received without bootstrap room id"}'
                writer.write(self.bytes.response(text, status=400))
                return
            places = [body[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")]
            rooms = list(zip(*places, strict=True)) if isinstance(places[2], list) else [tuple(places)]
            assert len(rooms) == len(set(rooms)) == (num_prompts or 1)
            rank = body.get("data_parallel_rank")
            for host, port, room in rooms:
                assert (host, port) == ("127.0.0.1", PORT)
                assert 0 <= room < 2**63
                if mode == "prefill" and rank is not None and room % num_ranks != rank:
                    writer.write(self.bytes.response(b'{"message": "follow_bootstrap_room conflict"}', status=500))
                    return
                await self.meet((host, port, room), mode)
            writer.write((self.prefilled if mode == "prefill" else self.decoded)(body, num_prompts))

        return answer

    async def meet(self, room: tuple[str, int, int], mode: str) -> None:
        events = self.met.setdefault(room, {"prefill": asyncio.Event(), "decode": asyncio.Event()})
        assert not events[mode].is_set(), "nobody comes to a room twice"
        events[mode].set()
        await asyncio.gather(*(event.wait() for event in events.values()))

    def prefilled(self, body: Fields, num_prompts: int | None) -> bytes:
        meta = {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]], "output_token_logprobs": [[-1.0, 3, None]]}
        if body.get("stream"):
            return self.bytes.event_stream_head + self.bytes.chunk(b'data: {"text": "a"}\n\n') + self.bytes.chunk(b"")
        answer = {"text": "a", "choices": [{"text": "a"}], "meta_info": meta}
        return self.bytes.response(json.dumps([answer] * num_prompts if num_prompts else answer).encode())

    def decoded(self, body: Fields, num_prompts: int | None) -> bytes:
        if body.get("stream"):
            chunks = [self.bytes.chunk(event) for event in [*events(body), b"data: [DONE]\n\n", b""]]
            return self.bytes.event_stream_head + b"".join(chunks)
        answer = {"text": "abcd", "choices": [{"text": "abcd"}], "meta_info": {"input_token_logprobs": []}}
        return self.bytes.response(json.dumps([answer] * num_prompts if num_prompts else answer).encode())


def events(body: Fields) -> list[bytes]:
    more = {"index": 0, "meta_info": {"input_token_logprobs": []}} if "return_logprob" in body else {}
    return [f"data: {json.dumps({'choices': [{'text': token}]} | more)}\n\n".encode() for token in TOKENS]


@pytest.fixture
def rooms(http_bytes) -> Rooms:
    return Rooms(http_bytes)


@pytest.fixture
def pair(worker: Any, rooms: Rooms) -> Callable[..., list[Any]]:
    """One worker of each mode."""

    def made(*modes: str) -> list[Any]:
        return [worker(server_info=info(mode), answer=rooms.worker(mode)) for mode in modes or ("prefill", "decode")]

    return made


def total_load(front: Any) -> int:
    load, fleet = front.service._forwarder.load, front.service.fleet
    return sum(load.running_requests(worker.url) for worker in fleet.workers)


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


async def drop(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def test_both_are_asked_at_once_and_the_decode_workers_answer_is_relayed(pair, router) -> None:
    p, d = pair()
    async with p, d, router(p.url, d.url) as front:
        answer = await front.complete(SHORT, stream=True)
        assert answer.content == b"".join([*events({}), b"data: [DONE]\n\n"])
        assert (answer.headers["x-kvist-worker"], answer.headers["x-kvist-prefill-worker"]) == (d.url, p.url)
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        assert (await front.client.post("/v1/chat/completions", json=chat)).json()["choices"] == [{"text": "abcd"}]
        explained = (await front.client.post("/route", json=chat | {"echo": True})).json()
        assert (explained["worker"], explained["prefill"]["worker"]) == (d.url, p.url)
        answer = await front.complete([SHORT, SHORT], n=2)
        assert answer.json()["choices"] == [{"text": "abcd", "index": idx} for idx in range(4)]
        told = {each.headers["x-request-id"]: json.loads(each.body) for each in d.completions}
        assert {each.headers["x-request-id"]: json.loads(each.body) for each in p.completions} == told
        assert len(told) == 6
        workers = await front.workers()
        assert [(workers[each.url]["role"], workers[each.url]["engine"]) for each in (p, d)] == [
            ("prefill", "sglang"),
            ("decode", "sglang"),
        ]
        metrics = await front.metrics()
        assert metrics["kvist_router_disaggregated_total"] == 6
        assert metrics[f'kvist_router_requests_total{{policy="kv",status="200",worker="{p.url}"}}'] == 6
        assert total_load(front) == 0


async def test_every_prompt_of_a_batch_has_a_room(pair, router) -> None:
    p, d = pair()
    async with p, d, router(p.url, d.url) as front:
        answer = await front.client.post("/generate", json={"input_ids": [SHORT, SHORT[::-1], SHORT]})
        assert [each["text"] for each in answer.json()] == ["abcd"] * 3
        for prompts in ([SHORT, SHORT[::-1]], ["hello", "world"]):
            answer = await front.complete(prompts, stream=True)
            assert answer.content == b"".join([*events({}), b"data: [DONE]\n\n"])


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_log_probabilities_of_the_prompt_come_from_the_prefill_worker(
    pair, router, is_batch: bool, is_stream: bool
) -> None:
    p, d = pair()
    body = {"input_ids": [SHORT, SHORT] if is_batch else SHORT, "return_logprob": True, "logprob_start_len": 0}
    async with p, d, router(p.url, d.url) as front:
        answer = await front.client.post("/generate", json=body | {"stream": is_stream})
        if is_stream:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            assert answer.content.endswith(b"data: [DONE]\n\n")
            assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == "abcd"
            whole = [json.loads(line) for line in lines]
        else:
            whole = answer.json() if is_batch else [answer.json()]
        expected = [[None, 1, None], [-0.5, 2, None]]
        assert [each["meta_info"]["input_token_logprobs"] for each in whole] == [expected] * len(whole)
        assert total_load(front) == 0


async def test_ranks_are_told_to_both_and_the_room_is_that_ranks(worker, router, rooms, engine) -> None:
    async with AsyncExitStack() as exits:
        sources, urls, workers = {}, [], []
        for mode in ("prefill", "decode"):
            one = await exits.enter_async_context(worker(server_info=info(mode), answer=rooms.worker(mode, 2)))
            published = exits.enter_context(engine(f"{mode}-ranks", num_ranks=2))
            sources[one.url] = (published.publisher.endpoint,)
            urls.append(one.url)
            workers.append(one)
            for rank in (0, 1):
                published.store(list(range(rank, rank + 16)), rank)
        front = await exits.enter_async_context(router(*urls, kv_event_sources=sources, policy="kv"))
        for url in urls:
            await front.until_ranks(url, 2)
        for _ in range(8):
            assert (await front.complete(SHORT)).status_code == 200
        p, d = workers
        for asked, told in zip(p.completions, d.completions, strict=True):
            first, second = json.loads(asked.body), json.loads(told.body)
            assert str(first["data_parallel_rank"]) == asked.headers["x-data-parallel-rank"]
            assert str(second["data_parallel_rank"]) == told.headers["x-data-parallel-rank"]
            assert second["disagg_prefill_dp_rank"] == first["data_parallel_rank"] == first["bootstrap_room"] % 2


async def test_what_no_pair_can_do_goes_to_a_worker_that_does_all_or_is_refused(pair, router) -> None:
    p, d, other = pair("prefill", "decode", "null")
    async with p, d, other, router(p.url, d.url) as front:
        for fields in ({"n": 2, "use_beam_search": True}, {"echo": True, "logprobs": 1}):
            refused = await front.complete(SHORT, **fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_pair")
        for path in ("/v1/score", "/v1/rerank", "/v1/decisions"):  # by log probabilities of what is generated
            refused = await front.client.post(path, json={"input": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_pair")
        await front.client.post("/workers", json={"url": other.url})
        await front.until_state(other.url, "healthy")
        assert (await front.complete(SHORT, n=2)).json()["choices"] == [{"text": "whole"}]
        for _ in range(8):
            assert (await front.client.post("/v1/score", json={"input": "x"})).status_code == 200
        assert not p.completions
        assert not d.completions


async def test_half_a_pair_does_nothing(pair, router) -> None:
    for mode, reason in (("prefill", "no_decode_worker"), ("decode", "no_prefill_worker")):
        (half,) = pair(mode)
        async with half, router(half.url) as front:
            refused = await front.complete(SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_pair")
            assert reason in refused.json()["error"]["message"]
            assert not half.completions
            assert (await front.client.post("/tokenize", json={"prompt": "x"})).status_code == 400  # by the worker
            assert len(half.completions) == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [None, 500, 503, 429])
async def test_when_either_fails_another_pair_meets_elsewhere(
    pair, router, http_bytes, side: str, status: int | None
) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b'{"message": "no"}', status=status))

    broken, p, d = pair(side, "prefill", "decode")
    broken.answer = drop if status is None else refuse
    async with broken, p, d, router(broken.url, p.url, d.url, policy="round-robin", breaker_failures=100) as front:
        for _ in range(4):
            answer = await front.complete(SHORT)
            assert answer.json()["choices"] == [{"text": "abcd"}]
            assert (answer.headers["x-kvist-worker"], answer.headers["x-kvist-prefill-worker"]) == (d.url, p.url)
        assert broken.completions
        sent = [json.loads(each.body)["bootstrap_room"] for one in (p, d, broken) for each in one.completions]
        assert all(sent.count(room) <= 2 for room in sent)
        assert (await front.workers())[(d if side == "prefill" else p).url]["circuit"] == "closed"
        assert total_load(front) == 0


async def test_where_every_pair_fails_one_worker_does_all_or_the_client_is_told(pair, router) -> None:
    p, d, other = pair("prefill", "decode", "null")
    p.answer = drop
    async with p, d, other, router(p.url, d.url, max_local_prefill_tokens=0, breaker_failures=100) as front:
        refused = await front.complete(SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_pair")
        await front.client.post("/workers", json={"url": other.url})
        await front.until_state(other.url, "healthy")
        assert (await front.complete(SHORT)).json()["choices"] == [{"text": "whole"}]
        assert total_load(front) == 0


async def test_what_the_prefill_worker_says_of_a_bad_request_is_the_answer(pair, router, http_bytes) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b'{"message": "too long"}', status=400))

    p, d = pair()
    p.answer = refuse
    async with p, d, router(p.url, d.url) as front:
        answer = await front.complete(SHORT)
        assert (answer.status_code, answer.json()) == (400, {"message": "too long"})
        assert total_load(front) == 0


async def test_an_endpoint_that_the_prefill_worker_lacks_is_asked_of_other_pairs(pair, router, http_bytes) -> None:
    async def lack(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b'{"detail":"Not Found"}', status=404))

    p, d = pair()
    p.answer, d.answer = lack, never
    message = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    async with p, d, router(p.url, d.url) as front:
        answer = await front.client.post("/v1/messages", json=message)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "endpoint_not_found")
        assert total_load(front) == 0


@pytest.mark.parametrize("silent", [("prefill", "decode"), ("decode",)])
async def test_a_client_that_leaves_takes_both_sides_along(pair, router, until, silent: tuple[str, ...]) -> None:
    p, d = pair()
    for mode, one in (("prefill", p), ("decode", d)):
        one.answer = never if mode in silent else one.answer
    async with p, d, router(p.url, d.url) as front:
        asking = asyncio.create_task(front.complete(SHORT))
        await until(lambda: total_load(front) == 2)
        await until(lambda: len(p.completions) == len(d.completions) == 1)
        asking.cancel()
        await until(lambda: total_load(front) == 0)
        metrics = await front.metrics()
        for one in (p, d):
            assert metrics[f'kvist_router_requests_total{{policy="kv",status="499",worker="{one.url}"}}'] == 1


async def test_only_workers_whose_blocks_are_alike_meet(worker, router, rooms) -> None:
    def made(mode: str, **more: Any) -> Any:
        return worker(server_info=info(mode, **more), answer=rooms.worker(mode))

    p, small, narrow, d = made("prefill"), made("decode", page_size=1), made("decode"), made("decode")
    p.server_info |= {"kv_cache_dtype": "bfloat16"}
    narrow.server_info |= {"kv_cache_dtype": "fp8_e4m3"}
    other = worker(server_info=info("decode"), answer=rooms.worker("decode"), models=[{"id": "other"}])
    async with p, small, narrow, other, d, router(p.url, small.url, narrow.url, other.url) as front:
        assert (await front.complete(SHORT)).json()["error"]["code"] == "no_pair"
        await front.client.post("/workers", json={"url": d.url})
        await front.until_state(d.url, "healthy")
        for _ in range(4):
            assert (await front.complete(SHORT)).headers["x-kvist-worker"] == d.url


async def test_as_many_pairs_are_tried_as_there_may_be_attempts(worker, router, rooms, http_bytes) -> None:
    async def fail(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"{}", status=500))

    answers = [fail, fail, rooms.worker("prefill"), rooms.worker("decode")]
    modes = ["prefill"] * 3 + ["decode"]
    async with AsyncExitStack() as exits:
        made = [worker(server_info=info(mode), answer=each) for mode, each in zip(modes, answers, strict=True)]
        urls = [(await exits.enter_async_context(each)).url for each in made]
        front = await exits.enter_async_context(router(*urls, breaker_failures=1000, policy="round-robin"))
        assert [(await front.complete(SHORT)).status_code for _ in range(12)] == [200] * 12
        assert all(each.completions for each in made)


async def test_a_pair_is_waited_for_until_both_of_it_have_room(worker, router, rooms, until) -> None:
    is_free, modes = asyncio.Event(), ("prefill", "decode", "decode")

    def held(mode: str) -> Any:
        async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
            await is_free.wait()
            await rooms.worker(mode)(received, writer)

        return answer

    p, d, e = (worker(server_info=info(mode), answer=held(mode)) for mode in modes)
    async with p, d, e, router(p.url, d.url, e.url, max_worker_requests=1) as front:
        asked = [asyncio.create_task(front.complete(SHORT)) for _ in range(3)]
        await until(lambda: sum(front.service._forwarder.admission.queued.values()) == 2)
        assert len(p.completions) == 1
        is_free.set()
        assert [(await each).status_code for each in asked] == [200] * 3


async def test_a_full_prefill_worker_of_a_pair_is_waited_for_by_whom_it_spares_more(
    worker, router, rooms, until
) -> None:
    is_free, held = asyncio.Event(), list(range(50_000))

    def waiting(mode: str) -> Any:
        async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
            await is_free.wait()
            await rooms.worker(mode)(received, writer)

        return answer

    modes = ("prefill", "prefill", "decode", "decode")
    holder, other, d, e = (worker(server_info=info(mode), answer=waiting(mode)) for mode in modes)
    limits = {"max_worker_requests": 1, "block_size": 16, "breaker_failures": 1000}
    async with holder, other, d, e, router(holder.url, other.url, d.url, e.url, **limits) as front:
        front.hold(holder.url, held)
        asked = [asyncio.create_task(front.complete([*held, *SHORT]))]
        await until(lambda: len(holder.completions) == 1)
        front.service.fleet.get(holder.url).capacity.ends_a_second = 2.0
        asked.append(asyncio.create_task(front.complete(held)))
        await until(lambda: sum(front.service._forwarder.admission.queued.values()) == 1)
        is_free.set()
        assert [(await each).status_code for each in asked] == [200] * 2
        assert (len(holder.completions), len(other.completions)) == (2, 0)


async def test_a_pair_is_tried_again_when_a_worker_that_does_all_has_failed_after_the_first(
    worker, router, rooms, until
) -> None:
    is_free, may_fail = asyncio.Event(), asyncio.Event()

    async def hold(received: Any, writer: asyncio.StreamWriter) -> None:
        await is_free.wait()
        await rooms.worker("decode")(received, writer)

    async def fail(_: Any, writer: asyncio.StreamWriter) -> None:
        await may_fail.wait()
        writer.transport.abort()

    answers = {"prefill": rooms.worker("prefill"), "decode": hold}
    p, d = (worker(server_info=info(mode), answer=answer) for mode, answer in answers.items())
    broken, other = worker(server_info=info("prefill"), answer=drop), worker(server_info=info("null"), answer=fail)
    e, limits = worker(server_info=info("decode"), answer=rooms.worker("decode")), {"max_local_prefill_tokens": 0}
    limits |= {"max_worker_requests": 1, "breaker_failures": 1000}
    async with p, d, broken, other, e, router(p.url, d.url, **limits) as front:
        asked = [asyncio.create_task(front.complete(SHORT))]
        await until(lambda: len(d.completions) == 1)
        for each in (broken, e, other):
            await front.client.post("/workers", json={"url": each.url})
            await front.until_state(each.url, "healthy")
        asked.append(asyncio.create_task(front.complete(SHORT)))  # the other pair fails, and no third has room
        await until(lambda: len(other.completions) == 1)
        is_free.set()
        assert (await asked[0]).status_code == 200
        may_fail.set()
        answer = await asked[1]
        assert (answer.status_code, answer.headers["x-kvist-prefill-worker"]) == (200, p.url)
        assert (await front.metrics())['kvist_router_disaggregation_fallbacks_total{reason="prefill_failed"}'] == 1


async def test_what_one_worker_alone_can_do_waits_for_it_while_pairs_have_room(pair, router, rooms, until) -> None:
    p, d, other = pair("prefill", "decode", "null")
    is_free = asyncio.Event()

    async def hold(received: Any, writer: asyncio.StreamWriter) -> None:
        await is_free.wait()
        await rooms.worker("null")(received, writer)

    other.answer = hold
    async with p, d, other, router(p.url, d.url, other.url, max_worker_requests=1) as front:
        admission, body = front.service._forwarder.admission, {"echo": True, "logprobs": 1}
        asked = [asyncio.create_task(front.complete(SHORT, **body))]
        await until(lambda: len(other.completions) == 1)
        asked += [asyncio.create_task(front.complete(SHORT, **body)) for _ in range(2)]
        await until(lambda: sum(admission.queued.values()) == 2)
        other.answer, long = rooms.worker("null"), [*range(1000)]
        assert (await front.complete(long)).json()["choices"] == [{"text": "abcd"}]  # whom nobody holds up
        assert len(other.completions) == 1
        explained = await front.client.post("/route", json={"model": "m", "prompt": SHORT, **body})
        assert explained.json()["queued"] is True
        is_free.set()
        assert [(await each).json()["choices"] for each in asked] == [[{"text": "whole"}]] * 3


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_fails_no_token_is_lost_or_doubled(worker, router, rooms, http_bytes, seed: int) -> None:
    """Answers are whole, or break off after a begin that is right."""
    random = Random(seed)

    def unreliable(mode: str) -> Any:
        able = rooms.worker(mode)

        async def reply(received: Any, writer: asyncio.StreamWriter) -> None:
            match random.randrange(8):
                case 0:
                    writer.transport.abort()
                case 1:
                    writer.write(http_bytes.response(b"{}", status=random.choice([500, 502, 503])))
                case 2 if mode == "decode":
                    some = events({})[: random.randrange(4)]
                    writer.write(http_bytes.event_stream_head + b"".join(map(http_bytes.chunk, some)))
                    await writer.drain()
                    writer.transport.abort()
                case _:
                    await able(received, writer)

        return reply

    whole = b"".join([*events({}), b"data: [DONE]\n\n"])
    limits = {"breaker_failures": 1000, "policy": "round-robin", "max_attempts": 6, "health_failures": 1000}
    async with AsyncExitStack() as exits:
        modes = ("prefill", "decode") * 3
        made = [worker(server_info=info(mode), answer=unreliable(mode)) for mode in modes]
        urls = [(await exits.enter_async_context(each)).url for each in made]
        front = await exits.enter_async_context(router(*urls, **limits))
        num_whole = 0
        for _ in range(30):
            answer = await front.complete(SHORT, stream=True)
            if answer.status_code == 200:
                assert whole.startswith(answer.content.partition(b'data: {"error"')[0])
                num_whole += answer.content == whole
        assert num_whole > 5
        await front.until(lambda: asyncio.sleep(0, total_load(front) == 0))


def test_the_prefill_workers_address_is_one_that_decode_workers_can_use() -> None:
    side = Side("http://[::1]:30000", 8998)
    fields, handoff = SglangDialect().begin(ParsedRequest("m", 2), side, side, Random(1))
    assert handoff is not None
    assert fields == handoff.fields
    assert fields["bootstrap_host"] == "[::1]"


def test_obstacles_are_in_the_request() -> None:
    def found(path: str, **fields: Any) -> LocalReason | None:
        return SglangDialect().obstacle(ParsedRequest("m", 400, fields=fields, path=path))

    assert found(CHAT_PATH, logprobs=True, n=1) is None
    assert found(COMPLETION_PATH, logprobs=1, echo=False) is None
    assert found(COMPLETION_PATH, echo=True) is None
    assert found(CHAT_PATH, n=2) is LocalReason.SEVERAL_SEQUENCES
    assert found(GENERATE_PATH, sampling_params={"n": 2}) is LocalReason.SEVERAL_SEQUENCES
    assert found(GENERATE_PATH, sampling_params=[{}, {"n": 2}]) is LocalReason.SEVERAL_SEQUENCES
    assert found(GENERATE_PATH, sampling_params={"temperature": 0}) is None
    assert found("/v1/embeddings") is LocalReason.OTHER_ENDPOINT


@pytest.mark.parametrize("prefilled", [b"", b"{}", b"7"])
@pytest.mark.parametrize("answer", [b"", b"[]", b'{"meta_info": 1}', b'data: {"index": 3}\n\n'])
def test_an_answer_that_nothing_can_be_put_into_stays_as_it_is(answer: bytes, prefilled: bytes) -> None:
    assert with_input_logprobs(answer, prefilled) is answer
