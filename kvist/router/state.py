"""The router's index as what is saved on disk, and as the place where it is loaded: workers may come later."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.errors import InvalidValueError
from kvist.indexer import Indexer

if TYPE_CHECKING:
    from kvist.indexer.dumps.dumper import Namespaced
    from kvist.indexer.dumps.format import NamespaceHead, StreamState
    from kvist.indexer.source import Source
    from kvist.radix import RadixIndex

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class FleetState:
    """The blocks of a whole fleet; a stream that is loaded waits until its worker is followed at the same URL."""

    block_size: int
    index: RadixIndex
    indexer: Indexer
    namespace: tuple[str, str] = ("", "")

    def endpoint_of(self, source: Source) -> str:
        """Return the stream's URL: it is followed as it was given."""
        return source.url

    def find(self, head: NamespaceHead) -> Namespaced | None:
        """Return this index if the saved one was a router's and has blocks of the same size."""
        if (head.model_name, head.group) != self.namespace or head.block_size != self.block_size:
            text = "state not loaded: it is another fleet's block_size=%d expected=%d model=%s"
            _logger.warning(text, head.block_size, self.block_size, head.model_name or None)
            return None
        return self

    def resume(self, into: Namespaced, state: StreamState) -> Source | None:
        """Park a stream."""
        assert state.progress is not None
        try:
            return into.indexer.park(state.worker, state.url, state.rank, state.progress)
        except InvalidValueError as error:
            _logger.warning("stream not loaded: %s worker=%s", error, state.worker)
            return None
