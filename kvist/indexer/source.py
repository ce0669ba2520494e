"""One source: the stream of one worker at one endpoint, whether its batches are canonical or an engine's own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvist.errors import MalformedMessageError
from kvist.events import WorkerRank
from kvist.events.codec import decode_batch, is_canonical
from kvist.events.dialects import decode_block_events
from kvist.events.follow import Question
from kvist.events.session import NO_REPLAY, Session, SourceState
from kvist.events.transports import Endpoint, Message, ReplayRequest, Subscription, base, public_url
from kvist.events.transports.block import PAYLOAD_START, MessageBlock
from kvist.indexer.canonical import CanonicalFollower, CanonicalProgress
from kvist.indexer.engine import EngineFollower, EngineProgress
from kvist.indexer.statistics import DEFAULT_NUM_RANKS, SESSION_COUNTERS, RankBound, SourceCounters, SourceStatistics
from kvist.publisher.filter import block_size_of
from kvist.radix import RadixIndex

_logger = logging.getLogger(__name__)

SILENCE_S = 10.0
"""After so long without a canonical batch an engine's batch is accepted; publishers send a heartbeat every second."""
PROBE_S = 1.5
"""A publisher sends something within this time after a connection; after that an engine is probed for, too."""
MAX_PROBE_DOUBLINGS = 6
"""How often that time doubles while no probe is answered."""

_WHAT_FOLLOWS, _EVERYTHING = Question(base.WHAT_FOLLOWS), Question(base.EVERYTHING)
"""The two probes, sent one after the other, of a peer that may be an engine or a publisher."""
_WHO_IS_THERE = Question(base.WHO_IS_THERE)
_SECOND_BYTE = 0xA6
"""A canonical batch's second byte: the header of a string of six. An engine's batch has a number there."""

Progress: TypeAlias = CanonicalProgress | EngineProgress
"""How far a stream was followed: what another indexer needs besides the blocks to continue from there."""


class _Form(NamedTuple):
    """What a batch is: canonical or an engine's own. `block_size` is None if it does not tell."""

    is_canonical: bool
    block_size: int | None


