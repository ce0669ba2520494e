"""`GET /regret`: the cache hits that a fleet could have had, those it had, and where the others were lost.

    pooled cache    how much of a prompt a single cache as large as all of the fleet's would have held
    held            the most that any rank held of it
    routed          how much the chosen rank was expected to hold, with what was being computed there
    reported        how much its engine says it found

Tokens are lost between any two of these, each with a cause (`Cause`). What a pooled cache would have held is estimated
from a bounded sample of blocks, chosen by hash (SHARDS: Waldspurger and others, FAST 2015): the number of distinct
blocks of the sample used since a block's last use, divided by the sampling rate, is the size a cache needs to still
hold it. Its hits are counted as all tokens less its misses: misses are spread over many blocks, but hits are mostly of
few, which chance may have left out of the sample (SHARDS-adj, there). The other figures are counts.
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
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

FIRST_SAMPLING_RATE: Final = 1 / 32
"""The share of blocks that is sampled at first; halved whenever more than MAX_SAMPLED are."""
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
    *("requests", "prompt_tokens", "pooled_cache_tokens", "held_tokens", "routed_tokens"),
    *("in_flight_tokens", "prompt_tokens_with_report", "predicted_tokens", "reported_tokens", "unpredicted_tokens"),
)
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that products of hashes are spread evenly."""


class Cause(StrEnum):
    """Why tokens that could have been cached were computed, or might have been found."""

    EVICTED = "evicted before reuse"
    UNKNOWN = "last used on a rank whose cache is not known exactly"
    RENDERED = "rendered differently by the worker that used it last"
    VARIANT = "cached under another cache salt or LoRA adapter"
    ELSEWHERE = "held by another worker, where the request would have cost more"
    IN_FLIGHT = "being computed by another worker, where the request would have cost more"
    ENGINE = "predicted, but not found by the engine"
    UNREAD = "in prompts that could not be tokenised"


_REMEDIES: Final = {
    Cause.EVICTED: "a larger KV cache, host offloading, or fewer copies of one prefix",
    Cause.UNKNOWN: "see GET /readiness: its event stream is partial, resyncing or has sent nothing",
    Cause.RENDERED: "give the router the worker's chat template and tokeniser; GET /readiness says what differs",
    Cause.VARIANT: "use one cache salt for all who may share; adapters cannot share",
    Cause.ELSEWHERE: "usually nothing: waiting there would have taken longer (docs/policy.md)",
    Cause.IN_FLIGHT: "usually nothing: one worker could not take the whole burst of this prompt",
    Cause.ENGINE: "see docs/engines.md for what is exact with which engine: its events and its cache disagree",
    Cause.UNREAD: "set --model-path to the model's tokeniser; kvist_router_readings_total counts why",
}


class Routed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that was answered. Lengths are in tokens."""

    model: str
    worker: str
    num_tokens: int
    held_tokens: int = 0
    """The most that any rank held."""
    routed_tokens: int = 0
    """How much the chosen rank held or was computing."""
    in_flight_tokens: int = 0
    """How much of `routed_tokens` was still being computed."""
    held_or_in_flight_tokens: int = 0
    """The most that any candidate held or was computing."""
    reported_tokens: int | None = None
    """Cached tokens by the engine's own count; None where it reports none."""
    is_read: bool = True
    is_exact: bool = True
    """Whether the chosen rank's cache is known exactly."""
    identically_rendered_tokens: int | None = None
    """How many leading tokens the worker is known to render as the router does; None if all."""
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


SAMPLE: Final = np.dtype([("number", "u4"), ("plain_hash", "u8"), ("hash", "u8")])


