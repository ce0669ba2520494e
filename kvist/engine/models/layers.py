"""The decoder layer's vocabulary: norms, packed projections, rotary embeddings, paged attention, gated MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.nn import functional

from kvist.engine.batch import ForwardBatch, LayerPages
from kvist.engine.models.config import Activation, LayerConfig, Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from kvist.kernels import paged_decode, paged_prefill, write_kv

Rotary: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, `[num_tokens, 1, head_dim / 2]` each


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight, in float32 and cast back; the family's offset is in the weight already, if there is one."""

    def __init__(self, size: int, eps: float, offset: float = 0.0, has_weight: bool = True) -> None:
        super().__init__(size, eps, has_weight, dtype=torch.float32)
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class Linear(nn.Linear):
    """x @ weight.T + bias, with parameters left uninitialised for the checkpoint to fill."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool = False) -> None:
        super().__init__(in_features, out_features, has_bias)

    def reset_parameters(self) -> None:
        """Do nothing."""


class RowParallelLinear(Linear):
    """A `Linear` whose inputs are split over the ranks: each gets the sum of all, and the bias once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]`, the same on every rank."""
        out = functional.linear(x, self.weight)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


class Embedding(nn.Embedding):
    """A row of the weight a token id, uninitialised as in `Linear`, times a scale."""

    def __init__(self, vocab_size: int, size: int, scale: float) -> None:
        super().__init__(vocab_size, size)
        # Rounded to the weights' dtype first, as the checkpoints were trained.
        self._scale = torch.tensor(scale, device="cpu").to(self.weight.dtype).item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, size]`."""
        return super().forward(token_ids) * self._scale

    def reset_parameters(self) -> None:
        """Do nothing."""


class PackedLinear(Linear):
    """Projections of one input as one matmul; `rows` says which output rows each had in the checkpoint."""

    def __init__(self, in_features: int, parts: Mapping[str, int], has_bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), has_bias)
        self.rows: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.rows[name] = slice(start, start + size)
            start += size


class RotaryTable:
    """Cosines and sines of every position, float32 `[max_len, 1, head_dim / 2]` each.

    Rotary embeddings are those of Su et al. 2021 (arXiv:2104.09864), halves rotated as Hugging Face does.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_len: int) -> None:
        frequencies = rope_frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies).unsqueeze(1)
        magnitude = config.scaling.magnitude if isinstance(config.scaling, YarnScaling) else 1.0
        self._cos, self._sin = angles.cos() * magnitude, angles.sin() * magnitude

    def at(self, positions: torch.Tensor) -> Rotary:
        """Return cosines and sines `[num_tokens, 1, head_dim / 2]` at absolute positions."""
        return self._cos[positions], self._sin[positions]


def rope_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle a position each pair of dimensions turns, float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.theta**exponents / config.linear_factor
    frequencies[int(config.rotated_share * head_dim // 2) :] = 0.0
    match config.scaling:
        case Llama3Scaling() as scaling:
            return _scale_llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(frequencies, scaling, config.theta)
    return frequencies


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `[num_tokens, num_heads, head_dim]` turned by its positions; computed in float32, cast back."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _scale_yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    num_pairs = len(frequencies)

    def pair_turning(num_turns: float) -> float:
        """Return the pair, not a whole number, that turns so often over the original context."""
        return num_pairs * math.log(scaling.original_max_position / (num_turns * 2 * math.pi)) / math.log(theta)

    start, end = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.is_truncated:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, 2 * num_pairs - 1)
    ramp_len = end - start or 0.001  # a ramp without length is a step
    keep = 1.0 - ((torch.arange(num_pairs, dtype=torch.float32) - start) / ramp_len).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class Attention(nn.Module):
    """Grouped-query attention of one layer over its pages, or over those of the layer it shares with."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, window: int | None) -> None:
        super().__init__()
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, layer.num_kv_heads, layer.head_dim
        self._scale, self._soft_cap = config.attention_scale, config.attention_soft_cap
        self._window = window
        self._has_own_kv = layer.kv_source is None
        size, kv_size = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        parts = {"q_proj": size}
        if self._has_own_kv:
            parts |= {"k_proj": kv_size} if layer.is_value_key else {"k_proj": kv_size, "v_proj": kv_size}
            self.k_norm = _head_norm(config, layer.head_dim)
            self.v_norm = (
                RMSNorm(layer.head_dim, config.norm_eps, has_weight=False) if config.has_v_norm else nn.Identity()
            )
        self.qkv_proj = PackedLinear(config.hidden_size, parts, config.has_attention_bias)
        self.q_norm = _head_norm(config, layer.head_dim)
        self.o_proj = _joining_linear(config, size, config.has_attention_bias)
        sinks = torch.empty(config.num_heads, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks) if config.has_sinks else None

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch, rotary: Rotary, pages: LayerPages) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`; stores the step's keys and values in `pages` first, if it has any."""
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_dim)
        query = apply_rotary(self.q_norm(heads[:, : self._num_heads]), *rotary)
        if self._has_own_kv:
            keys_values = heads[:, self._num_heads :]  # Without a value projection both halves are the keys.
            key, value = keys_values[:, : self._num_kv_heads], keys_values[:, -self._num_kv_heads :]
            write_kv(apply_rotary(self.k_norm(key), *rotary), self.v_norm(value), pages.cache, pages.slot_mapping)
        return self.o_proj(self._attend(query, batch, pages).flatten(1))

    def _attend(self, query: torch.Tensor, batch: ForwardBatch, pages: LayerPages) -> torch.Tensor:
        decodes, prefills = slice(batch.num_decodes), slice(batch.num_decodes, None)
        alike: dict[str, Any] = {"scale": self._scale, "window": self._window, "soft_cap": self._soft_cap}
        alike["sinks"] = self.sinks
        out = torch.empty_like(query)
        if batch.num_decodes:
            paged_decode(
                query[decodes],
                pages.cache,
                pages.block_tables[decodes],
                batch.seq_lens[decodes],
                page_offsets=pages.page_offsets[decodes],
                out=out[decodes],
                **alike,
            )
        if batch.num_decodes < batch.seq_lens.shape[0]:
            paged_prefill(
                query[prefills],
                pages.cache,
                pages.block_tables[prefills],
                batch.prefill_start_loc,
                batch.seq_lens[prefills],
                page_offsets=pages.page_offsets[prefills],
                out=out[prefills],
                **alike,
            )
        return out


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, intermediate_size: int) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = PackedLinear(config.hidden_size, parts, config.has_mlp_bias)
        self.down_proj = _joining_linear(config, intermediate_size, config.has_mlp_bias)
        self._activation = config.activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(activate(self._activation, gate) * up)


def activate(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x) if activation is Activation.SILU else functional.gelu(x, approximate="tanh")


def hidden_norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)


def _joining_linear(config: ModelConfig, in_features: int, has_bias: bool) -> Linear:
    """Return a projection into the residual stream, which is whole on every rank."""
    kind = Linear if config.num_ranks == 1 else RowParallelLinear
    return kind(in_features, config.hidden_size, has_bias)


def _head_norm(config: ModelConfig, head_dim: int) -> nn.Module:
    return RMSNorm(head_dim, config.norm_eps, config.norm_offset) if config.has_qk_norm else nn.Identity()
