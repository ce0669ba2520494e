"""Slots: the small integers that stand for ranks. A rank's slot is given up at once, and reused only when swept."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.radix.compiled.layout import COMPANION, GROUPED, LIVE, MAX_SLOTS, RETIRED, RULE, Record


class SlotTable:
    """Maps ranks to slots; what each holds stands in the core."""

    def __init__(self, core: Record) -> None:
        self._core = core
        self.table = core["slots"]
        self._rules = core["rules"]
        self._slots: dict[WorkerRank, int] = {}
        self.num_given = 0
        self._ranks_of: dict[str, list[WorkerRank]] = {}
        self._free: list[int] = []
        # Copied when a slot is reused, so that an earlier match still names whom it meant.
        self.ranks: list[WorkerRank] = []

    def get(self, source: WorkerRank) -> int | None:
        """Return the slot that stands for a rank until it is cleared or forgotten, None while it has none."""
        return self._slots.get(source)

    def giving_of(self, source: WorkerRank) -> int | None:
        """Return a number of the rank's last clearing, which no other one has or had; None while it has no slot."""
        slot = self._slots.get(source)
        return None if slot is None else int(self.table[slot]["giving"])

    def items(self) -> list[tuple[WorkerRank, int]]:
        return list(self._slots.items())

    def ranks_of(self, worker: str) -> list[WorkerRank]:
        return list(self._ranks_of.get(worker, ()))

    def add(self, source: WorkerRank) -> int:
        """Give a rank the lowest free slot."""
        if self._free:
            slot = heapq.heappop(self._free)
            self.ranks = list(self.ranks)
            self.ranks[slot] = source
        else:
            slot = len(self.ranks)
            if slot == MAX_SLOTS:
                raise InvalidValueError("ranks", slot + 1, f"at most {MAX_SLOTS} ranks, with those not yet swept")
            self.ranks.append(source)
        self._slots[source] = slot
        self.num_given += 1
        self._ranks_of.setdefault(source.worker, []).append(source)
        self.table[slot] = (0, 0, LIVE, 0, self.num_given)
        return slot

    def remove(self, source: WorkerRank) -> int | None:
        """Take the slot from a rank; return it if blocks still refer to it, and a sweep must free it."""
        slot = self._slots.pop(source)
        self._ranks_of[source.worker].remove(source)
        if not self._ranks_of[source.worker]:
            del self._ranks_of[source.worker]
        is_referenced = self.table[slot]["num_held"] > 0
        self.table[slot] = (0, 0, RETIRED, 0, 0)
        self.set_rule(slot, None)
        if not is_referenced:
            self.free(slot)
            return None
        self._core["num_retired"] += 1
        self._core["retirement"] += 1
        return slot

    def set_rule(self, slot: int, rule: tuple[Any, ...] | None) -> None:
        """Note what hits of a slot's rank need, as `RULE` has it; None if it has one group.

        With a companion go the rules that are about it.
        """
        grouped, count = self._core["grouped"], int(self._core["num_grouped"])
        if rule is None and self._rules[slot]["role"] == COMPANION:
            for each in grouped[:count][self._rules[grouped[:count]]["companion"] == slot].tolist():
                self.set_rule(each, None)
            count = int(self._core["num_grouped"])
        if self._rules[slot]["role"] == GROUPED:
            place = grouped[:count].tolist().index(slot)
            grouped[place] = grouped[count - 1]
            count -= 1
        self._core["num_companions"] -= self._rules[slot]["role"] == COMPANION
        self._rules[slot] = rule or np.zeros((), RULE)
        self._core["num_companions"] += self._rules[slot]["role"] == COMPANION
        if self._rules[slot]["role"] == GROUPED:
            grouped[count] = slot
            count += 1
        self._core["num_grouped"] = count

    def free_swept(self, slots: list[int]) -> None:
        """Make retired slots usable again; no block may refer to them any more."""
        self._core["num_retired"] -= len(slots)
        for slot in slots:
            self.free(slot)

    def free(self, slot: int) -> None:
        """Put a slot back on the list of free ones, or off the end of all."""
        self.table[slot] = (0, 0, 0, 0, 0)
        if slot == len(self.ranks) - 1:
            self.ranks = self.ranks[:-1]
        else:
            heapq.heappush(self._free, slot)
        if len(self._free) == len(self.ranks):
            self.ranks, self._free = [], []
