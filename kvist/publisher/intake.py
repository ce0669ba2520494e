"""Taking from an engine no more than memory can hold: what is left with it is lost later than what is dropped here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvist.events.transports import Message, ReplayRequest, Subscription
from kvist.events.transports.base import Direct

LOOK_S = 0.005
"""How often it is looked whether there is room again."""


class BoundedSubscription:
    """A subscription that hands out messages only while there is room for them.

    What is not taken stays with the transport, and then with the engine, up to its high-water mark.
    """

    def __init__(self, subscription: Subscription, has_room: Callable[[], bool]) -> None:
        """Bound what `subscription`, which the caller enters, hands out; `has_room` may be true beyond the bound."""
        self._subscription = subscription
        self._has_room = has_room

    @property
    def num_connects(self) -> int:
        """As the subscription's."""
        return self._subscription.num_connects

    @property
    def num_malformed(self) -> int:
        """As the subscription's."""
        return self._subscription.num_malformed

    @property
    def is_peer_gone(self) -> bool:
        """As the subscription's."""
        return self._subscription.is_peer_gone

    @property
    def is_caught_up(self) -> bool:
        """As the subscription's."""
        return self._subscription.is_caught_up

    @property
    def problem(self) -> str | None:
        """As the subscription's."""
        return self._subscription.problem

    async def receive(self) -> Sequence[Message]:
        """Wait for room, then for messages."""
        while not self._has_room():  # noqa: ASYNC110 - who makes room knows nothing of this loop
            await asyncio.sleep(LOOK_S)
        return await self._subscription.receive()

    def take_with(self, take: Callable[[Sequence[Message]], bool] | None) -> None:
        """Have messages taken where they arrive, until there is no room for more."""
        if isinstance(self._subscription, Direct):
            self._subscription.take_with(None if take is None else lambda messages: take(messages) and self._has_room())

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """As the subscription's."""
        return await self._subscription.replay(request, timeout_s)

    async def __aenter__(self) -> Self:
        """Return itself: the subscription is entered already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""
