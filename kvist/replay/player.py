"""Plays a script: sends each source's messages to a publication of its own, at the recorded pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Message, Publication, open_publication
from kvist.events.transports.broker import BrokerUrl, is_broker_url, redacted
from kvist.replay.blocks import SentBuffer
from kvist.replay.recording import RecordedSource
from kvist.replay.script import Pace, Script

RETRY_S = 0.002
REPEAT_S = 1.0
"""How often each stream's last message is repeated once all is played."""

_TURN_S = 0.001  # how long to send before other tasks of the event loop run
_MIN_SLEEP_S = 0.0005  # shorter waits are not worth a turn of the loop


class Player:
    """Sends a script's messages, those of one source in order, to its publication.

    It waits for a transport that is full, and drops nothing. Subscribers can ask for the last messages again, and for
    what a rank held before those, if the recording has it (`SentBuffer`).
    """

    def __init__(
        self,
        script: Script,
        publications: Mapping[RecordedSource, Publication],
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Play to these publications; the caller closes them."""
        self._script = script
        self._pace = pace or Pace()
        self._clock = clock
        self._sleep = sleep
        self._publications = publications
        self._sent = {source: SentBuffer() for source in publications}
        for source, publication in publications.items():
            publication.serve_replay(self._sent[source])
        self.num_sent = 0
        self.num_sent_bytes = 0
        self.lag_s = 0.0

    @property
    def num_replays(self) -> int:
        return sum(sent.num_replays for sent in self._sent.values())

    async def play(self) -> None:
        """Play everything; raises RecordingError for damage, OSError if a transport breaks."""
        started_s = self._clock()
        turn_ends_s = started_s + _TURN_S
        for lines in self._script.lines():
            for line in lines:
                sent, message = self._sent_to(line.record.source), line.record.message
                if line.is_early:
                    sent.append(message)
                    continue
                due_s = started_s + self._pace.due_s(line.round_idx, line.record)
                now_s = self._clock()
                if due_s - now_s > _MIN_SLEEP_S or now_s >= turn_ends_s:
                    await self._sleep(max(0.0, due_s - now_s))
                    now_s = self._clock()
                    turn_ends_s = now_s + _TURN_S
                self.lag_s = max(0.0, now_s - due_s)
                if sent.append(message):
                    await self._send(line.record.source, message)
                    self.num_sent += 1
                    self.num_sent_bytes += len(message.payload)

    async def repeat(self) -> None:
        """Repeat each rank's last message every `REPEAT_S` until cancelled, to show subscribers what they missed."""
        while True:
            await self._sleep(REPEAT_S)
            for source, sent in self._sent.items():
                for message in sent.last_messages():
                    await self._send(source, message)

    async def _send(self, source: RecordedSource, message: Message) -> None:
        while True:
            try:
                self._publications[source].send(message)
                return
            except BlockingIOError:
                await self._sleep(RETRY_S)

    def _sent_to(self, source: RecordedSource) -> SentBuffer:
        if source not in self._sent:
            raise InvalidValueError("source", source.name, "one that was there when playing began")
        return self._sent[source]


def open_publications(urls: Sequence[str], sources: Sequence[RecordedSource]) -> dict[RecordedSource, Publication]:
    """Open a publication for each source: one URL each, or a single one that gives each source another address.

    A single URL may be `tcp://` with port 0, a broker's without a worker (each source's name is used), or `memory://`
    (each source's position is appended). Raises InvalidValueError.
    """
    publications: dict[RecordedSource, Publication] = {}
    try:
        for source, url in zip(sources, _urls(urls, sources), strict=True):
            publications[source] = open_publication(url, source.name if _needs_worker(url) else None)
    except BaseException:
        close_publications(publications)
        raise
    return publications


def close_publications(publications: Mapping[RecordedSource, Publication]) -> None:
    for publication in publications.values():
        publication.close()


def _urls(urls: Sequence[str], sources: Sequence[RecordedSource]) -> list[str]:
    if len(urls) == len(sources) or not sources:
        return list(urls[: len(sources)])
    if len(urls) == 1:
        (url,) = urls
        if _needs_worker(url):
            return [url for _ in sources]
        endpoint = Endpoint.parse(url)
        if endpoint.scheme == "tcp" and endpoint.address.endswith(":0"):
            return [url for _ in sources]
        if endpoint.scheme == "memory":
            return [f"{url}.{idx}" for idx in range(len(sources))]
    names = ", ".join(source.name for source in sources)
    shown = [redacted(url) for url in urls]
    raise InvalidValueError("to", shown, f"one URL for each of {len(sources)} sources ({names}), or one with port 0")


def _needs_worker(url: str) -> bool:
    return is_broker_url(url) and BrokerUrl.parse(url).worker is None
