from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvist.engine.request import TextStream


class Pieces:
    """Gives prepared pieces, one a token, and a rest at the end."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def step(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._rest


def feed(pieces: list[str], stops: tuple[str, ...], is_stop_included: bool = False, rest: str = "") -> list[str]:
    stream = TextStream(Pieces(pieces, rest), stops, is_stop_included)
    released = []
    for i in range(len(pieces)):
        released.append(stream.step(i))
        if stream.stopped_by is not None:
            break
    return [*released, stream.finish()]


def test_what_could_begin_a_stop_string_is_held_back() -> None:
    assert feed(["a", "b", "x", "y"], ("bc",)) == ["a", "", "bx", "y", ""]
    assert feed(["ab", "abc"], ("abc",)) == ["", "ab", ""]
    assert feed(["done", "STO"], ("STOP",)) == ["done", "", "STO"]


def test_the_earliest_stop_string_ends_the_text() -> None:
    assert feed(["one two three"], ("three", "two")) == ["one ", ""]
    assert feed(["one two three"], ("three", "two"), is_stop_included=True) == ["one two", ""]


def test_a_stop_string_may_complete_in_the_last_flush() -> None:
    assert feed(["ab"], ("bc",), rest="c!") == ["a", ""]


def test_without_a_detokenizer_there_is_no_text() -> None:
    stream = TextStream(None, ("x",))
    assert stream.step(1) + stream.finish() == ""


def test_text_before_the_minimum_cannot_stop() -> None:
    stream = TextStream(Pieces(["a stop", "stop"]), ("stop",))
    assert stream.step(0, can_stop=False) == "a stop"
    assert stream.stopped_by is None
    assert stream.step(1) == ""
    assert stream.stopped_by is not None


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_however_the_text_is_cut_the_result_is_that_of_the_whole(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    released = "".join(feed(pieces, tuple(stops)))
    ends = [whole.find(stop) for stop in stops if stop in whole]
    if not ends:
        assert released == whole
    else:
        assert whole.startswith(released)
        assert not any(stop in released for stop in stops)
