"""Triton where it is installed, and the one rule that chooses between a kernel and its torch reference.

Without Triton the kernels still import; only launching one says what to install.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton.language as tl

    jit: Callable[[Callable[..., Any]], Any]
    IS_INSTALLED: bool
    IS_INTERPRETED: bool
else:
    try:
        from triton import jit, knobs
        from triton import language as tl
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        IS_INSTALLED, IS_INTERPRETED, tl = False, False, None

        def jit(kernel):
            return kernel
    else:
        # Read once, like Triton itself: what TRITON_INTERPRET said while kernels were decorated.
        IS_INSTALLED, IS_INTERPRETED = True, knobs.runtime.interpret

__all__ = [
    "IS_INTERPRETED",
    "is_launched",
    "jit",
    "next_power_of_2",
    "num_multiprocessors",
    "tl",
    "widen_for_interpreter",
]


def is_launched(tensor: torch.Tensor) -> bool:
    """True for CUDA tensors, and for CPU tensors where TRITON_INTERPRET=1 asks for interpreted kernels.

    Raises ImportError for a CUDA tensor where Triton is missing.
    """
    if tensor.is_cuda and not IS_INSTALLED:
        raise ImportError("kernels on CUDA tensors need Triton: pip install 'kvist[gpu]'")
    return tensor.is_cuda or IS_INTERPRETED


def widen_for_interpreter(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, but a float32 copy of bfloat16 where kernels are interpreted.

    NumPy has no bfloat16: the interpreter multiplies its bits and truncates what it stores.
    """
    return tensor.float() if IS_INTERPRETED and tensor.dtype == torch.bfloat16 else tensor


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the interpreter, which runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
