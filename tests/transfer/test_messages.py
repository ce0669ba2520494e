from __future__ import annotations

import random

import msgspec
import pytest

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events.engine_events import FULL
from kvist.kvcache.plan import KvDtype, LayerKv, plan_windows
from kvist.transfer.messages import (
    Cancel,
    ForeignHello,
    GroupShape,
    Hello,
    Message,
    Ping,
    PoolPlace,
    ReceiveRequest,
    Refusal,
    RefusalReason,
    Result,
    ResultStatus,
    decode_message,
    encode_message,
    group_shapes,
    judge_hello,
)
from kvist.transfer.tails import EncodedTail, Extent

GROUPS = (GroupShape(None, 8, 128, "bfloat16", 2, (1,)), GroupShape(512, 4, 64, "bfloat16", 2, (0, 2)))
POOLS = (PoolPlace(0x8000, 0x8000, 4), PoolPlace(0x28000, 0x4000, 2))
HELLO = Hello(1, "decode-0", "tiny", 16, 1337, GROUPS, 2, 1, "nixl", b"\x01\x02", POOLS)
REQUEST = ReceiveRequest(7, "held-1", 100, ((22, 23), (24,)), 2, Extent(0x100000, 59392))
MESSAGES: list[tuple[Message, str]] = [
    (
        HELLO,
        "9c a568656c6c6f 01 a86465636f64652d30 a474696e79 10 cd0539"
        "92 96c008cc80a862666c6f61743136029101 96cd02000440a862666c6f61743136029200 02"
        "02 01 a46e69786c c4020102 92 93cd8000cd800004 93ce00028000cd400002",
    ),
    (
        REQUEST,
        "97 a772656365697665 07 a668656c642d31 64 92 921617 9118 02 92 ce00100000 cde800",
    ),
    (Cancel(7, "held-1"), "93 a663616e63656c 07 a668656c642d31"),
    (Result(3, 12345, ResultStatus.SUCCESS), "95 a6726573756c74 03 cd3039 00 c0"),
    (Result(3, 7, ResultStatus.CANCELLED, EncodedTail(b"a", b"b")), "95 a6726573756c74 03 07 02 92 c40161 c40162"),
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
    shorter = msgspec.msgpack.encode(["receive", 7, "held-1", 100, [[1]]])
    assert decode_message(shorter, "peer") == ReceiveRequest(7, "held-1", 100, ((1,),))


def changed(**fields: object) -> Hello:
    return msgspec.structs.replace(HELLO, **fields)


def regrouped(**fields: object) -> Hello:
    return changed(groups=(GROUPS[0], msgspec.structs.replace(GROUPS[1], **fields)))


@pytest.mark.parametrize(
    ("theirs", "reason", "our_value", "their_value"),
    [
        (ForeignHello(2), RefusalReason.PROTOCOL_VERSION, "1", "2"),
        (changed(protocol_version=2), RefusalReason.PROTOCOL_VERSION, "1", "2"),
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
        (changed(groups=GROUPS[:1], pools=POOLS[:1]), RefusalReason.LAYER_PLAN, "group 1 of 2 layers", "no group 1"),
    ],
)
def test_workers_whose_blocks_differ_refuse_each_other_with_both_values(
    theirs: Hello | ForeignHello, reason: RefusalReason, our_value: str, their_value: str
) -> None:
    assert judge_hello(HELLO, theirs) == Refusal(reason, None, our_value, their_value)
    if isinstance(theirs, Hello):
        assert judge_hello(theirs, HELLO) == Refusal(reason, None, their_value, our_value)
    assert str(judge_hello(HELLO, theirs)) == f"{reason.value}: ours={our_value} theirs={their_value}"


def test_workers_may_differ_in_name_and_in_how_they_split_heads() -> None:
    pools = (PoolPlace(0x8000, 0x4000, 4), PoolPlace(0x28000, 0x2000, 2))
    theirs = changed(worker="p", tensor_parallel_size=4, tensor_parallel_rank=3, agent_metadata=b"", pools=pools)
    assert judge_hello(HELLO, theirs) is None
    assert judge_hello(theirs, HELLO) is None
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
def test_a_rank_whose_slots_have_not_its_heads_is_refused(theirs: Hello, our_value: str, their_value: str) -> None:
    assert judge_hello(HELLO, theirs) == Refusal(RefusalReason.LAYER_PLAN, None, our_value, their_value)


def test_a_greeting_of_any_other_version_is_understood_as_far_as_its_number() -> None:
    for version in (0, 2):
        payload = msgspec.msgpack.encode(["hello", version, {"anything": "else"}])
        assert decode_message(payload, "peer") == ForeignHello(version)
    alike = encode_message(changed(protocol_version=2))
    assert decode_message(alike, "peer") == ForeignHello(2)


def test_a_plan_is_told_group_by_group() -> None:
    full = LayerKv(FULL, 8, 128, KvDtype.BFLOAT16)
    windowed = LayerKv(512, 4, 64, KvDtype.BFLOAT16)
    shapes = group_shapes(plan_windows([windowed, full, windowed], 4096))
    assert shapes == GROUPS
    assert [shape.num_layers for shape in shapes] == [1, 2]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (changed(tensor_parallel_rank=2), "tensor_parallel_rank is 2"),
        (changed(pools=POOLS[:1]), "1 pools, expected 2"),
        (msgspec.structs.replace(REQUEST, room=Extent(-1, 1)), "Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, room=Extent(0, -1)), "Expected `int` >= 0"),
        (Result(0, 7, 3), "Invalid enum value 3"),
        (Result(-1, 7, ResultStatus.SUCCESS), "Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, transfer_id=-1), "expected `int` >= 0|Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, block_ids_per_group=((-1,),)), "Expected `int` >= 0"),
        (msgspec.structs.replace(REQUEST, request_id=""), "length >= 1"),
        (msgspec.structs.replace(HELLO, block_size=0), "Expected `int` >= 1"),
    ],
)
def test_a_message_that_contradicts_itself_is_malformed_by_field(message: Message, named: str) -> None:
    with pytest.raises(MalformedMessageError, match=named):
        decode_message(encode_message(message), "peer")


def test_a_block_is_where_its_pool_has_it() -> None:
    assert POOLS[0].block(3) == (0x20000, 0x8000)
    for block_id in (-1, 4):
        with pytest.raises(InvalidValueError, match="block_id"):
            POOLS[0].block(block_id)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 100_000, b"\x91\xa5hello", b"\x92\xa5hello\x01", b"\x80"])
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
        if isinstance(message, Hello | ForeignHello):
            judge_hello(HELLO, message)
