from __future__ import annotations

import random

import msgspec
import pytest

from kvist.errors import MalformedMessageError
from kvist.events.engine_events import FULL
from kvist.kvcache.plan import KvDtype, LayerKv, plan_windows
from kvist.transfer.heads import Part
from kvist.transfer.messages import (
    Cancel,
    Extent,
    GroupShape,
    Hello,
    Message,
    Ping,
    PoolPlace,
    Progress,
    ReceiveRequest,
    Refusal,
    RefusalReason,
    Result,
    ResultStatus,
    check_request,
    decode_message,
    encode_message,
    group_shapes,
)

GROUPS = (GroupShape(None, 8, 128, "bfloat16", 2, (1,)), GroupShape(512, 4, 64, "bfloat16", 2, (0, 2)))
POOLS = (PoolPlace(0x8000, 0x8000, 4), PoolPlace(0x28000, 0x4000, 2))
HELLO = Hello("decode-0", "tiny", 16, 1337, GROUPS, 2, 1, "nixl", b"\x01\x02", POOLS)
REQUEST = ReceiveRequest(3, 7, HELLO, Part(0, 3), "held-1", 100, ((22, 23), (24,)), Extent(0x100000, 59392))
GOLDEN_HELLO = (
    "9a a86465636f64652d30 a474696e79 10 cd0539"
    "92 96c008cc80a862666c6f61743136029101 96cd02000440a862666c6f61743136029200 02"
    "02 01 a46e69786c c4020102 92 93cd8000cd800004 93ce00028000cd400002"
)
MESSAGES: list[tuple[Message, str]] = [
    (
        REQUEST,
        f"99 a772656365697665 03 07 {GOLDEN_HELLO} 9200 03 a668656c642d31 64 92 921617 9118 92 ce00100000 cde800",
    ),
    (Cancel(7, "held-1"), "93 a663616e63656c 07 a668656c642d31"),
    (Result(12345, ResultStatus.SUCCESS, 300), "94 a6726573756c74 cd3039 00 cd012c"),
    (Result(7, ResultStatus.CANCELLED), "94 a6726573756c74 07 02 c0"),
    (Result(7, ResultStatus.BOUNCED, 5), "94 a6726573756c74 07 03 05"),
    (Progress(7), "92 a870726f6772657373 07"),
    (Ping(), "91 a470696e67"),
    (
        Refusal(RefusalReason.BLOCK_SIZE, None, "16", "32"),
        "95 a77265667573616c aa626c6f636b5f73697a65 c0 a23136 a23332",
    ),
]


@pytest.mark.parametrize(("message", "golden"), MESSAGES, ids=lambda value: type(value).__name__)
def test_messages_have_the_written_bytes(message: Message, golden: str) -> None:
    assert encode_message(message).hex() == golden.replace(" ", "")
    assert decode_message(bytes.fromhex(golden), "peer") == message


def test_fields_of_later_versions_are_ignored_and_missing_ones_have_defaults() -> None:
    later = msgspec.msgpack.encode([*msgspec.msgpack.decode(encode_message(Cancel(7, "held-1"))), "new"])
    assert decode_message(later, "peer") == Cancel(7, "held-1")
    shorter = msgspec.msgpack.encode(msgspec.msgpack.decode(encode_message(REQUEST))[:-1])
    assert decode_message(shorter, "peer") == msgspec.structs.replace(REQUEST, room=None)


def changed(**fields: object) -> ReceiveRequest:
    return msgspec.structs.replace(REQUEST, hello=msgspec.structs.replace(HELLO, **fields))


def regrouped(**fields: object) -> ReceiveRequest:
    return changed(groups=(GROUPS[0], msgspec.structs.replace(GROUPS[1], **fields)))


SENDER = msgspec.structs.replace(
    HELLO,
    worker="p",
    tensor_parallel_size=3,
    tensor_parallel_rank=0,
    agent_metadata=b"",
)


