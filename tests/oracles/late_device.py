"""Devices that compute what was launched later, as GPUs do: in order, and at the latest when somebody waits for it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from kvist.engine import core as engine_core
from kvist.engine.batch import HostBatch
from kvist.engine.request import Request
from kvist.engine.runner import Runner
from kvist.engine.sampler import draw
from kvist.engine.scheduler import ScheduledRequest
from kvist.kvcache import ABSENT
from kvist.transfer.commands import Command, Computed, Fetch


@dataclass(eq=False)
class LateDevice:
    """What was launched and is not computed yet, and the steps among that."""

    queue: deque[Callable[[], object]] = field(default_factory=deque)
    steps: deque[HostBatch] = field(default_factory=deque)

    def compute(self, number: int | None = None) -> None:
        """Compute so much of what was launched first, or all of it."""
        for _ in range(len(self.queue) if number is None else min(number, len(self.queue))):
            self.queue.popleft()()

    def check(self, command: Command, block_size: int) -> None:
        """Assert that no step that is not computed yet uses a command's blocks: other workers may, from now on."""
        if not isinstance(command, Computed | Fetch):
            return
        for step in self.steps:
            for group, block_ids in zip(step.groups, command.block_ids_per_group, strict=True):
                pages = [group.slot_mapping[group.slot_mapping != ABSENT] // block_size]
                if isinstance(command, Fetch):
                    pages.append(group.block_tables[group.block_tables != ABSENT])
                used = {page // len(group.block_tables) for each in pages for page in each.tolist()}
                assert used.isdisjoint(block_ids), "a step that is not computed yet uses the blocks"


class LateTensor:
    """A tensor in a device's memory, or on its way to the host's; views share what is computed of it."""

    is_cuda = True

    def __init__(
        self, device: LateDevice, rows: range, compute: Callable[[], Any], *, is_on_host: bool = False
    ) -> None:
        self.device, self.rows, self._is_on_host = device, rows, is_on_host
        self._computed: list[torch.Tensor] = []
        device.queue.append(lambda: self._computed.append(compute()))

    @property
    def value(self) -> torch.Tensor:
        assert self._computed, "read before it is there"
        return self._computed[0][self.rows.start : self.rows.stop]

    def __getitem__(self, rows: slice) -> LateTensor:
        view = copy(self)
        view.rows = self.rows[rows]
        return view

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.rows:
            if not self._computed:
                self.device.compute()
            yield from self.value

    def to(self, place: str, *, non_blocking: bool) -> LateTensor:
        assert (place, non_blocking) == ("cpu", True)
        return LateTensor(self.device, self.rows, lambda: self.value, is_on_host=True)

    def tolist(self) -> list[int]:
        if not self.rows:
            return []
        if not self._is_on_host:
            self.device.compute()
        token_ids: list[int] = self.value.tolist()
        return token_ids


class LateEvent:
    """A place in a device's queue."""

    def record(self, device: LateDevice) -> None:
        self._device, self._is_reached = device, False
        device.queue.append(lambda: setattr(self, "_is_reached", True))

    def synchronize(self) -> None:
        while not self._is_reached:
            self._device.compute(1)


@contextmanager
def late_devices() -> Iterator[Callable[[Runner], LateDevice]]:
    """Give every runner a late device while the context is open; yield what returns a runner's."""
    devices: defaultdict[Runner, LateDevice] = defaultdict(LateDevice)

    def late_forward(runner: Runner, scheduled: Sequence[ScheduledRequest], last: Any = None) -> LateTensor:
        requests, drawn = ((), None) if last is None else last
        device, batch = devices[runner], runner.build_batch(scheduled, requests)

        def compute() -> torch.Tensor:
            device.steps.popleft()
            return runner.compute(batch, None if drawn is None else drawn.value)

        device.steps.append(batch)
        return LateTensor(device, range(len(batch.logit_rows)), compute)

    def late_draw(logits: LateTensor, requests: Sequence[Request]) -> LateTensor:
        return LateTensor(logits.device, logits.rows, lambda: draw(logits.value, requests))

    def synchronize(runner: Runner) -> None:
        devices[runner].compute()

    patches: list[tuple[object, str, object]] = [
        (Runner, "can_wait", True),
        (Runner, "forward", late_forward),
        (Runner, "synchronize", synchronize),
        (engine_core, "draw", late_draw),
        (torch.cuda, "Event", LateEvent),
        (torch.cuda, "current_stream", lambda device: device),
    ]
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(patch.object(target, name, value))
        yield devices.__getitem__
