"""Requests beyond what workers take wait in order, are decided late, and are refused with a reason; nobody is lost."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from kvist.router.config import RouterConfig
from kvist.router.fleet.worker import Capacity, LoadReport, parse_report


class Gated:
    """A worker's answers, one for each `let`, in the order that the requests came."""

    def __init__(self, http_bytes: Any) -> None:
        self.http_bytes = http_bytes
        self.gate = asyncio.Semaphore(0)

    async def __call__(self, _: Any, writer: asyncio.StreamWriter) -> None:
        await self.gate.acquire()
        writer.write(self.http_bytes.response(self.http_bytes.completion()))

    def let(self, num_answers: int = 1) -> None:
        for _ in range(num_answers):
            self.gate.release()


@pytest.fixture
def gated(http_bytes: Any) -> Gated:
    return Gated(http_bytes)


def prompts_of(worker: Any) -> list[str]:
    return [json.loads(received.body)["prompt"] for received in worker.completions]


def queued(front: Any) -> int:
    return sum(front.service._forwarder.admission.queued.values())


async def test_what_a_worker_has_no_room_for_waits_by_priority_then_arrival(worker, router, gated, until) -> None:
    async with worker(answer=gated) as one, router(one.url, max_worker_requests=1) as front:
        assert (await front.explain([1] * 16))["queued"] is False
        asked = [asyncio.create_task(front.complete("first"))]
        await until(lambda: len(one.completions) == 1)
        assert (await front.explain([1] * 16))["queued"] is True
        for prompt, priority in (("b", 0), ("late", 7), ("c", 0), ("urgent", -3), ("d", 0)):
            asked.append(asyncio.create_task(front.complete(prompt, priority=priority)))
            await until(lambda: queued(front) == len(asked) - 1)
        assert (await front.metrics())['kvist_router_queued_requests{model="m"}'] == 5
        for num_answered in range(1, 6):
            gated.let()
            await until(lambda num_answered=num_answered: len(one.completions) == num_answered + 1)
        gated.let()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 6
        assert prompts_of(one) == ["first", "urgent", "b", "c", "d", "late"]
        assert all("priority" not in json.loads(received.body) for received in one.completions)
        metrics = await front.metrics()
        assert metrics['kvist_router_queue_seconds_count{model="m"}'] == 5


async def test_a_client_may_only_worsen_its_own_priority(worker, router, gated, until) -> None:
    async with (
        worker(answer=gated) as one,
        router(
            one.url, max_worker_requests=1, api_key="k", admin_key="a", workers_use_priority=True, ready=False
        ) as front,
    ):
        client, admin = {"authorization": "Bearer k"}, {"authorization": "Bearer a"}

        async def ask(prompt: str, priority: int, headers: dict[str, str]) -> int:
            body = {"model": "m", "prompt": prompt, "priority": priority}
            return (await front.client.post("/v1/completions", json=body, headers=headers)).status_code

        asked = [asyncio.create_task(ask("first", 0, client))]
        await until(lambda: len(one.completions) == 1)
        for prompt, priority, headers in (("b", 0, client), ("pushy", -9, client), ("admin", -9, admin)):
            asked.append(asyncio.create_task(ask(prompt, priority, headers)))
            await until(lambda: queued(front) == len(asked) - 1)
        gated.let(4)
        assert await asyncio.gather(*asked) == [200] * 4
        assert prompts_of(one) == ["first", "admin", "b", "pushy"]
        assert [json.loads(received.body)["priority"] for received in one.completions] == [0, -9, 0, 0]


