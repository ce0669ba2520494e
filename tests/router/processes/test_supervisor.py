"""What a router of several processes holds before any of them is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvist.router.processes import supervisor
from kvist.router.processes.supervisor import _reserve


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_of_two_routers_that_start_at_once_on_a_port_one_is_refused(free_port: Callable[[], int], host: str) -> None:
    port = free_port()
    for _ in range(2):
        held = _reserve(host, port)
        with pytest.raises(OSError, match="in use"):
            _reserve(host, port)
        for each in held:
            each.close()


@pytest.mark.parametrize(("quota", "number"), [("150000 100000", 1), ("max 100000", 7), ("400000 100000", 3)])
def test_a_router_that_counts_cores_by_itself_counts_those_of_its_container(
    quota: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert supervisor.num_fronts("auto") == 7
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert supervisor.num_fronts("auto") == number
