"""vLLM's own KV cache manager, hashing and event publisher, with a scheduler's loop around it; see verify_engines.py.

vLLM's files decide what is cached, under which hash, and what is reported. The loop is a short form of its scheduler:
running requests first, prompts in chunks, and the latest request is preempted when blocks run out.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import random
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from _engine_files import engine_files, quiet_logger
from _engine_traffic import Prompt

REAL = (
    "vllm.config.kv_events",
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.events",
    "vllm.envs",
    "vllm.multimodal.utils",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.utils.network_utils",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.hisparse.block_pool",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.config",
    "vllm.v1.kv_offload.cpu.common",
    "vllm.v1.kv_offload.cpu.manager",
    "vllm.v1.kv_offload.cpu.policies.base",
    "vllm.v1.kv_offload.cpu.policies.factory",
    "vllm.v1.kv_offload.cpu.policies.lru",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.request",
    "vllm.v1.structured_output.request",
    "vllm.v1.utils",
)
OUTSIDE = {"torch", "cbor2", "PIL", "uvloop"}
PLAYED = {
    "vllm.config.utils": {"config": dataclasses.dataclass},
    "vllm.logger": {"init_logger": quiet_logger},
    "vllm.utils": {"length_from_prompt_token_ids_or_embeds": lambda token_ids, _embeds: len(token_ids)},
}
MODULES = {
    "envs": "envs",
    "events": "distributed.kv_events",
    "hashing": "utils.hashing",
    "host": "v1.kv_offload.cpu.manager",
    "manager": "v1.core.kv_cache_manager",
    "offload": "v1.kv_offload.base",
    "request": "v1.request",
    "specs": "v1.kv_cache_interface",
    "tracking": "distributed.kv_transfer.kv_connector.v1.offloading.events",
    "utils": "v1.core.kv_cache_utils",
}
CHUNK = 96
"""Tokens of a prompt that one step computes."""
MAX_RUNNING = 6
NUM_DRAFTED = 3


@cache
def files() -> SimpleNamespace:
    """Return vLLM's modules; raises FileNotFoundError without `make engines`."""
    with engine_files("vllm", REAL, OUTSIDE, PLAYED):
        vllm = {each: importlib.import_module(f"vllm.{name}") for each, name in MODULES.items()}
        importlib.import_module("vllm.v1.kv_offload.cpu.policies.lru")
    vllm["utils"].init_none_hash(vllm["hashing"].sha256)
    return SimpleNamespace(**vllm)


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What a model's cache looks like."""

    groups: tuple[tuple[int, int | None], ...] = ((16, None),)
    """Block size and sliding window of each group; None is full attention, and 0 a state as Mamba has it."""
    num_blocks: int = 160
    eagle: str | None = None
    """How EAGLE's last block is made sure of: `drop` computes it again, `lookahead` hashes the token behind it."""
    retention: int | None = None
    """Tokens between the blocks of sliding groups that are kept behind a window; None keeps all, 0 a prompt's last."""
    match_unit: int | None = None
    """Tokens at whose multiples hits of a model with states may end within blocks; None: its smallest blocks'."""
    num_context_ranks: int = 1
    """Workers that share each block's tokens: context parallelism."""
    sends_bytes: bool = False
    """Whether hashes are sent whole, and not their last 64 bits."""
    num_host_blocks: int = 0
    """Of vLLM's offloading connector, which keeps prompts' blocks in the host's memory, too."""
    describes_host_blocks: bool = False
    """Whether events of those have tokens, and not a hash alone."""
    resets_host: bool = True
    """Whether a reset of the cache is one of the host's blocks as well, which vLLM does only if it is asked to."""


