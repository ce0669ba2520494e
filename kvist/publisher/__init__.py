"""From an engine's cache to a canonical stream.

Engine events pass the window filter (`filter`), get their canonical hashes (`normaliser`), become numbered batches
(`stream`) and wait in the outbox for the transport; the last ones stay in the replay buffer, and who missed more gets a
`snapshot`. `KvEventPublisher` does all this behind an engine's back, `TrtllmPoller` and `AsyncTrtllmPoller` feed it
from an engine that is polled, and `Sidecar` does it beside an engine that streams events of its own.
"""

from kvist.publisher.buffers import PublisherLimits, PublisherStatistics
from kvist.publisher.publisher import KvEventPublisher
from kvist.publisher.trtllm import AsyncTrtllmPoller, TrtllmPoller

__all__ = ["AsyncTrtllmPoller", "KvEventPublisher", "PublisherLimits", "PublisherStatistics", "TrtllmPoller"]
