from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import (
    KvDtype,
    KvGroup,
    LayerKv,
    block_bytes,
    can_resume,
    check_sequence_fits,
    peak_num_blocks,
    plan_windows,
    split_memory,
)
from kvist.kvcache.budget import BudgetPolicy
from kvist.kvcache.stale import num_blocks_for, num_stale_blocks

BFLOAT16 = KvDtype.BFLOAT16
SLIDING = KvGroup(1, LayerKv(1024, 8, 256, BFLOAT16), tuple(range(25)))
WHOLE = KvGroup(0, LayerKv(FULL, 2, 512, BFLOAT16), tuple(range(5)))
TOKEN_BYTES = 204_800 + 20_480


def split(groups: Sequence[KvGroup], memory_bytes: int, policy: BudgetPolicy, **limits: int) -> tuple[int, ...]:
    limits = {"max_model_len": 8192, "max_num_seqs": 8, "max_step_tokens": 512} | limits
    return split_memory(groups, 32, memory_bytes, policy=policy, **limits)


def test_the_mixed_model_of_thirty_layers_costs_what_is_written() -> None:
    sliding, whole = LayerKv(1024, 8, 256, BFLOAT16), LayerKv(FULL, 2, 512, BFLOAT16)
    groups = plan_windows(([sliding] * 5 + [whole]) * 5, 8192).groups
    assert groups[0].layer_indices == (5, 11, 17, 23, 29)
    assert [group.token_bytes for group in groups] == [20_480, 204_800]
    uniform = sum(8192 * group.token_bytes for group in groups)
    peaks = [peak_num_blocks(group, 32, 8192, 1) for group in groups]
    windowed = sum(peak * block_bytes(group, 32) for peak, group in zip(peaks, groups, strict=True))
    assert peaks == [256, 33]
    assert (uniform, windowed) == (1_845_493_760, 384_040_960)
    assert round(uniform / windowed, 3) == 4.805


@pytest.mark.parametrize("step", [1, 3, 8])
def test_a_windowed_sequence_never_holds_more_than_its_peak(step: int, make_groups: Callable[..., tuple]) -> None:
    for window in range(1, 30):
        (group,) = make_groups(window)
        held = max(
            num_blocks_for(history + step, 4) - num_stale_blocks(history, window, 4) for history in range(100 - step)
        )
        assert held <= peak_num_blocks(group, 4, 100, step) <= held + 1