async def test_each_worker_gets_priorities_if_it_schedules_by_them(worker, router) -> None:
    sglang = {"disaggregation_mode": "null", "enable_priority_scheduling": True}
    lowest_first = sglang | {"schedule_low_priority_values_first": True}
    async with (
        worker(server_info=lowest_first) as scheduling,
        worker(server_info=sglang) as highest_first,
        worker(models=[{"id": "m", "owned_by": "vllm"}]) as silent,
    ):
        workers = scheduling, highest_first, silent
        for flag, expected in ((False, [True, False, False]), (True, [True, False, True])):
            async with router(*(one.url for one in workers), policy="round-robin", workers_use_priority=flag) as front:
                for number, fields in enumerate([{"priority": 4}] * 3 + [{}] * 3):
                    assert (await front.complete(str(number), **fields)).status_code == 200
            for one, uses_priority in zip(workers, expected, strict=True):
                priorities = [json.loads(received.body).get("priority") for received in one.completions[-2:]]
                assert priorities == [4 if uses_priority else None, None]  # 0 is what workers assume


async def test_a_form_has_no_priority(worker, router) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    async with worker() as one, router(one.url, workers_use_priority=True) as front:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await front.client.post("/v1/audio/transcriptions", content=form, headers=headers)
        assert (answer.status_code, [received.body for received in one.completions]) == (200, [form])


