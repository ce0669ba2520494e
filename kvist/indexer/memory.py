"""How many blocks an index may keep on this machine by default."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

_logger = logging.getLogger(__name__)

BYTES_A_BLOCK = 512
"""Assumed for a block: it takes 50 bytes with a stock engine's hash for it, or 170 with an adapter or a salt, which are
kept in Python (200,000 blocks of one rank, 2026-11-22); the rest is for other ranks that hold it."""


def default_max_blocks(cgroups: Path = Path("/sys/fs/cgroup"), own_group: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many blocks fit half of the memory that the machine has, or its container may use."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    for path in _limit_files(cgroups, own_group):
        try:
            memory_bytes = min(memory_bytes, int(path.read_text()))
        except (OSError, ValueError):
            continue  # no such file, or it says "max"
    max_blocks = max(1, memory_bytes // (2 * BYTES_A_BLOCK))
    _logger.info("max_blocks not set, default chosen max_blocks=%d memory_bytes=%d", max_blocks, memory_bytes)
    return max_blocks


def _limit_files(cgroups: Path, own_group: Path) -> Iterator[Path]:
    """Yield the files that may have the limit of this process's group, or of one around it."""
    yield cgroups / "memory" / "memory.limit_in_bytes"
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = cgroups / name
    yield from (each / "memory.max" for each in (group, *group.parents) if each.is_relative_to(cgroups))
