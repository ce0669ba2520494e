"""Streams for the state machine: endpoints whose process can be restarted, on a wire that can be told to fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvist.events import Tier
from kvist.events.engine_events import FULL as FULL_WINDOW
from kvist.events.engine_events import UNKNOWN
from kvist.events.transports import Endpoint, Message
from kvist.events.transports.zmq import ZmqPublication
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.publisher.sidecar import Sidecar

FULL = 1 << 62
LIMITS = PublisherLimits(coalesce_s=0.001, heartbeat_s=0.1, close_timeout_s=0.01)


class StockStream:
    """One endpoint of a worker: an engine that knows nothing of Kvist, started anew now and then."""

    is_stock = True

    def __init__(self, start_vllm: Callable[..., Any], port: int, wire: Any, block_size: int, says_rank: bool) -> None:
        self.url, self.replay_url = f"tcp://127.0.0.1:{port}{wire.url_options}", f"tcp://127.0.0.1:{port + 1}"
        self.num_to_lose = 0
        self.port = port
        self._start = lambda: start_vllm(port)
        self._engine = self._start()
        self._wire = wire
        self.is_vllm = wire.engine == "vllm"
        self._block_size = block_size
        self._says_rank = says_rank
        self._pending: tuple[int, list[Any]] = (0, [])

    def stored(self, rank: int, *args: Any, **options: Any) -> None:
        self._add(rank, self._wire.stored(*args, **{"block_size": self._block_size, **options}))

    def removed(self, rank: int, engine_hashes: Sequence[int], tier: int, group: int | None) -> None:
        self._add(rank, self._wire.removed(engine_hashes, tier, group=group))

    def cleared(self, rank: int) -> None:
        self._add(rank, self._wire.cleared())

    def flush(self) -> None:
        rank, events = self._pending
        self._pending = (rank, [])
        if events:
            is_lost, self.num_to_lose = self.num_to_lose > 0, max(0, self.num_to_lose - 1)
            self._engine.publish(*events, rank=rank if self._says_rank else None, is_lost=is_lost)

    def resend(self, num_back: int) -> None:
        self._engine.resend(self._engine.next_sequence - num_back)

    def restart(self) -> None:
        self.close()
        self._pending = (0, [])
        self._engine = self._start()

    def close(self) -> None:
        self._engine.kill()

    def _add(self, rank: int, event: Any) -> None:
        if self._pending[0] != rank:
            self.flush()
        self._pending = (rank, [*self._pending[1], event])


class FaultyPublication(ZmqPublication):
    """Kvist's own sockets, on a wire that loses and repeats what it is told to."""

    num_to_lose = 0
    num_to_repeat = 0

    def send(self, message: Message) -> None:
        """Lose the message, or send it once or twice; heartbeats get through."""
        if b"heartbeat" in message.payload:
            super().send(message)
        elif self.num_to_lose:
            self.num_to_lose -= 1
        else:
            super().send(message)
            if self.num_to_repeat:
                self.num_to_repeat -= 1
                super().send(message)


class KvistStream:
    """One endpoint of a worker whose engine carries Kvist's publisher, which checks what it is told."""

    is_stock = False
    is_vllm = False

    def __init__(self, port: int, block_size: int) -> None:
        self.url, self.replay_url = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
        self.port = port
        self._block_size = block_size
        self.restart()

    @property
    def num_to_lose(self) -> int:
        return self._publication.num_to_lose

    @num_to_lose.setter
    def num_to_lose(self, number: int) -> None:
        self._publication.num_to_lose = number

    def stored(
        self,
        rank: int,
        engine_hashes: Sequence[int],
        token_ids: Sequence[int],
        parent: int | None = None,
        tier: int = 0,
        *,
        scope: Any,
        group: int | None,
        window: int,
    ) -> None:
        self._publisher.stored(
            engine_hashes,
            token_ids,
            parent_block_hash=parent,
            rank=rank,
            tier=Tier(tier),
            lora_name=scope.lora_name,
            cache_salt=scope.cache_salt,
            group=group,
            window=UNKNOWN if group is None else FULL_WINDOW if window == FULL else window,
        )

    def removed(self, rank: int, engine_hashes: Sequence[int], tier: int, group: int | None) -> None:
        self._publisher.removed(engine_hashes, rank=rank, tier=Tier(tier), group=group)

    def cleared(self, rank: int) -> None:
        self._publisher.cleared(rank=rank)

    def flush(self) -> None:
        """Nothing to do: the publisher has its own thread."""

    def resend(self, num_back: int) -> None:
        self._publication.num_to_repeat = num_back

    def restart(self) -> None:
        if hasattr(self, "_publisher"):
            self._publisher.close()
        self._publication = FaultyPublication(Endpoint.parse(self.url))
        self._publisher = KvEventPublisher(self._publication, worker="w", block_size=self._block_size, limits=LIMITS)

    def close(self) -> None:
        self._publisher.close()


class SidecarStream:
    """A stock endpoint behind a sidecar, either of which may end alone; the sidecar keeps its state in a folder."""

    def __init__(self, engine: StockStream, port: int, block_size: int, state_dir: Path) -> None:
        self.url, self.replay_url = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
        self.engine = engine
        options: dict[str, Any] = {"to": self.url, "worker": "w", "block_size": block_size, "has_all_groups": True}
        self._new_sidecar = lambda: Sidecar([Endpoint.parse(engine.url)], limits=LIMITS, state_dir=state_dir, **options)
        self._start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def num_to_lose(self) -> int:
        return self.engine.num_to_lose

    @num_to_lose.setter
    def num_to_lose(self, number: int) -> None:
        self.engine.num_to_lose = number

    def restart_sidecar(self) -> None:
        self._stop()
        self._start()

    def close(self) -> None:
        self._stop()
        self.engine.close()

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._sidecar = self._new_sidecar()
        self._running = self._loop.create_task(self._sidecar.run())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._running)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _stop(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._running.cancel)
        self._thread.join()
        self._sidecar.close()


@pytest.fixture
def make_sidecar_stream(
    make_stock_stream: Callable[..., StockStream],
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., SidecarStream]:
    """Return a function of the block size and the wire's number."""
    monkeypatch.setattr("kvist.publisher.sidecar.SAVE_INTERVAL_S", 0.05)

    def make(block_size: int, wire: int) -> SidecarStream:
        port = free_port()
        return SidecarStream(make_stock_stream(block_size, wire, True), port, block_size, tmp_path / str(port))

    return make


@pytest.fixture
def make_stock_stream(
    start_vllm: Callable[..., Any], free_port: Callable[[], int], wires: Sequence[Any]
) -> Callable[..., StockStream]:
    """Return a function of the block size, the wire's number, whether batches say their rank, and maybe the port."""

    def make(block_size: int, wire: int, says_rank: bool, port: int | None = None) -> StockStream:
        return StockStream(start_vllm, port or free_port(), wires[wire], block_size, says_rank)

    return make


@pytest.fixture
def make_kvist_stream(free_port: Callable[[], int]) -> Callable[..., KvistStream]:
    """Return a function of the block size and maybe the port."""
    return lambda block_size, port=None: KvistStream(port or free_port(), block_size)