async def test_who_waits_too_long_or_finds_the_queue_full_is_told_when_to_come_back(
    worker, router, gated, until
) -> None:
    async with (
        worker(answer=gated) as one,
        router(one.url, max_worker_requests=1, max_queued=2) as front,
    ):
        running = asyncio.create_task(front.complete("first"))
        await until(lambda: len(one.completions) == 1)
        body, headers = {"model": "m", "prompt": "x"}, {"x-kvist-queue-timeout": "0.01"}
        answer = await front.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "timeout"
        assert int(answer.headers["retry-after"]) >= 1
        waiting = [asyncio.create_task(front.complete("a")), asyncio.create_task(front.complete("b", priority=5))]
        await until(lambda: queued(front) == 2)
        refused = await front.complete("c", priority=5)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        waiting.append(asyncio.create_task(front.complete("d")))
        displaced = await waiting[1]
        assert (displaced.status_code, displaced.json()["error"]["code"]) == (429, "displaced")
        answer = await front.client.post("/v1/completions", json=body, headers={"x-kvist-queue-timeout": "soon"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "x-kvist-queue-timeout: got 'soon', expected seconds, 0 or more"
        gated.let(3)
        assert [(await each).status_code for each in (running, waiting[0], waiting[2])] == [200] * 3
        assert prompts_of(one) == ["first", "a", "d"]
        rejections = {name: value for name, value in (await front.metrics()).items() if "rejections_total" in name}
        assert rejections['kvist_router_rejections_total{cause="timeout"}'] == 1
        assert rejections['kvist_router_rejections_total{cause="displaced"}'] == 1
        assert rejections['kvist_router_rejections_total{cause="queue full"}'] == 1


async def test_a_client_may_only_shorten_the_longest_wait_of_the_settings(worker, router, gated, until) -> None:
    async with worker(answer=gated) as one, router(one.url, max_worker_requests=1, queue_timeout_s=0.05) as front:
        running = asyncio.create_task(front.complete("first"))
        await until(lambda: len(one.completions) == 1)
        body = {"model": "m", "prompt": "x"}
        for headers in ({}, {"x-kvist-queue-timeout": "3600"}):
            late = await front.client.post("/v1/completions", json=body, headers=headers)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
        gated.let()
        assert (await running).status_code == 200


async def test_the_queue_of_each_model_has_a_bound_of_its_own(worker, router, gated, until) -> None:
    models = [{"id": "m"}, {"id": "adapter", "parent": "m"}]
    async with (
        worker(answer=gated, models=models) as one,
        router(one.url, max_worker_requests=1, max_queued=1) as front,
    ):
        asked = [asyncio.create_task(front.complete("first"))]
        await until(lambda: len(one.completions) == 1)
        for model in ("m", "adapter"):
            asked.append(asyncio.create_task(front.complete("x", model=model)))
            await until(lambda: queued(front) == len(asked) - 1)
            assert (await front.complete("x", model=model)).status_code == 429
        gated.let(3)
        assert [(await each).status_code for each in asked] == [200] * 3
        asked = [asyncio.create_task(front.complete("x")) for _ in range(2)]  # who left has given the place back
        gated.let(2)
        assert [(await each).status_code for each in asked] == [200] * 2


async def test_nobody_has_waited_too_long_for_a_loop_that_was_late(worker, router, gated, until) -> None:
    async with worker(answer=gated) as one, router(one.url, max_worker_requests=1, queue_timeout_s=0.2) as front:
        asked = [asyncio.create_task(front.complete("x")) for _ in range(2)]
        await until(lambda: queued(front) == 1)
        time.sleep(0.5)  # noqa: ASYNC251 - holds the loop up
        gated.let(2)
        assert [(await each).status_code for each in asked] == [200] * 2


async def test_a_queued_request_whose_client_leaves_is_never_sent(worker, router, gated, until) -> None:
    async with worker(answer=gated) as one, router(one.url, max_worker_requests=1) as front:
        running = asyncio.create_task(front.complete("first"))
        await until(lambda: len(one.completions) == 1)
        leaving = asyncio.create_task(front.complete("never"))
        await until(lambda: queued(front) == 1)
        leaving.cancel()
        await until(lambda: queued(front) == 0)
        last = asyncio.create_task(front.complete("last"))
        gated.let(2)
        assert [(await each).status_code for each in (running, last)] == [200, 200]
        assert prompts_of(one) == ["first", "last"]


async def test_a_queued_request_is_decided_when_it_leaves_the_queue_with_caches_as_they_are_then(
    worker, router, gated, until
) -> None:
    tokens = list(range(1, 65))
    async with (
        worker(answer=gated) as one,
        worker(answer=gated) as two,
        router(one.url, two.url, max_fleet_requests=1, block_size=16) as front,
    ):
        running = asyncio.create_task(front.complete([7] * 40))
        await until(lambda: len(one.completions) + len(two.completions) == 1)
        busy = one if one.completions else two  # at its arrival, the request would go to the other one
        waiting = asyncio.create_task(front.complete(tokens))
        await until(lambda: queued(front) == 1)
        front.hold(busy.url, tokens)  # while it waits
        gated.let(2)
        assert (await running).status_code == 200
        headers = (await waiting).headers
        assert (headers["x-kvist-worker"], headers["x-kvist-overlap-tokens"]) == (busy.url, "48")


async def test_a_worker_at_its_bound_is_passed_over_for_one_with_room(worker, router, gated, until) -> None:
    tokens = list(range(1, 1025))
    async with (
        worker(answer=gated) as one,
        worker() as two,
        router(one.url, two.url, max_worker_requests=1, block_size=16) as front,
    ):
        front.hold(one.url, tokens)
        running = asyncio.create_task(front.complete(tokens))
        await until(lambda: len(one.completions) == 1)
        assert (await front.complete(tokens)).headers["x-kvist-worker"] == two.url
        gated.let()
        assert (await running).status_code == 200


async def test_the_fleet_as_a_whole_and_uncached_tokens_are_bounded_too(worker, router, gated, until) -> None:
    for bound in ({"max_fleet_requests": 2}, {"max_worker_prefill_tokens": 150}, {"max_fleet_prefill_tokens": 150}):
        num_workers = 1 if "max_worker_prefill_tokens" in bound else 2
        async with worker(answer=gated) as one, worker(answer=gated) as two:
            urls = [one.url, two.url][:num_workers]

            def num_sent() -> int:
                return len(one.completions) + len(two.completions)

            async with router(*urls, block_size=16, **bound) as front:
                asked = [asyncio.create_task(front.complete([idx] * 100)) for idx in range(1, 5)]
                await until(lambda: num_sent() + queued(front) == 4)
                assert num_sent() == 2
                gated.let(4)
                assert [(await each).status_code for each in asked] == [200] * 4


@pytest.mark.parametrize("status", [429, 503])
async def test_a_worker_that_is_too_busy_is_spared_for_as_long_as_it_asks(worker, router, http_bytes, status) -> None:
    async def busy(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"{}", status=status, extra="retry-after: 30\r\n"))

    async with worker(answer=busy) as one, worker() as two, router(one.url, two.url, policy="round-robin") as front:
        for _ in range(8):
            assert (await front.complete()).headers["x-kvist-worker"] == two.url
        assert len(one.completions) == 1


async def test_retries_are_budgeted_so_that_a_sick_fleet_is_not_made_sicker(worker, router, http_bytes) -> None:
    async def fail(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"{}", status=502))

    async with (
        worker(answer=fail) as one,
        worker(answer=fail) as two,
        router(one.url, two.url, breaker_failures=100_000) as front,
    ):
        for _ in range(200):
            assert (await front.complete()).status_code == 502
        num_sent = len(one.completions) + len(two.completions)
        assert 200 + 100 <= num_sent <= 200 + 100 + 200 * 0.2 + 1


