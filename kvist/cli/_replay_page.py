"""`kvist replay --ui`: the live page over recordings, as of the moment that is asked for."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from kvist.errors import InvalidValueError
from kvist.events import Tier
from kvist.http import Request, Responder
from kvist.openai.errors import RequestError, error_body
from kvist.replay.history import History
from kvist.replay.statistics import RecordingStatistics, StatisticsCollector, curves
from kvist.router.doors.auth import require_administrator
from kvist.router.doors.keeper import Answer, Question, error_answer, json_answer
from kvist.router.doors.page import EVENTS_PATH, show_file, stream


class RecordingPage:
    """The handler of the page's requests, which must come from this machine."""

    def __init__(self, recordings: Mapping[str, StatisticsCollector]) -> None:
        """Show recordings under these names, each from its own beginning."""
        self._started_ms = int(time.time() * 1000)
        self._recordings = [(name, collector.result(), History(collector)) for name, collector in recordings.items()]
        self._end_ms = max(int(statistics.duration_s * 1000) for _, statistics, _ in self._recordings)

    def handle(self, request: Request, responder: Responder) -> Coroutine[Any, Any, None] | None:
        """Answer a request, as a handler of `HttpServer`."""
        check = partial(require_administrator, request, None)
        try:
            if request.path == EVENTS_PATH:
                check()
                return stream(request, responder, self._answer, check)
            show_file(request, responder)
        except RequestError as error:
            responder.answer(error.status, [(b"content-type", b"application/json")], error_body(error))
        return None

    async def _answer(self, question: Question) -> Answer:
        """Return the state at a moment (`at=`, in milliseconds) for a view (`view=`), if it is not known (`since=`)."""
        query = {name: values[-1] for name, values in parse_qs(question.query).items()}
        at = query.get("at", str(self._end_ms))
        if not at.isdecimal():
            error = InvalidValueError("at", at, "milliseconds after the beginning")
            return error_answer(RequestError(HTTPStatus.BAD_REQUEST, str(error)))
        number = self._started_ms + int(at)  # which no other process gives a state
        state: dict[str, Any] = {"number": number, "now": int(at) / 1000, "workers": []}
        if query.get("since") == str(number):
            return json_answer(state | {"is_whole": False})
        recordings = [_describe(*each, int(at)) for each in self._recordings]
        state |= {"is_whole": True, "fleet": {"problems": [], "recordings": recordings, "end_ms": self._end_ms}}
        if query.get("view") == "prefixes":
            state["prefixes"] = [history.tree(int(at)) for *_, history in self._recordings]
        return json_answer(state)


def _describe(name: str, statistics: RecordingStatistics, history: History, at_ms: int) -> dict[str, Any]:
    counts, num_distinct, num_placed = history.blocks(at_ms)
    tiers = [tier.name.lower() for tier in Tier]
    return {
        "name": name,
        "began_at": statistics.first_ns / 1e9,
        "duration_s": statistics.duration_s,
        "curves": curves(statistics.spans),
        "distinct": num_distinct,
        "placed": num_placed,
        "tiers": tiers,
        "ranks": [
            {
                **rank._asdict(),
                "tiers": dict(zip(tiers, held, strict=True)),
                "peak": statistics.ranks[rank].num_live_peak,
            }
            for (rank, _), held in zip(history.ranks, counts, strict=True)
        ],
    }
