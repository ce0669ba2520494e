"""Session tables: what arrives, what is done. `a3` means: the message with sequence 3 is applied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events.session import MAX_SEQUENCE, Apply, Clear, Restore, Session, SessionLimits, SourceState
from kvist.events.types import Holding

PROMPT = SessionLimits(retry_s=1.0, max_asks=3, max_held_messages=4, epoch_grace_s=3.0, silence_s=10.0)
SAME = Holding(5, 55)
HELD = {"": SAME, "other": Holding(5, 66), "less": Holding(3, 33)}
SHORT = {
    "new epoch": "new",
    "lost beyond recovery": "lost",
    "gone with its publisher": "forgotten",
    "digest differs": "diverged",
    "incomplete, and learnt from the beginning": "anew",
}


class Script:
    """Plays a table of inputs to a session: strings in, strings out."""

    def __init__(self, *, has_snapshots: bool = False) -> None:
        self.session: Session[int] = Session(PROMPT, has_snapshots=has_snapshots)
        self.now_s = 100.0

    def play(self, word: str) -> str:
        """Play one input: `3` or `e2:3` a message, `hb3` a heartbeat, `r3-5` a replay, `r` an empty one, `?` none.

        `s3r3-5` is a replay with a snapshot in front of it, whose sequence is 3. `unknown` is a peer that is there and
        has no such rank.
        """
        epoch, _, rest = word.rpartition(":")
        number = int(epoch[1:]) if epoch else 1
        session = self.session
        snapshot_sequence = None
        if rest.startswith("s"):
            text, _, rest = rest[1:].partition("r")
            snapshot_sequence, rest = int(text), f"r{rest}"
        if rest == "?":
            steps = session.on_answer(None, None, self.now_s)
        elif rest == "doubt":
            session.doubt(self.now_s)
            steps = []
        elif rest.startswith("+"):
            self.now_s += float(rest[1:])
            session.tick(self.now_s)
            steps = []
        elif rest == "gone":
            session.on_departure()
            steps = []
        elif rest == "unknown":
            steps = session.on_rank_gone(self.now_s)
        elif rest.startswith("hb"):
            text, _, held = rest[2:].partition("/")
            steps = session.on_heartbeat(number, int(text), SAME, HELD[held], self.now_s)
        elif rest.startswith("r"):
            first, _, last = rest[1:].partition("-")
            sequences = range(int(first), int(last or first) + 1) if first else ()
            frames = [(sequence, sequence) for sequence in sequences]
            steps = session.on_answer(number, frames, self.now_s, snapshot_sequence=snapshot_sequence)
        else:
            steps = session.receive(number, int(rest), int(rest), self.now_s)
        return " ".join(map(self._said, steps))

    @staticmethod
    def _said(step) -> str:
        if isinstance(step, Apply):
            return f"a{step.body}"
        return "restore" if isinstance(step, Restore) else SHORT[step.reason]

    def asks(self) -> str:
        """Return the question that is due, as text."""
        question = self.session.question(self.now_s)
        return "" if question is None else f"ask {question}"


LIVE, PARTIAL, RESYNCING = SourceState.LIVE, SourceState.PARTIAL, SourceState.RESYNCING


@pytest.mark.parametrize(
    ("table", "state"),
    [
        pytest.param([("0", "a0"), ("1", "a1"), ("2", "a2")], LIVE, id="in order"),
        pytest.param([("0", "a0"), ("0", ""), ("1", "a1"), ("0", "")], LIVE, id="duplicates are ignored"),
        pytest.param([("0", "a0"), ("2", "ask 1"), ("r1-2", "a1 a2"), ("3", "a3")], LIVE, id="a gap is replayed"),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("3", "ask 1"), ("r1", "a1 a2 a3")], LIVE, id="what was held back follows"
        ),
        pytest.param([("7", "ask 0"), ("r0-7", "a0 a1 a2 a3 a4 a5 a6 a7")], LIVE, id="joining late, all is kept"),
        pytest.param([("7", "ask 0"), ("r5-7", "lost a5 a6 a7")], PARTIAL, id="joining late, the beginning is gone"),
        pytest.param([("0", "a0"), ("5", "ask 1"), ("r", "lost a5")], PARTIAL, id="an empty replay: lost"),
        pytest.param([("0", "a0"), ("5", "ask 1"), ("r1-3", "a1 a2 a3 lost a5")], PARTIAL, id="a replay with a hole"),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("?", ""), ("+1", "ask 1"), ("?", ""), ("+2", "ask 1"), ("?", "lost a2")],
            PARTIAL,
            id="no answer, three times",
        ),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("?", ""), ("+1", "ask 1"), ("r1-2", "a1 a2")], LIVE, id="a late answer"
        ),
        pytest.param(
            [("0", "a0"), *((str(n), "ask 1") for n in range(2, 9)), ("r1-6", "a1 a2 a3 a4 a5 a6 a7 a8")],
            LIVE,
            id="of many held back the oldest go, and the replay has them",
        ),
        pytest.param([("0", "a0"), ("hb1", "")], LIVE, id="a heartbeat that agrees"),
        pytest.param([("0", "a0"), ("hb2", "ask 1"), ("r1", "a1"), ("hb2", "")], LIVE, id="the last one was lost"),
        pytest.param([("0", "a0"), ("hb2", "ask 1"), ("r", "lost")], PARTIAL, id="the last one is lost for good"),
        pytest.param([("hb3", "ask 0"), ("r0-2", "a0 a1 a2")], LIVE, id="joining by a heartbeat"),
        pytest.param([("0", "a0"), ("1", "a1"), ("hb1/other", "")], LIVE, id="a heartbeat of the past says nothing"),
        pytest.param([("0", "a0"), ("hb1/other", "diverged ask 0"), ("r0", "a0"), ("hb1", "")], LIVE, id="diverged"),
        pytest.param(
            [("0", "a0"), ("hb1/other", "diverged ask 0"), ("r", "lost"), ("hb1/less", "")],
            PARTIAL,
            id="diverged, and the replay is gone: knowing less is no divergence",
        ),
        pytest.param(
            [
                ("0", "a0"),
                ("hb1/other", "diverged ask 0"),
                ("r0", "a0"),
                ("hb1/other", "diverged"),
                ("+1", "ask 0"),
                ("r0", "a0"),
                ("hb1/other", "diverged"),
                ("+1", ""),
                ("+1", "ask 0"),
            ],
            RESYNCING,
            id="diverging again and again is asked about ever more rarely",
        ),
        pytest.param([("5", "ask 0"), ("r4-5", "lost a4 a5"), ("hb6", "")], LIVE, id="a digest that agrees heals"),
        pytest.param([("0", "a0"), ("e2:0", "new a0"), ("e2:1", "a1")], LIVE, id="a new epoch"),
        pytest.param([("0", "a0"), ("e2:3", "new ask 0"), ("e2:r0-3", "a0 a1 a2 a3")], LIVE, id="a new epoch, late"),
        pytest.param([("0", "a0"), ("e2:hb0", "new"), ("e2:hb0", "")], LIVE, id="a new epoch that holds nothing yet"),
        pytest.param([("e2:0", "a0"), ("e1:1", ""), ("e1:hb9", ""), ("e2:1", "a1")], LIVE, id="stragglers of an epoch"),
        pytest.param([("e2:0", "a0"), ("+4", ""), ("e1:0", "new a0")], LIVE, id="a publisher whose clock went back"),
        pytest.param(
            [("e2:0", "a0"), ("+4", ""), ("e1:0", "new a0"), ("e2:1", ""), ("e2:hb9", ""), ("e1:1", "a1")],
            LIVE,
            id="stragglers of an epoch whose clock was ahead",
        ),
        pytest.param(
            [("e2:0", "a0"), ("+4", ""), ("e1:0", "new a0"), ("+4", ""), ("e2:1", "new ask 0"), ("e2:r0-1", "a0 a1")],
            LIVE,
            id="an epoch that was left too soon",
        ),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("e2:r0-1", "new a0 a1"), ("e2:2", "ask 2"), ("e2:r1-2", "a2")],
            LIVE,
            id="another process answered, and the stream is shown to be its own",
        ),
        pytest.param(
            [("e2:r0-1", "a0 a1"), ("e2:2", "ask 2"), ("e2:r1", ""), ("e2:5", "ask 2"), ("e2:r1-5", "a2 a3 a4 a5")],
            LIVE,
            id="what the answer lacks is of a process before",
        ),
        pytest.param(
            [
                ("e2:r0-1", "a0 a1"),
                ("e2:2", "ask 2"),
                *[("?", ""), ("+1", "ask 2"), ("?", ""), ("+2", "ask 2"), ("?", "lost a2")],
            ],
            PARTIAL,
            id="and nobody answers any more",
        ),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("e2:r1-2", "new ask 0"), ("e2:r0-2", "a0 a1 a2")],
            LIVE,
            id="restarted between question and answer",
        ),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("e2:r", "new ask 0"), ("e2:r", "")], LIVE, id="restarted and empty"
        ),
        pytest.param([("3", "ask 0"), ("e2:r0-1", "new a0 a1")], LIVE, id="restarted while joining"),
        pytest.param(
            [("e2:0", "a0"), ("e2:2", "ask 1"), ("e1:r1-2", "lost a2")], PARTIAL, id="an answer of the past is none"
        ),
        pytest.param([("0", "a0"), ("hb1", ""), ("+11", "")], RESYNCING, id="a silent publisher is not trusted"),
        pytest.param([("0", "a0"), ("hb1", ""), ("+11", ""), ("hb1", "")], LIVE, id="and is again once it speaks"),
        pytest.param([("0", "a0"), ("+99", "")], LIVE, id="an engine without heartbeats may be silent"),
        pytest.param([("doubt", "ask 0"), ("r", "")], LIVE, id="doubt about a stream with nothing in it"),
        pytest.param([("0", "a0"), ("doubt", "ask 1"), ("r0-2", "a1 a2")], LIVE, id="doubt, and it went on"),
        pytest.param([("0", "a0"), ("doubt", "ask 1"), ("1", "ask 1"), ("r0-1", "a1")], LIVE, id="doubt holds back"),
        pytest.param(
            [("0", "a0"), ("doubt", "ask 1"), ("?", ""), ("+1", "ask 1"), ("?", ""), ("+2", "ask 1"), ("?", "lost")],
            PARTIAL,
            id="doubt that nobody dispels",
        ),
        pytest.param(
            [("doubt", "ask 0"), ("?", ""), ("+1", "ask 0"), ("0", "a0")],
            LIVE,
            id="doubt about nothing, dispelled by the first message",
        ),
    ],
)
def test_session_follows_its_table(table, state):
    script = Script()
    for word, expected in table:
        done = script.play(word)
        assert f"{done} {script.asks()}".strip() == expected, f"at {word!r}"
    assert script.session.state is state


LOST_ONE = [("0", "a0"), ("5", "ask 1"), ("?", ""), ("+1", "ask 1"), ("?", ""), ("+2", "ask 1"), ("?", "lost a5")]


@pytest.mark.parametrize(
    ("table", "state"),
    [
        pytest.param([("0", "a0"), ("2", "ask 1"), ("r1-2", "a1 a2")], LIVE, id="a range is enough"),
        pytest.param([("7", "ask 0"), ("s7r7", "restore a7"), ("8", "a8")], LIVE, id="joining by a snapshot"),
        pytest.param([("hb7", "ask 0"), ("s7r", "restore"), ("hb7", "")], LIVE, id="joining where nothing happens"),
        pytest.param([("0", "a0"), ("5", "ask 1"), ("s4r4-5", "restore a4 a5"), ("6", "a6")], LIVE, id="beyond ranges"),
        pytest.param(
            [("0", "a0"), ("5", "ask 1"), ("6", "ask 1"), ("s5r", "restore a5 a6")], LIVE, id="what was held follows"
        ),
        pytest.param(
            [("0", "a0"), ("3", "ask 1"), ("s5r5", "restore a5"), ("4", ""), ("6", "a6")],
            LIVE,
            id="a snapshot ahead of what was held",
        ),
        pytest.param(
            [("0", "a0"), ("1", "a1"), ("3", "ask 2"), ("s1r1-3", "restore a1 a2 a3")],
            LIVE,
            id="an earlier snapshot, shared with others",
        ),
        pytest.param(
            [("0", "a0"), ("9", "ask 1"), ("s4r7-9", "restore"), ("+1", "ask 4"), ("r4-9", "a4 a5 a6 a7 a8 a9")],
            LIVE,
            id="the range behind a snapshot was gone when it was sent: asked again",
        ),
        pytest.param(
            [
                ("0", "a0"),
                ("9", "ask 1"),
                ("r7-9", ""),
                ("+1", "ask 1"),
                ("r7-9", ""),
                ("+2", "ask 1"),
                ("r7-9", "lost a7 a8 a9"),
            ],
            PARTIAL,
            id="a peer that has no snapshot, after all",
        ),
        pytest.param([*LOST_ONE, ("hb6/less", "ask 0"), ("s6r", "restore"), ("hb6", "")], LIVE, id="partial, healed"),
        pytest.param(
            [*LOST_ONE, ("hb3/less", "")], PARTIAL, id="partial, and a heartbeat of the past: nothing to compare"
        ),
        pytest.param(
            [*LOST_ONE, ("hb6/less", "ask 0"), ("r0-5", "anew a0 a1 a2 a3 a4 a5")],
            LIVE,
            id="partial, and healed by all the messages there are",
        ),
        pytest.param(
            [*LOST_ONE, ("4", ""), ("5", "ask 0"), ("5", "ask 0"), ("r0-5", "anew a0 a1 a2 a3 a4 a5"), ("5", "")],
            LIVE,
            id="partial, and healed where the last message comes again",
        ),
        pytest.param(
            [
                *LOST_ONE,
                ("hb6/less", "ask 0"),
                ("6", "ask 0"),
                ("?", "a6"),
                ("hb7/less", ""),
                ("+1", ""),
                ("hb7/less", "ask 0"),
                ("r5-6", ""),
                ("hb7/less", ""),
                ("+1", ""),
                ("hb7/less", ""),
                ("+1", ""),
                ("hb7/less", "ask 0"),
                ("s7r", "restore"),
            ],
            LIVE,
            id="partial, and asking in vain costs nothing that is held",
        ),
        pytest.param(
            [*LOST_ONE, ("hb6/less", "ask 0"), ("8", "ask 0"), ("?", ""), ("+1", "ask 6"), ("r6-8", "a6 a7 a8")],
            PARTIAL,
            id="partial, and a gap while asking in vain",
        ),
        pytest.param(
            [("0", "a0"), ("hb1/other", "diverged ask 0"), ("s1r", "restore"), ("hb1", "")], LIVE, id="diverged"
        ),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("e2:s3r3", "new restore a3"), ("e2:4", "a4")],
            LIVE,
            id="restarted between question and answer",
        ),
        pytest.param([("0", "a0"), ("e2:3", "new ask 0"), ("e2:s3r3", "restore a3")], LIVE, id="a new epoch"),
        pytest.param(
            [("e2:0", "a0"), ("e2:2", "ask 1"), ("e1:s9r", ""), ("+1", "ask 1"), ("e2:r1-2", "a1 a2")],
            LIVE,
            id="a snapshot of the past is none",
        ),
        pytest.param([("0", "a0"), ("gone", ""), ("hb1", "")], LIVE, id="gone, and back"),
        pytest.param([("0", "a0"), ("gone", "")], RESYNCING, id="gone"),
        pytest.param([("0", "a0"), ("gone", ""), ("1", "a1")], LIVE, id="gone, and heard again"),
        pytest.param([("0", "a0"), ("hb1", ""), ("+11", ""), ("unknown", "forgotten")], PARTIAL, id="unknown"),
        pytest.param(
            [("0", "a0"), ("hb1", ""), ("unknown", "forgotten"), ("+99", "")],
            PARTIAL,
            id="unknown: its silence says nothing new",
        ),
        pytest.param(
            [("0", "a0"), ("unknown", "forgotten"), ("e2:0", "a0"), ("e2:1", "a1")], LIVE, id="unknown, and begun anew"
        ),
        pytest.param(
            [("0", "a0"), ("unknown", "forgotten"), ("e2:hb3", "ask 0"), ("e2:s3r", "restore")],
            LIVE,
            id="unknown, and heard of in the middle",
        ),
        pytest.param(
            [("0", "a0"), ("2", "ask 1"), ("3", "ask 1"), ("unknown", "forgotten"), ("e2:0", "a0"), ("e2:hb1", "")],
            LIVE,
            id="unknown amid a gap: nothing held comes back",
        ),
        pytest.param(
            [("0", "a0"), ("unknown", "forgotten"), ("1", ""), ("hb9", ""), ("e2:0", "a0")],
            LIVE,
            id="unknown, and stragglers of what it was",
        ),
        pytest.param(
            [("0", "a0"), ("hb1", ""), ("+11", ""), ("unknown", "forgotten"), ("1", ""), ("hb9", ""), ("e2:0", "a0")],
            LIVE,
            id="unknown after a silence, and stragglers of what it was",
        ),
        pytest.param(
            [("0", "a0"), ("unknown", "forgotten"), ("+4", ""), ("hb3", "ask 0"), ("s3r", "restore")],
            LIVE,
            id="said to be unknown by mistake",
        ),
        pytest.param(
            [("0", "a0"), ("unknown", "forgotten"), ("gone", ""), ("unknown", "forgotten")],
            PARTIAL,
            id="unknown to one peer after another",
        ),
    ],
)
def test_session_with_a_peer_that_has_snapshots_follows_its_table(table, state):
    script = Script(has_snapshots=True)
    for word, expected in table:
        done = script.play(word)
        assert f"{done} {script.asks()}".strip() == expected, f"at {word!r}"
    assert script.session.state is state


def test_what_was_not_heard_since_a_connection_or_for_long_is_missed_until_a_peer_does_not_know_it():
    script = Script()
    session = script.session
    assert not session.is_silent_since(script.now_s)
    script.play("0")
    assert not session.is_silent_since(script.now_s)
    assert session.is_silent_since(script.now_s + 1)
    for word in ("+1", "hb1"):
        script.play(word)
    assert not session.is_silent_since(script.now_s)
    script.play("+11")
    assert session.is_silent_since(0.0)
    script.play("unknown")
    assert not session.is_silent_since(script.now_s + 1)
    assert (session.epoch, session.expected_sequence, session.num_lost) == (None, 0, 1)


@pytest.mark.parametrize("leaving", [(), ("unknown",)])
def test_what_was_held_back_of_one_epoch_is_not_applied_in_another(leaving):
    script = Script(has_snapshots=True)
    for word in ("0", "2", "3", *leaving, "e2:0", "e2:4"):
        script.play(word)
    assert script.play("e2:r1") == "a1"


def test_what_happened_is_counted():
    script = Script()
    for word in ("0", "0", "2", "r1-2", "9", "r", "e3:0", "e2:1", "e3:hb1/other"):
        script.play(word)
    session = script.session
    counts = (session.num_duplicates, session.num_gaps, session.num_replays, session.num_recovered)
    assert counts == (1, 2, 2, 2)
    assert (session.num_lost, session.num_epochs, session.num_stale, session.num_diverged) == (1, 2, 1, 1)


def test_a_message_that_clears_the_rank_makes_a_partial_copy_whole():
    script = Script()
    for word in ("5", "r"):
        script.play(word)
    assert script.session.state is PARTIAL
    script.session.on_cleared()
    assert script.session.state is LIVE


def test_a_loss_behind_a_message_that_clears_the_rank_leaves_the_copy_partial():
    script = Script()
    for word in ("0", "5"):
        script.play(word)
    assert script.play("r0-1") == "a1 lost a5"  # all judged at once, before any of it is taken
    script.session.on_cleared()  # by message 1
    script.session.on_cleared(by_loss=True)
    assert script.session.state is SourceState.PARTIAL


def test_numbers_that_would_not_fit_anywhere_are_passed_over():
    session = Script(has_snapshots=True).session
    last = MAX_SEQUENCE
    assert session.receive(1, last + 1, 0, 100.0) == []
    assert session.on_heartbeat(1, 2 * last + 1, SAME, SAME, 100.0) == []
    assert session.on_answer(1, [(0, 7), (2 * last + 1, 8)], 100.0) == [Apply(7)]
    assert session.on_answer(1, [], 100.0, snapshot_sequence=last + 1) == []
    assert (session.epoch, session.expected_sequence, session.num_stale) == (1, 1, 4)
    assert session.question(100.0 + 60) is not None  # for a snapshot that is one


@given(
    st.lists(st.sampled_from(["deliver", "lose", "twice", "heartbeat", "answer", "ignore"]), max_size=60),
    st.integers(1, 30),
)
def test_whatever_is_lost_repeated_or_late_a_live_copy_is_exact(choices, num_kept):
    """A publisher with a short memory, a wire that loses and repeats; the copy is the set of applied sequences."""
    script = Script()
    session = script.session
    sent, copy = 0, set()

    def take(steps):
        for step in steps:
            if isinstance(step, Clear):
                copy.clear()
            else:
                assert step.body not in copy
                copy.add(step.body)

    for choice in choices:
        script.now_s += 0.1
        truth = set(range(sent))
        if choice in ("deliver", "lose", "twice"):
            for _ in range({"deliver": 1, "lose": 0, "twice": 2}[choice]):
                take(session.receive(1, sent, sent, script.now_s))
            sent += 1
        elif choice == "heartbeat":
            published, held = Holding(sent, hash(frozenset(truth))), Holding(len(copy), hash(frozenset(copy)))
            take(session.on_heartbeat(1, sent, published, held, script.now_s))
        elif session.question(script.now_s) is not None:
            start = max(session.question(script.now_s), sent - num_kept)
            answer = None if choice == "ignore" else [(sequence, sequence) for sequence in range(start, sent)]
            take(session.on_answer(1, answer, script.now_s))
        assert copy <= set(range(sent))
        if session.state is LIVE:
            assert copy == set(range(session.expected_sequence))


def test_messages_applied_in_step_count_as_if_each_had_been_received() -> None:
    one_by_one, at_once = Script(), Script()
    for script in (one_by_one, at_once):
        assert not script.session.is_in_step
        script.play("0")
        script.play("hb1")
        script.play("+11")
        assert script.session.state is SourceState.RESYNCING
    assert [one_by_one.play(word) for word in ("1", "2", "3")] == ["a1", "a2", "a3"]
    assert at_once.session.is_in_step
    at_once.session.on_applied(3, at_once.now_s)
    for script in (one_by_one, at_once):
        assert script.session.expected_sequence == 4
        assert script.session.state is SourceState.LIVE
        assert script.play("3") == ""
        assert script.play("5") == ""
        assert not script.session.is_in_step
        assert (script.session.num_duplicates, script.session.num_gaps) == (1, 1)


class Publisher:
    """A model of what a session follows: numbered changes to a set, the last of which are kept; now and then anew."""

    def __init__(self, num_kept: int) -> None:
        self.num_kept = num_kept
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.changes: list[int] = []
        self.states: list[frozenset[int]] = [frozenset()]

    def change(self, number: int) -> tuple[int, int, int]:
        """Put a number in or take it out; return the message: epoch, sequence, number."""
        self.changes.append(number)
        self.states.append(self.states[-1] ^ {number})
        return self.epoch, len(self.changes) - 1, number

    def answer(self, start: int, *, with_snapshot: bool, is_cut: bool) -> tuple[int | None, list[tuple[int, int]]]:
        """Return a snapshot's sequence, if there is one, and what is kept from `start` or the snapshot on."""
        snapshot = len(self.changes) - min(2, self.num_kept, len(self.changes)) if with_snapshot else None
        first = max(start if snapshot is None else snapshot, len(self.changes) - self.num_kept) + is_cut
        return snapshot, [(sequence, self.changes[sequence]) for sequence in range(first, len(self.changes))]


