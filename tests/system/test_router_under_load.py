"""The router as a process under load: workers that stop and refuse, clients that rush, wait, leave and do not read."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import pytest_asyncio
from stand_ins import Answer, StandIn, fetch, port_of, read, stand_ins, until

from kvist.cli.up import Child, ProcessGroup

pytestmark = [pytest.mark.xdist_group("whole system"), pytest.mark.asyncio(loop_scope="module")]

SILENCE_S, IDLE_S = 2, 4
TIMES = (
    "--silence-timeout-s",
    SILENCE_S,
    "--idle-timeout-s",
    IDLE_S,
    "--health-timeout-s",
    SILENCE_S,
    "--breaker-cooldown-s",
    1,
)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Workers and router are the module's."""


@dataclass
class Router:
    """A router's process."""

    child: Child

    def ask(
        self, prompt: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[Answer, asyncio.Task[Answer]]:
        """Return the answer as it comes, and what ends with it."""
        answer = Answer()
        body = {"model": "m", "prompt": prompt, **fields}
        reading = read(port_of(self.child.url), "/v1/completions", body, headers or {}, answer)
        return answer, asyncio.create_task(reading)

    async def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["url"]: worker for worker in (await fetch(self.child.url, "/workers"))["workers"]}

    async def metric(self, name: str) -> float:
        page = (await read(port_of(self.child.url), "/metrics", None, {}, Answer())).body.decode()
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))

    async def until_state(self, worker: StandIn, state: str) -> None:
        async def is_so() -> bool:
            return (await self.workers())[worker.url]["state"] == state

        await until(is_so)

    async def until_queued(self, number: int) -> None:
        async def is_so() -> bool:
            return await self.metric("kvist_router_queued_requests{") == number

        await until(is_so)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[list[StandIn]]:
    """Three workers."""
    async with stand_ins(3) as workers:
        yield workers


@asynccontextmanager
async def routing(*workers: StandIn, flags: tuple[object, ...] = ()) -> AsyncIterator[Router]:
    async with ProcessGroup() as group:
        urls = [worker.url for worker in workers]
        yield Router(
            await group.start(
                "router", "route", "--policy", "round-robin", "--port", "0", "--worker-urls", *urls, *map(str, flags)
            )
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(fleet: list[StandIn]) -> AsyncIterator[Router]:
    async with routing(*fleet, flags=TIMES) as router:
        yield router


async def all_prompts(fleet: list[StandIn]) -> Counter[str]:
    return Counter([prompt for worker in fleet for prompt in await worker.prompts()])


@pytest.mark.parametrize("number", [2000, pytest.param(8000, marks=pytest.mark.slow)])
async def test_thousands_of_streams_at_once_are_all_answered_and_sent_once_beside_idle_clients(
    fleet: list[StandIn], router: Router, number: int
) -> None:
    port, prompts = port_of(router.child.url), [f"burst {number} {idx} ".ljust(2700, "x") for idx in range(number)]
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1000)]
    answers = await asyncio.gather(*(router.ask(prompt, stream=True)[1] for prompt in prompts))
    assert Counter(answer.status for answer in answers) == {200: len(prompts)}
    assert all(answer.is_whole and b"data: [DONE]" in answer.body for answer in answers)
    num_received = await all_prompts(fleet)
    assert {num_received[prompt] for prompt in prompts} == {1}
    assert await router.metric("kvist_router_connections ") > len(idle)
    assert psutil.Process(router.child.process.pid).memory_info().rss < 2**30
    for reader, writer in idle:
        assert not reader.at_eof()
        writer.close()


async def test_a_stopped_worker_is_noticed_and_what_it_has_not_begun_goes_elsewhere_once(
    fleet: list[StandIn], router: Router
) -> None:
    stopped = fleet[0]
    streams = [router.ask(f"drip {idx}", stream=True) for idx in range(12)]
    await asyncio.gather(*(answer.has_begun.wait() for answer, _ in streams))
    held = [router.ask(f"hold {idx}") for idx in range(30)]

    async def all_came() -> bool:
        return sum("hold" in prompt for prompt in await all_prompts(fleet)) == len(held)

    await until(all_came)
    before = set(await stopped.prompts())
    assert any(prompt.startswith("hold") for prompt in before)
    began_s, reports_before = time.monotonic(), (await fetch(fleet[1].url, "/told"))["num_reports"]
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        await router.until_state(stopped, "unhealthy")
        # Each busy worker is asked once a second, however long it takes.
        num_reports = (await fetch(fleet[1].url, "/told"))["num_reports"] - reports_before
        assert num_reports <= time.monotonic() - began_s + 2
        assert "sent no byte" in (await router.workers())[stopped.url]["last_failure"]

        async def all_moved() -> bool:
            return sum("hold" in prompt for prompt in await all_prompts(fleet[1:])) == len(held)

        await until(all_moved)
        answers = await asyncio.gather(*(router.ask(f"after {idx}")[1] for idx in range(30)))
        assert {answer.status for answer in answers} == {200}
        assert stopped.url not in {answer.worker for answer in answers}
        ended = [reading for answer, reading in streams if answer.worker == stopped.url]
        assert len(ended) == 4
        for answer in await asyncio.gather(*ended):  # nobody can go on with them
            assert not answer.is_whole
            assert b"data: [DONE]" not in answer.body
            assert b'"code":"worker_failed"' in answer.body.replace(b": ", b":")
        for worker in fleet[1:]:
            await worker.order(release=True)
        for answer in await asyncio.gather(*(reading for _, reading in held)):
            assert (answer.status, answer.is_whole) == (200, True)
        going_on = [reading for answer, reading in streams if answer.worker != stopped.url]
        assert all(b"data: [DONE]" in answer.body for answer in await asyncio.gather(*going_on))
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    await router.until_state(stopped, "healthy")
    num_received = await all_prompts(fleet)
    for idx in range(len(held)):
        assert num_received[f"hold {idx}"] == 1 + (f"hold {idx}" in before)

    async def is_used() -> bool:
        return (await router.ask("again")[1]).worker == stopped.url

    await until(is_used)
    await stopped.order(release=True)