@pytest.mark.parametrize(
    ("theirs", "reason", "our_value", "their_value"),
    [
        (msgspec.structs.replace(REQUEST, protocol_version=4), RefusalReason.PROTOCOL_VERSION, "3", "4"),
        (msgspec.structs.replace(REQUEST, protocol_version=1), RefusalReason.PROTOCOL_VERSION, "3", "1"),
        (msgspec.structs.replace(REQUEST, sender=Part(1, 3)), RefusalReason.RANK, "rank 0 of 3", "rank 1 of 3"),
        (changed(model="other"), RefusalReason.MODEL, "tiny", "other"),
        (changed(block_size=32), RefusalReason.BLOCK_SIZE, "16", "32"),
        (changed(hash_seed=0), RefusalReason.HASH_SEED, "1337", "0"),
        (changed(agent="shared_memory"), RefusalReason.AGENT, "nixl", "shared_memory"),
        (regrouped(dtype="float16"), RefusalReason.DTYPE, "group 1 dtype bfloat16", "group 1 dtype float16"),
        (regrouped(window=511), RefusalReason.LAYER_PLAN, "group 1 window 512", "group 1 window 511"),
        (regrouped(window=None), RefusalReason.LAYER_PLAN, "group 1 window 512", "group 1 window None"),
        (regrouped(num_kv_heads=8), RefusalReason.LAYER_PLAN, "group 1 num_kv_heads 4", "group 1 num_kv_heads 8"),
        (regrouped(head_dim=32), RefusalReason.LAYER_PLAN, "group 1 head_dim 64", "group 1 head_dim 32"),
        (regrouped(kv_factor=1), RefusalReason.LAYER_PLAN, "group 1 kv_factor 2", "group 1 kv_factor 1"),
        (
            regrouped(layer_indices=(0, 3)),
            RefusalReason.LAYER_PLAN,
            "group 1 layer_indices (0, 2)",
            "group 1 layer_indices (0, 3)",
        ),
        (changed(groups=GROUPS[:1], pools=POOLS[:1]), RefusalReason.LAYER_PLAN, "2 groups", "1 groups"),
    ],
)
def test_workers_whose_blocks_differ_refuse_each_other_with_both_values(
    theirs: ReceiveRequest, reason: RefusalReason, our_value: str, their_value: str
) -> None:
    refusal = check_request(SENDER, theirs)
    assert refusal == Refusal(reason, 7, our_value, their_value)
    assert str(refusal) == f"{reason.value}: ours={our_value} theirs={their_value}"


def test_workers_may_differ_in_name_and_in_how_they_split_heads() -> None:
    assert check_request(SENDER, REQUEST) is None
    pools = (PoolPlace(0x8000, 0x4000, 4), PoolPlace(0x28000, 0x2000, 2))
    assert check_request(SENDER, changed(tensor_parallel_size=4, tensor_parallel_rank=3, pools=pools)) is None
    assert str(Refusal(RefusalReason.BUSY, 7)) == "busy"


@pytest.mark.parametrize(
    ("theirs", "our_value", "their_value"),
    [
        (changed(tensor_parallel_size=4), "group 0 in slots of 16384 bytes", "group 0 in slots of 32768 bytes"),
        (changed(pools=(POOLS[0], POOLS[0])), "group 1 in slots of 16384 bytes", "group 1 in slots of 32768 bytes"),
        (changed(tensor_parallel_size=3), "group 0 num_kv_heads 8", "tensor_parallel_size 3"),
        (changed(tensor_parallel_size=16), "group 0 in slots of 8192 bytes", "group 0 in slots of 32768 bytes"),
    ],
)
def test_a_rank_whose_slots_have_not_its_heads_is_refused(
    theirs: ReceiveRequest, our_value: str, their_value: str
) -> None:
    assert check_request(SENDER, theirs) == Refusal(RefusalReason.LAYER_PLAN, 7, our_value, their_value)


def test_a_request_with_fields_of_a_later_version_is_read() -> None:
    fields = msgspec.msgpack.decode(encode_message(REQUEST))
    assert decode_message(msgspec.msgpack.encode([*fields, "a field of tomorrow"]), "peer") == REQUEST


def test_a_plan_is_told_group_by_group() -> None:
    full = LayerKv(FULL, 8, 128, KvDtype.BFLOAT16)
    windowed = LayerKv(512, 4, 64, KvDtype.BFLOAT16)
    shapes = group_shapes(plan_windows([windowed, full, windowed], 4096))
    assert shapes == GROUPS


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (changed(tensor_parallel_rank=2), "tensor_parallel_rank is 2"),
        (changed(pools=POOLS[:1]), "1 pools, expected 2"),
        (msgspec.structs.replace(REQUEST, room=Extent(-1, 1)), "Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, room=Extent(0, -1)), "Expected `int` >= 0"),
        (Result(7, 4), "Invalid enum value 4"),
        (Result(-1, ResultStatus.SUCCESS), "Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, transfer_id=-1), "expected `int` >= 0|Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, block_ids_per_group=((-1,),)), "Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, request_id=""), "length >= 1"),
        (changed(block_size=0), "Expected `int` >= 1"),
    ],
)
def test_a_message_that_contradicts_itself_is_malformed_by_field(message: Message, named: str) -> None:
    with pytest.raises(MalformedMessageError, match=named):
        decode_message(encode_message(message), "peer")


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x91" * 100_000, b"\x91\xa7receive", b"\x93\xa7receive\x02\x07", b"\x80"]
)
def test_bytes_that_are_no_message_are_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode_message(payload, "peer")


def test_random_bytes_are_a_message_or_malformed_and_nothing_else() -> None:
    rng = random.Random(6)
    goldens = [encode_message(message) for message, _ in MESSAGES]
    for _ in range(5000):
        payload = bytearray(rng.choice(goldens))
        for _ in range(rng.randint(1, 5)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            message = decode_message(bytes(payload[: rng.randint(1, len(payload))]), "peer")
        except MalformedMessageError:
            continue
        if isinstance(message, ReceiveRequest):
            check_request(SENDER, message)
