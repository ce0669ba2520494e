"""`GET /regret`: the cache hits that a fleet could have had, those it had, and where the others were lost.

    one cache    how much of a prompt a single cache as large as all of the fleet's would have held
    held         the most that any rank held of it
    routed       how much the chosen rank was expected to hold, with what was being computed there
    reported     how much its engine says it found

Tokens are lost between any two of these, each with a cause (`Cause`). What one cache would have held is estimated from
a bounded sample of blocks, chosen by hash (SHARDS: Waldspurger and others, FAST 2015): the number of distinct blocks of
the sample used since a block's last use, divided by the sampled share, is the size a cache needs to still hold it. Its
hits are counted as all tokens less its misses: misses are spread over many blocks, but hits are mostly of few, which
chance may have left out of the sample (SHARDS-adj, there). The other figures are counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate
from math import inf
from secrets import token_bytes
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FIRST_SHARE: Final = 32
"""One block in so many is sampled at first; fewer once there are more than MAX_SAMPLED."""
MAX_SAMPLED: Final = 4096
BUCKET_S: Final = 60.0
MAX_BUCKETS: Final = 60
MAX_ROWS: Final = 4096
MAX_PREFIXES: Final = 512
NUM_PREFIXES_REPORTED: Final = 10
MAX_NAMED: Final = 100
DEFAULT_TENANT: Final = "default"
"""The tenant of requests where no tenants are configured."""

_REPORTED_COUNTS: Final = (
    *("requests", "prompt_tokens", "one_cache", "held", "routed"),
    *("in_flight", "told_tokens", "predicted", "reported"),
)
_LIMIT: Final = np.uint64((1 << 64) // FIRST_SHARE)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


class Cause(StrEnum):
    """Why tokens that could have been cached were computed, or might have been found."""

    EVICTED = "evicted before reuse"
    UNKNOWN = "held, when last used, by a rank that is not known exactly"
    RENDERED = "rendered otherwise by the worker that had it last"
    VARIANT = "cached under another salt or adapter"
    ELSEWHERE = "held elsewhere, where it would have cost more"
    IN_FLIGHT = "just being computed elsewhere, where it would have cost more"
    ENGINE = "predicted, but not found by the engine"
    UNREAD = "not readable, so that nothing was looked for"


_REMEDIES: Final = {
    Cause.EVICTED: "more cache, or host memory behind it; fewer copies of one prefix",
    Cause.UNKNOWN: "its event stream is partial, resyncing or silent: GET /readiness says which",
    Cause.RENDERED: "the worker's template and tokeniser here, too: GET /readiness says what differs",
    Cause.VARIANT: "one salt for those who may share; adapters never can",
    Cause.ELSEWHERE: "nothing, most often: waiting was dearer; the price of waiting: docs/policy.md",
    Cause.IN_FLIGHT: "nothing, most often: a burst of one prompt was too much for one worker",
    Cause.ENGINE: "events and cache disagree; what is exact for which engine: docs/engines.md",
    Cause.UNREAD: "the model's tokeniser: --model-path; kvist_router_readings_total",
}


class Routed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that was answered. Lengths are in tokens."""

    model: str
    worker: str
    num_tokens: int
    held: int = 0
    routed: int = 0
    in_flight: int = 0
    """How much of `routed` was still being computed."""
    under_way: int = 0
    """The most that any candidate held or was computing."""
    reported: int | None = None
    """None where the engine does not say."""
    is_read: bool = True
    is_exact: bool = True
    """Whether the chosen rank's cache is known exactly."""
    alike: int | None = None
    """How many of its tokens that worker surely renders as the router does; None if all."""
    block_size: int = 1
    sampled: bytes = b""
    """Its blocks in the sample, as an array of SAMPLE: number, hash without salt and adapter, hash with them."""
    variant: int = 0
    """Identifies salt and adapter."""
    tenant: str = DEFAULT_TENANT

    @property
    def num_usable(self) -> int:
        """Return how much of it a cache can save: its full blocks, without the one of the last token."""
        return max(0, self.num_tokens - 1) // self.block_size * self.block_size


