"""Session tables: what arrives, what is done. `a3` means: the message with sequence 3 is applied."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events.session import Apply, Clear, Holding, Session, SessionLimits, SourceState

PROMPT = SessionLimits(jitter_s=0.0, retry_s=1.0, max_asks=3, max_held_messages=4, epoch_grace_s=3.0, silence_s=10.0)
SAME = Holding(5, 55)
HELD = {"": SAME, "other": Holding(5, 66), "less": Holding(3, 33)}
SHORT = {"new epoch": "new", "lost beyond recovery": "lost", "digest differs": "diverged"}


class Script:
    """Plays a table of inputs to a session: strings in, strings out."""

    def __init__(self) -> None:
        self.session: Session[int] = Session(PROMPT, random.Random(0))
        self.now_s = 100.0

    def play(self, word: str) -> str:
        """Play one input: `3` or `e2:3` a message, `hb3` a heartbeat, `r3-5` a replay, `r` an empty one, `?` none."""
        epoch, _, rest = word.rpartition(":")
        number = int(epoch[1:]) if epoch else 1
        session = self.session
        if rest == "?":
            steps = session.replayed(None, None, self.now_s)
        elif rest == "doubt":
            session.doubt(self.now_s)
            steps = []
        elif rest.startswith("+"):
            self.now_s += float(rest[1:])
            session.tick(self.now_s)
            steps = []
        elif rest.startswith("hb"):
            text, _, held = rest[2:].partition("/")
            steps = session.heartbeat(number, int(text), SAME, HELD[held], self.now_s)
        elif rest.startswith("r"):
            first, _, last = rest[1:].partition("-")
            sequences = range(int(first), int(last or first) + 1) if first else ()
            steps = session.replayed(number, [(sequence, sequence) for sequence in sequences], self.now_s)
        else:
            steps = session.received(number, int(rest), int(rest), self.now_s)
        return " ".join(f"a{step.body}" if isinstance(step, Apply) else SHORT[step.reason] for step in steps)

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
    script.session.emptied()
    assert script.session.state is LIVE


def test_the_first_question_waits_a_random_moment():
    session: Session[int] = Session(SessionLimits(jitter_s=1.0), random.Random(3))
    session.received(1, 5, 5, now_s=0.0)
    assert session.question(0.0) is None
    assert session.question(1.0) == 0


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
                take(session.received(1, sent, sent, script.now_s))
            sent += 1
        elif choice == "heartbeat":
            published, held = Holding(sent, hash(frozenset(truth))), Holding(len(copy), hash(frozenset(copy)))
            take(session.heartbeat(1, sent, published, held, script.now_s))
        elif session.question(script.now_s) is not None:
            start = max(session.question(script.now_s), sent - num_kept)
            answer = None if choice == "ignore" else [(sequence, sequence) for sequence in range(start, sent)]
            take(session.replayed(1, answer, script.now_s))
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
    at_once.session.applied(3, at_once.now_s)
    for script in (one_by_one, at_once):
        assert script.session.expected_sequence == 4
        assert script.session.state is SourceState.LIVE
        assert script.play("3") == ""
        assert script.play("5") == ""
        assert not script.session.is_in_step
        assert (script.session.num_duplicates, script.session.num_gaps) == (1, 1)
