"""A small, real engine: continuous batching over windowed paged KV memory, behind OpenAI's HTTP API.

A request goes from `server` to `async_engine` (the one engine thread) to `core`: the `scheduler` decides what a step
computes, the `runner` turns that into tensors and calls the model (`models`), the `sampler` picks tokens, and the
`request` turns them into text. Memory is `kvist.kvcache`, attention `kvist.kernels`. Nothing heavy is imported here.
"""

from pathlib import Path

__all__ = ["bundled_model_path"]


def bundled_model_path() -> Path:
    """Return the directory of the tiny Gemma 3 style model that comes with Kvist."""
    return Path(__file__).parent / "bundled_model"
