import subprocess
import sys

import pytest
import torch

from kvist.kernels import _triton

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now raises ModuleNotFoundError
import torch
from kvist.kernels import paged_attention, write_kv
kv_cache = torch.zeros(1, 2, 1, 8, 16)
write_kv(torch.ones(1, 1, 16), torch.ones(1, 1, 16), kv_cache, torch.tensor([0]))
tables, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
print(paged_attention(torch.ones(1, 2, 16), kv_cache, tables, lengths, scale=1.0).sum().item())
"""


def test_without_triton_the_references_run():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert run.stdout == "32.0\n", run.stderr


def test_without_triton_a_cuda_tensor_is_refused_with_what_to_install(monkeypatch):
    class CudaTensor:
        is_cuda = True

    monkeypatch.setattr(_triton, "IS_INSTALLED", False)
    with pytest.raises(ImportError, match=r"need Triton: pip install 'kvist\[gpu\]'"):
        _triton.is_launched(CudaTensor())


def test_cpu_tensors_run_the_reference():
    assert not _triton.is_launched(torch.zeros(1))
