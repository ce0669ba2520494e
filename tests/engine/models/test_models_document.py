"""docs/models.md names what the engine runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvist.engine.models.config import load_model_config
from kvist.errors import InvalidValueError

DOCUMENT = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_document_lists_every_architecture_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidValueError) as refused:
        load_model_config(tmp_path)
    supported = re.findall(r"'(\w+)'", refused.value.expected)
    assert sorted(re.findall(r"`(\w+For\w+)`", DOCUMENT)) == sorted(supported)
