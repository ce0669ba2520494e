"""Prefill on one worker, decode on another: who is chosen, what each is sent, and no token lost or doubled."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import httpx
import pytest

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.openai.requests import with_fields
from kvist.router.config import RouterConfig
from kvist.router.policy.baselines import decide
from kvist.router.policy.decision import Candidate, Load, Prompt, Role
from kvist.router.prefill.dialect import LocalReason, Side
from kvist.router.prefill.handover import DIALECTS, why_local
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, ParsedRequest

LONG = list(range(1000, 1400))
SHORT = LONG[:100]
TOKENS = ["a", "b", "c", "d"]
SIDE = Side("http://127.0.0.1:1", 8998)


class Simulated:
    """The protocol's two ends: prompts that prefill workers hold, and decode workers that fetch each at most once."""

    def __init__(self, http_bytes: Any) -> None:
        self.held: dict[str, list[int]] = {}
        self._http_bytes = http_bytes
        self._num_prefills = 0

    async def prefill(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        if context := body.get("disaggregated_params"):  # TensorRT-LLM's
            self.held[str(context["disagg_request_id"])] = body["prompt"]
            choice = {"text": "a", "finish_reason": "length", "disaggregated_params": context}
            writer.write(self._http_bytes.response(json.dumps({"choices": [choice]}).encode()))
            return
        if not body.get("kv_transfer_params"):
            await self.decode(received, writer)
            return
        asked = {name: value for name, value in body["kv_transfer_params"].items() if value is not None}
        assert asked == {"do_remote_decode": True, "do_remote_prefill": False}
        assert body["max_tokens"] == 1
        self._num_prefills += 1
        name = f"held-{self._num_prefills}"
        self.held[name] = body["prompt"]
        params = {"do_remote_prefill": True, "remote_request_id": name}
        said = json.dumps({"choices": [], "kv_transfer_params": params}).encode()
        if not body["stream"]:  # vLLM's
            writer.write(self._http_bytes.response(said))
            return
        chunks = [b"data: %b\n\n" % said, self.events()[0], b"data: [DONE]\n\n", b""]
        writer.write(self._http_bytes.event_stream_head + b"".join(map(self._http_bytes.chunk, chunks)))

    async def decode(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        params = body.get("kv_transfer_params") or body.get("disaggregated_params")
        name = params and str(params.get("remote_request_id", params.get("disagg_request_id")))
        if params and self.held.pop(name, None) != body["prompt"]:
            writer.write(self._http_bytes.response(b'{"error":{"message":"kv transfer failed: unknown"}}', status=500))
            return
        writer.write(self.whole(body.get("stream", False)))

    def whole(self, is_stream: bool = True) -> bytes:
        if not is_stream:
            answer = {"choices": [{"text": "".join(TOKENS)}], "usage": {"prompt_tokens": 400}}
            return self._http_bytes.response(json.dumps(answer).encode())
        chunks = [self._http_bytes.chunk(event) for event in [*self.events(), b"data: [DONE]\n\n", b""]]
        return self._http_bytes.event_stream_head + b"".join(chunks)

    @staticmethod
    def events() -> list[bytes]:
        return [f"data: {json.dumps({'choices': [{'text': token}]})}\n\n".encode() for token in TOKENS]


@pytest.fixture
def simulated(http_bytes) -> Simulated:
    return Simulated(http_bytes)


def info(role: str, **more: Any) -> dict[str, Any]:
    transfer = {"endpoints": ["tcp://127.0.0.1:9"], "agent": "shared_memory"}
    return {"engine": "kvist", "block_size": 16, "kv_events": None, "role": role, "kv_transfer": transfer} | more


def of(dialect: str, role: str) -> dict[str, Any]:
    """What a worker of this engine says; stock ones say nothing of their role."""
    return {"server_info": info(role)} if dialect == "kvist" else {"models": [{"id": "m", "owned_by": dialect}]}


def texts(answer: bytes) -> list[str]:
    """Return how far each choice of a stream came."""
    found: dict[int, str] = {}
    for line in answer.split(b"\n\n"):
        for choice in json.loads(line[6:]).get("choices", []) if line.startswith(b"data: {") else []:
            found[choice.get("index", 0)] = found.get(choice.get("index", 0), "") + choice["text"]
    return [found[idx] for idx in sorted(found)]


async def stream(front: Any, prompt: list[int] = LONG) -> tuple[httpx.Response, str]:
    """Return the answer and the tokens in it."""
    answer = await front.complete(prompt, stream=True)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return answer, "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def total_load(front: Any) -> int:
    load, fleet = front.service._forwarder.load, front.service.fleet
    return sum(load.running_requests(worker.url) for worker in fleet.workers)


async def count(front: Any, name: str) -> float:
    return (await front.metrics()).get(f"kvist_router_{name}", 0.0)


async def test_a_long_prompt_is_computed_by_one_worker_and_answered_by_another(worker, router, simulated) -> None:
    async with (
        worker(server_info=info("prefill"), answer=simulated.prefill) as p,
        worker(server_info=info("decode"), answer=simulated.decode) as d,
        router(p.url, d.url) as front,
    ):
        answer, text = await stream(front)
        assert text == "".join(TOKENS)
        assert answer.content == b"".join([*simulated.events(), b"data: [DONE]\n\n"])
        assert answer.headers["x-kvist-worker"] == d.url
        assert answer.headers["x-kvist-prefill-worker"] == p.url
        sent, front_sent = d.completions[0].body, answer.request.content
        params = json.loads(sent)["kv_transfer_params"]
        assert json.loads(sent) == json.loads(front_sent) | {"kv_transfer_params": params}
        assert p.completions[0].headers["x-request-id"] == d.completions[0].headers["x-request-id"]
        assert (await front.complete(LONG[::-1])).json()["choices"][0]["text"] == "".join(TOKENS)
        assert await count(front, "disaggregated_total") == 2
        prefill = (await front.explain(LONG + LONG))["prefill"]  # it streams no events: what it computed is expected
        assert (prefill["worker"], prefill["overlap_tokens"]) == (p.url, len(LONG) // 16 * 16)
        assert await count(front, "prefill_seconds_count") == await count(front, "transfer_seconds_count") == 2
        assert total_load(front) == 0
        assert not simulated.held
        roles = {url: shown["role"] for url, shown in (await front.workers()).items()}
        assert roles == {p.url: "prefill", d.url: "decode"}
        assert await count(front, f'worker_role{{role="prefill",worker="{p.url}"}}') == 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_decode_worker_is_asked_while_the_prompt_is_computed(
    worker, router, simulated, http_bytes, is_lost: bool
) -> None:
    is_asked, is_over = asyncio.Event(), asyncio.Event()

    async def prefill(received: Any, writer: asyncio.StreamWriter) -> None:
        simulated.held["begun"] = json.loads(received.body)["prompt"]
        said = {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": "begun"}}
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(b"data: %b\n\n" % json.dumps(said).encode()))
        await is_asked.wait()
        if is_lost:
            writer.transport.abort()
        else:
            writer.write(http_bytes.chunk(b"data: [DONE]\n\n") + http_bytes.chunk(b""))
        is_over.set()

    async def decode(received: Any, writer: asyncio.StreamWriter) -> None:
        is_asked.set()
        await is_over.wait()
        await simulated.decode(received, writer)

    async with (
        worker(server_info=info("prefill"), answer=prefill) as p,
        worker(server_info=info("decode"), answer=decode) as d,
        router(p.url, d.url) as front,
    ):
        answer, text = await stream(front)
        assert (text, answer.headers["x-kvist-prefill-worker"]) == ("".join(TOKENS), p.url)
        assert (len(p.completions), len(d.completions)) == (1, 1), "whoever fetches knows what to do without the rest"
        assert total_load(front) == 0


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_prompt_that_nobody_will_fetch_is_computed_no_further(
    worker, router, simulated, http_bytes, until, is_left: bool
) -> None:
    async def prefill(received: Any, writer: asyncio.StreamWriter) -> None:
        if "kv_transfer_params" not in json.loads(received.body):
            await simulated.decode(received, writer)
            return
        said = {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": "begun"}}
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(b"data: %b\n\n" % json.dumps(said).encode()))

    async def decode(received: Any, writer: asyncio.StreamWriter) -> None:
        if not is_left:
            await drop(received, writer)

    async with (
        worker(server_info=info("prefill"), answer=prefill) as p,
        worker(server_info=info("decode"), answer=decode) as d,
        router(p.url, d.url) as front,
    ):
        asking = asyncio.create_task(stream(front))
        await until(lambda: d.completions)
        if is_left:
            asking.cancel()
        else:
            assert (await asking)[1] == "".join(TOKENS)
        await until(lambda: total_load(front) == 0)
        assert await count(front, f'requests_total{{policy="kv",status="499",worker="{p.url}"}}') == 1


@pytest.mark.parametrize(
    ("prompt", "fields", "reason"),
    [
        (SHORT, {}, "short"),
        (LONG, {"n": 2, "use_beam_search": True}, "several_sequences"),
        ([SHORT, SHORT], {"n": 2}, "several_sequences"),
        (LONG, {"logprobs": 1}, "logprobs"),
    ],
)
async def test_what_cannot_or_need_not_be_handed_over_stays_local(
    worker, router, simulated, prompt: Any, fields: dict[str, Any], reason: str
) -> None:
    async with (
        worker(server_info=info("prefill"), answer=simulated.prefill) as p,
        worker(server_info=info("decode"), answer=simulated.decode) as d,
        router(p.url, d.url) as front,
    ):
        answer = await front.complete(prompt, **fields)
        assert answer.headers["x-kvist-worker"] == d.url
        assert "x-kvist-prefill-worker" not in answer.headers
        assert d.completions[0].body == answer.request.content
        assert not p.completions
        assert await count(front, f'local_prefills_total{{reason="{reason}"}}') == 1


async def test_a_well_cached_prompt_stays_local_and_the_explanation_says_so(worker, router, simulated) -> None:
    async with (
        worker(answer=simulated.prefill) as p,
        worker(answer=simulated.decode) as d,
        router(prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,), block_size=16) as front,
    ):
        front.hold(p.url, LONG[:64])
        planned = await front.explain(LONG)
        assert (planned["worker"], planned["prefill"]["worker"], planned["prefill"]["overlap_tokens"]) == (
            d.url,
            p.url,
            64,
        )
        assert planned["prefill"]["candidates"][0]["overlap_blocks"]["gpu"] == 4
        front.hold(d.url, LONG[:320])
        planned = await front.explain(LONG)
        assert (planned["worker"], planned["local_prefill_reason"], planned["overlap_tokens"]) == (d.url, "cached", 320)
        assert "prefill" not in planned


async def drop(_: Any, writer: asyncio.StreamWriter) -> None:
    """Break the connection off."""
    writer.transport.abort()


@pytest.mark.parametrize(
    ("outcome", "num_asked"),
    [("pulled", 2), ("lost", 2), ("prefill_refused", 2), ("transfer_failed", 3), ("decode_failed", 3), ("removed", 2)],
)
async def test_a_prefix_that_cannot_be_fetched_is_computed(
    outcome: str, num_asked: int, worker, router, http_bytes, until
) -> None:
    params = {"do_remote_prefill": True, "remote_request_id": "held-1", "num_tokens": 384}
    told = info("both", kv_transfer={"endpoints": ["tcp://127.0.0.1:9"], "tokens_per_s": 1e9})
    is_free, num_running = asyncio.Event(), []

    async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        asked = body.get("kv_transfer_params")
        if body.get("max_tokens") == 99:
            await is_free.wait()
        if asked == params and outcome in ("transfer_failed", "decode_failed"):
            failure = http_bytes.response(b'{"error":{"message":"kv transfer failed"}}', status=500)
            await drop(received, writer) if outcome == "decode_failed" else writer.write(failure)
            return
        assert asked in (None, params, {"do_remote_decode": True, "max_cached_tokens": 384})
        is_held = asked is not None and asked != params and outcome != "prefill_refused"
        if asked is not None:
            num_running.append(front.service._forwarder.load.running_requests(d.url))
        if is_held and outcome == "removed":
            front.service.fleet.remove(d.url)
        if is_held:
            said = b"data: %b\n\n" % json.dumps({"choices": [], "kv_transfer_params": params}).encode()
            writer.write(http_bytes.event_stream_head + http_bytes.chunk(said) + http_bytes.chunk(b""))
        else:
            said = {"choices": [{"text": "x"}]}
            if outcome == "lost":
                said["usage"] = {"prompt_tokens": 400, "prompt_tokens_details": {"cached_tokens": 0}}
            writer.write(http_bytes.response(json.dumps(said).encode()))

    async with (
        worker(server_info=told, answer=answer) as p,
        worker(server_info=told, answer=answer) as d,
        router(p.url, d.url, max_worker_requests=1) as front,
    ):
        front.hold(p.url, LONG)
        busy = asyncio.create_task(front.complete(LONG, max_tokens=99))
        await until(lambda: p.completions)
        assert (await front.complete(LONG)).json()["choices"][0]["text"] == "x"
        assert set(num_running) == {1}  # also while the holder is asked
        counted = {"removed": "decode_failed", "lost": "transfer_failed"}.get(outcome, outcome)
        assert await count(front, f'pulls_total{{outcome="{counted}"}}') == 1
        assert await count(front, "pulled_tokens_total") == (384 if outcome == "pulled" else 0)
        (shown,) = (await front.client.get("/ui/state?view=requests")).json()["requests"]
        assert shown.get("pull") == ({"worker": p.url, "tokens": 384} if outcome in ("pulled", "lost") else None)
        bodies = [json.loads(each.body) for each in (*p.completions, *d.completions)]
        assert sum(body.get("max_tokens") != 99 for body in bodies) == num_asked
        is_free.set()
        await busy
        assert total_load(front) == 0


@pytest.mark.parametrize(
    ("more", "num_fetched"), [({}, 384), ({"block_size": 32}, 0), ({"kv_cache_dtype": "fp8_e4m3 scaled 1a"}, 0)]
)
async def test_no_prefix_is_fetched_in_blocks_of_another_kind(
    more: dict[str, Any], num_fetched: int, worker, router
) -> None:
    transfer = {"endpoints": ["tcp://127.0.0.1:9"], "tokens_per_s": 1e9}
    told = info("both", kv_transfer=transfer, kv_cache_dtype="fp8_e4m3")
    async with (
        worker(server_info=told) as p,
        worker(server_info=told | more) as d,
        router(p.url, d.url) as front,
    ):
        front.hold(p.url, LONG)
        candidates = (await front.explain(LONG))["candidates"]
        assert {each["worker"]: each["tokens_to_fetch"] for each in candidates} == {p.url: 0, d.url: num_fetched}


async def test_a_fleet_without_prefill_workers_is_as_before(worker, router, simulated) -> None:
    async with worker(server_info=info("both"), answer=simulated.decode) as one, router(one.url) as front:
        answer = await front.complete(LONG)
        assert one.completions[0].body == answer.request.content
        assert {"prefill", "local_prefill_reason"}.isdisjoint(await front.explain(LONG))


async def test_a_prefill_worker_that_fails_is_passed_over(worker, router, simulated, http_bytes) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"busy", status=503))

    async def break_off(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()

    for failure in (refuse, drop, break_off):
        async with (
            worker(server_info=info("prefill"), answer=failure) as broken,
            worker(server_info=info("prefill"), answer=simulated.prefill) as p,
            worker(server_info=info("decode"), answer=simulated.decode) as d,
            router(broken.url, p.url, d.url, policy="round-robin") as front,
        ):
            answers = [await stream(front) for _ in range(3)]
            assert {text for _, text in answers} == {"".join(TOKENS)}
            assert {answer.headers["x-kvist-prefill-worker"] for answer, _ in answers} == {p.url}
            assert broken.completions
            assert total_load(front) == 0


async def test_without_any_working_prefill_worker_one_worker_does_all(worker, router, simulated, http_bytes) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"no", status=500))

    async with (
        worker(server_info=info("prefill"), answer=refuse) as p,
        worker(server_info=info("decode"), answer=simulated.decode) as d,
        router(p.url, d.url) as front,
    ):
        answer, text = await stream(front)
        assert text == "".join(TOKENS)
        assert d.completions[0].body == answer.request.content
        assert await count(front, 'disaggregation_fallbacks_total{reason="prefill_failed"}') == 1


