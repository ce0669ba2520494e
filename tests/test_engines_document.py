"""docs/engines.md shows configurations, commands and numbers: those that are so."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from kvist.cli import publish, route
from kvist.errors import InvalidValueError
from kvist.publisher.engine_config import engine_endpoints
from kvist.publisher.sidecar import SAVE_COST_FACTOR, SAVE_INTERVAL_S
from kvist.router.healing import MAX_ASKED, MAX_HITS, NUM_UNCHANGED_IN_A_ROW

DOCUMENT = (Path(__file__).parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
CONFIGURATIONS = re.findall(r"--kv-events-config '(\{.*?\})'", DOCUMENT, re.S)


def test_the_sidecar_follows_the_engines_as_they_are_configured_there() -> None:
    vllm, in_process, sglang = CONFIGURATIONS
    assert [each.engine for config in (vllm, sglang) for each in engine_endpoints(config, num_ranks=2)] == [
        *("vllm", "vllm"),
        *("sglang", "sglang"),
    ]
    with pytest.raises(InvalidValueError, match="not 'kvist'"):  # which needs no sidecar
        engine_endpoints(in_process)
    assert json.loads(in_process)["topic"] == "pod-1"


def test_the_commands_have_only_flags_that_exist() -> None:
    for command in (publish, route):
        parser = argparse.ArgumentParser(exit_on_error=False)
        command.add_arguments(parser)
        lines = re.findall(rf"^kvist {command.__name__.rpartition('.')[2]} (.*)$", DOCUMENT, re.M)
        assert lines
        for line in lines:
            parser.parse_args(shlex.split(line, comments=True))


def test_the_numbers_are_those_of_the_code() -> None:
    text = " ".join(DOCUMENT.split())
    assert f"{NUM_UNCHANGED_IN_A_ROW} answers in a row" in text
    assert f"asked {MAX_ASKED:,} times" in text
    assert f"{MAX_HITS:,} blocks" in text
    assert (SAVE_INTERVAL_S, SAVE_COST_FACTOR) == (2.0, 20)
    assert "Every two seconds" in text
    assert "at most a twentieth of the time" in text
