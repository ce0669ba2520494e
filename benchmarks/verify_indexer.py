"""Do `kvist index` and `dynamo.indexer` give the same answers, block for block, and if not, which is right?

Both follow the same events of the same simulated engines over ZMQ and get the same queries; a dict of sets, which
hashes nothing, says what the engines hold at that moment. Each scenario is one thing that engines do. An answer is
*short* if it leaves out blocks that are held, and *long* if it counts blocks that are not.

    python benchmarks/verify_indexer.py [--quick]
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import zmq
from _common import report, table
from _engines import BLOCK_SIZE
from _indexers import SIDES, start_both

WORKERS = 2
POLL_S, MAX_POLLS = 0.002, 2000
PACKAGES = ("ai-dynamo-runtime", "pyzmq", "msgspec")
MEDIA = ("GPU", "CPU", "STORAGE")
Prompt = tuple[int, ...]


@dataclass
class Engine:
    """What one worker's engine holds, and the events it has to tell; a name is the engine's own hash of a block."""

    rng: random.Random
    number: int
    hash_form: str = "unsigned"
    is_map: bool = True
    group: str | None = None
    """The kind of cache group of ordinary events, where the engine says it."""
    has_own_names: bool = False
    held: dict[tuple[int, int], dict[int, Prompt]] = field(default_factory=dict)
    """By rank and tier: which block each name stands for. A block is all tokens up to its end."""
    events: dict[int, list[Any]] = field(default_factory=dict)

    def store(
        self, prompt: Prompt, first: int, *, rank: int = 0, tier: int = 0, alias: int = 0, group: str | None = None
    ) -> None:
        """Store the prompt's blocks from the number `first` on, below the one before, which must be held."""
        blocks = [prompt[: end * BLOCK_SIZE] for end in range(first + 1, len(prompt) // BLOCK_SIZE + 1)]
        held = self.held.setdefault((rank, tier), {})
        parent = self.name_of(prompt[: first * BLOCK_SIZE], alias) if first else None
        if parent is not None and not any(parent in names for (r, _), names in self.held.items() if r == rank):
            blocks = []  # nobody can place them
            names = [self.name_of(prompt, alias)]
        else:
            names = [self.name_of(block, alias) for block in blocks]
        if group != "sliding_window":
            held.update(zip(names, blocks, strict=False))
        self.tell(rank, "BlockStored", names, parent, list(prompt[first * BLOCK_SIZE :]), tier, group)

    def remove(self, name: int, *, rank: int = 0, tier: int = 0, group: str | None = None) -> None:
        """Remove one block."""
        if group != "sliding_window":
            self.held[rank, tier].pop(name, None)
        self.tell(rank, "BlockRemoved", [name], None, None, tier, group)

    def clear(self, rank: int = 0) -> None:
        """Remove everything."""
        for key in [key for key in self.held if key[0] == rank]:
            self.held[key] = {}
        self.events.setdefault(rank, []).append({"type": "AllBlocksCleared"} if self.is_map else ["AllBlocksCleared"])

    def tell(
        self, rank: int, kind: str, names: list[int], parent: int | None, token_ids: Any, tier: int, group: str | None
    ) -> None:
        """Queue an event in vLLM's form."""
        fields: dict[str, Any] = {"type": kind, "block_hashes": [self.wire(name) for name in names]}
        if kind == "BlockStored":
            fields |= {"parent_block_hash": None if parent is None else self.wire(parent), "token_ids": token_ids}
            fields |= {"block_size": BLOCK_SIZE, "lora_id": None, "medium": MEDIA[tier], "lora_name": None}
            if group is not None:
                fields |= {"group_idx": int(group == "sliding_window"), "kv_cache_spec_kind": group}
                fields |= {"kv_cache_spec_sliding_window": 512} if group == "sliding_window" else {}
        else:
            fields |= {"medium": MEDIA[tier]}
            fields |= {} if group is None else {"group_idx": int(group == "sliding_window")}
        self.events.setdefault(rank, []).append(fields if self.is_map else list(fields.values()))

    def name_of(self, block: Prompt, alias: int = 0) -> int:
        """Return the engine's hash of a block: that of all engines, unless each has a seed of its own."""
        seed = self.number if self.has_own_names else 0
        return int.from_bytes(hashlib.blake2b(repr((seed, alias, block)).encode(), digest_size=8).digest())

    def wire(self, name: int) -> int | bytes:
        if self.hash_form == "bytes":
            return hashlib.blake2b(name.to_bytes(8), digest_size=24).digest() + name.to_bytes(8)
        return name - (1 << 64) if self.hash_form == "signed" and name >> 63 else name

    def depths(self, prompt: Prompt) -> dict[int, list[int]]:
        """Return for each rank how many leading tokens are held: on the GPU, with the CPU, in any tier."""
        depths = {}
        for rank in {rank for rank, _ in self.held}:
            row: list[int] = []
            blocks: set[Prompt] = set()
            for tier in range(len(MEDIA)):
                blocks.update(self.held.get((rank, tier), {}).values())
                ends = range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
                row.append(
                    next((end - BLOCK_SIZE for end in ends if prompt[:end] not in blocks), len(ends) * BLOCK_SIZE)
                )
            depths[rank] = row
        return depths


class Wire:
    """One PUB socket a side and worker, all of which carry the same."""

    def __init__(self, stack: ExitStack) -> None:
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        self._sockets: dict[str, list[zmq.Socket[bytes]]] = {side: [] for side in SIDES}
        self.endpoints: dict[str, list[str]] = {side: [] for side in SIDES}
        for side in SIDES:
            for _ in range(WORKERS):
                publication = context.socket(zmq.PUB)
                publication.bind("tcp://127.0.0.1:*")
                self._sockets[side].append(publication)
                self.endpoints[side].append(publication.getsockopt_string(zmq.LAST_ENDPOINT))
        self._sequences = [0] * WORKERS

    def flush(self, worker: int, engine: Engine) -> None:
        """Send what the engine has to tell, a batch a rank."""
        for rank, events in engine.events.items():
            payload = msgspec.msgpack.encode([time.time(), events, rank])
            for side in SIDES:
                self._sockets[side][worker].send_multipart([b"", self._sequences[worker].to_bytes(8, "big"), payload])
            self._sequences[worker] += 1
        engine.events = {}


Step = Callable[[Engine], Prompt | None]
"""Lets an engine do something, and returns a prompt that it was about."""


def prompt_of(rng: random.Random) -> Prompt:
    """Return one of few prompts of up to eight blocks that share prefixes."""
    blocks = [rng.choice((1, 1, 2)) for _ in range(rng.randint(1, 8))]
    return tuple(
        token
        for depth, letter in enumerate(blocks)
        for token in range(letter * 1000 + depth, letter * 1000 + depth + BLOCK_SIZE)
    )


def missing(engine: Engine, prompt: Prompt, rank: int = 0) -> int:
    """Return the first block of the prompt that the rank's GPU does not hold."""
    blocks = engine.held.get((rank, 0), {}).values()
    ends = range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
    return next((idx for idx, end in enumerate(ends) if prompt[:end] not in blocks), len(ends))


def serve(engine: Engine, rank: int = 0, **options: Any) -> Prompt:
    """Store what of a prompt is not there yet, as prefix caching does."""
    prompt = prompt_of(engine.rng)
    first = missing(engine, prompt, rank)
    if first * BLOCK_SIZE < len(prompt):
        engine.store(prompt, first, rank=rank, **options)
    return prompt


def evict(engine: Engine, choose: Callable[[list[int]], int], **options: Any) -> Prompt | None:
    """Remove a block from a rank's tier."""
    key = (options.get("rank", 0), options.get("tier", 0))
    held = engine.held.get(key, {})
    if not held:
        return None
    name = choose(sorted(held, key=lambda name: (len(held[name]), name)))
    prompt = held[name]
    engine.remove(name, **options)
    return prompt


def leaves_first(engine: Engine) -> Prompt | None:
    return serve(engine) if engine.rng.random() < 0.6 else evict(engine, lambda names: names[-1])


def any_order(engine: Engine) -> Prompt | None:
    return serve(engine) if engine.rng.random() < 0.6 else evict(engine, engine.rng.choice)


def middle_again(engine: Engine) -> Prompt | None:
    """Remove a block amid a chain and store that block alone again."""
    prompt = serve(engine)
    num_blocks = len(prompt) // BLOCK_SIZE
    if num_blocks > 2:
        middle = engine.rng.randrange(1, num_blocks - 1)
        end = (middle + 1) * BLOCK_SIZE
        engine.remove(engine.name_of(prompt[:end]))
        engine.store(prompt[:end], middle)
    return prompt


def ranks(engine: Engine) -> Prompt | None:
    rank = engine.rng.randrange(3)
    return serve(engine, rank) if engine.rng.random() < 0.7 else evict(engine, lambda names: names[-1], rank=rank)


def tiers(engine: Engine) -> Prompt | None:
    """Copy what the GPU holds to the host, evict it from the GPU, and drop the host's copies now and then."""
    choice = engine.rng.random()
    if choice < 0.4:
        return serve(engine)
    if choice < 0.6:
        return evict(engine, lambda names: names[-1])
    if choice < 0.7:
        return evict(engine, lambda names: names[-1], tier=1)
    held = engine.held.get((0, 0), {})
    if not held:
        return None
    prompt = engine.rng.choice(sorted(held.values()))
    engine.store(prompt, 0, tier=engine.rng.choice((1, 1, 2)))
    return prompt


def stored_twice(engine: Engine) -> Prompt | None:
    """Report blocks again that are held, as with `kv_cache_report_mode="full"`."""
    prompt = leaves_first(engine)
    if prompt is not None and missing(engine, prompt) * BLOCK_SIZE >= len(prompt):
        engine.store(prompt, 0)
    return prompt


def two_names(engine: Engine) -> Prompt | None:
    """Name a block twice, as an engine does that hashes more than tokens, and remove the names one by one."""
    prompt = prompt_of(engine.rng)
    if engine.rng.random() < 0.6:
        engine.store(prompt, 0, alias=engine.rng.randrange(2))
        return prompt
    return evict(engine, lambda names: names[-1])


def orphans(engine: Engine) -> Prompt | None:
    """Store below a block that was never heard of."""
    prompt = serve(engine)
    stranger = tuple(engine.rng.randrange(1 << 20) for _ in range(2 * BLOCK_SIZE))
    engine.store(stranger, 1)
    return stranger if engine.rng.random() < 0.5 else prompt


def hybrid(engine: Engine) -> Prompt | None:
    """Full attention beside a sliding window that lets go early; both name blocks alike."""
    if engine.rng.random() < 0.3:
        return evict(engine, lambda names: names[-1], group=engine.group)
    prompt = serve(engine, group=engine.group)
    engine.store(prompt, 0, group="sliding_window")
    for end in range(BLOCK_SIZE, len(prompt) - BLOCK_SIZE, BLOCK_SIZE):
        engine.remove(engine.name_of(prompt[:end]), group="sliding_window")
    return prompt


def clears(engine: Engine) -> Prompt | None:
    if engine.rng.random() < 0.1:
        engine.clear()
    return leaves_first(engine)


SCENARIOS: dict[str, tuple[Step, dict[str, Any]]] = {
    "prefixes stored, leaves evicted first": (leaves_first, {}),
    "the same, by engines that hash with seeds of their own": (leaves_first, {"has_own_names": True}),
    "the same in arrays": (leaves_first, {"is_map": False}),
    "the same with signed hashes": (leaves_first, {"hash_form": "signed"}),
    "the same with hashes as bytes": (leaves_first, {"hash_form": "bytes"}),
    "blocks evicted in any order": (any_order, {}),
    "a block amid a chain removed, stored again": (middle_again, {}),
    "three ranks in one stream": (ranks, {}),
    "three tiers": (tiers, {}),
    "blocks reported again": (stored_twice, {}),
    "two names for one block": (two_names, {}),
    "chains below an unknown parent": (orphans, {}),
    "the cache cleared now and then": (clears, {}),
    "full attention beside a sliding window": (hybrid, {"group": "full_attention"}),
}
"""The last one's cache groups would stay known: whatever comes after it must name them too."""


def expected_answer(engines: list[Engine], prompt: Prompt) -> dict[str, Any]:
    """Return what both should answer."""
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, Any] = {}
    for worker, engine in enumerate(engines, 1):
        rows = {str(rank): row for rank, row in engine.depths(prompt).items() if row[-1]}
        if rows:
            gpu, cpu, disk = (max(row[tier] for row in rows.values()) for tier in range(len(MEDIA)))
            dp = {rank: row[0] for rank, row in rows.items()}
            instances[str(worker)] = {"longest_matched": disk, "gpu": gpu, "dp": dp, "cpu": cpu, "disk": disk}
            if gpu:
                scores[str(worker)] = {rank: tokens for rank, tokens in dp.items() if tokens}
    return {"scores": scores, "frequencies": [], "instances": instances}


def judge(answer: dict[str, Any], expected: dict[str, Any]) -> str:
    """Return whether an answer is right, short or long."""
    if answer == expected:
        return "right"
    given, true = (Counter(dict(_numbers(each["instances"]))) for each in (answer, expected))
    return "long" if given - true else "short"


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, int):
        yield path, value
    else:
        for key, item in value.items():
            yield from _numbers(item, f"{path}/{key}")


