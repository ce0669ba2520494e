"""A random life of a fleet: real sockets in, `/query` out, and every answer is the oracle's."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from lives import seeds

LIVES = seeds(12)
NUM_STEPS = 60
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


class Life:
    """Drives the service, its fleet and the oracle side by side, as a seed has it."""

    def __init__(self, seed: int, service: Any, streams: Sequence[Callable[..., Any]], truth: Any, scope: Any) -> None:
        self.random = random.Random(seed)
        self.service = service
        self.make_stock_stream, self.make_kvist_stream, self.make_sidecar_stream = streams
        self.truth = truth
        self.make_scope = scope
        self.workers: list[Worker] = []
        self.prompts: dict[str, set[tuple[Any, tuple[int, ...]]]] = {model: set() for model in BLOCK_SIZES}
        self.told: list[str] = []

    def live(self) -> None:
        acts = {
            self.leave: 1,
            self.leave_and_come_back: 1,
            self.restart: 1,
            self.restart_a_sidecar: 1,
            self.put_a_publisher_before_the_engine_or_take_it_away: 1,
            self.store: 12,
            self.store_again: 6,
            self.store_below_what_nobody_knows: 1,
            self.use_an_engine_hash_again: 2,
            self.offload_by_hash_alone: 6,
            self.store_what_fills_no_block: 1,
            self.remove: 10,
            self.clear: 4,
            self.lose: 3,
            self.resend: 2,
            self.agree: 2,
        }
        for _ in range(self.random.randint(1, 3)):
            self.join()
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
            if not self.workers or (len(self.workers) < 3 and not self.random.randrange(10)):
                self.join()
            self.told.append(act.__name__)
            act()
        self.agree()

    # --- Who is there -----------------------------------------------------------------------------------------------

    def join(self) -> None:
        model = self.random.choice([*BLOCK_SIZES])
        wire = self.random.choice([None, *range(NUM_WIRES)])
        ranks = self.random.choice([(0,), (0,), (0, 3)])
        has_stream_a_rank, says_rank = self.random.choice([True, False]), self.random.choice([True, False])
        can_be_hybrid = wire is None or wire in VLLM_WIRES
        has_sidecar = wire is not None and not self.random.randrange(3)
        streams: dict[int, Any] = {}
        for rank in ranks:
            if streams and not has_stream_a_rank:
                streams[rank] = streams[ranks[0]]
            elif wire is None:
                streams[rank] = self.make_kvist_stream(BLOCK_SIZES[model])
            elif has_sidecar:
                streams[rank] = self.make_sidecar_stream(BLOCK_SIZES[model], wire)
            else:
                must_say_rank = len(ranks) > 1 and not has_stream_a_rank
                streams[rank] = self.make_stock_stream(BLOCK_SIZES[model], wire, says_rank or must_say_rank)
        self.workers.append(Worker(next(_numbers), model, streams, can_be_hybrid and self.random.choice([True, False])))
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

    def pick(self) -> tuple[Worker, int, Any, Any]:
        worker = self.random.choice(self.workers)
        rank, stream = self.random.choice([*worker.streams.items()])
        truth = self.truth.rank(worker.model, worker.number, rank)
        truth.tells_groups = stream.is_stock
        truth.is_vllm = stream.is_vllm
        return worker, rank, stream, truth

    def leave(self) -> None:
        worker = self.workers.pop(self.random.randrange(len(self.workers)))
        self.unregister(worker)
        self.truth.left(worker.model, worker.number)
        for stream in worker.streams.values():
            stream.close()

    def leave_and_come_back(self) -> None:
        worker = self.random.choice(self.workers)
        self.unregister(worker)
        self.register(worker)

    def restart(self) -> None:
        worker, _, stream, _ = self.pick()
        stream.restart()
        self.truth.restarted(worker.model, worker.number, [r for r in worker.streams if worker.streams[r] is stream])

    def restart_a_sidecar(self) -> None:
        streams = [each for worker in self.workers for each in worker.streams.values() if hasattr(each, "engine")]
        if streams:
            self.random.choice(streams).restart_sidecar()

    def put_a_publisher_before_the_engine_or_take_it_away(self) -> None:
        """Restart at the same endpoint as the other kind: the registration stays what it is."""
        worker, _, old, _ = self.pick()
        size, wire = BLOCK_SIZES[worker.model], self.random.choice(VLLM_WIRES)
        if "engine=" in old.url or hasattr(old, "engine"):
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

    def tell_stored(
        self,
        picked: tuple[Worker, int, Any, Any],
        engine_hashes: Sequence[int],
        token_ids: Sequence[int],
        parent: int | None = None,
        tier: int = 0,
        **options: Any,
    ) -> None:
        worker, rank, stream, truth = picked
        above = truth.find(parent) or ()
        prompt = tuple(token for _, tokens in above for token in tokens) + tuple(token_ids)
        self.prompts[worker.model].add((above[0][0] if above else options["scope"], prompt))
        truth.stored(engine_hashes, token_ids, parent, tier, **options)
        stream.stored(rank, engine_hashes, token_ids, parent, tier, **options)

    def store(self) -> None:
        worker, _, stream, truth = picked = self.pick()
        names = sorted({name for held in truth.tiers for name in held})
        above = self.random.choice([None, *names]) if self.random.randrange(3) else None
        block = () if above is None else truth.find(above)
        scopes = [(), (), (), ("adapter",), (None, "salt"), ("adapter", "salt")]
        block_scope = self.make_scope(*self.random.choice(scopes)) if above is None else block[-1][0]
        group = self.random.choice([0, 0, 1, 2]) if worker.is_hybrid else None
        alias = 0 if worker.is_hybrid else self.random.choice([0, 0, 0, 1])
        token_ids: list[int] = []
        hashes: list[int] = []
        for letter in self.random.choices([0, 0, 1, 2], k=self.random.randint(1, 4)):
            token_ids += self.tokens_of(worker, letter)
            block = (*block, (block_scope, tuple(self.tokens_of(worker, letter))))
            hashes.append(worker.name_of(block, alias))
        options = {"scope": block_scope, "group": group, "window": SLIDING if group == 1 else FULL}
        self.tell_stored(picked, hashes, token_ids, above, self.random.choice([0, 0, 0, 1, 2, 3]), **options)
        if self.random.choice([True, False]):
            stream.flush()

    def store_again(self) -> None:
        """Store what is held once more: under another name, in another tier, or after it was removed."""
        worker, rank, stream, truth = picked = self.pick()
        held = sorted(((name, block) for held in truth.tiers for name, block in held.items()), key=repr)
        if not held:
            return
        old_name, block = self.random.choice(held)
        options, tier = self.options(worker, truth), self.random.choice([0, 0, 1])
        if self.random.choice([True, False]):
            truth.removed([old_name], tier, group=options["group"])
            stream.removed(rank, [old_name], tier, options["group"])
        first = max(0, len(block) - self.random.randint(1, 4))
        above = next((n for held in truth.tiers for n, b in held.items() if first and b == block[:first]), None)
        if first and above is None:
            first = 0
        alias = 0 if worker.is_hybrid else self.random.choice([0, 1])
        hashes = [worker.name_of(block[: idx + 1], alias) for idx in range(first, len(block))]
        token_ids = [token for _, tokens in block[first:] for token in tokens]
        self.tell_stored(picked, hashes, token_ids, above, tier, **options | {"scope": block[0][0]})

    def store_below_what_nobody_knows(self) -> None:
        worker, _, _, truth = picked = self.pick()
        letters = self.random.choices([0, 1, 2], k=self.random.randint(1, 3))
        token_ids = [token for letter in letters for token in self.tokens_of(worker, letter)]
        hashes = [worker.name_of(("orphan", idx), 0) for idx in range(len(letters))]
        self.tell_stored(picked, hashes, token_ids, worker.name_of("nobody", 0), **self.options(worker, truth))

    def use_an_engine_hash_again(self) -> None:
        worker, _, _, truth = picked = self.pick()
        names = sorted({name for held in truth.tiers for name in held})
        if names and not worker.is_hybrid:
            tokens = self.tokens_of(worker, self.random.randrange(3))
            self.tell_stored(picked, [self.random.choice(names)], tokens, **self.options(worker, truth))

    def offload_by_hash_alone(self) -> None:
        """Only blocks below a held one, as engines do: the others cannot be placed."""
        worker, _, _, truth = picked = self.pick()
        blocks = {block for held in truth.tiers for block in held.values()}
        names = sorted({n for held in truth.tiers for n, b in held.items() if len(b) == 1 or b[:-1] in blocks})
        if names:
            tier = self.random.randrange(4)
            self.tell_stored(picked, [self.random.choice(names)], [], None, tier, **self.options(worker, truth))

    def store_what_fills_no_block(self) -> None:
        worker, _, stream, truth = picked = self.pick()
        num_tokens = self.random.choice([1, 3, 8, 15, 17])
        if stream.is_stock and num_tokens % BLOCK_SIZES[worker.model]:
            hashes = [worker.name_of(("misaligned", num_tokens), 0)]
            self.tell_stored(picked, hashes, list(range(num_tokens)), **self.options(worker, truth))

    def remove(self) -> None:
        """Remove blocks that the rank holds in this tier or elsewhere, or that it never held, in any order."""
        worker, rank, stream, truth = self.pick()
        tier = self.random.choice([0, 0, 0, 1, 2, 3])
        known = sorted(truth.tiers[tier]) or [worker.name_of("nobody", 0)]
        hashes = self.random.choices(known, k=self.random.randint(1, 5))
        group = self.random.randrange(3) if worker.is_hybrid else None
        for event in [hashes] if self.random.choice([True, False]) else [[engine_hash] for engine_hash in hashes]:
            truth.removed(event, tier, group=group)
            stream.removed(rank, event, tier, group)

    def clear(self) -> None:
        _, rank, stream, truth = self.pick()
        truth.cleared()
        stream.cleared(rank)

    # --- What the wire does -----------------------------------------------------------------------------------------

    def lose(self) -> None:
        self.pick()[2].num_to_lose = self.random.randint(1, 4)

    def resend(self) -> None:
        stream = self.pick()[2]
        stream.flush()
        stream.resend(self.random.randint(1, 5))

    # --- What is asked ----------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Mark the end of every stream, wait for the marks, and compare everything at once."""
        for worker in self.workers:
            for rank, stream in worker.streams.items():
                self.mark(worker, rank, stream)
        for model in BLOCK_SIZES:
            for scope, token_ids in sorted(self.prompts[model], key=repr):
                prompt = [*token_ids, *range(self.random.randrange(4))]
                answer = self.query(model, prompt, scope)
                assert "error" in answer or answer == self.truth.answer(model, prompt, scope), self.told
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
        groups = [self.options(worker, truth)]
        truth.stored([name], token_ids, **groups[0])  # a sliding group that was published becomes one of the others
        groups += [groups[0] | {"group": group, "window": each[0]} for group, each in truth.others.items()]
        for told in groups[1:]:
            truth.stored([name], token_ids, **told)
        for told in groups:
            stream.stored(rank, [name], token_ids, **told)
        stream.flush()
        expected = self.truth.answer(worker.model, token_ids)
        assert expected["instances"], "a mark that nobody holds cannot be waited for"
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

    def end(self) -> None:
        for worker in self.workers:
            self.unregister(worker)
            for stream in worker.streams.values():
                stream.close()


@pytest.mark.parametrize("seed", LIVES)
def test_a_random_life_of_a_fleet_is_answered_as_the_oracle_says(
    seed: int,
    service: Any,
    make_stock_stream: Callable[..., Any],
    make_kvist_stream: Callable[..., Any],
    make_sidecar_stream: Callable[..., Any],
    make_fleet_truth: Callable[[dict[str, int]], Any],
    make_scope: Callable[..., Any],
) -> None:
    streams = make_stock_stream, make_kvist_stream, make_sidecar_stream
    life = Life(seed, service, streams, make_fleet_truth(BLOCK_SIZES), make_scope)
    try:
        life.live()
    finally:
        life.end()
