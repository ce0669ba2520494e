"""docs/windowed-kv.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_document_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "windowed-kv.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    for path, name in named:
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?(def )?{name}\b", source, re.MULTILINE), (path, name)