SAMPLE: Final = np.dtype([("number", "u4"), ("hash", "u8"), ("held_as", "u8")])


def sample_of(plain_hashes: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> bytes:
    """Return the blocks of a prompt in the first sample, for `Routed`; `hashes` are those with salt and adapter."""
    (numbers,) = (plain_hashes * _ODD < _LIMIT).nonzero()
    if not len(numbers):
        return b""
    sample = np.empty(len(numbers), SAMPLE)
    sample["number"], sample["hash"], sample["held_as"] = numbers, plain_hashes[numbers], hashes[numbers]
    return sample.tobytes()


@dataclass(slots=True)
class _Used:
    """The last use of a sampled block: its number among all uses of the sample, its time and its variant."""

    turn: int
    at_s: float
    why_lost: Cause
    """The cause that counts if it is not held any more."""
    variant: int
    num_uses: int = 1


class Reuse:
    """The last uses of the blocks in the sample, whose share is halved when they are too many."""

    def __init__(self) -> None:
        self.share = 1 / FIRST_SHARE
        self._used: dict[int, _Used] = {}
        self._turns: list[int] = []  # of the last uses, in order
        self._turn = 0

    def use(self, block: int, variant: int, now_s: float, why_lost: Cause) -> tuple[float, _Used | None] | None:
        """Record a use; return the number of distinct blocks used since the last one, and that use.

        Return None for a block that is not in the sample.
        """
        if block * int(_ODD) % (1 << 64) >= self.share * (1 << 64):
            return None
        self._turn += 1
        before, now = self._used.get(block), _Used(self._turn, now_s, why_lost, variant)
        distance = inf
        if before is not None:
            idx = bisect_right(self._turns, before.turn)
            distance = (len(self._turns) - idx) / self.share
            del self._turns[idx - 1]
            now.num_uses += before.num_uses
        self._used[block] = now
        self._turns.append(self._turn)
        if len(self._used) > MAX_SAMPLED:
            self._sample_fewer()
        return distance, before

    def _sample_fewer(self) -> None:
        self.share /= 2
        self._used = {
            block: used for block, used in self._used.items() if block * int(_ODD) % (1 << 64) < self.share * (1 << 64)
        }
        self._turns = sorted(used.turn for used in self._used.values())

    def described(self) -> dict[str, Any]:
        """Return how large the sample is, and how uses are spread over its blocks."""
        uses = sorted((used.num_uses for used in self._used.values()), reverse=True)
        total = max(1, sum(uses))
        popularity = {
            f"{part:.0%}": round(sum(uses[: round(len(uses) * part)]) / total, 4) for part in (0.01, 0.1, 0.5)
        }
        return {"blocks": len(uses), "share": self.share, "share_of_uses_by_top_blocks": popularity}


@dataclass(slots=True)
class _Bucket:
    """The sums over a minute's requests."""

    began_s: float
    rows: dict[tuple[str, str, str], Counter[str]] = field(default_factory=dict)
    distances: Counter[int] = field(default_factory=Counter)
    """Of reuses, by the next power of two."""
    stays: Counter[int] = field(default_factory=Counter)
    """Seconds after which blocks were reused that had been evicted, likewise."""
    prefixes: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    """The costs of prefixes, by their last block: tokens computed for lack of them, their length, how often."""
    total: Counter[str] | None = None
    """Of all rows, once the next minute has begun."""

    def summed(self) -> Counter[str]:
        """Return the sum of all rows."""
        total = Counter[str]()
        for row in self.rows.values():
            total.update(row)
        return total


class Regret:
    """Sums up requests by the minute. Times are passed in, and never decrease."""

    def __init__(self, max_buckets: int | None = MAX_BUCKETS) -> None:
        """Keep so many minutes, or all."""
        self._buckets: deque[_Bucket] = deque(maxlen=max_buckets)
        self._reuse = Reuse()
        self._secret = token_bytes(16)
        self.costly: dict[int, str] = {}
        """The names of prefixes in recent reports, by their last blocks."""

    def add(self, now_s: float, requests: Iterable[Routed], capacity_blocks: int) -> None:
        """Count requests that have ended; the fleet's caches together hold `capacity_blocks`."""
        if not self._buckets or now_s - self._buckets[-1].began_s >= BUCKET_S:
            if self._buckets:
                self._buckets[-1].total = self._buckets[-1].summed()
            self._buckets.append(_Bucket(now_s))
        bucket = self._buckets[-1]
        for request in requests:
            key = (request.tenant, request.model, request.worker)
            row = bucket.rows.get(key)
            if row is None:
                key = key if len(bucket.rows) < MAX_ROWS else ("other", "other", "other")
                row = bucket.rows.setdefault(key, Counter())
            row["requests"] += 1
            row["prompt_tokens"] += request.num_tokens
            if not request.is_read:
                row[Cause.UNREAD] += request.num_tokens
                continue
            row["one_cache"] += request.num_usable
            for name in ("held", "routed", "in_flight"):
                row[name] += getattr(request, name)
            row[Cause.ELSEWHERE] += max(0, request.held - request.routed)
            row[Cause.IN_FLIGHT] += max(0, request.under_way - max(request.held, request.routed))
            if request.reported is not None:
                row["told_tokens"] += request.num_tokens
                row["predicted"] += request.routed
                row["reported"] += request.reported
                row[Cause.ENGINE] += max(0, request.routed - request.reported)
                surprise = "unpredicted" if request.is_exact else "unpredicted_as_not_known_exactly"
                row[surprise] += max(0, request.reported - request.routed)
            if request.sampled:
                self._add_sampled(now_s, request, capacity_blocks, row, bucket)

    def _add_sampled(
        self, now_s: float, request: Routed, capacity_blocks: int, row: Counter[str], bucket: _Bucket
    ) -> None:
        best, lost, deepest = max(request.held, request.routed, request.under_way), 0.0, None
        why_lost = Cause.EVICTED if request.is_exact else Cause.UNKNOWN
        for number, block, held_as in np.frombuffer(request.sampled, SAMPLE).tolist():
            end = (number + 1) * request.block_size
            is_alike = request.alike is None or end <= request.alike
            found = self._reuse.use(block, request.variant, now_s, why_lost if is_alike else Cause.RENDERED)
            if found is None:
                continue
            (distance, before), tokens = found, request.block_size / self._reuse.share
            if end > request.num_usable:
                continue
            row["sampled"] += 1
            if before is not None:
                bucket.distances[int(distance).bit_length()] += 1
            if before is None or distance > capacity_blocks:
                row["one_cache"] -= round(tokens)
                row["missed"] += 1
                continue
            if end <= best:
                continue
            if before.variant != request.variant:
                row[Cause.VARIANT] += round(tokens)
                continue
            row[before.why_lost] += round(tokens)
            bucket.stays[int(now_s - before.at_s).bit_length()] += before.why_lost is Cause.EVICTED
            lost, deepest = lost + tokens, (number, held_as)
        if deepest is not None:
            number, held_as = deepest
            cost, _, times = bucket.prefixes.get(held_as, (0.0, 0, 0))
            bucket.prefixes[held_as] = (cost + lost, (number + 1) * request.block_size, times + 1)
            if len(bucket.prefixes) > MAX_PREFIXES:
                del bucket.prefixes[min(bucket.prefixes, key=lambda each: bucket.prefixes[each][0])]

    def name_of(self, block: int) -> str:
        """Return a name for the prefix that ends with this block; its text cannot be found out from it."""
        return blake2b(block.to_bytes(8, "little"), key=self._secret, digest_size=8).hexdigest()

    def by_worker(self, now_s: float, window_s: float, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return the sums of these names over the requests of each worker."""
        hits: dict[str, dict[str, int]] = {}
        for bucket in self._since(now_s, window_s):
            for (_, _, worker), row in bucket.rows.items():
                before = hits.get(worker) or dict.fromkeys(names, 0)
                hits[worker] = {name: before[name] + row[name] for name in names}
        return hits

    def _since(self, now_s: float, window_s: float) -> list[_Bucket]:
        return [each for each in self._buckets if each.began_s > now_s - window_s - BUCKET_S]

    def report(self, now_s: float, window_s: float) -> dict[str, Any]:
        """Return the sums over the last `window_s`, rounded up to whole minutes, and those of each minute kept."""
        buckets = self._since(now_s, window_s)
        rows, tenants = defaultdict[tuple[str, str], Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
        total, distances, stays = Counter[str](), Counter[int](), Counter[int]()
        prefixes: dict[int, tuple[float, int, int]] = {}
        for bucket in buckets:
            for (tenant, model, worker), row in bucket.rows.items():
                for added in (rows[model, worker], tenants[tenant], total):
                    added.update(row)
            distances.update(bucket.distances)
            stays.update(bucket.stays)
            for block, (cost, length, times) in bucket.prefixes.items():
                before = prefixes.get(block, (0.0, 0, 0))
                prefixes[block] = (before[0] + cost, max(before[1], length), before[2] + times)
        costliest = sorted(prefixes.items(), key=lambda each: -each[1][0])[:NUM_PREFIXES_REPORTED]
        named = [(block, self.name_of(block)) for block, _ in costliest]
        self.costly = dict([*named, *self.costly.items()][:MAX_NAMED])
        stays_needed = {str(1 << power): num for power, num in sorted(stays.items())}
        missed = 1.0 - total["one_cache"] / max(1, total["prompt_tokens"])
        sample = self._reuse.described() | {
            "uses": total["sampled"],
            "standard_error": round(missed / max(1, total["missed"]) ** 0.5, 4),
        }
        return {
            "window_s": round(now_s - min((each.began_s for each in buckets), default=now_s), 1),
            "total": _row(total),
            "by": [{"model": model, "worker": worker, **_row(row)} for (model, worker), row in sorted(rows.items())],
            "by_tenant": [{"tenant": tenant, **_row(row)} for tenant, row in sorted(tenants.items())],
            "over_time": [
                {"ago_s": round(now_s - bucket.began_s, 1), **_row(bucket.total or bucket.summed())}
                for bucket in self._buckets
            ],
            "sample": sample,
            "reuse_distance_blocks": {str(1 << power): num for power, num in sorted(distances.items())},
            "stay_needed_s": stays_needed,
            "losses": _losses(total, stays_needed),
            "costliest_prefixes": [
                {"prefix": self.costly[block], "tokens_lost": round(cost), "length": length, "times": times}
                for block, (cost, length, times) in costliest
            ],
        }


def _losses(total: Counter[str], stays: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the tokens lost by each cause, the most first, and what helps against it."""
    do = dict(_REMEDIES)
    if stays:
        do[Cause.EVICTED] += f"; nine of ten such blocks would have had to stay {quantile(stays, 0.9):,} s longer"
    causes = sorted((cause for cause in Cause if total[cause]), key=lambda each: -total[each])
    return [{"tokens": total[cause], "cause": cause.value, "do": do[cause]} for cause in causes]


def quantile(counts: Mapping[str, int], part: float) -> int:
    """Return the bound below which such a part of a histogram's counts is."""
    wanted = part * sum(counts.values())
    return next(int(bound) for bound, below in zip(counts, accumulate(counts.values()), strict=True) if below >= wanted)


def _row(row: Counter[str]) -> dict[str, Any]:
    causes = {cause.value: row[cause] for cause in Cause if row[cause]}
    unpredicted = {name: row[name] for name in ("unpredicted", "unpredicted_as_not_known_exactly") if row[name]}
    return {name: max(0, row[name]) for name in _REPORTED_COUNTS} | {"lost": causes} | unpredicted
