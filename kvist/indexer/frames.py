"""The compiled splitter of ZMTP frames, as `kvist.events.transports.zmtp` takes one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.block import Buffer
from kvist.events.transports.zmtp import SplitResult
from kvist.indexer.compiled.frames import split_frames


def split(buffer: Buffer, start: int, end: int, table: NDArray[np.int64], max_message_bytes: int) -> SplitResult:
    """Find whole ordinary messages, as `Splitter` says."""
    rows, position, reason = split_frames(np.frombuffer(buffer, np.uint8), start, end, table, max_message_bytes)
    return rows, position, reason
