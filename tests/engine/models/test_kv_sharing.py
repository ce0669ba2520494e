from __future__ import annotations

import pytest

from kvist.engine.models.checkpoint_config import shared_sources
from kvist.errors import InvalidValueError

S, F = "sliding_attention", "full_attention"


def test_the_last_ten_layers_of_gemma_3n_read_the_last_owner_of_their_type() -> None:
    sources = shared_sources([S, S, S, S, F] * 6, 10)
    assert sources[:20] == [None] * 20
    assert sources[20:] == [18, 18, 18, 18, 19] * 2


def test_sharing_need_not_begin_with_a_pattern() -> None:
    assert shared_sources([F, S, S, F, S, S], 3) == [None, None, None, 0, 2, 2]
    assert shared_sources([S, S], 0) == [None, None]


@pytest.mark.parametrize("num_shared", [-1, 4, 5])
def test_at_least_one_layer_keeps_its_own_cache(num_shared: int) -> None:
    with pytest.raises(InvalidValueError, match=f"num_kv_shared_layers: got {num_shared}, expected 0 to 3"):
        shared_sources([S, S, S, F], num_shared)


def test_a_type_without_an_owner_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"num_kv_shared_layers: got 1, .* full_attention"):
        shared_sources([S, S, S, F], 1)
