"""What a decoder model is, independent of how its checkpoint spells it, and what of it is one rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvist.errors import InvalidValueError
from kvist.events.engine_events import KnownWindow
from kvist.kvcache.plan import KvDtype, LayerKv, SharedKv
from kvist.transfer.heads import Part

MAX_HEAD_DIM = 512  # what the attention kernels take


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
class YarnScaling:
    """YaRN (arXiv:2309.00071): pairs that turn less than `beta_slow` times over the original context are slowed by
    `factor`, those that turn more than `beta_fast` times are kept, and a ramp lies between.

    `is_truncated` rounds the ends of the ramp outwards to whole pairs; cosines and sines are multiplied by `magnitude`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int
    is_truncated: bool
    magnitude: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies `theta ** (-2i / head_dim) / linear_factor`; of all pairs only the first `rotated_share` turn."""

    theta: float
    linear_factor: float = 1.0
    rotated_share: float = 1.0
    scaling: Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gate `g * sigmoid(alpha * g) * (u + 1)`, with g at most `limit` and u within it on both sides."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts: each token goes to the `top_k` of the router's softmax.

    `is_normalised`: the chosen weights are scaled to sum to 1. With `swiglu`, the router and the experts have biases,
    and checkpoints store the experts' matrices transposed, gate and up outputs in turn.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    is_normalised: bool
    swiglu: ClampedSwiglu | None = None

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise InvalidValueError("num_experts_per_tok", self.top_k, f"at most the {self.num_experts} experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What differs from layer to layer.

    `kv_source`: the layer whose keys and values this one reads, having none of its own. `is_value_key`: values are
    what the key projection gives, before its norm. `activation_sparsity`: the share of the MLP's gates set to zero, if
    they are distributed normally (Gemma 3n). `moe`: experts instead of an MLP, or beside it (Gemma 4).
    """

    window: KnownWindow
    rope: RopeConfig
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_source: int | None = None
    is_value_key: bool = False
    activation_sparsity: float = 0.0
    moe: MoeConfig | None = None


@dataclass(frozen=True, slots=True)
class PerLayerInputConfig:
    """Gemma's per-layer embeddings: each token has `size` numbers for every layer, from a table of `vocab_size`."""

    vocab_size: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig:
    """Only Gemma 3n's: alternating updates over several residual streams, and a low-rank branch beside attention.

    Each layer computes on the stream `active_stream` alone; the others are predicted from all and corrected by what it
    found. `has_output_scale` scales the active stream before the layer's own embedding is mixed in.
    """

    num_streams: int
    active_stream: int
    has_output_scale: bool
    laurel_rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.active_stream < self.num_streams:
            raise InvalidValueError("altup_active_idx", self.active_stream, f"0 to {self.num_streams - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: pre-norm blocks of grouped-query attention and a gated MLP or experts.

    `norm_offset` is added to every norm weight (Gemma stores weight - 1); `has_output_norms` norms what attention and
    MLP give before it joins the residual; `has_v_norm` norms values, without a weight; `has_sinks` adds a learned logit
    a head to the attention's softmax, that takes weight from the keys. `renamed_weights` maps our names of parts to the
    checkpoint's: "" where it has no such level. `is_text_part`: the checkpoint has more, to see or hear with: left out.
    `num_ranks`: over how many processes the heads and MLPs are split, of which this is one's (`rank_config`).
    """

    architecture: str
    is_text_part: bool = False
    vocab_size: int
    hidden_size: int
    num_heads: int
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
    has_v_norm: bool = False
    has_output_norms: bool = False
    has_sinks: bool = False
    has_tied_embeddings: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    per_layer_inputs: PerLayerInputConfig | None = None
    gemma3n: Gemma3nConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()
    renamed_weights: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1

    def __post_init__(self) -> None:
        """Raise InvalidValueError when the numbers cannot be a model, or not one that the kernels take."""
        for layer in dict.fromkeys(self.layers):
            if self.num_heads % layer.num_kv_heads:
                raise InvalidValueError(
                    "num_key_value_heads", layer.num_kv_heads, f"a divisor of {self.num_heads} heads"
                )
            if layer.head_dim % 2 or layer.head_dim > MAX_HEAD_DIM:
                raise InvalidValueError("head_dim", layer.head_dim, f"an even number up to {MAX_HEAD_DIM}")

    def layer_kv(self, dtype: KvDtype) -> list[LayerKv | SharedKv]:
        return [
            LayerKv(layer.window, layer.num_kv_heads, layer.head_dim, dtype)
            if layer.kv_source is None
            else SharedKv(layer.kv_source)
            for layer in self.layers
        ]


def rank_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return one rank's model, the same for each: its share of the heads and of the MLPs' inner width.

    It is a smaller model, whose attention and MLP outputs are summed over the ranks (Megatron-LM, arXiv:1909.08053,
    section 3), one all-reduce each. All else is whole on each.

    Ranks that are more than the KV heads share them: each keeps a copy of the one that its query heads read. Raises
    InvalidValueError for a model that cannot be split so.
    """
    if num_ranks == 1:
        return config
    _check_split(config, num_ranks)
    layers = tuple(
        replace(
            layer,
            num_kv_heads=max(1, layer.num_kv_heads // num_ranks),
            intermediate_size=layer.intermediate_size // num_ranks,
        )
        for layer in config.layers
    )
    return replace(config, num_heads=config.num_heads // num_ranks, layers=layers, num_ranks=num_ranks)


def rank_slices(whole: Sequence[int], part: Sequence[int], shard: Part) -> tuple[slice, ...]:
    """Return where a rank's part of a weight lies in the whole one; ranks that are more than the parts share them."""
    starts = (shard.rank * (all_ // one) // shard.num_ranks * one for all_, one in zip(whole, part, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, part, strict=True))


def _check_split(config: ModelConfig, num_ranks: int) -> None:
    expected = None
    if config.gemma3n is not None:
        expected = f"1 for {config.architecture}, whose MLP compares all its gates"
    elif any(layer.moe is not None for layer in config.layers):
        expected = f"1 for {config.architecture} with experts, which are not split"
    elif config.num_heads % num_ranks:
        expected = f"a divisor of {config.num_heads} attention heads"
    for layer in dict.fromkeys(config.layers):
        if layer.intermediate_size % num_ranks:
            expected = expected or f"a divisor of intermediate_size={layer.intermediate_size}"
        if layer.num_kv_heads % num_ranks and num_ranks % layer.num_kv_heads:
            expected = expected or f"a divisor or a multiple of {layer.num_kv_heads} KV heads"
    if expected is not None:
        raise InvalidValueError("tensor_parallel_size", num_ranks, expected)
