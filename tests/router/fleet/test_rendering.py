"""A router knows which chats a worker renders otherwise, and matches those by no more than is the same."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_rendering
from _engine_files import MISSING, engine_files, versions

from kvist.engine import bundled_model_path
from kvist.openai.chat_template import ChatTemplate
from kvist.openai.errors import RequestError
from kvist.openai.requests import read_fields
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.fleet import rendering
from kvist.router.fleet.rendering import Kind

AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer

MODEL = str(bundled_model_path())
SOURCE = (bundled_model_path() / "chat_template.jinja").read_text()
LONG = "a prompt that is long enough for more than one block, which takes quite a few words of it " * 3


def template(source: str = SOURCE) -> ChatTokenizer:
    """The bundled model's tokeniser, with another template."""
    loaded = ChatTokenizer.load(bundled_model_path())
    return ChatTokenizer(loaded._tokenizer, ChatTemplate(source, {"bos_token": "<bos>"}))


@pytest.fixture
def tokenizing(http_bytes: Any) -> Callable[[ChatTokenizer], Any]:
    """Make the answers of a worker that tokenises so, and completes whatever else it is asked."""

    def make(tokenizer: ChatTokenizer, engine: str | None = None) -> Any:
        async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
            if received.target != "/tokenize":
                writer.write(http_bytes.response(http_bytes.completion()))
                return
            probe = read_fields(received.body)
            try:
                tokens = rendering._own_tokens(tokenizer, engine, {k: v for k, v in probe.items() if k != "model"})
            except RequestError:
                tokens = None
            told = {"tokens": tokens, "count": len(tokens or ()), "max_model_len": 10, "token_strs": None}
            writer.write(http_bytes.response(json.dumps(told).encode(), status=200 if tokens is not None else 400))

        return answer

    return make


async def until_rendering(front: Any, url: str, state: str) -> dict[str, Any]:
    """Wait until the worker's verdict is this one; return what is shown of it."""
    found: dict[str, Any] = {}

    async def is_so() -> bool:
        found.update((await front.workers())[url]["rendering"] or {"state": None, "reason": None})
        return found["state"] == state and found["reason"] != "not asked yet"

    await front.until(is_so)
    return found


async def test_a_worker_that_makes_the_same_tokens_is_said_to(worker, router, tokenizing) -> None:
    async with (
        worker(answer=tokenizing(template())) as one,
        router(one.url, block_size=16, model_path=MODEL, worker_api_key="secret") as front,
    ):
        shown = await until_rendering(front, one.url, "same")
        assert shown == {"state": "same", "reason": None, "differences": {}}
        asked = [received for received in one.received if received.target == "/tokenize"]
        assert len(asked) == len(Kind)
        assert {received.headers["authorization"] for received in asked} == {"Bearer secret"}
        assert {json.loads(received.body)["model"] for received in asked} == {"m"}
        page = (await front.client.get("/readiness")).json()["rendering"]
        assert page == {"same": 1, "differs": 0, "unknown": 0, "problems": []}
        metrics = await front.metrics()
        assert metrics[f'kvist_router_worker_rendering{{state="same",worker="{one.url}"}}'] == 1
        assert metrics[f'kvist_router_worker_rendering{{state="differs",worker="{one.url}"}}'] == 0
        await front.client.delete("/workers", params={"url": one.url})
        await front.until_state(one.url, "gone")
        assert not [name for name in await front.metrics() if one.url in name]


async def test_a_worker_is_asked_again_once_another_engines_way_of_reading_counts(worker, router, tokenizing) -> None:
    sglang, vllm = ([{"id": "m", "owned_by": engine}] for engine in ("sglang", "vllm"))
    async with (
        worker(answer=tokenizing(template(), "sglang"), models=sglang) as one,
        worker(answer=tokenizing(template()), models=vllm) as other,
        router(one.url, block_size=16, model_path=MODEL) as front,
    ):
        await until_rendering(front, one.url, "same")
        await front.client.post("/workers", json={"url": other.url})
        await until_rendering(front, other.url, "same")
        shown = await until_rendering(front, one.url, "differs")
        assert {"developer", "text in parts"} <= set(shown["differences"])


