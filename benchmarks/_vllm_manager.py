"""vLLM's own KV cache manager, hashing and event publisher, with a scheduler's loop around it; see verify_engines.py.

What is cached, under which hash, and what is told of it is decided by vLLM's files. The loop is that of its scheduler
in short: running requests first, prompts in chunks, whoever came last is preempted when blocks run out.
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
CHUNK = 96
"""Tokens of a prompt that one step computes."""
MAX_RUNNING = 6
NUM_DRAFTED = 3


@cache
def files() -> SimpleNamespace:
    """Return vLLM's modules; raises FileNotFoundError without `make engines`."""
    with engine_files("vllm", REAL, OUTSIDE, PLAYED):
        events, hashing, manager, specs, request, utils = (
            importlib.import_module(f"vllm.{name}")
            for name in (
                "distributed.kv_events",
                "utils.hashing",
                "v1.core.kv_cache_manager",
                "v1.kv_cache_interface",
                "v1.request",
                "v1.core.kv_cache_utils",
            )
        )
    utils.init_none_hash(hashing.sha256)
    return SimpleNamespace(events=events, hashing=hashing, manager=manager, specs=specs, request=request, utils=utils)


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What a model's cache looks like."""

    groups: tuple[tuple[int, int | None], ...] = ((16, None),)
    """Block size and sliding window of each group; None is full attention."""
    num_blocks: int = 160
    eagle: str | None = None
    """How EAGLE's last block is made sure of: `drop` computes it again, `lookahead` hashes the token behind it."""


class VllmEngine:
    """One rank of vLLM."""

    num_tiers = 1

    def __init__(self, model: VllmModel, rng: random.Random) -> None:
        vllm = files()
        self._model, self._rng = model, rng
        sizes = [size for size, _ in model.groups]
        hash_size, self._num_lookahead = math.gcd(*sizes), int(model.eagle == "lookahead")
        self._first_group = max(range(len(sizes)), key=lambda idx: model.groups[idx][1] or math.inf)
        self.block_size = sizes[self._first_group]
        self.names_ahead = bool(self._num_lookahead)
        self._hasher = vllm.utils.get_request_block_hasher(hash_size, vllm.hashing.sha256, self._num_lookahead)
        groups = [
            vllm.specs.KVCacheGroupSpec([f"layer.{idx}"], _spec(*group)) for idx, group in enumerate(model.groups)
        ]
        self.manager = vllm.manager.KVCacheManager(
            vllm.specs.KVCacheConfig(model.num_blocks, [], groups),
            max_model_len=1 << 16,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=hash_size,
            max_in_flight_tokens=CHUNK * MAX_RUNNING,
            enable_caching=True,
            use_eagle=model.eagle == "drop",
            num_hash_lookahead_tokens=self._num_lookahead,
            num_prefill_lookahead=int(model.eagle is not None),
            enable_kv_cache_events=True,
        )
        self._waiting: deque[Any] = deque()
        self._running: list[Any] = []
        self._prompts: dict[str, tuple[Prompt, int]] = {}
        self._num_requests = 0

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
        return [self._finish(request) for request, num_new in scheduled.values() if self._computed(request, num_new)]

    def reset(self) -> None:
        """Drop the whole cache; what runs is preempted."""
        for request in self._running[::-1]:
            self._preempt(request)
        if not self.manager.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def take_batch(self) -> Any | None:
        """Return the events since the last call."""
        events = self.manager.take_events()
        return files().events.KVEventBatch(ts=time.time(), events=events) if events else None

    def mark(self, token_ids: list[int], block_hash: int) -> Any:
        """Return a batch with a block of the group that an index keeps first."""
        group, size = self._first_group, self.block_size
        kind = self.manager.kv_cache_event_metadata[group]
        event = files().events.BlockStored(
            [block_hash], None, token_ids[:size], size, None, "GPU", None, [None], group, *kind
        )
        if self._num_lookahead:
            event.lookahead_token_ids = [token_ids[size : size + self._num_lookahead]]
        return files().events.KVEventBatch(ts=time.time(), events=[event])

    def hits(self, prompt: Prompt) -> list[int]:
        """Return what the manager says of a request that is not queued."""
        request = self._request(dataclasses.replace(prompt, is_reported=False))
        return [self.manager.get_computed_blocks(request)[1]]

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
        )

    def _go_on(self, request: Any, scheduled: dict[str, tuple[Any, int]]) -> None:
        """Give a running request its next slots, and preempt the last one until there are any."""
        num_left = request.num_tokens - request.num_computed_tokens
        num_drafted = NUM_DRAFTED if self._model.eagle and num_left == 1 else 0
        num_new = min(num_left, CHUNK) + num_drafted
        while self.manager.allocate_slots(request, num_new, num_lookahead_tokens=num_drafted) is None:
            victim = self._running[-1]
            self._preempt(victim)
            scheduled.pop(victim.request_id, None)
            if victim is request:
                return
        scheduled[request.request_id] = request, num_new

    def _admit(self, request: Any, scheduled: dict[str, tuple[Any, int]]) -> bool:
        blocks, num_hit, _ = self.manager.get_computed_blocks(request)
        num_new = min(request.num_tokens - num_hit, CHUNK)
        if self.manager.allocate_slots(request, num_new, num_hit, blocks, full_sequence_must_fit=True) is None:
            return False
        self._waiting.popleft()
        self._running.append(request)
        request.num_computed_tokens = num_hit
        scheduled[request.request_id] = request, num_new
        return True

    def _preempt(self, request: Any) -> None:
        self.manager.free(request)
        self._running.remove(request)
        request.num_computed_tokens = 0
        self._waiting.appendleft(request)

    def _computed(self, request: Any, num_new: int) -> bool:
        """Take over what a step computed; return whether the request is done."""
        request.num_computed_tokens += num_new
        num_drafted = request.num_computed_tokens - request.num_tokens
        if num_drafted < 0:
            return False
        num_accepted = self._rng.randint(0, num_drafted)
        request.num_computed_tokens -= num_drafted - num_accepted
        request.append_output_token_ids([self._rng.randrange(1000) for _ in range(1 + num_accepted)])
        return bool(request.num_output_tokens >= self._prompts[request.request_id][1])

    def _finish(self, request: Any) -> Prompt:
        self.manager.free(request)
        self._running.remove(request)
        prompt, _ = self._prompts.pop(request.request_id)
        return prompt.then(list(request.output_token_ids))


def publisher(port: int, replay_port: int | None, rank: int = 0) -> Any:
    """Return vLLM's publisher, bound to a port and the rank behind it."""
    replay = None if replay_port is None else f"tcp://*:{replay_port}"
    return files().events.ZmqEventPublisher(rank, f"tcp://*:{port}", replay)


def _spec(block_size: int, window: int | None) -> Any:
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": None}
    if window is None:
        return files().specs.FullAttentionSpec(**shape)
    return files().specs.SlidingWindowSpec(**shape, sliding_window=window)
