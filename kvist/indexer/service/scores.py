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

    longest_matched: int = 0
    gpu: int = 0
    dp: dict[int, int] = {}
    cpu: int = 0
    disk: int = 0


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
        for source, (gpu, cpu, _, longest) in zip(match.ranks, match.depths.tolist(), strict=True):
            if source in doubted:
                continue
            name = source.worker.partition(":")[0]
            held = instances.get(name)
            if held is None:
                held = instances[name] = _Held()
            gpu *= block_size
            held.longest_matched = held.disk = max(held.disk, longest * block_size)
            held.gpu = max(held.gpu, gpu)
            held.cpu = max(held.cpu, cpu * block_size)
            held.dp[source.rank] = max(held.dp.get(source.rank, 0), gpu)
    scores = {
        name: {rank: num_tokens for rank, num_tokens in held.dp.items() if num_tokens}
        for name, held in instances.items()
        if held.gpu
    }
    return _encode(_Answer(scores, instances))