def sample_of(
    plain_hashes: NDArray[np.uint64], hashes: NDArray[np.uint64], sampling_rate: float = FIRST_SAMPLING_RATE
) -> bytes:
    """Return the blocks of a prompt in a sample, for `Routed`; `hashes` are those with salt and adapter."""
    (numbers,) = (plain_hashes * _MULTIPLIER <= np.uint64(int(sampling_rate * (1 << 64)) - 1)).nonzero()
    if not len(numbers):
        return b""
    sample = np.empty(len(numbers), SAMPLE)
    sample["number"], sample["plain_hash"], sample["hash"] = numbers, plain_hashes[numbers], hashes[numbers]
    return sample.tobytes()


@dataclass(slots=True)
class _LastUse:
    """The last use of a sampled block: its number among all uses of the sample, its time, its salt and adapter."""

    use_number: int
    used_at_s: float
    cause_if_lost: Cause
    """The cause that counts if it is not held any more."""
    variant: int
    num_uses: int = 1


class Reuse:
    """The last uses of the blocks in the sample, whose sampling rate is halved when they are too many."""

    def __init__(self, sampling_rate: float = FIRST_SAMPLING_RATE) -> None:
        self.sampling_rate = sampling_rate
        self._last_uses: dict[int, _LastUse] = {}
        self._use_numbers: list[int] = []  # of the last uses, in order
        self._num_uses = 0

    def use(
        self, block_hash: int, variant: int, now_s: float, cause_if_lost: Cause
    ) -> tuple[float, _LastUse | None] | None:
        """Record a use; return the number of distinct blocks used since the last one, and that use.

        Return None for a block that is not in the sample.
        """
        if not self._is_sampled(block_hash):
            return None
        self._num_uses += 1
        before, now = self._last_uses.get(block_hash), _LastUse(self._num_uses, now_s, cause_if_lost, variant)
        distance = inf
        if before is not None:
            idx = bisect_right(self._use_numbers, before.use_number)
            distance = (len(self._use_numbers) - idx) / self.sampling_rate
            del self._use_numbers[idx - 1]
            now.num_uses += before.num_uses
        self._last_uses[block_hash] = now
        self._use_numbers.append(self._num_uses)
        if len(self._last_uses) > MAX_SAMPLED:
            self._sample_fewer()
        return distance, before

    def _is_sampled(self, block_hash: int) -> bool:
        return block_hash * int(_MULTIPLIER) % (1 << 64) < self.sampling_rate * (1 << 64)

    def _sample_fewer(self) -> None:
        self.sampling_rate /= 2
        self._last_uses = {block: last for block, last in self._last_uses.items() if self._is_sampled(block)}
        self._use_numbers = sorted(last.use_number for last in self._last_uses.values())

    def described(self) -> dict[str, Any]:
        """Return how large the sample is, and how uses are spread over its blocks."""
        uses = sorted((last.num_uses for last in self._last_uses.values()), reverse=True)
        total = max(1, sum(uses))
        popularity = {
            f"{part:.0%}": round(sum(uses[: round(len(uses) * part)]) / total, 4) for part in (0.01, 0.1, 0.5)
        }
        return {
            "blocks": len(uses),
            "sampling_rate": self.sampling_rate,
            "share_of_uses_by_top_blocks": popularity,
            "blocks_by_uses": _histogram(Counter(map(int.bit_length, uses))),
        }


class CostlyPrefix(NamedTuple):
    """What a prefix has cost: tokens computed for lack of it, its length, and the requests that did so."""

    lost_tokens: float = 0.0
    num_tokens: int = 0
    num_requests: int = 0

    def plus(self, lost_tokens: float, num_tokens: int, num_requests: int) -> CostlyPrefix:
        """Return the sum, with the longer length."""
        longer = max(self.num_tokens, num_tokens)
        return CostlyPrefix(self.lost_tokens + lost_tokens, longer, self.num_requests + num_requests)


