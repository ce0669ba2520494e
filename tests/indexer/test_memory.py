"""How many blocks are kept where nobody says: as many as fit half of what memory there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvist.indexer.memory import BYTES_A_BLOCK, default_max_blocks

MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    ("limits", "memory_bytes"),
    [
        ({}, MACHINE_BYTES),
        ({"memory.max": "max"}, MACHINE_BYTES),
        ({"memory.max": f"{1 << 28}"}, 1 << 28),
        ({"pods/memory.max": f"{1 << 27}", "pods/kvist/memory.max": f"{1 << 28}"}, 1 << 27),
        ({"others/memory.max": f"{1 << 20}"}, MACHINE_BYTES),
        ({"memory/memory.limit_in_bytes": f"{1 << 26}"}, 1 << 26),
    ],
)
def test_the_default_cap_fits_half_of_the_machines_or_the_containers_memory(tmp_path: Path, limits, memory_bytes):
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit + "\n")
    own_group = tmp_path / "own"
    own_group.write_text("0::/pods/kvist\n")
    assert default_max_blocks(tmp_path, own_group) == memory_bytes // 2 // BYTES_A_BLOCK


def test_a_machine_that_tells_no_group_has_the_memory_it_says(tmp_path: Path):
    assert default_max_blocks(tmp_path, tmp_path / "missing") == MACHINE_BYTES // 2 // BYTES_A_BLOCK
