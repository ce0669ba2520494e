"""What two workers say to each other before and around a transfer: a msgpack array in one frame each.

The handshake comes first: both send a `Hello` and refuse the other's, with a reason and both values, unless their
blocks mean the same. Each rank of a worker speaks for itself; their numbers may differ, and then heads are split
differently (`kvist.transfer.heads`). Fields are only appended, with defaults; `protocol_version` stays the first field
of a `Hello` for ever, so that any version can be refused by name.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from itertools import zip_longest
from typing import Annotated, Final, TypeAlias

import msgspec

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events.engine_events import FULL
from kvist.kvcache.plan import KvDtype, WindowPlan
from kvist.transfer.commands import MAX_NAME_LEN
from kvist.transfer.heads import Part, heads_of
from kvist.transfer.tails import Count, EncodedTail, Extent

PROTOCOL_VERSION: Final = 1

MAX_MESSAGE_BYTES: Final = 64 * 2**20  # a million blocks, and room

# Hostile bytes raise more than msgspec's own error (a ValueError): broken UTF-8, and nesting as deep as the C stack.
_DECODE_ERRORS: Final = (ValueError, RecursionError)

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LEN)]


class RefusalReason(Enum):
    """Why a worker will not do what the other one asks."""

    PROTOCOL_VERSION = "protocol_version"
    MODEL = "model"
    BLOCK_SIZE = "block_size"
    HASH_SEED = "hash_seed"
    DTYPE = "dtype"
    LAYER_PLAN = "layer_plan"
    AGENT = "agent"
    MALFORMED = "malformed"
    UNKNOWN_REQUEST = "unknown_request"
    ALREADY_ENDED = "already_ended"
    BLOCK_COUNT_MISMATCH = "block_count_mismatch"
    UNKNOWN_BLOCK = "unknown_block"
    BUSY = "busy"


class GroupShape(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the blocks of one group hold, in all ranks together; `window` is None for full attention."""

    window: Positive | None
    num_kv_heads: Positive
    head_dim: Positive
    dtype: Name
    kv_factor: Annotated[int, msgspec.Meta(ge=1, le=2)]
    layer_indices: tuple[Count, ...]

    @property
    def num_layers(self) -> int:
        """Return how many layers the group has."""
        return len(self.layer_indices)

    @property
    def num_planes(self) -> int:
        """Return how many keys or values a slot has of each head and token: one a layer, or two."""
        return self.num_layers * self.kv_factor

    def head_bytes(self, block_size: int) -> int:
        """Return the bytes of one head's part of a block, in one plane."""
        return block_size * self.head_dim * KvDtype(self.dtype).itemsize_bytes

    def slot_bytes(self, block_size: int, part: Part) -> int:
        """Return the bytes of a block in one rank's pool; raises InvalidValueError for heads that cannot be split."""
        return self.num_planes * heads_of(self.num_kv_heads, part).num_heads * self.head_bytes(block_size)


class PoolPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one rank has a group's pool: block i is the i-th piece of `slot_bytes` from `base_address` on."""

    base_address: Count
    slot_bytes: Positive
    num_slots: Count

    def block(self, block_id: int) -> Extent:
        """Return where a block is; raises InvalidValueError for one that the pool does not have."""
        if not 0 <= block_id < self.num_slots:
            raise InvalidValueError("block_id", block_id, f"0 to {self.num_slots - 1}")
        return Extent(self.base_address + block_id * self.slot_bytes, self.slot_bytes)


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True, gc=False):
    """Who a worker's rank is, what its blocks mean, and how its memory is reached.

    `hash_seed` tells whether equal tokens get equal names; `agent_metadata` is for the agent called `agent`, and
    `pools` are this rank's, a pool a group.
    """

    protocol_version: Count
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
        """Return which rank it is, and of how many."""
        return Part(self.tensor_parallel_rank, self.tensor_parallel_size)


class ForeignHello(msgspec.Struct, tag="hello", array_like=True, frozen=True, gc=False):
    """The greeting of another version, of which nothing but its number is understood."""

    protocol_version: Count


class ReceiveRequest(msgspec.Struct, tag="receive", array_like=True, frozen=True, gc=False):
    """The receiver asks one rank of the sender for a held request's blocks, into blocks that it has reserved.

    A receiver never uses a `transfer_id` twice, not even after a restart under the same name: late results name it.
    The lists end at the prompt's end, so that their lengths say where they start. `room` is where this sender may put
    everything in one piece.
    """

    transfer_id: Count
    request_id: Name
    num_tokens: Count
    block_ids_per_group: tuple[tuple[Count, ...], ...]
    num_receivers: Positive = 1
    room: Extent | None = None


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True, gc=False):
    """The receiver wants no more of a transfer, and is told by a result when nothing is under way."""

    transfer_id: Count
    request_id: Name


class ResultStatus(IntEnum):
    """How a transfer ended at its sender. Whatever it is, none of the sender's writes is under way any more."""

    SUCCESS = 0
    FAILED = 1
    CANCELLED = 2


class Result(msgspec.Struct, tag="result", array_like=True, frozen=True, gc=False):
    """What one rank of the sender has to say at the end; `tail` is that of a write through the receiver's room."""

    rank: Count
    transfer_id: Count
    status: ResultStatus
    tail: EncodedTail | None = None


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True, gc=False):
    """Nothing: whether it can be sent is what the sender wants to know."""


