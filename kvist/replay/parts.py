"""The files of one recording: FILE, then FILE.1, FILE.2 and so on."""

from __future__ import annotations

from pathlib import Path


def part_path(path: Path, part: int) -> Path:
    """Return where a recording's part is."""
    return path if part == 0 else path.with_name(f"{path.name}.{part}")


def existing_parts(path: Path, first: int = 0) -> list[Path]:
    """Return the parts that exist from a number on, in order, up to the first that does not."""
    parts: list[Path] = []
    while (part := part_path(path, first + len(parts))).exists():
        parts.append(part)
    return parts