async def test_what_a_stopped_worker_has_not_begun_to_answer_goes_elsewhere_and_it_gets_no_more(
    worker, router, until, monkeypatch
) -> None:
    """A stopped process: the kernel accepts connections for it, and nothing is ever said."""

    async def hang(*_: Any) -> None:
        one.health_gate.clear()
        one.is_stopped = True
        await asyncio.Event().wait()

    class Stopping(worker):
        is_stopped = False

        async def _reply(self, received: Any, writer: asyncio.StreamWriter) -> None:
            if self.is_stopped and received.target == "/metrics":
                await asyncio.Event().wait()
            await super()._reply(received, writer)

    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    async with (
        Stopping(answer=hang) as one,
        worker() as two,
        router(one.url, policy="round-robin", silence_timeout_s=0.2, health_timeout_s=60) as front,
    ):
        asked = [asyncio.create_task(front.complete(str(idx))) for idx in range(3)]
        await until(lambda: len(one.completions) == 3)
        assert (await front.client.post("/workers", json={"url": two.url})).status_code == 201
        answers = await asyncio.gather(*asked)
        assert [answer.headers["x-kvist-worker"] for answer in answers] == [two.url] * 3
        assert (await front.workers())[one.url]["state"] == "unhealthy"
        assert "sent no byte" in (await front.workers())[one.url]["last_failure"]
        assert (await front.complete()).headers["x-kvist-worker"] == two.url
        assert len(one.completions) == 3


async def test_a_worker_that_works_in_silence_and_answers_checks_is_left_alone(
    worker, router, gated, until, monkeypatch
) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    async with worker(answer=gated) as one, worker() as two, router(one.url, silence_timeout_s=0.1) as front:
        asked = asyncio.create_task(front.complete())
        await until(lambda: sum(received.target == "/metrics" for received in one.received) >= 30)
        assert (await front.client.post("/workers", json={"url": two.url})).status_code == 201
        gated.let()
        assert (await asked).headers["x-kvist-worker"] == one.url


async def test_a_full_worker_is_waited_for_by_whom_it_spares_more_than_that(worker, router, gated, until) -> None:
    long, short = list(range(50_000)), [7] * 16
    async with (
        worker(answer=gated) as one,
        worker() as two,
        router(one.url, two.url, max_worker_requests=1, block_size=16, expected_cache_tokens=0) as front,
    ):
        front.hold(one.url, long)
        capacity = front.service.fleet.get(one.url).capacity
        asked = [asyncio.create_task(front.complete(long))]
        await until(lambda: len(one.completions) == 1)
        explained = await front.explain(long)  # nobody knows yet how long its requests take
        assert (explained["queued"], [each["worker"] for each in explained["candidates"]]) == (False, [two.url])
        capacity.ends_a_second = 2.0
        explained = await front.explain(long)
        assert (explained["queued"], explained["worker"]) == (True, one.url)
        waits_s = {each["worker"]: each["seconds"]["wait"] for each in explained["candidates"]}
        assert waits_s[one.url] >= 0.5 > waits_s[two.url]
        asked.append(asyncio.create_task(front.complete(long)))
        await until(lambda: queued(front) == 1)
        assert (await front.complete(short)).headers["x-kvist-worker"] == two.url
        headers = {"x-kvist-queue-timeout": "0.01"}
        late = await front.client.post("/v1/completions", json={"model": "m", "prompt": long}, headers=headers)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
        capacity.ends_a_second = 0.01
        assert (await front.complete(long)).headers["x-kvist-worker"] == two.url
        gated.let(2)
        assert {(await each).headers["x-kvist-worker"] for each in asked} == {one.url}
        assert (await front.metrics())['kvist_router_queue_seconds_count{model="m"}'] == 1


