"""SGLang's own radix cache and event publisher, with a scheduler's loop around them; see verify_engines.py.

SGLang's files decide what is cached and reported, except for one hash that SGLang compiles: `chained_hash` replaces it.
Tensors of slots are NumPy's where torch is not installed. With HiCache, SGLang's unified cache decides, on its tree in
Python; `_Copier` replaces the controller that copies between device and host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import logging
import random
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from _engine_files import StandIn, engine_files
from _engine_traffic import Prompt

REAL = (
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.events",
    "sglang.srt.mem_cache.evict_policy",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.environ",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.unified_cache.cache_action",
    "sglang.srt.mem_cache.unified_cache.component_type",
    "sglang.srt.mem_cache.unified_cache.components",
    "sglang.srt.mem_cache.unified_cache.components.base",
    "sglang.srt.mem_cache.unified_cache.components.full",
    "sglang.srt.mem_cache.unified_cache.tree_core_registry",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.mem_cache.utils",
)
HAS_TORCH = importlib.util.find_spec("torch") is not None
"""Without it there is no HiCache."""
OUTSIDE = {"pydantic"} if HAS_TORCH else {"torch", "pydantic"}
MAX_RUNNING = 6
CHUNK = 128
LORA_ID = "{:0>32}".format


class _Slots(np.ndarray):  # type: ignore[type-arg]
    def clone(self) -> _Slots:
        return self.copy()


def _slots(values: Any, **_options: object) -> _Slots:
    return np.array(values, dtype=np.int64).view(_Slots)


def chained_hash(key: Any, prior: bytes | None, page_size: int | None = None) -> str | list[str]:
    """Return SHA-256 of a key's tokens behind a prior digest; of each page, chained, if there is a page size."""
    tokens, width = array("I", key.raw_token_ids()), 2 if key.is_bigram else 1
    size = page_size or len(key)
    digests = []
    for start in range(0, len(key), size):
        end = min(start + size, len(key))
        units = (
            tokens[start:end]
            if width == 1
            else array("I", (t for at in range(start, end) for t in tokens[at : at + 2]))
        )
        prior = hashlib.sha256((prior or b"") + units.tobytes()).digest()
        digests.append(prior.hex())
    return digests if page_size else digests[-1]


class _NoSessions:
    """What SGLang's streaming sessions are to a cache that has none."""

    def __init__(self, _cache: Any) -> None:
        self.slots: dict[str, Any] = {}

    def try_match_prefix(self, _params: Any) -> None:
        """Find none."""


def _unchecked(*args: Any, **_options: object) -> Any:
    return args[0] if args else _unchecked


PLAYED = {
    "sglang.srt.mem_cache.allocator.page_interleave": {"page_interleave_shard_size": lambda _allocator: 1},
    "sglang.srt.mem_cache.cpp_utils.native_hash": {"get_native_hash": chained_hash},
    "sglang.srt.session.streaming_session": {"StreamingSession": _NoSessions, "is_virtual_node": lambda _node: False},
    "sglang.srt.utils.rank_consensus_checker": {"rank_consensus": _unchecked},
}
if not HAS_TORCH:
    PLAYED["torch"] = {"tensor": _slots, "empty": lambda *_args, **_options: _slots([])}
MODULES = {
    "base": "mem_cache.base_prefix_cache",
    "events": "disaggregation.kv_events",
    "params": "mem_cache.cache_init_params",
    "radix": "mem_cache.radix_cache",
    "recording": "mem_cache.events",
}
HICACHE_MODULES = {
    "core": "mem_cache.unified_cache.unified_tree_core",
    "kinds": "mem_cache.unified_cache.component_type",
    "unified": "mem_cache.unified_radix_cache",
}


@cache
def files() -> SimpleNamespace:
    """Return SGLang's modules; raises FileNotFoundError without `make engines`."""
    modules = MODULES | (HICACHE_MODULES if HAS_TORCH else {})
    with engine_files("sglang", REAL, OUTSIDE, PLAYED):
        sglang = {each: importlib.import_module(f"sglang.srt.{name}") for each, name in modules.items()}
    logging.getLogger("sglang").setLevel(logging.ERROR)
    return SimpleNamespace(**sglang)


def _new_slots(num_tokens: int) -> Any:
    """Return slots of some tokens; which they are is nobody's business here."""
    if not HAS_TORCH:
        return _slots(range(num_tokens))
    import torch

    return torch.arange(num_tokens)


@dataclass(frozen=True, slots=True)
class SglangModel:
    """What a model's cache looks like."""

    page_size: int = 16
    num_tokens: int = 2_560
    is_eagle: bool = False
    loras: tuple[str, ...] = ()
    num_host_tokens: int = 0
    """Of HiCache, which keeps in the host's memory what goes from the GPU's."""


