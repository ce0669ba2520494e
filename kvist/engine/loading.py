"""Loads an engine from a model directory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

import torch
from xxhash import xxh3_64_hexdigest

from kvist import kvcache
from kvist.engine.config import DTYPES, EngineConfig
from kvist.engine.core import EngineCore, ModelLimits
from kvist.engine.decode_graphs import DecodeGraphs, cuda_graph_capture
from kvist.engine.models.config import ModelConfig, load_model_config, rank_config
from kvist.engine.models.transformer import CausalLM, compile_layers
from kvist.engine.models.weights import load_model
from kvist.engine.rank_processes import Followers, Leader, LeadingRunner
from kvist.engine.runner import Runner
from kvist.engine.scheduler import Scheduler
from kvist.errors import InvalidValueError
from kvist.events.engine_events import EventSink
from kvist.kvcache.tensors import KvTensors
from kvist.transfer.heads import Part

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_MEMORY_MIB = 256
GPU_KV_MEMORY_FRACTION = 0.8  # of the memory that is free once the weights are loaded; activations need the rest
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Facts:
    """What follows from the checkpoint and the settings."""

    model: ModelConfig
    shard: Part
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    plan: kvcache.WindowPlan
    whole_plan: kvcache.WindowPlan


class MemoryServer(Protocol):
    """Allocates a rank's KV memory, in the rank's process, and makes it accessible to other workers."""

    @property
    def allocate(self) -> Callable[[int], torch.Tensor] | None:
        """Return the function with which `KvTensors` allocates; None for torch's own memory."""

    def serve(
        self, whole_plan: kvcache.WindowPlan, tensors: KvTensors, channel: Connection[Any, Any]
    ) -> AbstractContextManager[object]:
        """Make the rank's tensors accessible while the context is open; `channel` is a pipe to rank 0."""