async def test_a_router_that_was_stopped_blames_nobody(fleet: list[StandIn], router: Router) -> None:
    async def is_at_peace() -> bool:
        return {(each["state"], each["circuit"]) for each in (await router.workers()).values()} == {
            ("healthy", "closed")
        }

    await until(is_at_peace)
    retried_before = await router.metric("kvist_router_retries_total")
    streams = [router.ask(f"drip on {idx}", stream=True) for idx in range(12)]
    await asyncio.gather(*(answer.has_begun.wait() for answer, _ in streams))
    held = [router.ask(f"hold on {idx}") for idx in range(12)]
    is_over = False
    answers: list[Answer] = []

    async def go_on() -> None:
        while not is_over:
            answers.append(await router.ask(f"go on {len(answers)}", stream=True)[1])

    clients = [asyncio.create_task(go_on()) for _ in range(8)]
    process = router.child.process
    for stopped_s in (IDLE_S + 1, 0.5, 0.5):
        num_answered = len(answers)

        async def goes_on(num_answered: int = num_answered) -> bool:
            return len(answers) >= num_answered + 30

        await until(goes_on)
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(stopped_s)  # longer than whatever the router waits for
        finally:
            process.send_signal(signal.SIGCONT)
    is_over = True
    await asyncio.gather(*clients)
    assert await is_at_peace()
    for worker in fleet:
        await worker.order(release=True)
    answers += await asyncio.gather(*(reading for _, reading in streams + held))
    assert {(answer.status, answer.is_whole) for answer in answers} == {(200, True)}
    assert all(b"data: [DONE]" in answer.body for answer, _ in streams)
    assert await router.metric("kvist_router_retries_total") == retried_before
    assert await router.metric("kvist_router_loop_late_seconds_total ") > IDLE_S


