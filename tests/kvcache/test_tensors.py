from __future__ import annotations

import torch

from kvist.events import FULL
from kvist.kvcache import LayerKv, group_layers
from kvist.kvcache.tensors import allocate_kv_tensors


def test_layers_come_back_in_model_order_with_their_own_shapes() -> None:
    layers = [LayerKv(8, 2, 16), LayerKv(FULL, 1, 32), LayerKv(8, 2, 16)]
    groups = group_layers(layers, 512)
    tensors = allocate_kv_tensors(groups, [5, 3], 4, torch.float16, torch.device("cpu"))
    assert [tuple(t.shape) for t in tensors] == [(3, 2, 2, 4, 16), (5, 2, 1, 4, 32), (3, 2, 2, 4, 16)]
    assert all(t.dtype == torch.float16 and not t.any() for t in tensors)