@dataclass(slots=True)
class _Bucket:
    """The sums over a minute's requests."""

    began_s: float
    rows: dict[tuple[str, str, str], Counter[str]] = field(default_factory=dict)
    """By tenant, model and worker."""
    distances: Counter[int] = field(default_factory=Counter)
    """Reuse distances, by the number of bits: below 2**bits blocks."""
    retentions: Counter[int] = field(default_factory=Counter)
    """Seconds after which evicted blocks were used again, by the number of bits."""
    prefixes: dict[int, CostlyPrefix] = field(default_factory=dict)
    """By the hash of their last block."""
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

    def __init__(self, max_buckets: int | None = MAX_BUCKETS, sampling_rate: float = FIRST_SAMPLING_RATE) -> None:
        """Keep so many minutes, or all; requests have such a sample, or a larger one than the rate has become."""
        self._buckets: deque[_Bucket] = deque(maxlen=max_buckets)
        self._reuse = Reuse(sampling_rate)
        self._secret = token_bytes(16)
        self.costly: dict[int, str] = {}
        """The names of prefixes in recent reports, by the hash of their last block."""

    @property
    def sampling_rate(self) -> float:
        """Return what part of the blocks is in the sample now."""
        return self._reuse.sampling_rate

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
            held, routed, reported = request.held_tokens, request.routed_tokens, request.reported_tokens
            row["pooled_cache_tokens"] += request.num_usable
            row["held_tokens"] += held
            row["routed_tokens"] += routed
            row["in_flight_tokens"] += request.in_flight_tokens
            row[Cause.ELSEWHERE] += max(0, held - routed)
            row[Cause.IN_FLIGHT] += max(0, request.held_or_in_flight_tokens - max(held, routed))
            if reported is not None:
                row["prompt_tokens_with_report"] += request.num_tokens
                row["predicted_tokens"] += routed
                row["reported_tokens"] += reported
                row[Cause.ENGINE] += max(0, routed - reported)
                if request.is_exact:
                    row["unpredicted_tokens"] += max(0, reported - routed)
            if request.sampled:
                self._add_sampled(now_s, request, capacity_blocks, row, bucket)

    def _add_sampled(
        self, now_s: float, request: Routed, capacity_blocks: int, row: Counter[str], bucket: _Bucket
    ) -> None:
        best = max(request.held_tokens, request.routed_tokens, request.held_or_in_flight_tokens)
        cause_if_lost = Cause.EVICTED if request.is_exact else Cause.UNKNOWN
        alike_until, lost_tokens, deepest_lost = request.identically_rendered_tokens, 0.0, None
        for number, plain_hash, block_hash in np.frombuffer(request.sampled, SAMPLE).tolist():
            end = (number + 1) * request.block_size
            is_alike = alike_until is None or end <= alike_until
            use = self._reuse.use(plain_hash, request.variant, now_s, cause_if_lost if is_alike else Cause.RENDERED)
            if use is None:
                continue
            (distance, before), tokens = use, request.block_size / self._reuse.sampling_rate
            if end > request.num_usable:
                continue
            row["sampled"] += 1
            if before is not None:
                bucket.distances[int(distance).bit_length()] += 1
            if before is None or distance > capacity_blocks:
                row["pooled_cache_tokens"] -= round(tokens)
                row["missed"] += 1
                continue
            if end <= best:
                continue
            if before.variant != request.variant:
                row[Cause.VARIANT] += round(tokens)
                continue
            row[before.cause_if_lost] += round(tokens)
            bucket.retentions[int(now_s - before.used_at_s).bit_length()] += before.cause_if_lost is Cause.EVICTED
            lost_tokens, deepest_lost = lost_tokens + tokens, (end, block_hash)
        if deepest_lost is not None:
            end, block_hash = deepest_lost
            prefixes = bucket.prefixes
            prefixes[block_hash] = prefixes.get(block_hash, CostlyPrefix()).plus(lost_tokens, end, 1)
            if len(prefixes) > MAX_PREFIXES:
                del prefixes[min(prefixes, key=lambda each: prefixes[each].lost_tokens)]

    def name_of(self, block_hash: int) -> str:
        """Return a name for the prefix that ends with this block; its text cannot be found out from it."""
        return blake2b(block_hash.to_bytes(8, "little"), key=self._secret, digest_size=8).hexdigest()

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
        total, distances, retentions = Counter[str](), Counter[int](), Counter[int]()
        prefixes: dict[int, CostlyPrefix] = {}
        sums = defaultdict[tuple[str, str, str], Counter[str]](Counter)
        for bucket in buckets:
            for key, row in bucket.rows.items():
                sums[key].update(row)
            distances.update(bucket.distances)
            retentions.update(bucket.retentions)
            for block_hash, prefix in bucket.prefixes.items():
                prefixes[block_hash] = prefixes.get(block_hash, CostlyPrefix()).plus(*prefix)
        for (tenant, model, worker), summed in sums.items():
            for added in (rows[model, worker], tenants[tenant], total):
                added.update(summed)
        costliest = sorted(prefixes.items(), key=lambda each: -each[1].lost_tokens)[:NUM_PREFIXES_REPORTED]
        named = [(block_hash, self.name_of(block_hash)) for block_hash, _ in costliest]
        self.costly = dict([*named, *self.costly.items()][:MAX_NAMED])
        retention_needed_s = _histogram(retentions)
        missed = 1.0 - total["pooled_cache_tokens"] / max(1, total["prompt_tokens"])
        sample = self._reuse.described() | {
            "uses": total["sampled"],
            "standard_error": round(missed * ((1.0 - self.sampling_rate) / max(1, total["missed"])) ** 0.5, 4),
        }
        return {
            "window_s": round(now_s - min((each.began_s for each in buckets), default=now_s), 1),
            "total": _row(total),
            "by_worker": [
                {"model": model, "worker": worker, **_row(row)} for (model, worker), row in sorted(rows.items())
            ],
            "by_tenant": [{"tenant": tenant, **_row(row)} for tenant, row in sorted(tenants.items())],
            "by_minute": [
                {"ago_s": round(now_s - bucket.began_s, 1), **_row(bucket.total or bucket.summed())}
                for bucket in self._buckets
            ],
            "sample": sample,
            "reuse_distance_blocks": _histogram(distances),
            "retention_needed_s": retention_needed_s,
            "losses": _losses(total, retention_needed_s),
            "costliest_prefixes": [
                {
                    "prefix": self.costly[block_hash],
                    "lost_tokens": round(prefix.lost_tokens),
                    "length_tokens": prefix.num_tokens,
                    "requests": prefix.num_requests,
                }
                for block_hash, prefix in costliest
            ],
        }