async def test_an_answer_without_usable_params_makes_the_request_local(worker, router, simulated, http_bytes) -> None:
    async def plain(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(http_bytes.completion()))

    async with (
        worker(server_info=info("prefill"), answer=plain) as p,
        worker(server_info=info("decode"), answer=simulated.decode) as d,
        router(p.url, d.url) as front,
    ):
        assert (await stream(front))[1] == "".join(TOKENS)
        assert await count(front, 'disaggregation_fallbacks_total{reason="prefill_refused"}') == 1


async def test_a_decode_worker_that_dies_first_leaves_the_prefill_to_another(worker, router, simulated) -> None:
    async with (
        worker(server_info=info("prefill"), answer=simulated.prefill) as p,
        worker(server_info=info("decode"), answer=drop) as broken,
        worker(server_info=info("decode"), answer=simulated.decode) as d,
        router(p.url, broken.url, d.url, policy="round-robin") as front,
    ):
        for _ in range(3):
            answer, text = await stream(front)
            assert (text, answer.headers["x-kvist-worker"]) == ("".join(TOKENS), d.url)
        assert len(p.completions) == 3
        assert broken.completions
        assert not simulated.held


async def test_where_no_decode_worker_is_left_the_prefill_worker_does_all(worker, router, simulated) -> None:
    async with (
        worker(server_info=info("prefill"), answer=simulated.prefill) as p,
        worker(server_info=info("decode"), answer=drop) as broken,
        router(p.url, broken.url) as front,
    ):
        answer, text = await stream(front)
        assert (text, answer.headers["x-kvist-worker"]) == ("".join(TOKENS), p.url)
        assert await count(front, 'disaggregation_fallbacks_total{reason="decode_failed"}') == 1


