"""What the index knows, as the API says it: tokens rather than blocks, by instance, tiers cumulative.

docs/index-service.md has an answer. `frequencies` are empty: clients expect the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import msgspec

from kvist.events import WorkerRank
from kvist.radix import Match


class _Held(msgspec.Struct, gc=False):
    """What an instance has of a prompt."""

    longest_matched: int
    gpu: int
    dp: dict[int, int]
    cpu: int
    disk: int


class _Answer(msgspec.Struct, gc=False):
    scores: dict[str, dict[int, int]]
    instances: dict[str, _Held]
    frequencies: tuple[()] = ()


_encode = msgspec.json.Encoder().encode


def stream_name(instance_id: int, dp_rank: int) -> str:
    """Return the index's name for the worker behind one stream of an instance."""
    return f"{instance_id}:{dp_rank}"


def parse_stream_name(name: str) -> tuple[int, int] | None:
    """Return instance and rank of what `stream_name` made, None for anything else."""
    instance_id, _, dp_rank = name.partition(":")
    return (int(instance_id), int(dp_rank)) if instance_id.isdecimal() and dp_rank.isdecimal() else None


def answer_to(matches: Iterable[Match], block_size: int, doubted: AbstractSet[WorkerRank]) -> bytes:
    """Return the answer that matches of workers which `stream_name` named amount to, without ranks in doubt.

    Of streams that tell of the same rank, and of several matches, the most counts.
    """
    instances: dict[str, _Held] = {}
    for match in matches:
        for source, (gpu, cpu, _, longest) in zip(match.ranks, (match.depths * block_size).tolist(), strict=True):
            if doubted and source in doubted:
                continue
            name, rank = source.worker.partition(":")[0], source.rank
            held = instances.get(name)
            if held is None:
                instances[name] = _Held(longest, gpu, {rank: gpu}, cpu, longest)
                continue
            held.longest_matched = held.disk = max(held.disk, longest)
            held.gpu, held.cpu = max(held.gpu, gpu), max(held.cpu, cpu)
            held.dp[rank] = max(held.dp.get(rank, 0), gpu)
    scores = {
        name: held.dp if all(held.dp.values()) else {rank: gpu for rank, gpu in held.dp.items() if gpu}
        for name, held in instances.items()
        if held.gpu
    }
    return _encode(_Answer(scores, instances))