class Copy:
    """What a session makes of it."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.held: set[int] = set()

    def take(self, steps, snapshot_sequence: int | None = None) -> None:
        for step in steps:
            if isinstance(step, Apply):
                self.held ^= {step.body}
            else:
                self.held = set(self.publisher.states[snapshot_sequence]) if isinstance(step, Restore) else set()


def holding(held) -> Holding:
    return Holding(len(held), hash(frozenset(held)))


ACTIONS = ["change", "lose", "twice", "late", "heartbeat", "range", "snapshot", "cut", "silence", "restart", "gone"]


@given(st.lists(st.sampled_from(ACTIONS), max_size=80), st.integers(0, 10), st.randoms(use_true_random=False))
def test_whatever_happens_to_publisher_and_wire_a_live_copy_is_exact_and_in_the_end_it_is_live(actions, num_kept, rng):
    """Messages are lost, repeated, delayed; the publisher restarts; answers come with snapshots, or cut, or not."""
    now_s = 100.0
    session: Session[int] = Session(PROMPT, has_snapshots=True)
    publisher = Publisher(num_kept)
    copy = Copy(publisher)
    late: list[tuple[int, int, int]] = []

    def answer(*, with_snapshot: bool, is_cut: bool = False) -> None:
        start = session.question(now_s)
        if start is not None:
            start = start if session.epoch == publisher.epoch else 0
            snapshot, messages = publisher.answer(start, with_snapshot=with_snapshot, is_cut=is_cut)
            copy.take(session.on_answer(publisher.epoch, messages, now_s, snapshot_sequence=snapshot), snapshot)

    def beat() -> None:
        counts = holding(publisher.states[-1]), holding(copy.held)
        copy.take(session.on_heartbeat(publisher.epoch, len(publisher.changes), *counts, now_s))

    for action in actions:
        now_s += 0.4
        if action in ("change", "lose", "twice", "late"):
            message = publisher.change(rng.randrange(6))
            late += [message] * {"change": 1, "lose": 0, "twice": 2, "late": 1}[action]
            for each in late if action != "late" else ():
                copy.take(session.receive(*each, now_s))
            late = late if action == "late" else []
        elif action in ("range", "snapshot", "cut"):
            answer(with_snapshot=action != "range", is_cut=action == "cut")
        elif action == "heartbeat":
            beat()
        elif action == "silence" and session.question(now_s) is not None:
            copy.take(session.on_answer(None, None, now_s))
        elif action == "restart":
            publisher.restart()
            late.clear()
        elif action == "gone":
            session.on_departure()
        if session.state is LIVE:
            assert session.epoch is None or session.epoch <= publisher.epoch
            if session.epoch == publisher.epoch:
                assert copy.held == publisher.states[session.expected_sequence]
    for _ in range(12):  # from here on nothing is lost any more
        now_s += 40.0
        beat()
        answer(with_snapshot=True)
    assert session.state is LIVE
    assert copy.held == publisher.states[-1]
