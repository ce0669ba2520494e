"""A publication that loses, repeats, delays and reorders what it is given, before a real transport carries the rest."""

from __future__ import annotations

import random
from collections import Counter

from kvist.events.transports import Message, Publication
from kvist.events.transports.base import ReplaySource


class LossyPublication:
    """Stands between a publisher and a transport. `rate` is the part of messages that something happens to."""

    def __init__(self, inner: Publication, rng: random.Random, rate: float) -> None:
        self.faults: Counter[str] = Counter()
        self.rate = rate
        self._inner = inner
        self._rng = rng
        self._late: list[Message] = []

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    def serve_replay(self, source: ReplaySource) -> None:
        self._inner.serve_replay(source)

    def send(self, message: Message) -> None:
        fate = self._rng.choice(("dropped", "duplicated", "delayed")) if self._rng.random() < self.rate else ""
        if not fate:
            self._inner.send(message)
        elif fate == "duplicated":
            self._inner.send(message)
            self._late.append(message)
        elif fate == "delayed":
            self._late.append(message)
        if fate:
            self.faults[fate] += 1
        while self._late and (len(self._late) > 3 or self._rng.random() < 0.3):
            self._inner.send(self._late.pop(self._rng.randrange(len(self._late))))

    def close(self, timeout_s: float = 5.0) -> None:
        self._inner.close(timeout_s)
