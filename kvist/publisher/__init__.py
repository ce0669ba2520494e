"""From an engine's cache to a canonical stream.

Engine events pass the window filter (`filter`), get their canonical hashes (`normaliser`), become numbered batches
(`stream`) and wait in the outbox for the transport; the last ones stay in the replay buffer, and subscribers that
missed more get a `snapshot`. `KvEventPublisher` does all this in the engine's process, `AsyncTrtllmPoller` feeds it
from an engine that is polled, and `Sidecar` from an engine that streams its own events.
"""

from kvist.publisher.buffers import PublisherLimits, PublisherStatistics
from kvist.publisher.publisher import KvEventPublisher
from kvist.publisher.trtllm import AsyncTrtllmPoller

__all__ = ["AsyncTrtllmPoller", "KvEventPublisher", "PublisherLimits", "PublisherStatistics"]
