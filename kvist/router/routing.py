"""One decision: which workers could take a request, what each holds of its prompt, and which one the policy chooses.

Deciding sends nothing and counts nothing, so `POST /route` explains a decision by making it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from http import HTTPStatus
from math import inf
from random import Random
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.http import Headers
from kvist.openai.errors import RequestError
from kvist.router.fleet.fleet import RANKS_MAX_AGE_S, Fleet
from kvist.router.fleet.load import ActiveRequest, LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.worker import Worker
from kvist.router.index import Caches, Overlaps, RankStatus
from kvist.router.policy.baselines import decide
from kvist.router.policy.decision import Candidate, Decision, Load, Prompt, Role, Weighing, usable_tokens
from kvist.router.policy.priced import PricedPolicy, Prices, Pull
from kvist.router.policy.settings import FETCH_SCALE, PriceSettings
from kvist.router.prefill.dialect import FALLBACKS, OBSTACLES, Dialect, LocalReason, Side
from kvist.router.prefill.handover import DIALECTS, KVIST, Plan, why_local
from kvist.router.prefill.sglang import DEFAULT_BOOTSTRAP_PORT
from kvist.router.prefill.split import single_answer
from kvist.router.prompts import ParsedRequest
from kvist.router.recording import Hashes
from kvist.router.regret import Routed, sample_of
from kvist.router.usage import ReportedUsage

_NO_BLOCKS = (0,) * len(Tier)
MODEL_NOT_FOUND: Final = "model_not_found"


class FleetView(Protocol):
    """The state of the fleet that decisions are made from."""

    fleet: Fleet
    models: Models
    load: LoadTracker

    @property
    def index(self) -> Caches | None:
        """The workers' caches, None where no policy looks at them."""


class Prefix(NamedTuple):
    """Which rank holds how much of a prompt, and the hashes of the prompt's full blocks."""

    overlaps: Overlaps = {}  # noqa: RUF012 - nobody writes to it
    block_hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    def held_tokens(self, prompt: Prompt) -> int:
        """Return the most that any rank holds, in any tier."""
        deepest = max([depths[-1] for depths in self.overlaps.values()], default=0)
        return usable_tokens([deepest], prompt)


class _Ranks(NamedTuple):
    """The ranks of some workers, as they were a moment ago, and their columns on the board."""

    statuses: list[RankStatus]
    columns: NDArray[np.intp]
    num_blocks: list[int]
    fetch_token_s: NDArray[np.float64]
    cache_blocks: list[tuple[int | None, str | None]]