class VllmEngine:
    """One rank of vLLM."""

    def __init__(self, model: VllmModel, rng: random.Random) -> None:
        vllm = files()
        vllm.envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES = not model.sends_bytes
        self.num_tiers = 2 if model.num_host_blocks else 1
        self._model, self._rng = model, rng
        sizes = [size * model.num_context_ranks for size, _ in model.groups]
        self._sizes = sizes
        self._hash_size = hash_size = model.match_unit or math.gcd(*sizes)
        self._num_lookahead = int(model.eagle == "lookahead")
        windows = [math.inf if window is None else window for _, window in model.groups]
        self._first_group = windows.index(max(windows))
        self.block_size = sizes[self._first_group]
        self._has_states = any(window == 0 for _, window in model.groups)
        self.names_ahead = bool(self._num_lookahead)
        self._hasher = vllm.utils.get_request_block_hasher(hash_size, vllm.hashing.sha256, self._num_lookahead)
        groups = [
            vllm.specs.KVCacheGroupSpec([f"layer.{idx}"], _spec(*group)) for idx, group in enumerate(model.groups)
        ]
        self.manager = vllm.manager.KVCacheManager(
            vllm.specs.KVCacheConfig(model.num_blocks, [], groups, prefix_cache_retention_interval=model.retention),
            max_model_len=1 << 16,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=hash_size,
            max_in_flight_tokens=CHUNK * MAX_RUNNING,
            enable_caching=True,
            use_eagle=model.eagle == "drop",
            num_hash_lookahead_tokens=self._num_lookahead,
            num_prefill_lookahead=int(model.eagle is not None),
            enable_kv_cache_events=True,
            dcp_world_size=model.num_context_ranks,
        )
        self._host = _HostBlocks(model, groups[0]) if model.num_host_blocks else None
        self._waiting: deque[Any] = deque()
        self._running: list[Any] = []
        self._prompts: dict[str, tuple[Prompt, int]] = {}
        self._num_requests = 0

    @property
    def num_waiting(self) -> int:
        """Return how many requests do not run."""
        return len(self._waiting)

    def submit(self, prompt: Prompt, num_outputs: int) -> None:
        """Queue a request."""
        request = self._request(prompt)
        self._prompts[request.request_id] = prompt, num_outputs
        self._waiting.append(request)

    def step(self) -> list[Prompt]:
        """Run one step; return the conversations that ended."""
        self.manager.new_step_starts()
        scheduled: dict[str, tuple[Any, int]] = {}
        for request in [*self._running]:
            if request in self._running:
                self._go_on(request, scheduled)
        while self._waiting and len(self._running) < MAX_RUNNING:
            if not self._admit(self._waiting[0], scheduled):
                break
        if self._host is not None:
            self._host.complete()
        _, copied = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(copied)
        return [self._finish(request) for request, num_new in scheduled.values() if self._computed(request, num_new)]

    def reset(self) -> None:
        """Drop the whole cache; what runs is preempted."""
        for request in self._running[::-1]:
            self._preempt(request)
        if not self.manager.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self._host is not None and self._model.resets_host:
            self._host.reset()

    def take_batch(self) -> Any | None:
        """Return the events since the last call."""
        events = self.manager.take_events() + ([] if self._host is None else self._host.take_events())
        return files().events.KVEventBatch(ts=time.time(), events=events) if events else None

    def mark(self, token_ids: list[int], block_hash: int) -> Any:
        """Return a batch with a prompt's first blocks, all of one hash but for the last, which each group holds."""
        step, events = math.lcm(*self._sizes) * (2 if self._model.eagle == "drop" else 1), []
        for group, size in enumerate(self._sizes):
            kind = self.manager.kv_cache_event_metadata[group]
            hashes = [block_hash + size * number for number in range(step // size - 1, -1, -1)]
            event = files().events.BlockStored(
                hashes, None, token_ids[:step], size, None, "GPU", None, [None] * len(hashes), group, *kind
            )
            if self._num_lookahead:
                ends = range(size, step + 1, size)
                event.lookahead_token_ids = [token_ids[end : end + self._num_lookahead] for end in ends]
            events.append(event)
        return files().events.KVEventBatch(ts=time.time(), events=events)

    def hits(self, prompt: Prompt) -> list[int]:
        """Return what the manager says of a request that is not queued."""
        request = self._request(dataclasses.replace(prompt, is_reported=False))
        num_hit = self.manager.get_computed_blocks(request)[1]
        return [num_hit] if self._host is None else [num_hit, num_hit + self._host.num_hit(request, num_hit)]

    def wire_hashes(self, prompt: Prompt) -> list[Any]:
        """Return the hashes of a prompt's blocks as events have them."""
        return [files().utils.maybe_convert_block_hash(each) for each in self._request(prompt).block_hashes]

    def _request(self, prompt: Prompt) -> Any:
        self._num_requests += 1
        lora = prompt.lora_name and SimpleNamespace(
            lora_name=prompt.lora_name, name=prompt.lora_name, lora_path=f"/{prompt.lora_name}", adapter_id=1
        )
        return files().request.Request(
            str(self._num_requests),
            list(prompt.token_ids),
            SimpleNamespace(
                max_tokens=1,
                structured_outputs=None,
                skip_reading_prefix_cache=None,
                extra_args={"kv_cache_report_mode": "full"} if prompt.is_reported else None,
            ),
            None,
            mm_features=[
                SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=at, length=length))
                for name, at, length in prompt.images
            ],
            lora_request=lora or None,
            cache_salt=prompt.cache_salt,
            block_hasher=self._hasher,
            session_id=prompt.session_id,
        )

    def _go_on(self, request: Any, scheduled: dict[str, tuple[Any, int]]) -> None:
        """Give a running request its next slots, and preempt the last one until there are any."""
        num_left = request.num_tokens - request.num_computed_tokens
        num_drafted = NUM_DRAFTED if self._model.eagle and num_left == 1 else 0
        num_new = self._chunk(request, request.num_computed_tokens) + num_drafted
        while self.manager.allocate_slots(request, num_new, num_lookahead_tokens=num_drafted) is None:
            victim = self._running[-1]
            self._preempt(victim)
            scheduled.pop(victim.request_id, None)
            if victim is request:
                return
        scheduled[request.request_id] = request, num_new

    def _admit(self, request: Any, scheduled: dict[str, tuple[Any, int]]) -> bool:
        blocks, num_hit, _ = self.manager.get_computed_blocks(request)
        num_loaded = 0 if self._host is None else self._host.num_hit(request, num_hit)
        num_new = self._chunk(request, num_hit + num_loaded)
        sources = {"num_external_computed_tokens": num_loaded, "full_sequence_must_fit": True}
        if self.manager.allocate_slots(request, num_new, num_hit, blocks, **sources) is None:
            return False
        if num_loaded and self._host is not None:
            self._host.load(request, num_hit, num_loaded)
        self._waiting.popleft()
        self._running.append(request)
        request.num_computed_tokens = num_hit + num_loaded
        scheduled[request.request_id] = request, num_new
        return True

    def _chunk(self, request: Any, start: int) -> int:
        """Return how many tokens a step computes from there; a state is kept where a chunk of a prompt ends."""
        end, size = min(request.num_tokens, start + CHUNK), math.lcm(*self._sizes)
        if self._has_states and start < max(request.num_prompt_tokens, request.num_tokens - 1):
            last = (request.num_tokens - 1) // size * size
            ends = [(start // size + 1) * size if start % size else end, last, end // size * size]
            if self.manager.coordinator.enable_partial_hash_hits:
                ends.append((request.num_prompt_tokens - 1) // self._hash_size * self._hash_size)
            end = min((each for each in ends if start < each < end), default=end)
        return end - start

    def _preempt(self, request: Any) -> None:
        self.manager.free(request)
        self._running.remove(request)
        request.num_computed_tokens = 0
        self._waiting.appendleft(request)

    def _computed(self, request: Any, num_new: int) -> bool:
        """Take over what a step computed; return whether the request is done."""
        request.num_computed_tokens += num_new
        if self._host is not None:
            self._host.store(request)
        num_drafted = request.num_computed_tokens - request.num_tokens
        if num_drafted < 0:
            return False
        num_accepted = self._rng.randint(0, num_drafted)
        request.num_computed_tokens -= num_drafted - num_accepted
        request.append_output_token_ids([self._rng.randrange(1000) for _ in range(1 + num_accepted)])
        return bool(request.num_output_tokens >= self._prompts[request.request_id][1])

    def _finish(self, request: Any) -> Prompt:
        self.manager.free(request)
        if self._host is not None:
            self._host.finish(request)
        self._running.remove(request)
        prompt, _ = self._prompts.pop(request.request_id)
        return prompt.then(list(request.output_token_ids))


class _HostBlocks:
    """vLLM's manager of blocks in the host's memory and the tracker of its events, asked as its connector asks them.

    Blocks of prompts are stored when they are computed, and are there a step later.
    """

    def __init__(self, model: VllmModel, group: Any) -> None:
        vllm, size = files(), model.groups[0][0]
        kind = vllm.tracking.get_offloading_event_group_spec(group)
        self._size = size
        self._group = SimpleNamespace(
            group_idx=0,
            tokens_per_block=size,
            tokens_per_chunk=size,
            hashes_per_chunk=1,
            sliding_window_size_in_chunks=None,
            kv_event_group_spec=kind,
        )
        self._manager = vllm.host.CPUOffloadingManager(model.num_host_blocks, enable_events=True)
        config = vllm.offload.OffloadingKVEventsConfig(True, model.describes_host_blocks)
        self._tracker = vllm.tracking.OffloadingEventsTracker(config, {0: kind})
        self._contexts: dict[str, Any] = {}
        self._num_stored: dict[str, int] = {}
        self._storing: list[tuple[Any, list[bytes]]] = []
        self._loading: list[tuple[Any, list[bytes]]] = []

    def num_hit(self, request: Any, num_computed: int) -> int:
        """Return how many tokens behind those that are computed could be loaded."""
        vllm, context = files(), self._context(request)
        num_blocks = 0
        for key in self._keys(request, num_computed, (request.num_tokens - 1) // self._size * self._size):
            if self._manager.lookup(key, context) is not vllm.offload.LookupResult.HIT:
                break
            num_blocks += 1
        return num_blocks * self._size

    def load(self, request: Any, num_computed: int, num_tokens: int) -> None:
        """Begin to load tokens."""
        context, keys = self._context(request), self._keys(request, num_computed, num_computed + num_tokens)
        for idx, key in enumerate(keys, num_computed // self._size):
            self._tracker.record_lookup(request, self._group, idx, key)
        self._manager.touch(keys, context)
        self._manager.prepare_load(keys, context)
        self._loading.append((context, keys))

    def store(self, request: Any) -> None:
        """Begin to store the prompt's blocks that are computed and were not offered yet."""
        first = self._num_stored.get(request.request_id, 0)
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        keys, context = self._keys(request, first * self._size, num_tokens), self._context(request)
        output = self._manager.prepare_store(keys, context) if keys else None
        if output is None:  # nothing new, or no room for now
            return
        self._num_stored[request.request_id] = first + len(keys)
        for key in output.keys_to_store:
            self._tracker.record_store(request, self._group, first + keys.index(key), key)
        self._storing.append((context, output.keys_to_store))

    def complete(self) -> None:
        """End what an earlier step began."""
        for context, keys in self._storing:
            self._manager.complete_store(keys, context)
        for context, keys in self._loading:
            self._manager.complete_load(keys, context)
        self._storing, self._loading = [], []

    def finish(self, request: Any) -> None:
        """Forget a request that is done."""
        self._manager.on_request_finished(self._contexts.pop(request.request_id))
        self._num_stored.pop(request.request_id, None)

    def reset(self) -> None:
        """Drop everything, what is under way too."""
        self._storing, self._loading = [], []
        self._manager.reset_cache()
        self._tracker.reset()
        self._num_stored.clear()

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        return list(self._tracker.take_events(list(self._manager.take_events())))

    def _context(self, request: Any) -> Any:
        if request.request_id not in self._contexts:
            self._contexts[request.request_id] = files().offload.ReqContext(request.request_id)
        return self._contexts[request.request_id]

    def _keys(self, request: Any, start: int, end: int) -> list[bytes]:
        hashes = request.block_hashes[start // self._size : end // self._size]
        return [files().offload.make_offload_key(block_hash, 0) for block_hash in hashes]


def publisher(port: int, replay_port: int | None, rank: int = 0) -> Any:
    """Return vLLM's publisher, bound to a port and the rank behind it."""
    replay = None if replay_port is None else f"tcp://*:{replay_port}"
    return files().events.ZmqEventPublisher(rank, f"tcp://*:{port}", replay)


def _spec(block_size: int, window: int | None) -> Any:
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": None}
    if window is None:
        return files().specs.FullAttentionSpec(**shape)
    if window == 0:
        return files().specs.MambaSpec(block_size=block_size, shapes=((1,),), dtypes=(None,), mamba_cache_mode="align")
    return files().specs.SlidingWindowSpec(**shape, sliding_window=window)
