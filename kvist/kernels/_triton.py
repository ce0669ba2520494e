"""Triton, if it is installed, and the rules that choose between a kernel, compiled loops and the torch reference.

Without Triton the kernels can be imported; launching one raises an ImportError that says what to install.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import triton.language as tl

    jit: Callable[..., Callable[[Callable[..., Any]], Any]]
    knobs: Any
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

        def jit(**_):
            return lambda kernel: kernel
    else:
        # Read once, as Triton does: TRITON_INTERPRET counts when kernels are decorated.
        IS_INSTALLED, IS_INTERPRETED = True, knobs.runtime.interpret

__all__ = [
    "FUSED",
    "IS_INTERPRETED",
    "DeviceFacts",
    "device_facts",
    "is_launched",
    "jit",
    "loops_for",
    "next_power_of_2",
    "on_compile",
    "tl",
    "widen_for_interpreter",
]

FUSED = {"enable_fp_fusion": True}
"""Option of every launch, for multiply-adds: Triton 3.9 warns where it is missing, and 3.10 will fuse none there."""


def is_launched(tensor: torch.Tensor) -> bool:
    """Return True for CUDA tensors (ImportError without Triton), and if TRITON_INTERPRET=1 interprets the kernels."""
    if tensor.is_cuda and not IS_INSTALLED:
        raise ImportError("kernels on CUDA tensors need Triton: pip install 'kvist[gpu]'")
    return tensor.is_cuda or IS_INTERPRETED


def loops_for(kv_cache: torch.Tensor) -> ModuleType | None:
    """Return the module `_loops` for a CPU tensor with a dtype that it supports, if Numba is installed."""
    is_loopable = kv_cache.dtype in (torch.float32, torch.bfloat16) and not is_launched(kv_cache)
    return _import_loops() if is_loopable else None


@cache
def _import_loops() -> ModuleType | None:
    try:
        return import_module("kvist.kernels._loops")
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None


def on_compile(callback: Callable[[str], None]) -> None:
    """From now on, call `callback` with each variant of a Triton kernel that is compiled, or loaded from disk."""

    def hook(*, fn: Any, compile: dict[str, Any], **_: object) -> None:  # noqa: A002
        names = fn.jit_function.arg_names
        constants = " ".join(f"{names[i]}={value}" for (i, *_), value in compile["constants"].items())
        callback(f"{fn.name.strip('_')} {constants}")

    if IS_INSTALLED:
        knobs.runtime.jit_post_compile_hook = hook


def widen_for_interpreter(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a float32 copy of bfloat16 if kernels are interpreted.

    NumPy has no bfloat16: the interpreter multiplies its bits, and truncates when it stores.
    """
    return tensor.float() if IS_INTERPRETED and tensor.dtype == torch.bfloat16 else tensor


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


class DeviceFacts(NamedTuple):
    """The properties of a device on which launches depend; capability 90 is sm_90."""

    num_multiprocessors: int
    capability: int


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Return a device's properties, cached; the interpreter counts as one multiprocessor of sm_80."""
    if device.type != "cuda":
        return DeviceFacts(num_multiprocessors=1, capability=80)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.multi_processor_count, properties.major * 10 + properties.minor)
