"""A publication that answers before its publisher is there."""

from __future__ import annotations

from collections.abc import Iterable

from kvist.events.transports import Message, Publication, ReplayRequest
from kvist.events.transports.base import ReplaySource


class AnsweringPublication:
    """A publication that answers from the start: with nothing, until its publisher does.

    While a sidecar does not know its engine's block size it has no publisher, and yet whoever followed another sidecar
    here must learn that this one does not hold what that one did.
    """

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self._source: ReplaySource | None = None
        self.send, self.close = publication.send, publication.close
        publication.serve_replay(self)

    @property
    def endpoint(self) -> str:
        """The URL a subscriber connects to, with real port numbers."""
        return self._publication.endpoint

    def serve_replay(self, source: ReplaySource) -> None:
        """Answer from `source` from now on."""
        self._source = source

    def replay(self, request: ReplayRequest) -> Iterable[Message]:
        """Return what the source answers, nothing while there is none."""
        source = self._source
        return () if source is None else source.replay(request)
