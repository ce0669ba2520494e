"""What do clients gain when prompts are computed apart from answers: a sooner first token, or more even later ones?

Two workers in either arm, one thread each, behind a router of their own, with the same open load of long prompts that
share nothing. With `together` both workers do everything; with `apart` one prefills and the other decodes, and each
prompt's KV is copied from one to the other. All run all the time, and the arms take the same arrivals in turns. The
model's own steps are the bottleneck: a prompt takes tens of decode steps, and delays every answer of the worker that
computes it. With `apart` only one worker prefills, so prompts queue for one instead of two: `load` is the share of time
in which that one computes. The baseline is `together`, with the same steps of at most 2048 tokens; figures are ratios
of wall-clock times within one run.

The second table is of one request at a time, by the length of its prompt: the time to the first token, and the part of
it after the prefill worker's last chunk. That wait is measured twice: with the decode worker asked as soon as the first
chunk is computed (`streamed`), as the router does, and with it asked when the whole prompt is (`at the end`). All share
two cores. An idle worker costs nothing, so this table is as on separate hosts but for the network; under load the arms
compete for the same cores, `apart` no more than `together`.

    python benchmarks/bench_disaggregation.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx
from _common import report, table

from kvist.cli.up import ProcessGroup
from kvist.engine import bundled_model_path

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 32
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32000)
VOCAB = range(3, 900)
MODEL = "tiny"


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


def make_prompt(rng: random.Random, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt that begins like no other."""
    return [rng.choice(VOCAB) for _ in range(num_tokens)]


def body_of(prompt: list[int], **more: Any) -> dict[str, Any]:
    """Return a request for as many tokens as every other."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    return body | more


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], **more: Any) -> Times:
    """Stream an answer."""
    body = body_of(prompt, **more)
    times = Times()
    began_s = last_s = perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
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


@dataclass(frozen=True, slots=True)
class Fleet:
    """The routers' URLs, by arm, and those of the workers apart."""

    routers: dict[str, str]
    prefill: str
    decode: str


def long_model(directory: str) -> Path:
    """Return the bundled model, for contexts longer than it was trained on."""
    for file in bundled_model_path().iterdir():
        if file.is_file():
            (Path(directory) / file.name).symlink_to(file)
    config = Path(directory) / "config.json"
    fields = json.loads(config.read_text()) | {"max_position_embeddings": max(LENGTHS) + OUTPUT_TOKENS}
    config.unlink()
    config.write_text(json.dumps(fields))
    return Path(directory)


@asynccontextmanager
async def fleet(client: httpx.AsyncClient, model: Path) -> AsyncIterator[Fleet]:
    """Serve both arms, warm."""
    serve = ("serve", "--model", str(model), "--served-model-name", MODEL, "--port", "0")
    apart = ("--kv-transfer", "tcp://127.0.0.1:0", "--no-kv-transfer-fallback")
    async with ProcessGroup() as group:
        prefill, decode, first, second = await asyncio.gather(
            group.start("prefill", *serve, *apart, "--role", "prefill"),
            group.start("decode", *serve, *apart, "--role", "decode"),
            group.start("first", *serve),
            group.start("second", *serve),
        )
        pairs = {"apart": (prefill, decode), "together": (first, second)}
        routers = {
            name: await group.start(name, "route", "--port", "0", "--worker-urls", *(worker.url for worker in pair))
            for name, pair in pairs.items()
        }
        urls = {name: router.url for name, router in routers.items()}
        for url in (first.url, second.url, urls["apart"]):
            await ask(client, url, make_prompt(random.Random(1)))
        yield Fleet(urls, prefill.url, decode.url)


async def prefill_s(client: httpx.AsyncClient, url: str, num_prompts: int) -> float:
    """Return how long one prompt takes with nothing else to do: the least of some."""
    rng = random.Random(2)
    return min([(await ask(client, url, make_prompt(rng))).first_s for _ in range(num_prompts)])


