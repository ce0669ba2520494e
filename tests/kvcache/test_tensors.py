from __future__ import annotations

import torch

from kvist.events import FULL
from kvist.kvcache import LayerKv, group_layers
from kvist.kvcache.tensors import allocate_pool, layer_caches


def test_layers_come_back_in_model_order_with_their_own_shapes_as_views_of_their_groups_pool() -> None:
    layers = [LayerKv(8, 2, 16), LayerKv(FULL, 1, 32), LayerKv(8, 2, 16)]
    groups = group_layers(layers, 512)
    pools = [allocate_pool(g, n, 4, torch.float16, torch.device("cpu")) for g, n in zip(groups, [5, 3], strict=True)]
    assert all(pool.dtype == torch.float16 and not pool.any() for pool in pools)
    caches = layer_caches(groups, pools)
    assert [tuple(t.shape) for t in caches] == [(3, 2, 2, 4, 16), (5, 2, 1, 4, 32), (3, 2, 2, 4, 16)]
    caches[2][1] = 1
    assert pools[1][1, 1].all()
    assert pools[1].sum() == pools[1][1, 1].numel()