async def test_a_worker_with_too_many_prefill_tokens_is_waited_for_by_whom_it_spares_more(
    worker, router, gated, until
) -> None:
    long = list(range(50_000))
    async with (
        worker(answer=gated) as one,
        worker() as two,
        router(one.url, two.url, max_worker_prefill_tokens=100, block_size=16, expected_cache_tokens=0) as front,
    ):
        front.hold(one.url, long)
        asked = [asyncio.create_task(front.complete(long + [7] * 200))]
        await until(lambda: len(one.completions) == 1)
        one_capacity = front.service.fleet.get(one.url).capacity
        assert (await front.explain(long))["worker"] == two.url  # how fast its requests end is not known yet
        one_capacity.ends_a_second = 2.0
        explained = await front.explain(long)
        assert (explained["queued"], explained["worker"]) == (True, one.url)
        asked.append(asyncio.create_task(front.complete(long)))
        await until(lambda: queued(front) == 1)
        assert (await front.complete([8] * 200)).headers["x-kvist-worker"] == two.url
        gated.let(2)
        assert {(await each).headers["x-kvist-worker"] for each in asked} == {one.url}


async def test_a_bound_is_learnt_from_what_a_worker_reports(worker, router, gated, until, monkeypatch) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    page = 'vllm:num_requests_running{engine="0"} 8.0\nvllm:num_requests_waiting{engine="0"} 12.0\n'
    async with worker(answer=gated) as one, router(one.url) as front:
        asked = [asyncio.create_task(front.complete(str(idx))) for idx in range(20)]
        await until(lambda: len(one.completions) == 20)
        one.metrics = page

        async def has_learnt() -> bool:
            return (await front.workers())[one.url]["max_requests"] is not None

        await front.until(has_learnt)
        asked += [asyncio.create_task(front.complete(str(idx))) for idx in range(20, 30)]
        await until(lambda: queued(front) == 10)
        one.metrics = page.replace("12.0", "0.0")
        gated.let(30)
        assert [(await each).status_code for each in asked] == [200] * 30


@pytest.mark.parametrize(
    ("is_streamed", "num_learnt", "limits", "num_sent"),
    [
        (True, 60_000, {}, 4),  # 8,000 tokens
        (False, 60_000, {}, 6),  # which nobody knows to be computed before the whole answer is there
        (True, 40_000, {}, 6),  # too few to know
        (True, 60_000, {"max_worker_prefill_tokens": 10**9}, 6),
    ],
)
async def test_no_more_prompts_pile_up_at_a_worker_than_it_computes_in_seconds(
    worker,
    router,
    gated,
    until,
    monkeypatch,
    tmp_path,
    is_streamed: bool,
    num_learnt: int,
    limits: dict[str, int],
    num_sent: int,
) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    async with worker(answer=gated) as one:
        speed = {"worker": one.url, "rank": 0, "seconds": num_learnt / 1000, "work": num_learnt}
        (tmp_path / "router.speeds.json").write_text(json.dumps([speed]))
        async with router(one.url, block_size=16, state_dir=str(tmp_path), **limits) as front:

            async def ask(first: int, last: int) -> list[asyncio.Task[httpx.Response]]:
                prompts = ([idx] * 2000 for idx in range(first, last))
                asked = [asyncio.create_task(front.complete(each, stream=is_streamed)) for each in prompts]
                await until(lambda: len(one.completions) + queued(front) == last)
                num_seen = len(one.received)
                await until(lambda: sum(each.target == "/metrics" for each in one.received[num_seen:]) >= 3)
                return asked

            asked = [*await ask(0, 4), *await ask(4, 6)]
            assert (len(one.completions), queued(front)) == (num_sent, 6 - num_sent)
            gated.let(1)
            assert [each.status_code for each in await asyncio.gather(asked[0])] == [200]
            await until(lambda: len(one.completions) == min(6, num_sent + 1))
            gated.let(5)
            assert [(await each).status_code for each in asked] == [200] * 6