async def wait_s(client: httpx.AsyncClient, served: Fleet, prompt: list[int], *, is_streamed: bool) -> float:
    """Return how long after the prefill worker's last token the decode worker says its first."""
    body = body_of(prompt, max_tokens=1, stream=is_streamed, kv_transfer_params={"do_remote_decode": True})
    async with client.stream("POST", f"{served.prefill}/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        params = json.loads((await anext(lines)).removeprefix("data: "))["kv_transfer_params"]
        decoding = asyncio.create_task(ask(client, served.decode, prompt, kv_transfer_params=params))
        asked_s = ended_s = perf_counter()
        async for line in lines:
            if line.startswith("data: {"):
                ended_s = perf_counter()
    return asked_s + (await decoding).first_s - ended_s


async def by_length(client: httpx.AsyncClient, served: Fleet, lengths: Sequence[int], num_rounds: int) -> list[Any]:
    """Return medians in milliseconds for each length, all ways in turns."""
    results = []
    for length in lengths:
        rng = random.Random(length)
        times: dict[str, list[float]] = {"apart": [], "together": [], "streamed": [], "at the end": []}
        for _ in range(num_rounds):
            for name, url in served.routers.items():
                times[name].append((await ask(client, url, make_prompt(rng, length))).first_s)
            for name in ("streamed", "at the end"):
                prompt = make_prompt(rng, length)
                times[name].append(await wait_s(client, served, prompt, is_streamed=name == "streamed"))
        results.append({"prompt": length, **{name: round(median(each) * 1000, 1) for name, each in times.items()}})
    return results


async def offered(client: httpx.AsyncClient, url: str, rate: float, num_requests: int, seed: int) -> list[Times]:
    """Send requests at random times, whether or not earlier ones were answered."""
    rng = random.Random(seed)
    prompts = [make_prompt(rng) for _ in range(num_requests)]
    async with asyncio.TaskGroup() as tasks:
        answers = []
        for prompt in prompts:
            answers.append(tasks.create_task(ask(client, url, prompt)))
            await asyncio.sleep(rng.expovariate(rate))
    return [answer.result() for answer in answers]


async def run(
    loads: tuple[float, ...], num_requests: int, num_rounds: int, lengths: Sequence[int]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the figures of each load: both arms in turns, who begins changing from round to round; and by length."""
    results = []
    async with AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=None)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=120, limits=limits))
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        served = await stack.enter_async_context(fleet(client, long_model(directory)))
        lengths_ms = await by_length(client, served, lengths, num_rounds)
        alone_s = await prefill_s(client, served.routers["together"], 3)
        seeds = count(100)  # no two rounds share a prompt, and both arms of one have the same
        for load in loads:
            answers: dict[str, list[Times]] = {name: [] for name in served.routers}
            for seed in islice(seeds, num_rounds):
                for name in sorted(served.routers, reverse=bool(seed % 2)):
                    answers[name] += await offered(client, served.routers[name], load / alone_s, num_requests, seed)
            figures = {name: Arm.of(times).figures() for name, times in answers.items()}
            ratios = {key: figures["apart"][key] / value for key, value in figures["together"].items()}
            results.append({"load": load, "num_requests": num_rounds * num_requests, "ratios": ratios, **figures})
        num_fetched = await metric(client, served.decode, "kvist_engine_prompts_fetched_total")
        if num_fetched < sum(each["num_requests"] for each in results):
            raise SystemExit(f"only {num_fetched:g} prompts were fetched: this was no test of two workers")
    return results, lengths_ms


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
    few, all_ = ((0.5,), 10, 2, LENGTHS[:2]), ((0.3, 0.5, 0.7), 30, 4, LENGTHS)
    results, lengths_ms = asyncio.run(run(*(few if args.quick else all_)))
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
    ways = ["apart", "together", "streamed", "at the end"]
    columns = [
        "prompt",
        "ttft apart, ms",
        "together, ms",
        "ratio",
        "after the last chunk, streamed, ms",
        "at the end, ms",
    ]
    by_ = [
        [each["prompt"], *(each[way] for way in ways[:2]), f"{each['apart'] / each['together']:.2f}"]
        + [each[way] for way in ways[2:]]
        for each in lengths_ms
    ]
    tables = f"{table(headers, rows)}\n\n{table(columns, by_)}"
    report("bench_disaggregation", tables, {"cases": rounded, "lengths": lengths_ms}, ["torch", "httpx"], args.save)


if __name__ == "__main__":
    main()