async def test_only_chats_that_differ_are_matched_by_less(worker, router, engine, tokenizing) -> None:
    mark = "('!' if message['role'] == 'tool' else '') + '<end_of_turn>"
    other = template(SOURCE.replace("'<end_of_turn>", mark))
    with engine("a") as one_cache, engine("b") as two_cache:
        async with (
            worker(answer=tokenizing(other), server_info=one_cache.server_info) as one,
            worker(answer=tokenizing(template()), server_info=two_cache.server_info) as two,
            router(one.url, two.url, model_path=MODEL) as front,
        ):
            shown = await until_rendering(front, one.url, "differs")
            await until_rendering(front, two.url, "same")
            assert set(shown["differences"]) == {"tool results"}
            first = shown["differences"]["tool results"]
            assert first["router"]["tokens"] != first["worker"]["tokens"]
            assert "!" in first["worker"]["text"]
            assert shown["reason"].startswith(f"tool results: token {first['token']}: ")
            plain = [{"role": "user", "content": LONG}]
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            called = [*plain, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": LONG}]
            for messages in (plain, called):
                tokens = await front.service._forwarder.reader.read(None, json.dumps({"messages": messages}).encode())
                for cache in (one_cache, two_cache):
                    cache.store(list(tokens.token_ids))

            async def overlaps(messages: list[Any]) -> dict[str, int]:
                decision = (await front.client.post("/route", json={"messages": messages, "model": "m"})).json()
                return {each["worker"]: each["overlap_blocks"]["gpu"] for each in decision["candidates"]}

            async def are_known() -> bool:
                of_plain = await overlaps(plain)
                return (await overlaps(called))[two.url] > of_plain[two.url] == of_plain[one.url] > 3

            await front.until(are_known)
            assert (await overlaps(called))[one.url] <= first["token"] // 16
            page = (await front.client.get("/readiness")).json()["rendering"]
            assert page["problems"] == [{"worker": one.url, "state": "differs", "reason": shown["reason"]}]


async def test_a_worker_that_is_restarted_is_asked_again(worker, router, tokenizing) -> None:
    async with (
        worker(answer=tokenizing(template())) as one,
        router(one.url, block_size=16, model_path=MODEL, health_failures=1) as front,
    ):
        await until_rendering(front, one.url, "same")
        one.kill()
        await front.until_state(one.url, "unhealthy")
        one.answer = tokenizing(template("{{ messages }}"))
        await one.start()
        shown = await until_rendering(front, one.url, "differs")
        assert set(shown["differences"]) == set(Kind) - {Kind.PROMPT}
        await front.until_state(one.url, "healthy")  # or it is unhealthy still, and nobody sees that it is gone
        one.kill()
        await front.until_state(one.url, "unhealthy")
        one.answer = tokenizing(template())
        await one.start()
        await until_rendering(front, one.url, "same")
        assert not front.service.fleet.renderings.differing


async def test_what_both_refuse_is_no_difference(worker, router, tokenizing, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bundled_model_path() / name).read_bytes())
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text(refusing)
    async with worker(answer=tokenizing(ChatTokenizer.load(tmp_path))) as one:
        async with router(one.url, block_size=16, model_path=str(tmp_path)) as front:
            await until_rendering(front, one.url, "same")
        one.answer = tokenizing(template(refusing.replace("no", "never") + "x"))
        async with router(one.url, block_size=16, model_path=str(tmp_path)) as front:
            assert "system" not in (await until_rendering(front, one.url, "differs"))["differences"]


async def _hang(_writer: asyncio.StreamWriter, _http: Any) -> None:
    await asyncio.Event().wait()


async def _close(writer: asyncio.StreamWriter, _http: Any) -> None:
    writer.transport.abort()


def _say(body: bytes, status: int = 200) -> Any:
    async def say(writer: asyncio.StreamWriter, http: Any) -> None:
        writer.write(http.response(body, status=status))

    return say


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_hang, "no answer to POST /tokenize within"),
        (_close, "closed"),
        (_say(b'{"detail": "Not Found"}', 404), "answered 404"),
        (_say(b"oops", 500), "answered 500"),
        (_say(b"not json"), "malformed"),
        (_say(b'{"tokens": []}'), "count"),
        (_say(b'{"tokens": [1, -1], "count": 2}'), "$.tokens[1]"),
        (_say(b'{"tokens": [1, 4294967296], "count": 2}'), "$.tokens[1]"),
        (_say(b'{"tokens": [1, 2], "count": 3}'), "2 tokens, and count 3"),
        (_say(b'{"tokens": [' + b"1," * 5_000_000 + b"1]}"), "more than 1048576 bytes"),
        (_say(b"{}", 400), "refuses to tokenise: plain, system"),
        (_say(b'{"tokens": [], "count": 0}'), "refuses to tokenise: plain, system"),
    ],
    ids=[
        *("hangs", "closes", "404", "500", "garbage", "no count", "negative", "too large", "miscounted", "10 MB"),
        *("400", "none"),
    ],
)
async def test_a_worker_that_cannot_tokenise_is_unknown_and_served(
    worker, router, http_bytes, fault, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendering, "TIMEOUT_S", 0.05 if fault is _hang else 60.0)
    monkeypatch.setattr(rendering, "RECHECK_S", 0.0)
    caplog.set_level(logging.INFO, "kvist.router.fleet.rendering")

    async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
        if received.target == "/tokenize":
            await fault(writer, http_bytes)
        else:
            writer.write(http_bytes.response(http_bytes.completion()))

    async with worker(answer=answer) as one, router(one.url, block_size=16, model_path=MODEL) as front:
        shown = await until_rendering(front, one.url, "unknown")
        assert reason in shown["reason"]
        assert shown["differences"] == {}
        num_asked = len(one.received)

        async def is_asked_again() -> bool:
            return sum(each.target == "/tokenize" for each in one.received[num_asked:]) > 1

        await front.until(is_asked_again)
        assert (await front.complete("hello")).status_code == 200
        assert (await front.workers())[one.url]["state"] == "healthy"
    assert caplog.text.count("worker renders chats: unknown") == 1


