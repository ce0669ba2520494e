"""A prompt that one worker computed, on its way to another: what the client is told of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvist.http import Headers
from kvist.router.disaggregation import Handoff
from kvist.router.policy import Decision

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Handover:
    """What a prefill worker computed, and how long each part of the request took.

    Once it is taken, the decode worker fetches it or tells the prefill worker that it will not.
    """

    handoff: Handoff
    prefill_worker: str
    prefill_s: float
    sent_s: float = 0.0
    transfer_s: float = 0.0
    is_taken: bool = False

    def answered(self, now_s: float) -> Headers:
        """Return what the client is told; the transfer lasts from the decode worker's request to its first byte."""
        self.transfer_s = now_s - self.sent_s
        return [
            (b"x-kvist-prefill-worker", self.prefill_worker.encode()),
            (b"x-kvist-prefill-ms", b"%.1f" % (self.prefill_s * 1000)),
            (b"x-kvist-transfer-ms", b"%.1f" % (self.transfer_s * 1000)),
        ]

    def log(self, decision: Decision, now_s: float, request_id: bytes) -> None:
        """Log the whole way of a request that was answered."""
        text = "disaggregated prefill=%s decode=%s prefill_s=%.4f transfer_s=%.4f decode_s=%.4f request_id=%s"
        decode_s = now_s - self.sent_s - self.transfer_s
        workers = (self.prefill_worker, decision.chosen.target.worker)
        logger.debug(text, *workers, self.prefill_s, self.transfer_s, decode_s, request_id.decode("latin-1"))