async def test_a_handle_that_is_gone_makes_the_decode_worker_do_all(worker, router, simulated) -> None:
    async def forgetful(received: Any, writer: asyncio.StreamWriter) -> None:
        await simulated.prefill(received, writer)
        simulated.held.clear()

    async with (
        worker(server_info=info("prefill"), answer=forgetful) as p,
        worker(server_info=info("decode"), answer=simulated.decode) as d,
        router(p.url, d.url) as front,
    ):
        answer, text = await stream(front)
        assert (text, answer.headers["x-kvist-worker"]) == ("".join(TOKENS), d.url)
        assert [b"kv_transfer_params" in each.body for each in d.completions] == [True, False]
        assert await count(front, 'disaggregation_fallbacks_total{reason="transfer_failed"}') == 1
        assert (await front.workers())[d.url]["circuit"] == "closed"


async def test_after_the_first_byte_nothing_is_repeated(worker, router, simulated, http_bytes) -> None:
    async def break_off(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(simulated.events()[0]))
        await writer.drain()
        writer.transport.abort()

    async with (
        worker(server_info=info("prefill"), answer=simulated.prefill) as p,
        worker(server_info=info("decode"), answer=break_off) as broken,
        worker(server_info=info("both"), answer=simulated.decode) as other,
        router(p.url, broken.url, other.url) as front,
    ):
        answer = await front.complete(LONG, stream=True)
        assert answer.content.startswith(simulated.events()[0] + b'data: {"error"')
        assert not other.completions
        assert len(p.completions) == len(broken.completions) == 1
        assert total_load(front) == 0