def test_a_bound_of_prompts_is_what_a_worker_computes_in_seconds_once_half_as_much_is_in_flight() -> None:
    capacity = Capacity()
    for prefill_work, work_a_second, expected in (
        (1e9, float("inf"), None),
        (4 * 25_000.0, 25_000.0, None),
        (4 * 25_000.0 + 1, 25_000.0, 8 * 25_000.0),
        (4 * 25_000.0, 25_000.0, None),
    ):
        capacity.learn_prefill(prefill_work, work_a_second)
        assert capacity.max_prefill_work == expected
    capacity.learn_prefill(1e9, 25_000.0)
    capacity.reset()
    assert capacity.max_prefill_work is None


async def test_no_bound_is_learnt_for_a_prefill_worker(worker, router, gated, until, monkeypatch) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    page = "vllm:num_requests_running 8.0\nvllm:num_requests_waiting 12.0\n"
    async with worker(answer=gated, metrics=page) as one, router(prefill_worker_urls=(one.url,)) as front:
        asked = [asyncio.create_task(front.complete(str(idx))) for idx in range(20)]
        await until(lambda: len(one.completions) == 20)
        num_seen = len(one.received)
        await until(lambda: sum(each.target == "/metrics" for each in one.received[num_seen:]) >= 40)
        assert (await front.workers())[one.url]["max_requests"] is None
        gated.let()
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        num_seen = len(one.received)
        await until(lambda: sum(each.target == "/metrics" for each in one.received[num_seen:]) >= 3)
        gated.let()
        await until(lambda: front.service.fleet.get(one.url).capacity.ends_a_second > 0)
        gated.let(18)
        assert [(await each).status_code for each in asked] == [200] * 20


def test_reports_of_all_engines_are_read_and_other_pages_are_none() -> None:
    vllm = b'# HELP x\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
    assert parse_report(vllm + b'vllm:num_requests_waiting{engine="0"} 5.0\n') == LoadReport(7, 5)
    assert parse_report(vllm + b'vllm:num_requests_waiting_by_reason{reason="x"} 5.0\n') == LoadReport(7, 0)
    assert parse_report(b'sglang:num_running_reqs{model="m"} 2\nsglang:num_queue_reqs{model="m"} 1\n') == LoadReport(
        2, 1
    )
    assert parse_report(b"kvist_engine_requests_running 1.0\nkvist_engine_requests_waiting 2e1\n") == LoadReport(1, 20)
    assert parse_report(b"vllm:num_requests_running 1.2.3\n") is None
    assert parse_report(b"process_start_time_seconds 1.0\n") is None


def test_of_a_worker_without_reports_is_learnt_how_fast_its_requests_end() -> None:
    capacity = Capacity()
    for num_ended in range(1, 61, 3):
        capacity.learn(None, 100, [num_ended])
    assert 2 < capacity.ends_a_second <= 3
    assert capacity.max_requests is None


def test_a_bound_never_starves_the_batch_and_grows_back() -> None:
    """A worker that runs at most `size` requests, whatever it is given, always has as many as it can run."""
    for size in (1, 16, 256):
        capacity, num_wanted = Capacity(), 1000
        for _ in range(40):
            num_in_flight = min(num_wanted, capacity.max_requests or num_wanted)
            capacity.learn(LoadReport(min(size, num_in_flight), max(0, num_in_flight - size)), num_in_flight)
        assert capacity.max_requests is not None
        assert size + size // 4 <= capacity.max_requests <= size + max(4, size // 4) * 3
        for _ in range(40):  # its requests have become smaller: it takes all
            num_in_flight = min(num_wanted, capacity.max_requests or num_wanted)
            capacity.learn(LoadReport(num_in_flight, 0), num_in_flight)
        assert capacity.max_requests is None or capacity.max_requests >= num_wanted


