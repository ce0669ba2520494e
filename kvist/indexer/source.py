"""One source: the stream of one worker at one endpoint, followed as what its messages show it to be."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvist.errors import MalformedMessageError
from kvist.events import EngineStored, WorkerRank
from kvist.events.codec import decode_batch, decode_snapshot_part, is_canonical, is_snapshot_part
from kvist.events.dialects import decode_block_events
from kvist.events.follow import Question
from kvist.events.session import NO_REPLAY, Session, SourceState
from kvist.events.transports import Endpoint, Message, ReplayRequest, Subscription, base, public_url
from kvist.events.transports.block import PAYLOAD_START, MessageBlock
from kvist.indexer.canonical import CanonicalFollower
from kvist.indexer.engine import EngineFollower
from kvist.indexer.progress import CanonicalProgress, Progress
from kvist.indexer.statistics import DEFAULT_NUM_RANKS, RankBound, SourceCounters, SourceStatistics

if TYPE_CHECKING:
    from kvist.radix import RadixIndex


_logger = logging.getLogger(__name__)

SILENCE_S = 10.0
"""After so long without a canonical batch an engine's batch is believed; publishers send a heartbeat every second."""

PROBE_S = 1.5
"""After a reconnect a publisher is heard within this time; otherwise an engine may be there, and is asked, too."""
MAX_PROBE_DOUBLINGS = 6
"""How often that wait doubles while nobody answers."""

_WHAT_FOLLOWS, _EVERYTHING = Question(base.WHAT_FOLLOWS), Question(base.EVERYTHING)
"""What makes a peer speak of which nobody knows whether it is an engine or a publisher, one after the other."""
_WHO_IS_THERE = Question(base.WHO_IS_THERE)
_SECOND_BYTE = 0xA6
"""What follows a canonical batch's first byte: the header of a string of six. An engine's batch has a number there."""


