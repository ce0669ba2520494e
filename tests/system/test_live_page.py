"""The live page of `kvist up` in Chromium and a stock Firefox: what the router's API tells is what each view shows."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("browser")]

UP = [sys.executable, "-m", "kvist", "--log-level", "warning", "up", "--port", "0", "--no-demo"]
PROMPT = "A clerk of the harbour answers in one line, and names the ship, the crane and the tide. " * 8
DEADLINE_S = 180.0
Shown = dict[str, list[str]]


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a condition comes to, once that is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await condition()):  # noqa: ASYNC110 - a page and a process can only be looked at
            await asyncio.sleep(0.05)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[tuple[str, Shown]]:
    """Yield the page's URL, and what its views have to show by what answers and the API told of two requests."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "firefox", "firefox-esr"))):
        pytest.skip("no browser here: apt-get install chromium firefox-esr")
    process = await asyncio.create_subprocess_exec(*UP, stdout=subprocess.PIPE)
    try:
        url = await printed(process.stdout, r"The fleet, live: (\S+)")
        async with httpx.AsyncClient(base_url=url.removesuffix("/ui"), timeout=DEADLINE_S) as client:
            yield url, await ask(client)
    finally:
        process.terminate()
        await process.wait()


async def printed(lines: asyncio.StreamReader | None, pattern: str) -> str:
    """Return what a process prints that fits a pattern's group."""
    assert lines is not None
    async with asyncio.timeout(DEADLINE_S):
        while not (found := re.search(pattern, (await lines.readline()).decode())):
            pass
    return found[1]


async def ask(client: httpx.AsyncClient) -> Shown:
    """Ask twice for what begins alike, and return what views then have to show."""

    async def told(path: str) -> dict[str, Any]:
        return (await client.get(path)).raise_for_status().json()

    async def is_held() -> bool:
        explained = (await client.post("/route", json={"prompt": PROMPT})).json()
        return explained.get("overlap_tokens", 0) > 0

    async def joined() -> bool:
        return (await told("/readiness")).get("index") == "ready"

    await until(joined)
    answers = []
    for question in ("Which?", "Whose?"):
        body = {"model": "kvist-tiny", "prompt": PROMPT + question, "max_tokens": 4}
        answers.append((await client.post("/v1/completions", json=body)).raise_for_status())
        await until(is_held)
    first, second = (answer.headers["x-kvist-worker"] for answer in answers)
    assert first == second
    num_tokens, num_cached = zip(*map(usage, answers), strict=True)
    assert num_cached[0] == 0 < num_cached[1]

    async def live_worker() -> dict[str, Any] | None:
        """Return the worker once it has told itself what it holds: until then that was guessed by its requests."""
        (worker,) = (each for each in (await told("/workers"))["workers"] if each["url"] == first)
        return worker if [each["state"] for each in worker["kv_events"]["ranks"]] == ["live"] else None

    worker = await until(live_worker)
    assert worker["hits"]["reported_tokens"] == sum(num_cached)
    name, request_id = first.removeprefix("http://"), answers[1].headers["x-request-id"]
    reported, found = share(sum(num_cached), sum(num_tokens)), share(num_cached[1], num_tokens[1])
    return {
        "fleet": ["2 of 2", "index ready", name, reported],
        f"fleet/{quote(first, safe='')}": [
            "Ended requests2",
            f"{worker['kv_events']['ranks'][0]['blocks']} blocks",
            found,
        ],
        "requests": ["2 of the last 2", name, found, request_id[-12:]],
        f"requests/{request_id}": [
            f"{num_tokens[1]:,} tokens",
            f"Policy kv chose {name}, which held",
            "chosen",
            "The lowest cost wins",
        ],
        "prefixes": ["asked for 2 times", "1 × gpu"],
        "regret": ["Requests2", f"Reported{reported}"],
        "health": ["No problems."],
    }


def usage(answer: httpx.Response) -> tuple[int, int]:
    told = answer.json()["usage"]
    return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


async def test_chromium_shows_what_the_api_tells(fleet: tuple[str, Shown], browsing: Any) -> None:
    url, shown = fleet
    async with browsing() as page:
        for view, texts in shown.items():
            await page.goto(f"{url}#{view}")
            await until(lambda texts=texts: all_shown(page.evaluate, texts))
        await page.get_by_role("link", name="Requests").click()
        await page.get_by_text("Explain a prompt").click()
        await page.get_by_label("Prompt", exact=True).fill(PROMPT)
        await page.get_by_role("button", name="Explain").click()
        told = page.locator("details")
        await until(lambda: told.get_by_text(re.compile(shown["requests"][1])).count())


async def all_shown(evaluate: Callable[[str], Awaitable[str]], texts: list[str]) -> bool:
    page = await evaluate("document.body.innerHTML + document.body.textContent")
    return all(text in page for text in ["Live", *texts])


async def test_firefox_shows_the_same(fleet: tuple[str, Shown], firefox: Any) -> None:
    url, shown = fleet
    async with firefox() as (go_to, evaluate):
        for view, texts in shown.items():
            await go_to(f"{url}#{view}")
            await until(lambda texts=texts: all_shown(evaluate, texts))