@pytest.mark.parametrize("dialect", ["kvist", "vllm", "tensorrt_llm"])
@pytest.mark.parametrize("num_answers", [1, 2])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_client_that_leaves_takes_both_sides_along(
    worker, router, simulated, until, role: str, num_answers: int, dialect: str
) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    answers = {"prefill": simulated.prefill, "decode": simulated.decode} | {role: never}
    async with (
        worker(**of(dialect, "prefill"), answer=answers["prefill"]) as p,
        worker(**of(dialect, "decode"), answer=answers["decode"]) as d,
        router(prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,)) as front,
    ):
        silent = {"prefill": p, "decode": d}[role]
        asking = asyncio.create_task(front.complete(LONG, n=num_answers))
        await until(lambda: len(silent.completions) == total_load(front) == num_answers)
        asking.cancel()
        await until(lambda: total_load(front) == 0)
        status = await count(front, f'requests_total{{policy="kv",status="499",worker="{silent.url}"}}')
        assert status == num_answers


async def test_a_decode_worker_at_its_bound_is_left_out_while_another_has_room(
    worker, router, simulated, until
) -> None:
    is_free = asyncio.Event()

    async def decode(received: Any, writer: asyncio.StreamWriter) -> None:
        await is_free.wait()
        await simulated.decode(received, writer)

    async with (
        worker(server_info=info("prefill"), answer=simulated.prefill) as p,
        worker(server_info=info("decode"), answer=decode) as holder,
        worker(server_info=info("decode"), answer=decode) as other,
        router(p.url, holder.url, other.url, max_worker_requests=1) as front,
    ):
        held, others = list(range(1000, 9000)), list(range(300))
        front.hold(holder.url, held)
        asked = [asyncio.create_task(front.complete([*LONG, *others]))]
        await until(lambda: len(holder.completions) == 1)
        asked.append(asyncio.create_task(front.complete([*held, *others])))
        await until(lambda: len(other.completions) == 1)
        is_free.set()
        assert [(await each).status_code for each in asked] == [200] * 2


