"""One source: the stream of one worker at one endpoint, whose first message tells what it speaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvist.events import WorkerRank
from kvist.events.codec import is_canonical
from kvist.events.follow import Question
from kvist.events.session import NO_REPLAY, Session, SourceState
from kvist.events.transports import Endpoint, Message, Subscription
from kvist.indexer.canonical import CanonicalFollower
from kvist.indexer.engine import EngineFollower
from kvist.indexer.progress import CanonicalProgress, Progress
from kvist.indexer.statistics import SourceCounters, SourceStatistics
from kvist.indexer.target import Index


class Source:
    """Follows one endpoint for one worker. What is kept at the publisher is asked for as soon as it is connected."""

    def __init__(self, worker: str, url: str, block_size: int, index: Index, resyncing: set[WorkerRank]) -> None:
        """Parse the URL; raises InvalidValueError when it is wrong."""
        self.worker = worker
        self.url = url
        self.endpoint = Endpoint.parse(url)
        self.subscription: Subscription | None = None
        self.num_known_connects = 0
        self._resyncing = resyncing
        self._block_size = block_size
        self._index = index
        self._counters = SourceCounters()
        self._follower: CanonicalFollower | EngineFollower | None = None
        self._must_probe = False
        self._limits = NO_REPLAY if self.endpoint.replay_address is None else None

    def received_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        """Take live messages; the first decides what the source speaks, until others begin with a canonical one."""
        first = messages[0]
        if self._follower is None:
            self._follower = self._follower_for(first)
            self._follower.reconnected(now_s)
        elif isinstance(self._follower, EngineFollower) and is_canonical(first.payload):
            self._follower.clear()
            self._follower = self._follower_for(first)
        yield from self._follower.received_all(messages, now_s)

    def reconnected(self, now_s: float) -> None:
        """Take note that a peer connected."""
        if self._follower is None:
            self._must_probe = True
        else:
            self._follower.reconnected(now_s)

    def questions(self, now_s: float) -> list[Question]:
        """Return what to ask now."""
        if self._follower is not None:
            return self._follower.questions(now_s)
        return [Question(None, 0)] if self._must_probe else []

    def answered(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Take the answer; that to the first question may decide what the source speaks."""
        self._must_probe = False
        if self._follower is None:
            if not messages:
                return
            self._follower = self._follower_for(messages[0])
            if isinstance(self._follower, CanonicalFollower):
                # Of all ranks, each from its beginning: as if they came live.
                yield from self._follower.received_all(messages, now_s)
                return
        yield from self._follower.answered(question, messages, now_s)

    def progress(self) -> Progress | None:
        """Return how far the stream was followed, None if nothing of it can be trusted."""
        return None if self._follower is None else self._follower.progress()

    def resume(self, progress: Progress) -> None:
        """Go on from where another source was; to be called before anything else."""
        shared = (self._index, self._resyncing, self._counters)
        if isinstance(progress, CanonicalProgress):
            self._follower = CanonicalFollower(self.worker, self._block_size, *shared, self._limits)
            self._follower.resume(progress)

    def fail(self, reason: str) -> None:
        """Take note that the source cannot be followed at all."""
        self._counters.failure = reason

    def states(self) -> dict[int, SourceState]:
        """Return how far each rank's blocks in the index can be trusted."""
        return {} if self._follower is None else self._follower.states()

    def statistics(self, now_s: float) -> SourceStatistics:
        """Return the counters as they are now."""
        follower = self._follower
        sessions: tuple[Session[Any], ...] = ()
        if isinstance(follower, CanonicalFollower):
            sessions = tuple(follower.sessions.values())
        elif follower is not None:
            sessions = (follower.session,)
        num_malformed_frames = 0 if self.subscription is None else self.subscription.num_malformed
        return self._counters.frozen(self.worker, self.url, self.states(), sessions, num_malformed_frames, now_s)

    def _follower_for(self, message: Message) -> CanonicalFollower | EngineFollower:
        shared = (self._index, self._resyncing, self._counters)
        if is_canonical(message.payload):
            return CanonicalFollower(self.worker, self._block_size, *shared, self._limits)
        return EngineFollower(self.worker, self._block_size, self.endpoint.engine, *shared, self._limits)
