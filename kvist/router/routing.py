"""One decision: which workers could take a request, what each holds of its prompt, and whom the policy chooses.

Nothing here sends or counts, so `POST /route` explains a decision by making it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from http import HTTPStatus
from math import inf
from random import Random
from types import MappingProxyType
from typing import NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.openai.errors import RequestError
from kvist.router.fleet.fleet import RANKS_MAX_AGE_S, Fleet
from kvist.router.fleet.load import ActiveRequest, LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.worker import Worker
from kvist.router.index import Caches, Overlaps, RankStatus
from kvist.router.policy.decision import Candidate, Decision, Load, Prompt, Role, Weighing, decide, usable_tokens
from kvist.router.policy.priced import PricedPolicy, Prices, Pull
from kvist.router.policy.settings import FETCH_SCALE, PriceSettings
from kvist.router.prefill.dialect import FALLBACKS, OBSTACLES, Dialect, Local, Side
from kvist.router.prefill.handover import DIALECTS, KVIST, Plan, why_local
from kvist.router.prefill.several import one_answer
from kvist.router.prefill.sglang import DEFAULT_BOOTSTRAP_PORT
from kvist.router.prompts import APIS, Ask
from kvist.router.recording import Hashes
from kvist.router.regret import Routed, sample_of
from kvist.router.usage import ReportedUsage

_NOWHERE = (0,) * len(Tier)
_MANY_LOOKS, _LOOK_INTERVAL = 256, 16
"""After so many prompts in a row of which no engine with EAGLE held any, only each 16th is looked for there."""


class Known(Protocol):
    """What decisions are made from."""

    fleet: Fleet
    models: Models
    load: LoadTracker

    @property
    def index(self) -> Caches | None:
        """What is known of caches, None where no policy looks at them."""


class Prefix(NamedTuple):
    """What is known of a prompt: which rank holds how much of it, and what its full blocks are called."""

    overlaps: Overlaps = {}  # noqa: RUF012 - nobody writes to it
    block_hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    def held_tokens(self, prompt: Prompt) -> int:
        """Return the most that any rank holds, in any tier."""
        deepest = max([depths[-1] for depths in self.overlaps.values()], default=0)
        return usable_tokens([deepest], prompt)


class _Ranks(NamedTuple):
    """The ranks of some workers, as they were up to `RANKS_MAX_AGE_S` ago, and their columns on the board."""

    statuses: list[RankStatus]
    columns: NDArray[np.intp]
    num_blocks: list[int]
    fetch_token_s: NDArray[np.float64]
    cache_blocks: list[tuple[int | None, str | None]]


class Routing:
    """Makes decisions from the fleet, its load and its caches as they are now."""

    def __init__(self, known: Known, random: Random, now_s: Callable[[], float]) -> None:
        """Decide by each model's policy."""
        self._fleet, self._models, self._load, self._index = known.fleet, known.models, known.load, known.index
        self._pricing: dict[tuple[PriceSettings, int], PricedPolicy] = {}
        self._ranks: dict[tuple[Worker, ...], _Ranks] = {}
        self._ranks_known_at_s = 0.0
        self._num_vain_looks = 0
        self._random = random
        self._now_s = now_s

    def prefix(self, ask: Ask) -> Prefix | None:
        """Return what is known of the prompt; nothing where that is not possible, None where it will be in a moment."""
        if self._index is None or not self._index.has_joined or ask.token_ids is None:
            return Prefix()
        sizes = self._fleet.block_sizes(ask.model)
        prefix = self._matched(ask, ask.token_ids, sizes.unit, self._index)
        for block_size in sizes.each:
            if prefix is None or block_size == sizes.unit:
                continue
            others = self._matched(ask, ask.token_ids, block_size, self._index)
            if others is None:
                return None
            scale = block_size // sizes.unit
            scaled = {rank: tuple(depth * scale for depth in depths) for rank, depths in others.overlaps.items()}
            prefix = Prefix({**prefix.overlaps, **scaled}, prefix.block_hashes)
        return prefix

    def _matched(self, ask: Ask, token_ids: NDArray[np.uint32], block_size: int, index: Caches) -> Prefix | None:
        """Return what workers with blocks of this size hold."""
        num_usable_tokens = (len(token_ids) - 1) // block_size * block_size
        if num_usable_tokens <= 0:
            return Prefix()
        hashes_of = self._hashes_of(ask, block_size)
        block_hashes = hashes_of(token_ids)
        overlaps = index.match(block_hashes, num_usable_tokens // block_size)
        if overlaps is None:
            return None
        # Engines with EAGLE name blocks by one token more: a look at the first block tells whether any holds this one.
        self._num_vain_looks += 1
        is_looked_for = self._num_vain_looks <= _MANY_LOOKS or self._num_vain_looks % _LOOK_INTERVAL == 0
        if is_looked_for and index.match(hashes_of(token_ids[: block_size + 1], is_eagle=True)):
            self._num_vain_looks = 0
            eagle_hashes = hashes_of(token_ids[: num_usable_tokens + 1], is_eagle=True)
            found = dict(index.match(eagle_hashes) or {})
            if num_usable_tokens + 1 == len(token_ids):  # that one is the last, at which SGLang does not look
                for rank, depths in found.items():
                    if (worker := self._fleet.get(rank.worker)) is not None and worker.engine == "sglang":
                        found[rank] = tuple(min(depth, len(eagle_hashes) - 1) for depth in depths)
            overlaps = {**overlaps, **found}
        return Prefix(self._where_rendered_alike(ask, overlaps, block_size, index), block_hashes)

    def _where_rendered_alike(self, ask: Ask, overlaps: Overlaps, block_size: int, index: Caches) -> Overlaps:
        """Return the overlaps without blocks that a worker may know by other tokens than the router's."""
        limits = self._fleet.renderings.limits(ask.chat, ask.fields)
        limited = {}
        for target, depths in overlaps.items() if limits else ():
            num_same_tokens = limits.get(target.worker)
            if num_same_tokens is not None and not index.is_expecting(target.worker):  # the router's own tokens
                # The token behind a block may be in its name, too.
                limit = max(0, num_same_tokens - 1) // block_size
                limited[target] = tuple(min(depth, limit) for depth in depths)
        return {**overlaps, **limited} if limited else overlaps

    def block_hashes(self, ask: Ask, worker: str, first_token: int, num_tokens: int) -> list[int]:
        """Return the names of the worker's blocks that the prompt's first tokens fill, from those of `first_token` on.

        There are none where its tokens are not known; the worker may know only the first of them by those tokens.
        """
        num_tokens = min(num_tokens, self._fleet.renderings.limits(ask.chat, ask.fields).get(worker, num_tokens))
        if self._index is None or not self._index.has_joined or ask.token_ids is None:
            return []
        block_size = self._fleet.block_size_of(worker, ask.model)
        hashes: list[int] = self._hashes_of(ask, block_size)(ask.token_ids[:num_tokens]).tolist()
        return hashes[first_token // block_size :]

    def naming(self, ask: Ask | None, prefix: Prefix) -> tuple[Hashes, int, int | None]:
        """Return what names a prompt's blocks, on any thread, how many there are, and of how many tokens they are."""
        if ask is None or (token_ids := ask.token_ids) is None:
            return lambda: prefix.block_hashes, 0, None
        block_size, lora_name = self._fleet.block_sizes(ask.model).unit, self._adapter_of(ask)
        num_blocks = len(token_ids) // block_size
        if num_blocks == len(prefix.block_hashes):
            return lambda: prefix.block_hashes, num_blocks, block_size
        hashes = partial(block_hashes, token_ids, block_size, lora_name=lora_name, cache_salt=ask.cache_salt)
        return hashes, num_blocks, block_size

    def work_of(self, ask: Ask) -> float:
        """Return what it is to compute a prompt where most of it is held, in units of work (`policy.work`)."""
        prompt = Prompt(ask.num_tokens, self._fleet.block_sizes(ask.model).unit)
        held, policy = (self.prefix(ask) or Prefix()).held_tokens(prompt), self._models.policy(ask.model).policy
        if isinstance(policy, PriceSettings):
            return float(policy.work_of(ask.num_tokens) - policy.work_of(held))
        return ask.num_tokens - held

    def computed(self, ask: Ask, worker: str) -> None:
        """Take note that a worker has computed the prompt: of one that streams no events nothing else is known."""
        if self._index is not None and ask.token_ids is not None and self._index.is_expecting(worker):
            hashes = self._hashes_of(ask, self._fleet.block_size_of(worker, ask.model))(ask.token_ids)
            if len(hashes):
                self._index.computed(worker, hashes)

    def plan(
        self,
        path: str,
        ask: Ask,
        prefix: Prefix,
        excluded: Collection[str] = (),
        full: Mapping[str, float] = MappingProxyType({}),
        local: Local | None = None,
    ) -> Plan:
        """Return who answers among the workers that may take the request, and who computes its prompt for it.

        Those that are full, for so many seconds, are chosen where they are worth waiting for by a policy that prices
        that, else only where nobody else can do it. A reason keeps the request local. Prefill workers do all of a
        request where nobody else is left, if they do anything alone.
        Raises RequestError: 404 when no worker has the model, 400 when those that have it do nothing alone and cannot
        do this together, 503 when none can take requests now.
        """
        if ask.model is None and ask.worker is None and ask.fields and self._fleet.has_several_models:
            message = f"model: missing, expected one of the models served: {self._model_names()}"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="model", code="model_missing")
        can_pull = self._fleet.has_pulls and not self._fleet.has_roles and local is None
        holder = self._holder(path, ask, prefix, excluded) if can_pull else None
        room_s: dict[str, float] = {}
        if full:
            is_priced = isinstance(self._models.policy(ask.model).policy, PriceSettings) and not self._fleet.has_roles
            room_s = {url: wait_s for url, wait_s in full.items() if is_priced and wait_s < inf}
            if self.has_alternative(path, ask, (others := {*excluded, *(full.keys() - room_s.keys())})):
                excluded = others
        everyone = self._fleet.routable(ask.model, excluded)
        if not everyone:
            raise self._refusal(ask.model)
        workers = everyone if ask.worker is None else [each for each in everyone if each.url == ask.worker] or everyone
        if not self._fleet.has_roles:
            decision = self._decide(ask, prefix, workers, holder=holder, room_s=room_s)
            return self._plan_pull(ask, decision, holder)
        whole = [worker for worker in workers if self.can_do_all(path, worker)]
        whole = [worker for worker in whole if worker.role is not Role.PREFILL] or whole
        answer = self._decide(ask, prefix, whole) if whole else None
        if answer is not None and not self._fleet.has_prefill_workers:
            return Plan(answer)
        paired, reason = self._paired(path, ask, everyone)
        if reason is Local.SEVERAL_SEQUENCES and local is None and (one := one_answer(path, ask)) is not None:
            plan = self.plan(path, one, prefix, excluded)
            if plan.prefill is not None:
                return msgspec.structs.replace(plan, is_several=True)
        if answer is None:
            local = local if local in FALLBACKS else reason
        elif local is None:
            obstacle = reason if reason in OBSTACLES else None
            local = obstacle or why_local(answer, self._models.policy(ask.model).max_local_prefill_tokens) or reason
        if local is None:
            prefill = self._decide(ask, prefix, paired)
            ranks = [] if ask.prefill_rank is None else [each.target for each in prefill.candidates]
            if ask.prefill_rank in ranks:
                prefill = prefill.choosing(ranks.index(ask.prefill_rank))
            worker, p = self._side(prefill)
            decode = self._decide_decode(ask, prefix, worker, everyone)
            assert decode is not None
            dialect, (_, d) = self._dialect_of(worker), self._side(decode)
            return Plan(decode, prefill, None, dialect, *dialect.begin(path, ask, p, d, self._random))
        if answer is None:
            raise RequestError(
                HTTPStatus.BAD_REQUEST if local in OBSTACLES else HTTPStatus.SERVICE_UNAVAILABLE,
                f"no worker can do this alone, and no two can together ({local})",
                code="no_pair",
            )
        return Plan(answer, None, local)

    def _holder(self, path: str, ask: Ask, prefix: Prefix, excluded: Collection[str]) -> Candidate | None:
        """Return who holds most of the prompt, however busy, of those that it can be fetched from; of equals anyone."""
        if not prefix.overlaps or KVIST.obstacle(path, ask) is not None:
            return None
        workers = [worker for worker in self._fleet.routable(ask.model, excluded) if worker.identity.tokens_per_s]
        holders = [_candidate(rank, prefix) for worker in workers for rank in self._fleet.ranks(worker)]
        return max(holders, key=lambda each: (each.overlap_blocks[:1], self._random.random()), default=None)

    def _plan_pull(self, ask: Ask, answer: Decision, holder: Candidate | None) -> Plan:
        """Return the plan in which who answers fetches what the holder has, if that is part of its price."""
        num_fetched = 0 if answer.prices is None else int(answer.prices.fetched_tokens[answer.chosen_idx])
        if holder is None or not num_fetched:
            return Plan(answer)
        num_tokens = usable_tokens(holder.overlap_blocks[:1], answer.prompt)
        prompt, weighed = Prompt(num_tokens, answer.prompt.block_size), ([holder], Weighing("holder", [1.0]))
        asked = Decision(answer.policy, prompt, holder, 0, num_tokens, lambda: weighed)
        fields = KVIST.ask_for_prefix(ask, num_tokens)
        return Plan(answer, asked, dialect=KVIST, fields=fields, pulled_tokens=num_fetched)

    def decode_decision(
        self, ask: Ask, prefix: Prefix, prefill_worker: str, excluded: Collection[str] = ()
    ) -> Decision | None:
        """Return who goes on with what a prefill worker computed: decode workers before those that do both."""
        worker = self._fleet.get(prefill_worker)
        if worker is None:  # it was removed
            return None
        return self._decide_decode(ask, prefix, worker, self._fleet.routable(ask.model, excluded))

    def can_do_all(self, path: str, worker: Worker) -> bool:
        """Return whether the worker needs no other for a request of this endpoint."""
        return worker.role is Role.BOTH or self._dialect_of(worker).works_alone or path not in APIS

    def _paired(self, path: str, ask: Ask, workers: list[Worker]) -> tuple[list[Worker], Local | None]:
        """Return those that can compute the prompt for another of them, or why there are none."""
        prefill_workers = [worker for worker in workers if worker.role is Role.PREFILL]
        obstacles = {each: each.obstacle(path, ask) for each in set(map(self._dialect_of, prefill_workers))}
        able = [worker for worker in prefill_workers if obstacles[self._dialect_of(worker)] is None]
        if not able:
            return [], next(iter(obstacles.values()), Local.NO_PREFILL_WORKER)
        fetching = [worker for worker in workers if worker.can_fetch]
        paired = [worker for worker in able if any(self._goes_on_from(worker, other) for other in fetching)]
        return paired, None if paired else Local.NO_DECODE_WORKER

    def _decide_decode(self, ask: Ask, prefix: Prefix, prefill: Worker, workers: list[Worker]) -> Decision | None:
        fetching = [worker for worker in workers if worker.can_fetch and self._goes_on_from(prefill, worker)]
        fetching = [worker for worker in fetching if worker.role is Role.DECODE] or fetching
        return self._decide(ask, prefix, fetching, FETCH_SCALE) if fetching else None

    def _goes_on_from(self, prefill: Worker, other: Worker) -> bool:
        return self._dialect_of(other) is self._dialect_of(prefill) and other.has_compatible_cache(prefill)

    def _dialect_of(self, worker: Worker) -> Dialect:
        return DIALECTS.get(worker.engine or "") or DIALECTS[self._models.prefill_dialect]

    def _side(self, decision: Decision) -> tuple[Worker, Side]:
        target = decision.chosen.target
        worker = self._fleet.get(target.worker)
        assert worker is not None
        num_ranks, port = len(self._fleet.ranks(worker)), worker.identity.bootstrap_port or DEFAULT_BOOTSTRAP_PORT
        return worker, Side(worker.url, port, target.rank if num_ranks > 1 else None, num_ranks)

    def begin(self, now_s: float, decision: Decision, *, is_streamed: bool, computes: bool = True) -> ActiveRequest:
        """Count a request from its dispatch on, to whom it was decided for."""
        target, prompt, prices, priced = decision.chosen.target, decision.prompt, decision.prices, None
        if prices is not None:
            column = self._load.column(target)
            priced = prices.policy.dispatched(
                now_s, column, prices, decision.chosen_idx, is_streamed=is_streamed, computes=computes
            )
        num_held = decision.overlap_tokens if computes else prompt.num_tokens
        return self._load.begin(target, prompt, num_held, now_s, priced)

    def routed(
        self, tenant: str, ask: Ask, prefix: Prefix, decision: Decision, usage: ReportedUsage | None
    ) -> Routed | None:
        """Return what regret counts of a request that was answered; None where nothing is known of caches."""
        if self._index is None:
            return None
        target, prompt, prices = decision.chosen.target, decision.prompt, decision.prices
        model, block_size = self._fleet.label_of(ask.model), prompt.block_size
        if not len(prefix.block_hashes):
            is_read = ask.token_ids is not None and self._index.has_joined
            num_tokens = prompt.num_tokens
            return Routed(model, target.worker, num_tokens, is_read=is_read, block_size=block_size, tenant=tenant)
        adapter = self._adapter_of(ask)
        plain_hashes, variant = prefix.block_hashes, 0
        if adapter is not None or ask.cache_salt is not None:
            plain_hashes = self._hashes_of(Ask(None, 0), block_size)(ask.token_ids)
            variant = crc32(repr((adapter, ask.cache_salt)).encode())  # the same in every process
        routed = under_way = decision.overlap_tokens
        if prices is not None:
            routed, under_way = int(prices.cached_tokens[decision.chosen_idx]), int(prices.cached_tokens.max())
        return Routed(
            model,
            target.worker,
            prompt.num_tokens,
            held=prefix.held_tokens(prompt),
            routed=routed,
            in_flight=routed - decision.overlap_tokens,
            under_way=under_way,
            reported=None if usage is None else usage.cached_tokens,
            is_exact=decision.chosen.is_exact,
            alike=self._fleet.renderings.limits(ask.chat, ask.fields).get(target.worker),
            block_size=block_size,
            sampled=sample_of(plain_hashes, prefix.block_hashes),
            variant=variant,
            tenant=tenant,
        )

    def _decide(
        self,
        ask: Ask,
        prefix: Prefix,
        workers: list[Worker],
        compute_scale: float = 1.0,
        holder: Candidate | None = None,
        room_s: Mapping[str, float] | None = None,
    ) -> Decision:
        prompt = Prompt(ask.num_tokens, self._fleet.block_sizes(ask.model).unit, is_tokenized=ask.token_ids is not None)
        policy, now_s = self._models.policy(ask.model).policy, self._now_s()
        ranks = self._ranks_of(workers, now_s)
        if isinstance(policy, PriceSettings):
            pricing = self._pricing.get((policy, prompt.block_size))
            if pricing is None:
                pricing = self._load.pricing(policy, prompt.block_size)
                self._pricing[policy, prompt.block_size] = pricing
            by_tier = [prefix.overlaps.get(rank.target, _NOWHERE) for rank in ranks.statuses]
            on_gpus = [each[0] for each in by_tier]
            depths = on_gpus if on_gpus == [each[-1] for each in by_tier] else by_tier
            columns, hashes = ranks.columns, prefix.block_hashes
            pull = None
            if holder is not None and holder.overlap_blocks:
                min_tokens = self._models.policy(ask.model).max_local_prefill_tokens
                source = self._fleet.get(holder.target.worker)
                assert source is not None
                has_same_blocks = [each == source.identity.cache_block for each in ranks.cache_blocks]
                token_s = np.where(has_same_blocks, ranks.fetch_token_s, inf)
                pull = Pull(holder.overlap_blocks[0], token_s, min_tokens)
            waits_s = np.array([room_s.get(rank.target.worker, 0.0) for rank in ranks.statuses]) if room_s else 0.0
            prices = pricing.weigh(now_s, prompt.num_tokens, hashes, depths, columns, compute_scale, pull, waits_s)
            chosen_idx = pricing.choose(prices, ranks.num_blocks, self._random)
            chosen = _candidate(ranks.statuses[chosen_idx], prefix)
            overlap_tokens = usable_tokens(chosen.overlap_blocks, prompt)
            weighed = partial(_weighed, ranks, prefix, prices)
            return Decision(policy.name, prompt, chosen, chosen_idx, overlap_tokens, weighed, prices)
        candidates = [_candidate(rank, prefix, self._load.load(rank.target, now_s)) for rank in ranks.statuses]
        return decide(policy, prompt, candidates, self._load.num_dispatched, self._random)

    def _ranks_of(self, workers: list[Worker], now_s: float) -> _Ranks:
        if now_s - self._ranks_known_at_s > RANKS_MAX_AGE_S:
            self._ranks.clear()
            self._ranks_known_at_s = now_s
        key = tuple(workers)
        ranks = self._ranks.get(key)
        if ranks is None:
            each = [(worker, rank) for worker in workers for rank in self._fleet.ranks(worker)]
            statuses = [rank for _, rank in each]
            columns = np.array([self._load.column(rank.target) for rank in statuses])
            speeds = [worker.identity.tokens_per_s for worker, _ in each]
            fetch_token_s = np.array([1.0 / speed if speed else inf for speed in speeds])
            num_blocks = [rank.num_blocks for rank in statuses]
            cache_blocks = [worker.identity.cache_block for worker, _ in each]
            ranks = self._ranks[key] = _Ranks(statuses, columns, num_blocks, fetch_token_s, cache_blocks)
        return ranks

    def has_alternative(self, path: str, ask: Ask, excluded: Collection[str]) -> bool:
        """Return whether some worker that is not excluded may take the request, or two of them together."""
        workers = self._fleet.routable(ask.model, excluded)
        return any(self.can_do_all(path, each) for each in workers) or bool(self._paired(path, ask, workers)[0])

    def is_one_of_several_ranks(self, target: WorkerRank) -> bool:
        """Return whether the worker must be told which of its ranks was chosen."""
        worker = self._fleet.get(target.worker)
        return worker is not None and len(self._fleet.ranks(worker)) > 1

    def _hashes_of(self, ask: Ask, block_size: int) -> Callable[..., NDArray[np.uint64]]:
        """Return what names the blocks of a prompt as the workers' streams do."""
        lora_name, cache_salt = self._adapter_of(ask), ask.cache_salt
        return partial(_compiled_hashing(), block_size=block_size, lora_name=lora_name, cache_salt=cache_salt)

    def _adapter_of(self, ask: Ask) -> str | None:
        return ask.model if self._fleet.is_adapter(ask.model) else None

    def _model_names(self) -> str:
        return ", ".join(entry["id"] for entry in self._models.entries()) or "none"

    def _refusal(self, model: str | None) -> RequestError:
        workers = self._fleet.workers
        if workers and not self._fleet.is_known(model):
            return RequestError(
                HTTPStatus.NOT_FOUND,
                f"model: got {model!r}, expected one of the models served: {self._model_names()}",
                param="model",
                code="model_not_found",
            )
        num_serving = sum(worker.serves(model) for worker in workers)
        message = f"no worker can take requests now ({len(workers)} known, {num_serving} serve the model)"
        return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="no_healthy_worker")


@cache
def _compiled_hashing() -> Callable[..., NDArray[np.uint64]]:
    from kvist.indexer.compiled import hashing  # compiled when the index was

    return hashing.block_hashes


def _candidate(rank: RankStatus, prefix: Prefix, load: Load = Load()) -> Candidate:  # noqa: B008 - it is frozen
    overlap, is_live = prefix.overlaps.get(rank.target, ()), rank.state is SourceState.LIVE
    return Candidate(rank.target, load, overlap, rank.num_blocks, rank.is_approximate, is_live)


def _weighed(ranks: _Ranks, prefix: Prefix, prices: Prices) -> tuple[list[Candidate], Weighing]:
    candidates = [_candidate(rank, prefix) for rank in ranks.statuses]
    return candidates, Weighing("price", prices.policy.probabilities(prices, ranks.num_blocks))
