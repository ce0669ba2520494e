"""The router of several processes: what each front does counts for all, and none of them ends what others carry."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from stand_ins import Answer, Connection, StandIn, fetch, port_of, read, stand_ins, until
from word_models import WORDS, model_dir

from kvist.cli.up import Child, ProcessGroup
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.router.fleet.worker import WARM_UP_REQUESTS

pytestmark = [pytest.mark.xdist_group("whole system"), pytest.mark.asyncio(loop_scope="module")]

KEEPER = -1
FRONTS = (0, 1)
TIMES = ("--silence-timeout-s", 2, "--health-timeout-s", 2, "--breaker-cooldown-s", 1)
MAX_START_CPU_S = 1.0  # of a front until it listens: 0.4 s, measured on two busy cores, Nov 2026
TOKENS = list(range(1000, 1160))  # ten blocks


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Workers and routers are the module's."""


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Have a process do nothing meanwhile."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def _part(process: psutil.Process) -> dict[str, Any]:
    command = process.cmdline()
    part: dict[str, Any] = json.loads(command[command.index("--part") + 1])
    return part


@dataclass
class Router:
    """A router's processes."""

    child: Child
    _idle: dict[int, list[socket.socket]] = field(default_factory=partial(defaultdict, list))

    def parts(self) -> dict[int, psutil.Process]:
        """Return the running fronts by their numbers, and the keeper."""
        found = {}
        for process in psutil.Process(self.child.process.pid).children():
            with suppress(psutil.Error, ValueError):  # as it begins, it is its parent's copy
                found[_part(process)["front"]] = process
        return found

    @property
    def directory(self) -> Path:
        """Where its parts meet."""
        return Path(_part(self.parts()[KEEPER])["directory"])

    async def connect(self, front: int) -> Connection:
        """Return a connection that this front has taken: which one gets it is the system's to say."""
        while True:
            idle = self._idle[self.parts()[front].pid]
            while idle:
                connection = idle.pop()
                with suppress(BlockingIOError):
                    connection.recv(1, socket.MSG_PEEK)  # it was ended
                    connection.close()
                    continue
                return await asyncio.open_connection(sock=connection)
            await self._open_some()

    async def _open_some(self) -> None:
        address = ("127.0.0.1", port_of(self.child.url))
        opened = {}
        for _ in range(16):
            connection = socket.create_connection(address)
            connection.setblocking(False)
            opened[connection.getsockname()[1]] = connection

        async def are_taken() -> bool:
            for number, process in self.parts().items():
                with suppress(psutil.Error):
                    for each in process.net_connections("tcp") if number != KEEPER else ():
                        if each.raddr and (taken := opened.pop(each.raddr.port, None)) is not None:
                            self._idle[process.pid].append(taken)
            return not opened

        try:
            await until(are_taken)
        finally:
            for connection in opened.values():
                connection.close()

    def close(self) -> None:
        for each in itertools.chain.from_iterable(self._idle.values()):
            each.close()

    async def ask(self, front: int, prompt: str | list[int], **fields: Any) -> tuple[Answer, asyncio.Task[Answer]]:
        """Return the front's answer as it comes, and what ends with it."""
        return self.ask_on(await self.connect(front), prompt, **fields)

    def ask_on(
        self, connection: Connection, prompt: str | list[int], **fields: Any
    ) -> tuple[Answer, asyncio.Task[Answer]]:
        body = {"model": "m", "prompt": prompt, **fields}
        answer = Answer()
        return answer, asyncio.create_task(read(0, "/v1/completions", body, {}, answer, connection))

    async def complete(self, front: int, prompt: str | list[int], **fields: Any) -> Answer:
        return await (await self.ask(front, prompt, **fields))[1]

    async def call(self, front: int, path: str, body: object = None, method: str | None = None) -> tuple[int, Any]:
        """Return the status and the JSON of a front's answer."""
        headers = {"content-type": "application/json"}
        answer = await read(0, path, body, headers, Answer(), await self.connect(front), method)  # type: ignore[arg-type]
        return answer.status, json.loads(answer.body)

    async def workers(self, front: int = 0) -> dict[str, dict[str, Any]]:
        return {worker["url"]: worker for worker in (await self.call(front, "/workers"))[1]["workers"]}

    async def num_running(self, front: int = 0) -> int:
        return sum(load["running_requests"] for load in (await self.call(front, "/get_loads"))[1]["loads"])

    async def metrics(self, front: int = 0) -> dict[str, float]:
        page = (await read(0, "/metrics", None, {}, Answer(), await self.connect(front))).body.decode()
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def metric(self, name: str, front: int = 0) -> float:
        return sum(value for key, value in (await self.metrics(front)).items() if key.startswith(name))

    async def until_restarted(self, part: int, pid: int) -> None:
        """Wait until another process has come in the place of one, and does its work."""

        async def is_back() -> bool:
            process = self.parts().get(part)
            if process is None or process.pid == pid:
                return False
            if part == KEEPER:
                try:
                    return (await self.call(0, "/workers"))[0] == (await self.call(1, "/workers"))[0] == 200
                except (KeyError, OSError, asyncio.IncompleteReadError):  # a front is away, too
                    return False
            return await self.listens(part)

        await until(is_back)

    async def listens(self, front: int) -> bool:
        with suppress(KeyError, psutil.Error):  # it was killed
            return any(each.status == psutil.CONN_LISTEN for each in self.parts()[front].net_connections("tcp"))
        return False