async def test_nobody_waits_for_the_answer(worker, router, http_bytes) -> None:
    async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
        if received.target == "/tokenize":
            await asyncio.Event().wait()
        writer.write(http_bytes.response(http_bytes.completion()))

    async with worker(answer=answer) as one, router(one.url, block_size=16, model_path=MODEL) as front:
        assert (await front.complete("hello")).status_code == 200
        assert (await front.workers())[one.url]["rendering"]["reason"] == "not asked yet"
        assert (await front.client.delete("/workers", params={"url": one.url})).status_code == 202
        await front.until_state(one.url, "gone")


@pytest.mark.parametrize("values", [{}, {"policy": "round-robin", "model_path": MODEL}])
async def test_a_router_that_matches_no_text_asks_nobody(worker, router, values: dict[str, Any]) -> None:
    async with worker() as one, router(one.url, block_size=16, **values) as front:
        num_checks = len(one.received)
        await front.until(lambda: asyncio.sleep(0, len(one.received) > num_checks + 6))
        assert not [received for received in one.received if received.target == "/tokenize"]
        assert (await front.workers())[one.url]["rendering"] is None
        assert "rendering" not in (await front.client.get("/readiness")).json()


@pytest.mark.skipif(not versions(), reason=MISSING)
async def test_sglangs_own_tokenize_takes_every_probe_and_what_it_refuses_is_no_verdict(
    worker, router, http_bytes, monkeypatch
) -> None:
    name = "sglang.srt.entrypoints.openai.protocol"
    with engine_files("sglang", (name,), {"torch"}, {}):
        protocol = importlib.import_module(name)

    async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
        try:
            asked = protocol.TokenizeRequest.model_validate_json(received.body)
            asked = asked if asked.messages is None else asked.to_chat_completion_request()
        except ValueError:  # SGLang answers 400 for it
            writer.write(http_bytes.response(b"{}", status=400))
            return
        tokens = rendering._own_tokens(template(), "sglang", asked.model_dump(exclude_none=True, exclude_unset=True))
        told = protocol.TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=-1)
        writer.write(http_bytes.response(told.model_dump_json().encode()))

    async with worker(answer=answer, models=[{"id": "m", "owned_by": "sglang"}]) as one:
        async with router(one.url, block_size=16, model_path=MODEL) as front:
            await until_rendering(front, one.url, "same")
        refused = {kind: {"messages": [{"role": "nobody", "content": "Hi"}]} for kind in (Kind.PLAIN, Kind.TURNS)}
        monkeypatch.setattr(rendering, "_make_probes", lambda _: refused)
        async with router(one.url, block_size=16, model_path=MODEL) as front:
            shown = await until_rendering(front, one.url, "unknown")
            assert shown["reason"] == "the worker refuses to tokenise: plain, several turns"


SHOWS_ALL = """\
{{ tools | tojson }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.reasoning }}\
{{ message.reasoning_content }}{{ (message.tool_calls or []) | tojson }}{{ message.tool_call_id }}{% endfor %}"""


@pytest.mark.skipif(not versions(), reason=MISSING)
@pytest.mark.parametrize("source", [SOURCE, SHOWS_ALL], ids=["its own", "shows all"])
def test_vllms_own_tokenize_takes_every_probe_and_makes_the_same_of_it(source: str) -> None:
    oracle = AutoTokenizer.from_pretrained(MODEL)
    oracle.chat_template, ours = source, template(source)
    for kind, probe in rendering._make_probes(ours.added_tokens).items():
        text = vllm_rendering.text_of_tokenize(json.loads(json.dumps(probe | {"model": "m"})), oracle)
        expected = oracle(text, add_special_tokens=kind is Kind.PROMPT).input_ids
        assert rendering._own_tokens(ours, None, probe) == expected, kind
