"""`kvist replay --ui` in Chromium, over recordings of publishers that ran."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from matplotlib.figure import Figure

from kvist.cli import main
from kvist.events.codec import decode_batch
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.replay import RecordingReader, RecordingWriter
from kvist.replay.recorder import Recorder, SourceSpec

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed: pip install '.[test]'")
pytestmark = pytest.mark.xdist_group("browser")
expect = playwright.expect

Until = Callable[[Callable[[], object]], Awaitable[None]]
KEEP_PLOTS = """window.plots = [];
Object.defineProperty(window, "uPlot", {get: () => window.Plot, set: (drawn) => window.Plot = class extends drawn {
  constructor(...all) { super(...all); plots.push(this); }
}});"""
PLOTTED = """() => plots.slice(-2).map(({data: [times, ...values], series: [, ...lines]}, idx) => [
  document.querySelectorAll("h2")[idx].textContent,
  lines.map(({label, stroke}, line) => [
    label,
    "#" + stroke().match(/[0-9]+/g).map((part) => (+part).toString(16).padStart(2, "0")).join(""),
    times.map((at, idx) => [at, values[line][idx]]),
  ]),
])"""
SHARED, OURS, THEIRS = list(range(64)), list(range(100, 132)), list(range(200, 232))


async def record(path: Path, until: Until, *prompts: list[int] | None) -> list[int]:
    """Record a publisher that stores prompts, one after the other, and for None drops all; return when, in ms."""
    limits = PublisherLimits(heartbeat_s=0.1)
    with (
        KvEventPublisher("tcp://127.0.0.1:0", worker="gpu-0", block_size=16, limits=limits) as publisher,
        RecordingWriter(path) as writer,
    ):
        recording = asyncio.create_task(Recorder([SourceSpec.parse(f"gpu-0={publisher.endpoint}")], writer).run())
        for prompt in prompts:
            num_heard = writer.num_messages
            await until(lambda num_heard=num_heard: writer.num_messages > num_heard + 1)
            if prompt is None:
                publisher.cleared()
            else:
                publisher.stored([hash(tuple(prompt[: end + 16])) for end in range(0, len(prompt), 16)], prompt)
        num_heard = writer.num_messages
        await until(lambda: writer.num_messages > num_heard + 2)
        recording.cancel()
        await asyncio.wait([recording])
    with RecordingReader(path) as reader:
        records = list(reader)
    told = [
        record for record in records if "eartbeat" not in str(decode_batch(record.message.payload, "").batch.events)
    ]
    return [(record.time_ns - records[0].time_ns) // 1_000_000 for record in told]


@contextmanager
def page_of(*args: object) -> Iterator[str]:
    """Yield where `kvist replay --ui` serves its page."""
    command = [sys.executable, "-m", "kvist", "replay", *map(str, args), "--ui"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
    assert process.returncode == 0


def plotted_to(file: Path, recording: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Have a recording's plot written, and return its charts: titles, and names, colours and points of their lines."""
    drawn, savefig = list[Figure](), Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    assert main(["replay", str(recording), "--stats", "--plot", str(file)]) == 0
    return [
        [axes.get_title(), [[line.get_label(), line.get_color(), line.get_xydata().tolist()] for line in axes.lines]]
        for axes in drawn[0].axes
    ]


async def test_the_slider_shows_what_was_held_then_and_another_recording_beside_it(
    tmp_path: Path, until: Until, browsing: Any, barriers: Any, firefox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "<b>one.mcap", tmp_path / "other.mcap"
    moments = await record(one, until, SHARED, SHARED + OURS, SHARED + THEIRS, None)
    await record(other, until, SHARED + OURS)
    with page_of(one) as url:
        async with browsing() as page:
            await page.add_init_script(KEEP_PLOTS)
            await page.goto(url)
            row = page.get_by_role("region", name="Ranks").locator("tbody tr")
            slider = page.get_by_role("slider", name="Time since the beginning")
            await expect(page.locator("#connection")).to_have_text("Recorded")
            await expect(row).to_contain_text(f"gpu-0{one}0of 8 at most0000")
            for moment, num_blocks in zip([0, *moments], [0, 4, 6, 8, 0], strict=True):
                await slider.fill(str(moment))
                await expect(page.locator("dl.tiles")).to_contain_text(f"Held{num_blocks}blocks")
            await expect(page.locator("canvas")).to_have_count(2)
            assert await page.evaluate(PLOTTED) == plotted_to(tmp_path / "plot.svg", one, monkeypatch)
            assert await barriers(page) == []
            await slider.fill(str(moments[2]))
            await page.get_by_role("link", name="Prefixes").click()
            boxes = page.get_by_role("list", name="Prefixes, each below").get_by_role("link")
            await expect(boxes).to_have_count(3)
            assert await barriers(page) == []
            await expect(boxes.first).to_have_accessible_name(re.compile("64 tokens of .*: 8 blocks .* 1 of 1 ranks"))
            await page.get_by_role("button", name="Play").press("Enter")
            await expect(page.locator(".trees")).to_contain_text("Nothing was held then")  # at the end
            assert await page.locator("main b").count() == 0
    with page_of(one, "--beside", other) as url:
        async with browsing(viewport={"width": 390, "height": 800}, color_scheme="dark") as page:
            await page.goto(url + "#prefixes")
            await page.get_by_role("slider").fill(str(moments[2]))
            trees = page.get_by_role("list", name="Prefixes, each below")
            await expect(trees).to_have_count(2)
            await trees.last.get_by_role("link").click()  # up to the same block as one of the first recording's
            await expect(page.locator(".trees [aria-current=true]")).to_have_count(2)
            await expect(page.get_by_role("region", name="Prefix", exact=True)).to_contain_text(str(other))
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        async with firefox() as (go_to, evaluate):

            async def shows(told: str) -> None:
                async with asyncio.timeout(120):
                    while told not in await evaluate("document.body.textContent"):  # noqa: ASYNC110 - it is a browser
                        await asyncio.sleep(0.05)

            await go_to(f"{url}#prefixes")
            await shows("6 blocks of it and of what follows it")  # of the other: the first's are gone
            await go_to(f"{url}#fleet")
            await shows("Held6blocks")
            await evaluate("const slider = document.querySelector('[type=range]'); String(slider.value = 0)")
            await evaluate("String(slider.dispatchEvent(new Event('input')))")
            await shows("Distinct0")
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.get(f"{url}/events", headers={"host": "elsewhere.example"})
            assert answer.status_code == 403
            async with client.stream("GET", f"{url}/events?at=soon") as answer:
                assert "at: got 'soon', expected milliseconds" in await anext(answer.aiter_text())


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--ui", "--loop", "2"], "--loop: got 2"),
        (["--ui", "--port", "65536"], "--port: got 65536, expected 0 to 65535"),
        (["--stats", "--beside", "b.mcap"], "--beside: got 'b.mcap'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], refused: str
) -> None:
    assert main(["replay", "a.mcap", *flags]) == 2
    assert refused in capsys.readouterr().err
