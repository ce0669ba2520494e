"""Streams over NATS: live events on core subjects, replays paged over subjects of their own, history in JetStream.

docs/transports.md has the subjects. `link` keeps a connection, `stream` has the two ends, `history` reads and sets up
streams.
"""

from __future__ import annotations

from kvist.errors import MissingExtraError

try:
    import nats  # noqa: F401
    import nkeys  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("nats", str(error.name)) from error

from kvist.events.transports.nats.stream import NatsPublication, NatsSubscription

__all__ = ["NatsPublication", "NatsSubscription"]
