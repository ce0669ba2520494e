"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), halves rotated as Hugging Face does."""

from __future__ import annotations

import math

import torch

from kvist.engine.models.config import Llama3Scaling, RopeConfig, YarnScaling


class RotaryTable:
    """Cosines and sines of every position, float32 `[max_len, 1, head_dim / 2]` each."""

    def __init__(self, config: RopeConfig, head_dim: int, max_len: int) -> None:
        frequencies = rope_frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies).unsqueeze(1)
        magnitude = config.scaling.magnitude if isinstance(config.scaling, YarnScaling) else 1.0
        self._cos, self._sin = angles.cos() * magnitude, angles.sin() * magnitude

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
