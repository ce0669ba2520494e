"""A line of progress on a terminal, and nothing anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

SHOW_INTERVAL_S = 0.25
"""How often who has something to show should."""


class ProgressLine:
    """Shows how far something is, and when it will be done where that is known; silent without terminal or rich."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._progress = _rich_progress() if is_wanted and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._progress is not None:
            self._progress.start()
            self._progress.add_task("", total=None, text="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the line away."""
        if self._progress is not None:
            self._progress.stop()

    def show(self, text: str, completed: float = 0.0, total: float | None = None) -> None:
        """Show a text, and a bar with the time that is left if `total` is known."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], text=text, completed=completed, total=total)


def _rich_progress() -> Progress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    columns = (BarColumn(bar_width=30), TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
