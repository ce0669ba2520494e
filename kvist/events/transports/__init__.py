"""Transports behind one Protocol; `base` holds the delivery contract.

A URL (`endpoint`) chooses one, which is imported when it is first opened: ZeroMQ for tcp:// and ipc://, where
subscribers do without libzmq (`zmtp`), the brokers of nats:// and mqtt://, and memory:// within a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.events.transports.base import Message, Publication, ReplayRequest, ReplaySource, Subscription
from kvist.events.transports.broker import BrokerUrl, is_broker_url, public_url, redacted
from kvist.events.transports.endpoint import Endpoint

if TYPE_CHECKING:
    from kvist.events.transports.zmtp import Reads, Splitter

__all__ = [
    "Endpoint",
    "Message",
    "Publication",
    "ReplayRequest",
    "ReplaySource",
    "Subscription",
    "open_publication",
    "open_subscription",
    "public_url",
    "redacted",
]


def open_publication(url: str, worker: str | None = None) -> Publication:
    """Open a publication of `worker`, which a broker's URL may name instead; raises InvalidValueError for a bad URL."""
    if is_broker_url(url):
        broker = BrokerUrl.parse(url).with_worker(worker)
        if broker.is_mqtt:
            from kvist.events.transports.mqtt import MqttPublication

            return MqttPublication(broker)
        from kvist.events.transports.nats import NatsPublication

        return NatsPublication(broker)
    endpoint = Endpoint.parse(url)
    if endpoint.scheme == "memory":
        from kvist.events.transports.memory import MemoryPublication

        return MemoryPublication(endpoint)
    from kvist.events.transports.zmq import ZmqPublication

    return ZmqPublication(endpoint)


def open_subscription(endpoint: Endpoint, splitter: Splitter | None = None, reads: Reads | None = None) -> Subscription:
    """Return a subscription to all topics; entering it connects.

    ZeroMQ's streams are read faster with a `splitter`, and several of a process with `reads` that they share.
    """
    if endpoint.scheme == "memory":
        from kvist.events.transports.memory import MemorySubscription

        return MemorySubscription(endpoint)
    if endpoint.broker is not None:
        if endpoint.broker.is_mqtt:
            from kvist.events.transports.mqtt import MqttSubscription

            return MqttSubscription(endpoint.broker)
        from kvist.events.transports.nats import NatsSubscription

        return NatsSubscription(endpoint.broker)
    from kvist.events.transports.zmtp import ZmtpSubscription

    return ZmtpSubscription(endpoint, splitter, reads)
