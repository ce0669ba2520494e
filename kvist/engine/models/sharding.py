"""How a model is split over ranks: attention by heads, MLPs by their inner width; all else is whole on each.

A rank's model is a smaller model, whose attention and MLP outputs are summed over the ranks (Megatron-LM,
arXiv:1909.08053, section 3): one all-reduce each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvist.engine.models.config import ModelConfig
from kvist.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of equal parts of a model a process computes."""

    rank: int
    num_ranks: int


def rank_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return one rank's model, the same for each: its heads, and its share of the MLPs.

    Ranks that are more than the KV heads share them: each keeps a copy of the one that its query heads read. Raises
    InvalidValueError for a model that cannot be split so.
    """
    if num_ranks == 1:
        return config
    _check(config, num_ranks)
    layers = tuple(
        replace(
            layer,
            num_kv_heads=max(1, layer.num_kv_heads // num_ranks),
            intermediate_size=layer.intermediate_size // num_ranks,
        )
        for layer in config.layers
    )
    return replace(config, num_heads=config.num_heads // num_ranks, layers=layers, num_ranks=num_ranks)


def rank_slices(whole: Sequence[int], part: Sequence[int], shard: Shard) -> tuple[slice, ...]:
    """Return where a rank's part of a weight lies in the whole one, given both shapes.

    Where there are fewer parts than ranks, neighbours have the same.
    """
    starts = (shard.rank * (all_ // one) // shard.num_ranks * one for all_, one in zip(whole, part, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, part, strict=True))


def _check(config: ModelConfig, num_ranks: int) -> None:
    if config.gemma3n is not None:
        expected = f"1 for {config.architecture}, whose MLP compares all its gates"
        raise InvalidValueError("tensor_parallel_size", num_ranks, expected)
    if any(layer.moe is not None for layer in config.layers):
        expected = f"1 for {config.architecture} with experts, which are not split"
        raise InvalidValueError("tensor_parallel_size", num_ranks, expected)
    if config.num_heads % num_ranks:
        raise InvalidValueError("tensor_parallel_size", num_ranks, f"a divisor of {config.num_heads} attention heads")
    for layer in dict.fromkeys(config.layers):
        if layer.intermediate_size % num_ranks:
            expected = f"a divisor of intermediate_size={layer.intermediate_size}"
            raise InvalidValueError("tensor_parallel_size", num_ranks, expected)
        if layer.num_kv_heads % num_ranks and num_ranks % layer.num_kv_heads:
            expected = f"a divisor or a multiple of {layer.num_kv_heads} KV heads"
            raise InvalidValueError("tensor_parallel_size", num_ranks, expected)
