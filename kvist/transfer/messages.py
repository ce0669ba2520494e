"""The protocol of a transfer between ranks of two workers: each message is a msgpack array in one frame.

A receiver's request says who it is and what its blocks mean. The sender refuses it, with a reason and both values,
unless its own blocks mean the same. The two workers may have different numbers of ranks, and then split heads
differently (`kvist.transfer.heads`). Fields are only appended, with defaults, so that a request of another version can
be read, and refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events.codec import DECODE_ERRORS
from kvist.events.engine_events import FULL
from kvist.kvcache.plan import KvDtype, WindowPlan
from kvist.transfer.commands import MAX_NAME_LEN
from kvist.transfer.heads import Part, heads_of

PROTOCOL_VERSION: Final = 3

MAX_MESSAGE_BYTES: Final = 64 * 2**20  # a million blocks, and room

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LEN)]


class RefusalReason(Enum):
    """Why a sender refuses a request."""

    PROTOCOL_VERSION = "protocol_version"
    MODEL = "model"
    BLOCK_SIZE = "block_size"
    HASH_SEED = "hash_seed"
    DTYPE = "dtype"
    LAYER_PLAN = "layer_plan"
    AGENT = "agent"
    RANK = "rank"
    MALFORMED = "malformed"
    UNKNOWN_REQUEST = "unknown_request"
    ALREADY_ENDED = "already_ended"
    BLOCK_COUNT_MISMATCH = "block_count_mismatch"
    UNKNOWN_BLOCK = "unknown_block"
    BUSY = "busy"


class Extent(NamedTuple):
    """A piece of memory."""

    base: Count
    size_bytes: Count


class GroupShape(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The content of one group's blocks, over all ranks; `window` is None for full attention."""

    window: Positive | None
    num_kv_heads: Positive
    head_dim: Positive
    dtype: Name
    kv_factor: Annotated[int, msgspec.Meta(ge=1, le=2)]
    layer_indices: tuple[Count, ...]

    @property
    def num_planes(self) -> int:
        """Return the number of keys and values that a slot has of each head and token: one per layer, or two."""
        return len(self.layer_indices) * self.kv_factor

    def head_bytes(self, block_size: int) -> int:
        """Return the size of one head in one plane of a block."""
        return block_size * self.head_dim * KvDtype(self.dtype).itemsize_bytes

    def slot_bytes(self, block_size: int, part: Part) -> int:
        """Return the size of a block in one rank's pool; raises InvalidValueError for heads that cannot be split."""
        return self.num_planes * len(heads_of(self.num_kv_heads, part)) * self.head_bytes(block_size)


class PoolPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank's pool of a group: block i is the i-th piece of `slot_bytes` from `base_address` on."""

    base_address: Count
    slot_bytes: Positive
    num_slots: Count


class Hello(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A rank's identity, the meaning of its blocks, and how to reach its memory.

    Equal tokens have equal block hashes only if `hash_seed` is equal, too. `agent_metadata` is for agents of the kind
    `agent`. `pools` are this rank's, one per group.
    """

    worker: Name
    model: Name
    block_size: Positive
    hash_seed: Count
    groups: tuple[GroupShape, ...]
    tensor_parallel_size: Positive
    tensor_parallel_rank: Count
    agent: Name
    agent_metadata: bytes
    pools: tuple[PoolPlace, ...]

    @property
    def part(self) -> Part:
        """Return the rank and its number of ranks."""
        return Part(self.tensor_parallel_rank, self.tensor_parallel_size)


class ReceiveRequest(msgspec.Struct, tag="receive", array_like=True, frozen=True, gc=False):
    """A receiver's rank asks a sender's rank to write a held prompt into blocks that the receiver has reserved.

    A receiver never uses a `transfer_id` twice, not even after a restart under the same name: late results name it.
    `sender` is the rank that the receiver expects the sender to be. The block lists end at the prompt's end, so their
    lengths show where they start. `room` is memory into which the sender may write everything in one piece.
    """

    protocol_version: Count
    transfer_id: Count
    hello: Hello
    sender: Part
    request_id: Name
    num_tokens: Count
    block_ids_per_group: tuple[tuple[Count, ...], ...]
    room: Extent | None = None


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True, gc=False):
    """The receiver cancels a transfer; the sender answers with a `Result` once no write is under way."""

    transfer_id: Count
    request_id: Name


class ResultStatus(IntEnum):
    """How a transfer ended; in each case none of the sender's writes is under way any more."""

    SUCCESS = 0
    FAILED = 1
    CANCELLED = 2
    BOUNCED = 3
    """Everything was written into the request's room, one piece behind the other."""


class Result(msgspec.Struct, tag="result", array_like=True, frozen=True, gc=False):
    """The sender's rank has ended a transfer; if all was written, it may have the prompt's first token."""

    transfer_id: Count
    status: ResultStatus
    first_token_id: Count | None = None


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True, gc=False):
    """The sender's rank has written all blocks of a prompt that are computed so far."""

    transfer_id: Count


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True, gc=False):
    """A message without content, by which a sender learns whether a receiver is still connected."""


