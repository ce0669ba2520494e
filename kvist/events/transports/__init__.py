"""Transports behind one Protocol; `base` holds the delivery contract, `schemes` what a URL opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.events.transports.base import Message, Publication, ReplayRequest, ReplaySource, Subscription
from kvist.events.transports.broker import public_url, redacted
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.schemes import open_publication, open_subscription

if TYPE_CHECKING:
    from kvist.events.transports.block import MessageBlock

__all__ = [
    "Endpoint",
    "Message",
    "MessageBlock",
    "Publication",
    "ReplayRequest",
    "ReplaySource",
    "Subscription",
    "open_publication",
    "open_subscription",
    "public_url",
    "redacted",
]


def __getattr__(name: str) -> object:
    """Import what needs numpy only for who asks for it: configurations name endpoints, and nothing else here."""
    if name != "MessageBlock":
        raise AttributeError(name)
    from kvist.events.transports.block import MessageBlock

    return MessageBlock