class Refusal(msgspec.Struct, tag="refusal", array_like=True, frozen=True, gc=False):
    """A greeting or a request is not accepted; nothing is or will be written for it.

    For a greeting there is no transfer, and `ours` and `theirs` are what differs, as the one who refuses sees it.
    """

    reason: RefusalReason
    transfer_id: Count | None = None
    ours: str = ""
    theirs: str = ""

    def __str__(self) -> str:
        """Return the reason and both values, for logs and error messages."""
        return f"{self.reason.value}: ours={self.ours} theirs={self.theirs}" if self.ours else self.reason.value


Message: TypeAlias = Hello | ReceiveRequest | Cancel | Result | Refusal | Ping

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Hello | ReceiveRequest | Cancel | Result | Refusal | Ping
)
_foreign_decoder = msgspec.msgpack.Decoder(ForeignHello)


def encode_message(message: Message) -> bytes:
    """Return the message as msgpack; equal messages give equal bytes."""
    return _encoder.encode(message)


def decode_message(payload: bytes, source: str) -> Message | ForeignHello:
    """Return the message in `payload`, checked; raises MalformedMessageError, naming `source` and the wrong field."""
    try:
        message = _decoder.decode(payload)
    except _DECODE_ERRORS as error:
        return _decode_foreign(payload, source, error)
    if isinstance(message, Hello):
        if message.protocol_version != PROTOCOL_VERSION:
            return ForeignHello(message.protocol_version)
        _check_hello(message, source)
    return message


def group_shapes(plan: WindowPlan) -> tuple[GroupShape, ...]:
    """Return the groups of a whole model's plan, not of one rank's, as a greeting tells them."""
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


def judge_hello(ours: Hello, theirs: Hello | ForeignHello) -> Refusal | None:
    """Return why the two must not exchange blocks, None if they may; symmetric but for which value is whose.

    Of what they say of themselves alone, only theirs is looked at: whether their slots have the heads of their rank.
    """
    if isinstance(theirs, ForeignHello) or theirs.protocol_version != ours.protocol_version:
        return _refusal(RefusalReason.PROTOCOL_VERSION, ours.protocol_version, theirs.protocol_version)
    facts = (
        (RefusalReason.MODEL, ours.model, theirs.model),
        (RefusalReason.BLOCK_SIZE, ours.block_size, theirs.block_size),
        (RefusalReason.HASH_SEED, ours.hash_seed, theirs.hash_seed),
        (RefusalReason.AGENT, ours.agent, theirs.agent),
    )
    for reason, our_value, their_value in facts:
        if our_value != their_value:
            return _refusal(reason, our_value, their_value)
    for group_id, (our_group, their_group) in enumerate(zip_longest(ours.groups, theirs.groups)):
        if our_group != their_group:
            return _group_refusal(group_id, our_group, their_group)
    return pools_refusal(theirs)


def pools_refusal(hello: Hello) -> Refusal | None:
    """Return why a worker's pools are not what its groups and its rank come to; `ours` is what they should be."""
    for group_id, (group, pool) in enumerate(zip(hello.groups, hello.pools, strict=True)):
        try:
            expected = group.slot_bytes(hello.block_size, hello.part)
        except InvalidValueError as error:
            told = f"group {group_id} num_kv_heads {group.num_kv_heads}"
            return _refusal(RefusalReason.LAYER_PLAN, told, f"{error.field} {error.value}")
        if pool.slot_bytes != expected:
            told, theirs = (f"group {group_id} in slots of {size} bytes" for size in (expected, pool.slot_bytes))
            return _refusal(RefusalReason.LAYER_PLAN, told, theirs)
    return None


def _refusal(reason: RefusalReason, our_value: object, their_value: object) -> Refusal:
    return Refusal(reason, None, str(our_value), str(their_value))


def _group_refusal(group_id: int, ours: GroupShape | None, theirs: GroupShape | None) -> Refusal:
    """Name the first field of a group that differs; the group itself where one side has none."""
    if ours is None or theirs is None:
        return _refusal(RefusalReason.LAYER_PLAN, _told(group_id, ours), _told(group_id, theirs))
    name = next(name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name))
    reason = RefusalReason.DTYPE if name == "dtype" else RefusalReason.LAYER_PLAN
    values = (f"group {group_id} {name} {getattr(group, name)}" for group in (ours, theirs))
    return _refusal(reason, *values)


def _told(group_id: int, group: GroupShape | None) -> str:
    return f"no group {group_id}" if group is None else f"group {group_id} of {group.num_layers} layers"


def _decode_foreign(payload: bytes, source: str, error: Exception) -> ForeignHello:
    try:
        foreign = _foreign_decoder.decode(payload)
    except _DECODE_ERRORS:
        raise MalformedMessageError(source, str(error)) from error
    if foreign.protocol_version == PROTOCOL_VERSION:  # it should have been understood
        raise MalformedMessageError(source, str(error)) from error
    return foreign


def _check_hello(hello: Hello, source: str) -> None:
    """Raise MalformedMessageError for fields that contradict each other."""
    rank, size = hello.tensor_parallel_rank, hello.tensor_parallel_size
    if rank >= size:
        raise MalformedMessageError(source, f"tensor_parallel_rank is {rank}, expected less than {size}")
    if len(hello.pools) != len(hello.groups):
        raise MalformedMessageError(source, f"{len(hello.pools)} pools, expected {len(hello.groups)}")