class Source:
    """Follows one endpoint for one worker, whether its batches are an engine's own or canonical.

    The first batch that decodes decides the stream's form, and a later one of the other form may change it:

    - An engine's stream becomes canonical with any canonical batch.
    - A canonical stream becomes an engine's with an engine's batch, if that is the first batch of either form from a
      peer that has just connected, or if no canonical batch came for `SILENCE_S`. A peer that sends nothing for
      `PROBE_S` is probed with an engine's kind of request: an idle engine holds blocks, too.

    When the form changes, the blocks held so far are cleared and the stream is followed anew from that batch. So a
    publisher may be put before an engine, or taken away, without configuration; an endpoint where both send stays
    canonical; and a message that only begins like a batch is malformed and changes nothing. What a publisher keeps is
    requested as soon as it has connected.

    A rank that sends nothing within `PROBE_S` of a connection, or falls silent later, is asked about. A peer that
    answers without naming the rank is another process and knows nothing of it: the rank's blocks are cleared.
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

        Without `block_size`, the first message with blocks sets it, and `on_block_size` is called. Batches of other
        ranks from `num_ranks` on are counted and skipped. For `has_full_reports` see `EngineFollower`.
        """
        self.worker = worker
        self.url = url
        self.public_url = public_url(url)
        self.endpoint = Endpoint.parse(url)
        self.subscription: Subscription | None = None
        self.is_applying_answer = False
        """Whether part of an answer is applied, so that the index is between two states of the stream."""
        self.rank = rank
        self.bound = RankBound(num_ranks, rank)
        """Which ranks the stream may name; a rank that is followed already stays."""
        self._num_seen_connects = 0  # connections reported to the follower, or recorded before it was resumed
        self._is_receiving = False
        self._resyncing = resyncing
        self.block_size = block_size
        """Tokens per block, None until the stream names it; blocks of another size are refused."""
        self._on_block_size = on_block_size
        self._has_full_reports = has_full_reports
        self._index = index
        self._counters = SourceCounters()
        self._previous: SourceStatistics | None = None
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
            change_idx = self._form_change_idx(block, now_s)
            if self._follower is None:
                self._count_malformed(block[:change_idx])
            elif change_idx > 0:
                yield from self._follower.receive_all(block[:change_idx], now_s)
            if change_idx == len(block):
                break
            block = block[change_idx:]
            self._start_follower(block[0], now_s)
        self._is_receiving = False

    def on_reconnect(self, now_s: float) -> None:
        self._num_seen_connects = 0 if self.subscription is None else self.subscription.num_connects
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
        probe = self._next_probe(now_s)
        if probe is None:
            self._num_silences, self._probe_at_s = 0, -math.inf
        elif now_s >= self._probe_at_s:
            is_caught_up = self.subscription is not None and self.subscription.is_caught_up
            if probe is not _WHO_IS_THERE or is_caught_up:
                due.append(probe)
        return due

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Apply an answer, which may change the stream's form as live messages may."""
        self.is_applying_answer = True  # and stays so if this is cancelled halfway
        yield from self._on_answer(question, messages, now_s)
        self.is_applying_answer = False

    def _on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        request = question.request
        if self.engine is not None and request in (base.WHAT_FOLLOWS, base.WHO_IS_THERE):
            return  # an engine's batch came meanwhile: the answer to a canonical probe says nothing of it
        is_probe = request in (base.WHAT_FOLLOWS, base.EVERYTHING, base.WHO_IS_THERE) and self.engine is None
        if is_probe:
            self._record_probe(request, messages, now_s)
        if messages and (is_probe or self.engine is not None):
            block = MessageBlock.of(messages)
            change_idx = self._form_change_idx(block, now_s)
            if change_idx < len(block):
                self._start_follower(block[change_idx], now_s)
                if isinstance(self._follower, CanonicalFollower):
                    # Batches of all ranks, each from its beginning: applied like live ones.
                    yield from self._follower.receive_all(block[change_idx:], now_s)
                    return
        if not is_probe or self.engine is not None:
            if self._follower is not None:
                yield from self._follower.on_answer(question, messages, now_s)
        elif isinstance(self._follower, CanonicalFollower) and messages is not None:
            # Whether the answer names all of the peer's ranks: a peer that has no batches is asked for everything, too.
            is_about_ranks = request == base.WHO_IS_THERE or bool(messages) == (request == base.WHAT_FOLLOWS)
            if is_about_ranks:
                self._follower.on_peer_ranks(messages, self._silent_since_s(now_s), now_s)

    def progress(self) -> Progress | None:
        if self._follower is None or self.is_applying_answer:
            return None
        if isinstance(self._follower, EngineFollower):
            return self._follower.progress(is_caught_up=self._is_caught_up)
        return self._follower.progress()

    @property
    def positions(self) -> tuple[tuple[int | None, int], ...]:
        """Return epoch and next sequence of each session; they change whenever a message is applied."""
        return tuple((session.epoch, session.expected_sequence) for session in self._sessions)

    def resume(self, progress: Progress, now_s: float) -> None:
        """Continue from another source's progress; must be called before anything else."""
        if isinstance(progress, CanonicalProgress):
            self._follower = self._new_canonical_follower()
            self._follower.resume(progress)
            self._canonical_at_s = now_s
            self._probe_at_s = now_s + PROBE_S
        else:
            self._follower = self._new_engine_follower()
            self._follower.resume(progress, now_s)

    def adopt_url(self, url: str, rank: int, block_size: int | None) -> bool:
        """Follow `url` if it is this source's stream, except perhaps for the URL's login; return whether it is."""
        if public_url(url) != self.public_url or rank != self.rank or block_size not in (None, self.block_size):
            return False
        self.url, self.endpoint = url, Endpoint.parse(url)
        return True

    def record_connects(self) -> None:
        """Record that the connections made so far are to the process whose blocks `resume` brings."""
        self._num_seen_connects = 0 if self.subscription is None else self.subscription.num_connects

    @property
    def num_known_connects(self) -> int:
        """Return how many connections are to the process that was resumed from; 0 if the stream was not resumed."""
        return 0 if self._follower is None else self._num_seen_connects

    @property
    def was_cleared(self) -> bool:
        """Return whether anything was cleared since the source was added or resumed."""
        return self._previous is not None or any(
            session.num_lost or session.num_diverged or session.num_epochs > 1 for session in self._sessions
        )

    def undo_resume(self) -> None:
        """Undo `resume`: the blocks could not be loaded."""
        self._follower = None

    def clear(self) -> None:
        """Clear the blocks of the ranks followed so far, if any."""
        if self._follower is not None:
            self._resyncing.difference_update(WorkerRank(self.worker, rank) for rank in self._follower.states())
            self._follower.clear()

    @property
    def engine(self) -> EngineFollower | None:
        """Return the stream's follower if the stream is an engine's own; it maps the engine's hashes to blocks."""
        return self._follower if isinstance(self._follower, EngineFollower) else None

    def fail(self, reason: str, now_s: float) -> None:
        """Record that the stream cannot be followed any more, and clear its blocks: an answer may be half applied."""
        self._reset_follower(now_s)
        self.is_applying_answer, self._counters.failure = False, reason

    def states(self) -> dict[int, SourceState]:
        return {} if self._follower is None else self._follower.states()

    def ranks_counting_copies(self) -> set[int]:
        return set() if self._follower is None else self._follower.ranks_counting_copies()

    def statistics(self, now_s: float) -> SourceStatistics:
        statistics, subscription = self._follower_statistics(now_s), self.subscription
        if subscription is None:
            return statistics
        return replace(
            statistics,
            num_malformed=statistics.num_malformed + subscription.num_malformed,
            failure=statistics.failure or subscription.problem,
            is_peer_gone=subscription.is_peer_gone,
        )

    @property
    def _is_caught_up(self) -> bool:
        """Return whether the peer that sent last is still connected, and all that it sent is applied."""
        if self.subscription is None:  # parked: no peer has connected since `resume`
            return True
        is_seen = self.subscription.num_connects == self._num_seen_connects and self.subscription.is_caught_up
        return is_seen and not self._is_receiving

    def _form_change_idx(self, messages: MessageBlock, now_s: float) -> int:
        """Return the index of the first message that decides or changes the form; `len(messages)` if none does."""
        candidates = _canonical_candidates(messages)
        if self._follower is None:
            for idx, message in enumerate(messages):
                form = self._form_of(message)
                if form is not None and self._learn_block_size(form.block_size):
                    return idx
        elif isinstance(self._follower, EngineFollower):
            for idx in candidates:
                form = self._form_of(messages[idx])
                if form is not None and form.is_canonical:
                    return idx
        elif self._is_new_peer or now_s - self._canonical_at_s > SILENCE_S:
            for idx, message in enumerate(messages):
                form = self._form_of(message)
                if form is not None and form.is_canonical:
                    self._is_new_peer = False
                    self._canonical_at_s = now_s
                    break
                if form is not None:
                    return idx
        elif candidates:
            self._canonical_at_s = now_s
        return len(messages)

    def _next_probe(self, now_s: float) -> Question | None:
        """Return the probe for a peer whose form is not known, or that has not sent batches of every rank."""
        if isinstance(self._follower, EngineFollower) or (self._limits is NO_REPLAY and self._is_probed):
            return None  # an engine's follower has questions of its own
        if self._is_new_peer and not self._is_probed:
            return self._probe
        if self._follower is None or not self._follower.silent_ranks(self._silent_since_s(now_s)):
            return None
        return _WHO_IS_THERE

    def _silent_since_s(self, now_s: float) -> float:
        """Return the time since which a rank must have sent something in order not to count as silent.

        Messages that were unread when the connection was made may be received after it, and count.
        """
        return max(self._connected_at_s, now_s - SILENCE_S)

    def _record_probe(self, request: ReplayRequest, messages: Sequence[Message] | None, now_s: float) -> None:
        """Record a probe and its answer: probe ever more rarely while nobody answers, and no more after an answer."""
        if request == base.WHAT_FOLLOWS and messages is not None and not messages:
            self._probe = _EVERYTHING  # at once: the peer is no publisher of ours, or has nothing
            return
        self._num_silences += 1
        self._probe_at_s = now_s + PROBE_S * 2 ** min(self._num_silences, MAX_PROBE_DOUBLINGS)
        self._is_probed |= messages is not None or self._limits is NO_REPLAY

    def _learn_block_size(self, block_size: int | None) -> bool:
        """Set the block size that a message names, unless it is known already; return whether it is known now."""
        if self.block_size is None and block_size is not None:
            self.block_size = block_size
            self._on_block_size(block_size)
        return self.block_size is not None

    def _count_malformed(self, messages: Sequence[Message]) -> None:
        """Count the messages that are no batch of either form; the others came before the first with blocks."""
        malformed = [message.payload for message in messages if self._form_of(message) is None]
        if malformed and self._counters.num_malformed == 0:
            text = "no batch of an engine's nor a canonical one"
            if is_canonical(malformed[0]):
                text += f" that this version reads, but {malformed[0][2:8].decode(errors='replace')}"
            text += ": it is skipped, and further ones are only counted"
            _logger.warning("%s worker=%s url=%s", text, self.worker, self.public_url)
        self._counters.num_malformed += len(malformed)

    def _start_follower(self, message: Message, now_s: float) -> None:
        """Follow the stream anew in the form of this message, which is its first."""
        if self._follower is not None:
            _logger.warning("stream changed its format and is cleared worker=%s url=%s", self.worker, self.public_url)
        self._reset_follower(now_s)
        if is_canonical(message.payload):
            self._follower = self._new_canonical_follower()
            self._canonical_at_s = now_s
        else:
            self._follower = self._new_engine_follower()
        self._is_new_peer = False
        self._follower.on_reconnect(now_s)

    def _reset_follower(self, now_s: float) -> None:
        """Clear what is held, and keep the statistics so far."""
        self.clear()
        self._previous = self._follower_statistics(now_s)
        self._follower, self._counters = None, SourceCounters()

    def _follower_statistics(self, now_s: float) -> SourceStatistics:
        """Return the statistics of this follower and those before, without the subscription's."""
        values: dict[str, Any] = {name: getattr(self._counters, name) for name in self._counters.__slots__}
        last_event_at_s, sessions = values.pop("last_event_at_s"), self._sessions
        for name in SESSION_COUNTERS:
            values[name] = sum(getattr(session, name) for session in sessions)
        return SourceStatistics(
            worker=self.worker,
            url=self.public_url,
            states=self.states(),
            num_cleared=sum(session.num_lost for session in sessions),
            num_restarts=sum(max(0, session.num_epochs - 1) for session in sessions),
            last_event_age_s=None if last_event_at_s is None else now_s - last_event_at_s,
            **values,
        ).after(self._previous)

    @property
    def _sessions(self) -> tuple[Session[Any], ...]:
        return () if self._follower is None else self._follower.sessions

    def _new_canonical_follower(self) -> CanonicalFollower:
        assert self.block_size is not None
        shared = (self._index, self._resyncing, self._counters, self._limits, self.bound)
        return CanonicalFollower(self.worker, self.block_size, *shared)

    def _new_engine_follower(self) -> EngineFollower:
        assert self.block_size is not None
        shared = (self._index, self._resyncing, self._counters, self._limits, self.bound, self._has_full_reports)
        num_ahead = int(self.endpoint.drops_last_block)
        return EngineFollower(self.worker, self.block_size, self.endpoint.engine, *shared, num_ahead)

    def _form_of(self, message: Message) -> _Form | None:
        """Return the form of a message, None if it is a batch of neither."""
        payload, engine = message.payload, self.endpoint.engine
        try:
            if is_canonical(payload):
                return _Form(True, decode_batch(payload, self.worker).batch.block_size)
            return _Form(False, block_size_of(decode_block_events(payload, self.worker, engine).events))
        except MalformedMessageError:
            return None


def _canonical_candidates(messages: MessageBlock) -> list[int]:
    """Return the indices of the messages that begin as a canonical batch does; the others are none."""
    second_bytes = np.frombuffer(messages.buffer, np.uint8)[messages.table[:, PAYLOAD_START] + 1]
    return np.flatnonzero(second_bytes == _SECOND_BYTE).tolist()
