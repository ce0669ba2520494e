"""The oracle of the index service: what engines hold, in plain Python, and engines that tell it over real sockets.

Written from what engines mean (vLLM 0.33, SGLang 0.5.23) and from docs/wire-format.md, without hashing anything: a
block *is* its tokens behind its prefix. What is exact for a stock engine: everything it told since its process started
and nothing else, for as long as its replay socket still has what the wire lost. In detail:

- A store counts if it can be placed: its parent is held under the name it gives, its tokens fill its blocks, and its
  blocks are of the index's size. Otherwise all of it is left out. A chain ends before a name that it has already.
- A rank of vLLM holds copies, by engine hash and tier: a store adds one, and a removal takes one. Others hold a set. A
  block with two engine hashes is held until both are gone; an engine hash that is used again names the new block alone.
- Of several cache groups the one with the largest window shown so far is published; a larger one makes the rank start
  over. The others count, by name and on the GPU, once the published one has a block: an answer is then the longest
  prefix at whose end each has the blocks of its window, in all tiers alike. A publisher of Kvist's leaves them out.
- vLLM clears what is on the GPU, and perhaps what is held beside it, of which nothing counts from then on.
- An answer counts leading blocks held now. A tier counts with all that are faster; in between they may alternate.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import pytest

from kvist.indexer.service import IndexConfig
from kvist.indexer.service.service import IndexService

NUM_TIERS = 4
FULL, STATE = 1 << 62, 0
"""The window of full attention, larger than any other, and that of a group of states, smaller than any."""


class Scope(NamedTuple):
    """What besides tokens tells blocks apart."""

    lora_name: str | None = None
    cache_salt: str | None = None


BASE = Scope()
Block: TypeAlias = tuple[tuple[Scope, tuple[int, ...]], ...]
"""A block: the scope and the tokens of every block from the root to this one."""


class RankTruth:
    """What one rank of one engine process holds."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tiers: list[dict[int, Block]] = [{} for _ in range(NUM_TIERS)]
        self._window = 0
        self._group: int | None = None
        self.tells_groups = True
        self.is_vllm = False
        self._size = block_size
        self.num_ahead = 0
        """How many blocks of each group the engine needs behind a hit, and computes again."""
        self._has_offloaded = False
        self.has_forgotten = False
        """Whether blocks beside the GPU may be left of which nothing counts any more."""
        self.others: dict[int, tuple[int, int, Counter[int]]] = {}
        """Of each other group its window, its block size, and the copies of engine hashes that it holds."""
        self._copies: Counter[tuple[int, int]] = Counter()

    def stored(
        self,
        engine_hashes: Sequence[int],
        token_ids: Sequence[int],
        parent: int | None = None,
        tier: int = 0,
        *,
        block_size: int | None = None,
        scope: Scope = BASE,
        group: int | None = None,
        window: int = FULL,
        lookahead: Sequence[int] = (),
    ) -> None:
        """Take a chain; without tokens, blocks that another tier has and this one gets too.

        What a block is named by may be a token more, the one behind it.
        """
        size = self.block_size if block_size is None else block_size
        self._has_offloaded |= tier != 0
        if not self._is_published(group, window):
            if group is not None and group != self._group and self.tells_groups:
                _, _, held = self.others.setdefault(group, (window, size, Counter()))
                held.update(engine_hashes if tier == 0 else ())
            return
        if not token_ids:
            for engine_hash in engine_hashes:
                if (block := self.find(engine_hash)) is not None:
                    self._hold(engine_hash, block, tier)
            return
        self._size = size
        above = () if parent is None else self.find(parent)
        if above is None or size != self.block_size or len(token_ids) != size * len(engine_hashes):
            return
        if above:
            scope = Scope(scope.lora_name or above[-1][0].lora_name, scope.cache_salt or above[-1][0].cache_salt)
        for idx, engine_hash in enumerate(engine_hashes):
            if engine_hash in (parent, *engine_hashes[:idx]):
                return
            tokens = (*token_ids[idx * size : (idx + 1) * size], *lookahead[idx : idx + 1])
            above = (*above, (scope, tokens))
            self._hold(engine_hash, above, tier)

    def _hold(self, engine_hash: int, block: Block, tier: int) -> None:
        has_more = self.is_vllm and self.tiers[tier].get(engine_hash) == block
        self._copies[tier, engine_hash] = self._copies[tier, engine_hash] + 1 if has_more else 1
        self.tiers[tier][engine_hash] = block

    def removed(self, engine_hashes: Sequence[int], tier: int = 0, *, group: int | None = None) -> None:
        """Take removals; those of other cache groups are about other blocks."""
        if group is None or group == self._group:
            for engine_hash in engine_hashes:
                self._copies[tier, engine_hash] -= 1
                if self._copies[tier, engine_hash] <= 0:
                    self.tiers[tier].pop(engine_hash, None)
        elif group in self.others and tier == 0:
            window, size, held = self.others[group]
            held.subtract(engine_hashes)
            self.others[group] = window, size, +held

    def cleared(self) -> None:
        """Hold nothing that counts; the cache groups stay what they were."""
        self.has_forgotten = self.is_vllm and self._has_offloaded
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        for held in (*self.tiers, *(names for *_, names in self.others.values())):
            held.clear()

    @property
    def full_group(self) -> int:
        """Return the cache group with full attention that counts, or would if it came now."""
        return self._group if self._group is not None and self._window == FULL else 0

    def find(self, engine_hash: int) -> Block | None:
        """Return the block of this name in the fastest tier that has it."""
        return next((held[engine_hash] for held in self.tiers if engine_hash in held), None)

    def depths(self, blocks: Sequence[Block]) -> list[int]:
        """Return how many leading blocks a hit has, for each tier with all faster ones."""
        is_plain = not self.others and self._window in (0, FULL) and not self.num_ahead
        return self.leading(blocks) if is_plain or not self.tells_groups else [self._hit(blocks)] * NUM_TIERS

    def leading(self, blocks: Sequence[Block]) -> list[int]:
        """Return how many leading blocks are held of the group that counts, for each tier with all faster ones."""
        depths = []
        held: set[Block] = set()
        for tier in self.tiers:
            held.update(tier.values())
            depths.append(next((idx for idx, block in enumerate(blocks) if block not in held), len(blocks)))
        return depths

    def _hit(self, blocks: Sequence[Block]) -> int:
        names = {block: name for name, block in self.tiers[0].items()}
        named = [names.get(block) for block in blocks]
        groups = [(self._window, self.block_size, self.tiers[0]), *self.others.values()]
        ends = (end for end in range(len(blocks), 0, -1) if all(self._reaches(end, named, *each) for each in groups))
        return next(ends, 0)

    def _reaches(self, end: int, named: Sequence[int | None], window: int, size: int, held: Container[int]) -> bool:
        """Return whether a group holds what a hit needs that ends there."""
        if window == STATE:
            return named[end - 1] in held
        stride = size // self.block_size
        last = end + self.num_ahead * stride
        num_needed = len(named) if window == FULL else -(-(window - 1) // size) + self.num_ahead
        if end % stride or last > len(named):
            return False
        return all(named[place] in held for place in range(last - 1, -1, -stride)[:num_needed])

    def _is_published(self, group: int | None, window: int) -> bool:
        if window > self._window:
            if self._window:
                others = {each: (*sizes, held.copy()) for each, (*sizes, held) in self.others.items()}
                names = Counter(self.tiers[0].keys())
                self._hold_nothing()
                self.others = others
                if self._group is not None and self.tells_groups:
                    self.others[self._group] = self._window, self._size, names
            self._window, self._group = window, group
        return window == self._window and group == self._group


class FleetTruth:
    """What `/query` must answer: for each model the workers, for each worker the ranks."""

    def __init__(self, block_sizes: dict[str, int]) -> None:
        self.block_sizes = block_sizes
        self._ranks: dict[str, dict[int, dict[int, RankTruth]]] = {model: {} for model in block_sizes}

    def rank(self, model: str, worker: int, rank: int) -> RankTruth:
        """Return what a rank holds, to be told more."""
        ranks = self._ranks[model].setdefault(worker, {})
        return ranks.setdefault(rank, RankTruth(self.block_sizes[model]))

    def restarted(self, model: str, worker: int, ranks: Sequence[int]) -> None:
        """Forget what a process held."""
        for rank in ranks:
            self._ranks[model].get(worker, {}).pop(rank, None)

    def left(self, model: str, worker: int) -> None:
        """Forget a worker."""
        self._ranks[model].pop(worker, None)

    def answer(self, model: str, token_ids: Sequence[int], scope: Scope = BASE) -> dict[str, Any]:
        """Return the answer to a query, in tokens: `dp` and `scores` count GPU memory, `disk` every tier."""
        size = self.block_sizes[model]
        links = [(scope, tuple(token_ids[start : start + size])) for start in range(0, len(token_ids), size)]
        blocks = [tuple(links[: idx + 1]) for idx in range(len(token_ids) // size)]
        scores: dict[str, dict[str, int]] = {}
        instances: dict[str, dict[str, Any]] = {}
        for worker, ranks in self._ranks[model].items():
            rows = {str(rank): [size * depth for depth in truth.depths(blocks)] for rank, truth in ranks.items()}
            rows = {rank: row for rank, row in rows.items() if row[-1]}
            if not rows:
                continue
            gpu, cpu, _, disk = (max(row[tier] for row in rows.values()) for tier in range(NUM_TIERS))
            instances[str(worker)] = {
                "longest_matched": disk,
                "gpu": gpu,
                "dp": {rank: row[0] for rank, row in rows.items()},
                "cpu": cpu,
                "disk": disk,
            }
            if gpu:
                scores[str(worker)] = {rank: row[0] for rank, row in rows.items() if row[0]}
        return {"scores": scores, "frequencies": [], "instances": instances}


@pytest.fixture(scope="session")
def make_rank_truth() -> Callable[[int], RankTruth]:
    return RankTruth


@pytest.fixture(scope="session")
def make_fleet_truth() -> Callable[[dict[str, int]], FleetTruth]:
    return FleetTruth


_KINDS = {FULL: "full_attention", STATE: "mamba"}


class Wire(NamedTuple):
    """How an engine puts its events: as maps or arrays, with hashes as they are, signed or as raw bytes."""

    engine: str
    is_map: bool
    hash_form: str = "unsigned"

    @property
    def url_options(self) -> str:
        """Return what a subscriber must be told about the stream."""
        return "" if self.engine == "vllm" else f"?engine={self.engine}"

    def stored(
        self,
        engine_hashes: Sequence[int],
        token_ids: Sequence[int],
        parent: int | None = None,
        tier: int = 0,
        *,
        block_size: int,
        scope: Scope = BASE,
        group: int | None = None,
        window: int = FULL,
        lookahead: Sequence[int] = (),
        session_id: str | None = None,
    ) -> dict[str, Any] | list[Any]:
        """Return the event as msgpack will carry it; groups are vLLM's, and what maps alone have of its maps."""
        fields = {
            "type": "BlockStored",
            "block_hashes": [self._hash(engine_hash) for engine_hash in engine_hashes],
            "parent_block_hash": None if parent is None else self._hash(parent),
            "token_ids": list(token_ids),
            "block_size": block_size if token_ids else 0,
            "lora_id": 1 if scope.lora_name else None,
            "medium": self._medium(tier),
        }
        if self.engine == "sglang":
            fields |= {"token_ids": [*pairwise([*token_ids, lookahead[-1]])]} if lookahead else {}
            fields |= {"cache_salt": scope.cache_salt, "session_id": None, "lora_name": scope.lora_name}
            return fields if self.is_map else list(fields.values())
        keys = [key for key in (scope.lora_name, scope.cache_salt if parent is None else None) if key]
        later_keys = [scope.lora_name] if scope.lora_name else None
        fields |= {
            "lora_name": scope.lora_name,
            "extra_keys": [keys, *[later_keys] * (len(engine_hashes) - 1)] if keys and token_ids else None,
            "group_idx": group,
            "kv_cache_spec_kind": None if group is None else _KINDS.get(window, "sliding_window"),
            "kv_cache_spec_sliding_window": None if group is None or window in _KINDS else window,
            "locality": "REMOTE" if tier == 3 else None,
        }
        if not self.is_map:
            return list(fields.values())
        fields |= {"lookahead_token_ids": [[token] for token in lookahead]} if lookahead else {}
        return fields | ({} if session_id is None else {"session_id": session_id})

    def removed(
        self, engine_hashes: Sequence[int], tier: int = 0, *, group: int | None = None
    ) -> dict[str, Any] | list[Any]:
        """Return the event as msgpack will carry it."""
        fields = {"type": "BlockRemoved", "block_hashes": [self._hash(h) for h in engine_hashes]}
        fields |= {"medium": self._medium(tier)}
        if self.engine == "vllm":
            fields |= {"group_idx": group, "locality": "REMOTE" if tier == 3 else None}
        return fields if self.is_map else list(fields.values())

    def cleared(self) -> dict[str, Any] | list[Any]:
        """Return the event as msgpack will carry it."""
        return {"type": "AllBlocksCleared"} if self.is_map else ["AllBlocksCleared"]

    def _medium(self, tier: int) -> str:
        media = (
            ("GPU", "CPU", "STORAGE", "STORAGE") if self.engine == "vllm" else ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")
        )
        return media[tier]

    def _hash(self, engine_hash: int) -> int | bytes:
        if self.hash_form == "bytes":
            return hashlib.sha256(engine_hash.to_bytes(8, "big")).digest()[:24] + engine_hash.to_bytes(8, "big")
        return engine_hash - (1 << 64) if self.hash_form == "signed" and engine_hash >> 63 else engine_hash


WIRES = (
    Wire("vllm", is_map=True),
    Wire("vllm", is_map=False),
    Wire("vllm", is_map=True, hash_form="bytes"),
    Wire("sglang", is_map=True, hash_form="signed"),
    Wire("sglang", is_map=False, hash_form="signed"),
)


@pytest.fixture(scope="session")
def wires() -> tuple[Wire, ...]:
    return WIRES


@pytest.fixture(scope="session")
def make_scope() -> Callable[..., Scope]:
    return Scope


class Service:
    """An index service in a thread with an event loop of its own, and a client that waits for each answer."""

    def __init__(self) -> None:
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._is_started.wait(60)
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    async def _serve(self) -> None:
        async with IndexService(IndexConfig(port=0)) as service:
            self.url = service.url
            self.port = int(service.url.rpartition(":")[2])
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._is_started.set()
            await self._stop.wait()

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        status, content = self.send(method, path, b"" if body is None else json.dumps(body).encode())
        return status, json.loads(content)

    def send(self, method: str, path: str, content: bytes, **headers: str) -> tuple[int, bytes]:
        """Return the status and the body of an answer to whatever is sent."""
        self.connection.request(method, path, content, {"content-type": "application/json"} | headers)
        response = self.connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        """Stop the service."""
        self.connection.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()
