"""The seeds of random lives: each makes one, always the same. More are lived with `KVIST_LIVES`."""

from __future__ import annotations

import os


def seeds(number: int) -> range:
    """Return the first so many seeds, or those that `KVIST_LIVES` names: `1000:2000` are a thousand."""
    first, _, end = os.environ.get("KVIST_LIVES", f"0:{number}").partition(":")
    return range(int(first), int(end))
