"""Kvist inside SGLang: its scheduler publishes canonical batches itself, and no sidecar is needed (docs/engines.md).

SGLang 0.5.23 accepts any publisher that is registered in its factory, and calls the plugins of the entry point group
`sglang.srt.plugins` in each of its processes: `register` is this distribution's. `topic` is the worker's name.
"""

from __future__ import annotations

import atexit
import logging
import socket
from typing import Any

import msgspec

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events.dialects import decode_block_events
from kvist.publisher.buffers import PublisherLimits
from kvist.publisher.publisher import KvEventPublisher

_logger = logging.getLogger(__name__)

NAME = "kvist"


def register() -> None:
    """Register the publisher in SGLang's factory; SGLang calls this in each of its processes, in some twice."""
    from sglang.srt.disaggregation.kv_events import EventPublisherFactory

    try:
        EventPublisherFactory.register_publisher(NAME, SglangPublisher)
    except KeyError:
        _logger.debug("SGLang knows the publisher already name=%s", NAME)


class SglangPublisher:
    """SGLang's `EventPublisher` of one data-parallel rank: binds at once, and never blocks or fails the scheduler.

    Ports are the configured ones plus the rank, as with SGLang's own. The block size is that of the first block.
    """

    def __init__(
        self,
        attn_dp_rank: int,
        endpoint: str,
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        topic: str = "",
        **_: Any,
    ) -> None:
        """Bind; other settings of SGLang's own publisher are ignored. Raises InvalidValueError for a wrong address."""
        self._rank = attn_dp_rank
        self._publisher = KvEventPublisher(
            _url(endpoint, replay_endpoint, attn_dp_rank),
            worker=topic or socket.gethostname(),
            block_size=None,
            num_ranks=0,  # only this rank is published here, from its first event on
            limits=PublisherLimits(replay_max_batches=buffer_steps),
        )
        self._is_shut_down = False
        self._encode = msgspec.msgpack.Encoder().encode
        self.num_malformed = 0
        atexit.register(self.shutdown)
        _logger.info("publishing at %s topic=%r rank=%d", self._publisher.endpoint, topic, attn_dp_rank)

    def publish(self, events: Any) -> None:
        """Publish a `KVEventBatch` of the scheduler; ignored after `shutdown`."""
        if self._is_shut_down:
            return
        events.attn_dp_rank = self._rank
        try:
            # Through its bytes: the decoder is tested against SGLang, and this costs the scheduler 3 µs a block.
            batch = decode_block_events(self._encode(events), NAME, "sglang")
        except MalformedMessageError as error:
            self._count_malformed(1, str(error))
            return
        if batch.num_malformed_events:
            self._count_malformed(batch.num_malformed_events, "events are not the dialect's")
        if self._publisher.learn_block_size(batch.events):
            for event in batch.events:
                self._publisher.report(event)

    def describe_local_source(self, block_size: int) -> None:  # noqa: ARG002 - SGLang's name
        """Return None: the stream is not SGLang's own."""
        return

    def shutdown(self) -> None:
        """Publish what was reported, and release the ports; idempotent."""
        atexit.unregister(self.shutdown)
        self._is_shut_down = True
        try:
            self._publisher.close()
        except OSError as error:
            _logger.error("publisher had stopped: %s", error)

    def _count_malformed(self, num: int, reason: str) -> None:
        if self.num_malformed == 0:
            _logger.warning("malformed events skipped num_malformed=%d reason=%s", num, reason)
        self.num_malformed += num


def _url(endpoint: str, replay_endpoint: str | None, rank: int) -> str:
    host, port = _split("endpoint", endpoint)
    if replay_endpoint is None:
        return f"tcp://{host}:{port + rank}?replay_port=none"
    return f"tcp://{host}:{port + rank}?replay_port={_split('replay_endpoint', replay_endpoint)[1] + rank}"


def _split(name: str, endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not (port.isascii() and port.isdecimal()) or port == "0":
        raise InvalidValueError(f"--kv-events-config {name}", endpoint, "tcp://host:port with a port above 0")
    return host, int(port)