def _histogram(counts: Counter[int]) -> dict[str, int]:
    """Return counts by the number of bits as counts by the power of two below which those numbers are."""
    return {str(1 << bits): num for bits, num in sorted(counts.items())}


def _losses(total: Counter[str], retention_needed_s: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the tokens lost by each cause, the most first, and what helps against it."""
    remedies = dict(_REMEDIES)
    if retention_needed_s:
        seconds = quantile(retention_needed_s, 0.9)
        remedies[Cause.EVICTED] += f"; 90 % of these blocks were used again within {seconds:,} s"
    causes = sorted((cause for cause in Cause if total[cause]), key=lambda each: -total[each])
    return [{"tokens": total[cause], "cause": cause.value, "remedy": remedies[cause]} for cause in causes]


def quantile(counts: Mapping[str, int], part: float) -> int:
    """Return the bound below which such a part of a histogram's counts is."""
    wanted = part * sum(counts.values())
    return next(int(bound) for bound, below in zip(counts, accumulate(counts.values()), strict=True) if below >= wanted)


def _row(row: Counter[str]) -> dict[str, Any]:
    lost = {cause.value: row[cause] for cause in Cause if row[cause]}
    return {name: max(0, row[name]) for name in _REPORTED_COUNTS} | {"lost_tokens": lost}
