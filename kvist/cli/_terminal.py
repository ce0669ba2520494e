"""How commands behave in a terminal: SIGINT and SIGTERM end them in order, and a line shows how far they are."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
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
"""For how long a thread, as that which renders metrics, keeps the interpreter from the event loop: Python's is 5 ms."""
_WIDTH_OF_FILES = 4096

ShowProgress: TypeAlias = Callable[[str, float, float | None], None]
"""Shows a text, and a bar with the time that is left: what is done, of how much if that is known."""


def on_signal(do: Callable[[], object]) -> None:
    """Have the running loop call `do` at SIGINT, SIGTERM and SIGHUP, instead of what they do by themselves."""
    loop = asyncio.get_running_loop()
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as after nohup
    for number in (signal.SIGINT, signal.SIGTERM, *(() if is_kept else (signal.SIGHUP,))):
        loop.add_signal_handler(number, do)


async def serve(service: AbstractAsyncContextManager[T], ready_line: Callable[[T], str]) -> int:
    """Run a service, and say when it is ready, until SIGINT or SIGTERM; a second one hurries its end. Return 0.

    A ready line that is empty is not said.
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


async def finish(task: asyncio.Task[None]) -> None:
    """Wait for a task's end and raise what it failed of; having been cancelled, by a signal, is no failure of it."""
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise


def write_output(flag: str, path: Path, text: str | None) -> None:
    """Write a file that a flag names, or with None only see that it can be written; raises InvalidValueError."""
    try:
        with path.open("a" if text is None else "w") as file:
            file.write(text or "")
    except OSError as error:
        raise InvalidValueError(flag, str(path), f"a file that can be written ({error.strerror})") from None


@contextmanager
def progress_line() -> Iterator[ShowProgress]:
    """Yield what shows progress on stderr until the context ends; silent if that is no terminal, or without rich."""
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
    """Print tables, a line apart, and texts, as wide as the terminal is; where there is none, each row in one line."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=on_stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    boundless = console.options.update(width=_WIDTH_OF_FILES)
    for part in parts:
        if isinstance(part, Table) and (excess := console.measure(part, options=boundless).maximum - console.width) > 0:
            part.padding = 0
            _narrow(part, excess - len(part.columns))
        console.print(part)
        if isinstance(part, Table) and part is not parts[-1]:
            console.print()


def _narrow(table: Table, excess: int) -> None:
    """Have a table's columns give way by so much, the widest first; words are broken where nothing else is left."""
    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    wanted = [max(map(len, cells)) for cells in texts]
    words = [max((len(word) for cell in cells for word in cell.split()), default=1) for cells in texts]
    for _ in range(excess):
        widths = [(wide, idx) for idx, wide in enumerate(wanted)]
        wide, idx = max([each for each in widths if each[0] > words[each[1]]] or widths)
        wanted[idx] = table.columns[idx].width = max(1, wide - 1)


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, breaks: bool = True) -> Table:
    """Return rows as every command shows them; columns of numbers stand to the right.

    Unless it `breaks` lines, what is too long for the screen is cut off.
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
    """Return a text that says nothing to a terminal but what it reads."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
