"""The engine for asyncio: one thread steps the core, the event loop reads streams of outputs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from kvist.engine.core import EngineCore, EngineStatistics, ModelLimits
from kvist.engine.request import RequestOutput, RequestTimes, SequenceInput
from kvist.errors import InvalidValueError, KvistError

logger = logging.getLogger(__name__)

Command = Callable[[], None]
T = TypeVar("T")


class EngineOverloadedError(KvistError):
    """Too many sequences are open: try another worker, or later."""

    def __init__(self, num_open: int, limit: int) -> None:
        super().__init__(f"the engine has {num_open} open sequences; at most {limit} are allowed")
        self.num_open = num_open
        self.limit = limit


class EngineStoppedError(KvistError):
    """The engine's thread has ended, so nothing will be computed any more: restart the process."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped")


class Generation:
    """The outputs of the sequences that one client asked for together. Leave the context to drop what is unfinished.

    What arrives while nobody reads is merged, so that a slow reader holds one output a sequence, as long as the text.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[str], None]) -> None:
        self.times = {request_id: RequestTimes() for request_id in request_ids}
        self._indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._pending: dict[int, RequestOutput] = {}
        self._arrived = asyncio.Event()
        self._abort = abort

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (index of the sequence, what was added) as it comes, until every sequence had its last output."""
        while self._open or self._pending:
            await self._arrived.wait()
            self._arrived.clear()
            pending, self._pending = self._pending, {}
            for item in pending.items():
                yield item

    def put(self, output: RequestOutput) -> None:
        """Add an output; those of a sequence that is no longer open are dropped."""
        if output.request_id not in self._open:
            return
        index = self._indices[output.request_id]
        earlier = self._pending.get(index)
        self._pending[index] = output if earlier is None else earlier + output
        if output.is_last:
            self._open.discard(output.request_id)
        self._arrived.set()

    def cancel(self) -> None:
        """End every open sequence with the reason "abort"."""
        for request_id in tuple(self._open):
            self._abort(request_id)
            self.put(RequestOutput(request_id, finish_reason="abort"))


class AsyncEngine:
    """Runs an `EngineCore` in a thread of its own for as long as the context is open.

    At most `max_num_open` sequences are open at once: beyond that, `generate` refuses. All methods but `submit` belong
    to the event loop the context was entered in. If the thread dies, every open sequence gets an error, and `is_alive`
    says so.
    """

    def __init__(self, core: EngineCore, max_num_open: int, close_timeout_s: float = 2.0) -> None:
        self._core = core
        self._max_num_open = max_num_open
        self._close_timeout_s = close_timeout_s
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvist-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._ids = itertools.count()
        self._generations: dict[str, Generation] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._is_stopping = False
        self._has_ended = False
        self.num_refused = 0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await asyncio.to_thread(self._thread.join, self._close_timeout_s)

    def stop(self) -> None:
        """Compute no more steps, and end what is unfinished with an error; nothing new is taken."""
        self._commands.put(self._stop)
        self._end_open()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._has_ended

    @property
    def limits(self) -> ModelLimits:
        return self._core.limits

    def generate(self, inputs: Sequence[SequenceInput]) -> Generation:
        """Queue the sequences, or none: raises InvalidValueError, EngineOverloadedError or EngineStoppedError."""
        self.check_room(len(inputs))
        for each in inputs:
            self._core.check(each)
        request_ids = [str(next(self._ids)) for _ in inputs]
        generation = Generation(request_ids, self._abort)
        for request_id, each in zip(request_ids, inputs, strict=True):
            self._generations[request_id] = generation
            self._commands.put(partial(self._core.add_request, request_id, each, generation.times[request_id]))
        return generation

    def check_room(self, num_sequences: int) -> None:
        """Raise EngineOverloadedError, or EngineStoppedError, if so many sequences cannot be opened now. O(1).

        Raises InvalidValueError if they never can.
        """
        if not self.is_alive:
            raise EngineStoppedError
        if num_sequences > self._max_num_open:
            raise InvalidValueError("prompt and n", num_sequences, f"at most {self._max_num_open} sequences")
        if len(self._generations) + num_sequences > self._max_num_open:
            self.num_refused += 1
            raise EngineOverloadedError(len(self._generations), self._max_num_open)

    async def flush_cache(self) -> None:
        """Forget all cached blocks that no request is using; returns when it is done. Raises EngineStoppedError."""
        await self._ask(self._core.flush_cache)

    async def withdraw(self, remote_request_id: str) -> bool:
        """Hold a prompt for no other worker any more; False if it is not held. Raises EngineStoppedError."""
        return await self._ask(partial(self._core.withdraw, remote_request_id))

    def submit(self, command: Command) -> None:
        """Have a call made on the engine's thread, between steps; any thread may ask for it, and none waits."""
        self._commands.put(command)

    def statistics(self) -> EngineStatistics:
        return self._core.statistics()

    def _run(self) -> None:
        """Step while there is work, else sleep until a command comes."""
        try:
            while not self._is_stopping:
                self._run_commands(is_waiting=not self._core.has_work)
                outputs = self._core.step()
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        finally:
            if not self._is_stopping:
                logger.critical("engine thread died")
                self._loop.call_soon_threadsafe(self._end_open)

    def _run_commands(self, is_waiting: bool) -> None:
        if is_waiting:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _stop(self) -> None:
        self._is_stopping = True

    def _abort(self, request_id: str) -> None:
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            self._commands.put(partial(self._drop, request_id, generation.times[request_id]))

    def _drop(self, request_id: str, times: RequestTimes) -> None:
        """Abort a request; where it ended meanwhile with its blocks held for another worker, hold them no more."""
        self._core.abort(request_id)
        if times.remote_request_id is not None:
            self._core.withdraw(times.remote_request_id)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:  # aborted while the step ran
                continue
            generation.put(output)
            if output.is_last:
                del self._generations[output.request_id]

    async def _ask(self, call: Callable[[], T]) -> T:
        """Return what a call returns on the engine's thread, between steps; raises EngineStoppedError."""
        if not self.is_alive:
            raise EngineStoppedError
        answer: asyncio.Future[T] = self._loop.create_future()
        self._asked.add(answer)

        def run() -> None:
            self._loop.call_soon_threadsafe(self._answered, answer, call())

        self._commands.put(run)
        return await answer

    def _answered(self, answer: asyncio.Future[T], value: T) -> None:
        self._asked.discard(answer)
        if not answer.done():  # the caller may have been cancelled
            answer.set_result(value)

    def _end_open(self) -> None:
        self._has_ended = True
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(EngineStoppedError())
        self._asked.clear()
        for request_id, generation in self._generations.items():
            generation.put(RequestOutput(request_id, error="the engine has stopped"))
        self._generations.clear()
