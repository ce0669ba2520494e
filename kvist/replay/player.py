"""Playing a script: each source's messages to a publication of its own, at their own pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Message, Publication, open_publication
from kvist.events.transports.broker import BrokerUrl, is_broker_url, redacted
from kvist.replay.blocks import SentBuffer
from kvist.replay.recording import RecordedSource
from kvist.replay.script import Line, Pace, Script

REPLAY_BYTES = 256 << 20
POLL_S = 0.1
"""How often it is looked whether more was written to what is followed."""
RETRY_S = 0.002
REPEAT_S = 1.0
"""How often, once all is played, each stream's last message is repeated."""

_TURN_S = 0.001  # how long messages are sent before the event loop's other tasks get a turn
_MIN_SLEEP_S = 0.0005  # shorter waits are not worth a turn of the loop


class Player:
    """Sends what a script says; messages of one source in the script's order, to one publication.

    Nothing is dropped: a transport that is full is waited for. A subscriber that misses messages can ask for the last
    `replay_bytes` of them, and for what a rank held before those, if the recording tells.
    """

    def __init__(
        self,
        script: Script,
        publications: Mapping[RecordedSource, Publication],
        *,
        pace: Pace | None = None,
        replay_bytes: int = REPLAY_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Play to these publications, which their owner closes."""
        self._script = script
        self._pace = pace or Pace()
        self._clock = clock
        self._sleep = sleep
        self._outlets = {source: _Outlet(publication, replay_bytes) for source, publication in publications.items()}
        self.num_sent = 0
        self.num_sent_bytes = 0
        self.lag_s = 0.0

    @property
    def num_asked(self) -> int:
        return sum(outlet.sent.num_asked for outlet in self._outlets.values())

    async def play(self) -> None:
        """Play everything; raises RecordingError where the recording is damaged, OSError if a transport breaks."""
        started_s = self._clock()
        turn_ends_s = started_s + _TURN_S
        for lines in self._script.lines():
            if lines is None:
                await self._sleep(POLL_S)
                continue
            for line in lines:
                if line.is_early:
                    self._outlet(line).sent.append(line.record.message)
                    continue
                due_s = started_s + self._pace.due_s(line.round_idx, line.record)
                now_s = self._clock()
                if due_s - now_s > _MIN_SLEEP_S or now_s >= turn_ends_s:
                    await self._sleep(max(0.0, due_s - now_s))
                    now_s = self._clock()
                    turn_ends_s = now_s + _TURN_S
                self.lag_s = max(0.0, now_s - due_s)
                await self._send(line)

    async def repeat(self) -> None:
        """Repeat each rank's last message every `REPEAT_S`, until cancelled: it tells a subscriber what it lacks."""
        while True:
            await self._sleep(REPEAT_S)
            for outlet in self._outlets.values():
                for message in outlet.sent.last_messages():
                    await outlet.send(message, self._sleep)

    async def _send(self, line: Line) -> None:
        outlet, message = self._outlet(line), line.record.message
        if not outlet.sent.append(message):
            return
        await outlet.send(message, self._sleep)
        self.num_sent += 1
        self.num_sent_bytes += len(message.payload)

    def _outlet(self, line: Line) -> _Outlet:
        outlet = self._outlets.get(line.record.source)
        if outlet is None:
            raise InvalidValueError("source", line.record.source.name, "one that was there when playing began")
        return outlet


class _Outlet:
    """Where one source's messages go."""

    def __init__(self, publication: Publication, replay_bytes: int) -> None:
        self.publication = publication
        self.sent = SentBuffer(replay_bytes)
        publication.serve_replay(self.sent)

    async def send(self, message: Message, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Send a message, however long the transport makes it wait."""
        while True:
            try:
                self.publication.send(message)
                return
            except BlockingIOError:
                await sleep(RETRY_S)


def open_publications(urls: Sequence[str], sources: Sequence[RecordedSource]) -> dict[RecordedSource, Publication]:
    """Open a publication for each source: one URL each, or a single one that gives each source another address.

    Those are `tcp://` with port 0, a broker's without a worker, which is then called as the source is, and `memory://`,
    where the source's position is appended. Raises InvalidValueError.
    """
    publications: dict[RecordedSource, Publication] = {}
    try:
        for source, url in zip(sources, _urls(urls, sources), strict=True):
            publications[source] = open_publication(url, source.name if _leaves_worker_out(url) else None)
    except InvalidValueError:
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
        if _leaves_worker_out(url):
            return [url for _ in sources]
        endpoint = Endpoint.parse(url)
        if endpoint.scheme == "tcp" and endpoint.address.endswith(":0"):
            return [url for _ in sources]
        if endpoint.scheme == "memory":
            return [f"{url}.{idx}" for idx in range(len(sources))]
    names = ", ".join(source.name for source in sources)
    shown = [redacted(url) for url in urls]
    raise InvalidValueError("to", shown, f"one URL for each of {len(sources)} sources ({names}), or one with port 0")


def _leaves_worker_out(url: str) -> bool:
    return is_broker_url(url) and BrokerUrl.parse(url).worker is None
