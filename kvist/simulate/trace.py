"""Requests to simulate: read from a trace, or made up."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from kvist.errors import InvalidValueError

TRACE_BLOCK_SIZE = 512
TEXT_BLOCK_SIZE = 64
CHARACTERS_A_TOKEN = 4
"""About as many as in English text; prompts are not tokenized here."""
DEFAULT_OUTPUT_TOKENS = 256
"""Of a prompt without an output length, as in `vllm bench serve`."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request. Equal leading blocks are a shared prefix."""

    idx: int
    at_s: float
    blocks: tuple[int, ...]
    """Hashes of the prompt's full blocks."""
    num_tokens: int
    num_output_tokens: int
    answer_blocks: tuple[int, ...] = ()
    """Hashes of the full blocks behind the prompt that its answer fills, as far as later requests repeat them."""
    follows: int | None = None
    """The `idx` of the request whose answer it waits for, in a closed loop; `at_s` is nominal then."""
    pause_s: float | None = None
    """How long after that answer it is sent, if that is known."""
    session: str | None = None
    took_s: float = 0.0
    """How long its answer took when it was recorded, if that is known."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival, and how many tokens their blocks have."""

    requests: Sequence[Request]
    block_size: int

    def redraw_arrivals(self, seed: int, factor: float = 1.0, burstiness: float = 1.0) -> Trace:
        """Return the trace `factor` times as slow, each gap drawn at random around the mean gap of its neighbourhood.

        The order stays, and so do the pauses of sessions in a closed loop. Gaps are gamma distributed with the shape
        `burstiness`: 1 is Poisson, and less comes in bursts.
        """
        random, at_s, arrivals, requests = Random(seed), 0.0, self._arrivals(), []
        ordinals = count()
        for request in self.requests:
            if request.follows is None:
                ordinal = next(ordinals)
                begin, end = max(0, ordinal - 16), min(len(arrivals) - 1, ordinal + 16)
                gap_s = (arrivals[end] - arrivals[begin]) / max(1, end - begin)
                at_s += gap_s * factor * random.gammavariate(burstiness, 1.0 / burstiness)
                request = replace(request, at_s=at_s)
            requests.append(request)
        return replace(self, requests=requests)

    @property
    def span_s(self) -> float:
        """Return the time from the first to the last arrival of requests that wait for no answer."""
        arrivals = self._arrivals()
        return max(1e-9, arrivals[-1] - arrivals[0])

    @property
    def comes_at_once(self) -> bool:
        """Return whether all those requests arrive at the same time, so that no pace gives a load."""
        return len(set(self._arrivals())) == 1

    def _arrivals(self) -> list[float]:
        """Return when the requests arrive that wait for no answer."""
        return [request.at_s for request in self.requests if request.follows is None]

    @property
    def longest(self) -> int:
        """Return the most tokens that a prompt and its answer have."""
        return max(each.num_tokens + each.num_output_tokens for each in self.requests)

    def in_sessions(self) -> Trace:
        """Return the trace as a closed loop: each turn of a session is sent some time after the answer before.

        The pause is that of the trace; without one, the time from the end of the turn before to this one's arrival, or
        from its arrival, where its end is not known.
        """
        requests = []
        for request, before in _previous_turns(self.requests):
            if before is not None:
                between_s = max(0.0, request.at_s - before.at_s - before.took_s)
                pause_s = between_s if request.pause_s is None else request.pause_s
                request = replace(request, follows=before.idx, pause_s=pause_s)
            requests.append(request)
        return replace(self, requests=requests)


def _previous_turns(requests: Sequence[Request]) -> Iterator[tuple[Request, Request | None]]:
    """Yield each request and the turn of its session before it, or None.

    That is the last one of the session that the trace names. Without a name, it is the one whose whole prompt this one
    repeats, if that prompt's last block was new then: a beginning that many prompts share makes no session.
    """
    turns: dict[int | str, Request] = {}  # each session's last, by the session's name and by its prompt's last block
    seen: set[int] = set()
    for request in requests:
        names = reversed(request.blocks) if request.session is None else (request.session,)
        yield request, next((turns[name] for name in names if name in turns), None)
        if request.session is not None:
            turns[request.session] = request
        if request.blocks and (request.blocks[-1] not in seen or request.blocks[-1] in turns):
            turns[request.blocks[-1]] = request
        seen.update(request.blocks)


NumTokens = Annotated[int, msgspec.Meta(ge=0)]


