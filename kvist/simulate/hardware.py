"""A model's speed on a known accelerator: a first estimate, before any worker was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.router.policy.attention import ModelCosts, costs_of
from kvist.simulate.memory import Memory
from kvist.simulate.worker import Machine


class Accelerator(NamedTuple):
    """Figures of a data sheet: dense BF16 operations a second, bytes a second, bytes."""

    flops: float
    bandwidth: float
    memory_bytes: float


ACCELERATORS = {
    "a100": Accelerator(312e12, 2.039e12, 80e9),  # NVIDIA A100 80GB SXM, data sheet of 2021
    "h100": Accelerator(989e12, 3.35e12, 80e9),  # NVIDIA H100 SXM, data sheet of 2023
    "h200": Accelerator(989e12, 4.8e12, 141e9),  # NVIDIA H200 SXM, data sheet of 2024
    "l4": Accelerator(121e12, 0.3e12, 24e9),  # NVIDIA L4, data sheet of 2023
    "l40s": Accelerator(362e12, 0.864e12, 48e9),  # NVIDIA L40S, data sheet of 2023
    "mi300x": Accelerator(1307e12, 5.3e12, 192e9),  # AMD Instinct MI300X, data sheet of 2023
}

COMPUTE_SHARE, BANDWIDTH_SHARE, MEMORY_SHARE = 0.35, 0.85, 0.9
"""How much of them engines achieve, so that an 8B model computes 25,000 tokens a second on an H100, as measured; and
the share of memory that they use by default."""
WEIGHT_BYTES = 2


def machine_of(name: str, model_path: Path) -> Machine:
    """Return a worker with a model in BF16 on one `h100`, or on several: `h100x4`; raises InvalidValueError."""
    named = re.fullmatch(r"([a-z0-9]+?)(?:x([1-9][0-9]?))?", name)
    accelerator = None if named is None else ACCELERATORS.get(named[1])
    if named is None or accelerator is None:
        expected = f"one of {', '.join(ACCELERATORS)}, or several as one worker: h100x4"
        raise InvalidValueError("--accelerator", name, expected)
    costs = _costs_of(model_path)
    flops, bandwidth, memory_bytes = (int(named[2] or 1) * each for each in accelerator)
    weight_bytes = WEIGHT_BYTES * costs.weights
    cache_bytes = MEMORY_SHARE * memory_bytes - weight_bytes
    if cache_bytes <= 0:
        raise InvalidValueError("--accelerator", name, f"room for {weight_bytes / 1e9:.0f} GB of weights")
    return Machine(
        step_s=weight_bytes / (bandwidth * BANDWIDTH_SHARE),
        prefill_s=2 * costs.weights_used / (flops * COMPUTE_SHARE),
        context_s=WEIGHT_BYTES * costs.kv / (bandwidth * BANDWIDTH_SHARE),
        alpha=costs.alpha,
        cache_tokens=int(cache_bytes / (WEIGHT_BYTES * costs.kv)),
    )


def memory_of(model_path: Path) -> Memory:
    """Return the memory of a worker with this model's layers; raises InvalidValueError."""
    costs = _costs_of(model_path)
    return Memory(costs.window or FULL, costs.windowed)


def _costs_of(model_path: Path) -> ModelCosts:
    try:
        costs = costs_of(msgspec.json.decode((model_path / "config.json").read_bytes(), type=dict))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("--model-path", str(model_path), f"a folder with a config.json ({error})") from None
    if costs is None:
        raise InvalidValueError("--model-path", str(model_path), "a model whose config says how large its layers are")
    return costs
