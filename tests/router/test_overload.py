"""Faults of workers and clients under load cost their own requests, and what waits is neither lost nor passed over."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from kvist.openai.requests import read_fields, without_field
from kvist.router.fleet.worker import parse_report
from kvist.router.forward import Forwarding
from kvist.router.prompts import ParsedRequest, Reading, _rest_of


def admission_of(front: Any) -> Any:
    return front.service._forwarder.admission


def num_queued(front: Any) -> int:
    return sum(admission_of(front).queued.values())


def prompts_of(worker: Any) -> list[str]:
    return [json.loads(received.body)["prompt"] for received in worker.completions]


@pytest.fixture
def gate() -> asyncio.Semaphore:
    return asyncio.Semaphore(0)


@pytest.fixture
def gated(http_bytes: Any, gate: asyncio.Semaphore) -> Any:
    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        await gate.acquire()
        writer.write(http_bytes.response(http_bytes.completion()))

    return answer


def let(gate: asyncio.Semaphore, num_answers: int) -> None:
    for _ in range(num_answers):
        gate.release()


async def test_models_that_share_workers_wait_in_one_order(worker, router, gated, gate, until) -> None:
    models = [{"id": "m"}, {"id": "adapter", "parent": "m"}]
    async with worker(answer=gated, models=models) as one, router(one.url, max_worker_requests=1) as front:
        asked = []
        order = [("m", "first", 0), ("m", "a", 0), ("adapter", "b", 0), ("m", "c", 0), ("adapter", "urgent", -1)]
        for model, prompt, priority in order:
            asked.append(asyncio.create_task(front.complete(prompt, model=model, priority=priority)))
            await until(lambda: len(one.completions) == 1 and num_queued(front) == len(asked) - 1)
        let(gate, 5)
        assert [(await each).status_code for each in asked] == [200] * 5
        assert prompts_of(one) == ["first", "urgent", "a", "b", "c"]


async def test_a_queue_of_a_model_without_room_holds_no_other_up(worker, router, gated, gate, until) -> None:
    async with (
        worker(answer=gated, models=[{"id": "m"}]) as one,
        worker(answer=gated, models=[{"id": "n"}]) as two,
        router(one.url, two.url, max_worker_requests=1) as front,
    ):
        asked = [asyncio.create_task(front.complete("x", model="m")) for _ in range(2)]
        await until(lambda: num_queued(front) == 1)
        asked.append(asyncio.create_task(front.complete("y", model="n")))
        await until(lambda: len(two.completions) == 1)
        asked.append(asyncio.create_task(front.complete("z", model="n")))
        await until(lambda: num_queued(front) == 2)
        two.answer = None
        two.kill()
        await two.start()
        assert (await asked[3]).status_code == 200
        let(gate, 3)
        assert [(await asked[idx]).status_code for idx in range(2)] == [200] * 2


async def test_a_busy_worker_is_not_spared_for_less_because_it_says_less_later(worker, router, http_bytes) -> None:
    async def busy(received: Any, writer: asyncio.StreamWriter) -> None:
        is_first = received.body and json.loads(received.body)["prompt"] == "first"
        extra = "retry-after: 1000\r\n" if is_first else ""
        writer.write(http_bytes.response(b"{}", status=429, extra=extra))

    async with worker(answer=busy) as one, router(one.url) as front:
        assert (await front.complete("first")).status_code == 429
        worker_of, admission = front.service.fleet.get(one.url), admission_of(front)
        paused_until_s = worker_of.capacity.paused_until_s
        assert paused_until_s - admission.now_s() > 30
        admission.pause(worker_of, None)
        assert worker_of.capacity.paused_until_s == paused_until_s


async def test_a_conversation_goes_on_at_its_own_worker_even_where_that_is_at_its_bound(
    worker, router, until, http_bytes
) -> None:
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "model": "m"}

    class Responding(worker):
        def __init__(self) -> None:
            super().__init__(answer=self.respond)
            self.gate = asyncio.Semaphore(0)

        async def respond(self, received: Any, writer: asyncio.StreamWriter) -> None:
            if received.target == "/v1/completions":
                await self.gate.acquire()
            writer.write(http_bytes.response(json.dumps(response).encode()))

    async with (
        Responding() as one,
        Responding() as two,
        router(one.url, two.url, max_worker_requests=1, policy="round-robin") as front,
    ):
        first = await front.client.post("/v1/responses", json={"model": "m", "input": "hello"})
        owner, other = (one, two) if first.headers["x-kvist-worker"] == one.url else (two, one)
        asked = [asyncio.create_task(front.complete(str(idx))) for idx in range(2)]
        await until(lambda: admission_of(front).load.num_running == 2)
        other.gate.release()
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        body = {"model": "m", "input": "on", "previous_response_id": "resp_1"}
        assert (await front.client.post("/v1/responses", json=body)).headers["x-kvist-worker"] == owner.url
        owner.gate.release()
        assert [(await each).status_code for each in asked] == [200] * 2


async def test_prefill_workers_answer_nothing_because_decode_workers_are_full(
    worker, router, gated, gate, until
) -> None:
    async with worker(answer=gated) as decode, worker() as prefill:
        urls = {"prefill_worker_urls": (prefill.url,), "decode_worker_urls": (decode.url,)}
        async with router(**urls, max_worker_requests=1) as front:
            asked = [asyncio.create_task(front.complete("short"))]
            await until(lambda: len(decode.completions) == 1)
            asked.append(asyncio.create_task(front.complete("waits")))
            await until(lambda: num_queued(front) == 1)
            let(gate, 2)
            assert [(await each).headers["x-kvist-worker"] for each in asked] == [decode.url] * 2
            assert prefill.completions == []


class Stopping:
    """Makes of a scripted worker one that can be stopped and goes on."""

    def __new__(cls, base: Any) -> Any:
        class Stoppable(base):
            goes = None

            async def _reply(self, received: Any, writer: asyncio.StreamWriter) -> None:
                self.goes = self.goes or asyncio.Event()
                if received.method == "POST" or (received.target == "/metrics" and self.completions):
                    await self.goes.wait()
                await super()._reply(received, writer)

            def go(self) -> None:
                self.health_gate.set()
                self.goes.set()

        return Stoppable


async def test_what_nobody_else_can_answer_is_left_to_a_silent_worker(
    worker, router, until, monkeypatch, logged
) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    async with Stopping(worker)() as one, router(one.url, silence_timeout_s=0.1) as front:
        asked = [asyncio.create_task(front.complete(str(idx))) for idx in range(3)]
        await until(lambda: len(one.completions) == 3)
        one.health_gate.clear()
        await front.until_state(one.url, "unhealthy")
        await until(lambda: front.service.fleet.get(one.url).num_given_up >= 3)
        told = [line for line in logged("kvist.router.fleet.membership") if "does not respond" in line]
        assert len(told) == 1
        one.go()
        assert [(await each).status_code for each in asked] == [200] * 3
        assert len(one.completions) == 3


async def test_all_that_a_silent_worker_has_not_begun_goes_elsewhere(worker, router, until, monkeypatch) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    num_asked = 150  # more than retries are budgeted for
    async with (
        Stopping(worker)() as one,
        worker() as two,
        router(one.url, silence_timeout_s=0.3) as front,
        httpx.AsyncClient(base_url=front.service.url, timeout=60, limits=httpx.Limits(), trust_env=False) as client,
    ):
        bodies = [{"model": "m", "prompt": str(idx)} for idx in range(num_asked)]
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        await until(lambda: len(one.completions) == num_asked)
        one.health_gate.clear()
        assert (await client.post("/workers", json={"url": two.url})).status_code == 201
        assert [(await each).status_code for each in asked] == [200] * num_asked
        assert sorted(map(int, prompts_of(two))) == list(range(num_asked))


async def test_a_worker_that_was_silent_is_used_again_soon_whatever_the_interval_of_checks(
    worker, router, until, monkeypatch
) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
    monkeypatch.setattr("kvist.router.fleet.membership.UNSURE_INTERVAL_S", 0.02)
    async with Stopping(worker)() as one, router(one.url, silence_timeout_s=0.1, health_interval_s=1.0) as front:
        asked = asyncio.create_task(front.complete("x"))
        await until(lambda: len(one.completions) == 1)
        one.health_gate.clear()
        await front.until_state(one.url, "unhealthy")
        one.go()
        await front.until_state(one.url, "healthy")
        assert (await asked).status_code == 200
        num_checks = sum(received.target == "/health" for received in one.received)
        assert num_checks >= 3


async def test_a_prompt_whose_reading_ends_as_its_client_leaves_is_never_sent(worker, router, monkeypatch) -> None:
    stopped = asyncio.Event()

    async with worker() as one, router(one.url) as front:
        reader = front.service._forwarder.reader
        forwardings: list[Forwarding] = []
        start = Forwarding.start

        def note(forwarding: Forwarding) -> None:
            forwardings.append(forwarding)
            start(forwarding)

        async def finish(reading: Reading) -> ParsedRequest:
            await asyncio.sleep(0)

            def leave() -> None:
                forwardings[0].stop()
                stopped.set()

            asyncio.get_running_loop().call_soon(leave)  # before what is called when this has returned
            return _rest_of(reading)

        monkeypatch.setattr(Forwarding, "start", note)
        monkeypatch.setattr(type(reader), "read_now", type(reader)._reading)
        monkeypatch.setattr(type(reader), "finish", lambda _, reading: finish(reading))
        asked = asyncio.create_task(front.complete("never"))
        await stopped.wait()
        monkeypatch.undo()
        asked.cancel()
        assert (await front.complete("last")).status_code == 200
        assert prompts_of(one) == ["last"]
        assert admission_of(front).load.num_running == 0


async def test_a_fault_of_ours_while_a_prompt_is_read_on_a_thread_is_answered(worker, router, monkeypatch) -> None:
    async with worker() as one, router(one.url) as front:
        reader = front.service._forwarder.reader

        async def fail(*_: object) -> None:
            await asyncio.sleep(0)
            raise KeyError("a fault")

        monkeypatch.setattr(type(reader), "read_now", type(reader)._reading)
        monkeypatch.setattr(type(reader), "finish", fail)
        answer = await front.complete("x")
        assert answer.status_code == 500
        assert "router failed" in answer.json()["error"]["message"]


async def test_a_fault_of_ours_as_a_request_leaves_the_queue_costs_that_request_alone(
    worker, router, gated, gate, until, monkeypatch
) -> None:
    async with worker(answer=gated) as one, router(one.url, max_worker_requests=1) as front:
        asked = [asyncio.create_task(front.complete("first"))]
        await until(lambda: len(one.completions) == 1)
        for prompt in ("faulty", "next"):
            asked.append(asyncio.create_task(front.complete(prompt)))
            await until(lambda: num_queued(front) == len(asked) - 1)
        plan, num_plans = Forwarding._plan, 0

        def fail_once(forwarding: Forwarding) -> Any:
            nonlocal num_plans
            num_plans += 1
            if num_plans == 1:
                raise KeyError("a fault")
            return plan(forwarding)

        monkeypatch.setattr(Forwarding, "_plan", fail_once)
        let(gate, 2)
        assert [(await each).status_code for each in asked] == [200, 500, 200]


@pytest.mark.parametrize("value", ["1e999", "9e99", "1.8e308"])
async def test_a_page_of_absurd_numbers_ends_nothing(worker, router, gated, gate, until, monkeypatch, value) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.01)
    page = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting {value}\n"
    async with worker(answer=gated, metrics=page) as one, router(one.url) as front:
        asked = asyncio.create_task(front.complete("x"))
        await until(lambda: sum(received.target == "/metrics" for received in one.received) >= 5)
        let(gate, 2)
        assert (await asked).status_code == 200
        assert (await front.complete("y")).status_code == 200


def test_absurd_reports_are_none() -> None:
    assert parse_report(b"vllm:num_requests_running 1e999\n") is None


def test_a_body_without_its_priority_has_all_else_as_it_was() -> None:
    body = b'{"prompt":[1, 2],"priority":7,"top_p":1.50,"seed":1e5,"user":"\\u00e9"}'
    assert without_field(body, read_fields(body), "priority") == body.replace(b'"priority":7,', b"")


async def test_a_client_may_send_any_number_of_requests_ahead(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        reader, writer = await asyncio.open_connection(front.client.base_url.host, front.client.base_url.port)
        num_asked = 1500
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * num_asked)
        for _ in range(num_asked):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"]}")
            await reader.readexactly(0)
        writer.close()