async def test_a_full_prefill_worker_is_waited_for_by_whom_it_spares_more(worker, router, simulated, until) -> None:
    is_free, may_decode, held = asyncio.Event(), asyncio.Event(), list(range(50_000))

    async def prefill(received: Any, writer: asyncio.StreamWriter) -> None:
        await is_free.wait()
        await simulated.prefill(received, writer)

    async def decode(received: Any, writer: asyncio.StreamWriter) -> None:
        await may_decode.wait()
        await simulated.decode(received, writer)

    async with (
        worker(server_info=info("prefill"), answer=prefill) as holder,
        worker(server_info=info("prefill"), answer=simulated.prefill) as other,
        worker(server_info=info("decode"), answer=decode) as d,
        router(holder.url, other.url, d.url, max_worker_requests=1, block_size=16) as front,
    ):
        admission = front.service._forwarder.admission
        front.hold(holder.url, held)
        asked = [asyncio.create_task(front.complete([*held, *LONG]))]
        await until(lambda: len(holder.completions) == 1)
        explained = await front.explain([*held, *SHORT])  # nobody knows yet how long its requests take
        assert (explained["queued"], explained["prefill"]["worker"]) == (False, other.url)
        front.service.fleet.get(holder.url).capacity.ends_a_second = 2.0
        explained = await front.explain([*held, *SHORT])
        assert (explained["queued"], explained["prefill"]["worker"]) == (True, holder.url)
        asked.append(asyncio.create_task(front.complete([*held, *SHORT])))
        await until(lambda: sum(admission.queued.values()) == 1)
        asked.append(asyncio.create_task(front.complete(LONG)))
        await until(lambda: len(d.completions) == 1)
        assert (len(holder.completions), len(other.completions)) == (1, 1)
        is_free.set()
        await until(lambda: len(d.completions) == 2)
        await front.explain(LONG)
        assert (len(holder.completions), sum(admission.queued.values())) == (1, 1)  # no decode worker has room
        may_decode.set()
        workers = [(await each).headers["x-kvist-prefill-worker"] for each in asked]
        assert workers == [holder.url, holder.url, other.url]
        assert not await count(front, 'local_prefills_total{reason="no_prefill_worker"}')


