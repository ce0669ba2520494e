"""Random lives under faults with real processes, sockets and brokers: killed by kill -9, and soon exact again."""

from __future__ import annotations

from functools import partial

import pytest
from fault_harness.processes import play_live

SIDECARS = ["sidecar", "forgetful-sidecar"]
TRANSPORTS = ["tcp", "nats", "jetstream", "mqtt", *SIDECARS]


@pytest.fixture
def broker_of(start_nats_server, start_mqtt_broker):
    """Return a function that starts what carries a transport's messages, None where nothing does."""
    brokers = {
        "nats": start_nats_server,
        "jetstream": partial(start_nats_server, has_jetstream=True),
        "mqtt": start_mqtt_broker,
    }
    return lambda transport: brokers.get(transport, lambda: None)()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_killed_processes_leave_the_index_exact(transport, free_port, broker_of, seeds, tally):
    for seed in seeds or (1,):
        options = {"num_workers": 2, "num_steps": 8, "rate": 0.1, "num_ranks": 1 if transport in SIDECARS else 2}
        tally.add(await play_live(transport, seed, free_port, broker_of(transport), has_state=True, **options))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_state", [False, True], ids=["without state", "with state"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_soak_of_killed_processes(transport, has_state, free_port, broker_of, seeds, tally):
    for seed in seeds or range(100, 105):
        options = {"num_workers": 3, "num_steps": 20, "rate": 0.1, "num_ranks": 1 if transport in SIDECARS else 2}
        tally.add(await play_live(transport, seed, free_port, broker_of(transport), has_state=has_state, **options))


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_soak_of_a_million_blocks(free_port, seeds, tally):
    for seed in seeds or (1000,):
        options = {"rate": 0.02, "max_blocks": 150_000, "fill": 130_000, "events_a_step": 2000}
        tally.add(await play_live("tcp", seed, free_port, None, num_workers=8, num_steps=15, **options))
        assert tally.num_blocks >= 1_000_000