class Comparison:
    """Both services, on the same wire."""

    def __init__(self, stack: ExitStack) -> None:
        self._wire = Wire(stack)
        self._indexers = start_both(stack, self._wire.endpoints)
        self._marks = count(1)
        self._deaf: set[str] = set()
        self._settle([Engine(random.Random(0), number) for number in range(WORKERS)])  # both have subscribed

    def run(self, step: Step, engines: list[Engine], num_rounds: int) -> Counter[str]:
        """Let the engines live; return how many answers were right, short and long, by side."""
        verdicts: Counter[str] = Counter()
        self._deaf.clear()
        for _ in range(num_rounds):
            prompts: set[Prompt] = set()
            for engine in engines:
                prompts.update(prompt for prompt in (step(engine) for _ in range(5)) if prompt is not None)
            self._settle(engines)
            for prompt in prompts:
                expected = expected_answer(engines, prompt)
                for side, indexer in self._indexers.items():
                    verdicts[f"{side} {judge(indexer.ask(prompt), expected)}"] += 1
        for engine in engines:
            for rank in range(3):
                engine.clear(rank)
        self._settle(engines)
        return verdicts

    def _settle(self, engines: list[Engine]) -> None:
        """Send everything and behind it, from each worker, a block of its own; return once both show those."""
        for worker, engine in enumerate(engines):
            self._wire.flush(worker, engine)
            mark = (next(self._marks), *range(1 << 31, (1 << 31) + BLOCK_SIZE - 1))
            for num_polls in count():
                if num_polls % 100 == 0:  # again now and then: a service just started may not have subscribed yet
                    engine.store(mark, 0, group=engine.group)
                    self._wire.flush(worker, engine)
                waiting = [side for side in SIDES if side not in self._deaf and not self._shows(side, worker, mark)]
                if not waiting:
                    time.sleep(0.05 if self._deaf else 0.0)
                    break
                if num_polls == MAX_POLLS:  # it does not take these events at all, and its answers will tell
                    self._deaf.update(waiting)
                time.sleep(POLL_S)

    def _shows(self, side: str, worker: int, mark: Prompt) -> bool:
        return str(worker + 1) in self._indexers[side].ask(mark)["instances"]


def main() -> None:
    """Run all scenarios and report; fail if an answer of ours was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the steps")
    is_quick = parser.parse_args().quick
    results: dict[str, Counter[str]] = {}
    with ExitStack() as stack:
        comparison = Comparison(stack)
        for name, (step, options) in SCENARIOS.items():
            engines = [Engine(random.Random(f"{name} {number}"), number, **options) for number in range(WORKERS)]
            results[name] = comparison.run(step, engines, 5 if is_quick else 30)
    columns = [f"{side} {verdict}" for side in SIDES for verdict in ("right", "short", "long")]
    rows = [(name, *(verdicts[column] for column in columns)) for name, verdicts in results.items()]
    report("verify_indexer", table(["answers", *columns], rows), {"results": results}, PACKAGES, save=not is_quick)
    if any(verdicts["kvist short"] or verdicts["kvist long"] for verdicts in results.values()):
        sys.exit("kvist answered wrongly")


if __name__ == "__main__":
    main()
