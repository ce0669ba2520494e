"""The engine for asyncio: a thread steps the core, and the event loop reads streams of its outputs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Self

from kvist.engine.core import EngineCore, EngineStatistics
from kvist.engine.request import RequestOutput, RequestTimes, SequenceInput
from kvist.errors import InvalidValueError, KvistError

logger = logging.getLogger(__name__)

Command = Callable[[], None]


class EngineOverloadedError(KvistError):
    """Too many sequences are open: the client may try another worker, or later."""

    def __init__(self, num_open: int, limit: int) -> None:
        super().__init__(f"the engine has {num_open} open sequences; at most {limit} are allowed")


class EngineStoppedError(KvistError):
    """The engine's thread has ended and computes nothing any more: the process must be restarted."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped")


class Generation:
    """The outputs of the sequences of one client's request. Leaving the context aborts unfinished sequences.

    An error that leaves it, as when the client has gone, also withdraws the prompts that are held for other workers.
    Outputs that arrive while nobody reads are merged, so that a slow reader has at most one output a sequence waiting.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[str, RequestTimes], None]) -> None:
        self.times = {request_id: RequestTimes() for request_id in request_ids}
        self._indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._pending: dict[int, RequestOutput] = {}
        self._arrived = asyncio.Event()
        self._abort = abort

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for request_id in tuple(self._open) if kind is None else self.times:
            self._abort(request_id, self.times[request_id])

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (index of the sequence, output) as outputs arrive, until the last output of every sequence."""
        while self._open or self._pending:
            await self._arrived.wait()
            self._arrived.clear()
            pending, self._pending = self._pending, {}
            for item in pending.items():
                yield item

    def put(self, output: RequestOutput) -> None:
        """Add an output, unless its sequence has ended."""
        if output.request_id not in self._open:
            return
        index = self._indices[output.request_id]
        earlier = self._pending.get(index)
        self._pending[index] = output if earlier is None else earlier + output
        if output.is_last:
            self._open.discard(output.request_id)
        self._arrived.set()


class AsyncEngine:
    """Runs an `EngineCore` in a thread of its own while the context is open.

    At most `max_num_open` sequences are open at once; `generate` refuses more. All methods except `submit` must be
    called on the event loop in which the context was entered. If the thread dies, every open sequence gets an error,
    and `is_alive` is False.
    """

    def __init__(self, core: EngineCore, max_num_open: int, close_timeout_s: float = 2.0) -> None:
        self._core = core
        self.limits, self.block_size = core.limits, core.kv_cache.block_size
        self.cache_size_tokens = core.kv_cache.cache_size_tokens
        self._max_num_open = max_num_open
        self._close_timeout_s = close_timeout_s
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvist-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._ids = itertools.count()
        self._generations: dict[str, Generation] = {}
        self._flushes: set[asyncio.Future[None]] = set()
        self._is_stopped = False
        self.num_refused = 0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await asyncio.to_thread(self._thread.join, self._close_timeout_s)

    def stop(self) -> None:
        """Stop the thread after its current step, and end every open sequence with an error."""
        self._fail_open()
        self._commands.put(lambda: None)  # wakes the thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_stopped

    def generate(self, inputs: Sequence[SequenceInput]) -> Generation:
        """Queue all sequences or none; raises InvalidValueError, EngineOverloadedError or EngineStoppedError."""
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
        """Raise EngineOverloadedError or EngineStoppedError if so many sequences cannot be opened now. O(1).

        Raises InvalidValueError if so many can never be opened.
        """
        if not self.is_alive:
            raise EngineStoppedError
        if num_sequences > self._max_num_open:
            raise InvalidValueError("prompt and n", num_sequences, f"at most {self._max_num_open} sequences")
        if len(self._generations) + num_sequences > self._max_num_open:
            self.num_refused += 1
            raise EngineOverloadedError(len(self._generations), self._max_num_open)

    async def flush_cache(self) -> None:
        """Remove all blocks that no request uses from the prefix cache. Raises EngineStoppedError."""
        if not self.is_alive:
            raise EngineStoppedError
        flushed: asyncio.Future[None] = self._loop.create_future()
        self._flushes.add(flushed)

        def flush() -> None:
            self._core.kv_cache.flush()
            self._loop.call_soon_threadsafe(self._end_flush, flushed)

        self._commands.put(flush)
        await flushed

    def submit(self, command: Command) -> None:
        """Queue a call for the engine's thread, which makes it between steps; returns at once, from any thread."""
        self._commands.put(command)

    def statistics(self) -> EngineStatistics:
        return self._core.statistics()

    def _run(self) -> None:
        """Run commands and steps until stopped; with nothing to compute, sleep until a command arrives."""
        try:
            while True:
                if not self._core.has_work:
                    self._commands.get()()
                while not self._commands.empty():
                    self._commands.get()()
                if self._is_stopped:
                    break
                outputs = self._core.step()
                if outputs and not self._is_stopped:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        except BaseException:
            logger.critical("engine thread died")
            if not self._is_stopped:
                self._loop.call_soon_threadsafe(self._fail_open)
            raise

    def _abort(self, request_id: str, times: RequestTimes) -> None:
        self._generations.pop(request_id, None)
        self._commands.put(partial(self._abort_in_core, request_id, times))

    def _abort_in_core(self, request_id: str, times: RequestTimes) -> None:
        """Abort a request; if its prompt is held for another worker, also after the request's end, withdraw it."""
        self._core.abort(request_id)
        if times.remote_request_id is not None:
            self._core.handoffs.withdraw(times.remote_request_id)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:  # aborted while the step ran
                continue
            generation.put(output)
            if output.is_last:
                del self._generations[output.request_id]

    def _end_flush(self, flushed: asyncio.Future[None]) -> None:
        self._flushes.discard(flushed)
        if not flushed.done():  # the caller may have been cancelled
            flushed.set_result(None)

    def _fail_open(self) -> None:
        """End every open sequence and flush with an error."""
        self._is_stopped = True
        for flushed in self._flushes:
            if not flushed.done():
                flushed.set_exception(EngineStoppedError())
        self._flushes.clear()
        for request_id, generation in self._generations.items():
            generation.put(RequestOutput(request_id, error="the engine has stopped"))
        self._generations.clear()
