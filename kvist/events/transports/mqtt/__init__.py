"""Streams through an MQTT 3.1.1 broker, at least once (QoS 1): docs/transports.md has the topics.

A publisher's last will, and the end of a clean one, is an announcement that it is gone.
"""

from kvist.errors import MissingExtraError

try:
    from kvist.events.transports.mqtt.stream import MqttPublication, MqttSubscription
except ModuleNotFoundError as error:
    raise MissingExtraError("mqtt", str(error.name)) from error

__all__ = ["MqttPublication", "MqttSubscription"]
