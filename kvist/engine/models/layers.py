"""The decoder layer's vocabulary: norms, packed projections, attention over the paged cache, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import distributed, nn
from torch.nn import functional

from kvist.engine.batch import ForwardBatch, LayerPages
from kvist.engine.models.config import Activation, LayerConfig, ModelConfig
from kvist.engine.models.rope import apply_rotary
from kvist.kernels import paged_decode, paged_prefill, write_kv


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 and cast back; the family's offset is in the weight already."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self.offset = offset
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normed over its last dimension."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self._eps).to(x.dtype)


class BareNorm(nn.Module):
    """x / rms(x), in float32 and cast back: a norm without a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._shape, self._eps = (size,), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normed over its last dimension."""
        return functional.rms_norm(x.float(), self._shape, None, self._eps).to(x.dtype)


class Linear(nn.Module):
    """x @ weight.T + bias, with parameters left uninitialised for the checkpoint to fill."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]`."""
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(Linear):
    """A `Linear` whose inputs are split over the ranks: each gets the sum of all, and the bias once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]`, the same on every rank."""
        out = functional.linear(x, self.weight)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


class Embedding(nn.Module):
    """A row of the weight a token id, uninitialised as in `Linear`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        return functional.embedding(token_ids, self.weight)


class PackedLinear(Linear):
    """Projections of one input as one matmul; `rows` says which output rows each had in the checkpoint."""

    def __init__(self, in_features: int, parts: Mapping[str, int], has_bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), has_bias)
        self.rows: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.rows[name] = slice(start, start + size)
            start += size


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
            self.v_norm = BareNorm(layer.head_dim, config.norm_eps) if config.has_v_norm else nn.Identity()
        self.qkv_proj = PackedLinear(config.hidden_size, parts, config.has_attention_bias)
        self.q_norm = _head_norm(config, layer.head_dim)
        self.o_proj = _joining_linear(config, size, config.has_attention_bias)
        sinks = torch.empty(config.num_heads, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks, requires_grad=False) if config.has_sinks else None

    def forward(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pages: LayerPages,
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`; stores the step's keys and values in `pages` first, if it has any."""
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_dim)
        query = apply_rotary(self.q_norm(heads[:, : self._num_heads]), *rotary)
        if self._has_own_kv:
            keys_values = heads[:, self._num_heads :]  # Without a value projection both halves are the keys.
            key, value = keys_values[:, : self._num_kv_heads], keys_values[:, -self._num_kv_heads :]
            write_kv(apply_rotary(self.k_norm(key), *rotary), self.v_norm(value), pages.cache, pages.slot_mapping)
        attended: torch.Tensor = self.o_proj(self._attend(query, batch, pages).flatten(1))
        return attended

    def _attend(self, query: torch.Tensor, batch: ForwardBatch, pages: LayerPages) -> torch.Tensor:
        decodes, prefills = slice(batch.num_decodes), slice(batch.num_decodes, None)
        out = torch.empty_like(query)
        if batch.num_decodes:
            paged_decode(
                query[decodes],
                pages.cache,
                pages.block_tables[decodes],
                batch.seq_lens[decodes],
                page_offsets=pages.page_offsets[decodes],
                scale=self._scale,
                window=self._window,
                soft_cap=self._soft_cap,
                sinks=self.sinks,
                out=out[decodes],
            )
        if batch.num_decodes < batch.seq_lens.shape[0]:
            paged_prefill(
                query[prefills],
                pages.cache,
                pages.block_tables[prefills],
                batch.prefill_start_loc,
                batch.seq_lens[prefills],
                page_offsets=pages.page_offsets[prefills],
                scale=self._scale,
                window=self._window,
                soft_cap=self._soft_cap,
                sinks=self.sinks,
                out=out[prefills],
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
        projected: torch.Tensor = self.down_proj(activate(self._activation, gate) * up)
        return projected


def activate(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """Return the non-linearity of each number of x."""
    return functional.silu(x) if activation is Activation.SILU else functional.gelu(x, approximate="tanh")


def hidden_norm(config: ModelConfig) -> RMSNorm:
    """Return a norm of the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)


def _joining_linear(config: ModelConfig, in_features: int, has_bias: bool) -> Linear:
    """Return a projection into the residual stream, which is whole on every rank."""
    kind = Linear if config.num_ranks == 1 else RowParallelLinear
    return kind(in_features, config.hidden_size, has_bias)


def _head_norm(config: ModelConfig, head_dim: int) -> nn.Module:
    return RMSNorm(head_dim, config.norm_eps, config.norm_offset) if config.has_qk_norm else nn.Identity()
