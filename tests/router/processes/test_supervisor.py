"""What a router of several processes holds before any of them is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvist.router.processes import supervisor
from kvist.router.processes.supervisor import Supervisor, _Child, _reserve


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


def test_a_process_that_keeps_dying_is_restarted_ever_later_also_after_it_lived_long(free_port) -> None:
    router, pauses_s = Supervisor(["true"], "127.0.0.1", free_port(), 1), []
    for lived_s in (60.0, *[-60.0] * 7, 60.0, -60.0):
        process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
        process.wait()
        router._children[0] = _Child(0, process, time.monotonic() - lived_s)
        router._handle_deaths(may_restart=True)
        pauses_s.append(router._pauses_s[0])
    assert pauses_s == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 0.0, 0.1]
    for each in router._sockets:
        each.close()
    shutil.rmtree(router._directory)
