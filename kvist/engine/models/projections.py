"""The linear layers of a decoder: with FP8 weights, packed into one product, or split over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max


class Fp8Linear(nn.Linear):
    """A projection whose weight stays in FP8, with a scale for each row, `weight_scale` `[out_features, 1]`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _project(x, self, self.bias)


class PackedLinear(nn.Linear):
    """The first of several projections of the same input: it computes all as one product, and hands the others theirs.

    `pack_projections` makes them.
    """

    sizes: list[int]
    others: tuple[HandedLinear, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = torch.split_with_sizes(_project(x, self, self.bias), self.sizes, dim=-1)
        for other, out in zip(self.others, rest, strict=True):
            other.handed[:] = x, out
        return first


class HandedLinear(nn.Module):
    """A projection that a `PackedLinear`, which has its weight, computes for it."""

    handed: list[torch.Tensor]  # an input and its projection, or nothing; a module sets an attribute in 2 us

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projection of `x`, which must be what the `PackedLinear` was called with just before."""
        packed_input, out = self.handed
        self.handed.clear()
        assert packed_input is x
        return out


class RowParallelLinear(nn.Linear):
    """A projection whose inputs are split over the ranks; its output is the sum of all ranks' and, once, the bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]`, the same on every rank."""
        out = _project(x, self, None)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


def _project(x: torch.Tensor, module: Any, bias: torch.Tensor | None) -> torch.Tensor:
    if module.weight.dtype != FP8:
        return functional.linear(x, module.weight, bias)
    out = multiply_fp8(x, module.weight, module.weight_scale)
    return out if bias is None else out + bias


def multiply_fp8(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Return the product of `x`, quantised token by token, and an FP8 weight, in the dtype of `x`.

    `x` is `[..., in_features]`, `weight` `[out_features, in_features]`, `weight_scale` `[out_features, 1]`, in float32.
    """
    tokens, by_row = x.flatten(0, -2), functional.ScalingType.RowWise
    scale = tokens.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / _FP8_MAX
    numbers = (tokens / scale).to(FP8)
    out = functional.scaled_mm(numbers, weight.t(), scale, by_row, weight_scale.t(), by_row, output_dtype=x.dtype)
    return out.view(*x.shape[:-1], -1)


def has_fp8_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `multiply_fp8` works on a device; where it does not, torch raises one of two errors."""
    ones = torch.ones(16, 16, device=device)
    try:
        product = multiply_fp8(ones[:1].to(dtype), ones.to(FP8), ones[:, :1].contiguous())
    except (RuntimeError, ValueError):
        return False
    return bool((product == 16).all())


@contextmanager
def weights_without_memory() -> Iterator[None]:
    """Build projections whose weights have no memory until `allocate_weights` gives them some."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        is_new = isinstance(module, nn.Linear) and name == "weight" and not hasattr(module, name)  # else it is tied
        return nn.Parameter(parameter.to("meta"), requires_grad=False) if is_new else None

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # which leaves out the result
    try:
        yield
    finally:
        handle.remove()


def allocate_weights(decoder: nn.Module, fp8_weights: Iterable[str]) -> list[str]:
    """Give projections' weights memory on torch's default device, in FP8 if named; return the names of those in FP8."""
    fp8_names, kept = set(fp8_weights), []
    for path, module in decoder.named_modules():
        if not isinstance(module, nn.Linear) or not module.weight.is_meta:
            continue
        is_fp8 = (name := f"{path}.weight") in fp8_names
        weight = torch.empty(module.weight.shape, dtype=FP8 if is_fp8 else module.weight.dtype)
        module.weight = nn.Parameter(weight, requires_grad=False)
        if is_fp8:
            kept.append(name)
            module.weight_scale = nn.Parameter(torch.empty(len(weight), 1, dtype=torch.float32), requires_grad=False)
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear
    return kept


def pack_projections(decoder: nn.Module) -> None:
    """Store projections that transformers calls one after another with the same input as one, after loading.

    For GPUs: on a CPU the larger products gain nothing, and their parts have to be copied.
    """
    for module in decoder.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            parts: list[Any] = [part for name in names if isinstance(part := getattr(module, name, None), nn.Linear)]
            if len(parts) < 2 or len({part.weight.dtype for part in parts}) > 1:
                continue
            first, *others = parts
            first.sizes, first.others = [len(part.weight) for part in parts], tuple(others)
            for name, parameter in list(first.named_parameters()):
                parameter.data = torch.cat([getattr(part, name) for part in parts])
            for other in others:
                other._parameters.clear()
                other.handed, other.__class__ = [], HandedLinear
            first.__class__ = PackedLinear
