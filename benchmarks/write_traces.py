"""Made-up traces of shapes that `kv` was not tuned on, as files for `kvist simulate`.

    python benchmarks/write_traces.py FOLDER [--requests 2000]

Documents used once (by Zipf), long agents, tenants with their own system prompts, three system prompts of 20,000
tokens, eight samples of a prompt at once, short chats beside long documents, prompts that share nothing, and chats
whose turns are minutes apart; and chats behind one, two or ten system prompts of 10,000 to 60,000 tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest

BLOCK_SIZE, LONGEST = 64, 110_000

Line: TypeAlias = dict[str, Any]
Shape: TypeAlias = Callable[[Random, str], list[Line]]


def full(num_tokens: int) -> int:
    """Return a prefix's length, in full blocks."""
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def block_id(owner: str, idx: int) -> int:
    return xxh3_64_intdigest(f"{owner} {idx}".encode()) >> 12


def zipf(random: Random, number: int, exponent: float) -> int:
    return random.choices(range(number), [1 / (idx + 1) ** exponent for idx in range(number)])[0]


def gap_s(random: Random, turn: int, least: float, mean: float) -> float:
    return 0.0 if turn == 0 else least + random.expovariate(1 / mean)


def tokens(random: Random, least: int, mean: float) -> int:
    return least + int(random.expovariate(1 / mean))


def session(name: str, shared: str, num_shared: int, turns: Iterable[tuple[float, int, int]]) -> list[Line]:
    """Return a line for each turn: seconds since the one before, tokens that are new, and tokens of the answer."""
    num_tokens, at_s, lines = num_shared, 0.0, []
    names = [block_id(shared, idx) for idx in range(num_shared // BLOCK_SIZE)]
    for after_s, num_new, num_output in turns:
        num_tokens, at_s = num_tokens + num_new, at_s + after_s
        if num_tokens > LONGEST:
            break
        end = (num_tokens + num_output) // BLOCK_SIZE
        names += [block_id(name, idx) for idx in range(len(names), end)]
        line = {"timestamp": int(at_s * 1e3), "input_length": num_tokens, "output_length": num_output}
        lines.append(line | {"hash_ids": names[: num_tokens // BLOCK_SIZE], "block_size": BLOCK_SIZE})
        num_tokens += num_output
    return lines


def rag(r: Random, name: str) -> list[Line]:
    document = zipf(r, 400, 0.9)
    length = full(Random(document).randrange(2000, 24_000))
    return session(name, f"document {document}", length, [(0.0, tokens(r, 60, 150), tokens(r, 20, 250))])


def agents(r: Random, name: str) -> list[Line]:
    tools = f"tools {r.randrange(4)}"
    turns = [
        (gap_s(r, turn, 4, 6), 80 + int(r.lognormvariate(6.3, 1.1)), tokens(r, 20, 120))
        for turn in range(r.randrange(10, 50))
    ]
    return session(name, tools, full(9000), turns)


def tenants(r: Random, name: str) -> list[Line]:
    tenant = zipf(r, 150, 1.1)
    turns = [
        (gap_s(r, turn, 10, 40), tokens(r, 30, 120), tokens(r, 20, 200))
        for turn in range(1 + int(r.expovariate(1 / 3)))
    ]
    return session(name, f"tenant {tenant}", full(Random(tenant).randrange(1000, 6000)), turns)


def hot(num_prompts: int, num_tokens: int, r: Random, name: str) -> list[Line]:
    product = zipf(r, num_prompts, 0.7)
    turns = [
        (gap_s(r, turn, 15, 30), tokens(r, 50, 400), tokens(r, 20, 300))
        for turn in range(1 + int(r.expovariate(1 / 1.5)))
    ]
    return session(name, f"product {product}", full(num_tokens), turns)


def samples(r: Random, name: str) -> list[Line]:
    shared = f"system {r.randrange(20)}"
    (line,) = session(name, shared, 1280, [(0.0, 200 + int(r.lognormvariate(8, 0.9)), tokens(r, 50, 400))])
    return [line | {"timestamp": 5 * idx} for idx in range(8)]


def mixed(r: Random, name: str) -> list[Line]:
    if r.random() < 0.9:
        turns = [
            (gap_s(r, turn, 8, 30), tokens(r, 20, 80), tokens(r, 20, 200))
            for turn in range(1 + int(r.expovariate(1 / 2)))
        ]
    else:
        turns = [
            (
                gap_s(r, turn, 20, 40),
                30_000 + r.randrange(30_000) if turn == 0 else tokens(r, 100, 200),
                tokens(r, 50, 300),
            )
            for turn in range(2 + int(r.expovariate(1 / 3)))
        ]
    return session(name, "system", 512, turns)


def one_off(r: Random, name: str) -> list[Line]:
    return session(name, "", 0, [(0.0, 70 + int(r.lognormvariate(7.5, 1.0)), tokens(r, 20, 250))])


def long_pauses(r: Random, name: str) -> list[Line]:
    shared = f"system {r.randrange(6)}"
    turns = [
        (gap_s(r, turn, 60, 240), 300 + int(r.lognormvariate(7.6, 1.0)), tokens(r, 30, 350))
        for turn in range(3 + int(r.expovariate(1 / 5)))
    ]
    return session(name, shared, 1024, turns)


SHAPES: dict[str, Shape] = {
    "rag2": rag,
    "agents": agents,
    "tenants": tenants,
    "fewhot": partial(hot, 3, 20_480),
    "samples": samples,
    "mixed": mixed,
    "oneoff": one_off,
    "longpause": long_pauses,
    "hot-1x10k": partial(hot, 1, 10_000),
    "hot-1x30k": partial(hot, 1, 30_000),
    "hot-1x60k": partial(hot, 1, 60_000),
    "hot-2x30k": partial(hot, 2, 30_000),
    "hot-10x10k": partial(hot, 10, 10_000),
}


def main() -> None:
    """Write a file for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, shape in SHAPES.items():
        random, at_s, lines = Random(f"{name} 101"), 0.0, list[Line]()
        while len(lines) < 1.6 * args.requests:  # those that are cut off are the ends of sessions
            at_s += random.expovariate(1.0)
            begun = shape(random, f"{name} {at_s}")
            lines += [line | {"timestamp": line["timestamp"] + int(at_s * 1e3)} for line in begun]
        lines = sorted(lines, key=lambda line: line["timestamp"])[: args.requests]
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
