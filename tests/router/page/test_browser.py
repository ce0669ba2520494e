"""The live page in Chromium: true numbers that change, and nothing of what others say is taken for more than text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from kvist.events.hashing import block_hashes
from kvist.router.doors.journal import JournalEntry
from kvist.router.regret import CostlyPrefix

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed: pip install '.[test]'")
pytestmark = pytest.mark.xdist_group("browser")

TOKENS = list(range(1000, 1160))
HOSTILE = "<img src=x onerror=alert(1)>\"'</script><b>bold</b>"
expect = playwright.expect

SPOKEN = {"heading", "term", "link", "searchbox", "combobox", "button", "region", "columnheader", "rowheader"}

REQUESTS = "columnheader: Id, Ended, Worker, Prompt, Predicted, Reported, Duration, Time line, Status\n"
FLEET = f"""heading: Fleet
term: Workers, Requests a second, Running, Waiting, Cached, predicted, Cached, reported, Blocks known
searchbox: Filter
combobox: Show
region: Workers
columnheader: Worker, Model, Role, State, Running, To prefill, Cached, Predicted, Reported, Events, Tokens/s, Circuit
rowheader: #
region: Worker
link: Close
heading: #
term: State, Engine, Models, Registered by, Block size, Cache size, Ended requests, Chat template, Last failure
heading: Event streams and ranks, Last requests
region: Last requests of the worker
{REQUESTS}rowheader: …#"""
TERMS = ("Wait", "Compute", "Price of computing", "In flight", "Fetch", "Running", "Recent")
REQUEST = f"""heading: Requests, Explain a prompt
searchbox: Search
button: Pause
region: Request
link: Close
heading: #, Answering worker
region: Answering worker: candidates
columnheader: Candidate, Cached or in flight, Cost, Cost terms, {", ".join(TERMS)}
rowheader: # chosen
term: Ended, Path, Model, Tenant, Outcome, Attempts, Prompt, Reported cached, Answer
region: Requests
{REQUESTS}rowheader: …#, …#"""
ASKED = "# tokens of #: asked for # {}, # % of them where it was held; last # s ago"
PREFIXES = f"""heading: Prefixes
link: {ASKED.format("times")}, {ASKED.format("time")}, {ASKED.format("time")}
region: Prefix
link: Close
heading: #, Held now: # × gpu
region: Prefixes
columnheader: Prefix, Model, From, To token, Asked for, Held, Held by, Last asked for
rowheader: #, #, #"""
REGRET = """heading: Regret
term: Requests, Pooled cache, Held, Routed, Reported
rowheader: Time :, pooled cache :, held :, routed :, reported :
heading: Lost tokens by cause
region: Lost tokens by cause
columnheader: Cause, Tokens, Of prompts, Remedy
heading: By worker
region: By worker
columnheader: Worker, Model, Requests, Prompt tokens, Pooled cache, Held, Routed, Reported
rowheader: #
heading: Costliest prefixes
region: Costliest prefixes
columnheader: Prefix, Lost tokens, Length, Requests"""


