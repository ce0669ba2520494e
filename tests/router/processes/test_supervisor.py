"""What a router of several processes holds before any of them is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
