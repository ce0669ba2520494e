"""A random life of a router: what clients ask, workers do and operators change, over real sockets.

A seed is a life. Each request is answered once, by one worker, whole or ended by an error that says so; what is sent
first finds room; who waits is served in order; when all is quiet nothing is counted that has ended, and what was
counted is what clients and workers saw.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from lives import seeds

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.router.admission import Admission, Place
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService
from kvist.router.fleet.board import RankField
from kvist.router.fleet.worker import CircuitState
from kvist.router.forward import Forwarding
from kvist.router.policy.decision import Decision
from kvist.router.policy.in_flight import UNTIL_INDEXED_S
from kvist.router.policy.work import CONTEXT, QUEUED, UNSTREAMED
from kvist.router.prefill.dialect import FALLBACKS
from kvist.router.prefill.split import SplitPart
from kvist.router.tenants import rows

LIVES = seeds(3)
NUM_STEPS = 60
DIALECTS = (None, "kvist", "vllm", "sglang", "tensorrt_llm")
HELD = [7] * 20_000
"""One worker has this in its cache, and it takes others so long that it is worth a wait."""
ADMIN = {"authorization": "Bearer root"}
CODES = {
    "queue_full": {429},
    "displaced": {429},
    "timeout": {503},
    "rate_limit_exceeded": {429},
    "no_healthy_worker": {503},
    "no_pair": {503, 400},
    "worker_failed": {502, 504},
    "request_timeout": {504},
    "model_not_found": {404},
    "model_not_allowed": {403},
    "endpoint_not_found": {404},
}
"""What a router refuses a request with (docs/operating.md, docs/tenants.md, docs/disaggregation.md)."""


@dataclass(eq=False)
class Fate:
    """What a worker does with one attempt at a request."""

    kind: str
    status: int = 200
    delay_s: float = 0.0
    num_tokens: int = 1
    has_usage: bool = True
    pieces: int = 1
    """The answer comes in so many."""
    kept: float = 1.0
    """Such a part of it, where it is cut."""


@dataclass(eq=False)
class Run:
    """What a worker has done with it."""

    number: int
    worker: Any
    fate: Fate
    is_done: bool = False
    was_killed: bool = False
    is_prefill: bool = False
    usage: dict[str, Any] | None = None


@dataclass(eq=False)
class Asked:
    """A client's request, what became of it at workers, by answer where those are apart, and what the client got."""

    number: int
    body: dict[str, Any]
    headers: dict[str, str]
    fates: list[Fate]
    tenant: str | None
    leaves_after_s: float | None = None
    is_slow: bool = False
    front: int = 0
    runs: dict[str, list[Run]] = field(default_factory=dict)
    got: bytes = b""
    has_left: bool = False

    @property
    def every_run(self) -> list[Run]:
        return [run for runs in self.runs.values() for run in runs]

    @property
    def num_choices(self) -> int:
        prompts = self.body["prompt"]
        return self.body.get("n", 1) * (len(prompts) if isinstance(prompts[0], list) else 1)