OpenMemoryServer: TypeAlias = Callable[[int], MemoryServer]  # by rank, called in the rank's process


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, the KV memory of rank 0, for transfers, and the engine's other ranks, if any.

    `tensors` have this rank's heads, `whole_plan` those of all ranks. `kv_cache_dtype` differs between engines whose
    scales differ.
    """

    core: EngineCore
    whole_plan: kvcache.WindowPlan
    tensors: KvTensors
    kv_cache_dtype: str
    followers: Followers | None = None


def load_engine(
    config: EngineConfig,
    sink: EventSink | None = None,
    allocate: Callable[[int], torch.Tensor] | None = None,
    open_server: OpenMemoryServer | None = None,
) -> LoadedEngine:
    """Return the engine; `allocate` allocates rank 0's KV memory, and a server of `open_server` that of other ranks.

    Cache events go to `sink`. Raises InvalidValueError for a directory, setting or memory that cannot work. Sets
    torch's thread count if the settings have one.
    """
    facts = _facts(config, rank=0)
    if config.has_swa_scratch:
        facts.plan.check_scratch()
    if open_server is not None and facts.plan.places != facts.whole_plan.places:
        expected = "fewer, or no --kv-transfer: layers that differ in nothing but KV heads would be one group on a rank"
        raise InvalidValueError("tensor_parallel_size", config.tensor_parallel_size, expected)
    if facts.shard.num_ranks == 1:
        return _load(config, facts, sink, allocate, None)
    followers = Followers(config.tensor_parallel_size, _run_follower, config, open_server)
    try:
        return _load(config, facts, sink, allocate, followers)
    except BaseException:
        followers.close()
        raise


def _load(
    config: EngineConfig,
    facts: _Facts,
    sink: EventSink | None,
    allocate: Callable[[int], torch.Tensor] | None,
    followers: Followers | None,
) -> LoadedEngine:
    model = _load_model(config, facts)
    groups, size, longest = facts.plan.groups, config.block_size, facts.max_model_len
    num_blocks = _num_blocks(config, facts)
    if followers is not None:
        num_blocks = followers.agree_on_num_blocks(num_blocks)
    kvcache.check_sequence_fits(groups, num_blocks, size, longest, config.max_num_batched_tokens)
    try:
        tensors = KvTensors(facts.plan, num_blocks, size, facts.device, allocate)
    except RuntimeError as error:
        raise InvalidValueError("num_blocks", num_blocks, f"no more than fit into memory ({error})") from error
    if followers is None:
        runner = Runner(model, facts.plan, tensors, size)
    else:
        followers.connect(facts.device)
        runner = LeadingRunner(followers, model, facts.plan, tensors, size)
    if facts.device.type == "cuda":
        if followers is None and not config.enforce_eager:
            compile_layers(model.decoder)
        step = config.max_num_batched_tokens
        runner.warm_up([kvcache.peak_num_blocks(group, size, longest, step) for group in groups])
    if followers is None:
        runner.graphs = _graphs(config, facts, model, tensors)
    kv_cache_dtype: str = groups[0].layer.dtype.value
    if tensors.pools[0].itemsize == 1 and model.kv_scales:
        kv_cache_dtype += f" scaled {xxh3_64_hexdigest(repr(sorted(model.kv_scales.items())).encode())}"
    logger.info(
        "engine loaded architecture=%s max_model_len=%d num_blocks=%s block_size=%d kv_dtype=%s dtype=%s device=%s",
        facts.model.architecture,
        longest,
        "/".join(map(str, num_blocks)),
        size,
        kv_cache_dtype,
        facts.dtype,
        facts.device,
    )
    scratch = kvcache.ScratchPolicy() if config.has_swa_scratch else None
    kv_cache = kvcache.KvCacheManager(groups, num_blocks, size, sink, config.has_prefix_cache, scratch)
    core = EngineCore(
        ModelLimits(facts.model.vocab_size, longest, facts.model.eos_token_ids),
        kv_cache,
        Scheduler(kv_cache, config.max_num_seqs, config.max_num_batched_tokens),
        runner,
    )
    return LoadedEngine(core, facts.whole_plan, tensors, kv_cache_dtype, followers)


def _run_follower(leader: Leader, config: EngineConfig, open_server: OpenMemoryServer | None) -> None:
    """Run one of the other ranks: load its shard, then compute steps until rank 0 ends."""
    facts = _facts(config, leader.rank)
    model = _load_model(config, facts)
    num_blocks = leader.agree_on_num_blocks(_num_blocks(config, facts))
    server = None if open_server is None else open_server(leader.rank)
    allocate = None if server is None else server.allocate
    tensors = KvTensors(facts.plan, num_blocks, config.block_size, facts.device, allocate)
    leader.connect(config.tensor_parallel_size, facts.device)
    with nullcontext() if server is None else server.serve(facts.whole_plan, tensors, leader.side_channel):
        leader.compute_steps(Runner(model, facts.plan, tensors, config.block_size))


def _load_model(config: EngineConfig, facts: _Facts) -> CausalLM:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return load_model(config.model_dir, facts.model, facts.max_model_len, facts.dtype, facts.device, facts.shard)


def _graphs(config: EngineConfig, facts: _Facts, model: CausalLM, tensors: KvTensors) -> DecodeGraphs | None:
    if config.enforce_eager or not _is_capturable(facts):
        return None
    groups, longest = facts.plan.groups, facts.max_model_len
    # a step that is launched before the last one's tokens are known still holds what that one does not need
    widths = [kvcache.peak_num_blocks(group, config.block_size, longest, 2) for group in groups]
    capture = cuda_graph_capture(facts.device)
    return DecodeGraphs(model, facts.plan, tensors, widths, config.max_num_seqs, capture)


def _facts(config: EngineConfig, rank: int) -> _Facts:
    model = load_model_config(config.model_dir)
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise InvalidValueError("max_model_len", max_model_len, f"at most the model's {model.max_position}")
    num_ranks = config.tensor_parallel_size
    device = _device(config.device, rank, num_ranks)
    name = config.dtype or ("float32" if device.type == "cpu" and not _is_faster_in_bfloat16(model) else "bfloat16")
    kv_dtype = kvcache.KvDtype(config.kv_cache_dtype or name)
    if kv_dtype.value in DTYPES and kv_dtype.value != name:
        expected = f"{name}, in which the model computes, fp8_e5m2 or fp8_e4m3"
        raise InvalidValueError("kv_cache_dtype", kv_dtype.value, expected)
    plan, whole_plan = (
        kvcache.plan_windows(each.layer_kv(kv_dtype), max_model_len) for each in (rank_config(model, num_ranks), model)
    )
    return _Facts(model, Part(rank, num_ranks), max_model_len, getattr(torch, name), device, plan, whole_plan)


def _is_faster_in_bfloat16(model: ModelConfig) -> bool:
    """Return whether the CPU multiplies in bfloat16, and the checkpoint has bfloat16 weights that are large enough.

    Relative to float32, products for 1 and 8 rows take 0.95 and 0.7 of the time with weights of 512 x 2,048, 0.95 and
    0.6 with 1,024 x 3,072, 0.75 and 0.3 with 2,048 x 8,192, but 6 and 2.5 with 192 x 512 (one core with AMX, torch
    2.13, 2026-11).
    """
    has_products = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return has_products and model.text.dtype is torch.bfloat16 and model.text.hidden_size >= 512


def _is_capturable(facts: _Facts) -> bool:
    """Return whether every decode step launches the same work, as a CUDA graph requires.

    It does not where torch 2.13 reads experts' token counts from the device, which it does except with bfloat16 on
    sm_90 and later, nor for transformers' Gemma 3n, which makes tensors from host numbers within a step.
    """
    if facts.device.type != "cuda" or facts.model.architecture == "Gemma3nForCausalLM":
        return False
    reads_counts = facts.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(facts.device) < (9, 0)
    return not (reads_counts and facts.model.has_experts)


def _device(name: str, rank: int, num_ranks: int) -> torch.device:
    if re.fullmatch(r"cpu|cuda(:\d{1,2})?", name) is None:
        raise InvalidValueError("device", name, "cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("device", name, "cpu: this torch sees no CUDA device")
    if device.type == "cuda" and num_ranks > 1:
        if device.index is not None:
            raise InvalidValueError("device", name, "cuda: with tensor parallelism rank i takes cuda:i")
        if num_ranks > torch.cuda.device_count():
            expected = f"at most the {torch.cuda.device_count()} CUDA devices there are"
            raise InvalidValueError("tensor_parallel_size", num_ranks, expected)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    return device


def _num_blocks(config: EngineConfig, facts: _Facts) -> tuple[int, ...]:
    groups = facts.plan.groups
    if config.num_blocks is not None:
        return (config.num_blocks,) * len(groups)
    if config.kv_memory_mib is not None:
        memory_bytes = config.kv_memory_mib * _MIB
    elif facts.device.type == "cuda":
        torch.cuda.empty_cache()  # torch keeps what loading took beside the weights, which would not count as free
        memory_bytes = int(torch.cuda.mem_get_info(facts.device)[0] * GPU_KV_MEMORY_FRACTION)
    else:
        memory_bytes = DEFAULT_CPU_KV_MEMORY_MIB * _MIB
    try:
        return kvcache.split_memory(
            groups,
            config.block_size,
            memory_bytes,
            max_model_len=facts.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_num_batched_tokens,
            policy=config.kv_budget,
        )
    except InvalidValueError as error:  # name the setting, also if it was left at its default
        raise InvalidValueError("kv_memory_mib", memory_bytes // _MIB, error.expected) from None
