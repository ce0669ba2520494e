"""How commands behave in a terminal: signals end them in order, a line shows progress, and tables fit the screen."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

T = TypeVar("T")

SHOW_INTERVAL_S = 0.25
_SWITCH_INTERVAL_S = 0.0005
"""How long another thread, such as the one that renders metrics, delays the event loop at most; Python's is 5 ms."""
_FILE_WIDTH = 4096

ShowProgress: TypeAlias = Callable[[str, float, float | None], None]
"""Shows a text, with a bar and the remaining time: how much is done, and of how much, or None if that is unknown."""


def on_signal(callback: Callable[[], object]) -> None:
    """Have the running loop call `callback` at SIGINT, SIGTERM and SIGHUP, in place of their default actions."""
    loop = asyncio.get_running_loop()
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as after nohup
    for number in (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,))):
        loop.add_signal_handler(number, callback)


async def serve(service: AbstractAsyncContextManager[T], ready_line: Callable[[T], str]) -> int:
    """Run a service until SIGINT or SIGTERM, and return 0; a second signal cancels what it still does to end.

    `ready_line` is printed when it is ready, unless it is empty.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    task, stopped = asyncio.current_task(), asyncio.Event()
    assert task is not None
    on_signal(lambda: task.cancel() if stopped.is_set() else stopped.set())
    with suppress(asyncio.CancelledError):
        async with service as entered:
            if line := ready_line(entered):
                print(line, flush=True)
            await stopped.wait()
    return 0


async def run_until_signalled(
    work: Coroutine[Any, Any, None],
    ready_line: str = "",
    progress: Callable[[], tuple[str, float, float | None]] | None = None,
    duration_s: float | None = None,
) -> None:
    """Run `work` until it ends, or until a signal or the end of its duration cancels it, which is no failure.

    Prints the line, if there is one, and shows what `progress` returns four times a second.
    """
    task = asyncio.create_task(work, name="kvist-command")
    on_signal(task.cancel)
    if ready_line:
        print(ready_line, flush=True)
    if duration_s is not None:
        asyncio.get_running_loop().call_later(duration_s, task.cancel)
    if progress is not None:
        with progress_line() as show:
            while not task.done():
                await asyncio.wait([task], timeout=SHOW_INTERVAL_S)
                show(*progress())
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise


def write_output(flag: str, path: Path, text: str | None) -> None:
    """Write the file that a flag names, or with None only check that it can be written; raises InvalidValueError."""
    try:
        with path.open("a" if text is None else "w") as file:
            file.write(text or "")
    except OSError as error:
        raise InvalidValueError(flag, str(path), f"a file that can be written ({error.strerror})") from None


@contextmanager
def progress_line() -> Iterator[ShowProgress]:
    """Yield a function that shows progress on stderr; it does nothing where that is no terminal, or without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        is_shown = False
    else:
        is_shown = sys.stderr.isatty()
    if not is_shown:
        yield lambda *_: None
        return
    columns = (BarColumn(bar_width=30), TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task("", total=None, text="")
        yield lambda text, done, total: progress.update(line, text=text, completed=done, total=total)


def display(*parts: RenderableType, on_stderr: bool = False) -> None:
    """Print texts and tables, which fit the terminal's width; without a terminal each row has one line."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=on_stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    boundless = console.options.update(width=_FILE_WIDTH)
    for part in parts:
        if isinstance(part, Table) and (excess := console.measure(part, options=boundless).maximum - console.width) > 0:
            part.padding = 0
            _narrow(part, excess - len(part.columns))
        console.print(part)
        if isinstance(part, Table) and part is not parts[-1]:
            console.print()


def _narrow(table: Table, excess: int) -> None:
    """Narrow a table's columns by `excess` characters in all, the widest first; words are broken as a last resort."""
    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    wanted = [max(map(len, cells)) for cells in texts]
    words = [max((len(word) for cell in cells for word in cell.split()), default=1) for cells in texts]
    for _ in range(excess):
        widths = [(wide, idx) for idx, wide in enumerate(wanted)]
        wide, idx = max([each for each in widths if each[0] > words[each[1]]] or widths)
        wanted[idx] = table.columns[idx].width = max(1, wide - 1)


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, breaks: bool = True) -> Table:
    """Return rows as every command shows them; columns of numbers are right-aligned.

    Cells that are too long for the screen are broken into lines, or cut off unless `breaks`.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    number = re.compile(r"[0-9,./%–]+")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name, *cells in zip(columns, *rows, strict=True):
        justify: Literal["left", "right"] = "right" if all(map(number.fullmatch, cells)) else "left"
        table.add_column(name, justify=justify, overflow="fold")
    lines: dict[str, Any] = {} if breaks else {"no_wrap": True, "overflow": "ellipsis"}
    for row in rows:
        table.add_row(*(Text(printable(cell), **lines) for cell in row))
    return table


def printable(text: str) -> str:
    """Return a text with all its control characters replaced, so that it cannot change the terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
