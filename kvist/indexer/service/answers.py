"""What the index knows, as the API says it: tokens rather than blocks, by instance, tiers cumulative.

{"scores": {"1": {"0": 128}},                    tokens on the GPU by instance and rank, if any
 "frequencies": [],                              nothing; clients expect it
 "instances": {"1": {"longest_matched": 160,     in any tier, of the rank that holds most
                     "gpu": 128,                 likewise on the GPU …
                     "dp": {"0": 128},           … and of each rank that holds anything
                     "cpu": 128,                 on the GPU or in host memory
                     "disk": 160}}}              or on any storage
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank
from kvist.radix import Match

FEW_RANKS = 8
"""Up to so many a plain loop is faster: 6 µs for one, where arrays take 16; for 256, 600 and 190."""
_MAX_LAYOUTS = 256


def stream_name(instance_id: int, dp_rank: int) -> str:
    """Return the index's name for the worker behind one stream of an instance."""
    return f"{instance_id}:{dp_rank}"


def instance_of(stream: str) -> str:
    """Return the instance of a name that `stream_name` made."""
    return stream.partition(":")[0]


def render_match(match: Match, block_size: int, doubted: AbstractSet[WorkerRank]) -> bytes:
    """Return the answer to a query, without the ranks whose blocks may be gone."""
    holder_ids, depths, ranks = match.holder_ids, match.depths, match.ranks
    if not doubted.isdisjoint(ranks):
        is_known = np.array([rank not in doubted for rank in ranks], bool)
        holder_ids, depths = holder_ids[is_known], depths[is_known]
        ranks = [rank for rank in ranks if rank not in doubted]
    if len(ranks) <= FEW_RANKS:
        return _render_few(ranks, (depths * block_size).tolist())
    order = np.argsort(holder_ids)  # so that the same holders are always in the same order
    return _layout(tuple([ranks[row] for row in order.tolist()])).render(depths[order] * np.uint32(block_size))


def _render_few(ranks: Sequence[WorkerRank], depths: Sequence[Sequence[int]]) -> bytes:
    by_instance: dict[str, dict[int, tuple[int, int, int]]] = {}
    for source, (gpu, cpu, _, longest) in zip(ranks, depths, strict=True):
        by_rank = by_instance.setdefault(instance_of(source.worker), {})
        held = by_rank.get(source.rank)
        by_rank[source.rank] = (
            (gpu, cpu, longest) if held is None else (max(gpu, held[0]), max(cpu, held[1]), max(longest, held[2]))
        )
    scores, instances = [], []
    for instance, by_rank in by_instance.items():
        on_gpu = ",".join([f'"{rank}":{gpu}' for rank, (gpu, _, _) in by_rank.items() if gpu])
        if on_gpu:
            scores.append(f'"{instance}":{{{on_gpu}}}')
        dp = ",".join([f'"{rank}":{gpu}' for rank, (gpu, _, _) in by_rank.items()])
        gpu, cpu, longest = map(max, zip(*by_rank.values(), strict=True))
        tokens = f'"longest_matched":{longest},"gpu":{gpu},"dp":{{{dp}}},"cpu":{cpu},"disk":{longest}'
        instances.append(f'"{instance}":{{{tokens}}}')
    return f'{{"scores":{{{",".join(scores)}}},"frequencies":[],"instances":{{{",".join(instances)}}}}}'.encode()


class _Layout:
    """The answer for certain ranks, whatever they hold: all of its text but the numbers is made once."""

    def __init__(self, ranks: tuple[WorkerRank, ...]) -> None:
        pairs = [(instance_of(source.worker), source.rank) for source in ranks]
        self._order = np.array(sorted(range(len(pairs)), key=pairs.__getitem__))
        ordered = sorted(pairs)
        # Two streams of an instance that tell of the same rank count as one.
        self._rank_starts = [row for row, pair in enumerate(ordered) if row == 0 or pair != ordered[row - 1]]
        distinct = [ordered[row] for row in self._rank_starts]
        self._names = distinct
        starts = [row for row, (name, _) in enumerate(distinct) if row == 0 or name != distinct[row - 1][0]]
        self._instance_starts = starts
        instances, places = [], []
        num = len(starts)
        for idx, (start, end) in enumerate(zip(starts, [*starts[1:], len(distinct)], strict=True)):
            by_rank = ",".join([f'"{rank}":%d' for _, rank in distinct[start:end]])
            tokens = f'"longest_matched":%d,"gpu":%d,"dp":{{{by_rank}}},"cpu":%d,"disk":%d'
            instances.append(f'"{distinct[start][0]}":{{{tokens}}}')
            places += [2 * num + idx, idx, *range(3 * num + start, 3 * num + end), num + idx, 2 * num + idx]
        self._places = np.array(places)
        self._instances = f'"frequencies":[],"instances":{{{",".join(instances)}}}}}'
        self._scores = self._render_scores([True] * len(distinct))

    def render(self, tokens: NDArray[np.uint32]) -> bytes:
        """Return the answer for the tokens that each rank holds, `[num_ranks, 4]`, a column a tier."""
        tokens = np.maximum.reduceat(tokens[self._order], self._rank_starts, axis=0)
        gpu, cpu, _, longest = np.maximum.reduceat(tokens, self._instance_starts, axis=0).T
        on_gpu = tokens[:, 0].tolist()
        scores = self._scores if all(on_gpu) else self._render_scores(on_gpu)
        values = np.concatenate([gpu, cpu, longest, tokens[:, 0]])[self._places].tolist()
        return ((scores + self._instances) % (*filter(None, on_gpu), *values)).encode()

    def _render_scores(self, on_gpu: Sequence[int]) -> str:
        """Return the scores of the ranks that have any."""
        by_instance: dict[str, list[str]] = {}
        for (instance, rank), tokens in zip(self._names, on_gpu, strict=True):
            if tokens:
                by_instance.setdefault(instance, []).append(f'"{rank}":%d')
        scores = [f'"{instance}":{{{",".join(ranks)}}}' for instance, ranks in by_instance.items()]
        return f'{{"scores":{{{",".join(scores)}}},'


_layout = lru_cache(maxsize=_MAX_LAYOUTS)(_Layout)
