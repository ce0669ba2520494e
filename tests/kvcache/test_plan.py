from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL, UNKNOWN
from kvist.kvcache import KvDtype, KvGroup, LayerKv, SharedKv, plan_windows

DTYPE = KvDtype.BFLOAT16
NARROW = LayerKv(512, 1, 64, DTYPE)
WHOLE = LayerKv(FULL, 1, 64, DTYPE)


def test_equal_layers_share_a_group_and_the_widest_comes_first() -> None:
    plan = plan_windows([NARROW] * 5 + [WHOLE], max_model_len=32768)
    assert [(g.group_id, g.window, g.layer_indices) for g in plan.groups] == [
        (0, FULL, (5,)),
        (1, 512, (0, 1, 2, 3, 4)),
    ]
    assert plan.places == ((1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (0, 0))


def test_plain_full_attention_is_one_group() -> None:
    plan = plan_windows([WHOLE] * 3, max_model_len=512)
    assert [group.layer_indices for group in plan.groups] == [(0, 1, 2)]


def test_a_window_as_long_as_the_model_joins_the_full_group() -> None:
    plan = plan_windows([NARROW, WHOLE], max_model_len=512)
    assert [(g.window, g.layer_indices) for g in plan.groups] == [(FULL, (0, 1))]


@pytest.mark.parametrize(
    "other",
    [
        LayerKv(FULL, 2, 64, DTYPE),
        LayerKv(FULL, 1, 128, DTYPE),
        LayerKv(FULL, 1, 64, KvDtype.FP8_E5M2),
        LayerKv(FULL, 1, 64, DTYPE, kv_factor=1),
        NARROW,
    ],
)
def test_layers_that_store_differently_are_different_groups(other: LayerKv) -> None:
    assert [g.layer_indices for g in plan_windows([WHOLE, other], 1024).groups] == [(0,), (1,)]


def test_a_pattern_longer_than_the_model_makes_only_the_groups_that_its_layers_have() -> None:
    pattern = [NARROW] * 5 + [WHOLE]
    plan = plan_windows(pattern[:4], max_model_len=32768)
    assert [(g.window, g.layer_indices) for g in plan.groups] == [(512, (0, 1, 2, 3))]


def test_a_layer_that_shares_has_its_sources_place_and_no_memory() -> None:
    layers = ([NARROW] * 4 + [WHOLE]) * 4 + [SharedKv(18)] * 4 + [SharedKv(19)] + [SharedKv(18)] * 4 + [SharedKv(19)]
    plan = plan_windows(layers, max_model_len=32768)
    assert [len(group.layer_indices) for group in plan.groups] == [4, 16]
    assert len(plan.places) == 30
    assert {plan.places[i] for i in (*range(20, 24), *range(25, 29))} == {plan.places[18]} == {(1, 15)}
    assert {plan.places[24], plan.places[29]} == {plan.places[19]} == {(0, 3)}


@pytest.mark.parametrize(("source", "expected"), [(1, "before"), (2, "before"), (7, "before"), (-1, "before")])
def test_a_source_that_has_not_written_yet_or_never_will_is_refused(source: int, expected: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"layers\[1\]\.source: got {source}, expected a layer {expected}"):
        plan_windows([WHOLE, SharedKv(source), WHOLE], 512)


def test_a_source_that_shares_itself_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"layers\[2\]\.source: got 1, expected a layer that stores"):
        plan_windows([WHOLE, SharedKv(0), SharedKv(1)], 512)


def test_scratch_slots_that_no_layer_can_use_are_said_to_change_nothing(logged: Callable[[str], list[str]]) -> None:
    plan_windows([NARROW, WHOLE], 1024).check_scratch()
    assert not logged("kvist.kvcache.plan")
    plan_windows([NARROW, WHOLE], 512).check_scratch()
    (said,) = logged("kvist.kvcache.plan")
    assert "scratch slots have no effect: no layer has a window" in said


def test_scratch_slots_are_refused_where_another_layer_writes_between_a_source_and_its_reader() -> None:
    plan_windows([NARROW, NARROW, WHOLE, SharedKv(1), SharedKv(2), SharedKv(1)], 1024).check_scratch()
    plan_windows([NARROW, WHOLE, SharedKv(0), NARROW], 1024).check_scratch()
    plan_windows([WHOLE, WHOLE, SharedKv(0)], 1024).check_scratch()
    plan = plan_windows([NARROW, WHOLE, NARROW, SharedKv(0)], 1024)
    with pytest.raises(InvalidValueError, match=r"layers\[3\]\.source: got 0, expected layer 2"):
        plan.check_scratch()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerKv(0, 1, 64, DTYPE), r"layers\[1\]\.window: got 0"),
        (LayerKv(-5, 1, 64, DTYPE), r"layers\[1\]\.window: got -5"),
        (LayerKv(UNKNOWN, 1, 64, DTYPE), r"layers\[1\]\.window: got .*UNKNOWN"),  # type: ignore[arg-type]
        (LayerKv(8, 0, 64, DTYPE), r"layers\[1\]\.num_kv_heads: got 0"),
        (LayerKv(8, 1, 0, DTYPE), r"layers\[1\]\.head_dim: got 0"),
        (LayerKv(8, 1, 64, DTYPE, kv_factor=3), r"layers\[1\]\.kv_factor: got 3"),
    ],
)
def test_a_layer_that_cannot_be_is_refused_by_field_and_value(layer: LayerKv, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        plan_windows([WHOLE, layer], 512)


def test_a_model_without_caching_layers_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="layers: got 0"):
        plan_windows([], 512)


def test_a_group_without_layers_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="layer_indices of group 3"):
        KvGroup(3, WHOLE, ())


def test_a_dtype_is_as_large_as_its_name_says() -> None:
    assert {dtype.value: dtype.itemsize_bytes for dtype in KvDtype} == {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "fp8_e4m3": 1,
        "fp8_e5m2": 1,
    }
