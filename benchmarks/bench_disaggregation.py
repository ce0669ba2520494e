"""What do clients see when prompts are computed apart from answers: the first token sooner, or the others more evenly?

Two workers in either arm, one thread each, with the same open load of long prompts that share nothing: `together` both
workers do everything, `apart` one prefills and the other decodes, and each prompt's KV goes from one into the other's
memory. A client asks the workers in turn, or first the one and then the other, as a router would. All four run all the
time, and the arms take the same arrivals in turns. Bound by the model's own steps: a prompt takes tens of decode steps,
and holds up every answer of the worker that computes it. With `apart` only one worker prefills, so prompts queue for
one where they otherwise have two: `load` is the share of time in which that one computes. The baseline is `together`
itself, with the same steps of at most 2048 tokens; ratios of wall-clock times in one run, no figures across runs.

    python benchmarks/bench_disaggregation.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias

import httpx
from _common import report, table

from kvist.cli._processes import ProcessGroup
from kvist.engine import bundled_model_path

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 32
VOCAB = range(3, 900)
PATH = "/v1/completions"

Ask: TypeAlias = Callable[[list[int]], Awaitable["Times"]]


@dataclass(slots=True)
class Times:
    """One request: seconds until its first token, and between each two that follow."""

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arm:
    """What the clients of one arm saw at one load."""

    first_s: list[float]
    gaps_s: list[float]

    @classmethod
    def of(cls, answers: list[Times]) -> Arm:
        """Return the times of all requests."""
        return cls([each.first_s for each in answers], [gap for each in answers for gap in each.gaps_s])

    def figures(self) -> dict[str, float]:
        """Return what is compared, in seconds."""
        return {
            "ttft_p50": quantile(self.first_s, 0.5),
            "ttft_p99": quantile(self.first_s, 0.99),
            "itl_p50": quantile(self.gaps_s, 0.5),
            "itl_p99": quantile(self.gaps_s, 0.99),
        }


def quantile(values: list[float], share: float) -> float:
    """Return a quantile, of at least one value."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def make_prompt(rng: random.Random) -> list[int]:
    """Return a prompt that begins like no other."""
    return [rng.choice(VOCAB) for _ in range(PROMPT_TOKENS)]


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    """Return a request whose answer has as many tokens as every other."""
    return {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True} | more


async def streamed(client: httpx.AsyncClient, url: str, request: dict[str, Any], began_s: float) -> Times:
    """Stream an answer; the time to its first token counts from `began_s`."""
    times, last_s = Times(), began_s
    async with client.stream("POST", url + PATH, json=request | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = perf_counter()
            if times.first_s:
                times.gaps_s.append(now_s - last_s)
            else:
                times.first_s = now_s - began_s
            last_s = now_s
    return times


async def held(client: httpx.AsyncClient, url: str, prompt: list[int]) -> dict[str, Any]:
    """Have a prompt computed and held; return how it is fetched."""
    answer = await client.post(url + PATH, json=body(prompt, kv_transfer_params={"do_remote_decode": True}))
    answer.raise_for_status()
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


@asynccontextmanager
async def fleet(client: httpx.AsyncClient) -> AsyncIterator[tuple[dict[str, Ask], list[str]]]:
    """Serve both arms, warm; the URLs are those of the worker that prefills and of the one that decodes."""
    serve = ("serve", "--model", str(bundled_model_path()), "--port", "0", "--kv-events", "none")
    apart = ("--kv-transfer", "tcp://127.0.0.1:0", "--no-kv-transfer-fallback")
    async with ProcessGroup() as group:
        children = await asyncio.gather(
            group.start("prefill", *serve, *apart, "--role", "prefill"),
            group.start("decode", *serve, *apart, "--role", "decode"),
            group.start("first", *serve),
            group.start("second", *serve),
        )
        prefill, decode, *both = (child.url for child in children)
        turns = itertools.cycle(both)

        async def ask_together(prompt: list[int]) -> Times:
            return await streamed(client, next(turns), body(prompt), perf_counter())

        async def ask_apart(prompt: list[int]) -> Times:
            began_s = perf_counter()
            params = await held(client, prefill, prompt)
            return await streamed(client, decode, body(prompt, kv_transfer_params=params), began_s)

        asks: dict[str, Ask] = {"together": ask_together, "apart": ask_apart}
        for ask in (ask_together, ask_together, ask_apart):
            await ask(make_prompt(random.Random(0)))
        yield asks, [prefill, decode]


async def prefill_s(ask: Ask, num_prompts: int) -> float:
    """Return how long one prompt takes with nothing else to do: the least of some."""
    rng = random.Random(1)
    return min([(await ask(make_prompt(rng))).first_s for _ in range(num_prompts)])


async def offered(ask: Ask, rate: float, num_requests: int, seed: int) -> list[Times]:
    """Send requests at random times, whether or not earlier ones were answered."""
    rng = random.Random(seed)
    prompts = [make_prompt(rng) for _ in range(num_requests)]
    async with asyncio.TaskGroup() as tasks:
        answers = []
        for prompt in prompts:
            answers.append(tasks.create_task(ask(prompt)))
            await asyncio.sleep(rng.expovariate(rate))
    return [answer.result() for answer in answers]


async def run(loads: tuple[float, ...], num_requests: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return the figures of each load: both arms in turns, who begins changing from round to round."""
    results = []
    async with AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=None)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=120, limits=limits))
        asks, urls = await stack.enter_async_context(fleet(client))
        alone_s = await prefill_s(asks["together"], 3)
        for load in loads:
            answers: dict[str, list[Times]] = {name: [] for name in asks}
            for number in range(num_rounds):
                for name in sorted(asks, reverse=bool(number % 2)):
                    answers[name] += await offered(asks[name], load / alone_s, num_requests, seed=number)
            figures = {name: Arm.of(times).figures() for name, times in answers.items()}
            ratios = {key: figures["apart"][key] / value for key, value in figures["together"].items()}
            results.append({"load": load, "num_requests": num_rounds * num_requests, "ratios": ratios, **figures})
        num_fetched = await metric(client, urls[1], "kvist_engine_prompts_fetched_total")
        if num_fetched < sum(each["num_requests"] for each in results):
            raise SystemExit(f"only {num_fetched:g} prompts were fetched: this was no test of two workers")
    return results


async def metric(client: httpx.AsyncClient, url: str, name: str) -> float:
    """Return a metric of a worker."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one load, two short rounds")
    parser.add_argument("--save", action="store_true", help="write the results below benchmarks/results")
    args = parser.parse_args()
    results = asyncio.run(run((0.5,), 10, 2) if args.quick else run((0.3, 0.5, 0.7), 30, 4))
    names = list(results[0]["ratios"])
    headers = ["load", "requests", *(f"{name.replace('_', ' ')}, apart / together" for name in names)]
    rows = [[each["load"], each["num_requests"], *(f"{each['ratios'][n]:.2f}" for n in names)] for each in results]
    rounded = [
        {
            key: {n: round(s, 4) for n, s in value.items()} if isinstance(value, dict) else value
            for key, value in r.items()
        }
        for r in results
    ]
    report("bench_disaggregation", table(headers, rows), {"cases": rounded}, ["torch", "httpx"], args.save)


if __name__ == "__main__":
    main()
