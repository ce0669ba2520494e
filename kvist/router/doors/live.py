"""The state that the live page (`page`) shows, which the keeper has; viewers get what has changed since a number.

    workers    as in `GET /workers`, each when it has changed
    problems   what is wrong, and since when
    requests   the last of those that `journal` describes
    prefixes   the tree of the prefixes of their prompts, and who holds them
    regret     as in `GET /regret`

Each part is encoded once for all viewers. It is recomputed only so often that all of this takes no more than a small
part of one core, however large the fleet is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from kvist.errors import InvalidValueError
from kvist.router.doors.explain import explain_readiness, explain_workers
from kvist.router.doors.journal import JournalEntry
from kvist.router.doors.prefixes import PrefixTree
from kvist.router.doors.problems import problems_of, shown_of
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.index import FleetIndex
from kvist.router.regret import Regret

STATE_PATH = "/ui/state"
MAX_REQUESTS = 1000
MIN_INTERVAL_S, UNWATCHED_INTERVAL_S = 0.25, 5.0
BASE_REST, VIEW_REST = 79, 349
"""After a part was computed, it rests for so many times as long as that took: the part of all views, or of one."""
MAX_ENDED_PROBLEMS = 100
REGRET_WINDOW_S = 600.0
VIEWS = ("fleet", "requests", "prefixes", "regret", "health")

_encode = msgspec.json.Encoder().encode


class _Section:
    """A part of the state that is sent whole whenever it has changed."""

    def __init__(self, make: Callable[[], Any], rest: int) -> None:
        self._make, self._rest, self._due_s = make, rest, 0.0
        self.body, self.number = msgspec.Raw(b"null"), 0

    def refresh(self, number: int) -> bool:
        """Recompute it if that is due, and give it this number if it has changed; return whether it was due."""
        began_s = time.monotonic()
        if began_s < self._due_s:
            return False
        body = msgspec.Raw(_encode(self._make()))
        self._due_s = began_s + max(MIN_INTERVAL_S, self._rest * (time.monotonic() - began_s))
        if body != self.body:
            self.body, self.number = body, number
        return True


class LiveState:
    """The state from `start` to `close`; it is kept up to date, less often without viewers."""

    def __init__(
        self,
        fleet: Fleet,
        models: Models,
        load: LoadTracker,
        index: FleetIndex | None,
        regret: Regret,
        explain_more: Callable[[], dict[str, Any]],
    ) -> None:
        """`explain_more` returns the parts of readiness that are not about workers."""
        self._fleet, self._models, self._load, self._index = fleet, models, load, index
        self._regret, self._explain_more = regret, explain_more
        # It starts at the time, so that a viewer of an earlier process has a smaller number, and gets everything.
        self._number = self._whole_since = int(time.time() * 1000)
        self._workers: dict[str, tuple[int, msgspec.Raw]] = {}
        self._problems: dict[str, dict[str, Any]] = {}
        self._requests: deque[tuple[int, msgspec.Raw]] = deque(maxlen=MAX_REQUESTS)
        self._num_skipped = 0
        self._tree = PrefixTree(models, index, regret)
        self._base = _Section(self._make_base, BASE_REST)
        self._views = {
            "prefixes": _Section(self._tree.explain, VIEW_REST),
            "regret": _Section(lambda: regret.report(time.monotonic(), REGRET_WINDOW_S), VIEW_REST),
        }
        self._next_refresh: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Refresh regularly, so that problems are recorded without viewers, too."""
        self._refresh()
        self._next_refresh = asyncio.get_running_loop().call_later(UNWATCHED_INTERVAL_S, self.start)

    def close(self) -> None:
        if self._next_refresh is not None:
            self._next_refresh.cancel()

    def add(self, entry: JournalEntry) -> None:
        self._requests.append((self._number + 1, msgspec.Raw(entry.row)))
        self._num_skipped += entry.num_skipped
        self._tree.add(entry, time.monotonic())

    def state(self, query: str) -> bytes:
        """Return the changes in a view (`view=`) since a number (`since=`), as JSON; raises InvalidValueError.

        If `is_whole`, it is the whole state, as the number is 0, too old, or another process's.
        """
        asked = {name: values[-1] for name, values in parse_qs(query).items()}
        view, since = asked.get("view", VIEWS[0]), asked.get("since", "0")
        if view not in VIEWS:
            raise InvalidValueError("view", view, f"one of {', '.join(VIEWS)}")
        if not since.isdecimal():
            raise InvalidValueError("since", since, "the `number` of an earlier answer")
        self._refresh(view)
        known = int(since)
        is_whole = not self._whole_since <= known <= self._number
        known = 0 if is_whole else known
        news: dict[str, Any] = {"number": self._number, "is_whole": is_whole, "now": round(time.time(), 3)}
        if self._base.number > known:
            news["fleet"] = self._base.body
        news["workers"] = [row for number, row in self._workers.values() if number > known]
        if view == "requests":
            news["requests"] = [row for number, row in self._requests if number > known]
        elif view in self._views and self._views[view].number > known:
            news[view] = self._views[view].body
        return _encode(news)

    def _refresh(self, view: str | None = None) -> None:
        number = self._number + 1
        sections = [self._base, *([self._views[view]] if view in self._views else [])]
        was_made = [section.refresh(number) for section in sections]
        if any(was_made) or (self._requests and self._requests[-1][0] == number):
            self._number = number

    def _make_base(self) -> dict[str, Any]:
        """Return the part that every view shows, and update the rows of workers that have changed."""
        now_s, number, load, index = time.monotonic(), self._number + 1, self._load, self._index
        workers = explain_workers(self._fleet, load, index, self._regret, now_s)
        readiness = explain_readiness(self._fleet, self._models, None, is_draining=False) | self._explain_more()
        if index is not None:
            readiness["index"] = "ready" if index.has_joined else "compiling"
        self._update_problems(problems_of(workers, readiness))
        began_at = time.time() - now_s
        before, self._workers = self._workers, {}
        for worker in workers:
            for source in worker["kv_events"]["sources"]:
                age_s = source.pop("last_event_age_s")
                source["last_event_at"] = None if age_s is None else round(began_at + now_s - age_s, 1)
            row = msgspec.Raw(_encode(worker | {"shown": shown_of(worker)}))
            known = before.get(worker["url"])
            self._workers[worker["url"]] = known if known is not None and known[1] == row else (number, row)
        if not before.keys() <= self._workers.keys():  # only a whole state shows that a worker is gone
            self._whole_since = number
        return {
            "ready": readiness["ready"],
            "reason": readiness["reason"],
            "index": readiness.get("index"),
            "queued": load.num_waiting,
            "running": load.num_running,
            "dispatched": load.num_dispatched,
            "blocks": None if index is None or index.radix is None else index.radix.statistics().num_blocks,
            "models": [*readiness["models"]],
            "requests_skipped": self._num_skipped,
            "problems": sorted(self._problems.values(), key=lambda each: -each["since"]),
        }

    def _update_problems(self, problems: dict[str, dict[str, Any]]) -> None:
        """Record since when each problem exists, and until when it did."""
        now = round(time.time(), 1)
        for key, problem in problems.items():
            before = self._problems.get(key)
            since = now if before is None or before["until"] is not None else before["since"]
            self._problems[key] = problem | {"since": since, "until": None}
        for key, problem in self._problems.items():
            if key not in problems:
                problem["until"] = problem["until"] or now
        ended = sorted((each["until"], key) for key, each in self._problems.items() if each["until"] is not None)
        for _, key in ended[:-MAX_ENDED_PROBLEMS]:
            del self._problems[key]