async def test_clients_that_read_nothing_hold_nobody_up_and_little_memory(fleet: list[StandIn], router: Router) -> None:
    process = psutil.Process(router.child.process.pid)
    resting_bytes, num_idle_readers = process.memory_info().rss, 24
    body = json.dumps({"model": "m", "prompt": "flood", "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    writers = []
    for _ in range(num_idle_readers):
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(router.child.url), limit=1024)
        writer.transport.pause_reading()
        writer.write(request)
        writers.append(writer)

    async def flooded() -> list[int]:
        return [(await fetch(worker.url, "/told"))["flooded_bytes"] for worker in fleet]

    async def stands_still() -> bool:
        first = await flooded()
        answers = await asyncio.gather(*(router.ask(f"beside {idx}", stream=True)[1] for idx in range(50)))
        assert {(answer.status, answer.is_whole) for answer in answers} == {(200, True)}
        return sum(first) > 0 and await flooded() == first

    await until(stands_still)
    assert process.memory_info().rss - resting_bytes < num_idle_readers * 2**20 + 2**24  # of 64 MiB each
    for writer in writers:
        writer.transport.abort()

    async def are_forgotten() -> bool:
        return all(each["running_requests"] == 0 for each in (await router.workers()).values())

    await until(are_forgotten)


@pytest.mark.parametrize("status", [429, 503])
async def test_what_a_busy_worker_refuses_is_answered_by_others(
    fleet: list[StandIn], router: Router, status: int
) -> None:
    busy = fleet[1]
    await busy.order(status=status)
    num_before = len(await busy.prompts())
    answers = await asyncio.gather(*(router.ask(f"busy {status} {idx}")[1] for idx in range(60)))
    assert {answer.status for answer in answers} == {200}
    assert busy.url not in {answer.worker for answer in answers}
    assert len(await busy.prompts()) - num_before <= 20  # of those that came before it said so
    await busy.order(status=None)

    async def is_used() -> bool:
        return (await router.ask("again")[1]).worker == busy.url

    await until(is_used)


async def test_what_workers_report_bounds_what_they_get_and_the_rest_waits(
    fleet: list[StandIn], router: Router
) -> None:
    room, num_held = 4, 20
    for worker in fleet:
        await worker.order(room=room)
    asked = [router.ask(f"hold beyond {idx}")[1] for idx in range(num_held * len(fleet))]

    async def is_learnt() -> bool:
        bounds = [each["max_requests"] for each in (await router.workers()).values()]
        return all(bound is not None and room < bound <= 2 * room for bound in bounds)

    await until(is_learnt)
    asked += [router.ask(f"beyond {idx}")[1] for idx in range(10)]
    await router.until_queued(10)
    for worker in fleet:
        await worker.order(release=True)
    assert {(answer.status, answer.is_whole) for answer in await asyncio.gather(*asked)} == {(200, True)}
    for worker in fleet:
        await worker.order(room=None)


async def test_a_queue_keeps_its_order_and_its_deadlines_and_is_served_before_the_router_ends(
    fleet: list[StandIn],
) -> None:
    worker = fleet[2]
    async with routing(worker, flags=("--max-worker-requests", "1")) as router:
        running = router.ask("hold running")[1]

        async def runs() -> bool:
            return "hold running" in await worker.prompts()

        await until(runs)
        queued = []
        for prompt, priority in (("second", 0), ("last", 5), ("leaves", 0), ("third", 0), ("first", -1)):
            queued.append(router.ask(f"queued {prompt}", priority=priority)[1])
            await router.until_queued(len(queued))
        queued.pop(2).cancel()
        await router.until_queued(4)
        late = await router.ask("late", headers={"x-kvist-queue-timeout": "0.2"})[1]
        assert (late.status, json.loads(late.body)["error"]["code"]) == (503, "timeout")
        assert int(late.headers["retry-after"]) >= 1
        router.child.process.terminate()
        await worker.order(release=True)
        answers = await asyncio.gather(running, *queued)
        assert {(answer.status, answer.is_whole) for answer in answers} == {(200, True)}
        assert await router.child.process.wait() == 0
    came = [prompt for prompt in await worker.prompts() if prompt.startswith(("queued", "late"))]
    assert came == ["queued first", "queued second", "queued third", "queued last"]


async def test_bounds_of_worker_and_fleet_the_wait_for_them_and_retries_are_those_of_the_flags(
    fleet: list[StandIn],
) -> None:
    workers = fleet[:2]
    flags = ("--max-worker-prefill-tokens", 150, "--max-fleet-requests", 6, "--queue-timeout-s", 0.3)
    async with routing(*workers, flags=(*flags, "--breaker-failures", 100_000)) as router:
        for length, num_sent in ((100, 4), (1, 6)):  # until no worker has room, until the fleet has none
            first = (await all_prompts(workers)).total()
            held = [router.ask(f"hold {length} {idx} ".ljust(4 * length))[1] for idx in range(num_sent)]

            async def have_come(number: int = first + num_sent) -> bool:
                return (await all_prompts(workers)).total() == number

            await until(have_come)
            late = await router.ask("too late", headers={"x-kvist-queue-timeout": "3600"})[1]
            assert (late.status, json.loads(late.body)["error"]["code"]) == (503, "timeout")
            assert await have_come()
            for worker in workers:
                await worker.order(release=True)
            assert {answer.status for answer in await asyncio.gather(*held)} == {200}
        for worker in workers:
            await worker.order(status=502)
        first, num_asked = (await all_prompts(workers)).total(), 200
        for idx in range(num_asked):
            assert (await router.ask(f"sick {idx}")[1]).status == 502
        num_retries = (await all_prompts(workers)).total() - first - num_asked
        assert 100 <= num_retries <= 100 + num_asked * 0.2 + 1
        for worker in workers:
            await worker.order(status=None)


async def test_connecting_the_first_byte_and_the_whole_request_end_when_their_flags_say(fleet: list[StandIn]) -> None:
    worker = fleet[0]
    deaf = StandIn(worker.url.replace("http:", "https:"), worker.process)  # says nothing to a handshake
    flags = ("--connect-timeout-s", 0.2, "--first-byte-timeout-s", 1.5, "--request-timeout-s", 3)
    async with routing(worker, deaf, flags=flags) as router:
        held, (stream, streaming) = router.ask("hold too long")[1], router.ask("drip too long", stream=True)

        async def is_told() -> bool:
            return "no connection within 0.2 s" in str((await router.workers())[deaf.url]["last_failure"])

        await until(is_told)
        error = json.loads((await held).body)["error"]
        assert (held.result().status, error["code"]) == (504, "worker_failed")
        assert error["message"].endswith("first_byte timeout after 1.5 s")
        assert stream.status == 200
        assert b"the request was not answered within 3 s" in (await streaming).body
        await worker.order(release=True)
