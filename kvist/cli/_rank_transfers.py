"""How each rank of `kvist serve` makes its KV memory reachable for other workers; rank 0 decides for all ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from kvist.errors import InvalidValueError
from kvist.transfer.agents import SharedMemoryAgent, TransferAgent
from kvist.transfer.bounce import Bounce, region_bytes
from kvist.transfer.commands import Report, TransferLimits
from kvist.transfer.copier import TorchCopier
from kvist.transfer.heads import Part
from kvist.transfer.messages import PoolPlace, group_shapes
from kvist.transfer.ranks import RankedTransfers
from kvist.transfer.service import FollowerLink, KvTransferService, make_hello

if TYPE_CHECKING:
    from kvist.cli.serve import ServeConfig
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.loading import LoadedEngine
    from kvist.kvcache import WindowPlan
    from kvist.kvcache.tensors import KvTensors

logger = logging.getLogger(__name__)

_CLOSE_S = 0.5


class RankTransfers:
    """One rank's agent, the memory that it gives the engine, and the service that others ask: a `MemoryServer`."""

    def __init__(self, config: ServeConfig, endpoint: str, worker: str, rank: int) -> None:
        """Create the rank's agent, named after `worker`, which must be unique; rank 0 will listen at `endpoint`.

        Raises InvalidValueError or MissingExtraError where this kind of agent cannot be created.
        """
        self._config = config
        self._endpoint = endpoint
        self._part = Part(rank, config.tensor_parallel_size)
        self._agent = _make_agent(config, f"{worker}/{rank}")

    @property
    def allocate(self) -> Callable[[int], torch.Tensor] | None:
        """Return the function that allocates the engine's KV memory; None if torch does."""
        return None if self._config.kv_transfer_agent == "nixl" else self._allocate

    def open_transfers(self, loaded: LoadedEngine, engine: AsyncEngine) -> RankedTransfers:
        """Return all ranks' transfers, attached to the engine but not started; for rank 0. Raises RankLostError."""
        bounce_bytes = self._bounce_bytes(loaded.tensors.device)
        open_service = partial(self._open_service, loaded.whole_plan, loaded.tensors, bounce_bytes)
        channels = [] if loaded.followers is None else loaded.followers.side_channels
        try:
            for channel in channels:
                channel.send(bounce_bytes)
            transfers = RankedTransfers(open_service, channels, loaded.core.on_report, engine.submit)
        except (EOFError, ConnectionError) as error:
            assert loaded.followers is not None
            raise loaded.followers.fail("could not open the transfers of all ranks") from error
        endpoints, agent = ",".join(transfers.endpoints), self._config.kv_transfer_agent
        logger.info("kv transfers open endpoints=%s agent=%s bounce_mib=%d", endpoints, agent, bounce_bytes >> 20)
        is_fallback_allowed, tokens_per_s = self._config.kv_transfer_fallback, self._config.kv_transfer_tokens_per_s
        loaded.core.handoffs.attach(
            transfers.command, is_fallback_allowed=is_fallback_allowed, tokens_per_s=tokens_per_s
        )
        return transfers

    def close(self) -> None:
        """Close the agent; for an engine that could not be loaded, as open transfers close their own."""
        self._agent.close()

    @contextmanager
    def serve(self, whole_plan: WindowPlan, tensors: KvTensors, channel: Connection[Any, Any]) -> Iterator[None]:
        """Serve transfers as a follower, which gets its bounce regions' size and then commands from rank 0."""
        bounce_bytes: int = channel.recv()
        link = FollowerLink(channel)
        service = self._open_service(whole_plan, tensors, bounce_bytes, link.report, link)
        channel.send(service.endpoint)
        service.start()
        try:
            yield
        finally:
            service.close(_CLOSE_S)

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        """Return memory of the agent; its pages are allocated on write, and a process that gets none is killed."""
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
        if size_bytes > host_bytes:
            raise RuntimeError(f"the host has {host_bytes >> 20} MiB of memory")
        return torch.from_numpy(self._agent.allocate(size_bytes))

    def _open_bounce(self, tensors: KvTensors, size_bytes: int) -> Bounce | None:
        if not size_bytes:
            return None

        def allocate() -> torch.Tensor:
            if tensors.device.type == "cuda":
                return torch.zeros(size_bytes, dtype=torch.uint8, device=tensors.device)
            return torch.from_numpy(self._agent.allocate(size_bytes))

        return Bounce(self._agent, TorchCopier(tensors.pools), allocate)

    def _open_service(
        self,
        whole_plan: WindowPlan,
        tensors: KvTensors,
        bounce_bytes: int,
        report: Callable[[Report], None],
        link: FollowerLink | None = None,
    ) -> KvTransferService:
        """Register the tensors, and return the service, bound but not started; only rank 0 has the configured port."""
        config, pools = self._config, []
        bounce = self._open_bounce(tensors, bounce_bytes)
        for pool in tensors.pools:
            self._agent.register(pool.data_ptr(), pool.nbytes, pool.device.index if pool.is_cuda else None)
            pools.append(PoolPlace(pool.data_ptr(), pool[0].nbytes, len(pool)))
        groups, size = group_shapes(whole_plan), config.block_size
        hello = make_hello(config.names[0], size, groups, tuple(pools), self._agent, self._part)
        timeout_s = config.kv_transfer_timeout
        limits = TransferLimits(transfer_timeout_s=timeout_s, hold_timeout_s=2 * timeout_s)
        host, _, port = self._endpoint.rpartition(":")
        endpoint = f"{host}:*" if self._part.rank or int(port) == 0 else self._endpoint
        return KvTransferService(endpoint, self._agent, hello, report, limits, bounce, link)

    def _bounce_bytes(self, device: torch.device) -> int:
        """Return the size of each rank's two regions, 0 for none: as configured, or as large as memory allows."""
        size_mib = self._config.kv_transfer_bounce_mib
        if not size_mib:
            return 0
        if device.type == "cuda":  # each rank has its own
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE") // self._part.num_ranks
        size_bytes = region_bytes(size_mib, free)
        if not size_bytes:
            expected = f"two regions of 32 MiB or more in half of the {free // 2**20} MiB that are free for each rank"
            raise InvalidValueError("kv_transfer_bounce_mib", size_mib, expected)
        return size_bytes


def _make_agent(config: ServeConfig, name: str) -> TransferAgent:
    if config.kv_transfer_agent == "nixl":
        from kvist.transfer.agents.nixl import NixlAgent, parse_num_threads

        num_threads = parse_num_threads(os.environ.get("KVIST_NIXL_THREADS"))
        return NixlAgent(name, write_timeout_s=config.kv_transfer_timeout, num_threads=num_threads)
    return SharedMemoryAgent(name, write_timeout_s=config.kv_transfer_timeout)
