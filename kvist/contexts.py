"""What services that run in the background share: how they open what they are made of, and how they end their tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class ComposedContext:
    """A context that opens others in `_open`, and closes them in reverse order, even if one of them fails to open."""

    async def _open(self, exits: AsyncExitStack) -> None:
        """Enter each context, or push each callback for the end, on `exits`."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            await self._open(exits)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.__aexit__(kind, error, trace)


class BackgroundTasks:
    """Tasks that are cancelled when the context closes; one that fails ends the block, with its error.

    Of several that fail at once, the first one's error is raised, from the group of all.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    def create_task(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = self._group.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for task in self._tasks:
            task.cancel()
        # The group is told of no error but a cancellation, as it would wrap that in an exception group.
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        try:
            await self._group.__aexit__(None if cancelled is None else type(cancelled), cancelled, None)
        except BaseExceptionGroup as group:
            failed: BaseException = group
            while isinstance(failed, BaseExceptionGroup):
                failed = failed.exceptions[0]
            raise failed from group


async def run_in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Return what a function returns on a thread of its own, which a process that ends does not wait for.

    A caller that is cancelled does not stop it.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # so that a cancelled wait does not cancel it

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the loop
            done.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
