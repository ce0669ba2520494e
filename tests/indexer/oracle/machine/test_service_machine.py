"""A random life of a fleet: real sockets in, `/query` out, and every answer is the oracle's."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

NUM_EXAMPLES = int(os.environ.get("KVIST_ORACLE_EXAMPLES", "15"))
DEADLINE_S = 180.0
BLOCK_SIZES = {"four": 4, "sixteen": 16}
FULL, SLIDING = 1 << 62, 9
VLLM_WIRES, NUM_WIRES = (0, 1, 2), 5
_numbers = count(1)


class Worker:
    """A registered worker: its streams, each with the ranks it speaks for, and what they told."""

    def __init__(self, number: int, model: str, streams: dict[int, Any], is_hybrid: bool) -> None:
        self.number = number
        self.model = model
        self.streams = streams
        self.is_hybrid = is_hybrid

    def name_of(self, block: Any, alias: int) -> int:
        """Return the engine's hash of a block: always the same in one worker, of the upper half of u64 or the lower."""
        return int.from_bytes(hashlib.sha256(repr((self.number, alias, block)).encode()).digest()[:8])


class ServiceMachine(RuleBasedStateMachine):
    """Drives the service, its fleet and the oracle side by side."""

    service: Any
    make_stock_stream: Callable[..., Any]
    make_kvist_stream: Callable[..., Any]
    make_fleet_truth: Callable[[dict[str, int]], Any]
    make_scope: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.truth = self.make_fleet_truth(BLOCK_SIZES)
        self.workers: list[Worker] = []
        self.prompts: dict[str, set[tuple[Any, tuple[int, ...]]]] = {model: set() for model in BLOCK_SIZES}

    # --- Who is there -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) < 3)
    @rule(
        model=st.sampled_from(sorted(BLOCK_SIZES)),
        wire=st.none() | st.integers(0, NUM_WIRES - 1),
        ranks=st.sampled_from([(0,), (0,), (0, 3)]),
        has_stream_a_rank=st.booleans(),
        says_rank=st.booleans(),
        is_hybrid=st.booleans(),
    )
    def join(
        self,
        model: str,
        wire: int | None,
        ranks: Sequence[int],
        has_stream_a_rank: bool,
        says_rank: bool,
        is_hybrid: bool,
    ) -> None:
        streams: dict[int, Any] = {}
        for rank in ranks:
            if streams and not has_stream_a_rank:
                streams[rank] = streams[ranks[0]]
            elif wire is None:
                streams[rank] = self.make_kvist_stream(BLOCK_SIZES[model])
            else:
                must_say_rank = len(ranks) > 1 and not has_stream_a_rank
                streams[rank] = self.make_stock_stream(BLOCK_SIZES[model], wire, says_rank or must_say_rank)
        can_be_hybrid = wire is None or wire in VLLM_WIRES
        self.workers.append(Worker(next(_numbers), model, streams, is_hybrid and can_be_hybrid))
        self.register(self.workers[-1])

    def register(self, worker: Worker) -> None:
        seen: list[Any] = []
        for rank, stream in worker.streams.items():
            if stream not in seen:
                seen.append(stream)
                body = {"instance_id": worker.number, "model_name": worker.model, "endpoint": stream.url}
                body |= {"block_size": BLOCK_SIZES[worker.model], "dp_rank": rank}
                body["replay_endpoint"] = stream.replay_url
                assert self.service.call("POST", "/register", body)[0] == 201

    def unregister(self, worker: Worker) -> None:
        body = {"instance_id": worker.number, "model_name": worker.model}
        assert self.service.call("POST", "/unregister", body)[0] == 200

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        worker = self.workers.pop(pick % len(self.workers))
        self.unregister(worker)
        self.truth.left(worker.model, worker.number)
        for stream in worker.streams.values():
            stream.close()

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9))
    def leave_and_come_back(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        self.unregister(worker)
        self.register(worker)

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9))
    def restart(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        rank = sorted(worker.streams)[pick // 5 % len(worker.streams)]
        stream = worker.streams[rank]
        stream.restart()
        self.truth.restarted(worker.model, worker.number, [r for r in worker.streams if worker.streams[r] is stream])

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9), wire=st.sampled_from(VLLM_WIRES))
    def put_a_publisher_before_the_engine_or_take_it_away(self, pick: int, wire: int) -> None:
        """Restart at the same endpoint as the other kind: the registration stays what it is."""
        worker = self.workers[pick % len(self.workers)]
        rank = sorted(worker.streams)[pick // 5 % len(worker.streams)]
        old, size = worker.streams[rank], BLOCK_SIZES[worker.model]
        if "engine=" in old.url:
            return
        old.close()
        new = (
            self.make_kvist_stream(size, old.port)
            if old.is_stock
            else self.make_stock_stream(size, wire, True, old.port)
        )
        ranks = [number for number, stream in worker.streams.items() if stream is old]
        worker.streams.update(dict.fromkeys(ranks, new))
        self.truth.restarted(worker.model, worker.number, ranks)

    # --- What is told -----------------------------------------------------------------------------------------------

    def pick(self, pick: int) -> tuple[Worker, int, Any, Any]:
        worker = self.workers[pick % len(self.workers)]
        rank = sorted(worker.streams)[pick // 4 % len(worker.streams)]
        truth = self.truth.rank(worker.model, worker.number, rank)
        truth.tells_groups = worker.streams[rank].is_stock
        return worker, rank, worker.streams[rank], truth

    def tell_stored(self, pick: int, *args: Any, **options: Any) -> None:
        worker, rank, stream, truth = self.pick(pick)
        _, token_ids, parent = (*args, None)[:3]
        above = truth.find(parent) or ()
        prompt = tuple(token for _, tokens in above for token in tokens) + tuple(token_ids)
        self.prompts[worker.model].add((above[0][0] if above else options["scope"], prompt))
        truth.stored(*args, **options)
        stream.stored(rank, *args, **options)

    @precondition(lambda self: self.workers)
    @rule(
        pick=st.integers(0, 9),
        parent=st.none() | st.integers(0, 99),
        letters=st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=4),
        tier=st.sampled_from([0, 0, 0, 1, 2, 3]),
        alias=st.sampled_from([0, 0, 0, 1]),
        scope=st.sampled_from([(), (), (), ("adapter",), (None, "salt"), ("adapter", "salt")]),
        group=st.sampled_from([0, 0, 1, 2]),
        is_at_once=st.booleans(),
    )
    def store(
        self,
        pick: int,
        parent: int | None,
        letters: list[int],
        tier: int,
        alias: int,
        scope: tuple[str | None, ...],
        group: int,
        is_at_once: bool,
    ) -> None:
        worker, _, stream, truth = self.pick(pick)
        names = sorted({name for held in truth.tiers for name in held})
        above = names[parent % len(names)] if parent is not None and names else None
        block = () if above is None else truth.find(above)
        block_scope = self.make_scope(*scope) if above is None else block[-1][0]
        token_ids: list[int] = []
        hashes: list[int] = []
        for letter in letters:
            token_ids += self.tokens_of(worker, letter)
            block = (*block, (block_scope, tuple(self.tokens_of(worker, letter))))
            hashes.append(worker.name_of(block, 0 if worker.is_hybrid else alias))
        options = {"scope": block_scope, "group": group if worker.is_hybrid else None}
        options["window"] = SLIDING if worker.is_hybrid and group == 1 else FULL
        self.tell_stored(pick, hashes, token_ids, above, tier, **options)
        if is_at_once:
            stream.flush()

    @precondition(lambda self: self.workers)
    @rule(
        pick=st.integers(0, 9),
        name=st.integers(0, 99),
        tier=st.sampled_from([0, 0, 1]),
        alias=st.sampled_from([0, 1]),
        is_removed_first=st.booleans(),
        num_blocks=st.integers(1, 4),
    )
    def store_again(self, pick: int, name: int, tier: int, alias: int, is_removed_first: bool, num_blocks: int) -> None:
        """Store what is held once more: under another name, in another tier, or after it was removed."""
        worker, rank, stream, truth = self.pick(pick)
        held = sorted(((name, block) for held in truth.tiers for name, block in held.items()), key=repr)
        if not held:
            return
        old_name, block = held[name % len(held)]
        options = self.options(worker, truth)
        if is_removed_first:
            truth.removed([old_name], tier, group=options["group"])
            stream.removed(rank, [old_name], tier, options["group"])
        first = max(0, len(block) - num_blocks)
        above = next((n for held in truth.tiers for n, b in held.items() if first and b == block[:first]), None)
        if first and above is None:
            first = 0
        alias = 0 if worker.is_hybrid else alias
        hashes = [worker.name_of(block[: idx + 1], alias) for idx in range(first, len(block))]
        token_ids = [token for _, tokens in block[first:] for token in tokens]
        self.tell_stored(pick, hashes, token_ids, above, tier, **options | {"scope": block[0][0]})

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9), letters=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def store_below_what_nobody_knows(self, pick: int, letters: list[int]) -> None:
        worker, _, _, truth = self.pick(pick)
        token_ids = [token for letter in letters for token in self.tokens_of(worker, letter)]
        hashes = [worker.name_of(("orphan", idx), 0) for idx in range(len(letters))]
        self.tell_stored(pick, hashes, token_ids, worker.name_of("nobody", 0), 0, **self.options(worker, truth))

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9), name=st.integers(0, 99), letter=st.integers(0, 2))
    def use_an_engine_hash_again(self, pick: int, name: int, letter: int) -> None:
        worker, _, _, truth = self.pick(pick)
        names = sorted({name for held in truth.tiers for name in held})
        if names and not worker.is_hybrid:
            self.tell_stored(
                pick, [names[name % len(names)]], self.tokens_of(worker, letter), **self.options(worker, truth)
            )

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9), name=st.integers(0, 99), tier=st.integers(0, 3))
    def offload_by_hash_alone(self, pick: int, name: int, tier: int) -> None:
        """Only blocks below a held one, as engines do: the others cannot be placed."""
        worker, _, _, truth = self.pick(pick)
        blocks = {block for held in truth.tiers for block in held.values()}
        names = sorted({n for held in truth.tiers for n, b in held.items() if len(b) == 1 or b[:-1] in blocks})
        if names:
            self.tell_stored(pick, [names[name % len(names)]], [], None, tier, **self.options(worker, truth))

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9), num_tokens=st.sampled_from([1, 3, 8, 15, 17]))
    def store_what_fills_no_block(self, pick: int, num_tokens: int) -> None:
        worker, _, stream, truth = self.pick(pick)
        if stream.is_stock and num_tokens % BLOCK_SIZES[worker.model]:
            hashes = [worker.name_of(("misaligned", num_tokens), 0)]
            self.tell_stored(pick, hashes, list(range(num_tokens)), **self.options(worker, truth))

    @precondition(lambda self: self.workers)
    @rule(
        pick=st.integers(0, 9),
        names=st.lists(st.integers(0, 99), min_size=1, max_size=5),
        tier=st.sampled_from([0, 0, 0, 1, 2, 3]),
        is_one_event=st.booleans(),
    )
    def remove(self, pick: int, names: list[int], tier: int, is_one_event: bool) -> None:
        """Remove blocks that the rank holds in this tier or elsewhere, or that it never held, in any order."""
        worker, rank, stream, truth = self.pick(pick)
        known = sorted(truth.tiers[tier]) or [worker.name_of("nobody", 0)]
        hashes = [known[name % len(known)] for name in names]
        group = names[0] % 3 if worker.is_hybrid else None
        for event in [hashes] if is_one_event else [[engine_hash] for engine_hash in hashes]:
            truth.removed(event, tier, group=group)
            stream.removed(rank, event, tier, group)

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9))
    def clear(self, pick: int) -> None:
        _, rank, stream, truth = self.pick(pick)
        truth.cleared()
        stream.cleared(rank)

    # --- What the wire does -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9), num_messages=st.integers(1, 4))
    def lose(self, pick: int, num_messages: int) -> None:
        self.pick(pick)[2].num_to_lose = num_messages

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 9), num_back=st.integers(1, 5))
    def resend(self, pick: int, num_back: int) -> None:
        stream = self.pick(pick)[2]
        stream.flush()
        stream.resend(num_back)

    # --- What is asked ----------------------------------------------------------------------------------------------

    @rule(tail=st.integers(0, 3))
    def agree(self, tail: int) -> None:
        """Mark the end of every stream, wait for the marks, and compare everything at once."""
        for worker in self.workers:
            for rank, stream in worker.streams.items():
                self.mark(worker, rank, stream)
        for model in BLOCK_SIZES:
            for scope, token_ids in sorted(self.prompts[model], key=repr):
                prompt = [*token_ids, *range(tail)]
                answer = self.query(model, prompt, scope)
                assert "error" in answer or answer == self.truth.answer(model, prompt, scope)
        for worker in self.service.call("GET", "/workers")[1]:
            for listener in worker["listeners"].values():
                assert listener["counters"]["num_diverged"] == 0, worker
                assert listener["counters"]["num_malformed"] == 0, worker

    def mark(self, worker: Worker, rank: int, stream: Any) -> None:
        """Store and remove a block that is like no other, and wait until it was seen."""
        stream.num_to_lose = 0
        truth = self.truth.rank(worker.model, worker.number, rank)
        token_ids = [next(_numbers), *range(1, BLOCK_SIZES[worker.model])]
        name = worker.name_of(("mark", token_ids[0]), 0)
        options = self.options(worker, truth)
        groups = [options, *(options | {"group": group, "window": each[0]} for group, each in truth.others.items())]
        for told in groups:
            truth.stored([name], token_ids, **told)
            stream.stored(rank, [name], token_ids, **told)
        stream.flush()
        expected = self.truth.answer(worker.model, token_ids)
        again_s = time.monotonic() + 1.0
        give_up_s = time.monotonic() + DEADLINE_S
        while (answer := self.query(worker.model, token_ids)) != expected:
            assert time.monotonic() < give_up_s, f"{worker.number}/{rank}: {answer} has not become {expected}"
            if time.monotonic() > again_s:  # an engine that replaced a publisher is heard when it speaks next
                again_s += 1.0
                for told in groups:
                    stream.stored(rank, [name], token_ids, **told)
                stream.flush()
            time.sleep(0.002)
        for told in groups:
            truth.removed([name], group=told["group"])
            stream.removed(rank, [name], 0, told["group"])

    def query(self, model: str, token_ids: Sequence[int], scope: Any = None) -> Any:
        body = {"model_name": model, "token_ids": list(token_ids)}
        if scope:
            body |= {"lora_name": scope.lora_name, "cache_salt": scope.cache_salt}
        status, answer = self.service.call("POST", "/query", body)
        is_known = any(worker.model == model for worker in self.workers)
        assert status == (200 if is_known else 404)
        return answer

    def options(self, worker: Worker, truth: Any) -> dict[str, Any]:
        """Return how a plain block is told of: in the group that counts."""
        return {"scope": self.make_scope(), "group": truth.full_group if worker.is_hybrid else None, "window": FULL}

    @staticmethod
    def tokens_of(worker: Worker, letter: int) -> list[int]:
        size = BLOCK_SIZES[worker.model]
        first = (5, 1000, (1 << 32) - size)[letter]
        return list(range(first, first + size))

    def teardown(self) -> None:
        """Compare once more, and take the fleet down."""
        try:
            self.agree(1)
        finally:
            for worker in self.workers:
                self.unregister(worker)
                for stream in worker.streams.values():
                    stream.close()


def test_a_random_life_of_a_fleet_is_answered_as_the_oracle_says(
    service: Any,
    make_stock_stream: Callable[..., Any],
    make_kvist_stream: Callable[..., Any],
    make_fleet_truth: Callable[[dict[str, int]], Any],
    make_scope: Callable[..., Any],
) -> None:
    ServiceMachine.service = service
    for function in ("make_stock_stream", "make_kvist_stream", "make_fleet_truth", "make_scope"):
        setattr(ServiceMachine, function, staticmethod(locals()[function]))
    run_state_machine_as_test(
        ServiceMachine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate] if os.environ.get("KVIST_ORACLE_NO_SHRINK") else list(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
