"""The live page as clients reach it: who may have what, and that what is new adds up to all there is."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

import kvist.router
from kvist.engine import bundled_model_path
from kvist.router.config import RouterConfig
from kvist.router.doors import journal, live
from kvist.router.doors.journal import BURST, JournalEntry
from kvist.router.doors.prefixes import MAX_LEAVES, PrefixTree
from kvist.router.prompts import OneModel
from kvist.router.regret import Regret

PAGE = Path(kvist.router.__file__).parent / "page"
DOCS = Path(__file__).parents[3] / "docs"
TOKENS = list(range(1000, 1160))
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is as of now."""
    monkeypatch.setattr(live, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(live, "BASE_REST", 0)
    monkeypatch.setattr(live, "VIEW_REST", 0)


async def state(client: httpx.AsyncClient, view: str = "fleet", since: int = 0) -> dict[str, Any]:
    answer = await client.get("/ui/state", params={"view": view, "since": since})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(client: httpx.AsyncClient, **options: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    async with client.stream("GET", "/ui/events", **options) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        rest = ""
        async for piece in answer.aiter_text():
            *whole, rest = (rest + piece).split("\n\n")
            for event in whole:
                name, data = event.split("\n")
                yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_the_page_is_files_that_may_load_nothing_else(worker, router) -> None:
    async with worker() as one, router(one.url, policy="round-robin", admin_key="admin", ready=False) as front:
        for path in ("/ui", "/ui/", *(f"/ui/{file.name}" for file in PAGE.iterdir() if file.suffix in (".js", ".css"))):
            answer = await front.client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await front.client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await front.client.get("/ui/../ui/nothing.js")).status_code == 404
        assert (await front.client.post("/ui")).status_code == 405
    for file in PAGE.iterdir():
        text = re.sub(r"/\*!.*?\*/", "", file.read_text()).replace("http://www.w3.org/2000/svg", "")
        if file.suffix != ".LICENSE":
            assert not re.search(r"https?://(?!\S*\$/)\w|innerHTML *=(?!=)|insertAdjacent|\beval\(", text), file.name
    assert not re.search(r"<script(?! src)|<style|\son\w+=|style=", (PAGE / "index.html").read_text())


async def test_what_it_shows_is_for_administrators(worker, router) -> None:
    async with (
        worker() as one,
        router(one.url, policy="round-robin", admin_key="admin", ready=False, api_key="client") as front,
    ):
        for path in ("/ui/state", "/ui/events"):
            for headers in ({}, {"authorization": "Bearer client"}):
                assert (await front.client.get(path, headers=headers)).status_code == 401
        assert (await front.client.get("/ui/state", headers=ADMIN)).json()["is_whole"]
        for query in ("view=all", "since=-1", "since=x"):
            assert (await front.client.get(f"/ui/state?{query}", headers=ADMIN)).status_code == 400


async def test_a_stream_ends_with_its_key_and_with_the_router(worker, router) -> None:
    async with worker() as one, router(one.url, policy="round-robin", admin_key="admin", ready=False) as front:
        stream = events(front.client, headers=ADMIN)
        assert (await anext(stream))[1]["is_whole"]
        front.service.reload(replace(front.service._config, admin_key="another"))
        assert [name async for name, _ in stream] in ([], ["state"])
    async with worker() as one, router(one.url, policy="round-robin", shutdown_timeout_s=3600.0) as front:
        stream = events(front.client)
        await anext(stream)
        async with asyncio.timeout(180):  # less than what requests have to end in
            await front.service.__aexit__(None, None, None)
            assert len([each async for each in stream]) <= 2


@pytest.mark.parametrize("seed", range(3))
async def test_what_is_new_adds_up_to_all_there_is(worker, router, seed: int) -> None:
    random = Random(seed)
    async with worker() as one, worker() as two, router(one.url, policy="kv", health_failures=1) as front:
        workers: dict[str, Any] = {}
        requests: list[dict[str, Any]] = []
        known: dict[str, Any] = {}
        since = 0
        for _ in range(12):
            match random.choice(("ask", "add", "remove", "fail", "mend", "hold", "nothing")):
                case "ask":
                    await front.complete(TOKENS[: random.randrange(1, 160)])
                case "add":
                    await front.client.post("/workers", json={"url": two.url})
                case "remove":
                    await front.client.delete("/workers", params={"url": two.url})
                case "fail":
                    one.health_status = 500
                case "mend":
                    one.health_status = 200
                case "hold":
                    front.hold(one.url, TOKENS[: 16 * random.randrange(1, 10)])
            await asyncio.sleep(0.06)  # for a health check
            told = (front.service.keeper._live.state(f"view=requests&since={number}") for number in (since, 0))
            new, everything = map(json.loads, told)  # of one moment: a check may change workers at any other
            assert new["is_whole"] is (since == 0) or not new["workers"] or new["is_whole"]
            if new["is_whole"]:
                workers, requests = {}, []
            since, known = new["number"], new.get("fleet", known)
            workers |= {each["url"]: each for each in new["workers"]}
            requests += new["requests"]
            assert requests == everything["requests"]
            assert workers.keys() == {each["url"] for each in everything["workers"]}

        async def is_so_elsewhere() -> bool:
            told = (await state(front.client))["fleet"]["ready"]
            return told == (await front.client.get("/readiness")).json()["ready"]

        await front.until(is_so_elsewhere)


async def test_a_router_started_anew_tells_all(worker, router) -> None:
    async with worker() as one:
        async with router(one.url, policy="round-robin") as front:
            number = (await state(front.client))["number"]
            assert not (await state(front.client, since=number))["is_whole"]
        async with router(one.url, policy="round-robin") as front:
            assert (await state(front.client, since=number))["is_whole"]


async def test_a_request_has_the_terms_of_its_decision(worker, router) -> None:
    async with worker(cached_tokens=96) as one, worker() as two, router(one.url, two.url) as front:
        front.hold(one.url, TOKENS[:96])
        explained = await front.explain(TOKENS)
        answer = await front.complete(TOKENS)
        (told,) = (await state(front.client, "requests"))["requests"]
        assert told["id"] == answer.headers["x-request-id"]
        assert (told["status"], told["prompt_tokens"], told["cached_tokens"]) == (200, 160, 96)
        assert told["decision"]["worker"] == explained["worker"] == one.url
        assert 0 <= told["sent_s"] <= told["first_byte_s"] <= told["total_s"]
        for shown, route in zip(told["decision"]["candidates"], explained["candidates"], strict=True):
            assert shown["seconds"] == pytest.approx(route["seconds"])
            assert {name: route[name] for name in shown if name != "seconds"} == {
                name: value for name, value in shown.items() if name != "seconds"
            }
        (row,) = [each for each in (await state(front.client))["workers"] if each["url"] == one.url]
        assert (row["hits"]["routed_tokens"], row["hits"]["reported_tokens"], row["ended_requests"]) == (96, 96, 1)
        by_minute = (await state(front.client, "regret"))["regret"]["by_minute"]
        assert [each["routed_tokens"] for each in by_minute] == [96]


async def test_a_refused_request_is_shown_with_its_error(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        assert (await front.complete(TOKENS, model="unknown")).status_code == 404
        (told,) = (await state(front.client, "requests"))["requests"]
        assert (told["status"], "decision" in told) == (404, False)
        assert "unknown" in told["error"]


async def test_requests_that_come_fast_are_counted_alone(worker, router, monkeypatch) -> None:
    async with worker() as one, router(one.url, policy="round-robin") as front:
        monkeypatch.setattr(journal, "RATE", 0.0)  # however slow the machine is, none is allowed meanwhile
        for _ in range(2 * int(BURST)):
            await front.complete("hello")
        assert len((await state(front.client, "requests"))["requests"]) == BURST
        monkeypatch.setattr(journal, "RATE", 1e9)
        await front.complete("hello")
        told = await state(front.client, "requests")
        assert (len(told["requests"]), told["fleet"]["requests_skipped"]) == (BURST + 1, BURST)


async def test_prompts_are_shown_to_who_asked_for_that_alone(worker, router) -> None:
    model = str(bundled_model_path())
    prompt = "Whoever reads these words has been shown them. " * 8
    for shows in (False, True):
        async with worker() as one, router(one.url, policy="kv", model_path=model, show_prompts=shows) as front:
            await front.complete(prompt)
            text = json.dumps([await state(front.client, view) for view in live.VIEWS])
            assert ("these words" in text) is shows
            (node,) = (await state(front.client, "prefixes"))["prefixes"]
            assert ("Whoever reads" in (node["text"] or "")) is shows


async def test_who_holds_a_prefix_is_told(worker, router) -> None:
    async with worker() as one, worker() as two, router(one.url, two.url, expected_cache_tokens=0) as front:
        front.hold(one.url, TOKENS[:64])
        for tokens in (TOKENS, TOKENS[:64] + TOKENS[100:148], TOKENS):
            await front.complete(tokens)
        first, *rest = (await state(front.client, "prefixes"))["prefixes"]
        assert (first["from_tokens"], first["to_tokens"], first["uses"], first["hits"]) == (0, 64, 3, 3)
        assert (first["tiers"], first["num_holders"], first["holders"]) == ({"gpu": 1}, 1, [f"{one.url} 0"])
        assert [(each["parent"], each["to_tokens"], each["uses"], each["hits"]) for each in rest] == [
            (0, 144, 2, 0),
            (0, 96, 1, 0),
        ]


async def test_fronts_share_what_is_shown(worker, fronts_of) -> None:
    async with worker() as one:
        config = RouterConfig(worker_urls=(one.url,), port=0, policy="kv", health_interval_s=0.05)
        async with fronts_of(config, 2) as (first, second):
            clients = [httpx.AsyncClient(base_url=front.url, timeout=60, trust_env=False) for front in (first, second)]
            await clients[0].post("/v1/completions", json={"model": "m", "prompt": TOKENS})

            async def is_shown() -> bool:
                return len((await state(clients[1], "requests"))["requests"]) == 1

            async with asyncio.timeout(180):
                while not await is_shown():  # noqa: ASYNC110 - it is behind a socket
                    await asyncio.sleep(0.02)
            assert (await state(clients[1], "prefixes"))["prefixes"][0]["to_tokens"] == 144
            stream = events(clients[1])
            assert [each["url"] for each in (await anext(stream))[1]["workers"]] == [one.url]
            await stream.aclose()
            for client in clients:
                await client.aclose()


async def test_what_is_wrong_is_told_until_it_is_mended(worker, router) -> None:
    fast = {"health_failures": 1, "policy": "least-loaded"}
    async with worker() as one, router(one.url, **fast) as front:

        async def problems(*, is_over: bool) -> dict[str, Any]:
            told = (await state(front.client, "health"))["fleet"]["problems"]
            return {each["what"]: each for each in told if (each["until"] is not None) is is_over}

        before = await problems(is_over=False)
        assert not any(each["is_bad"] for each in before.values())
        one.health_status = 500
        await front.until_state(one.url, "unhealthy")
        found = await problems(is_over=False)
        assert {each["where"] for each in found.values()} == {one.url, "router"}
        assert found["is unhealthy"]["why"]
        assert all((DOCS.parent / each["page"]).is_file() for each in found.values())
        one.health_status = 200
        await front.until_state(one.url, "healthy")
        assert await problems(is_over=False) == before
        over = await problems(is_over=True)
        assert over.keys() == found.keys()
        assert all(each["since"] <= each["until"] for each in over.values())


def test_every_page_that_problems_name_is_there() -> None:
    source = (Path(live.__file__).parent / "problems.py").read_text()
    pages = set(re.findall(r'yield .*?, "(\w+)"(?:, is_bad.*)?\)$', source, re.M))
    assert len(pages) > 4
    assert all((DOCS / f"{page}.md").is_file() for page in pages), pages


async def test_a_prefix_that_costs_much_is_found_by_the_name_that_regret_has_for_it(
    worker, router, monkeypatch
) -> None:
    tokens = list(range(5000, 5000 + 640 * 16 + 1))
    async with worker() as one, router(one.url, block_size=16, expected_cache_tokens=0) as front:
        known, routing = front.service.keeper, front.service._forwarder.routing
        known._capacity_blocks, known._sized_at_s = 10**6, math.inf  # one cache as large had held the prompt
        outcome, lost = (
            routing.outcome,
            {"routed_tokens": 0, "held_or_in_flight_tokens": 0},
        )  # as if it had been longer ago
        monkeypatch.setattr(routing, "outcome", lambda *of: msgspec.structs.replace(outcome(*of), **lost))
        for _ in range(2):
            await front.complete(tokens, cache_salt="salt")
        (costly,) = (await front.client.get("/regret")).json()["costliest_prefixes"]
        (node,) = (await front.client.get("/ui/state?view=prefixes")).json()["prefixes"]
        assert node["costly"] == [costly["prefix"]]
        assert node["prefix"] != costly["prefix"]  # which ends with a block of the sample, before the prompt does
        random = Random(3)
        for _ in range(8):  # where prompts part, who goes on with it keeps the name
            await front.complete(tokens[: random.randrange(17, len(tokens))], cache_salt="salt")

        async def is_kept() -> bool:
            nodes = (await front.client.get("/ui/state?view=prefixes")).json()["prefixes"]
            assert [name for each in nodes for name in each["costly"]] == [costly["prefix"]]
            (found,) = [each for each in nodes if each["costly"]]
            assert found["from_tokens"] < costly["length_tokens"] <= found["to_tokens"]
            return len(nodes) > 1

        await front.until(is_kept)


def test_the_tree_is_what_prompts_add_up_to() -> None:
    """Against a count of every prefix of every prompt: a node ends where some prompt goes another way, or ends."""
    random = Random(7)
    tree = PrefixTree(OneModel(None), None, Regret())
    prompts: list[tuple[tuple[int, ...], int]] = []
    for _ in range(300):
        start = random.choice(prompts)[0][: random.randrange(1, 30)] if prompts and random.random() < 0.8 else ()
        prompt = (*start, *(random.getrandbits(64) for _ in range(random.randrange(1, 12))))
        num_held = random.randrange(len(prompt) + 1)
        prompts.append((prompt, num_held))
        hashes = np.array(prompt, np.uint64).tobytes()
        tree.add(JournalEntry(b"", model="m", block_size=16, num_held=num_held, hashes=hashes), 0.0)
    uses: dict[tuple[int, ...], tuple[int, int]] = {}
    for prompt, num_held in prompts:
        for depth in range(1, len(prompt) + 1):
            before = uses.get(prompt[:depth], (0, 0))
            uses[prompt[:depth]] = before[0] + 1, before[1] + (num_held >= depth)
    ends = {
        prompt[:depth]
        for prompt, _ in prompts
        for depth in range(1, len(prompt) + 1)
        if depth == len(prompt) or uses[prompt[:depth]][0] != uses[prompt[: depth + 1]][0]
    }
    expected = sorted((16 * len(end), *uses[end]) for end in ends)
    shown = tree.explain(most=10_000)
    assert sorted((each["to_tokens"], each["uses"], each["hits"]) for each in shown) == expected
    for each in shown:
        assert each["from_tokens"] == (0 if each["parent"] is None else shown[each["parent"]]["to_tokens"])
    assert len(tree.explain(most=5)) == 5


def test_the_tree_forgets_what_nobody_asks_for() -> None:
    random, tree = Random(1), PrefixTree(OneModel(None), None, Regret())
    system = np.array([random.getrandbits(64) for _ in range(4)], np.uint64)
    for now in range(4 * MAX_LEAVES):
        prompt = np.concatenate([system, np.array([random.getrandbits(64)], np.uint64)])
        own = np.array([random.getrandbits(64) for _ in range(3)], np.uint64)
        for hashes in (prompt, own):
            tree.add(JournalEntry(b"", model="m", block_size=16, hashes=hashes.tobytes()), float(now))
    shown = tree.explain(most=10_000)
    assert MAX_LEAVES <= len(shown) <= MAX_LEAVES + 1
    assert max(each["uses"] for each in shown) == 4 * MAX_LEAVES
