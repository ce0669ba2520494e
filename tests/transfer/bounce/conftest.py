"""Bounces between two agents of this process, of few fragments as of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvist.transfer.agents import PeerId, SharedMemoryAgent
from kvist.transfer.bounce import Bounce
from kvist.transfer.copier import TorchCopier

torch.set_num_threads(1)


@dataclass
class End:
    """One end: an agent, its pool, and its bounce."""

    agent: SharedMemoryAgent
    pool: npt.NDArray[np.uint8]
    bounce: Bounce

    @property
    def base(self) -> int:
        """Return the pool's address."""
        return int(self.pool.ctypes.data)

    def connect(self, other: End) -> PeerId:
        """Connect to the other end."""
        return self.agent.connect(other.agent.metadata())


@pytest.fixture
def new_end() -> Iterator[Callable[..., End]]:
    """Return a function that makes one end; bounces and agents are closed at the end."""
    ends: list[End] = []

    def make(
        name: str,
        *,
        pool_bytes: int = 1 << 16,
        region_bytes: int = 1 << 16,
        wrap: Callable[[Any], Any] = lambda copier: copier,
    ) -> End:
        agent = SharedMemoryAgent(name)
        pool = agent.allocate(pool_bytes)
        agent.register(pool.ctypes.data, pool_bytes)
        bounce = Bounce(
            agent,
            wrap(TorchCopier([torch.from_numpy(pool)])),
            lambda: torch.from_numpy(agent.allocate(region_bytes)),
        )
        ends.append(End(agent, pool, bounce))
        return ends[-1]

    yield make
    for end in ends:
        end.bounce.close()
        end.agent.close()