def test_a_batch_that_is_half_empty_for_a_moment_lowers_no_bound() -> None:
    """Requests of one length end together."""
    capacity = Capacity()
    for _ in range(20):
        capacity.learn(LoadReport(32, 20), num_in_flight=52)
        capacity.learn(LoadReport(8, 28), num_in_flight=36)
        assert capacity.max_requests is not None
        assert capacity.max_requests >= 32
    for _ in range(20):  # it has room for fewer, for good
        capacity.learn(LoadReport(8, 28), num_in_flight=36)
    assert capacity.max_requests is not None
    assert capacity.max_requests <= 8 + 4


def test_short_requests_have_a_reserve_for_the_time_in_which_the_router_sends_more() -> None:
    capacity = Capacity()
    capacity.learn(LoadReport(32, 400), num_in_flight=432, ended=[20])
    assert capacity.max_requests is None  # of what has just begun nobody knows how fast it ends
    for seconds in range(1, 11):
        capacity.learn(LoadReport(32, 400), num_in_flight=432, ended=[1500 * seconds])
    assert capacity.max_requests == 32 + 150
    assert 1000 < capacity.ends_a_second <= 1500


def test_what_other_routers_have_done_is_not_taken_for_speed_when_they_come_or_leave() -> None:
    capacity = Capacity()
    for ended in ([0, 0], [10, 0], [20, 0], [30, 10**6], [40, 10**6 + 10], [50, 0], [60, 0]):
        capacity.learn(LoadReport(8, 0), num_in_flight=8, ended=ended)
        assert 0 <= capacity.ends_a_second <= 20
    assert capacity.ends_a_second > 5


