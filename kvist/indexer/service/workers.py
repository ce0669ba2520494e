"""What `GET /workers` says: each instance as the peer's API has it, and beside it how well its blocks are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvist.events import WorkerRank
from kvist.events.transports import public_url
from kvist.indexer import SourceStatistics
from kvist.indexer.service.metrics import SOURCE_COUNTERS
from kvist.indexer.service.registry import Member, Stream
from kvist.indexer.service.scores import stream_name


def describe_workers(members: Iterable[Member], model_name: str | None) -> list[dict[str, Any]]:
    """Return every instance, or those of one model."""
    described = []
    for member in members:
        if model_name is None or member.namespace.model_name == model_name:
            sources = {source.worker: source for source in member.indexer.statistics()}
            for instance_id, streams in member.instances.items():
                described.append(_instance(member, instance_id, streams, sources))
    return described


def _instance(
    member: Member, instance_id: int, streams: dict[int, Stream], sources: dict[str, SourceStatistics]
) -> dict[str, Any]:
    listeners = {
        str(rank): _listener(member, stream, sources[stream_name(instance_id, rank)])
        for rank, stream in streams.items()
    }
    has_failed = any(listener["status"] == "failed" for listener in listeners.values())
    return {
        "instance_id": instance_id,
        "source": "zmq",
        "status": "failed" if has_failed else "active",
        "model_name": member.namespace.model_name,
        "routing_group": member.namespace.group,
        "block_size": member.block_size,
        "endpoints": {str(rank): public_url(stream.endpoint) for rank, stream in streams.items()},
        "listeners": listeners,
    }


def _listener(member: Member, stream: Stream, source: SourceStatistics) -> dict[str, Any]:
    """Return one stream; `ranks` are those its events came from, which usually is the one registered."""
    listener: dict[str, Any] = {
        "endpoint": public_url(stream.endpoint),
        "url": public_url(stream.url),
        "status": "active" if source.failure is None else "failed",
    }
    if source.failure is not None:
        listener["last_error"] = source.failure
    listener["ranks"] = {
        str(rank): {"state": state, "num_blocks": member.index.digest(WorkerRank(source.worker, rank)).num_blocks}
        for rank, state in sorted(source.states.items())
    }
    listener["lag_s"] = source.lag_s
    listener["last_event_age_s"] = source.last_event_age_s
    listener["counters"] = {f"num_{name}": getattr(source, f"num_{name}") for name in SOURCE_COUNTERS}
    return listener