@asynccontextmanager
async def routing(*flags: object, processes: object = 2) -> AsyncIterator[Router]:
    async with ProcessGroup() as group:
        arguments = ("route", "--port", 0, "--processes", processes, *flags)
        router = Router(await group.start("router", *map(str, arguments)))
        with closing(router):
            yield router
        with suppress(ProcessLookupError):
            router.child.process.terminate()
        await router.child.process.wait()  # however long that takes: one that is killed leaves its directory behind


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[list[StandIn]]:
    """Three workers."""
    async with stand_ins(3) as workers:
        yield workers


def urls_of(fleet: list[StandIn]) -> list[str]:
    return [worker.url for worker in fleet]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(fleet: list[StandIn]) -> AsyncIterator[Router]:
    flags = ("--policy", "round-robin", "--breaker-failures", 4, *TIMES)
    async with routing(*flags, "--worker-urls", *urls_of(fleet)) as router:
        yield router


async def release(fleet: list[StandIn]) -> None:
    for worker in fleet:
        await worker.order(release=True)


async def until_idle(router: Router) -> None:
    async def is_so() -> bool:
        return await router.num_running() == 0

    await until(is_so)


async def until_gone(router: Router, worker: StandIn) -> None:
    async def is_so() -> bool:
        return worker.url not in await router.workers()

    await until(is_so)


async def prompts_of(fleet: list[StandIn]) -> Counter[str]:
    return Counter([prompt for worker in fleet for prompt in await worker.prompts()])


async def until_came(fleet: list[StandIn], *prompts: str) -> None:
    async def have_come() -> bool:
        return (await prompts_of(fleet)).keys() >= set(prompts)

    await until(have_come)


async def test_whichever_front_is_asked_answers_for_all(fleet: list[StandIn], router: Router) -> None:
    assert set(router.parts()) == {KEEPER, *FRONTS}
    before = await router.metric("kvist_router_requests_total{")
    held = [(await router.ask(front, f"hold {front} {idx}"))[1] for front in FRONTS for idx in range(3)]
    await until_came(fleet, *(f"hold {front} {idx}" for front in FRONTS for idx in range(3)))
    for front in FRONTS:
        assert await router.num_running(front) == 6
        assert [worker["running_requests"] for worker in (await router.workers(front)).values()] == [2, 2, 2]
        assert await router.metric("kvist_router_running_requests{", front) == 6
        assert await router.call(front, "/health") == (200, (await router.call(1 - front, "/health"))[1])
        assert (await router.call(front, "/readiness"))[1]["ready"]
    await release(fleet)
    assert {answer.status for answer in await asyncio.gather(*held)} == {200}
    for front in FRONTS:
        assert await router.metric("kvist_router_requests_total{", front) == before + 6
        assert await router.num_running(front) == 0
        memory_bytes = sum(process.memory_info().vms for process in router.parts().values())
        assert await router.metric("process_virtual_memory_bytes", front) == pytest.approx(memory_bytes, rel=0.05)


