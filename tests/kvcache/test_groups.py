from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache.groups import LayerKv, group_layers


def test_equal_layers_share_a_group_and_the_widest_comes_first() -> None:
    layers = [LayerKv(512, 1, 64)] * 5 + [LayerKv(FULL, 1, 64)]
    groups = group_layers(layers, max_model_len=32768)
    assert [(g.group_id, g.window, g.layer_indices) for g in groups] == [(0, FULL, (5,)), (1, 512, (0, 1, 2, 3, 4))]


def test_a_window_as_long_as_the_model_joins_the_full_group() -> None:
    groups = group_layers([LayerKv(512, 1, 64), LayerKv(FULL, 1, 64)], max_model_len=512)
    assert [(g.window, g.layer_indices) for g in groups] == [(FULL, (0, 1))]


def test_layers_that_store_differently_are_different_groups() -> None:
    groups = group_layers([LayerKv(FULL, 1, 64), LayerKv(FULL, 2, 64)], max_model_len=512)
    assert [g.layer_indices for g in groups] == [(0,), (1,)]


def test_a_window_below_one_token_is_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"layers\[1\]\.window: got 0"):
        group_layers([LayerKv(8, 1, 64), LayerKv(0, 1, 64)], max_model_len=512)
