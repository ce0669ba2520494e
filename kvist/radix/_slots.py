"""Slots: the small integers that stand for ranks. A rank's slot is given up at once, and reused only when swept."""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.radix.compiled.layout import COMPANION, GROUPED, LIVE, MAX_SLOTS, RETIRED, RULE, Record


class SlotTable:
    """Maps ranks to slots; the core says what each holds."""

    def __init__(self, core: Record) -> None:
        self._core = core
        self.table = core["slots"]
        self.by_rank: dict[WorkerRank, int] = {}
        self.ranks_of: defaultdict[str, list[WorkerRank]] = defaultdict(list)
        self.num_clearings = 0
        """A number that grows whenever a rank comes or is cleared."""
        self._free: list[int] = []
        # Copied when a slot is reused, so that earlier matches still name the ranks that they found.
        self.ranks: list[WorkerRank] = []

    def get_or_add(self, source: WorkerRank) -> int:
        """Return the slot of a rank; if it has none, it gets the lowest free one."""
        if source in self.by_rank:
            return self.by_rank[source]
        if self._free:
            slot = heapq.heappop(self._free)
            self.ranks = list(self.ranks)
            self.ranks[slot] = source
        else:
            slot = len(self.ranks)
            if slot == MAX_SLOTS:
                raise InvalidValueError("ranks", slot + 1, f"at most {MAX_SLOTS} ranks, with those not yet swept")
            self.ranks.append(source)
        self.by_rank[source] = slot
        self.ranks_of[source.worker].append(source)
        self.num_clearings += 1
        self.table[slot] = (0, 0, LIVE, 0, self.num_clearings)
        return slot

    def retire(self, source: WorkerRank) -> int | None:
        """Take the slot from a rank; return it if blocks still refer to it, so that a sweep must free it."""
        slot = self.by_rank.pop(source)
        self.ranks_of[source.worker].remove(source)
        if not self.ranks_of[source.worker]:
            del self.ranks_of[source.worker]
        is_referenced = self.table[slot]["num_held"] > 0
        self.table[slot] = (0, 0, RETIRED, 0, 0)
        if self._core["rules"][slot]["role"]:
            self.set_rule(slot, np.zeros((), RULE))
        if not is_referenced:
            self.free(slot)
            return None
        self._core["num_retired"] += 1
        self._core["retirement"] += 1
        return slot

    def set_rule(self, slot: int, rule: Record) -> None:
        """Set what hits of a slot's rank need, as `RULE` has it; the rules that need a former companion are dropped."""
        rules = self._core["rules"][: len(self.ranks)]
        if rules[slot]["role"] == COMPANION and rule["role"] != COMPANION:
            rules[(rules["role"] == GROUPED) & (rules["companion"] == slot)] = np.zeros((), RULE)
        rules[slot] = rule
        grouped = np.flatnonzero(rules["role"] == GROUPED)
        self._core["grouped"][: len(grouped)] = grouped
        self._core["num_grouped"] = len(grouped)
        self._core["num_companions"] = np.count_nonzero(rules["role"] == COMPANION)

    def free(self, slot: int) -> None:
        """Make a slot usable again; no block may refer to it any more."""
        self.table[slot] = (0, 0, 0, 0, 0)
        if slot == len(self.ranks) - 1:
            self.ranks = self.ranks[:-1]
        else:
            heapq.heappush(self._free, slot)
        if len(self._free) == len(self.ranks):
            self.ranks, self._free = [], []