@dataclass
class _Pool:
    """The slots of tokens: how many are free."""

    num_free: int
    device: str = "cpu"

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        """Take slots back."""
        del start_pos
        self.num_free += len(slots)

    def free(self, slots: Any, pool: Any) -> None:
        """Take slots of the host back."""
        del pool
        self.free_segment(slots)

    def available_size(self) -> int:
        """Return how many are free."""
        return self.num_free

    def mamba_full_cache_donor(self) -> None:
        """Return nobody: there are no states."""

    def take(self, num_tokens: int) -> Any | None:
        """Give some away, none if there are too few."""
        if self.num_free < num_tokens:
            return None
        self.num_free -= num_tokens
        return _new_slots(num_tokens)


class _Copier:
    """HiCache's controller, as far as a cache asks it: what it is to copy is there at the end of the step."""

    write_policy = "write_through"
    enable_storage = False

    def __init__(self, device: _Pool, host: _Pool) -> None:
        self._device, self.mem_pool_host = device, host
        host.anchor_entry = SimpleNamespace(host_pool=SimpleNamespace(shared_allocation_domain=None))  # type: ignore[attr-defined]
        self.ack_write_queue: list[Any] = []
        self.ack_load_queue: list[Any] = []

    def write(self, device_indices: Any, node_id: int, **_options: object) -> Any | None:
        """Copy from the device."""
        return self._copied(self.mem_pool_host, len(device_indices), node_id, self.ack_write_queue)

    def load(self, host_indices: Any, node_id: int, **_options: object) -> Any | None:
        """Copy to the device."""
        return self._copied(self._device, len(host_indices), node_id, self.ack_load_queue)

    def _copied(self, pool: _Pool, num_tokens: int, node_id: int, acks: list[Any]) -> Any | None:
        slots = pool.take(num_tokens)
        if slots is not None:
            event = SimpleNamespace(synchronize=lambda: None)
            acks.append(SimpleNamespace(finish_event=event, node_ids=[node_id]))
        return slots

    def start_writing(self) -> None:
        """Begin nothing: it is done."""


@dataclass
class _Request:
    prompt: Prompt
    num_outputs: int
    tokens: list[int]
    lock: Any = None
    num_cached: int = 0
    """Of its tokens those that the tree owns, or held when it began."""
    num_computed: int = 0
    outputs: list[int] = field(default_factory=list)


