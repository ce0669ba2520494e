"""SGLang's own radix cache and event publisher, with a scheduler's loop around them; see verify_engines.py.

What is cached and what is told of it is decided by SGLang's files, but for one hash that it compiles: `chained_hash`
stands in for it. Tensors of slots are NumPy's.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from _engine_files import engine_files
from _engine_traffic import Prompt

REAL = (
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.events",
    "sglang.srt.mem_cache.evict_policy",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.mem_cache.unified_cache.component_type",
    "sglang.srt.mem_cache.utils",
)
OUTSIDE = {"torch", "pydantic"}
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


PLAYED = {
    "sglang.srt.mem_cache.cpp_utils.native_hash": {"get_native_hash": chained_hash},
    "torch": {"tensor": _slots, "empty": lambda *_args, **_options: _slots([])},
}


@cache
def files() -> SimpleNamespace:
    """Return SGLang's modules; raises FileNotFoundError without `make engines`."""
    with engine_files("sglang", REAL, OUTSIDE, PLAYED):
        names = ("disaggregation.kv_events", "mem_cache.base_prefix_cache", "mem_cache.cache_init_params")
        events, base, params = (importlib.import_module(f"sglang.srt.{name}") for name in names)
        radix, recording = (
            importlib.import_module(f"sglang.srt.mem_cache.{name}") for name in ("radix_cache", "events")
        )
    return SimpleNamespace(events=events, base=base, params=params, radix=radix, recording=recording)


@dataclass(frozen=True, slots=True)
class SglangModel:
    """What a model's cache looks like."""

    page_size: int = 16
    num_tokens: int = 2_560
    is_eagle: bool = False
    loras: tuple[str, ...] = ()


@dataclass
class _Pool:
    """The slots of tokens: how many are free. Which is nobody's business here."""

    num_free: int
    device: str = "cpu"

    def free_segment(self, slots: Any, start_pos: int) -> None:
        del start_pos
        self.num_free += len(slots)


@dataclass
class _Request:
    prompt: Prompt
    num_outputs: int
    tokens: list[int]
    node: Any = None
    num_cached: int = 0
    """Of its tokens those that the tree owns, or held when it began."""
    num_computed: int = 0
    outputs: list[int] = field(default_factory=list)


class SglangEngine:
    """One rank of SGLang."""

    num_tiers = 1

    def __init__(self, model: SglangModel, rng: random.Random) -> None:
        sglang = files()
        self.block_size, self.names_ahead = model.page_size, model.is_eagle
        self._model, self._rng = model, rng
        self._pool = _Pool(model.num_tokens)
        names = sglang.recording.KvEventLoraNames()
        for name in model.loras:
            names.register(SimpleNamespace(lora_id=LORA_ID(name), extra_key=LORA_ID(name)), name)
        self.cache = sglang.radix.RadixCache(
            sglang.params.CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self._pool,
                page_size=model.page_size,
                is_eagle=model.is_eagle,
                enable_kv_cache_events=True,
                kv_event_lora_names=names,
            )
        )
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []

    def submit(self, prompt: Prompt, num_outputs: int) -> None:
        """Queue a request."""
        self._waiting.append(_Request(prompt, num_outputs, list(prompt.token_ids)))

    def step(self) -> list[Prompt]:
        """Run one step; return the conversations that ended."""
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
        return [self._match(prompt, prompt.token_ids[:-1]).device_prefix_len]

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
        request.node, request.num_cached = found.last_device_node, found.device_prefix_len
        request.num_computed = request.num_cached
        self.cache.inc_lock_ref(request.node)
        self._waiting.popleft()
        self._running.append(request)
        return True

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
        key = self._key(request.prompt, tokens)
        result = self.cache.insert(files().base.InsertParams(key=key, value=_slots(tokens)))
        owned = self._match(request.prompt, tokens)
        self._pool.num_free += max(0, result.prefix_len - request.num_cached)
        self.cache.dec_lock_ref(request.node)
        request.node, request.num_cached = owned.last_device_node, owned.device_prefix_len
        self.cache.inc_lock_ref(request.node)

    def _release(self, request: _Request) -> None:
        self.cache.dec_lock_ref(request.node)
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


def publisher(port: int, replay_port: int | None, rank: int = 0) -> Any:
    """Return SGLang's publisher, bound to a port and the rank behind it."""
    replay = None if replay_port is None else f"tcp://*:{replay_port}"
    return files().events.ZmqEventPublisher(rank, f"tcp://*:{port}", replay)
