"""Can a tenant tell from the time of an answer what another tenant has requested?

A tenant requests a prompt of 1,000 tokens. Then another requests the same one and a new one, in random order, for one
token each, from one bundled engine behind a router. An attacker who takes the quicker of two for the cached one would
be right in `told apart` of all pairs: 50 % is chance. The limit is how much time an engine saves by its cache.

    python benchmarks/bench_isolation.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import httpx
from _common import report, table

from kvist.cli.up import ProcessGroup
from kvist.engine import bundled_model_path

SERVE = ("serve", "--model", str(bundled_model_path()), "--served-model-name", "m", "--port", "0")
ISOLATION = {"shared": (), "by tenant": ("--isolation", "tenant", "--isolation-secret", "kept-by-the-operator")}
NUM_TOKENS = 1000


async def attack(num_guesses: int, *options: str) -> dict[str, float]:
    """Return the seconds of right and of wrong guesses, and how often they are told apart."""
    random, seconds_of = Random(3), {"right": list[float](), "wrong": list[float]()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tenants.json"
        listed = [{"name": name, "keys": [sha256(name.encode()).hexdigest()]} for name in ("victim", "attacker")]
        path.write_text(json.dumps({"tenants": listed}))
        async with ProcessGroup() as group, httpx.AsyncClient(timeout=60, trust_env=False) as client:
            engine = await group.start("worker", *SERVE)
            command = ("route", "--worker-urls", engine.url, "--port", "0", "--tenants", str(path))
            router = await group.start("router", *command, *options)

            async def ask(tenant: str, prompt: list[int]) -> float:
                body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 1}
                headers, began_s = {"authorization": f"Bearer {tenant}"}, perf_counter()
                (await client.post(f"{router.url}/v1/completions", json=body, headers=headers)).raise_for_status()
                return perf_counter() - began_s

            for _ in range(num_guesses):
                prompts = {kind: [random.randrange(3, 900) for _ in range(NUM_TOKENS)] for kind in seconds_of}
                await ask("victim", prompts["right"])
                for kind in random.sample([*prompts], 2):
                    seconds_of[kind].append(await ask("attacker", prompts[kind]))
    right, wrong = seconds_of.values()
    told_apart = sum(each < other for each in right for other in wrong) / len(right) / len(wrong)
    return {"right_ms": median(right) * 1e3, "wrong_ms": median(wrong) * 1e3, "told_apart": told_apart}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = {name: asyncio.run(attack(20 if args.quick else 100, *each)) for name, each in ISOLATION.items()}
    rows = [
        [name, f"{each['right_ms']:.0f}", f"{each['wrong_ms']:.0f}", f"{each['told_apart']:.0%}"]
        for name, each in results.items()
    ]
    text = table(["caches", "right guess, median ms", "wrong guess", "told apart"], rows)
    report("bench_isolation", text, results, [], args.save)


if __name__ == "__main__":
    main()
