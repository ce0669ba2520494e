"""The worker of a simulated fleet whose engine knows nothing of us: a sidecar without a state publishes for it."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

from fault_harness.publisher import SteppedPublisher
from fault_harness.virtual import World
from fault_harness.wire import Link, Network, WirePublication
from fault_harness.workers import Account, StockProcess, Worker
from kvist.events.follow import Turns, follow
from kvist.events.transports import Endpoint
from kvist.publisher.sidecar import SidecarFeed


class VirtualSidecar:
    """What `Sidecar` is, but for its threads and its state: follows the engine, and publishes once that has spoken."""

    def __init__(self, worker: SidecarWorker, network: Network, endpoint: Endpoint) -> None:
        self.publisher = worker.new_publisher()
        self._network = network
        self._feed = SidecarFeed(endpoint, self.publisher)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    @property
    def next_sequence(self) -> int:
        """Return the number of the engine's next message, as far as it was followed."""
        return self._feed.feed.session.expected_sequence

    def kill(self) -> None:
        """End at once."""
        self._following.cancel()
        self.publisher.kill()

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(asyncio.CancelledError):
            async with self._network.open_subscription(self._feed.endpoint) as subscription:
                options: dict[str, Any] = {"clock": loop.time, "turns": Turns(), "replay_gate": asyncio.Semaphore()}
                await follow(subscription, self._feed, **options)


class SidecarWorker(Worker):
    """An engine and its sidecar, each of which may end alone; what the next sidecar knows, the engine must tell it."""

    tells_groups_first = False
    has_copies = True

    def __init__(
        self, name: str, link: Link, world: World, rng: random.Random, settings: dict[str, Any], network: Network
    ) -> None:
        super().__init__(name, link, world, rng, settings)
        suffix = "?replay_port=none" if settings["num_kept"] == 0 else ""
        self._endpoint = Endpoint.parse(f"tcp://{name}-engine:5557{suffix}")
        self._network = network
        self._process: StockProcess | None = None
        self._sidecar: VirtualSidecar | None = None

    @property
    def has_snapshots(self) -> bool:  # type: ignore[override]
        return self._settings["num_kept"] is None

    def start(self, *, clock_offset_s: float = 0.0) -> None:
        self._start_engine()
        self._world.wall_offset_s = clock_offset_s
        self._start_sidecar()
        self._world.wall_offset_s = 0.0

    def kill(self) -> None:
        super().kill()
        if self._process is not None and self._sidecar is not None:
            self._process.kill()
            self._sidecar.kill()
        self._process = self._sidecar = None

    def live(self, num_steps: int) -> None:
        """Have the engine do something, unless it or its sidecar is started anew instead."""
        if self._process is None or self._sidecar is None:
            return
        fate = self._rng.random()
        if fate < 0.05:
            self.link.faults["sidecar killed"] += 1
            self._sidecar.kill()
            self._start_sidecar()
        if fate < 0.02 or fate > 0.98:
            self.link.faults["engine restarted behind its sidecar"] += 1
            super().kill()
            self._process.kill()
            self._start_engine()
        else:
            super().live(num_steps)
            self._process.step(self.engines)

    def is_followed_to(self, position: tuple[int, int] | None) -> bool:
        assert self._process is not None
        assert self._sidecar is not None
        return position is not None and self._sidecar.next_sequence == self._process.next_sequence

    def is_of_now(self, position: tuple[int, int] | None) -> bool:
        assert self._sidecar is not None
        return position is None or position[0] == self._sidecar.publisher.epoch

    def speak(self) -> None:
        assert self._process is not None
        before = self._process.next_sequence
        while self._process.next_sequence == before:
            Worker.live(self, 3)
            self._process.step(self.engines)

    def new_publisher(self) -> SteppedPublisher:
        """Return the publisher of a sidecar, of whose batches account is kept."""
        options: dict[str, Any] = {"worker": "any", "block_size": None, "num_ranks": 0, "counts_copies": True}
        publisher = SteppedPublisher(WirePublication(self.link), limits=self._settings["limits"], **options)
        publisher.noted = self._note
        return publisher

    def _start_engine(self) -> None:
        link = self._network.link(self._endpoint.address)
        link.speaks_engine = True
        self._process = StockProcess(link, self._world, self._settings["num_kept"], Account(), 0)
        self.engines = self._new_engines(self._process.report)

    def _start_sidecar(self) -> None:
        self._sidecar = VirtualSidecar(self, self._network, self._endpoint)

    def _note(self, publisher: SteppedPublisher) -> None:
        for rank, stream in publisher.streams.items():
            digest = stream.residency.num_blocks, stream.residency.digest
            self.account.note(rank, publisher.epoch, stream.next_sequence, None, digest)