class Refusal(msgspec.Struct, tag="refusal", array_like=True, frozen=True, gc=False):
    """A sender refuses a request, for which it will write nothing; without an id, all requests of the receiver.

    Where the two workers differ, `ours` is the sender's value and `theirs` the receiver's.
    """

    reason: RefusalReason
    transfer_id: Count | None = None
    ours: str = ""
    theirs: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}: ours={self.ours} theirs={self.theirs}" if self.ours else self.reason.value


Message: TypeAlias = ReceiveRequest | Cancel | Result | Progress | Refusal | Ping
Comparison: TypeAlias = tuple[RefusalReason, object, object]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Return the message as msgpack; equal messages give equal bytes."""
    return _encoder.encode(message)


def decode_message(payload: bytes, source: str) -> Message:
    """Return the message in `payload`, checked; raises MalformedMessageError, naming `source` and the wrong field."""
    try:
        message = _decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(source, str(error)) from error
    if isinstance(message, ReceiveRequest):
        hello = message.hello
        rank, size = hello.part
        if rank >= size:
            raise MalformedMessageError(source, f"tensor_parallel_rank is {rank}, expected less than {size}")
        if len(hello.pools) != len(hello.groups):
            raise MalformedMessageError(source, f"{len(hello.pools)} pools, expected {len(hello.groups)}")
    return message


def group_shapes(plan: WindowPlan) -> tuple[GroupShape, ...]:
    """Return the groups of a whole model's plan (not one rank's) for a `Hello`."""
    return tuple(
        GroupShape(
            None if group.window is FULL else group.window,
            group.layer.num_kv_heads,
            group.layer.head_dim,
            group.layer.dtype.value,
            group.layer.kv_factor,
            group.layer_indices,
        )
        for group in plan.groups
    )


def check_request(ours: Hello, request: ReceiveRequest) -> Refusal | None:
    """Return a refusal if the blocks of the request's receiver differ from ours, None if they mean the same."""
    for reason, our_value, their_value in _compared(ours, request):
        if our_value != their_value:
            return Refusal(reason, request.transfer_id, str(our_value), str(their_value))
    return None


def slot_sizes(hello: Hello) -> Iterator[Comparison]:
    """Yield, to be compared, the size of each group's slots as calculated and as the pools have it."""
    for group_id, (group, pool) in enumerate(zip(hello.groups, hello.pools, strict=True)):
        try:
            sizes = group.slot_bytes(hello.block_size, hello.part), pool.slot_bytes
        except InvalidValueError as error:
            num_heads = f"group {group_id} num_kv_heads {group.num_kv_heads}"
            yield RefusalReason.LAYER_PLAN, num_heads, f"{error.field} {error.value}"
            return
        expected, actual = (f"group {group_id} in slots of {size} bytes" for size in sizes)
        yield RefusalReason.LAYER_PLAN, expected, actual


def _compared(ours: Hello, request: ReceiveRequest) -> Iterator[Comparison]:
    """Yield values that must be equal on both sides; a refusal is for the first that differ."""
    yield RefusalReason.PROTOCOL_VERSION, PROTOCOL_VERSION, request.protocol_version
    theirs = request.hello
    yield RefusalReason.MODEL, ours.model, theirs.model
    yield RefusalReason.BLOCK_SIZE, ours.block_size, theirs.block_size
    yield RefusalReason.HASH_SEED, ours.hash_seed, theirs.hash_seed
    yield RefusalReason.AGENT, ours.agent, theirs.agent
    yield RefusalReason.RANK, ours.part, request.sender
    for group_id, groups in enumerate(zip(ours.groups, theirs.groups, strict=False)):
        for name in GroupShape.__struct_fields__:
            reason = RefusalReason.DTYPE if name == "dtype" else RefusalReason.LAYER_PLAN
            our_value, their_value = (f"group {group_id} {name} {getattr(each, name)}" for each in groups)
            yield reason, our_value, their_value
    yield RefusalReason.LAYER_PLAN, f"{len(ours.groups)} groups", f"{len(theirs.groups)} groups"
    yield from slot_sizes(theirs)
