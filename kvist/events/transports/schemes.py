"""Which transport an endpoint's URL chooses; each is imported when it is first opened.

tcp:// and ipc://      ZeroMQ; what subscribes to a plain host and port reads the TCP stream itself (`zmtp`)
nats://  mqtt://       the brokers
memory://              one process
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.events.transports.base import Publication, Subscription
from kvist.events.transports.broker import BrokerUrl, is_broker_url
from kvist.events.transports.endpoint import Endpoint

if TYPE_CHECKING:
    from kvist.events.transports.zmtp import Splitter


def open_publication(url: str, worker: str | None = None) -> Publication:
    """Bind a publication at the URL; raises InvalidValueError when the URL is wrong or its address is taken.

    A broker's URL names the worker, or leaves that to `worker`.
    """
    if is_broker_url(url):
        return _open_broker_publication(BrokerUrl.parse(url).with_worker(worker))
    endpoint = Endpoint.parse(url)
    if endpoint.scheme == "memory":
        from kvist.events.transports.memory import MemoryPublication

        return MemoryPublication(endpoint)
    from kvist.events.transports.zmq import ZmqPublication

    return ZmqPublication(endpoint)


def open_subscription(endpoint: Endpoint, splitter: Splitter | None = None) -> Subscription:
    """Return a subscription to all topics of the endpoint; entering it connects.

    `splitter` finds messages in a stream over TCP, where that is read without ZeroMQ; by default one in plain Python.
    """
    if endpoint.scheme == "memory":
        from kvist.events.transports.memory import MemorySubscription

        return MemorySubscription(endpoint)
    if endpoint.broker is not None:
        return _open_broker_subscription(endpoint.broker)
    if _is_plain_tcp(endpoint):
        from kvist.events.transports.zmtp import ZmtpSubscription, split

        return ZmtpSubscription(endpoint, splitter or split)
    from kvist.events.transports.zmq import ZmqSubscription

    return ZmqSubscription(endpoint)


def _open_broker_publication(url: BrokerUrl) -> Publication:
    if url.is_mqtt:
        from kvist.events.transports.mqtt import MqttPublication

        return MqttPublication(url)
    from kvist.events.transports.nats import NatsPublication

    return NatsPublication(url)


def _open_broker_subscription(url: BrokerUrl) -> Subscription:
    if url.is_mqtt:
        from kvist.events.transports.mqtt import MqttSubscription

        return MqttSubscription(url)
    from kvist.events.transports.nats import NatsSubscription

    return NatsSubscription(url)


def _is_plain_tcp(endpoint: Endpoint) -> bool:
    """Return whether to connect to a host and port, and nothing more: ZeroMQ knows more that an address can say."""
    host, _, port = endpoint.address.removeprefix("tcp://").rpartition(":")
    return endpoint.scheme == "tcp" and not endpoint.is_bound and port != "0" and host != "*" and ";" not in host