class SglangEngine:
    """One rank of SGLang."""

    def __init__(self, model: SglangModel, rng: random.Random) -> None:
        sglang = files()
        self.num_tiers = 2 if model.num_host_tokens else 1
        self.block_size, self.names_ahead = model.page_size, model.is_eagle
        self._model, self._rng = model, rng
        self._pool = _Pool(model.num_tokens)
        names = sglang.recording.KvEventLoraNames()
        for name in model.loras:
            names.register(SimpleNamespace(lora_id=LORA_ID(name), extra_key=LORA_ID(name)), name)
        params = sglang.params.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self._pool,
            page_size=model.page_size,
            is_eagle=model.is_eagle,
            enable_kv_cache_events=True,
            kv_event_lora_names=names,
        )
        self.cache = _hicache(params, model, self._pool) if model.num_host_tokens else sglang.radix.RadixCache(params)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []

    @property
    def num_waiting(self) -> int:
        """Return how many requests do not run."""
        return len(self._waiting)

    def submit(self, prompt: Prompt, num_outputs: int) -> None:
        """Queue a request."""
        self._waiting.append(_Request(prompt, num_outputs, list(prompt.token_ids)))

    def step(self) -> list[Prompt]:
        """Run one step; return the conversations that ended."""
        if self._model.num_host_tokens:
            self.cache.writing_check(finish_count=len(self.cache.cache_controller.ack_write_queue))
            self.cache.loading_check(finish_count=len(self.cache.cache_controller.ack_load_queue))
        while self._waiting and len(self._running) < MAX_RUNNING:
            if not self._admit(self._waiting[0]):
                break
        ended = []
        for request in [*self._running]:
            num_new = min(CHUNK, len(request.tokens) - request.num_computed)
            if not self._take_slots(num_new):
                self._retract(self._running[-1])
                break
            request.num_computed += num_new
            if request.num_computed < len(request.tokens):
                self._checkpoint(request)
            elif len(request.outputs) >= request.num_outputs:
                ended.append(self._finish(request))
            else:
                if not request.outputs:
                    self._checkpoint(request)
                request.outputs.append(self._rng.randrange(1000))
                request.tokens.append(request.outputs[-1])
        return ended

    def reset(self) -> None:
        """Drop the whole cache; what runs begins anew."""
        for request in self._running[::-1]:
            self._retract(request)
        if self._model.num_host_tokens:
            self.cache.cache_controller = None  # whose pool is new, too
            self.cache.reset()
            self._pool.num_free = self._model.num_tokens
            _attach_host(self.cache, self._model, self._pool)
        else:
            self.cache.reset()
            self._pool.num_free = self._model.num_tokens

    def take_batch(self) -> Any | None:
        """Return the events since the last call."""
        events = self.cache.take_events()
        return files().events.KVEventBatch(ts=time.time(), events=events) if events else None

    def mark(self, token_ids: list[int], block_hash: int) -> Any:
        """Return a batch that stores one block."""
        tokens: list[Any] = token_ids[: self.block_size]
        if self._model.is_eagle:
            tokens = [(token, token_ids[idx + 1]) for idx, token in enumerate(tokens)]
        event = files().events.BlockStored([block_hash >> 1], None, tokens, self.block_size, None, "GPU")
        return files().events.KVEventBatch(ts=time.time(), events=[event])

    def hits(self, prompt: Prompt) -> list[int]:
        """Return what the tree says of a prompt without its last token, which is always computed."""
        found = self._match(prompt, prompt.token_ids[:-1])
        return [found.device_prefix_len, found.device_prefix_len + found.host_hit_length][: self.num_tiers]

    def _match(self, prompt: Prompt, token_ids: Any) -> Any:
        return self.cache.match_prefix(files().base.MatchPrefixParams(key=self._key(prompt, token_ids)))

    def _key(self, prompt: Prompt, token_ids: Any) -> Any:
        extra_key = LORA_ID(prompt.lora_name) if prompt.lora_name else None
        return files().radix.RadixKey(array("q", token_ids), extra_key, cache_salt=prompt.cache_salt)

    def _admit(self, request: _Request) -> bool:
        found = self._match(request.prompt, request.tokens[:-1])
        num_left = len(request.tokens) - found.device_prefix_len
        if num_left + 64 > self._pool.num_free + self.cache.evictable_size():
            return False
        request.lock, request.num_cached = self.cache.lock(found.last_device_node), found.device_prefix_len
        if found.host_hit_length:
            self._load_back(request, found)
        request.num_computed = request.num_cached
        self._waiting.popleft()
        self._running.append(request)
        return True

    def _load_back(self, request: _Request, found: Any) -> None:
        """Let what the host holds be copied to the device, if there is room."""
        base, waiting = (
            files().base,
            SimpleNamespace(
                last_node=found.last_device_node, swa_host_hit_length=0, mamba_host_hit_length=0, kv=StandIn()
            ),
        )
        params = base.InitLoadBackParams(found.best_match_node, found.host_hit_length, req=waiting)
        num_loaded, node = self.cache.init_load_back(params)
        if num_loaded:
            self.cache.unlock(request.lock)
            request.lock = self.cache.lock(node)
            request.num_cached += num_loaded

    def _take_slots(self, num_tokens: int) -> bool:
        if self._pool.num_free < num_tokens:
            self.cache.evict(files().base.EvictParams(num_tokens=num_tokens - self._pool.num_free))
        if self._pool.num_free < num_tokens:
            return False
        self._pool.num_free -= num_tokens
        return True

    def _checkpoint(self, request: _Request) -> None:
        """Hand over to the tree what is computed; what it has already is freed."""
        tokens = request.tokens[: request.num_computed]
        key, slots = self._key(request.prompt, tokens).page_aligned(self.block_size), _new_slots(len(tokens))
        result = self.cache.insert(files().base.InsertParams(key=key, value=slots, prev_prefix_len=request.num_cached))
        if not self._model.num_host_tokens:  # else the cache itself frees what it had already
            self._pool.num_free += max(0, result.prefix_len - request.num_cached)
        owned = self._match(request.prompt, tokens)
        self.cache.unlock(request.lock)
        request.lock, request.num_cached = self.cache.lock(owned.last_device_node), owned.device_prefix_len

    def _release(self, request: _Request) -> None:
        self.cache.unlock(request.lock)
        self._pool.num_free += request.num_computed - request.num_cached
        self._running.remove(request)

    def _finish(self, request: _Request) -> Prompt:
        self._checkpoint(request)
        self._release(request)
        return request.prompt.then(request.outputs)

    def _retract(self, request: _Request) -> None:
        self._release(request)
        request.num_computed = request.num_cached = 0
        self._waiting.appendleft(request)


def _hicache(params: Any, model: SglangModel, pool: _Pool) -> Any:
    """Return SGLang's unified cache with a host's memory behind the device's."""
    sglang = files()
    params = dataclasses.replace(params, tree_components=(sglang.kinds.ComponentType.FULL,), tree_core_backend="python")
    unified = sglang.unified.UnifiedRadixCache(params)
    unified.tree_core.set_hicache_enabled()
    unified.write_through_threshold, unified.is_write_back, unified.load_back_threshold = 1, False, 10
    _attach_host(unified, model, pool)
    return unified


def _attach_host(unified: Any, model: SglangModel, pool: _Pool) -> None:
    host = _Pool(model.num_host_tokens)
    unified.cache_controller, unified.host_pool_group = _Copier(pool, host), host
    unified.components[files().kinds.ComponentType.FULL]._full_kv_pool_host = host


def publisher(port: int, replay_port: int | None, rank: int = 0) -> Any:
    """Return SGLang's publisher, bound to a port and the rank behind it."""
    replay = None if replay_port is None else f"tcp://*:{replay_port}"
    return files().events.ZmqEventPublisher(rank, f"tcp://*:{port}", replay)
