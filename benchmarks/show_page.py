"""What does the live page look like? Writes screenshots of `kvist up`, and of a recording of it, into docs/.

python benchmarks/show_page.py      # docs/page-fleet.png, page-request.png, …
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
SIZE = {"width": 1280, "height": 600}
SHOWN = (
    ("fleet", "fleet", "light"),
    ("request", "requests", "dark"),
    ("prefixes", "prefixes", "light"),
    ("regret", "regret", "light"),
    ("health", "health", "dark"),
)


@contextmanager
def kvist(folder: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a folder until the context ends."""
    command = [sys.executable, "-m", "kvist", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return next(line.split()[-1] for line in process.stdout if line.rstrip().endswith("/ui"))


def streams_at(url: str) -> list[str]:
    """Return the event streams that a router has heard of so far."""
    with urlopen(url.replace("/ui", "/workers")) as answer:
        workers = json.load(answer)["workers"]
    return [source["url"] for worker in workers for source in worker["kv_events"]["sources"]]


def take(browser: Browser, name: str, url: str, scheme: str) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(url)
    page.locator(".problems" if name == "health" else "tbody tr").first.wait_for(state="attached")
    if name == "request":
        page.locator("tbody a").first.click()
        page.get_by_role("region", name="Answering worker").wait_for()
    if name == "recording":
        page.get_by_role("slider").press("PageDown")
    page.wait_for_timeout(1000)
    page.screenshot(path=DOCS / f"page-{name}.png")


def main() -> None:
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with kvist(folder, "up", "--port", "0") as demo:
            url = url_of(demo)
            while not (streams := streams_at(url)):
                time.sleep(0.1)
            sources = [word for stream in streams for word in ("--from", stream)]
            with kvist(folder, "record", *sources, "--to", "fleet.mcap"):
                assert demo.stdout is not None
                next(line for line in demo.stdout if line.startswith("Serving on"))  # the demo is over
            for name, view, scheme in SHOWN:
                take(browser, name, f"{url}#{view}", scheme)
        with kvist(folder, "replay", "fleet.mcap", "--ui") as replay:
            take(browser, "recording", f"{url_of(replay)}#prefixes", "light")
        browser.close()


if __name__ == "__main__":
    main()