async def test_workers_come_and_go_at_all_fronts_whichever_is_told(fleet: list[StandIn], router: Router) -> None:
    async with stand_ins(1) as (added,):
        assert (await router.call(0, "/workers", {"url": added.url}))[0] == 201

        async def is_used_by_both() -> bool:
            workers = [(await router.complete(front, f"for it {idx}")).worker for front in FRONTS for idx in range(4)]
            return workers.count(added.url) >= 2

        await until(is_used_by_both)
        for number in itertools.count():  # until it is the new worker's turn
            prompt = f"hold {number} after all"
            running = (await router.ask(1, prompt))[1]
            await until_came([*fleet, added], prompt)  # else it would miss the release
            if prompt in await added.prompts():
                break
            await release(fleet)
            await running
        for front in FRONTS:
            assert (await router.call(front, f"/workers?url={added.url}", method="DELETE"))[0] == 202
        assert (await router.workers(1))[added.url]["state"] == "draining"
        before = len(await added.prompts())
        answers = [await router.complete(front, "not for it") for front in FRONTS for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        assert len(await added.prompts()) == before
        await added.order(release=True)
        assert (await running).status == 200

        await until_gone(router, added)


async def test_workers_that_were_found_outlive_who_found_them_and_what_named_them(
    fleet: list[StandIn], tmp_path: Path
) -> None:
    path = tmp_path / "workers.toml"

    def name(*workers: StandIn) -> None:
        path.write_text("".join(f'[[workers]]\nurl = "{worker.url}"\n' for worker in workers) or "workers = []")

    async with stand_ins(1) as (added,), routing(*TIMES, "--discover", f"file://{path}") as router:
        name(*fleet)

        async def has(*workers: StandIn) -> bool:
            known = [await router.workers(front) for front in FRONTS]
            return all(each.keys() == {worker.url for worker in workers} for each in known)

        await until(partial(has, *fleet))
        assert (await router.call(1, "/workers", {"url": added.url}))[0] == 201
        path.write_text("[[")
        keeper = router.parts()[KEEPER]
        keeper.kill()
        await router.until_restarted(KEEPER, keeper.pid)
        assert await has(*fleet, added)
        assert (await router.call(0, "/readiness"))[1]["discovery"][0]["state"] == "failed"
        name(fleet[0])
        await until(partial(has, fleet[0], added))
        assert (await router.workers(1))[fleet[0].url]["registered_by"] == [f"file://{path}"]
        assert {(await router.complete(front, "x")).status for front in FRONTS} == {200}


async def test_fronts_let_a_worker_that_joins_in_by_what_they_gave_it_together(fleet: list[StandIn]) -> None:
    async with stand_ins(1) as (new,), routing("--policy", "least-loaded", "--worker-urls", fleet[0].url) as router:
        held = [(await router.ask(front, f"hold early {front} {idx}"))[1] for front in FRONTS for idx in range(4)]
        await until_came(fleet, *(f"hold early {front} {idx}" for front in FRONTS for idx in range(4)))
        assert (await router.call(0, "/workers", {"url": new.url}))[0] == 201

        async def is_warming() -> bool:
            return (await router.workers(1))[new.url]["warming"]

        await until(is_warming)
        for idx in range(12):
            held.append((await router.ask(idx % 2, f"hold late {idx}"))[1])
            await until_came([*fleet, new], f"hold late {idx}")
        assert len(await new.prompts()) == WARM_UP_REQUESTS
        await release([*fleet, new])
        assert {answer.status for answer in await asyncio.gather(*held)} == {200}


async def test_a_worker_that_is_removed_and_comes_back_at_once_is_counted_by_all(
    fleet: list[StandIn], router: Router
) -> None:
    async with stand_ins(2) as (other, back):

        async def is_there(worker: StandIn) -> bool:
            return (await router.workers()).get(worker.url, {}).get("state") == "healthy"

        for worker in (other, back):
            assert (await router.call(0, "/workers", {"url": worker.url}))[0] == 201
            await until(partial(is_there, worker))
        for worker in (other, back):  # so that another one's columns are free when it comes back
            assert (await router.call(0, f"/workers?url={worker.url}", method="DELETE"))[0] == 202

        async def is_taken() -> bool:
            return (await router.call(1, "/workers", {"url": back.url}))[0] == 201

        await until(is_taken)
        await until(partial(is_there, back))
        held = [(await router.ask(front, f"hold again {front} {idx}"))[1] for front in FRONTS for idx in range(4)]
        all_workers = [*fleet, back]
        await until_came(all_workers, *(f"hold again {front} {idx}" for front in FRONTS for idx in range(4)))
        assert len(await back.prompts()) == 2
        assert (await router.workers())[back.url]["running_requests"] == 2
        assert await router.num_running(1) == 8
        await release(all_workers)
        assert {answer.status for answer in await asyncio.gather(*held)} == {200}
        assert (await router.call(0, f"/workers?url={back.url}", method="DELETE"))[0] == 202
        await until_gone(router, back)


async def test_a_front_that_is_killed_ends_its_own_requests_and_comes_back(
    fleet: list[StandIn], router: Router
) -> None:
    killed = router.parts()[0]
    streams = [await router.ask(front, f"drip {front}", stream=True) for front in FRONTS]
    held = [await router.ask(front, f"hold killed {front}") for front in FRONTS]
    await asyncio.gather(*(answer.has_begun.wait() for answer, _ in streams))
    await until_came(fleet, "hold killed 0", "hold killed 1")
    await router.complete(0, "counted")
    before = await router.metrics(1)
    taken = [await router.connect(1) for _ in range(4)]
    with stopped(router.parts()[1]):
        killed.suspend()
        untaken = [await asyncio.open_connection("127.0.0.1", port_of(router.child.url)) for _ in range(40)]
        killed.kill()
        await asyncio.to_thread(killed.wait)
    answers = await asyncio.gather(*(router.ask_on(connection, "taken")[1] for connection in taken))
    assert {answer.status for answer in answers} == {200}
    asked = [router.ask_on(connection, "untaken")[1] for connection in untaken]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    answers = [each for each in ended if isinstance(each, Answer)]
    assert {answer.status for answer in answers} == {200}
    assert 0 < len(answers) < len(untaken)  # those that the other front was to accept
    await router.until_restarted(0, killed.pid)
    started = router.parts()[0].cpu_times()
    assert started.user + started.system < MAX_START_CPU_S
    assert not (await streams[0][1]).is_whole
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await held[0][1]
    for front in FRONTS:
        assert (await router.complete(front, "after")).status == 200
        assert await router.num_running(front) == 2
        after = await router.metrics(front)
        counts = [name for name in before if name.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))]
        fell = [name for name in counts if after.get(name, 0) < before[name]]
        assert not fell
    await release(fleet)
    assert [(await reading).is_whole for _, reading in (streams[1], held[1])] == [True, True]
    await until_idle(router)