class Turn(msgspec.Struct, frozen=True):
    """A turn in aiperf's input files; each prompt has the texts of all turns before it. Times in milliseconds."""

    text: str
    timestamp: float | None = None
    delay: float = 0.0
    output_length: NumTokens | None = None


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a trace. Times are in seconds, but for `timestamp`: milliseconds since the recording started."""

    timestamp: float | None = None
    input_length: NumTokens | None = None
    output_length: NumTokens | None = None
    hash_ids: list[int] | None = None
    # Fields that `kvist route --record-requests` adds.
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    recording_started_at: float = 0.0
    status: int = 200
    model: str | None = None
    worker: str | None = None
    streamed: bool = True
    queue_s: float = 0.0
    first_byte_s: float | None = None
    total_s: float | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    held_tokens: int | None = None
    in_flight_tokens: int = 0
    held_or_in_flight_tokens: int = 0
    exact_cache: bool = True
    identically_rendered_tokens: int | None = None
    session: str | None = None
    pause_s: float | None = None
    tenant: str | None = None
    # Prompts as text: lines for `vllm bench serve --dataset-name custom`, aiperf's input files.
    prompt: str | None = None
    output_tokens: NumTokens | None = None
    text: str | None = None
    text_input: str | None = None
    turns: list[Turn] = []

    @property
    def tokens_per_block(self) -> int:
        """Return the `block_size`; recordings have none in lines of prompts whose tokens were not known."""
        return self.block_size or TRACE_BLOCK_SIZE


def read_lines(path: Path) -> Iterator[tuple[str, TraceLine]]:
    """Yield the place and content of each line of a file, or of a folder's files; raises InvalidValueError.

    For a text, a line for each of its prompts follows, with hashes of its characters. Without time stamps they come one
    a second.
    """
    decode, num_lines = msgspec.json.Decoder(TraceLine, strict=False).decode, 0
    for part in sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]:
        for number, text in enumerate(_lines(part), 1):
            if text.strip():
                place = f"{part}, line {number}"
                try:
                    line = decode(text)
                except (msgspec.DecodeError, UnicodeEncodeError) as error:
                    raise InvalidValueError(place, text.strip()[:80], f"a request ({error})") from None
                for each in _hash_prompts(line, 1e3 * num_lines):
                    yield place, each
                    num_lines += 1


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """Return the requests of a trace, which is a file of JSON lines or a folder of them; raises InvalidValueError.

    A line is Mooncake's {"timestamp": ms, "input_length", "output_length", "hash_ids": [an id for each block of 512
    tokens]}, or has a prompt, of whose text 256 characters are a block of 64 tokens. Without time stamps requests come
    one a second. Lines with a status other than 200 are skipped. Recorded answers leave in caches what the next turn
    repeats of them.
    """
    requests: list[Request] = []
    block_size: int | None = None
    for place, line in read_lines(path):
        if line.status != HTTPStatus.OK:
            continue
        if line.hash_ids:
            block_size = block_size or line.tokens_per_block
            if line.tokens_per_block != block_size:
                expected = f"{block_size}, as in lines before"
                raise InvalidValueError(f"{place}: block_size", line.tokens_per_block, expected)
        requests.append(_parse_request(place, line))
    if not requests:
        raise InvalidValueError("trace", str(path), "a line for each request")
    requests = sorted(requests, key=lambda request: request.at_s)[:num_requests]
    begins_at_s = requests[0].at_s
    requests = [replace(each, idx=idx, at_s=each.at_s - begins_at_s) for idx, each in enumerate(requests)]
    block_size, answers = block_size or line.tokens_per_block, {}
    for request, before in _previous_turns(requests):
        if before is not None and before.took_s > 0 and request.blocks[: len(before.blocks)] == before.blocks:
            end = (before.num_tokens + before.num_output_tokens) // block_size
            answers[before.idx] = request.blocks[len(before.blocks) : end]
    return Trace([replace(each, answer_blocks=answers.get(each.idx, ())) for each in requests], block_size)


def _lines(path: Path) -> Iterator[str]:
    """Yield a file's lines; a gzip file that is being written, or was cut, ends with its last whole one."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        try:
            yield from lines
        except EOFError:
            return
        except (zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
            expected = f"lines of JSON, in gzip if it ends in .gz ({error})"
            if isinstance(error, UnicodeDecodeError) and b"MCAP" in error.object[:8]:
                expected = "recorded requests, not the events that `kvist record` writes and `kvist replay` reads"
            raise InvalidValueError("trace", str(path), expected) from None


def _parse_request(place: str, line: TraceLine) -> Request:
    if line.hash_ids is None or line.timestamp is None or not line.input_length:
        expected = "timestamp, an input_length of 1 or more, and hash_ids; or a prompt, text or turns"
        raise InvalidValueError(place, str(msgspec.to_builtins(line))[:80], expected)
    at_s = line.recording_started_at + line.timestamp / 1e3
    blocks = tuple(line.hash_ids[: line.input_length // line.tokens_per_block])
    request = Request(0, at_s, blocks, line.input_length, line.output_length or 1, took_s=line.total_s or 0.0)
    return replace(request, pause_s=line.pause_s, session=line.session)


def _hash_prompts(line: TraceLine, default_timestamp: float) -> Iterator[TraceLine]:
    """Yield the line, or if it has texts instead of hashes, one for each prompt: a text after all those before it."""
    turns, text = line.turns, line.prompt or line.text or line.text_input
    if text:
        turns = [Turn(text, output_length=line.output_length or line.output_tokens)]
    if not turns or (line.hash_ids is not None and line.timestamp is not None and line.input_length):
        yield line
        return
    prompt, timestamp = "", default_timestamp if line.timestamp is None else line.timestamp
    for turn in turns:
        prompt += turn.text
        timestamp = timestamp + turn.delay if turn.timestamp is None else turn.timestamp
        num_tokens, num_output = max(1, len(prompt) // CHARACTERS_A_TOKEN), turn.output_length or DEFAULT_OUTPUT_TOKENS
        hashes = _hash_blocks(prompt)
        yield TraceLine(timestamp, num_tokens, num_output, hashes, block_size=TEXT_BLOCK_SIZE, status=line.status)


def _hash_blocks(text: str) -> list[int]:
    """Return a hash of each full block of a text with all blocks before it."""
    size, blocks = TEXT_BLOCK_SIZE * CHARACTERS_A_TOKEN, [0]
    for end in range(size, len(text) + 1, size):
        blocks.append(xxh3_64_intdigest(text[end - size : end].encode(errors="replace"), blocks[-1]))
    return blocks[1:]


MADE_UP_BLOCK_SIZE = 64
MOST_TOKENS = 60_000


def conversations(num_requests: int, seed: int = 0) -> Trace:
    """Return chats of 1 to 15 turns, a minute or so apart, many with long documents in them; half is new.

    Lengths and reuse are about those published of Mooncake's conversations: 12,000 and 340 tokens, 40 % found at best.
    """
    random, sessions = Random(f"conversations {seed}"), []
    for session in range(num_requests):
        turns, at_s, system = [], 0.0, random.randrange(8)
        for _ in range(min(15, 1 + int(random.expovariate(1 / 1.4)))):
            document = int(random.lognormvariate(8.65, 1.0)) if random.random() < 0.75 else 0
            num_new = document + 64 + int(random.expovariate(1 / 300))
            turns.append((at_s, num_new, 16 + int(random.expovariate(1 / 330))))
            at_s += 15 + random.expovariate(1 / 60)
        sessions.append(_make_session(session, system, 600, turns))
    return _start_at_random(sessions, random)


def tool_agents(num_requests: int, seed: int = 0) -> Trace:
    """Return agents with 12 sets of tools, prompts of 2,000 to 7,500 tokens, that call tools some seconds apart.

    Lengths and reuse are about those published of Mooncake's tool agents: 8,600 and 180 tokens, 59 % found at best.
    """
    random, sessions = Random(f"tool agents {seed}"), []
    for session in range(num_requests):
        turns, at_s, tools = [], 0.0, int(12 * random.random() ** 2)
        for _ in range(min(30, 1 + int(random.expovariate(1 / 1.5)))):
            turns.append((at_s, 64 + int(random.lognormvariate(7.3, 1.2)), 12 + int(random.expovariate(1 / 170))))
            at_s += 3 + random.expovariate(1 / 12)
        sessions.append(_make_session(session, tools, 2000 + 500 * tools, turns))
    return _start_at_random(sessions, random)


def _make_session(session: int, shared: int, num_shared: int, turns: Sequence[tuple[float, int, int]]) -> list[Request]:
    """Return a session's requests, each of which repeats the prompt and the answer before and adds to them.

    The first `num_shared` tokens are those of all sessions with this `shared`. Turns are times with the numbers of new
    tokens and of the answer's.
    """
    first_own, num_tokens, requests = num_shared // MADE_UP_BLOCK_SIZE, num_shared, []
    names = [(-1 - shared, idx) for idx in range(first_own)]
    for at_s, num_new, num_output in turns:
        num_tokens += num_new
        if num_tokens > MOST_TOKENS:
            break
        full, end = num_tokens // MADE_UP_BLOCK_SIZE, (num_tokens + num_output) // MADE_UP_BLOCK_SIZE
        names += [(session, idx) for idx in range(len(names), end)]
        blocks = tuple((owner * 100_003 + idx) & 0xFFFFFFFFFFFFFFFF for owner, idx in names)
        requests.append(Request(0, at_s, blocks[:full], num_tokens, num_output, blocks[full:end]))
        num_tokens += num_output
    return requests


def _start_at_random(sessions: Sequence[Sequence[Request]], random: Random) -> Trace:
    """Return as many first requests as there are sessions, which begin at random, a second apart on average."""
    requests, begins_at_s = [], 0.0
    for session in sessions:
        begins_at_s += random.expovariate(1.0)
        requests += [replace(request, at_s=begins_at_s + request.at_s) for request in session]
    requests = sorted(requests, key=lambda request: request.at_s)[: len(sessions)]
    return Trace([replace(request, idx=idx) for idx, request in enumerate(requests)], MADE_UP_BLOCK_SIZE)