def read_answer(got: bytes) -> tuple[int, bytes, bool]:
    """Return status, body, and whether that is all of it."""
    head, _, rest = got.partition(b"\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:])
    status, body = int(head.split(b" ")[1]), b""
    if fields.get("transfer-encoding") != "chunked":
        return status, rest, len(rest) == int(fields["content-length"])
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            return status, body, rest == b"\r\n"
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return status, body, False


def texts_of(body: bytes, is_stream: bool) -> tuple[dict[int, str], bool, dict[str, Any] | None]:
    """Return each choice's text, whether the answer says that it is whole, and the error that it ends with."""
    texts, error, is_whole = Counter[int](), None, not is_stream
    found: dict[int, str] = {}
    events = body.split(b"\n\n") if is_stream else [b"data: " + body]
    for event in events:
        if event == b"data: [DONE]":
            is_whole = True
        elif event.startswith(b"data: {") and not error:
            try:
                said = json.loads(event[6:])
            except json.JSONDecodeError:
                assert event is events[-1]
                break
            error = said.get("error")
            for choice in said.get("choices", ()):
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
                texts[choice["index"]] += 1
    return found, is_whole, error


class Life:
    """Drives clients, workers and operators of a fleet, as a seed has it."""

    def __init__(self, seed: int, dialect: str | None, make: Any, http_bytes: Any, until: Any) -> None:
        self.random, self.dialect = Random(seed), dialect
        self.make_worker, self.bytes, self.until = make, http_bytes, until
        self.numbers, self.gate = count(1), asyncio.Event()
        self.asked: list[Asked] = []
        self.clients: list[asyncio.Task[None]] = []
        self.workers: list[Any] = []
        self.held: dict[str, Any] = {}
        self.rooms: dict[str, dict[str, asyncio.Event]] = {}
        self.was_removed: set[str] = set()
        self.was_killed: set[str] = set()
        self.has_faults = False
        self.num_firsts = self.num_attempts = 0
        self.choosing_since_s = 0.0
        self.failures: list[BaseException] = []
        self.told = Counter[str]()
        choose = self.random.choice
        self.has_tenants, self.has_leavers, self.num_fronts = choose([False, True]), choose([False, True]), 1
        self.has_reports = choose([False, True])
        self.options: dict[str, Any] = {
            "policy": choose(["kv", "kv", "kv", "least-loaded", "least-loaded", "round-robin"]),
            "max_worker_requests": choose([None, 1, 2, 4]),
            "max_fleet_requests": choose([None, None, None, 5]),
            "max_worker_prefill_tokens": choose([None, None, 500]),
            "max_fleet_prefill_tokens": choose([None, None, None, 1500]),
            "max_queued": choose([1, 6, 16384]),
            "queue_timeout_s": choose([0.03, 60.0, 60.0]),
            "request_timeout_s": choose([None, None, 0.1]),
            "max_attempts": choose([1, 2, 3, 3, 5]),
            "breaker_failures": choose([2, 1000, 1000]),
            "max_local_prefill_tokens": 64,
            "expected_cache_tokens": choose([0, 100_000]),
        }

    # --- What workers do --------------------------------------------------------------------------------------------

    async def join(self, exits: AsyncExitStack, idx: int) -> None:
        """Make a worker: of a pair's roles two each, and for all but SGLang one that does either's work."""
        role = None if self.dialect is None else ("prefill", "prefill", "decode", "decode", "both")[idx]
        told: dict[str, Any] = {"models": [{"id": "m", "owned_by": self.dialect or "vllm"}]}
        if idx % 2:
            told["models"].append({"id": "n", "owned_by": self.dialect or "vllm"})
        transfer = {"endpoints": ["tcp://127.0.0.1:9"], "agent": "shared_memory"}
        if self.dialect == "kvist":
            told["server_info"] = {"engine": "kvist", "block_size": 16, "kv_events": None, "role": role}
            told["server_info"] |= {"kv_transfer": transfer}
        elif self.dialect == "sglang":
            mode = "null" if role == "both" else role
            told["server_info"] = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": 9, "page_size": 16}
            told["server_info"] |= {"kv_cache_dtype": "auto", "version": "0.5.23", "max_total_num_tokens": 10**6}
        worker = self.make_worker(**told)
        worker.role, worker.running = role, set()
        worker.answer = lambda received, writer: self.answer(worker, received, writer)
        self.workers.append(await exits.enter_async_context(worker))

    async def answer(self, worker: Any, received: Any, writer: asyncio.StreamWriter) -> None:
        number, _, part = received.headers["x-request-id"].partition("-")
        asked, body = self.asked[int(number)], json.loads(received.body)
        runs = asked.runs.setdefault(part, [])
        run = Run(next(self.numbers), worker, asked.fates[len(runs) % len(asked.fates)])
        runs.append(run)
        worker.running.add(run)
        self.report(worker)
        try:
            assert self.serves(worker, asked)
            await self.act(run, body, writer)
        except Exception as error:
            if not isinstance(error, ConnectionError):
                self.failures.append(error)
            raise
        finally:
            worker.running.discard(run)
            self.report(worker)

    def report(self, worker: Any) -> None:
        """Have the worker say that it runs two at a time."""
        if self.has_reports:
            number = len(worker.running)
            worker.metrics = f"vllm:num_requests_running {min(2, number)}\n"
            worker.metrics += f"vllm:num_requests_waiting {max(0, number - 2)}\n"

    async def act(self, run: Run, body: Any, writer: asyncio.StreamWriter) -> None:
        fate = run.fate
        if fate.kind == "hang":
            await self.gate.wait()
        if fate.delay_s:
            await asyncio.sleep(fate.delay_s)
        said = await self.transfer(run, body)
        if fate.kind == "refuse" or said == 500:
            status = fate.status if fate.kind == "refuse" else 500
            message = "Not Found" if status == 404 else str(run.number)
            refusal = {"error": {"message": message, "type": "x", "code": "worker_said"}}
            extra = "retry-after: 0\r\n" if fate.num_tokens > 1 else ""
            writer.write(self.bytes.response(json.dumps(refusal).encode(), status=status, extra=extra))
            return
        if fate.kind == "reset":
            writer.transport.abort()
            return
        if isinstance(said, dict) and not body.get("stream"):
            writer.write(self.bytes.response(json.dumps(said).encode()))
            run.is_done = True
            return
        prompt = body["prompt"]
        num_prompts = len(prompt) if isinstance(prompt[0], list) else 1
        num_choices = (body.get("n") or 1) * num_prompts
        num_prompt_tokens = sum(map(len, prompt)) if num_prompts > 1 or isinstance(prompt[0], list) else len(prompt)
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": fate.num_tokens * num_choices}
        usage |= {"prompt_tokens_details": {"cached_tokens": num_prompt_tokens // 2}}
        run.usage = usage if fate.has_usage else None
        words = [f"{run.number}.{idx} " for idx in range(fate.num_tokens)]
        if body.get("stream"):
            writer.write(self.bytes.event_stream_head)
            events = [said] if isinstance(said, dict) else []
            events += [{"choices": [{"index": idx, "text": word}]} for word in words for idx in range(num_choices)]
            events += [{"choices": [], "usage": usage}] if fate.has_usage else []
            whole = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events) + b"data: [DONE]\n\n"
        else:
            choices = [{"index": idx, "text": "".join(words)} for idx in range(num_choices)]
            whole = json.dumps({"choices": choices} | ({"usage": usage} if fate.has_usage else {})).encode()
            writer.write(self.bytes.response(whole)[: -len(whole)])
        end = len(whole) if fate.kind not in ("cut", "head") else int(len(whole) * fate.kept)
        end = 0 if fate.kind == "head" else end
        places = sorted(Random(run.number).randrange(len(whole)) for _ in range(fate.pieces - 1))
        for begin, stop in zip([0, *places], [*places, len(whole)], strict=True):
            piece = whole[begin : min(stop, end)]
            if piece:
                writer.write(self.bytes.chunk(piece) if body.get("stream") else piece)
                await writer.drain()
                await asyncio.sleep(0)
        if fate.kind in ("cut", "head"):
            await writer.drain()
            await asyncio.sleep(0.005)
            writer.transport.abort()
            return
        if body.get("stream"):
            writer.write(self.bytes.chunk(b""))
        run.is_done = True

    async def transfer(self, run: Run, body: Any) -> dict[str, Any] | int | None:
        """Return what a prefill worker says of the prompt that it holds, 500 if a decode worker cannot fetch it."""
        prompt = body["prompt"]
        if (room := body.get("bootstrap_room")) is not None:
            side = run.worker.role
            run.is_prefill = side == "prefill"
            if run.fate.kind in ("refuse", "reset"):
                return None
            key = json.dumps(room)
            sides = self.rooms.setdefault(key, {"prefill": asyncio.Event(), "decode": asyncio.Event()})
            assert not sides[side].is_set(), "nobody comes to a room twice"
            sides[side].set()
            for each in sides.values():
                await each.wait()
            return None
        assert run.worker.role is None or self.dialect != "sglang" or run.worker.role == "both"
        params = body.get("kv_transfer_params") or body.get("disaggregated_params") or {}
        is_asked = params.get("do_remote_decode") or params.get("request_type") == "context_only"
        if is_asked:
            run.is_prefill = True
            assert run.worker.role == "prefill"
            if run.fate.kind in ("refuse", "reset"):
                return None
            name = f"held-{run.number}" if "do_remote_decode" in params else str(params["disagg_request_id"])
            self.held[name] = prompt
            if self.dialect == "tensorrt_llm":
                return {"choices": [{"text": "a", "finish_reason": "length", "disaggregated_params": params}]}
            assert body["stream"] == (self.dialect == "kvist")
            assert body["max_tokens"] == 1
            return {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": name}}
        if not params or run.fate.kind in ("refuse", "reset"):
            return None
        name = str(params.get("remote_request_id") or params.get("disagg_request_id"))
        return None if self.held.pop(name, None) == prompt else 500

    # --- What clients do --------------------------------------------------------------------------------------------

    def fate(self) -> Fate:
        random = self.random
        kinds = {"answer": 24, "hang": 3, "refuse": 4, "reset": 2, "head": 1, "cut": 3}
        kind = random.choices([*kinds], [*kinds.values()])[0]
        status = random.choice([503, 503, 429, 429, 502, 500, 400, 404]) if kind == "refuse" else 200
        delay_s = random.choice([0.0, 0.0, 0.001, 0.005, 0.02])
        num_tokens = random.choice([1, 2, 3, 8, 8, 8, 8, 4000 if random.random() < 0.1 else 8])
        has_usage, kept = random.random() < 0.7, random.random()
        return Fate(kind, status, delay_s, num_tokens, has_usage, random.choice([1, 3, 10]), kept)

    def ask(self) -> None:
        random = self.random
        for _ in range(random.choice([1, 1, 3, 8])):
            length = random.choice([4, 40, 400, 400])
            prompt: Any = [random.randrange(3)] * length + [random.randrange(9)]
            if random.random() < 0.2:
                prompt = [*HELD, *prompt]
            if random.random() < 0.1:
                prompt = [prompt, [7] * random.choice([5, 300])]
            body = {"model": random.choice("mmmmn"), "prompt": prompt, "max_tokens": 8}
            if random.random() < 0.02:
                body["model"] = "unknown"
            if random.random() < 0.5:
                body["stream"] = True
            if random.random() < 0.2:
                body["n"] = random.choice([1, 2, 3])
            if random.random() < 0.3:
                body["priority"] = random.choice([-1, 1, 7])
            headers = {"x-request-id": str(len(self.asked))}
            if random.random() < 0.2:
                headers["x-kvist-queue-timeout"] = random.choice(["0", "0.01", "5"])
            tenant = random.choice(["calm", "calm", "wild", "few", "poor", "narrow"]) if self.has_tenants else None
            if tenant is not None:
                headers["authorization"] = f"Bearer {tenant}"
            asked = Asked(len(self.asked), body, headers, [self.fate() for _ in range(3)], tenant)
            if self.has_leavers and tenant in (None, "wild") and random.random() < 0.2:
                asked.leaves_after_s = random.choice([0.0, 0.002, 0.01, 0.03])
            asked.is_slow, asked.front = random.random() < 0.1, random.randrange(self.num_fronts)
            self.asked.append(asked)
            self.clients.append(asyncio.create_task(self.client(asked)))

    async def client(self, asked: Asked) -> None:
        url = httpx.URL(self.services[asked.front].url)
        sock = socket.socket()
        if asked.is_slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (url.host, url.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        body = json.dumps(asked.body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in asked.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        try:
            async with asyncio.timeout(asked.leaves_after_s):
                while piece := await reader.read(2048 if asked.is_slow else 65536):
                    asked.got += piece
                    if asked.is_slow:
                        await asyncio.sleep(0)
        except TimeoutError:
            asked.has_left = True
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    # --- What operators do, and what happens to workers ---------------------------------------------------------------

    async def rest(self) -> None:
        await asyncio.sleep(self.random.choice([0.0, 0.002, 0.01, 0.03]))

    def open_gate(self) -> None:
        self.gate.set()
        self.gate = asyncio.Event()

    def kill(self) -> None:
        worker = self.random.choice(self.workers)
        self.has_faults = True
        worker.kill()
        self.was_killed.add(worker.url)
        for run in worker.running:
            run.was_killed = True

    async def start(self) -> None:
        for worker in self.workers:
            if not worker._server.is_serving():
                await worker.start()
            worker.health_status = 200

    def sicken(self) -> None:
        self.has_faults = True
        self.random.choice(self.workers).health_status = 500

    async def remove(self) -> None:
        self.has_faults = True
        url = self.random.choice(self.workers).url
        self.was_removed.add(url)
        await self.operator.delete("/workers", params={"url": url})

    async def add(self) -> None:
        for worker in self.workers:
            await self.operator.post("/workers", json={"url": worker.url})

    async def recover(self) -> None:
        await self.start()
        await self.add()

    async def live(self, exits: AsyncExitStack, start: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
        gc.disable()  # requests of long prompts would pile up until it runs
        exits.callback(gc.enable)
        num_workers = {None: self.random.choice([1, 3, 4])}.get(self.dialect, self.random.choice([4, 5]))
        for idx in range(num_workers):
            await self.join(exits, idx)
        config = self.config(tmp_path)
        monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.02)
        self.services: list[RouterService] = await start(exits, config)
        url = self.services[0].url
        self.operator = await exits.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, headers=ADMIN)
        )
        self.watch(monkeypatch)
        await self.settled()
        if self.num_fronts == 1 and self.options["policy"] == "kv":
            rank = WorkerRank(self.workers[-1].url, 0)
            self.services[0].keeper.index.radix.store(rank, Tier.GPU, None, block_hashes(HELD, 16))
            for worker in self.services[0].fleet.workers:  # without reports nobody knows how fast requests end
                worker.capacity.ends_a_second = 50.0
        if self.num_fronts == 1:  # others look by themselves now and then
            exits.callback(asyncio.create_task(self.look(self.services[0])).cancel)
        acts: dict[Callable[[], Any], int] = {
            self.ask: 40,
            self.rest: 25,
            self.open_gate: 3,
            self.kill: 1,
            self.sicken: 1,
            self.remove: 1,
            self.recover: 4,
            self.be_quiet: 2,
        }
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
            self.told[act.__name__] += 1
            if (doing := act()) is not None:
                await doing
        await self.be_quiet()

    def config(self, tmp_path: Path) -> RouterConfig:
        values = dict(self.options)
        urls = [worker.url for worker in self.workers]
        if self.dialect in ("vllm", "tensorrt_llm"):
            for role in ("prefill", "decode"):
                values[f"{role}_worker_urls"] = tuple(each.url for each in self.workers if each.role == role)
        if self.has_tenants:
            may = {"calm": {}, "wild": {}, "few": {"max_requests": 2}, "narrow": {"models": ["n"]}}
            may["poor"] = {"prefill_tokens_per_minute": 3000, "requests_per_minute": 20, "priority": -1}
            tenants = [
                {"name": name, "keys": [hashlib.sha256(name.encode()).hexdigest()], **each}
                for name, each in may.items()
            ]
            path = tmp_path / "tenants.json"
            path.write_text(json.dumps({"tenants": tenants}))
            values["tenants"] = str(path)
        times = {"health_interval_s": 0.02, "health_timeout_s": 10.0, "breaker_cooldown_s": 0.02}
        times |= {"drain_timeout_s": 60.0, "silence_timeout_s": 60.0, "shutdown_timeout_s": 10.0}
        return RouterConfig(worker_urls=tuple(urls), port=0, admin_key="root", **values, **times)

    async def settled(self) -> None:
        """Wait until all workers are there, well, and may be asked."""
        await self.recover()

        def is_so() -> bool:
            every = [[each for each in service.fleet.workers if each.state == "healthy"] for service in self.services]
            return all(len(each) == len(self.workers) for each in every)

        while True:
            try:
                async with asyncio.timeout(0.2):
                    return await self.until(is_so)
            except TimeoutError:
                await self.recover()

    # --- What must be so --------------------------------------------------------------------------------------------

    def watch(self, monkeypatch: Any) -> None:
        """Look at each first attempt, and at each request that leaves the queue."""
        send_next, answer_by, leave, life = Forwarding._send_next, Forwarding._answer_by, Admission.leave, self

        def send(forwarding: Forwarding) -> None:
            life.choosing_since_s = forwarding.router.now_s()
            send_next(forwarding)

        def answer(forwarding: Forwarding, decision: Decision) -> None:
            life.num_attempts += 1
            life.num_firsts += not forwarding.tried
            if not forwarding.tried and not isinstance(forwarding.responder, SplitPart):
                life.note(life.check_room, forwarding, decision)
            answer_by(forwarding, decision)

        def served(admission: Admission, place: Place, *, is_served: bool = False) -> None:
            if is_served:
                life.note(life.check_order, admission, place)
            leave(admission, place, is_served=is_served)

        monkeypatch.setattr(Forwarding, "_send_next", send)
        monkeypatch.setattr(Forwarding, "_answer_by", answer)
        monkeypatch.setattr(Admission, "leave", served)

    async def look(self, service: RouterService) -> None:
        """See that nobody sleeps where there is room: who is first is woken in the loop's next turn."""
        admission, asleep = service._forwarder.admission, set[Place]()
        while True:
            await asyncio.sleep(0.002)
            before, asleep = asleep, set()
            for queue, lines in admission._queues.items():
                if not admission._is_scheduled and admission._has_room_for(queue):
                    asleep.add(min(lines.values(), key=lambda line: line.rank).places[0])
            self.failures += [AssertionError(f"not woken: {place}") for place in before & asleep]

    def note(self, check: Callable[..., None], *of: Any) -> None:
        """Check what the router does just now, which would answer a failure as one of its own."""
        try:
            check(*of)
        except AssertionError as error:
            self.failures.append(error)

    def check_room(self, forwarding: Forwarding, decision: Decision) -> None:
        router = forwarding.router
        admission, worker = router.admission, router.fleet.get(decision.chosen.target.worker)
        assert worker is not None
        assert worker.health.is_healthy
        assert not worker.is_draining
        if self.num_fronts > 1:
            return
        if forwarding.handover is not None:
            source = router.fleet.get(forwarding.handover.prefill_worker)
            others = [each for each in router.fleet.routable(forwarding.parsed.model) if each.role is worker.role]
            others = [each for each in others if source is not None and each.has_compatible_cache(source)]
            since_s = self.choosing_since_s  # who could be asked only later may have been left out
            others = [each for each in others if max(each.capacity.paused_until_s, each.breaker.retry_at_s) <= since_s]
            assert admission.has_room(worker) or not any(map(admission.has_room, others))
            self.told["decoded with room"] += admission.has_room(worker)
            self.told["decoded without"] += not admission.has_room(worker)
        elif forwarding.local_reason not in FALLBACKS:
            assert admission.has_room(worker)
            assert admission.max_requests is None or router.load.num_running < admission.max_requests

    def check_order(self, admission: Admission, place: Place) -> None:
        self.told["served from a seat" if place.queue[1] else "served from a queue"] += 1
        waiting = [each for line in admission._queues[place.queue].values() for each in line.places]
        if self.has_tenants:
            assert place.priority == min(each.priority for each in waiting)
        else:
            assert place == min(waiting)

    async def be_quiet(self) -> None:
        """Let all end, and compare."""
        self.gate.set()
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*self.clients)
                await self.until(lambda: not any(service.keeper.load.num_running for service in self.services))
                await self.until(lambda: not self.tried())  # a front hears a moment later how another's trial ended
        except TimeoutError:
            stuck = [each for each in self.asked if not each.has_left and not each.got]
            running = [each.keeper.load.num_running for each in self.services]
            pytest.fail(f"not answered: {stuck}, {running}, {self.tried()}")
        assert not self.failures
        self.gate = asyncio.Event()
        self.clients.clear()
        for asked in self.asked:
            self.check_answer(asked)
        for service in self.services:
            self.check_nothing_is_left(service)
        await self.until(lambda: not self.forwardings())
        self.check_counts()
        await self.settled()

    def forwardings(self) -> list[Forwarding]:
        """Return those of this life that something still refers to, other than cycles of what is gone."""
        gc.collect()
        routers = [service._forwarder for service in self.services]
        return [each for each in gc.get_objects() if type(each) is Forwarding and each.router in routers]

    def tried(self) -> list[str]:
        """Return the workers that some front waits for a trial of."""
        every = [worker for service in self.services for worker in service.fleet.workers]
        return [worker.url for worker in every if worker.breaker.state is CircuitState.HALF_OPEN]

    def check_answer(self, asked: Asked) -> None:
        is_late, runs = self.options["request_timeout_s"] is not None, asked.every_run
        for of_part in asked.runs.values():
            answering = [run for run in of_part if not run.is_prefill]
            assert len(answering) <= self.options["max_attempts"] + (self.dialect is not None)
            if not asked.has_left and not is_late and self.dialect != "sglang":
                assert sum(run.is_done and not run.was_killed for run in answering) <= 1
        if asked.has_left:
            self.told["left"] += 1
            return
        if not asked.got:
            assert any(run.fate.kind in ("cut", "head") or run.was_killed for run in runs) or is_late
            return
        status, body, is_all = read_answer(asked.got)
        is_stream = bool(asked.body.get("stream"))
        if status != 200:
            assert is_all
            error = json.loads(body)["error"]
            self.told[f"{status} {error['code']}"] += 1
            if error["code"] == "worker_said":
                said = [run for run in runs if str(run.number) == error["message"] or error["message"] == "Not Found"]
                assert any(run.fate.status == status or status == 500 for run in said)
            else:
                assert status in CODES[error["code"]], error
                ends = [run for run in runs if run.is_done and not run.is_prefill and not run.was_killed]
                assert not ends or is_late or any(asked.runs.keys() - {""})
                if error["code"] == "no_pair" and self.is_plain(asked):
                    for side in ("prefill", "decode"):
                        able = {each.url for each in self.workers if each.role == side and self.serves(each, asked)}
                        tried = [run.worker.url for run in runs if run.worker.role in (side, "both")]
                        if len(tried) >= self.options["max_attempts"] or able <= {*tried}:
                            break
                    else:
                        raise AssertionError("another pair is left")
                assert error["code"] != "no_healthy_worker" or self.has_faults or self.options["breaker_failures"] < 9
            return
        if not is_all and not is_stream:
            assert any(run.fate.kind == "cut" or run.was_killed for run in runs) or is_late
            self.told["200 cut"] += 1
            return
        found, is_whole, error = texts_of(body, is_stream)
        by_number = {str(run.number): run for run in runs}
        seen = set()
        for text in found.values():
            words = text.split()
            numbers = {word.partition(".")[0] for word in words}
            assert len(numbers) == 1, "of one worker alone"
            run = by_number[numbers.pop()]
            seen.add(run)
            assert words == [f"{run.number}.{idx}" for idx in range(len(words))], "in order"
            assert not (is_whole and is_all) or len(words) == run.fate.num_tokens, "whole"
        is_apart = any(asked.runs.keys() - {""})
        assert len(seen) <= (asked.num_choices if is_apart else 1)
        if is_whole and is_all and error is None:
            assert sorted(found) == list(range(asked.num_choices))
            self.told["200 of several" if is_apart else "200"] += 1
            self.told["200 of a pair"] += any(run.is_prefill for run in runs)
        else:
            self.told["200 ended by an error"] += 1
            assert error is not None or not is_all
            was_cut = any(run.fate.kind in ("cut", "head", "reset", "refuse") or run.was_killed for run in runs)
            assert was_cut or is_late or self.has_faults

    def serves(self, worker: Any, asked: Asked) -> bool:
        return asked.body["model"] in {each["id"] for each in worker.models}

    def is_plain(self, asked: Asked) -> bool:
        """Return whether nothing but its fates kept a request of one answer from any worker."""
        return asked.num_choices == 1 and not self.has_faults and self.options["breaker_failures"] > 9

    def check_nothing_is_left(self, service: RouterService) -> None:
        load, admission = service.keeper.load, service._forwarder.admission
        board, num_columns = load.board, load.ints[0]
        assert (load.num_running, load.num_waiting, sum(admission.queued.values())) == (0, 0, 0)
        assert not board.cell_ints[:, 1 : 1 + num_columns, [RankField.RUNNING, RankField.PREFILL]].any()
        assert not board.work[:, [QUEUED, CONTEXT, UNSTREAMED], :num_columns].any()
        assert board.in_flight["until_s"].max() <= admission.now_s() + UNTIL_INDEXED_S
        tenants = load.tenants
        for start in tenants._starts:
            cells = load.ints[start : start + rows.ROW_WORDS].tolist()
            assert not any(cells[rows._CELL_WORDS + rows.Field.RUNNING :: rows._CELL_WORDS])
        for worker in service.fleet.workers:
            assert not worker.on_silence

    def check_counts(self) -> None:
        counts = Counter[tuple[str, ...]]()
        for service in self.services:
            counts.update(service._metrics.counts)
        if not self.was_removed and self.dialect is None:
            sent = {key: number for key, number in counts.items() if key[0] == "requests"}
            assert sum(sent.values()) == self.num_attempts
            retries = sum(number for key, number in counts.items() if key[0] == "retries")
            assert retries == self.num_attempts - self.num_firsts
        told = [read_answer(asked.got) for asked in self.asked if not asked.has_left and asked.got]
        if self.dialect is None:
            codes = Counter(
                str(status)
                for status, body, _ in told
                if status != 200 and json.loads(body)["error"]["code"] != "worker_said"
            )
            refused = {key[1]: number for key, number in counts.items() if key[0] == "refusals" and number}
            if not any(asked.has_left for asked in self.asked):
                assert refused == codes
        for tenant in ("calm", "few", "poor", "narrow") if self.has_tenants else ():
            self.check_account(tenant)

    def check_account(self, tenant: str) -> None:
        accounts = [
            account
            for service in self.services
            for (name, _), account in service._forwarder.accounts.items()
            if name == tenant
        ]
        num_requests = num_limited = num_cut = 0
        for asked in self.asked:
            num_cut += asked.tenant == tenant and not asked.got
            if asked.tenant == tenant and asked.got:
                status, body, _ = read_answer(asked.got)
                num_requests += status == 200
                num_limited += b"rate_limit_exceeded" in body
        assert num_requests <= sum(account.requests for account in accounts) <= num_requests + num_cut
        assert sum(account.limited for account in accounts) == num_limited
        for account in accounts:
            assert 0 <= account.cached_tokens <= account.prompt_tokens


@pytest.mark.parametrize("seed", LIVES)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_life_of_one_process(dialect, seed, worker, http_bytes, until, tmp_path, monkeypatch) -> None:
    async def start(exits: AsyncExitStack, config: RouterConfig) -> list[RouterService]:
        return [await exits.enter_async_context(RouterService(config))]

    life = Life(seed, dialect, worker, http_bytes, until)
    async with AsyncExitStack() as exits:
        await life.live(exits, start, tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", LIVES)
async def test_a_life_of_two_fronts(seed, worker, http_bytes, until, tmp_path, monkeypatch, fronts_of) -> None:
    async def start(exits: AsyncExitStack, config: RouterConfig) -> list[RouterService]:
        return await exits.enter_async_context(fronts_of(config, 2))

    life = Life(seed, DIALECTS[seed % len(DIALECTS)], worker, http_bytes, until)
    life.num_fronts = 2
    async with AsyncExitStack() as exits:
        await life.live(exits, start, tmp_path, monkeypatch)
