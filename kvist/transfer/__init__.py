"""Moves KV blocks between workers: one prefills, another decodes.

A receiver reserves blocks and asks the sender that holds the prompt's. `slices` says which block belongs into which,
from each group's cached tokens and window, and `heads` which part of it between ranks; `messages` and `frames` are what
the two say to each other; `receiver` and `sender` are their halves of the protocol, without I/O: a transfer completes
at most once, and memory that a late write could reach is not used again (`sessions`). `service` drives them, one a
rank. Nothing here imports torch but what touches tensors.
"""

from kvist.transfer.frames import BounceTail, Extent, Report, Result, ResultStatus, decode_report, encode_report
from kvist.transfer.heads import WHOLE, HeadRange, Part, heads_of, written_heads
from kvist.transfer.messages import Cancel, Hello, ReceiveRequest, Refusal, RefusalReason, judge_hello
from kvist.transfer.receiver import Fetch, Receiver
from kvist.transfer.sender import Sender
from kvist.transfer.sessions import TransferLimits, TransferState
from kvist.transfer.slices import BlockCountMismatchError, KvSlice, SliceGroup, TokenRange, pair_blocks

__all__ = [
    "WHOLE",
    "BlockCountMismatchError",
    "BounceTail",
    "Cancel",
    "Extent",
    "Fetch",
    "HeadRange",
    "Hello",
    "KvSlice",
    "Part",
    "ReceiveRequest",
    "Receiver",
    "Refusal",
    "RefusalReason",
    "Report",
    "Result",
    "ResultStatus",
    "Sender",
    "SliceGroup",
    "TokenRange",
    "TransferLimits",
    "TransferState",
    "decode_report",
    "encode_report",
    "heads_of",
    "judge_hello",
    "pair_blocks",
    "written_heads",
]
