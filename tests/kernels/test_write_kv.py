import math

import pytest
import torch

from kvist.kernels import paged_attention, write_kv
from kvist.kernels._fp8 import FP8_DTYPES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_land_in_their_slots_and_negative_slots_write_nothing(device, dtype):
    kv_cache = torch.full((5, 2, 3, 8, 20), torch.nan, dtype=dtype, device=device)
    key, value = torch.randn(2, 19, 3, 20, device=device).to(dtype)
    slots = torch.randperm(40)[:19]
    slots[:2] = torch.tensor([0, 39])  # the first slot of block 0, the last of the last block
    slots = torch.unique(slots)
    slots = torch.cat([slots, torch.full((19 - len(slots),), -1)])
    slots[3] = -7
    write_kv(key, value, kv_cache, slots.to(device))
    by_slot = kv_cache.permute(0, 3, 1, 2, 4).reshape(40, 2, 3, 20)
    is_written = torch.zeros(40, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(by_slot[slot, 0], key[token])
            assert torch.equal(by_slot[slot, 1], value[token])
            is_written[slot] = True
    assert by_slot[~is_written.to(device)].isnan().all()


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_every_16_bit_number_is_rounded_to_eight_bits_and_saturates_without_infinities(device, dtype, source):
    # All numbers of the source but its infinities and NaN, and for float32 those of bfloat16 with a bit below: ties
    # that a second rounding on the way would get wrong.
    half = torch.float16 if source == torch.float16 else torch.bfloat16
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half)
    numbers = numbers[numbers.isfinite()].to(source)
    if source == torch.float32:
        numbers = torch.cat([numbers, (numbers.view(torch.int32) + 1).view(torch.float32)])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 1024)).view(-1, 4, 256).to(device)
    num_tokens = len(numbers)
    kv_cache = torch.zeros(-(-num_tokens // 64), 2, 4, 64, 256, dtype=dtype, device=device)
    write_kv(numbers, -numbers, kv_cache, torch.arange(num_tokens, device=device))
    largest = torch.finfo(dtype).max
    expected = numbers.float().clamp(-largest, largest).to(dtype)
    by_slot = kv_cache.permute(0, 3, 1, 2, 4).reshape(-1, 2, 4, 256)[:num_tokens]
    assert torch.equal(by_slot[:, 0].float(), expected.float())
    assert torch.equal(by_slot[:, 1].float(), -expected.float())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_eight_bits_saturate_at_infinity_and_keep_nan(device, dtype):
    kv_cache = torch.zeros(1, 2, 1, 4, 1, dtype=dtype, device=device)
    key = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], device=device).view(4, 1, 1)
    write_kv(key, key, kv_cache, torch.arange(4, device=device))
    largest = torch.finfo(dtype).max
    written = kv_cache[0, 0, 0, :, 0].float().tolist()
    assert written[:2] == [largest, -largest]
    assert math.isnan(written[2])
    assert written[3] == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_rounded_to_the_dtype_of_the_cache(device, dtype):
    kv_cache = torch.zeros(1, 2, 1, 8, 16, dtype=dtype, device=device)
    key, value = torch.randn(2, 8, 1, 16, device=device)
    write_kv(key, value, kv_cache, torch.arange(8, device=device))
    assert torch.equal(kv_cache[0, 0, 0], key[:, 0].to(dtype))
    assert torch.equal(kv_cache[0, 1, 0], value[:, 0].to(dtype))


def test_blocks_of_a_slot_shared_by_layers_are_written_apart(device):
    slots_of_layers = torch.zeros(4, 3, 2, 1, 8, 16, device=device)
    qkv = torch.randn(8, 3, 1, 16, device=device)  # the rows of key and value lie apart, too
    write_kv(qkv[:, 1], qkv[:, 2], slots_of_layers[:, 1], torch.arange(16, 24, device=device))
    assert torch.equal(slots_of_layers[2, 1, 0, 0], qkv[:, 1, 0])
    assert torch.equal(slots_of_layers[2, 1, 1, 0], qkv[:, 2, 0])
    assert slots_of_layers[:, [0, 2]].count_nonzero() == 0


def test_blocks_past_two_to_the_31_elements_are_written_and_read(sparse_cache):
    # An overflow of 32 bits would land near the front. test_gpu.py does the same in GPU memory.
    last = len(sparse_cache) - 1
    key, value = torch.randint(-4, 5, (2, 20, 1, 128)).float()
    slots = torch.cat([torch.arange(16) + last * 16, torch.arange(4) + (last - 1) * 16])
    write_kv(key, value, sparse_cache, slots)
    assert torch.equal(sparse_cache[last, 0, 0].float(), key[:16, 0])
    assert torch.equal(sparse_cache[last - 1, 1, 0, :4].float(), value[16:, 0])
    assert sparse_cache[:8].float().count_nonzero() == 0
    tables, lengths = torch.tensor([[last, last - 1]]).int(), torch.tensor([20]).int()
    query, starts = torch.zeros(1, 1, 128), torch.tensor([0, 1]).int()
    torch.testing.assert_close(paged_attention(query, sparse_cache, tables, lengths, scale=1.0)[0], value.mean(0))
    extended = paged_attention(query, sparse_cache, tables, lengths, starts, scale=1.0)
    torch.testing.assert_close(extended[0], value.mean(0))


def test_no_tokens_write_nothing(device):
    kv_cache = torch.zeros(2, 2, 1, 8, 16, device=device)
    none = torch.empty(0, 1, 16, device=device)
    write_kv(none, none, kv_cache, torch.empty(0, dtype=torch.int64, device=device))
    assert kv_cache.count_nonzero() == 0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kv_cache", torch.zeros(4, 3, 1, 8, 16), r"kv_cache has shape \[4, 3, 1, 8, 16\]; expected \[any, 2, any"),
        ("kv_cache", torch.zeros(4, 2, 1, 12, 16), "kv_cache has block_size 12; expected a power of two"),
        ("kv_cache", torch.zeros(4, 2, 1, 8, 600), "kv_cache has head_dim 600; expected 1 to 512"),
        (
            "kv_cache",
            torch.zeros(4, 2, 1, 8, 16).double(),
            "kv_cache has dtype torch.float64; expected torch.float16 or",
        ),
        (
            "kv_cache",
            torch.zeros(4, 2, 1, 16, 8).mT,
            r"kv_cache has strides \[256, 128, 128, 1, 8\]; expected contiguous rows",
        ),
        ("key", torch.zeros(6, 1, 16).to(torch.float8_e5m2), "key has dtype torch.float8_e5m2; expected torch.float16"),
        ("key", torch.zeros(6, 2, 16), r"key has shape \[6, 2, 16\]; expected \[6, 1, 16\]"),
        ("value", torch.zeros(5, 1, 16), r"value has shape \[5, 1, 16\]; expected \[6, 1, 16\]"),
        ("value", torch.zeros(6, 1, 16, device="meta"), "value is on meta; expected cpu"),
        ("slot_mapping", torch.arange(6).int(), "slot_mapping has dtype torch.int32; expected torch.int64"),
        ("slot_mapping", torch.arange(12)[::2], r"slot_mapping has strides \[2\]; expected contiguous rows"),
    ],
)
def test_an_argument_out_of_order_is_named_with_what_was_expected(name, value, expected):
    arguments = {
        "key": torch.zeros(6, 1, 16),
        "value": torch.zeros(6, 1, 16),
        "kv_cache": torch.zeros(4, 2, 1, 8, 16),
        "slot_mapping": torch.arange(6),
    }
    with pytest.raises(ValueError, match=expected):
        write_kv(**{**arguments, name: value})
