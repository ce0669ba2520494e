"""Agents write bytes from registered memory of this process into registered memory of a peer.

`base` has their common interface. `SharedMemoryAgent` reaches processes of the same host and needs nothing else;
`kvist.transfer.agents.nixl.NixlAgent` reaches other hosts and GPUs, and needs the extra `nixl`. Neither imports torch.
"""

from kvist.transfer.agents.base import (
    PeerId,
    PeerUnreachableError,
    TransferAgent,
    Write,
    WriteFailedError,
    finish,
)
from kvist.transfer.agents.shared_memory import SharedMemoryAgent

__all__ = [
    "PeerId",
    "PeerUnreachableError",
    "SharedMemoryAgent",
    "TransferAgent",
    "Write",
    "WriteFailedError",
    "finish",
]