async def test_all_fronts_record_as_one_also_those_that_are_started_anew(fleet: list[StandIn], tmp_path: Path) -> None:
    flags = ("--record-requests", tmp_path, "--block-size", 16, "--worker-urls", *urls_of(fleet), *TIMES)
    async with routing(*flags) as router:
        for front in FRONTS:
            assert (await router.complete(front, TOKENS)).status == 200
        await until_recorded(tmp_path, 2)
        killed = router.parts()[0]
        killed.kill()
        await router.until_restarted(0, killed.pid)
        assert (await router.complete(0, TOKENS)).status == 200
        await until_recorded(tmp_path, 3)
    recorded = recorded_in(tmp_path)
    assert len(recorded) == 3
    assert len({tuple(line["hash_ids"]) for line in recorded}) == 1
    assert len({line["recording_started_at"] for line in recorded}) == 1
    assert all(0 <= line["timestamp"] < 120_000 for line in recorded)


def recorded_in(folder: Path) -> list[dict[str, Any]]:
    """What can be read of all parts, those of fronts that were killed included."""
    texts = [zlib.decompressobj(wbits=31).decompress(part.read_bytes()) for part in folder.glob("*.gz")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


async def until_recorded(folder: Path, number: int) -> None:
    async def is_so() -> bool:
        return len(recorded_in(folder)) == number

    await until(is_so)


async def test_a_keeper_that_is_killed_stops_no_requests_and_knows_again_what_administrators_said(
    fleet: list[StandIn], router: Router
) -> None:
    async with stand_ins(1) as (added,):
        assert (await router.call(0, "/workers", {"url": added.url}))[0] == 201
        assert (await router.call(1, f"/workers?url={fleet[0].url}", method="DELETE"))[0] == 202
        expected = {added.url, fleet[1].url, fleet[2].url}

        async def is_so() -> bool:
            workers = await router.workers()
            return workers.keys() == expected and all(worker["state"] == "healthy" for worker in workers.values())

        await until(is_so)
        stream, reading = await router.ask(0, "drip kept", stream=True)
        await stream.has_begun.wait()
        killed, is_over, statuses = router.parts()[KEEPER], False, Counter[int]()

        async def go_on(front: int) -> None:
            while not is_over:
                statuses[(await router.complete(front, "on")).status] += 1

        clients = [asyncio.create_task(go_on(front)) for front in FRONTS]
        killed.kill()
        await asyncio.to_thread(killed.wait)
        status, page = await router.call(0, "/readiness")
        assert (status, page["ready"]) == (200, True)
        status, page = await router.call(0, "/workers")
        if status != 200:  # it may be back already
            assert (status, page["error"]["code"]) == (503, "keeper_away")
        assert (await router.call(0, "/health"))[0] == 200
        await router.until_restarted(KEEPER, killed.pid)
        await until(is_so)
        num_answered = statuses.total()

        async def goes_on() -> bool:
            return statuses.total() > num_answered + 10

        await until(goes_on)
        is_over = True
        await asyncio.gather(*clients)
        assert statuses.keys() == {200}
        await added.order(release=True)
        await release(fleet)
        assert (await reading).is_whole
        assert (await router.call(0, f"/workers?url={added.url}", method="DELETE"))[0] == 202
        assert (await router.call(0, "/workers", {"url": fleet[0].url}))[0] == 201
        expected = set(urls_of(fleet))
        await until(is_so)


async def test_while_the_keeper_is_stopped_requests_go_on(router: Router) -> None:
    with stopped(router.parts()[KEEPER]):
        for front in FRONTS:
            answers = [await router.complete(front, "meanwhile") for _ in range(4)]
            assert {answer.status for answer in answers} == {200}
            assert (await router.call(front, "/health"))[0] == 200
            status, page = await router.call(front, "/readiness")
            assert (status, page["ready"]) == (200, True)
            assert page["index"].startswith("away")
    assert (await router.call(0, "/workers"))[0] == 200


async def test_while_a_front_is_stopped_the_other_goes_on(fleet: list[StandIn], router: Router) -> None:
    connections = [await router.connect(1) for _ in range(8)]
    asked = [await router.connect(1) for _ in range(2)]
    late, reading = await router.ask(0, "hold stopped")
    await until_came(fleet, "hold stopped")
    with stopped(router.parts()[0]):
        answers = [await router.ask_on(connection, "beside")[1] for connection in connections]
        assert {answer.status for answer in answers} == {200}
        for path, connection in zip(("/workers", "/metrics"), asked, strict=True):
            assert (await read(0, path, None, {}, Answer(), connection)).status == 200
        await release(fleet)
    assert (await reading).status == late.status == 200


async def test_failures_seen_by_two_fronts_open_one_circuit(fleet: list[StandIn], router: Router) -> None:
    await until_idle(router)
    failing = fleet[0]
    await failing.order(status=500)
    seen: Counter[int] = Counter()

    async def circuit() -> str:
        state: str = (await router.workers(1))[failing.url]["circuit"]
        return state

    for front in FRONTS:
        before = len(await failing.prompts())
        while len(await failing.prompts()) < before + 2:
            assert await circuit() == "closed"
            seen[(await router.complete(front, f"may fail {front}")).status] += 1

    async def is_open() -> bool:
        return await circuit() == "open"

    await until(is_open)
    await failing.order(status=None)

    async def is_closed() -> bool:
        for front in FRONTS:
            await router.complete(front, "try")
        return await circuit() == "closed"

    await until(is_closed)


async def test_a_front_that_is_killed_during_a_trial_does_not_keep_the_circuit_from_closing(
    fleet: list[StandIn], router: Router
) -> None:
    failing = fleet[1]
    await failing.order(status=500)

    async def circuit() -> str:
        state: str = (await router.workers(1))[failing.url]["circuit"]
        return state

    async def is_open() -> bool:
        await router.complete(0, "fails")
        return await circuit() == "open"

    await until(is_open)
    await failing.order(status=None)
    killed = router.parts()[0]
    trials: list[asyncio.Task[Answer]] = []

    async def is_tried() -> bool:
        if await circuit() == "half-open":
            return True
        trials.append((await router.ask(0, f"hold trial {len(trials)}"))[1])
        await until_came(fleet, f"hold trial {len(trials) - 1}")
        return False

    await until(is_tried)
    killed.kill()
    await router.until_restarted(0, killed.pid)
    await asyncio.gather(*trials, return_exceptions=True)
    await release(fleet)

    async def is_closed() -> bool:
        await router.complete(1, "again")
        return await circuit() == "closed"

    await until(is_closed)


async def test_a_worker_that_stops_is_given_up_by_both_fronts_and_what_it_has_not_begun_goes_elsewhere_once(
    fleet: list[StandIn], router: Router
) -> None:
    silent, num_held = fleet[2], 6
    held = [(await router.ask(front, f"hold moved {front} {idx}"))[1] for front in FRONTS for idx in range(num_held)]
    prompts = [f"hold moved {front} {idx}" for front in FRONTS for idx in range(num_held)]
    await until_came(fleet, *prompts)
    before = set(await silent.prompts())
    assert {prompt.split()[2] for prompt in before & set(prompts)} == {"0", "1"}
    silent.process.send_signal(signal.SIGSTOP)
    try:
        await until_came(fleet[:2], *prompts)
        await release(fleet[:2])
        assert {answer.status for answer in await asyncio.gather(*held)} == {200}
        for front in FRONTS:
            assert (await router.workers(front))[silent.url]["state"] == "unhealthy"
    finally:
        silent.process.send_signal(signal.SIGCONT)
    await silent.order(release=True)
    num_received = await prompts_of(fleet)
    assert {prompt: num_received[prompt] for prompt in prompts} == {
        prompt: 1 + (prompt in before) for prompt in prompts
    }

    async def is_healthy() -> bool:
        return (await router.workers())[silent.url]["state"] == "healthy"

    await until(is_healthy)


async def test_a_response_that_one_front_passed_on_is_known_at_the_other(router: Router) -> None:
    async def respond(front: int, **fields: Any) -> tuple[Answer, str]:
        body = {"model": "m", "input": "hi", **fields}
        answer = await read(0, "/v1/responses", body, {}, Answer(), await router.connect(front))
        return answer, json.loads(answer.body).get("id", "")

    first, response_id = await respond(0)

    async def is_known() -> bool:  # else the workers are asked in turns
        answers = [await respond(1, previous_response_id=response_id) for _ in range(4)]
        return {answer.worker for answer, _ in answers} == {first.worker}

    await until(is_known)


async def test_a_port_that_another_router_listens_on_is_refused_both_ways(fleet: list[StandIn], router: Router) -> None:
    def start(port: int, processes: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvist", "route", "--policy", "round-robin", "--worker-urls", fleet[0].url]
        command += ["--port", str(port), "--processes", str(processes)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)

    async with routing("--policy", "round-robin", "--worker-urls", fleet[0].url, processes=1) as single:
        cases = [(router, 1), (router, 2), (single, 2)]
        ended = [await asyncio.to_thread(start, port_of(each.child.url), number) for each, number in cases]
    for result in ended:
        assert result.returncode not in (0, -signal.SIGKILL), result
        assert "in use" in result.stderr
        assert "Traceback" not in result.stderr


async def test_numbers_of_processes_that_cannot_be_are_refused() -> None:
    command = [sys.executable, "-m", "kvist", "route", "--worker-urls", "http://127.0.0.1:1", "--processes"]
    for processes in ("0", "x", "65"):
        result = await asyncio.to_thread(
            subprocess.run, [*command, processes], capture_output=True, text=True, timeout=180
        )
        assert result.returncode == 2, result
        assert "processes" in result.stderr
        assert processes in result.stderr
        assert "Traceback" not in result.stderr


async def test_limits_and_queues_are_those_of_all_fronts_also_while_the_keeper_is_away(fleet: list[StandIn]) -> None:
    worker = fleet[0]
    flags = ("--policy", "round-robin", "--max-worker-requests", 1, "--max-queued", 5, *TIMES)
    async with routing(*flags) as router:
        assert (await router.call(0, "/workers", {"url": worker.url}))[0] == 201

        async def is_there() -> bool:  # at both: a front answers once it was told what the keeper knows
            known = [await router.workers(front) for front in FRONTS]
            return all(worker.url in each and each[worker.url]["state"] == "healthy" for each in known)

        await until(is_there)
        running = (await router.ask(0, "hold running"))[1]
        await until_came([worker], "hold running")
        orders = [(1, "second", 0), (0, "last", 5), (1, "leaves", 0), (0, "third", 0), (1, "first", -1)]
        queued = []
        for front, prompt, priority in orders:
            queued.append((await router.ask(front, f"queued {prompt}", priority=priority))[1])

            async def is_queued() -> bool:
                return await router.metric("kvist_router_queued_requests{") == len(queued)

            await until(is_queued)
        for front in FRONTS:
            refused = await router.complete(front, "one too many", priority=9)
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "queue_full")
        queued.pop(2).cancel()
        killed = router.parts()[KEEPER]
        killed.kill()
        await router.until_restarted(KEEPER, killed.pid)
        assert [prompt for prompt in await worker.prompts() if "queued" in prompt] == []
        router.child.process.terminate()
        await worker.order(release=True)
        answers = await asyncio.gather(running, *queued)
        assert {(answer.status, answer.is_whole) for answer in answers} == {(200, True)}
        assert await router.child.process.wait() == 0
    came = [prompt for prompt in await worker.prompts() if prompt.startswith(("queued", "one too"))]
    assert came == ["queued first", "queued second", "queued third", "queued last"]


async def test_the_fronts_drain_together_and_end_at_a_second_signal(fleet: list[StandIn]) -> None:
    flags = ("--policy", "round-robin", "--drain-delay-s", 600, "--worker-urls", fleet[0].url)
    async with routing(*flags) as router:
        processes = [psutil.Process(router.child.process.pid), *router.parts().values()]
        streams = [await router.ask(front, "drip", stream=True) for front in FRONTS]
        await asyncio.gather(*(answer.has_begun.wait() for answer, _ in streams))
        router.child.process.terminate()
        for front in FRONTS:

            async def is_draining(front: int = front) -> bool:
                status, page = await router.call(front, "/readiness")
                return (status, page["reason"]) == (503, "draining")

            await until(is_draining)
            assert (await router.complete(front, "now")).status == 200
        router.child.process.terminate()
        for answer in await asyncio.gather(*(reading for _, reading in streams)):
            assert b'"shutting_down"' in answer.body
        assert await router.child.process.wait() == 0
    assert not [process for process in processes if process.is_running()]


async def test_a_stopped_process_does_not_keep_the_router_from_ending(fleet: list[StandIn]) -> None:
    async with routing("--policy", "round-robin", "--worker-urls", fleet[0].url) as router:
        parts = router.parts()
        parts[KEEPER].suspend()
        parts[1].suspend()
        router.child.process.terminate()
        await asyncio.to_thread(parts[0].wait)
        router.child.process.terminate()
        assert await router.child.process.wait() == 0
    assert not [process for process in parts.values() if process.is_running()]


async def test_settings_are_read_again_by_all_and_all_end_with_who_started_them(
    fleet: list[StandIn], tmp_path: Path
) -> None:
    """Also to another policy, but to `kv`; and what all did is in one log."""
    settings, log = tmp_path / "router.toml", tmp_path / "log"
    settings.write_text(f'policy = "round-robin"\nworker_urls = ["{fleet[0].url}"]\naccess_log = "{log}"\n')
    async with routing("--config", settings) as router:
        parts = router.parts()
        assert {(await router.complete(front, "first")).worker for front in FRONTS} == {fleet[0].url}

        async def policies(**headers: str) -> set[str | None]:
            page = {"token_ids": [1], "model": "m"}
            connections = [await router.connect(front) for front in FRONTS]
            answers = [await read(0, "/route", page, headers, Answer(), connection) for connection in connections]
            return {json.loads(answer.body).get("policy") for answer in answers}

        def write(policy: str, *lines: str) -> None:
            text = [f'policy = "{policy}"', f'worker_urls = ["{fleet[1].url}"]', f'access_log = "{log}"', *lines]
            settings.write_text("\n".join(text))

        assert await policies() == {"round-robin"}
        for policy in ("least-loaded", "round-robin"):
            write(policy)  # as the file has changed

            async def has_changed(policy: str = policy) -> bool:
                return await policies() == {policy}

            await until(has_changed)
        write("kv", 'api_key = "k"')
        router.child.process.send_signal(signal.SIGHUP)

        async def ask(front: int, headers: dict[str, str]) -> Answer:
            body = {"model": "m", "prompt": "second"}
            return await read(0, "/v1/completions", body, headers, Answer(), await router.connect(front))

        for front in FRONTS:

            async def has_reloaded(front: int = front) -> bool:
                if (await ask(front, {})).status != 401:
                    return False
                answer = await ask(front, {"authorization": "Bearer k"})
                return (answer.status, answer.worker) == (200, fleet[1].url)

            await until(has_reloaded)
        assert router.parts() == parts
        answer, headers = Answer(), {"authorization": "Bearer k"}
        assert await policies(**headers) == {"round-robin"}
        port, names = port_of(router.child.url), [f"logged-{idx}" for idx in range(400)]
        body = {"model": "m", "prompt": "third"}
        asked = [read(port, "/v1/completions", body, headers | {"x-request-id": name}, Answer()) for name in names]
        assert {each.status for each in await asyncio.gather(*asked)} == {200}
        connection = await router.connect(0)
        body = {"model": "m", "prompt": "drip end", "stream": True}
        reading = asyncio.create_task(read(0, "/v1/completions", body, headers, answer, connection))
        await answer.has_begun.wait()
        directory = router.directory
        router.child.process.kill()
        await asyncio.to_thread(psutil.wait_procs, [parts[1], parts[KEEPER]], 60)
        assert not directory.exists()
        assert parts[0].is_running()
        await fleet[1].order(release=True)
        assert (await reading).is_whole
        assert not (await asyncio.to_thread(psutil.wait_procs, [*parts.values()], 60))[1]
    lines = Counter(json.loads(line)["request_id"] for line in log.read_text().splitlines())
    assert {name: lines[name] for name in names} == dict.fromkeys(names, 1)


async def test_what_workers_hold_is_known_at_all_fronts_and_again_after_the_keeper_was_killed(
    fleet: list[StandIn],
) -> None:
    limits = PublisherLimits(heartbeat_s=0.1)
    caches = {
        worker.url: KvEventPublisher(
            "tcp://127.0.0.1:0", worker=f"at-{port_of(worker.url)}", block_size=16, limits=limits
        )
        for worker in fleet[:2]
    }
    expected: dict[str, list[int]] = {}

    def store(url: str, first: int) -> None:
        expected[url] = tokens = list(range(first, first + 160))
        caches[url].stored([hash(tuple(tokens[: 16 * (idx + 1)])) for idx in range(10)], tokens)

    num_before = (await prompts_of(fleet)).total()
    async with routing("--policy", "kv", "--block-size", 16, *TIMES) as router:

        async def is_known() -> bool:
            for front in FRONTS:
                for url, tokens in expected.items():
                    page = (await router.call(front, "/route", {"token_ids": tokens, "model": "m"}))[1]
                    candidates = page.get("candidates", ())
                    if {each["worker"] for each in candidates if each["overlap_blocks"].get("gpu") == 9} != {url}:
                        return False
            return True

        for url, cache in caches.items():
            body = {"url": url, "kv_event_sources": [cache.endpoint]}
            assert (await router.call(0, "/workers", body))[0] == 201
            store(url, 1000 * (len(expected) + 1))
        await until(is_known)
        assert (await router.call(0, "/workers", {"url": fleet[2].url}))[0] == 201
        untold = iter(range(100_000, 200_000, 160))

        async def is_expected() -> bool:
            """Return whether a prompt that a worker without events computed for one front is the other's guess, too."""
            tokens = list(range(start := next(untold), start + 160))
            if (await router.complete(0, tokens)).worker != fleet[2].url:
                return False
            page = (await router.call(1, "/route", {"token_ids": tokens, "model": "m"}))[1]
            (found,) = (each for each in page["candidates"] if each["worker"] == fleet[2].url)
            return found["approximate"] and found["overlap_blocks"]["gpu"] == 9

        await until(is_expected)
        for front in FRONTS:

            async def are_counted(front: int = front) -> bool:
                """Return whether what came of requests at either front is told at this one."""
                told = (await router.call(front, "/regret?window=1h"))[1]["total"]
                return told["requests"] == (await prompts_of(fleet)).total() - num_before

            await until(are_counted)
        with stopped(psutil.Process(router.child.process.pid)):  # who would start another one at once
            router.parts()[KEEPER].kill()
            for front in FRONTS:

                async def is_away(front: int = front) -> bool:
                    status, page = await router.call(front, "/readiness")
                    assert (status, page["ready"]) == (200, True)
                    return (page["index"] or "").startswith("away")

                await until(is_away)
            prompt = expected[fleet[0].url]
            answers = [await router.complete(front, prompt) for front in FRONTS for _ in range(4)]
            assert {(answer.status, answer.headers["x-kvist-overlap-tokens"]) for answer in answers} == {(200, "0")}
            assert len({answer.worker for answer in answers}) > 1  # and not the one that holds it
        for url in caches:
            store(url, 1000 * (len(expected) + 8) + 500 * (url == fleet[0].url))
        await until(is_known)
        killed = router.parts()[0]
        killed.kill()
        await router.until_restarted(0, killed.pid)
        await until(is_known)
    for cache in caches.values():
        cache.close()


async def test_models_are_read_by_their_own_tokens_and_blocks_at_all_fronts_also_by_an_alias(tmp_path: Path) -> None:
    """Also by a front and a keeper that are started anew, the keeper from its state; and by whichever API it came."""
    paths = {name: model_dir(tmp_path / name, first) for name, first in (("a", 0), ("b", 1000))}
    text, limits = " ".join(WORDS[:80]), PublisherLimits(heartbeat_s=0.1)
    async with AsyncExitStack() as exits:
        urls, others, flags = {}, [], ["--state-dir", tmp_path / "state", "--state-interval-s", 0.1]
        for name, first, block_size in (("a", 0, 16), ("b", 1000, 32)):
            worker, other = await exits.enter_async_context(stand_ins(2, id=name, root=paths[name]))
            endpoint, tokens = "tcp://127.0.0.1:0", list(range(first, first + 80 // block_size * block_size))
            cache = KvEventPublisher(endpoint, worker=f"at-{name}", block_size=block_size, limits=limits)
            exits.callback(cache.close)
            cache.stored([hash(tuple(tokens[:end])) for end in range(block_size, len(tokens) + 1, block_size)], tokens)
            urls[name] = worker.url
            others.append(other.url)
            flags += ["--kv-event-source", f"{worker.url}={cache.endpoint}"]
        flags += ["--worker-urls", *urls.values(), *others, "--alias", "also-b=b"]
        router = await exits.enter_async_context(routing("--policy", "kv", *flags, *TIMES))

        async def are_known() -> bool:
            for front in FRONTS:
                for name, model, num_blocks in (("a", "a", 5), ("b", "b", 2), ("also-b", "b", 2)):
                    page = (await router.call(front, "/route", {"prompt": f"{text} w3", "model": name}))[1]
                    found = {each["worker"]: each["overlap_blocks"]["gpu"] for each in page.get("candidates", ())}
                    if found.pop(urls[model], None) != num_blocks or list(found.values()) != [0]:
                        return False
            return True

        await until(are_known)
        for part in (FRONTS[0], KEEPER):
            killed = router.parts()[part]
            killed.kill()
            await router.until_restarted(part, killed.pid)
            await until(are_known)
        await until(partial(router.metric, 'kvist_state_streams{fate="proven"'))
        messages = [{"role": "user", "content": text}]
        for front in FRONTS:
            assert (await router.complete(front, text, model="also-b")).worker == urls["b"]
            for path, fields in (("/v1/responses", {"input": text}), ("/v1/messages", {"messages": messages})):
                for name, model in (("a", "a"), ("also-b", "b")):
                    connection = await router.connect(front)
                    answer = await read(0, path, {"model": name, **fields}, {}, Answer(), connection)
                    assert (answer.worker, answer.headers["x-kvist-overlap-tokens"]) == (urls[model], "64")


async def test_replicas_of_several_processes_count_what_all_have_in_flight_until_one_is_killed(
    start_nats_server,
) -> None:
    """Four routers over a real broker, two of them of two processes."""
    async with AsyncExitStack() as exits:
        fleet = await exits.enter_async_context(stand_ins(2))
        flags = ("--replicas", f"nats://127.0.0.1:{start_nats_server().port}/fleet/routers", "--block-size", 16)
        flags += (*TIMES[2:], "--silence-timeout-s", 60, "--worker-urls", *urls_of(fleet))
        starts = [exits.enter_async_context(routing(*flags, processes=number)) for number in (2, 2, 1, 1)]
        routers = [await start for start in starts]
        urls = [router.child.url for router in routers]

        async def until_running(number: int, *urls: str) -> None:
            async def is_so() -> bool:
                pages = [await fetch(url, "/workers") for url in urls]
                return {sum(worker["running_requests"] for worker in page["workers"]) for page in pages} == {number}

            await until(is_so)

        def hold(url: str, idx: int) -> asyncio.Task[Answer]:
            body = {"model": "m", "prompt": f"hold {url} {idx}"}
            return asyncio.create_task(read(port_of(url), "/v1/completions", body, {}, Answer()))

        held = {url: [hold(url, idx) for idx in range(4)] for url in urls}
        await until_running(16, *urls)
        killed = urls.pop(0)
        exits.callback(shutil.rmtree, routers[0].directory, ignore_errors=True)  # where nobody is left who would
        family = psutil.Process(routers[0].child.process.pid)
        for process in (family, *family.children(recursive=True)):
            process.kill()
        await asyncio.gather(*held.pop(killed), return_exceptions=True)
        await until_running(12, *urls)
        lone = urls.pop()
        routers[-1].child.process.kill()
        await asyncio.gather(*held.pop(lone), return_exceptions=True)
        await until_running(8, *urls)
        await release(fleet)
        answers = [await answer for answers in held.values() for answer in answers]
        assert [answer.status for answer in answers] == [200] * 8
        await until_running(0, *urls)


@pytest.mark.slow
async def test_a_router_whose_processes_die_all_the_time_refuses_nothing_and_counts_right(
    fleet: list[StandIn], router: Router
) -> None:
    rng, is_over, ends = random.Random(1), False, Counter[object]()

    async def go_on() -> None:
        while not is_over:
            body = {"model": "m", "prompt": "on", "stream": rng.random() < 0.5}
            try:
                answer = await read(port_of(router.child.url), "/v1/completions", body, {}, Answer())
            except (OSError, asyncio.IncompleteReadError):
                ends["lost"] += 1  # with its front
                await asyncio.sleep(0.01)
            else:
                ends[answer.status if answer.is_whole else "cut"] += 1

    clients = [asyncio.create_task(go_on()) for _ in range(16)]
    for _ in range(40):
        part = rng.choice([KEEPER, *FRONTS])
        if part != KEEPER:  # one front at least takes requests at any time
            await until(partial(router.listens, 1 - part))
        killed = router.parts().get(part)
        if killed is not None:
            killed.kill()
            if rng.random() < 0.5:
                await router.until_restarted(part, killed.pid)
            else:
                await asyncio.sleep(rng.random())
    is_over = True
    await asyncio.gather(*clients)
    assert ends.keys() <= {200, "lost", "cut"}, ends
    assert ends[200] > 10 * (ends["lost"] + ends["cut"]), ends

    async def is_at_peace() -> bool:
        status, page = await router.call(0, "/workers")
        return status == 200 and all(
            (worker["state"], worker["circuit"], worker["running_requests"]) == ("healthy", "closed", 0)
            for worker in page["workers"]
        )

    await until(is_at_peace)
    assert len(await router.workers(1)) == len(fleet)