async def spoken(page: Any) -> str:
    """Return what Chromium tells a screen reader of the view: role and names, in order, with # for numbers.

    A busy machine takes more than a minute for some: what was minutes ago reads as if it was seconds ago.
    """
    session = await page.context.new_cdp_session(page)
    nodes = (await session.send("Accessibility.getFullAXTree"))["nodes"]
    known = {node["nodeId"]: node for node in nodes}

    def names_in(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
        role = node["role"]["value"] if "role" in node and not node["ignored"] else ""
        if role in SPOKEN:
            name = re.sub(r"[0-9a-f]{12,}|[0-9]+([.:][0-9]+)*", "#", node["name"]["value"])
            yield role, name.replace("# min ago", "# s ago")
        if role not in ("columnheader", "rowheader", "link"):
            for child in node["childIds"]:
                yield from names_in(known[child])

    (view,) = [node for node in nodes if node.get("role", {}).get("value") == "main"]
    return "\n".join(
        f"{role}: {', '.join(name for _, name in names)}"
        for role, names in groupby(names_in(view), lambda each: each[0])
    )


async def test_each_view_shows_what_the_router_knows_and_all_can_read_it(worker, router, browsing, barriers) -> None:
    async with worker(cached_tokens=96) as one, worker() as two, router(one.url, two.url) as front, browsing() as page:
        front.hold(one.url, TOKENS[:96])
        answer = await front.complete(TOKENS)
        await page.goto(front.service.url + "/ui")
        await expect(page.locator("#connection")).to_have_text("Live")
        row = page.get_by_role("row").filter(has_text=one.url.removeprefix("http://"))
        await expect(row).to_contain_text("healthy")
        await expect(row).to_contain_text("60.0 %")  # 96 of 160, predicted and reported
        await row.get_by_role("link").click()
        await expect(page.get_by_role("region", name="Worker", exact=True)).to_contain_text("Last requests")
        two.health_status = 500
        await expect(page.get_by_role("row").filter(has_text=two.url[7:]).first).to_contain_text("unhealthy")
        assert await barriers(page) == []

        await page.get_by_role("link", name="Requests").click()
        table = page.get_by_role("region", name="Requests", exact=True)
        await expect(table.locator("tbody tr")).to_have_count(1)
        await front.complete(TOKENS[:80])
        await expect(table.locator("tbody tr")).to_have_count(2)
        await page.get_by_role("searchbox").fill(answer.headers["x-request-id"])
        await table.get_by_role("link").click()
        await expect(page.get_by_role("region", name="Answering worker")).to_contain_text("chosen")
        await expect(page.get_by_role("region", name="Answering worker").locator("tbody tr")).to_have_count(2)
        await page.get_by_text("Explain a prompt").click()
        await page.get_by_label("Prompt", exact=True).fill("Where would this go?")
        await page.get_by_role("button", name="Explain").click()
        await expect(page.locator("details")).to_contain_text("Policy kv")
        assert await barriers(page) == []

        await page.get_by_role("link", name="Prefixes").click()
        box = page.get_by_role("list", name="Prefixes, each below").get_by_role("link").first
        await expect(box).to_have_accessible_name(re.compile("(64|80|96) tokens"))
        await box.click()
        await expect(page.get_by_role("region", name="Prefix", exact=True)).to_contain_text("Held now")
        assert await barriers(page) == []

        await page.get_by_role("link", name="Regret").click()
        await expect(page.locator("dl.tiles")).to_contain_text("Reported")
        await expect(page.locator("canvas")).to_have_count(1)
        assert await barriers(page) == []
        await page.get_by_role("link", name="Health").click()
        await expect(page.locator(".problems")).to_contain_text(f"{two.url.removeprefix('http://')} is unhealthy")
        await expect(page.locator(".problems")).to_contain_text("docs/operating.md")
        assert await barriers(page) == []


async def test_a_prefix_that_costs_much_leads_to_its_place_among_prefixes(worker, router, browsing) -> None:
    async with worker() as one, router(one.url, block_size=16) as front, browsing() as page:
        await front.complete(TOKENS)
        regret = front.service.keeper._regret
        regret._buckets[-1].prefixes[int(block_hashes(TOKENS, 16)[3])] = CostlyPrefix(5000.0, 64, 7)
        await page.goto(front.service.url + "/ui#regret")
        costliest = page.get_by_role("region", name="Costliest prefixes").get_by_role("link")
        name = await costliest.text_content()
        await costliest.click()
        found = page.get_by_role("region", name="Prefix", exact=True)
        await expect(found).to_contain_text(f"Ends of prefixes that cost most: {name}")
        await expect(found).to_contain_text("Tokens 0 to 144 of m")


async def test_who_listens_is_led_through_all_of_it_and_not_torn_away_by_what_is_new(worker, router, browsing) -> None:
    async with worker(cached_tokens=96) as one, router(one.url) as front, browsing() as page:
        front.hold(one.url, TOKENS[:96])
        await front.complete(TOKENS)
        await page.goto(front.service.url + "/ui")
        await page.get_by_role("link", name=one.url[7:]).press("Enter")
        await expect(page.get_by_role("heading", name=one.url[7:])).to_be_focused()
        await expect(
            page.get_by_role("region", name="Last requests of the worker").get_by_role("rowheader")
        ).to_have_count(1)
        assert await spoken(page) == FLEET
        await page.get_by_role("link", name="Close").press("Enter")
        await expect(page.get_by_role("link", name=one.url[7:])).to_be_focused()

        await page.get_by_role("link", name="Requests").press("Enter")
        await expect(page.get_by_role("heading", name="Requests")).to_be_focused()
        await page.locator(".skip").press("Enter")
        await expect(page.locator("main")).to_be_focused()
        row = page.get_by_role("region", name="Requests").get_by_role("link")
        await row.evaluate("row => row.closest('tr').isOld = true")
        await row.focus()
        await front.complete(TOKENS[:80])
        await expect(row).to_have_count(2)
        await expect(row.last).to_be_focused()
        await expect(page.get_by_role("img").last).to_have_accessible_name(re.compile("first token [0-9]"))
        assert await row.evaluate_all("rows => rows.map((row) => !!row.closest('tr').isOld)") == [False, True]
        await row.last.press("Enter")
        await expect(page.get_by_role("region", name="Request", exact=True)).to_contain_text("held 96 of 160 tokens")
        assert re.sub(", (Queue|Read|First token|Decode)", "", await spoken(page)) == REQUEST

        await page.get_by_role("link", name="Prefixes").press("Enter")
        box = page.get_by_role("list", name="Prefixes, each below").get_by_role("link")
        await expect(box).to_have_count(2)
        await box.first.press("Enter")
        await expect(page.get_by_role("region", name="Prefix", exact=True)).to_contain_text("Held now")
        await box.last.evaluate("box => box.isOld = true")
        await box.last.focus()
        await front.complete(TOKENS[:64] + TOKENS[:80])
        await expect(box).to_have_count(3)
        await expect(box.nth(1)).to_be_focused()
        assert await box.evaluate_all("boxes => boxes.map((box) => !!box.isOld)") == [False, True, False]
        assert await spoken(page) == PREFIXES

        await page.get_by_role("link", name="Regret").press("Enter")
        await expect(page.get_by_role("img")).to_have_accessible_name(re.compile("reported: .* at last"))
        assert await spoken(page) == REGRET
        await page.get_by_role("link", name="Health").press("Enter")
        one.health_status = 500
        await expect(page.locator("#wrong")).to_contain_text("wrong: see Health")
        item = page.get_by_role("listitem").filter(has_text="is unhealthy").first
        await item.evaluate("item => item.isOld = true")
        told = await item.text_content()
        await expect(item).not_to_have_text(told)  # for how long it has been so
        assert await item.evaluate("item => item.isOld")
        assert await spoken(page) == "heading: Health"


async def test_it_says_that_the_router_is_away_and_comes_back(worker, router, browsing, free_port) -> None:
    port = free_port()
    async with worker() as one, worker() as two, browsing(faults_expected=True) as page:
        async with router(one.url, port=port, policy="round-robin") as front:
            await page.goto(front.service.url + "/ui")
            await expect(page.locator("tbody tr")).to_have_count(1)
        await expect(page.locator("#connection")).to_contain_text("Connection lost")
        async with router(two.url, port=port, policy="round-robin"):
            await expect(page.locator("#connection")).to_have_text("Live")
            await expect(page.locator("tbody tr")).to_have_count(1)
            await expect(page.locator("tbody").first).to_contain_text(two.url.removeprefix("http://"))


async def test_it_asks_for_the_key_and_again_once_that_has_changed(worker, router, browsing, barriers) -> None:
    values = {"policy": "round-robin", "admin_key": "first", "ready": False}
    async with worker() as one, router(one.url, **values) as front, browsing(faults_expected=True) as page:
        await page.goto(front.service.url + "/ui")
        await expect(page.locator("#key")).to_be_visible()
        assert await barriers(page) == []
        for key, told in (("wrong", "A key is needed"), ("first", "Live")):
            await page.get_by_label("Administrators' key").fill(key)
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.locator("#connection")).to_have_text(told)
        await expect(page.locator("tbody tr")).to_have_count(1)
        await expect(page.locator("#key")).to_be_hidden()
        front.service.reload(replace(front.service._config, admin_key="second"))
        await expect(page.locator("#key")).to_contain_text("no longer")
        await page.get_by_label("Administrators' key").fill("second")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator("#connection")).to_have_text("Live")


