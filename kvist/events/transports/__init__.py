"""Transports behind one Protocol; `base` holds the delivery contract, `endpoint` the URLs that choose a transport."""

from kvist.events.transports.base import Message, Publication, ReplaySource, Subscription
from kvist.events.transports.block import MessageBlock
from kvist.events.transports.endpoint import Endpoint, open_publication, open_subscription

__all__ = [
    "Endpoint",
    "Message",
    "MessageBlock",
    "Publication",
    "ReplaySource",
    "Subscription",
    "open_publication",
    "open_subscription",
]