async def test_a_prefill_worker_that_asks_to_be_spared_is(worker, router, simulated, http_bytes) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"{}", status=503, extra="retry-after: 60\r\n"))

    async with (
        worker(server_info=info("prefill"), answer=refuse) as busy,
        worker(server_info=info("prefill"), answer=simulated.prefill) as idle,
        worker(server_info=info("decode"), answer=simulated.decode) as d,
        router(busy.url, idle.url, d.url, policy="round-robin") as front,
    ):
        for _ in range(6):
            assert (await front.complete(LONG)).status_code == 200
        assert (len(busy.completions), len(idle.completions)) == (1, 6)


async def test_clients_cannot_name_the_place_to_fetch_from(worker, router, simulated) -> None:
    async with worker(answer=simulated.decode) as one, router(one.url) as front:
        answer = await front.complete(LONG, kv_transfer_params={"do_remote_prefill": True, "remote_endpoint": "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
        assert not one.completions
        assert (await front.complete("what are kv_transfer_params?")).status_code == 200


@pytest.mark.parametrize("dialect", ["kvist", "vllm", "tensorrt_llm"])
@pytest.mark.parametrize("seed", range(2))
async def test_whatever_fails_no_token_is_lost_or_doubled(
    worker, router, simulated, http_bytes, seed: int, dialect: str
) -> None:
    """Answers are whole, or break off after a begin that is right."""
    random = Random(seed)

    def unreliable(answer: Any) -> Any:
        async def reply(received: Any, writer: asyncio.StreamWriter) -> None:
            match random.randrange(6):
                case 0:
                    writer.transport.abort()
                case 1:
                    writer.write(http_bytes.response(b"{}", status=random.choice([500, 502, 503])))
                case 2 if json.loads(received.body).get("stream"):
                    events = simulated.events()[: random.randrange(4)]
                    writer.write(http_bytes.event_stream_head + b"".join(map(http_bytes.chunk, events)))
                    await writer.drain()
                    writer.transport.abort()
                case _:
                    await answer(received, writer)

        return reply

    limits = {"breaker_failures": 1000, "policy": "round-robin", "max_attempts": 5}
    roles = ("prefill", "prefill", "decode", "decode", "both")
    answers = [unreliable(simulated.prefill if role == "prefill" else simulated.decode) for role in roles]
    workers = [worker(**of(dialect, role), answer=answer) for role, answer in zip(roles, answers, strict=True)]
    async with AsyncExitStack() as exits:
        urls = [(await exits.enter_async_context(each)).url for each in workers]
        by_role = {"prefill_worker_urls": tuple(urls[:2]), "decode_worker_urls": tuple(urls[2:4])}
        front = await exits.enter_async_context(router(*urls, **limits, **by_role))
        num_whole = [0, 0]
        for number in range(40):
            num_answers = 1 + number % 2 * 2
            answer = await front.complete(LONG, stream=True, n=num_answers)
            said = texts(answer.content)
            assert all("abcd".startswith(each) for each in said)
            if answer.status_code == 200 and b'data: {"error"' not in answer.content:
                assert answer.content.endswith(b"data: [DONE]\n\n")
                assert said == ["abcd"] * num_answers or (num_answers == 3 and said == ["abcd"])  # by one worker
                num_whole[number % 2] += 1
        assert min(num_whole) > 3
        assert total_load(front) == 0


def test_the_two_bodies_say_what_the_client_said() -> None:
    def sent(body: bytes) -> Any:
        ask = ParsedRequest("m", 2, fields=json.loads(body))
        fields, handoff = DIALECTS["kvist"].begin(ask, SIDE, SIDE, Random(0))
        assert handoff is None
        return json.loads(with_fields(body, fields))

    body = (
        b' {"prompt": [1, 2], "seed": 18446744073709551615, "stream": true, "stream_options": {"include_usage": true}}'
    )
    assert sent(body) == {
        "prompt": [1, 2],
        "seed": 2**64 - 1,
        "stream": True,
        "stream_options": None,
        "max_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    limited = sent(b'{"messages":[],"max_completion_tokens":9,"min_tokens":4}')
    assert (limited["max_tokens"], limited["max_completion_tokens"], limited["min_tokens"]) == (1, 1, 1)
    assert with_fields(body, {"seed": 1, "a": None}).startswith(b'{"prompt":[1, 2],"seed":1,"stream":true,')


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b"[]", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{"do_remote_prefill":false}}']
)
def test_an_answer_without_a_handle_gives_none(answer: bytes) -> None:
    assert DIALECTS["vllm"].read_handoff(ParsedRequest("m", 2), answer) is None


def test_what_is_left_to_compute_decides() -> None:
    def decided(num_tokens: int, num_blocks: int) -> LocalReason | None:
        candidate = Candidate(WorkerRank("w", 0), Load(), (num_blocks,))
        return why_local(decide("round-robin", Prompt(num_tokens, 16), [candidate], 0, Random(0)), 256)

    assert decided(256, 0) is LocalReason.SHORT
    assert decided(257, 0) is None
    assert decided(272, 1) is LocalReason.CACHED
    assert decided(400, 9) is LocalReason.CACHED
    assert decided(400, 8) is None


def test_requests_that_cannot_be_handed_over_are_recognised() -> None:
    def found(path: str, **fields: Any) -> LocalReason | None:
        return DIALECTS["kvist"].obstacle(ParsedRequest("m", 400, fields=fields, path=path))

    assert found(CHAT_PATH, n=1, logprobs=False) is None
    assert found("/v1/embeddings") is LocalReason.OTHER_ENDPOINT
    assert found(CHAT_PATH, logprobs=True) is LocalReason.LOGPROBS
    assert found(COMPLETION_PATH, logprobs=0) is LocalReason.LOGPROBS
    assert found(COMPLETION_PATH, best_of=3) is LocalReason.SEVERAL_SEQUENCES
    assert DIALECTS["kvist"].obstacle(ParsedRequest("m", 9, num_prompts=2)) is LocalReason.SEVERAL_SEQUENCES


def test_a_worker_has_one_role() -> None:
    with pytest.raises(InvalidValueError, match="once among those of a role"):
        RouterConfig(prefill_worker_urls=("http://a:1",), decode_worker_urls=("http://a:1",))
    named = RouterConfig(worker_urls=("http://a:1", "http://b:1"), prefill_worker_urls=("http://a:1",))
    assert named.every_worker_url == ("http://a:1", "http://b:1")
    assert named.role_of("http://a:1") is Role.PREFILL
    with pytest.raises(InvalidValueError, match="decode_worker_urls"):
        RouterConfig(decode_worker_urls=("a:1",))
