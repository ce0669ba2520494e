"""Files of tenants, whose keys are known to tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest


def entry(name: str, *keys: str, **may: Any) -> dict[str, Any]:
    """A tenant, whose key is its name where none is given."""
    return {"name": name, "keys": [sha256(key.encode()).hexdigest() for key in keys or (name,)], **may}


@pytest.fixture
def tenants(tmp_path: Path) -> Callable[..., str]:
    """Writes a file of these tenants, in the place of the one before; names stand for those that may do everything."""
    path = tmp_path / "tenants.json"

    def write(*listed: str | dict[str, Any]) -> str:
        named = [entry(each) if isinstance(each, str) else each for each in listed]
        new = tmp_path / "new"
        new.write_text(json.dumps({"tenants": named}))
        new.replace(path)
        return str(path)

    return write


@pytest.fixture
def tenant() -> Callable[..., dict[str, Any]]:
    return entry


@pytest.fixture
def bearing() -> Callable[[str], dict[str, str]]:
    return lambda key: {"authorization": f"Bearer {key}"}
