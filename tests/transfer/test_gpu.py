"""Transfers of memory that lies on a GPU: copies through a region, and NIXL's writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvist.transfer.agents import finish
from kvist.transfer.copier import TorchCopier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_ROWS, ROW_BYTES = 64, 4096
SIZES = np.full(NUM_ROWS // 2, ROW_BYTES, np.int64)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def make_rows(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_ROWS, ROW_BYTES), dtype=torch.uint8, device=device)


def test_what_is_gathered_and_scattered_again_is_what_was_there(device: torch.device) -> None:
    source, target = make_rows(device), make_rows(device)
    rows = np.random.default_rng(0).permutation(NUM_ROWS)[: len(SIZES)]
    expected = target.clone()
    expected[torch.from_numpy(rows[::-1].copy())] = source[torch.from_numpy(rows)]
    buffer = torch.empty(int(SIZES.sum()), dtype=torch.uint8, device=device)
    TorchCopier([source]).gather(source.data_ptr() + rows * ROW_BYTES, SIZES, buffer)
    assert torch.equal(buffer.view(-1, ROW_BYTES), source[torch.from_numpy(rows)])
    TorchCopier([target]).scatter(target.data_ptr() + rows[::-1] * ROW_BYTES, SIZES, buffer)
    assert torch.equal(target, expected)


def test_nixl_writes_fragments_of_one_devices_memory_into_another_agents(device: torch.device) -> None:
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    from kvist.transfer.agents.nixl import NixlAgent

    source, target = make_rows(device), make_rows(device)
    writer, reader = NixlAgent("writer"), NixlAgent("reader")
    try:
        writer.register(source.data_ptr(), source.nbytes, device.index)
        reader.register(target.data_ptr(), target.nbytes, device.index)
        rows = np.random.default_rng(1).permutation(NUM_ROWS)[: len(SIZES)]
        expected = target.clone()
        expected[torch.from_numpy(rows[::-1].copy())] = source[torch.from_numpy(rows)]
        ends = (source.data_ptr() + rows * ROW_BYTES, target.data_ptr() + rows[::-1] * ROW_BYTES)
        transfer = writer.write(writer.connect(reader.metadata()), np.stack((*ends, SIZES), axis=1))
        finish(transfer)
        assert torch.equal(target, expected)
    finally:
        writer.close()
        reader.close()
