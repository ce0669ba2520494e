"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), halves rotated as Hugging Face does."""

from __future__ import annotations

import math

import torch

from kvist.engine.models.config import Llama3Scaling, RopeConfig


class RotaryTable:
    """Cosines and sines of every position, float32 `[max_len, 1, head_dim / 2]` each."""

    def __init__(self, config: RopeConfig, head_dim: int, max_len: int) -> None:
        frequencies = rope_frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies).unsqueeze(1)
        self._cos, self._sin = angles.cos(), angles.sin()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines `[num_tokens, 1, head_dim / 2]` at absolute positions."""
        return self._cos[positions], self._sin[positions]


def rope_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle a position each pair of dimensions turns, float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.theta**exponents / config.linear_factor
    return frequencies if config.llama3 is None else _scale_llama3(frequencies, config.llama3)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `[num_tokens, num_heads, head_dim]` turned by its positions; computed in float32, cast back."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)