@pytest.mark.parametrize(("num_tokens", "expected"), [(100_000, 65_536), (20_000, 8192)])
def test_uniform_gives_every_group_the_written_number_of_tokens(num_tokens: int, expected: int) -> None:
    assert split([WHOLE, SLIDING], num_tokens * TOKEN_BYTES, "uniform") == (expected // 32,) * 2


def test_uniform_gives_every_sequence_a_block_when_sequences_are_short() -> None:
    assert split([WHOLE], 10_000 * 20_480, "uniform", max_model_len=16) == (8,)


@pytest.mark.parametrize(
    ("policy", "num_tokens_needed"),
    [("uniform", 8192 * TOKEN_BYTES), ("bounded", 8192 * 20_480 + 49 * 32 * 204_800)],
)
def test_memory_without_room_for_one_sequence_is_refused_with_needed_and_available_bytes(
    policy: BudgetPolicy, num_tokens_needed: int
) -> None:
    groups = [WHOLE, SLIDING]
    with pytest.raises(InvalidValueError, match=f"got {num_tokens_needed - 1}, expected at least {num_tokens_needed}"):
        split(groups, num_tokens_needed - 1, policy)
    with pytest.raises(InvalidValueError, match="memory_bytes"):
        split(groups, 100 * TOKEN_BYTES, policy)
    check_sequence_fits(groups, split(groups, num_tokens_needed, policy), 32, 8192, 512)


def test_memory_that_is_too_little_for_every_token_of_a_window_names_the_policy_that_needs_less() -> None:
    needed = r"at least 1845493760 bytes \(1760 MiB\): .*; policy bounded needs 488898560 bytes \(467 MiB\)$"
    with pytest.raises(InvalidValueError, match=needed):
        split([WHOLE, SLIDING], 2**30, "uniform")
    with pytest.raises(InvalidValueError, match=r"max_model_len=8192$"):
        split([WHOLE], 2**20, "uniform")


def test_bounded_holds_more_sequences_than_uniform_in_the_same_memory() -> None:
    memory_bytes = 100_000 * TOKEN_BYTES
    at_rest = [peak_num_blocks(group, 32, 8192, 1) for group in (WHOLE, SLIDING)]
    by_policy = {
        policy: min(map(operator.floordiv, split([WHOLE, SLIDING], memory_bytes, policy, max_num_seqs=64), at_rest))
        for policy in ("uniform", "bounded")
    }
    assert by_policy == {"uniform": 10, "bounded": 58}


def test_bounded_gives_windows_room_for_all_sequences_when_that_is_cheap() -> None:
    few_sliding = KvGroup(1, LayerKv(128, 2, 64, BFLOAT16), (0,))
    whole, windowed = split([WHOLE, few_sliding], 8192 * 20_480 * 3, "bounded", max_num_seqs=256)
    at_work, at_rest = (peak_num_blocks(few_sliding, 32, 8192, step) for step in (512, 1))
    assert windowed == at_work + 255 * at_rest
    assert whole > 2 * 256


def test_bounded_keeps_a_window_for_every_prompt_of_16_windows_that_the_full_group_can_cache() -> None:
    sliding, full = (KvGroup(i, LayerKv(w, 2, 64, BFLOAT16), (0,)) for i, w in ((1, 64), (0, FULL)))
    groups = [full, sliding]
    num_full, num_sliding = split_memory(
        groups, 16, 2**28, max_model_len=131_072, max_num_seqs=8, max_step_tokens=512, policy="bounded"
    )
    blocks_of_window = 64 // 16 + 1
    num_prompts = num_full // (16 * blocks_of_window)
    assert num_prompts > 100
    assert num_sliding >= num_prompts * blocks_of_window


LAYERS = st.builds(
    LayerKv,
    st.one_of(st.just(FULL), st.integers(1, 300)),
    st.integers(1, 4),
    st.sampled_from([16, 64]),
    st.sampled_from(KvDtype),
)


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=6),
    memory_bytes=st.integers(0, 1 << 24),
    max_model_len=st.integers(1, 500),
    max_num_seqs=st.integers(1, 20),
    max_step_tokens=st.integers(1, 100),
    policy=st.sampled_from(["uniform", "bounded"]),
)
def test_a_split_fits_the_memory_and_holds_a_sequence_or_is_refused(
    layers: list[LayerKv], memory_bytes: int, policy: BudgetPolicy, **limits: int
) -> None:
    max_model_len, max_step_tokens = limits["max_model_len"], limits["max_step_tokens"]
    groups = plan_windows(layers, max_model_len).groups
    held = [peak_num_blocks(group, 32, max_model_len, max_step_tokens) for group in groups]
    if policy == "uniform":
        held = [num_blocks_for(max_model_len, 32)] * len(groups)
    sizes = [block_bytes(group, 32) for group in groups]
    if memory_bytes < sum(map(operator.mul, held, sizes)):
        with pytest.raises(InvalidValueError, match=f"memory_bytes: got {memory_bytes}"):
            split(groups, memory_bytes, policy, **limits)
        return
    num_blocks = split(groups, memory_bytes, policy, **limits)
    assert sum(map(operator.mul, num_blocks, sizes)) <= memory_bytes
    check_sequence_fits(groups, num_blocks, 32, max_model_len, max_step_tokens)


def test_a_preempted_sequence_comes_back_only_below_ninety_seven_percent() -> None:
    assert can_resume(90, 7, 100)
    assert not can_resume(90, 8, 100)


def test_a_pool_too_small_for_one_sequence_is_refused_with_both_numbers() -> None:
    check_sequence_fits([WHOLE], [256], 32, 8192, 512)
    with pytest.raises(InvalidValueError, match="got 255, expected at least 256"):
        check_sequence_fits([WHOLE], [255], 32, 8192, 512)
