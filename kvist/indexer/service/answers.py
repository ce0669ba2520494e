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

from collections.abc import Set as AbstractSet

from kvist.events import WorkerRank
from kvist.radix import Match

_FRAME = '{"scores":{%s},"frequencies":[],"instances":{%s}}'
_NOTHING = (_FRAME % ("", "")).encode()
_INSTANCE = '"%s":{"longest_matched":%d,"gpu":%d,"dp":{%s},"cpu":%d,"disk":%d}'


def stream_name(instance_id: int, dp_rank: int) -> str:
    """Return the index's name for the worker behind one stream of an instance."""
    return f"{instance_id}:{dp_rank}"


def instance_of(stream: str) -> str:
    """Return the instance of a name that `stream_name` made."""
    return stream.partition(":")[0]


def render_match(match: Match, block_size: int, doubted: AbstractSet[WorkerRank]) -> bytes:
    """Return the answer to a query, without the ranks whose blocks may be gone."""
    if len(match) == 0:
        return _NOTHING
    by_instance: dict[str, list[tuple[int, int, int, int]]] = {}
    columns = (match.depths * block_size).T.tolist()
    for source, gpu, cpu, _, any_tier in zip(match.ranks, *columns, strict=True):
        if source not in doubted:
            by_instance.setdefault(instance_of(source.worker), []).append((source.rank, gpu, cpu, any_tier))
    scores, instances = [], []
    for instance, rows in by_instance.items():
        if len(rows) == 1:
            ((rank, gpu, cpu, longest),) = rows
            by_rank = f'"{rank}":{gpu}'
            if gpu:
                scores.append(f'"{instance}":{{{by_rank}}}')
        else:
            gpu, cpu, longest = (max(column) for column in list(zip(*rows, strict=True))[1:])
            tokens_of = dict(sorted((rank, tokens) for rank, tokens, _, _ in rows))
            by_rank = _by_rank(tokens_of)
            if gpu:
                scores.append(f'"{instance}":{{{_by_rank({r: t for r, t in tokens_of.items() if t})}}}')
        instances.append(_INSTANCE % (instance, longest, gpu, by_rank, cpu, longest))
    return (_FRAME % (",".join(scores), ",".join(instances))).encode()


def _by_rank(tokens_of: dict[int, int]) -> str:
    return ",".join([f'"{rank}":{tokens}' for rank, tokens in tokens_of.items()])