class Routing:
    """Makes decisions from the fleet, its load and its caches as they are now."""

    def __init__(self, view: FleetView, random: Random, now_s: Callable[[], float]) -> None:
        """Decide by each model's policy."""
        self._fleet, self._models, self._load, self._index = view.fleet, view.models, view.load, view.index
        self._pricing: dict[tuple[PriceSettings, int], PricedPolicy] = {}
        self._ranks: dict[tuple[Worker, ...], _Ranks] = {}
        self._ranks_known_at_s = 0.0
        self._random = random
        self._now_s = now_s

    def match(self, parsed: ParsedRequest) -> Prefix | None:
        """Match the prompt against the index; return an empty Prefix where that is not possible, or of no use.

        None means that another process is writing to the index: try again soon.
        """
        if self._index is None or not self._index.has_joined or parsed.token_ids is None or parsed.is_computed_whole:
            return Prefix()
        sizes = self._fleet.block_sizes(parsed.model)
        prefix = self._match_blocks(parsed, parsed.token_ids, sizes.unit, self._index)
        for block_size in sizes.each:
            if prefix is None or block_size == sizes.unit:
                continue
            larger = self._match_blocks(parsed, parsed.token_ids, block_size, self._index)
            if larger is None:
                return None
            scale = block_size // sizes.unit
            scaled = {rank: tuple(depth * scale for depth in depths) for rank, depths in larger.overlaps.items()}
            prefix = Prefix({**prefix.overlaps, **scaled}, prefix.block_hashes)
        return prefix

    def _match_blocks(
        self, parsed: ParsedRequest, token_ids: NDArray[np.uint32], block_size: int, index: Caches
    ) -> Prefix | None:
        """Return what workers with blocks of this size hold."""
        num_usable_tokens = (len(token_ids) - 1) // block_size * block_size
        if num_usable_tokens <= 0:
            return Prefix()
        hashes_of = self._hashes_of(parsed, block_size)
        block_hashes = hashes_of(token_ids)
        num_exact = None if parsed.num_exact_tokens is None else parsed.num_exact_tokens // block_size
        overlaps = index.match(block_hashes, num_usable_tokens // block_size, num_exact)
        if overlaps is None:
            return None
        # Engines with EAGLE hash one token more into a block: matching the first block tells whether any holds it.
        if index.match(hashes_of(token_ids[: block_size + 1], is_eagle=True)):
            eagle_hashes = hashes_of(token_ids[: num_usable_tokens + 1], is_eagle=True)
            found = dict(index.match(eagle_hashes) or {})
            if num_usable_tokens + 1 == len(token_ids):  # that is the last token, at which SGLang does not look
                for rank, depths in found.items():
                    if (worker := self._fleet.get(rank.worker)) is not None and worker.engine == "sglang":
                        found[rank] = tuple(min(depth, len(eagle_hashes) - 1) for depth in depths)
            overlaps = {**overlaps, **found}
        return Prefix(self._limit_to_same_tokens(parsed, overlaps, block_size, index), block_hashes)

    def _limit_to_same_tokens(
        self, parsed: ParsedRequest, overlaps: Overlaps, block_size: int, index: Caches
    ) -> Overlaps:
        """Return the overlaps without blocks for which a worker may render other tokens than the router does."""
        limits = self._fleet.renderings.limits(parsed.chat, parsed.fields)
        limited = {}
        for target, depths in overlaps.items() if limits else ():
            num_same_tokens = limits.get(target.worker)
            # Blocks that a worker is only expected to hold are hashed from the router's own tokens.
            if num_same_tokens is not None and not index.is_expecting(target.worker):
                limit = max(0, num_same_tokens - 1) // block_size  # the token behind a block may be in its hash, too
                limited[target] = tuple(min(depth, limit) for depth in depths)
        return {**overlaps, **limited} if limited else overlaps

    def block_hashes(self, parsed: ParsedRequest, worker: str, first_token: int, num_tokens: int) -> list[int]:
        """Return the hashes of the worker's blocks that the prompt's first `num_tokens` fill, from `first_token` on.

        There are none where its tokens are not known, nor behind those that the worker renders as the router does.
        """
        num_tokens = min(num_tokens, self._fleet.renderings.limits(parsed.chat, parsed.fields).get(worker, num_tokens))
        if self._index is None or not self._index.has_joined or parsed.token_ids is None:
            return []
        block_size = self._fleet.block_size_of(worker, parsed.model)
        hashes: list[int] = self._hashes_of(parsed, block_size)(parsed.token_ids[:num_tokens]).tolist()
        return hashes[first_token // block_size :]

    def recorded_blocks(self, parsed: ParsedRequest | None, prefix: Prefix) -> tuple[Hashes, int, int | None]:
        """Return a function that hashes a prompt's blocks, on any thread, their number and their size in tokens."""
        if parsed is None or (token_ids := parsed.token_ids) is None:
            return lambda: prefix.block_hashes, 0, None
        block_size, lora_name = self._fleet.block_sizes(parsed.model).unit, self._adapter_of(parsed)
        num_blocks = len(token_ids) // block_size
        if num_blocks == len(prefix.block_hashes):
            return lambda: prefix.block_hashes, num_blocks, block_size
        hashes = partial(block_hashes, token_ids, block_size, lora_name=lora_name, cache_salt=parsed.cache_salt)
        return hashes, num_blocks, block_size

    def work_of(self, parsed: ParsedRequest) -> float:
        """Return the work of computing a prompt at the rank that holds most of it, in units of `policy.work`."""
        prompt = Prompt(parsed.num_tokens, self._fleet.block_sizes(parsed.model).unit)
        held, policy = (self.match(parsed) or Prefix()).held_tokens(prompt), self._models.policy(parsed.model).policy
        if isinstance(policy, PriceSettings):
            return float(policy.work_of(parsed.num_tokens) - policy.work_of(held))
        return parsed.num_tokens - held

    def record_computed(self, parsed: ParsedRequest, decision: Decision) -> None:
        """Record that the chosen rank has computed the prompt, if no event can say so: of images, or there are none."""
        worker = decision.chosen.target.worker
        if self._index is not None and (parsed.num_exact_tokens is not None or self._index.is_expecting(worker)):
            self._record(parsed, decision.chosen.target, self._index)

    def record_unreported(self, parsed: ParsedRequest, decision: Decision) -> None:
        """Record at the end what a partial rank has not reported of the prompt; vLLM's are asked to report it anew.

        A prompt with images was recorded when it was computed.
        """
        chosen, worker = decision.chosen, self._fleet.get(decision.chosen.target.worker)
        if self._index is None or chosen.is_exact or chosen.is_approximate or worker is None:
            return
        if worker.engine != "vllm" and parsed.num_exact_tokens is None:
            self._record(parsed, chosen.target, self._index)

    def _record(self, parsed: ParsedRequest, target: WorkerRank, index: Caches) -> None:
        worker = self._fleet.get(target.worker)
        if parsed.token_ids is None or worker is None:
            return
        if len(self._fleet.ranks(worker)) > 1 and not self._is_one_of_several_ranks(target):
            return  # the worker itself has chosen the rank
        hashes = self._hashes_of(parsed, self._fleet.block_size_of(target.worker, parsed.model))(parsed.token_ids)
        if len(hashes):
            index.record_computed(target, hashes)

    def plan(
        self,
        parsed: ParsedRequest,
        prefix: Prefix,
        excluded: Collection[str] = (),
        full: Mapping[str, float] = MappingProxyType({}),
        local_reason: LocalReason | None = None,
    ) -> Plan:
        """Choose the worker that answers the request and, if that is another, the one that computes its prompt.

        `full` are workers without room, and for how many seconds. A policy that prices waiting chooses one where that
        is worth it; otherwise they are chosen only where nobody else can do it. With a `local_reason` one worker does
        all of the request. Prefill workers do all of it where nobody else is left, if they do anything alone.
        Raises RequestError: 404 when no worker has the model, 400 when those that have it do nothing alone and cannot
        do this together, 503 when none can take requests now.
        """
        if parsed.model is None and parsed.worker is None and parsed.fields and self._fleet.has_several_models:
            message = f"model: missing, expected one of the models served: {self._model_names()}"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="model", code="model_missing")
        has_roles, settings = self._fleet.has_roles, self._models.policy(parsed.model)
        can_pull = self._fleet.has_pulls and not has_roles and local_reason is None
        holder = self._holder(parsed, prefix, excluded) if can_pull else None
        room_s: dict[str, float] = {}
        if full:
            is_priced = isinstance(settings.policy, PriceSettings)
            room_s = {url: wait_s for url, wait_s in full.items() if is_priced and wait_s < inf}
            if self.has_alternative(parsed, (all_excluded := {*excluded, *(full.keys() - room_s.keys())})):
                excluded = all_excluded
        everyone = self._fleet.routable(parsed.model, excluded)
        if not everyone:
            raise self._refusal(parsed.model)
        workers = everyone
        if parsed.worker is not None:
            workers = [each for each in everyone if each.url == parsed.worker] or everyone
        if not has_roles:
            decision = self._decide(parsed, prefix, workers, holder=holder, room_s=room_s)
            return self._plan_pull(parsed, decision, holder)
        alone = [worker for worker in workers if self.can_do_all(parsed.path, worker)]
        alone = [worker for worker in alone if worker.role is not Role.PREFILL] or alone
        answer = self._decide(parsed, prefix, alone, room_s=room_s) if alone else None
        if answer is not None and not self._fleet.has_prefill_workers:
            return Plan(answer)
        pairing = [worker for worker in everyone if worker.role is Role.PREFILL or worker.url not in room_s]
        prefill_workers, reason = self._prefill_workers(parsed, pairing)
        if reason is LocalReason.SEVERAL_SEQUENCES and local_reason is None:
            single = single_answer(parsed)
            plan = None if single is None else self.plan(single, prefix, excluded, room_s)
            if plan is not None and plan.prefill is not None:
                return msgspec.structs.replace(plan, is_split=True)
        if answer is None:
            local_reason = local_reason if local_reason in FALLBACKS else reason
        elif local_reason is None:
            obstacle = reason if reason in OBSTACLES else None
            local_reason = obstacle or why_local(answer, settings.max_local_prefill_tokens) or reason
        if local_reason is None:
            return self._plan_pair(parsed, prefix, prefill_workers, pairing, room_s)
        if answer is None:
            raise RequestError(
                HTTPStatus.BAD_REQUEST if local_reason in OBSTACLES else HTTPStatus.SERVICE_UNAVAILABLE,
                f"no worker can serve this request alone, and no prefill and decode worker together ({local_reason})",
                code="no_pair",
            )
        return Plan(answer, None, local_reason)

    def _plan_pair(
        self,
        parsed: ParsedRequest,
        prefix: Prefix,
        prefill_workers: list[Worker],
        everyone: list[Worker],
        room_s: Mapping[str, float],
    ) -> Plan:
        """Return the plan in which one worker computes the prompt for another."""
        prefill = self._decide(parsed, prefix, prefill_workers, room_s=room_s)
        ranks = [] if parsed.prefill_rank is None else [each.target for each in prefill.candidates]
        if parsed.prefill_rank in ranks:
            prefill = prefill.choosing(ranks.index(parsed.prefill_rank))
        worker, prefill_side = self._side(prefill)
        decode = self._decide_decode(parsed, prefix, worker, everyone)
        assert decode is not None
        dialect, (_, decode_side) = self._dialect_of(worker), self._side(decode)
        fields, handoff = dialect.begin(parsed, prefill_side, decode_side, self._random)
        return Plan(decode, prefill, None, dialect, fields, handoff)

    def _holder(self, parsed: ParsedRequest, prefix: Prefix, excluded: Collection[str]) -> Candidate | None:
        """Return the rank that holds most of the prompt of those that let it be fetched, however busy it is."""
        if not prefix.overlaps or KVIST.obstacle(parsed) is not None:
            return None
        workers = [worker for worker in self._fleet.routable(parsed.model, excluded) if worker.identity.tokens_per_s]
        holders = [_candidate(rank, prefix) for worker in workers for rank in self._fleet.ranks(worker)]
        return max(holders, key=lambda each: (each.overlap_blocks[:1], self._random.random()), default=None)

    def _plan_pull(self, parsed: ParsedRequest, answer: Decision, holder: Candidate | None) -> Plan:
        """Return the plan in which the chosen worker fetches what the holder has, if it was priced so."""
        num_fetched = 0 if answer.prices is None else int(answer.prices.fetched_tokens[answer.chosen_idx])
        if holder is None or not num_fetched:
            return Plan(answer)
        num_tokens = usable_tokens(holder.overlap_blocks[:1], answer.prompt)
        prompt, weighed = Prompt(num_tokens, answer.prompt.block_size), ([holder], Weighing("holder", [1.0]))
        asked = Decision(answer.policy, prompt, holder, 0, num_tokens, lambda: weighed)
        fields = KVIST.ask_for_prefix(parsed, num_tokens)
        return Plan(answer, asked, dialect=KVIST, fields=fields, pulled_tokens=num_fetched)

    def decode_decision(
        self, parsed: ParsedRequest, prefix: Prefix, prefill_worker: str, excluded: Collection[str]
    ) -> Decision | None:
        """Return the worker that generates from what a prefill worker has computed, a decode worker if there is one."""
        worker = self._fleet.get(prefill_worker)
        if worker is None:  # it was removed
            return None
        return self._decide_decode(parsed, prefix, worker, self._fleet.routable(parsed.model, excluded))

    def can_do_all(self, path: str, worker: Worker) -> bool:
        """Return whether the worker can answer a request of this endpoint without another."""
        return worker.role is Role.BOTH or self._dialect_of(worker).works_alone(path)

    def _prefill_workers(self, parsed: ParsedRequest, workers: list[Worker]) -> tuple[list[Worker], LocalReason | None]:
        """Return those that can compute the prompt for another of the workers, or why there are none."""
        prefill_workers = [worker for worker in workers if worker.role is Role.PREFILL]
        obstacles = {each: each.obstacle(parsed) for each in set(map(self._dialect_of, prefill_workers))}
        able = [worker for worker in prefill_workers if obstacles[self._dialect_of(worker)] is None]
        if not able:
            return [], next(iter(obstacles.values()), LocalReason.NO_PREFILL_WORKER)
        fetching = [worker for worker in workers if worker.can_fetch]
        paired = [worker for worker in able if any(self._can_hand_over(worker, other) for other in fetching)]
        return paired, None if paired else LocalReason.NO_DECODE_WORKER

    def _decide_decode(
        self, parsed: ParsedRequest, prefix: Prefix, prefill: Worker, workers: list[Worker]
    ) -> Decision | None:
        fetching = [worker for worker in workers if worker.can_fetch and self._can_hand_over(prefill, worker)]
        fetching = [worker for worker in fetching if worker.role is Role.DECODE] or fetching
        return self._decide(parsed, prefix, fetching, FETCH_SCALE) if fetching else None

    def _can_hand_over(self, prefill: Worker, decode: Worker) -> bool:
        return self._dialect_of(decode) is self._dialect_of(prefill) and decode.has_compatible_cache(prefill)

    def _dialect_of(self, worker: Worker) -> Dialect:
        return DIALECTS.get(worker.engine or "") or DIALECTS[self._models.prefill_dialect]

    def _side(self, decision: Decision) -> tuple[Worker, Side]:
        target = decision.chosen.target
        worker = self._fleet.get(target.worker)
        assert worker is not None
        num_ranks, port = len(self._fleet.ranks(worker)), worker.identity.bootstrap_port or DEFAULT_BOOTSTRAP_PORT
        return worker, Side(worker.url, port, target.rank if num_ranks > 1 else None, num_ranks)

    def begin(self, now_s: float, decision: Decision, *, is_streamed: bool, computes: bool = True) -> ActiveRequest:
        """Count a request as dispatched to the rank that the decision chose."""
        target, prompt, prices, priced = decision.chosen.target, decision.prompt, decision.prices, None
        if prices is not None:
            column = self._load.column(target)
            priced = prices.policy.dispatched(
                now_s, column, prices, decision.chosen_idx, is_streamed=is_streamed, computes=computes
            )
        num_held = decision.overlap_tokens if computes else prompt.num_tokens
        return self._load.begin(target, prompt, num_held, priced)

    def outcome(
        self, tenant: str, parsed: ParsedRequest, prefix: Prefix, decision: Decision, usage: ReportedUsage | None
    ) -> Routed | None:
        """Return what `GET /regret` counts of a request that was answered; None where there is no index."""
        if self._index is None:
            return None
        target, prompt, prices = decision.chosen.target, decision.prompt, decision.prices
        model, block_size = self._fleet.label_of(parsed.model), prompt.block_size
        if not len(prefix.block_hashes):
            is_read = parsed.token_ids is not None and self._index.has_joined
            num_tokens = prompt.num_tokens
            return Routed(model, target.worker, num_tokens, is_read=is_read, block_size=block_size, tenant=tenant)
        adapter = self._adapter_of(parsed)
        plain_hashes, variant = prefix.block_hashes, 0
        if adapter is not None or parsed.cache_salt is not None:
            plain_hashes = _compiled_hashing()(parsed.token_ids, block_size=block_size)
            variant = crc32(repr((adapter, parsed.cache_salt)).encode())  # the same in every process
        routed_tokens = held_or_in_flight_tokens = decision.overlap_tokens
        if prices is not None:
            routed_tokens = int(prices.cached_tokens[decision.chosen_idx])
            held_or_in_flight_tokens = int(prices.cached_tokens.max())
        return Routed(
            model,
            target.worker,
            prompt.num_tokens,
            held_tokens=prefix.held_tokens(prompt),
            routed_tokens=routed_tokens,
            in_flight_tokens=routed_tokens - decision.overlap_tokens,
            held_or_in_flight_tokens=held_or_in_flight_tokens,
            reported_tokens=None if usage is None or not prompt.is_exact else usage.cached_tokens,
            is_exact=decision.chosen.is_exact and prompt.is_exact,
            identically_rendered_tokens=self._fleet.renderings.limits(parsed.chat, parsed.fields).get(target.worker),
            block_size=block_size,
            sampled=sample_of(plain_hashes, prefix.block_hashes),
            variant=variant,
            tenant=tenant,
        )

    def _decide(
        self,
        parsed: ParsedRequest,
        prefix: Prefix,
        workers: list[Worker],
        compute_scale: float = 1.0,
        holder: Candidate | None = None,
        room_s: Mapping[str, float] | None = None,
    ) -> Decision:
        block_size, settings = self._fleet.block_sizes(parsed.model).unit, self._models.policy(parsed.model)
        is_exact = parsed.token_ids is not None and parsed.num_exact_tokens is None
        prompt = Prompt(parsed.num_tokens, block_size, is_exact=is_exact)
        policy, now_s = settings.policy, self._now_s()
        ranks = self._ranks_of(workers, now_s)
        if not isinstance(policy, PriceSettings):
            candidates = [_candidate(rank, prefix, self._load.load(rank.target)) for rank in ranks.statuses]
            return decide(policy, prompt, candidates, self._load.num_dispatched, self._random)
        pricing = self._pricing.get((policy, block_size))
        if pricing is None:
            pricing = self._pricing[policy, block_size] = self._load.pricing(policy, block_size)
        by_tier = [prefix.overlaps.get(rank.target, _NO_BLOCKS) for rank in ranks.statuses]
        on_gpus = [each[0] for each in by_tier]
        depths = on_gpus if on_gpus == [each[-1] for each in by_tier] else by_tier
        columns, hashes = ranks.columns, prefix.block_hashes
        pull = None if holder is None else self._pull_from(holder, ranks, settings.max_local_prefill_tokens)
        waits_s = np.array([room_s.get(rank.target.worker, 0.0) for rank in ranks.statuses]) if room_s else 0.0
        prices = pricing.weigh(now_s, prompt.num_tokens, hashes, depths, columns, compute_scale, pull, waits_s)
        chosen_idx = pricing.choose(prices, ranks.num_blocks, self._random)
        chosen = _candidate(ranks.statuses[chosen_idx], prefix)
        overlap_tokens = usable_tokens(chosen.overlap_blocks, prompt)
        weighed = partial(_weighed, ranks, prefix, prices)
        return Decision(policy.name, prompt, chosen, chosen_idx, overlap_tokens, weighed, prices)

    def _pull_from(self, holder: Candidate, ranks: _Ranks, min_tokens: int) -> Pull | None:
        """Return what the ranks can fetch from the holder, those with the same kind of blocks."""
        if not holder.overlap_blocks:
            return None
        source = self._fleet.get(holder.target.worker)
        assert source is not None
        has_same_blocks = [each == source.identity.cache_block for each in ranks.cache_blocks]
        return Pull(holder.overlap_blocks[0], np.where(has_same_blocks, ranks.fetch_token_s, inf), min_tokens)

    def _ranks_of(self, workers: list[Worker], now_s: float) -> _Ranks:
        if now_s - self._ranks_known_at_s > RANKS_MAX_AGE_S / 4:
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

    def has_alternative(self, parsed: ParsedRequest, excluded: Collection[str]) -> bool:
        """Return whether some worker that is not excluded may take the request, or two of them together."""
        workers = self._fleet.routable(parsed.model, excluded)
        return any(self.can_do_all(parsed.path, each) for each in workers) or bool(
            self._prefill_workers(parsed, workers)[0]
        )

    def rank_headers(self, target: WorkerRank) -> Headers:
        """Return the header in which vLLM's front end takes the rank to use, if the worker has several.

        Other than in events, the first rank of a node is 0 there.
        """
        worker = self._fleet.get(target.worker)
        if worker is None or not self._is_one_of_several_ranks(target):
            return []
        return [(b"x-data-parallel-rank", b"%d" % (target.rank - worker.identity.first_rank))]

    def _is_one_of_several_ranks(self, target: WorkerRank) -> bool:
        """Return whether the worker has several ranks, so that it must be sent which one was chosen.

        While some of its streams have no events yet, the worker itself chooses: else their ranks would never get any.
        """
        worker = self._fleet.get(target.worker)
        if worker is None:
            return False
        num_streams = len(worker.configured_event_sources or worker.identity.event_endpoints)
        return len(self._fleet.ranks(worker)) >= max(2, num_streams)

    def _hashes_of(self, parsed: ParsedRequest, block_size: int) -> Callable[..., NDArray[np.uint64]]:
        """Return the function that hashes the blocks of a prompt as the workers' streams do."""
        lora_name, cache_salt = self._adapter_of(parsed), parsed.cache_salt
        return partial(_compiled_hashing(), block_size=block_size, lora_name=lora_name, cache_salt=cache_salt)

    def _adapter_of(self, parsed: ParsedRequest) -> str | None:
        return parsed.model if self._fleet.is_adapter(parsed.model) else None

    def _model_names(self) -> str:
        return ", ".join(entry["id"] for entry in self._models.entries()) or "none"

    def _refusal(self, model: str | None) -> RequestError:
        workers = self._fleet.workers
        if workers and not self._fleet.is_known(model):
            self._fleet.on_unknown_model()
            return RequestError(
                HTTPStatus.NOT_FOUND,
                f"model: got {model!r}, expected one of the models served: {self._model_names()}",
                param="model",
                code=MODEL_NOT_FOUND,
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
