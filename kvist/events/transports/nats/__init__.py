"""Streams over NATS: live events on core subjects, replays paged over subjects of their own, history in JetStream.

    kvist.MODEL.WORKER.RANK              live events, and what a JetStream stream keeps
    kvist-ask.MODEL.WORKER               questions for a replay
    kvist-answer.MODEL.WORKER.QUESTION   an answer, one question's

`link` keeps a connection, `publication` and `subscription` are the two ends, `history` reads and sets up streams.
"""

from __future__ import annotations

from kvist.errors import MissingExtraError

try:
    import nats  # noqa: F401
    import nkeys  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("nats", str(error.name)) from error

from kvist.events.transports.nats.publication import NatsPublication
from kvist.events.transports.nats.subscription import NatsSubscription

__all__ = ["NatsPublication", "NatsSubscription"]
