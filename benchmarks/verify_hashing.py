"""Are our canonical hashes Dynamo's, bit for bit, and how do they compare in time?

Bound by making one bytes object and one integer a block, and by the chain, which is serial; XXH3 of 64 bytes itself is
some 15 ns. Baseline: `compute_block_hash_for_seq` of ai-dynamo-runtime, compiled Rust, for the local hashes; it does
not return chained ones, whose agreed values are in tests/events/test_hashing.py.

    python benchmarks/verify_hashing.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import timeit
from importlib.metadata import version

import numpy as np
from dynamo._core import compute_block_hash_for_seq

from kvist.events.hashing import block_hashes, local_block_hashes

NUM_TOKENS = 16_000
BLOCK_SIZE = 16


def compare(num_cases: int, rng: random.Random) -> int:
    """Hash random prompts both ways and return how many blocks were compared; exits at the first difference."""
    num_blocks = 0
    for case_idx in range(num_cases):
        block_size = rng.choice([1, 2, 4, 16, 32, 64, 128])
        num_tokens = rng.randrange(0, 6 * block_size + 2)
        token_ids = [rng.getrandbits(rng.choice([8, 17, 32])) for _ in range(num_tokens)]
        scope = {
            "lora_name": rng.choice([None, None, "", "sql", "adaptér"]),
            "is_eagle": rng.random() < 0.3,
        }
        cache_salt = rng.choice([None, None, "", "tenant-7"])
        mm_hashes = None
        if rng.random() < 0.4:
            mm_hashes = [[rng.getrandbits(64) for _ in range(rng.choice([0, 0, 1, 2, 3]))] for _ in range(8)]
        mm_infos = mm_hashes and [
            {"mm_objects": [{"mm_hash": item, "offsets": []} for item in items]} if items else None
            for items in mm_hashes
        ]
        theirs = compute_block_hash_for_seq(token_ids, block_size, mm_infos, cache_namespace=cache_salt, **scope)
        ours = local_block_hashes(token_ids, block_size, cache_salt=cache_salt, mm_hashes=mm_hashes, **scope)
        if ours != theirs:
            sys.exit(f"case {case_idx} differs: {block_size=} {token_ids=} {scope=} {cache_salt=} {mm_hashes=}")
        num_blocks += len(ours)
    return num_blocks


def best_us(function, repeats: int) -> float:
    """Return the time of the fastest of many calls."""
    return min(timeit.repeat(function, number=1, repeat=repeats)) * 1e6


def main() -> None:
    """Compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the cases and repetitions")
    scale = 1 if parser.parse_args().quick else 10
    rng = random.Random(2026)
    num_cases = 2_000 * scale
    num_compared = compare(num_cases, rng)
    print(f"equal in all {num_compared} blocks of {num_cases} prompts")

    token_ids = [rng.randrange(150_000) for _ in range(NUM_TOKENS)]
    token_array = np.array(token_ids, dtype=np.int64)
    times_us = {
        "ours, local, list": best_us(lambda: local_block_hashes(token_ids, BLOCK_SIZE), 50 * scale),
        "ours, local and chained, list": best_us(lambda: block_hashes(token_ids, BLOCK_SIZE), 50 * scale),
        "ours, local and chained, array": best_us(lambda: block_hashes(token_array, BLOCK_SIZE), 50 * scale),
        "dynamo, local, list": best_us(lambda: compute_block_hash_for_seq(token_ids, BLOCK_SIZE), 50 * scale),
    }
    print(f"{NUM_TOKENS} tokens in blocks of {BLOCK_SIZE}:")
    for name, time_us in times_us.items():
        print(f"  {name:32}{time_us:8.0f} us")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "benchmark": "verify_hashing",
                "num_compared_blocks": num_compared,
                "times_us": {name: round(time_us) for name, time_us in times_us.items()},
                "device": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "versions": {name: version(name) for name in ("ai-dynamo-runtime", "xxhash", "numpy")},
                "commit": commit.stdout.strip(),
            }
        )
    )


if __name__ == "__main__":
    main()
