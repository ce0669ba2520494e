"""Keeping indexes in a folder: saved now and then, loaded at start, counted once their streams prove to continue.

docs/recovery.md has the rules. The file is a dump, and read twice: to check that it is whole, and then into the index.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvist.contexts import BackgroundTasks
from kvist.errors import MalformedMessageError
from kvist.events.session import SourceState
from kvist.files import AtomicFile, in_thread, set_aside
from kvist.indexer.dumps.dumper import Namespaced, write_dump
from kvist.indexer.dumps.format import DumpReader, NamespaceHead
from kvist.indexer.dumps.takeover import Destination, Takeover
from kvist.indexer.source import Source

_logger = logging.getLogger(__name__)

MAX_WAIT_S = 300.0
"""How long a loaded stream waits to be followed again."""
LAST_SAVE_TIMEOUT_S = 20.0
"""How long the last save of a service that stops may take; otherwise the save before it stays."""
_WATCH_S = 0.25
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StateStatistics:
    """What became of the loaded streams, and how saving goes; None for what has not happened yet."""

    is_loaded: bool
    fates: Mapping[str, int]
    """How many streams were "loaded"; "proven" ones continued, "cleared" ones did not, or it could not be proven;
    "waiting" ones are not followed yet; "dropped" ones are no longer followed, or were not within `MAX_WAIT_S`."""
    num_saves: int
    num_failures: int
    failure: str | None
    """Why the last save failed, if it did."""
    size_bytes: int | None
    age_s: float | None

    @property
    def is_proven(self) -> bool:
        """Return whether the fate of every loaded stream is known."""
        num_settled = sum(self.fates[fate] for fate in ("proven", "cleared", "dropped"))
        return self.is_loaded and num_settled == self.fates["loaded"]

    def described(self) -> dict[str, object]:
        """Return the statistics as the health page has them."""
        return {
            "is_proven": self.is_proven,
            "streams": self.fates,
            "saves": self.num_saves,
            "save_failures": self.num_failures,
            "last_save_failure": self.failure,
            "last_save_age_s": None if self.age_s is None else round(self.age_s, 3),
            "bytes": self.size_bytes,
        }

    def metrics(self) -> Iterator[Metric]:
        text = "Streams loaded from disk, by outcome"
        streams = GaugeMetricFamily("kvist_state_streams", text, labels=["fate"])
        for fate, number in self.fates.items():
            streams.add_metric([fate], number)
        yield streams
        yield CounterMetricFamily("kvist_state_saves", "Times that the index was saved", self.num_saves)
        yield CounterMetricFamily("kvist_state_save_failures", "Saves that failed", self.num_failures)
        if self.age_s is not None:
            yield GaugeMetricFamily("kvist_state_age_seconds", "Time since the last save", self.age_s)
        if self.size_bytes is not None:
            yield GaugeMetricFamily("kvist_state_bytes", "Size of the last save", self.size_bytes)


class StateKeeper:
    """Keeps indexes in a folder, which no other process may use meanwhile; a failing disk stops nothing."""

    def __init__(
        self,
        folder: Path,
        name: str,
        interval_s: float,
        indexes: Callable[[], Iterable[Namespaced]],
        now_s: Callable[[], float],
        dump_lock: asyncio.Lock | None = None,
    ) -> None:
        """Keep the indexes that `indexes` returns in the file `name`.state; save them every `interval_s` if changed.

        Others who dump the same indexes hold the `dump_lock` as well.
        """
        self._path = folder / f"{name}.state"
        self._interval_s = interval_s
        self._indexes = indexes
        self._dump_lock = asyncio.Lock() if dump_lock is None else dump_lock
        self._now_s = now_s
        self._tasks: list[asyncio.Task[None]] = []
        self._unproven: list[Source] = []
        self._fates = {"loaded": 0, "proven": 0, "cleared": 0, "dropped": 0}
        self._num_saves = self._num_failures = 0
        self._failure: str | None = None
        self._size_bytes: int | None = None
        self._saved_at_s: float | None = None
        self._saved: object = None
        self._saving = asyncio.Lock()

    async def load(
        self, destination: Destination, register: Callable[[NamespaceHead], Awaitable[None]] | None = None
    ) -> None:
        """Load the saved indexes, after awaiting `register` for each of them; call it before `start`.

        A damaged file is logged and set aside, and nothing of it loaded.
        """
        started_s = self._now_s()
        try:
            for head in await asyncio.to_thread(self._read_heads):
                if register is not None:
                    await register(head)
            takeover = Takeover(destination, str(self._path), is_old=True)
            async with aclosing(self._pieces()) as pieces:
                await takeover.read(pieces)
            self._unproven = [source for _, source in takeover.sources]
            self._fates["loaded"] = len(self._unproven)
        except FileNotFoundError:
            _logger.info("no saved state path=%s", self._path)
        except (MalformedMessageError, OSError) as error:
            set_aside(self._path, self._path.with_name(f"{self._path.name}.damaged"), error)
        else:
            seconds = self._now_s() - started_s
            _logger.info("state loaded path=%s streams=%d seconds=%.2f", self._path, self._fates["loaded"], seconds)
        self._saved = self._positions()

    def start(self, tasks: BackgroundTasks) -> None:
        """Start to save, and to watch the loaded streams, among a service's tasks."""
        self._tasks = [
            tasks.create_task(self._watch_loaded(), name="kvist-state-watch"),
            tasks.create_task(self._save_regularly(), name="kvist-state-save"),
        ]

    async def stop(self) -> None:
        """Save a last time if anything has changed, within `LAST_SAVE_TIMEOUT_S`; does nothing before `start`.

        Call it while the indexes are still fed.
        """
        is_loaded = bool(self._tasks)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if is_loaded:
            try:
                async with asyncio.timeout(LAST_SAVE_TIMEOUT_S):
                    await self.save()
            except TimeoutError:
                _logger.error("state not saved: no time left path=%s timeout_s=%g", self._path, LAST_SAVE_TIMEOUT_S)

    async def save(self) -> None:
        """Save if anything has changed; a failure is logged and counted, and the save before stays."""
        async with self._saving:
            positions = self._positions()
            if positions == self._saved:
                return
            try:
                self._size_bytes = await self._write()
            except OSError as error:
                self._num_failures += 1
                self._failure = str(error)
                _logger.error("state not saved: %s path=%s", error, self._path)
            else:
                self._num_saves += 1
                self._failure = None
                self._saved_at_s = self._now_s()
                self._saved = positions

    def statistics(self) -> StateStatistics:
        parked = [source for each in self._indexes() for source in each.indexer.parked]
        return StateStatistics(
            is_loaded=bool(self._tasks),
            fates={**self._fates, "waiting": len(parked)},
            num_saves=self._num_saves,
            num_failures=self._num_failures,
            failure=self._failure,
            size_bytes=self._size_bytes,
            age_s=None if self._saved_at_s is None else self._now_s() - self._saved_at_s,
        )

    def _read_heads(self) -> list[NamespaceHead]:
        """Return the heads of the file's namespaces; raises MalformedMessageError or OSError unless it is whole."""
        reader = DumpReader(str(self._path))
        heads = []
        with self._path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                heads += [frame for frame in reader.feed(piece) if isinstance(frame, NamespaceHead)]
        reader.close()
        return heads

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        with self._path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield piece

    async def _watch_loaded(self) -> None:
        """Record the fate of each loaded stream, and drop those that are not followed within `MAX_WAIT_S`."""
        give_up_s = self._now_s() + MAX_WAIT_S
        while self._unproven:
            await asyncio.sleep(_WATCH_S)
            indexers = [each.indexer for each in self._indexes()]
            if self._now_s() >= give_up_s:
                for indexer in indexers:
                    indexer.drop_parked()
            parked = {source for indexer in indexers for source in indexer.parked}
            followed = {source for indexer in indexers for source in indexer.sources}
            self._unproven = [each for each in self._unproven if each in parked or not self._is_settled(each, followed)]
        if self._fates["loaded"]:
            text = "state settled: streams went on, were cleared, or dropped proven=%d cleared=%d dropped=%d"
            _logger.info(text, *(self._fates[fate] for fate in ("proven", "cleared", "dropped")))

    def _is_settled(self, source: Source, followed: AbstractSet[Source]) -> bool:
        """Return whether the fate of a stream that no longer waits is known; if so, count it."""
        if source not in followed:
            self._fates["dropped"] += 1
        elif source.was_cleared:
            self._fates["cleared"] += 1
        elif SourceState.RESYNCING in source.states().values():
            return False
        else:
            self._fates["proven"] += 1
        return True

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    async def _write(self) -> int:
        file = AtomicFile(self._path)
        try:
            async with self._dump_lock:
                await write_dump(self._indexes(), partial(in_thread, file.write))
            await in_thread(file.commit)
        except BaseException:
            file.discard()
            raise
        return file.size_bytes

    def _positions(self) -> object:
        """Return a value that changes when a stream comes, goes, or is followed further."""
        return [
            (each.namespace, source.worker, source.url, source.positions)
            for each in self._indexes()
            for source in each.indexer.sources + each.indexer.parked
        ]