class Source:
    """Follows one endpoint for one worker, be it an engine's own stream or a canonical one.

    The first batch that decodes decides which, and a later one of the other form decides anew:

    - An engine's stream becomes canonical with any canonical batch.
    - A canonical stream becomes an engine's with a batch of the engine's, if that is the first of either form from a
      peer that has just connected, or nothing canonical came for `SILENCE_S`. A peer that says nothing for `PROBE_S` is
      asked in the words of engines: one that is idle holds blocks, too.

    What was held is cleared then, and the new form followed from that batch on. So a publisher may be put before an
    engine, or taken away, without a word to anyone; an endpoint where both speak stays canonical; and what only begins
    like a batch is malformed and decides nothing. What the publisher keeps is asked for as soon as one is connected.

    A rank that is not heard within `PROBE_S` of a connection, or falls silent on it, is asked about. A peer that
    answers, and does not name it, is another process than before and knows nothing of it: what was held is forgotten.
    """

    def __init__(
        self,
        worker: str,
        url: str,
        block_size: int | None,
        index: RadixIndex,
        resyncing: set[WorkerRank],
        rank: int = 0,
        num_ranks: int = DEFAULT_NUM_RANKS,
        *,
        has_full_reports: bool = False,
        on_block_size: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Parse the URL; raises InvalidValueError when it is wrong. `rank` is that of batches which name none.

        Without a block size, it is what the first message with blocks names, and `on_block_size` is told.
        Batches of others from `num_ranks` on are counted and skipped. For `has_full_reports` see `EngineFollower`.
        """
        self.worker = worker
        self.url = url
        self.public_url = public_url(url)
        self.endpoint = Endpoint.parse(url)
        self.subscription: Subscription | None = None
        self.is_taking_answer = False
        """Whether an answer is taken bit by bit just now, so that the index is somewhere on the way to it."""
        self.rank = rank
        self.bound = RankBound(num_ranks, rank)
        """Which ranks it may name; those that it named before stay."""
        self._num_noted_connects = 0
        self._num_heard_connects = 0
        self._is_receiving = False
        self._resyncing = resyncing
        self.block_size = block_size
        """Tokens per block, None until the stream names it; no other is believed then."""
        self._on_block_size = on_block_size
        self._has_full_reports = has_full_reports
        self._index = index
        self._counters = SourceCounters()
        self._past: SourceStatistics | None = None
        self._follower: CanonicalFollower | EngineFollower | None = None
        self._probe = _WHAT_FOLLOWS
        self._probe_at_s = 0.0
        self._num_silences = 0
        self._connected_at_s = -math.inf
        self._is_new_peer = self._is_probed = False
        self._canonical_at_s = 0.0
        self._limits = NO_REPLAY if self.endpoint.replay_address is None else None

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        block, self._is_receiving = MessageBlock.of(messages), True
        while True:
            turn_idx, num_messages = self._turn_idx(block, now_s), len(block)
            if self._follower is None:
                self._skip(block[:turn_idx])
            elif turn_idx > 0:
                yield from self._follower.receive_all(block if turn_idx == num_messages else block[:turn_idx], now_s)
            if turn_idx == num_messages:
                break
            block = block[turn_idx:]
            self._begin(block[0], now_s)
        self._is_receiving = False

    def on_reconnect(self, now_s: float) -> None:
        self._num_heard_connects = 0 if self.subscription is None else self.subscription.num_connects
        self._connected_at_s = now_s
        self._is_new_peer, self._is_probed = True, False
        self._probe = _WHAT_FOLLOWS
        self._num_silences = 0
        self._probe_at_s = now_s if self._follower is None else now_s + PROBE_S
        if self._follower is not None:
            self._follower.on_reconnect(now_s)

    def on_departure(self) -> None:
        if self._follower is not None:
            self._follower.on_departure()

    def questions(self, now_s: float) -> list[Question]:
        due = [] if self._follower is None else self._follower.questions(now_s)
        probe = self._wanted_probe(now_s)
        if probe is None:
            self._num_silences, self._probe_at_s = 0, -math.inf
        elif now_s >= self._probe_at_s:
            is_peer_heard = self.subscription is not None and self.subscription.is_caught_up
            if probe is not _WHO_IS_THERE or is_peer_heard:
                due.append(probe)
        return due

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Take the answer, which tells as live messages do whether a stream is canonical."""
        self.is_taking_answer = True
        try:
            yield from self._on_answer(question, messages, now_s)
        finally:
            self.is_taking_answer = False

    def _on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        request = question.request
        if self.engine is not None and request in (base.WHAT_FOLLOWS, base.WHO_IS_THERE):
            return  # an engine spoke meanwhile, to whom nothing follows from that answer
        is_probe = request in (base.WHAT_FOLLOWS, base.EVERYTHING, base.WHO_IS_THERE) and self.engine is None
        if is_probe:
            self._note_probe(request, messages, now_s)
        if messages and (is_probe or self.engine is not None):
            block = MessageBlock.of(messages)
            turn_idx = self._turn_idx(block, now_s)
            if turn_idx < len(block):
                self._begin(block[turn_idx], now_s)
                if isinstance(self._follower, CanonicalFollower):
                    # Of all ranks, each from its beginning: as if they came live.
                    yield from self._follower.receive_all(block[turn_idx:], now_s)
                    return
        if self._follower is not None and not (is_probe and self.engine is None):
            yield from self._follower.on_answer(question, messages, now_s)
        elif isinstance(self._follower, CanonicalFollower) and messages is not None:
            # Whether this names all ranks its peer has: one that has nothing was asked for everything, too.
            is_about_ranks = request == base.WHO_IS_THERE or bool(messages) == (request == base.WHAT_FOLLOWS)
            if is_about_ranks:
                self._follower.take_names(messages, self._heard_since_s(now_s), now_s)

    def progress(self) -> Progress | None:
        if self._follower is None or self.is_taking_answer:
            return None
        if isinstance(self._follower, EngineFollower):
            return self._follower.progress(is_caught_up=self._is_caught_up)
        return self._follower.progress()

    @property
    def positions(self) -> tuple[tuple[int | None, int], ...]:
        """Return epoch and next sequence of each session: what was learnt since is nothing if they are the same."""
        return tuple((session.epoch, session.expected_sequence) for session in self._sessions)

    def resume(self, progress: Progress, now_s: float) -> None:
        """Go on from where another source was; to be called before anything else."""
        if isinstance(progress, CanonicalProgress):
            self._follower = self._canonical_follower()
            self._follower.resume(progress)
            self._canonical_at_s = now_s
            self._probe_at_s = now_s + PROBE_S
        else:
            self._follower = self._engine_follower()
            self._follower.resume(progress, now_s)

    def resume_at(self, url: str, rank: int, block_size: int | None) -> bool:
        """Return whether the source, whatever its URL's login, is that of this stream; take the URL over if so."""
        if public_url(url) != self.public_url or rank != self.rank or block_size not in (None, self.block_size):
            return False
        self.url, self.endpoint = url, Endpoint.parse(url)
        return True

    def note_connects(self) -> None:
        """Take the connections there are for those that blocks yet to be resumed with belong to."""
        self._num_noted_connects = 0 if self.subscription is None else self.subscription.num_connects

    @property
    def num_known_connects(self) -> int:
        """Return how many connections are no news: none, unless the stream was resumed."""
        return 0 if self._follower is None else self._num_noted_connects

    @property
    def has_lost(self) -> bool:
        """Return whether anything was cleared since the source was added or resumed."""
        return self._past is not None or any(
            session.num_lost or session.num_diverged or session.num_epochs > 1 for session in self._sessions
        )

    def forget(self) -> None:
        """Undo `resume`: the blocks turned out not to be there."""
        self._follower = None

    def clear(self) -> None:
        """Forget what is held, if anything was followed."""
        if self._follower is not None:
            self._resyncing.difference_update(WorkerRank(self.worker, rank) for rank in self._follower.states())
            self._follower.clear()

    @property
    def engine(self) -> EngineFollower | None:
        """Return who follows the stream if it is an engine's own: it knows what the engine's hashes name."""
        return self._follower if isinstance(self._follower, EngineFollower) else None

    def fail(self, reason: str) -> None:
        self._counters.failure = reason

    def states(self) -> dict[int, SourceState]:
        return {} if self._follower is None else self._follower.states()

    def counted(self) -> set[int]:
        return set() if self._follower is None else self._follower.counted()

    def statistics(self, now_s: float) -> SourceStatistics:
        if self.subscription is None:
            return self._statistics(0, now_s)
        statistics = self._statistics(self.subscription.num_malformed, now_s)
        failure = statistics.failure or self.subscription.problem
        return replace(statistics, failure=failure, is_peer_gone=self.subscription.is_peer_gone)

    @property
    def _is_caught_up(self) -> bool:
        """Return whether whoever was heard last is connected now, and all that it said was taken."""
        if self.subscription is None:  # not followed yet, as of whom it was learnt
            return True
        num_heard_connects = max(self._num_heard_connects, self.num_known_connects)
        is_heard = self.subscription.num_connects == num_heard_connects and self.subscription.is_caught_up
        return is_heard and not self._is_receiving

    def _turn_idx(self, messages: MessageBlock, now_s: float) -> int:
        """Return which message is the first that another follower is for; their number if there is none."""
        candidates = _maybe_canonical(messages)
        if self._follower is None:
            for idx, message in enumerate(messages):
                if self._names_block_size(message) and (self._is_canonical(message) or self._is_engines(message)):
                    return idx
        elif isinstance(self._follower, EngineFollower):
            for idx in candidates:
                if self._is_canonical(messages[idx]):
                    return idx
        elif self._is_new_peer or now_s - self._canonical_at_s > SILENCE_S:
            for idx, message in enumerate(messages):
                if self._is_canonical(message):
                    self._is_new_peer = False
                    self._canonical_at_s = now_s
                    break
                if self._is_engines(message):
                    return idx
        elif candidates:
            self._canonical_at_s = now_s
        return len(messages)

    def _wanted_probe(self, now_s: float) -> Question | None:
        """Return what a peer is to be asked that is not known, or does not tell of every rank."""
        if isinstance(self._follower, EngineFollower) or (self._limits is NO_REPLAY and self._is_probed):
            return None  # an engine's stream is asked about by its follower
        if self._is_new_peer and not self._is_probed:
            return self._probe
        is_missed = self._follower is not None and bool(self._follower.missed(self._heard_since_s(now_s)))
        return _WHO_IS_THERE if is_missed else None

    def _heard_since_s(self, now_s: float) -> float:
        """Return since when whoever is there was heard: what was unread may be taken behind a connection, and count."""
        return max(self._connected_at_s, now_s - SILENCE_S)

    def _note_probe(self, request: ReplayRequest, messages: Sequence[Message] | None, now_s: float) -> None:
        """Ask like this again more and more rarely while nobody answers, and no more once somebody did."""
        if request == base.WHAT_FOLLOWS and messages is not None and not messages:
            self._probe = _EVERYTHING  # at once: it is none of ours, or has nothing
            return
        self._num_silences += 1
        self._probe_at_s = now_s + PROBE_S * 2 ** min(self._num_silences, MAX_PROBE_DOUBLINGS)
        self._is_probed |= messages is not None or self._limits is NO_REPLAY

    def _names_block_size(self, message: Message) -> bool:
        """Return whether it is known how many tokens are in a block, which the message may tell."""
        if self.block_size is None:
            self.block_size = block_size_in(message.payload, self.public_url, self.endpoint.engine)
            if self.block_size is not None:
                self._on_block_size(self.block_size)
        return self.block_size is not None

    def _skip(self, messages: Sequence[Message]) -> None:
        """Count what is no batch; batches that came before the first with blocks told of nothing."""
        num_messages = sum(not (self._is_canonical(message) or self._is_engines(message)) for message in messages)
        if num_messages and self._counters.num_malformed == 0:
            text = "no batch of an engine's nor a canonical one: it is skipped, and further ones are only counted"
            _logger.warning("%s worker=%s url=%s", text, self.worker, self.public_url)
        self._counters.num_malformed += num_messages

    def _begin(self, message: Message, now_s: float) -> None:
        """Follow what speaks like this message, from nothing."""
        if self._follower is not None:
            _logger.warning("stream changed its form, and is cleared worker=%s url=%s", self.worker, self.public_url)
            self.clear()
        self._past = self._statistics(0, now_s)
        self._counters = SourceCounters()
        if self._is_canonical(message):
            self._follower = self._canonical_follower()
            self._canonical_at_s = now_s
        else:
            self._follower = self._engine_follower()
        self._is_new_peer = False
        self._follower.on_reconnect(now_s)

    def _statistics(self, num_malformed_frames: int, now_s: float) -> SourceStatistics:
        counters = self._counters
        return counters.frozen(
            self.worker, self.public_url, self.states(), self._sessions, num_malformed_frames, now_s
        ).after(self._past)

    @property
    def _sessions(self) -> tuple[Session[Any], ...]:
        return () if self._follower is None else self._follower.sessions

    def _canonical_follower(self) -> CanonicalFollower:
        assert self.block_size is not None
        shared = (self._index, self._resyncing, self._counters)
        return CanonicalFollower(self.worker, self.block_size, *shared, self._limits, self.bound)

    def _engine_follower(self) -> EngineFollower:
        assert self.block_size is not None
        shared = (self._index, self._resyncing, self._counters, self._limits, self.bound, self._has_full_reports)
        num_ahead = int(self.endpoint.drops_last_block)
        return EngineFollower(self.worker, self.block_size, self.endpoint.engine, *shared, num_ahead)

    def _is_canonical(self, message: Message) -> bool:
        try:
            decode_batch(message.payload, self.worker)
        except MalformedMessageError:
            return False
        return True

    def _is_engines(self, message: Message) -> bool:
        try:
            decode_block_events(message.payload, self.worker, self.endpoint.engine)
        except MalformedMessageError:
            return False
        return True


def _maybe_canonical(messages: MessageBlock) -> list[int]:
    """Return which messages begin as a canonical batch does; the others are none."""
    second_bytes = np.frombuffer(messages.buffer, np.uint8)[messages.table[:, PAYLOAD_START] + 1]
    return np.flatnonzero(second_bytes == _SECOND_BYTE).tolist()


def block_size_in(payload: bytes, source: str, engine: str) -> int | None:
    """Return what one message tells; what is malformed tells nothing, and is counted where the stream is followed."""
    try:
        if is_snapshot_part(payload):
            return decode_snapshot_part(payload, source).block_size
        if is_canonical(payload):
            return decode_batch(payload, source).batch.block_size
        events = decode_block_events(payload, source, engine).events
    except MalformedMessageError:
        return None
    return next((event.block_size for event in events if isinstance(event, EngineStored) and event.block_size), None)
