"""The playing of a plan in simulated time, and the shortest plan that fails alike."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fault_harness import virtual
from fault_harness.fleet import Fleet, Tally
from fault_harness.plan import Plan
from fault_harness.virtual import World
from kvist.radix import RadixIndex


def play(plan: Plan) -> Tally:
    """Play a plan; raises AssertionError, naming the plan, if the index was ever what it must not be."""
    with tempfile.TemporaryDirectory() as folder:

        async def main(world: World) -> Tally:
            return await Fleet(plan, world, Path(folder)).play()

        try:
            return virtual.run(main, plan.seed, functools.partial(_patches, plan))
        except Exception as error:
            error.add_note(f"fault seed {plan.seed}: {plan.kinds} {plan.settings}")
            error.add_note("\n".join(map(str, plan.steps)))
            raise


def shrunk(plan: Plan, error: type[Exception] = Exception) -> Plan:
    """Return a plan with fewer steps and workers that fails as well."""
    num_dropped = max(1, len(plan.steps) // 2)
    while True:
        start = 0
        while start < len(plan.steps):
            fewer = replace(plan, steps=plan.steps[:start] + plan.steps[start + num_dropped :])
            if _fails(fewer, error):
                plan = fewer
            else:
                start += num_dropped
        if num_dropped == 1:
            return plan
        num_dropped //= 2


def _fails(plan: Plan, error: type[Exception]) -> bool:
    try:
        play(plan)
    except error:
        return True
    return False


def _patches(plan: Plan, world: World) -> dict[str, Any]:
    settings = plan.settings
    index = functools.partial(RadixIndex, seed=plan.seed)
    return {
        "os.fsync": lambda _: None,
        "kvist.events.follow.random": world.random,
        "kvist.events.follow.time": world.drifting_time,
        "kvist.events.snapshot.MAX_PART_BLOCKS": settings["max_part_blocks"],
        "kvist.indexer.canonical.NUM_BLOCKS_A_SLICE": settings["slice_blocks"],
        "kvist.indexer.service.registry.RadixIndex": index,
        "kvist.publisher.publisher.random": world.random,
        "kvist.publisher.publisher.time": world.time,
        "kvist.publisher.snapshot.time": world.time,
        "kvist.publisher.stream.MAX_BATCH_HASH_BYTES": settings["batch_bytes"],
    }
