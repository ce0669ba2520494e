"""An event loop in simulated time: nothing waits, everything happens in an order that a seed decides."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

START_S = 1_700_000_000.0


class _NoSockets(selectors.SelectSelector):
    """Finds no socket ready, and has time pass instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.loop.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in simulated time, in one thread; what is given to an executor is done on the spot."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _NoSockets()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, _: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(error)
        return done


class World:
    """Simulated time and seeded randomness for modules that take them from the standard library."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.wall_offset_s = 0.0
        """How far the clock of whoever starts now is off."""
        self._loop = loop
        self._rng = rng
        self._drift_s = 0.0
        self.time = SimpleNamespace(monotonic=loop.time, time=self._wall, sleep=lambda _: None)
        self.drifting_time = SimpleNamespace(monotonic=self._drifting)
        """Time that also passes while code runs, so that turns of the event loop end wherever they may."""
        self.random = SimpleNamespace(
            Random=lambda: random.Random(self._rng.getrandbits(32)), uniform=self._rng.uniform
        )

    def _wall(self) -> float:
        return START_S + self.wall_offset_s + self._loop.now_s

    def _drifting(self) -> float:
        self._drift_s += self._rng.random() * 1e-4
        return self._loop.now_s + self._drift_s


def run(main: Callable[[World], Coroutine[Any, Any, T]], seed: int, patches: Callable[[World], dict[str, Any]]) -> T:
    """Run a coroutine in a world of its own, with `patches` (dotted names and values) in force."""
    loop = VirtualLoop()
    world = World(loop, random.Random(seed))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        active = [mock.patch(name, value) for name, value in patches(world).items()]
        try:
            for patch in active:
                patch.start()
            return runner.run(main(world))
        finally:
            for patch in reversed(active):
                patch.stop()