async def test_what_workers_and_clients_say_is_text(worker, router, browsing) -> None:
    models = [{"id": HOSTILE, "object": "model"}]
    async with worker(models=models) as one, router(one.url) as front, browsing() as page:
        for path in ("/v1/completions", f"/v1/completions?{HOSTILE}"):
            await front.client.post(path, json={"model": HOSTILE, "prompt": TOKENS})
        await front.complete(HOSTILE, model=f"{HOSTILE} unknown")
        for view in ("fleet", "requests", "prefixes", "regret", "health"):
            await page.goto(f"{front.service.url}/ui#{view}")
            await expect(page.locator("main")).to_contain_text("onerror=alert(1)" if view != "health" else "problem")
            assert await page.locator("main img, main b, main script").count() == 0


async def test_256_workers_and_requests_are_sorted_and_found_by_keyboard_on_a_phone(worker, router, browsing) -> None:
    async with worker() as one:
        urls = [one.url.replace("127.0.0.1", f"127.0.1.{number}") for number in range(1, 256)]
        view = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark", "reduced_motion": "reduce"}
        asked = {"policy": "round-robin", "ready": False, "health_interval_s": 60.0}
        async with router(one.url, *urls, **asked) as front, browsing(**view) as page:
            await page.goto(front.service.url + "/ui")
            rows = page.locator("tbody tr")
            await expect(rows).to_have_count(256)
            heads = page.get_by_role("columnheader")
            await heads.get_by_role("button", name="Worker").press("Enter")
            await expect(heads.first).to_have_attribute("aria-sort", "descending")
            await expect(rows.first).to_contain_text("127.0.1.255")
            await page.get_by_role("searchbox").fill("127.0.1.77:")
            await expect(rows).to_have_count(1)
            await rows.get_by_role("link").press("Enter")
            await expect(page.get_by_role("region", name="Worker", exact=True)).to_contain_text("127.0.1.77")
            told = {"at": 0, "path": "/", "model": "m", "tenant": "t", "status": 200, "num_attempts": 1, "total_s": 1}
            for number in range(256):
                front.service.keeper.on_journal_entry(
                    JournalEntry(json.dumps({"id": f"request-{number}", "queue_s": 0, **told}).encode())
                )
            await page.get_by_role("link", name="Requests").press("Enter")
            await expect(rows).to_have_count(200)
            await page.get_by_role("button", name="Show more").press("Enter")
            await expect(rows).to_have_count(256)
            await page.get_by_role("searchbox").fill("request-77")
            await expect(rows).to_have_count(1)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
