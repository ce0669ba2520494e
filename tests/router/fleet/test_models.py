"""Several models behind one router: each with its own tokeniser, block size and policy, by its name or an alias."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from word_models import WORDS, model_dir

from kvist.errors import InvalidValueError
from kvist.router.config import RouterConfig
from kvist.router.fleet import membership, models
from kvist.router.fleet.models import locate, read_files

TEXT = " ".join(WORDS[:80])


def named(*ids: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": each, "object": "model", **fields} for each in ids]


def tokens_from(first_token: int) -> list[int]:
    return list(range(first_token, first_token + 80))


async def ask(front: Any, model: str | None, prompt: object = TEXT, **fields: Any) -> Any:
    body = {"prompt": prompt, **fields} | ({} if model is None else {"model": model})
    return await front.client.post("/v1/completions", json=body)


async def until_read(front: Any, *ids: str) -> None:
    async def is_read() -> bool:
        page = (await front.client.get("/readiness")).json()["models"]
        return all(page[each]["problem"] is None for each in ids)

    await front.until(is_read)


async def test_which_engine_serves_a_model_is_known_by_their_lists(worker, router) -> None:
    async with (
        worker(models=named("a", owned_by="vllm")) as one,
        worker(models=named("b", owned_by="sglang")) as other,
        worker(models=named("b")) as unknown,
        router(one.url, other.url, unknown.url) as front,
    ):
        engine = front.service.keeper.models.engine
        assert [engine(model) for model in ("a", "b", "c", None)] == ["vllm", "sglang", None, "vllm"]


async def test_models_side_by_side_are_each_matched_by_their_own_tokens_and_blocks(
    worker, router, engine, tmp_path: Path
) -> None:
    """Nothing is configured: where the files are and how long blocks are, workers and their streams tell."""
    paths = {"a": model_dir(tmp_path / "a", 0), "b": model_dir(tmp_path / "b", 1000)}
    starts, sizes = {"a": 0, "b": 1000}, {"a": 16, "b": 32}
    workers = {name: [worker(models=named(name, root=paths[name])) for _ in range(2)] for name in paths}
    for pair in workers.values():
        for each in pair:
            await each.start()
            each.health_gate.set()
    urls = [each.url for pair in workers.values() for each in pair]
    engines = {each.url: engine(name, block_size=sizes[name]) for name, pair in workers.items() for each in pair}
    async with router(*urls, kv_event_sources={url: (engines[url].publisher.endpoint,) for url in urls}) as front:
        await until_read(front, "a", "b")
        for name, pair in workers.items():
            held = tokens_from(starts[name])
            engines[pair[1].url].store(held)

            async def is_known(name: str = name, url: str = pair[1].url, held: list[int] = held) -> bool:
                page = (await front.client.post("/route", json={"token_ids": [*held, 1], "model": name})).json()
                return {each["worker"]: each["overlap_blocks"]["gpu"] for each in page["candidates"]} == {
                    workers[name][0].url: 0,
                    url: 80 // sizes[name],
                }

            await front.until(is_known)
        for name, pair in workers.items():
            for _ in range(3):
                answer = await ask(front, name, TEXT + " w3")
                overlap = 80 // sizes[name] * sizes[name]
                assert answer.headers["x-kvist-worker"] == pair[1].url
                assert answer.headers["x-kvist-overlap-tokens"] == str(overlap)
    for pair in workers.values():
        for each in pair:
            await each.__aexit__()
    for each in engines.values():
        each.publisher.close()


async def test_a_tokeniser_is_read_once_and_requests_do_not_wait_for_it(worker, router, tmp_path: Path, monkeypatch):
    path, read, go_on = model_dir(tmp_path / "a", 0), list[str](), threading.Event()

    def read_late(path: str) -> models.ModelFiles:
        read.append(path)
        go_on.wait(60)
        return read_files(path)

    monkeypatch.setattr(models, "read_files", read_late)
    pair = [worker(models=named("a", root=path)) for _ in range(2)]
    async with pair[0], pair[1], router(*(each.url for each in pair)) as front:
        assert (await ask(front, "a")).status_code == 200
        assert (await front.client.get("/readiness")).json()["models"]["a"]["problem"] == "being read"
        go_on.set()
        await until_read(front, "a")
        assert read == [path]


async def test_a_request_names_a_model_that_is_served_where_there_are_several(worker, router) -> None:
    async with (
        worker(models=named("a")) as one,
        worker(models=named("b")) as other,
        router(one.url, other.url) as front,
    ):
        missing, unknown = await ask(front, None), await ask(front, "c")
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "model_missing")
        assert missing.json()["error"]["message"] == "model: missing, expected one of the models served: a, b"
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert [(await ask(front, name)).headers["x-kvist-worker"] for name in "ab"] == [one.url, other.url]


async def test_an_adapter_is_served_as_soon_as_a_worker_has_loaded_it(worker, router, monkeypatch) -> None:
    monkeypatch.setattr("kvist.router.forward._MODEL_WAIT_S", 60.0)
    async with (
        worker(models=named("a")) as one,
        worker(models=named("a")) as other,
        router(one.url, other.url, health_interval_s=1000.0) as front,
    ):
        other.models = [*named("a"), *named("tuned", parent="a")]
        for _ in range(2):
            answer = await ask(front, "tuned")
            assert (answer.status_code, answer.headers["x-kvist-worker"]) == (200, other.url)


async def test_a_worker_that_is_being_checked_is_checked_again_for_an_unknown_model(
    worker, router, until, monkeypatch
) -> None:
    async with worker(models=named("a")) as one, router(one.url, health_interval_s=1000.0) as front:
        has_read, go_on, probe = asyncio.Event(), asyncio.Event(), membership.probe

        async def probe_slowly(*args: Any) -> Any:
            identity = await probe(*args)
            has_read.set()
            await go_on.wait()
            return identity

        monkeypatch.setattr(membership, "probe", probe_slowly)
        checks = front.service.keeper.membership
        checks.check_all()
        await has_read.wait()
        one.models = [*named("a"), *named("tuned", parent="a")]
        checks._checked_at_s -= 10.0
        checks.check_all()
        go_on.set()
        await until(lambda: front.service.fleet.is_known("tuned"))


async def test_workers_are_not_asked_for_each_request_that_names_what_nobody_serves(worker, router) -> None:
    async with worker(models=named("a")) as one, router(one.url, health_interval_s=1000.0) as front:
        membership, now_s = front.service.keeper.membership, 5000.0
        membership._now_s = lambda: now_s
        checks, seen = 0, membership._check_now
        for now_s in (5000.0, 5000.2, 5000.9, 5001.1, 5001.2, 5003.0):  # noqa: B007 - read by the lambda
            membership.check_all()
            checks += membership._check_now is not seen
            seen = membership._check_now
        assert checks == 3
        refused = await ask(front, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert not one.completions


async def test_a_model_and_its_adapters_are_one(worker, router, tmp_path: Path) -> None:
    path = model_dir(tmp_path / "base", 0)
    served = [*named("tuned", parent="base", root="/adapters/tuned"), *named("base", root=path)]
    async with worker(models=served) as one, router(one.url) as front:
        assert (await ask(front, None)).status_code == 200
        await until_read(front, "base", "tuned")
        page = (await front.client.get("/readiness")).json()["models"]
        assert (page["base"]["adapter_of"], page["tuned"]["adapter_of"]) == (None, "base")
        assert (await front.metrics())['kvist_router_request_seconds_count{model="base"}'] == 1


async def test_readiness_says_what_is_served_and_workers_why_one_gets_nothing(worker, router, tmp_path: Path) -> None:
    path = model_dir(tmp_path / "a", 0)
    one, other = worker(models=named("a", root=path)), worker(models=named("b", root="/nowhere"), health_status=503)
    async with one, other, router(one.url, other.url, ready=False) as front:
        await front.until_state(other.url, "unhealthy")
        await until_read(front, "a")
        page = (await front.client.get("/readiness")).json()
        assert page["models"] == {
            "a": {"workers": 1, "healthy": 1, "adapter_of": None, "tokenizer": path, "problem": None}
        }
        told = await front.workers()
        assert told[one.url]["unavailable_reason"] is None
        assert told[other.url]["unavailable_reason"].startswith("unhealthy: ")
        other.health_status = 200
        await front.until_state(other.url, "healthy")
        page = (await front.client.get("/readiness")).json()["models"]["b"]
        assert (page["healthy"], page["tokenizer"]) == (1, None)
        assert (
            page["problem"]
            == "no tokeniser: no --model-path, and no worker reports a directory that is on this machine"
        )


async def test_an_alias_stands_for_its_model(worker, router) -> None:
    async with (
        worker(models=named("a")) as one,
        worker(models=named("b")) as other,
        router(one.url, other.url, aliases={"gpt": {"b": 1}}) as front,
    ):
        answer = await ask(front, "gpt", [5, 6, 7])
        assert answer.headers["x-kvist-worker"] == other.url
        assert json.loads(other.completions[-1].body) == {"prompt": [5, 6, 7], "model": "b"}
        listed = (await front.client.get("/v1/models")).json()["data"]
        assert [(each["id"], each.get("root")) for each in listed] == [("a", None), ("b", None), ("gpt", "b")]
        assert (await front.client.get("/v1/models/gpt")).json()["root"] == "b"


async def test_a_form_may_name_an_alias_and_of_a_split_each_model_gets_its_share_of_forms(worker, router) -> None:
    path, shares = "/v1/audio/transcriptions", {"a": 1.0, "b": 1.0}
    async with (
        worker(models=named("a")) as one,
        worker(models=named("b")) as other,
        router(one.url, other.url, aliases={"speech": {"b": 1}, "either": shares}) as front,
    ):
        sound = bytes(range(256)) * 8
        answer = await front.client.post(path, data={"model": "speech", "language": "sv"}, files={"file": sound})
        assert answer.headers["x-kvist-worker"] == other.url
        (asked,) = other.completions
        assert b'name="model"\r\n\r\nb\r\n--' in asked.body
        assert sound in asked.body
        assert b"sv" in asked.body
        assert b"speech" not in asked.body
        for idx in range(16):
            data = {"model": "either", "prompt": f"{idx}"}
            assert (await front.client.post(path, data=data, files={"file": sound})).status_code == 200
        assert min(len(each.completions) for each in (one, other)) > 2


async def test_of_a_split_each_model_gets_its_share_and_a_conversation_stays(worker, router) -> None:
    """By the first turn of the user, so that nobody needs to say who they are."""
    async with (
        worker(models=named("old")) as one,
        worker(models=named("new")) as other,
        router(one.url, other.url, aliases={"chat": {"old": 3, "new": 1}}) as front,
    ):

        async def chat(*texts: str) -> str:
            messages = [{"role": "system", "content": "Be terse."}]
            messages += [{"role": "user", "content": text} for text in texts]
            answer = await front.client.post("/v1/chat/completions", json={"model": "chat", "messages": messages})
            return answer.headers["x-kvist-worker"]

        first = {number: await chat(f"hello {number}") for number in range(200)}
        later = {number: await chat(f"hello {number}", "go on", "and on") for number in first}
        assert first == later
        assert 25 < Counter(first.values())[other.url] < 75  # of 200, 50 are meant: four standard deviations
        by_user = [(await ask(front, "chat", [number], user="u")).headers["x-kvist-worker"] for number in range(20)]
        assert len({*by_user}) == 1


async def test_each_model_may_have_a_policy_of_its_own(worker, router) -> None:
    settings = {"b": {"policy": "round-robin"}}
    async with (
        worker(models=named("a")) as one,
        worker(models=named("b")) as other,
        router(one.url, other.url, models=settings) as front,
    ):
        pages = [
            (await front.client.post("/route", json={"token_ids": [1], "model": name})).json() for name in ("a", "b")
        ]
        assert [page["policy"] for page in pages] == ["kv", "round-robin"]


def test_what_a_worker_says_of_its_files_is_believed_where_they_are(tmp_path: Path, monkeypatch) -> None:
    path = model_dir(tmp_path / "here", 0)
    assert locate(path) == path
    hub = tmp_path / "hub" / "models--org--name"
    model_dir(hub / "snapshots" / "abc", 0)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert locate("org/name") == str(hub / "snapshots" / "abc")
    for claim in ("org/other", "plain", "../..", "/etc", "", "a/b/c", "file:///etc"):
        assert locate(claim) is None


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"models": {"a": {"policy": "kv"}}, "policy": "round-robin"}, "models.a.policy"),
        ({"models": {"a": {"poliy": "kv"}}}, "models"),
        ({"models": {"a": {"policy": "no"}}}, "models"),
        ({"aliases": {"a": {}}}, "aliases.a"),
        ({"aliases": {"a": {"b": 1}, "b": {"c": 1}}}, "aliases.a"),
        ({"aliases": {"a": {"b": 0}}}, "aliases"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{field}"):
        RouterConfig(**values)