def test_a_batch_that_grows_has_a_reserve_for_what_it_takes_until_the_next_report() -> None:
    """Prompts are computed one after the other: a burst takes seconds to fill a batch."""
    capacity = Capacity()
    for num_running in range(30, 240, 30):
        capacity.learn(LoadReport(num_running, 1000 - num_running), num_in_flight=1000)
        assert capacity.max_requests == (None if num_running == 30 else num_running + max(30, num_running // 4))


def test_a_bound_is_forgotten_where_it_bounds_nothing_and_by_who_has_nothing_to_do() -> None:
    capacity = Capacity()
    for _ in range(2):
        capacity.learn(LoadReport(8, 100), num_in_flight=108)
    assert capacity.max_requests is not None
    for _ in range(60):
        capacity.learn(LoadReport(5, 0), num_in_flight=5)
    assert capacity.max_requests is None
    capacity.learn(LoadReport(8, 100), num_in_flight=108)
    capacity.reset()
    assert capacity.max_requests is None


def test_routers_share_what_is_too_much() -> None:
    capacity = Capacity()
    for _ in range(2):
        capacity.learn(LoadReport(100, 112), num_in_flight=53)
    assert capacity.max_requests == 53 - (112 - 25) // 4
    capacity = Capacity(fixed_requests=5)
    capacity.learn(LoadReport(100, 112), num_in_flight=53)
    assert capacity.max_requests == 5


async def test_who_waits_for_a_worker_that_asks_to_be_spared_goes_where_there_is_room(
    worker, router, until, http_bytes
) -> None:
    long, gate = list(range(50_000)), asyncio.Event()

    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(http_bytes.response(b"{}", status=503, extra="retry-after: 60\r\n"))

    async with (
        worker(answer=refuse) as one,
        worker() as two,
        router(one.url, two.url, max_worker_requests=1, block_size=16, expected_cache_tokens=0) as front,
    ):
        front.hold(one.url, long)
        asked = [asyncio.create_task(front.complete(long))]
        await until(lambda: len(one.completions) == 1)
        front.service.fleet.get(one.url).capacity.ends_a_second = 2.0
        asked.append(asyncio.create_task(front.complete(long, user="second")))
        await until(lambda: queued(front) == 1)
        gate.set()
        assert [(await each).headers["x-kvist-worker"] for each in asked] == [two.url] * 2
        assert len(one.completions) == 1


@pytest.mark.parametrize("gone", ["removed", "silent"])
async def test_who_waits_for_a_worker_that_leaves_goes_at_once_where_there_is_room(
    worker, router, http_bytes, until, gone: str
) -> None:
    long, never, gate = list(range(50_000)), {"health_interval_s": 1e6}, asyncio.Event()

    async def stream(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(b"data: {}\n\n"))
        await gate.wait()
        writer.write(http_bytes.chunk(b""))

    async with (
        worker(answer=stream) as one,
        worker() as two,
        router(one.url, two.url, max_worker_requests=1, block_size=16, expected_cache_tokens=0, **never) as front,
    ):
        front.hold(one.url, long)
        asked = [asyncio.create_task(front.complete(long))]
        left = front.service.fleet.get(one.url)
        await until(lambda: len(one.completions) == 1 and not left.on_silence)
        left.capacity.ends_a_second = 2.0
        asked.append(asyncio.create_task(front.complete(long)))
        await until(lambda: queued(front) == 1)
        if gone == "removed":
            assert (await front.client.delete("/workers", params={"url": one.url})).status_code == 202
        else:
            front.service.keeper.membership._give_up(left, 1.0)
        await until(lambda: len(two.completions) == 1)
        gate.set()
        assert [(await each).headers["x-kvist-worker"] for each in asked] == [one.url, two.url]


async def test_who_waits_tries_a_worker_whose_circuit_was_open_long_enough(
    worker, router, gated, http_bytes, until
) -> None:
    async def fail(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"{}", status=500))

    limits = {"max_worker_requests": 1, "breaker_failures": 1, "breaker_cooldown_s": 0.5, "health_interval_s": 1e6}
    async with worker(answer=gated) as one, worker(answer=fail) as two, router(one.url, **limits) as front:
        asked = [asyncio.create_task(front.complete())]
        await until(lambda: len(one.completions) == 1)
        await front.client.post("/workers", json={"url": two.url})
        await front.until_state(two.url, "healthy")
        assert (await front.complete()).status_code == 500
        two.answer = None
        asked.append(asyncio.create_task(front.complete()))
        assert (await asked[1]).headers["x-kvist-worker"] == two.url
        gated.let()
        assert (await asked[0]).status_code == 200


async def test_a_worker_that_is_removed_and_asks_to_be_spared_then_bounds_nobody(worker, router, http_bytes) -> None:
    gate = asyncio.Event()

    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(http_bytes.response(b"{}", status=503, extra="retry-after: 60\r\n"))

    async with worker(answer=refuse) as one, worker() as two, router(one.url, drain_timeout_s=0.01) as front:
        asked = asyncio.create_task(front.complete())
        await front.until(lambda: asyncio.sleep(0, len(one.completions) == 1))
        await front.client.post("/workers", json={"url": two.url})
        await front.until_state(two.url, "healthy")
        await front.client.delete("/workers", params={"url": one.url})
        await front.until_state(one.url, "gone")
        gate.set()
        assert (await asked).headers["x-kvist-worker"] == two.url
        assert one.url not in front.service.fleet.bounded


async def test_a_priority_of_any_size_waits_at_one_of_several_fronts_and_holds_nobody_up(
    worker, fronts_of, gated, until
) -> None:
    async with (
        worker(answer=gated) as one,
        fronts_of(RouterConfig(worker_urls=(one.url,), port=0, max_worker_requests=1), 2) as fronts,
        httpx.AsyncClient(base_url=fronts[0].url, timeout=60, trust_env=False) as client,
    ):
        asked = []
        for number, priority in enumerate([0, 2**63, -(2**63) - 1, 1]):
            body = {"model": "m", "prompt": str(number), "priority": priority}
            asked.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            await until(lambda number=number: len(one.completions) + fronts[0].keeper.load.num_waiting == number + 1)
        gated.let(4)
        assert [(await each).status_code for each in asked] == [200] * 4
        assert prompts_of(one) == ["0", "2", "3", "1"]
