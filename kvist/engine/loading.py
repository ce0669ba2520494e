"""From a model directory to a ready engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore, ModelLimits
from kvist.engine.models.checkpoint_config import load_model_config
from kvist.engine.models.config import ModelConfig
from kvist.engine.models.weights import load_model
from kvist.engine.runner import Runner
from kvist.engine.scheduler import Scheduler
from kvist.errors import InvalidValueError
from kvist.events.engine import EventSink
from kvist.kvcache import KvCacheManager, KvGroup, check_sequence_fits, group_layers, num_blocks_for_memory
from kvist.kvcache.tensors import allocate_pool

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_MEMORY_MIB = 256
GPU_KV_MEMORY_FRACTION = 0.8  # of what is free once the weights are loaded: the rest is for activations
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Plan:
    model: ModelConfig
    groups: tuple[KvGroup, ...]
    max_model_len: int
    dtype: torch.dtype
    device: torch.device


def load_engine(config: EngineConfig, sink: EventSink | None = None) -> EngineCore:
    """Return an engine with its weights and KV memory in place; cache events go to `sink`.

    Raises InvalidValueError for a directory, setting or memory that cannot work. Sets torch's thread count.
    """
    torch.set_num_threads(config.num_threads)
    plan = _plan(config)
    model = load_model(config.model_dir, plan.model, plan.max_model_len, plan.dtype, plan.device)
    num_blocks = [_num_blocks(config, plan)] * len(plan.groups)
    check_sequence_fits(plan.groups, num_blocks, config.block_size, plan.max_model_len, config.max_num_batched_tokens)
    try:
        pools = [
            allocate_pool(group, count, config.block_size, plan.dtype, plan.device)
            for group, count in zip(plan.groups, num_blocks, strict=True)
        ]
    except RuntimeError as error:  # torch's word for out of memory, on the CPU as on a GPU
        raise InvalidValueError("num_blocks", num_blocks[0], f"no more than fit into memory ({error})") from error
    kv_cache = KvCacheManager(plan.groups, num_blocks, config.block_size, sink, config.has_prefix_cache)
    logger.info(
        "engine loaded architecture=%s max_model_len=%d num_groups=%d num_blocks=%d block_size=%d dtype=%s device=%s",
        plan.model.architecture,
        plan.max_model_len,
        len(plan.groups),
        num_blocks[0],
        config.block_size,
        plan.dtype,
        plan.device,
    )
    return EngineCore(
        ModelLimits(plan.model.vocab_size, plan.max_model_len, plan.model.eos_token_ids),
        kv_cache,
        Scheduler(kv_cache, config.max_num_seqs, config.max_num_batched_tokens),
        Runner(model, plan.groups, pools, config.block_size),
    )


def _plan(config: EngineConfig) -> _Plan:
    model = load_model_config(config.model_dir)
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise InvalidValueError("max_model_len", max_model_len, f"at most the model's {model.max_position}")
    device = _device(config.device)
    name = config.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return _Plan(model, group_layers(model.layer_kv(), max_model_len), max_model_len, dtype, device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidValueError("device", name, "cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("device", name, "cpu: this torch sees no CUDA device")
    return device


def _num_blocks(config: EngineConfig, plan: _Plan) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_memory_mib is not None:
        memory_bytes = config.kv_memory_mib * _MIB
    elif plan.device.type == "cuda":
        memory_bytes = int(torch.cuda.mem_get_info(plan.device)[0] * GPU_KV_MEMORY_FRACTION)
    else:
        memory_bytes = DEFAULT_CPU_KV_MEMORY_MIB * _MIB
    return num_blocks_for_memory(plan.groups, config.block_size, plan.dtype.itemsize, memory_bytes)
