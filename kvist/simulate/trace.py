"""Requests to simulate: read from a trace, or made up."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from random import Random

from kvist.errors import InvalidValueError

TRACE_BLOCK_SIZE = 512


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
    """Hashes that the blocks behind the prompt's have once the answer fills them, as far as they come again."""
    follows: int | None = None
    """The `idx` of the request whose answer it waits for, in a closed loop; `at_s` is nominal then."""
    pause_s: float = 0.0
    """How long after that answer it is sent."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival, and how many tokens their blocks have."""

    requests: Sequence[Request]
    block_size: int

    def spread(self, seed: int, factor: float = 1.0, burstiness: float = 1.0) -> Trace:
        """Return the trace `factor` times as slow, gaps drawn anew around the mean gap of their neighbourhood.

        The order stays, and so do the pauses of sessions in a closed loop. What the trace lacks, chance, is what a seed
        adds: gaps are gamma distributed with this shape, so that 1 is Poisson and less comes in bursts.
        """
        random, at_s = Random(seed), 0.0
        spread: dict[int, float] = {}
        arrivals = [request.at_s for request in self.requests if request.follows is None]
        last = len(arrivals) - 1
        for request in self.requests:
            if request.follows is None:
                begin, end = max(0, len(spread) - 16), min(last, len(spread) + 16)
                gap_s = (arrivals[end] - arrivals[begin]) / max(1, end - begin)
                at_s += gap_s * factor * random.gammavariate(burstiness, 1.0 / burstiness)
                spread[request.idx] = at_s
        requests = [replace(each, at_s=spread.get(each.idx, each.at_s)) for each in self.requests]
        return replace(self, requests=requests)

    @property
    def span_s(self) -> float:
        """Return the time in which requests come that wait for no answer."""
        arrivals = [request.at_s for request in self.requests if request.follows is None]
        return max(1e-9, arrivals[-1] - arrivals[0])

    def in_sessions(self) -> Trace:
        """Return the trace with each turn of a session to be sent some time after the answer to the turn before.

        A turn goes on with the request whose whole prompt it repeats, if that prompt's last block was new then: what
        many begin with is no session. The pause is what is between both arrivals in the trace.
        """
        turns: dict[int, Request] = {}  # the last of a session, by the last block of its prompt
        seen: set[int] = set()
        requests = []
        for request in self.requests:
            before = next((turns[block] for block in reversed(request.blocks) if block in turns), None)
            if before is not None:
                request = replace(request, follows=before.idx, pause_s=request.at_s - before.at_s)
            if request.blocks and (request.blocks[-1] not in seen or request.blocks[-1] in turns):
                turns[request.blocks[-1]] = request
            seen.update(request.blocks)
            requests.append(request)
        return replace(self, requests=requests)


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """Return the requests of a Mooncake trace, JSON lines, or of all in a folder; raises InvalidValueError.

    A line is {"timestamp": ms, "input_length", "output_length", "hash_ids": [an id for each block of 512 tokens]}.
    `kvist route --record-requests` adds the `block_size`, and the `status`: only requests that have 200 are returned.
    """
    requests: list[Request] = []
    block_size: int | None = None
    for part in sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]:
        for number, line in enumerate(_lines(part), 1):
            place = f"{part}, line {number}"
            request, own_block_size = _parse(place, line) if line.strip() else (None, None)
            if request is not None:
                requests.append(request)
                block_size = block_size or own_block_size
                if own_block_size not in (None, block_size):
                    raise InvalidValueError(f"{place}: block_size", own_block_size, f"{block_size}, as in lines before")
    if not requests:
        raise InvalidValueError("trace", str(path), "a line for each request")
    requests = sorted(requests, key=lambda request: request.at_s)[:num_requests]
    begins_at_s = requests[0].at_s
    requests = [replace(each, idx=idx, at_s=each.at_s - begins_at_s) for idx, each in enumerate(requests)]
    return Trace(requests, block_size or TRACE_BLOCK_SIZE)


def _lines(path: Path) -> Iterator[str]:
    """Yield a file's lines; of one of gzip that is being written, or was cut, those that are whole."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        try:
            yield from lines
        except EOFError:
            return
        except (zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise InvalidValueError("trace", str(path), f"lines of JSON, in gzip if it ends in .gz ({error})") from None


def _parse(place: str, line: str) -> tuple[Request | None, int | None]:
    """Return a request that was answered, and of how many tokens its blocks are if it has any."""
    try:
        given = json.loads(line)
        num_tokens, num_output_tokens = int(given["input_length"]), int(given["output_length"])
        block_size = int(given.get("block_size", TRACE_BLOCK_SIZE))
        blocks = tuple(map(int, given["hash_ids"]))[: num_tokens // block_size]
        at_s = float(given.get("began", 0)) + float(given["timestamp"]) / 1e3
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        expected = "timestamp, input_length, output_length and hash_ids"
        raise InvalidValueError(place, line.strip()[:80], f"{expected} ({error!r})") from None
    if given.get("status", HTTPStatus.OK) != HTTPStatus.OK:
        return None, None
    if num_tokens < 1:
        raise InvalidValueError(f"{place}: input_length", num_tokens, "1 or more")
    request = Request(0, at_s, blocks, num_tokens, max(1, num_output_tokens))
    return request, block_size if given["hash_ids"] else None


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
            turns.append(
                (at_s, document + 64 + int(random.expovariate(1 / 300)), 16 + int(random.expovariate(1 / 330)))
            )
            at_s += 15 + random.expovariate(1 / 60)
        sessions.append(_session(session, system, 600, turns))
    return _begun_at_random(sessions, num_requests, random)


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
        sessions.append(_session(session, tools, 2000 + 500 * tools, turns))
    return _begun_at_random(sessions, num_requests, random)


def _session(session: int, shared: int, num_shared: int, turns: Sequence[tuple[float, int, int]]) -> list[Request]:
    """Return a session's requests: each prompt repeats what was said, and adds to it."""
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


def _begun_at_random(sessions: Sequence[Sequence[Request]], num_requests: int, random: Random) -> Trace:
    """Return the first requests of sessions that begin at random, a second apart on average."""
    requests, begins_at_s = [], 0.0
    for session in sessions:
        begins_at_s += random.expovariate(1.0)
        requests += [replace(request, at_s=begins_at_s + request.at_s) for request in session]
    requests = sorted(requests, key=lambda request: request.at_s)[:num_requests]
    return Trace([replace(request, idx=idx) for idx, request in enumerate(requests)], MADE_UP_BLOCK_SIZE)
