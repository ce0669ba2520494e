"""Transports behind one Protocol; `base` holds the delivery contract."""

from kvist.events.transports.base import Message, Publication, ReplaySource, Subscription

__all__ = ["Message", "Publication", "ReplaySource", "Subscription"]
