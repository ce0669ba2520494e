from __future__ import annotations

import torch

from kvist.events import FULL
from kvist.kvcache import KvDtype, LayerKv, SharedKv, plan_windows
from kvist.kvcache.tensors import KvTensors


def test_a_layer_has_its_part_of_every_slot_and_by_page_the_whole_pool() -> None:
    sliding, full = LayerKv(8, 2, 16, KvDtype.FLOAT16), LayerKv(FULL, 1, 32, KvDtype.FP8_E5M2)
    plan = plan_windows([sliding, full, sliding, SharedKv(2)], 512)
    tensors = KvTensors(plan, [5, 3], 4, torch.device("cpu"))
    assert [(tuple(pool.shape), pool.dtype) for pool in tensors.pools] == [
        ((5, 1, 2, 1, 4, 32), torch.float8_e5m2),
        ((3, 2, 2, 2, 4, 16), torch.float16),
    ]
    assert not any(pool.float().any() for pool in tensors.pools)
    tensors.by_slot(3)[1] = 1
    assert tensors.by_slot(2)[1].all()
    assert not tensors.by_slot(0).any()
    by_page = tensors.by_page(0)
    assert tuple(by_page.shape) == (6, 2, 2, 4, 16)
    assert by_page[1 * 2 + 1].all()
    assert by_page.sum() == by_page[1 * 2 + 1].numel()
