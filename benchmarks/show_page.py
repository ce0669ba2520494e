"""What does the live page look like? Starts `kvist up` and writes what Chromium shows of its demo into docs/.

python benchmarks/show_page.py      # docs/page-fleet.png, page-request.png, page-prefixes.png
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
SIZE = {"width": 1280, "height": 600}
SHOWN = (("fleet", "fleet", "light"), ("request", "requests", "dark"), ("prefixes", "prefixes", "light"))


def main() -> None:
    up = [sys.executable, "-m", "kvist", "up", "--port", "0"]
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as demo, sync_playwright() as driver:
        assert demo.stdout is not None
        try:
            url = next(line.split()[-1] for line in demo.stdout if line.rstrip().endswith("/ui"))
            next(line for line in demo.stdout if line.startswith("Serving on"))  # the demo is over
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, view, scheme in SHOWN:
                page = browser.new_page(viewport=SIZE, color_scheme=scheme)
                page.goto(f"{url}#{view}")
                page.locator("tbody tr").first.wait_for()
                if name == "request":
                    page.locator("tbody button").first.click()
                    page.get_by_role("region", name="Candidates").wait_for()
                page.screenshot(path=DOCS / f"page-{name}.png")
            browser.close()
        finally:
            demo.terminate()


if __name__ == "__main__":
    main()
