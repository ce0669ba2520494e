"""What a service follows, as the place where a peer's dump or its own saved state goes."""

from __future__ import annotations

import logging
from http import HTTPStatus

from kvist.events.transports import public_url
from kvist.indexer.dumps.dumper import Namespaced
from kvist.indexer.dumps.format import NamespaceHead, StreamState
from kvist.indexer.service.endpoints import EndpointRules
from kvist.indexer.service.errors import ApiError
from kvist.indexer.service.registry import Namespace, Registry, Stream, parse_stream_name
from kvist.indexer.source import Source

_logger = logging.getLogger(__name__)


class Registrations:
    """Registers streams that another service, or an earlier process, had registered, and goes on with them."""

    def __init__(self, registry: Registry, rules: EndpointRules) -> None:
        self._registry = registry
        self._rules = rules

    async def follow(
        self, namespace: Namespace, block_size: int, instance_id: int, dp_rank: int, endpoint: str, url: str
    ) -> None:
        """Register a stream unless it is; what may not be followed here is logged."""
        try:
            stream = Stream(endpoint, self._rules.url(url))
            await self._registry.register(namespace, block_size, instance_id, dp_rank, stream)
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                _logger.warning("not followed as before: %s instance_id=%d", error, instance_id)

    async def follow_all(self, head: NamespaceHead) -> None:
        """Register the streams of a namespace, but for those whose login is not in a dump."""
        namespace = Namespace(head.model_name, head.group)
        for state in head.streams:
            name = parse_stream_name(state.worker)
            if name is None or state.has_login:
                if self._find_stream(namespace, state) is None:
                    _logger.warning("not followed as before: its login is not kept worker=%s", state.worker)
                continue
            await self.follow(namespace, head.block_size, *name, state.endpoint, state.url)

    def find(self, head: NamespaceHead) -> Namespaced | None:
        """Return the namespace's index, if it is followed and has blocks of that size."""
        member = self._registry.find(Namespace(head.model_name, head.group))
        if member is None or member.block_size != head.block_size:
            expected = "none" if member is None else member.block_size
            _logger.warning(
                "not restored: other block size, or not followed model=%s block_size=%d expected=%s",
                head.model_name,
                head.block_size,
                expected,
            )
            return None
        return member

    def resume(self, into: Namespaced, state: StreamState) -> Source | None:
        """Go on with a stream that is followed at the same place."""
        stream = self._find_stream(Namespace(*into.namespace), state)
        if stream is None or state.progress is None or public_url(stream.endpoint) != state.endpoint:
            return None
        return into.indexer.resume(state.worker, state.progress)

    def _find_stream(self, namespace: Namespace, state: StreamState) -> Stream | None:
        member = self._registry.find(namespace)
        return None if member is None else member.stream(state.worker)
