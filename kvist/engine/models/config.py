"""What a decoder model is, independent of how its checkpoint spells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvist.errors import InvalidValueError
from kvist.events.windows import KnownWindow
from kvist.kvcache.groups import LayerKv


class Activation(Enum):
    """The gate's non-linearity."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's frequency scaling: long wavelengths are slowed by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies `theta ** (-2i / head_dim)`, divided by `linear_factor`."""

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from layer to layer."""

    window: KnownWindow
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: pre-norm blocks of grouped-query attention and a gated MLP.

    `norm_offset` is added to every norm weight (Gemma stores weight - 1); `has_output_norms` norms what attention and
    MLP give before it joins the residual. `renamed_weights` maps our names of a layer's parts to the checkpoint's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: Activation
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_output_norms: bool = False
    has_tied_embeddings: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    eos_token_ids: frozenset[int] = frozenset()
    renamed_weights: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise InvalidValueError when the numbers cannot be a model."""
        if self.num_heads % self.num_kv_heads:
            raise InvalidValueError("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_heads} heads")
        if self.head_dim % 2:
            raise InvalidValueError("head_dim", self.head_dim, "an even number, for rotary embeddings")

    def layer_kv(self) -> list[LayerKv]:
        """Return what each layer stores in the KV cache."""
        return [LayerKv(layer.window, self.num_kv_heads, self.head_dim) for layer in self.layers]
