"""What workers report of their cache is read out of the answers as they pass."""

from __future__ import annotations

import json

import pytest

from kvist.router.usage import MAX_JSON_BYTES, TAIL_BYTES, ReportedUsage, UsageReader

USAGE = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
TOKEN = b'data: {"choices": [{"text": "x"}]}\n\n'


def read(*pieces: bytes, is_event_stream: bool = True) -> ReportedUsage | None:
    reader = UsageReader(is_event_stream=is_event_stream)
    for piece in pieces:
        reader.feed(piece)
    return reader.usage()


@pytest.mark.parametrize("ending", [b"data: [DONE]\n\n", b""])
def test_the_last_event_of_a_stream_carries_the_usage(ending: bytes) -> None:
    assert read(TOKEN, LAST, ending) == ReportedUsage(100, 64, 3)


def test_a_usage_cut_anywhere_between_pieces_is_read() -> None:
    whole = TOKEN * 3 + LAST + b"data: [DONE]\n\n"
    for cut in range(len(whole)):
        assert read(whole[:cut], whole[cut:]) == ReportedUsage(100, 64, 3)


def test_only_the_tail_of_a_stream_is_kept() -> None:
    reader = UsageReader(is_event_stream=True)
    for _ in range(1000):
        reader.feed(TOKEN)
    assert len(reader._tail) <= TAIL_BYTES
    reader.feed(LAST)
    assert reader.usage() == ReportedUsage(100, 64, 3)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_are_counted_where_they_end_however_they_are_cut(end: bytes) -> None:
    whole = b"".join(b"data: %d" % number + end for number in range(4))
    for cut in range(len(whole) + 1):
        reader = UsageReader(is_event_stream=True)
        assert reader.feed(whole[:cut]) == whole[:cut].count(end)
        assert reader.feed(whole[cut:]) == 4 - whole[:cut].count(end)
    reader = UsageReader(is_event_stream=True)
    assert sum(reader.feed(bytes([byte])) for byte in whole) == 4
    assert UsageReader(is_event_stream=False).feed(whole) == 0


def test_a_whole_answer_is_read_in_pieces() -> None:
    body = json.dumps({"choices": [{"text": "x" * 10_000}], "usage": USAGE}).encode()
    assert read(body[:5000], body[5000:], is_event_stream=False) == ReportedUsage(100, 64, 3)


@pytest.mark.parametrize("piece_bytes", [1000, 2 * MAX_JSON_BYTES])
@pytest.mark.parametrize("spaces", [None, (", ", ":   ")])
def test_of_an_overlong_answer_both_ends_are_read(piece_bytes: int, spaces: tuple[str, str] | None) -> None:
    texts = ["x" * MAX_JSON_BYTES, 'a text that reads {"usage": {"prompt_tokens": 1}}']
    for answer in (
        {"id": "embd-1", "data": texts, "usage": USAGE},  # embeddings, scores, classes and chats
        {"id": "score-1", "usage": USAGE, "results": texts},  # documents in a new order
    ):
        body = json.dumps(answer, separators=spaces).encode()
        reader = UsageReader(is_event_stream=False)
        for start in range(0, len(body), piece_bytes):
            reader.feed(body[start : start + piece_bytes])
        assert reader.usage() == ReportedUsage(100, 64, 3)
        assert reader.answer() is None
        assert len(reader._head) + len(reader._tail) <= 2 * TAIL_BYTES


@pytest.mark.parametrize("end", [b"", b'"usage": {"prompt_tokens": ', b'"usage": {"prompt_tokens": "many"}', b"\xff"])
def test_an_overlong_answer_without_a_usage_is_no_error(end: bytes) -> None:
    assert read(b"x" * MAX_JSON_BYTES, b"y", end, is_event_stream=False) is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", None),
        (b"not json", None),
        (b"\xff", None),
        (b'{"usage": null}', None),
        (b'{"usage": {"prompt_tokens": "many"}}', None),
        (b'{"usage": {"type": "duration", "seconds": 5}}', None),
        (b'{"usage": {"input_tokens": 5, "output_tokens": 1}}', ReportedUsage(5, None, 1)),
        (b'{"usage": {"prompt_tokens": 5}}', ReportedUsage(5, None)),
        (b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": null}}', ReportedUsage(5, None)),
        (b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"audio_tokens": 1}}}', ReportedUsage(5, None)),
    ],
)
def test_an_answer_without_a_usage_is_no_error(answer: bytes, expected: ReportedUsage | None) -> None:
    assert read(answer, is_event_stream=False) == expected
    assert read(b"data: " + answer + b"\n\n") == expected


MESSAGES = {"input_tokens": 20, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 16, "output_tokens": 3}
RESPONSES = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 3}
META = {"prompt_tokens": 100, "completion_tokens": 3, "cached_tokens": 64}


@pytest.mark.parametrize(
    ("whole", "last"),
    [
        (
            {"usage": MESSAGES},
            b'event: message_delta\ndata: %b\n\nevent: message_stop\ndata: {"type": "message_stop"}\n\n',
        ),
        ({"usage": RESPONSES}, b'event: response.completed\ndata: {"response": %b}\n\n'),
        ({"text": "x", "meta_info": META}, b"data: %b\n\ndata: [DONE]\n\n"),
    ],
)
def test_every_api_reports_the_same_in_its_own_words(whole: dict[str, object], last: bytes) -> None:
    body = json.dumps(whole).encode()
    assert read(body, is_event_stream=False) == read(TOKEN, last % body) == ReportedUsage(100, 64, 3)


def test_a_stream_knows_whether_it_is_between_events() -> None:
    reader = UsageReader(is_event_stream=True)
    assert not reader.is_between_events
    for piece, expected in ((TOKEN, True), (b"data: {", False), (b"}\r\n\r\n", True)):
        reader.feed(piece)
        assert reader.is_between_events is expected
