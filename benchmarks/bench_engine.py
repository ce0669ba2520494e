"""What does paged, continuously batched serving gain or cost against transformers' own `generate`, on one CPU core?

The bundled model is so small that with few requests the number of operations in a step is the bottleneck; it is the
same on both sides except for attention over the cache, sampling and scheduling. With many requests it is matrix
products. The baseline is transformers with its dynamic cache and SDPA, one batch of equally long prompts, so that no
padding is wasted. "shared" prompts have all but their last 16 tokens in common, which transformers cannot use. CPU
seconds, best of some runs in turns, after a warm-up.

    python benchmarks/bench_engine.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time

import torch
from _common import report, table
from transformers import AutoModelForCausalLM

from kvist.engine import bundled_model_path
from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.request import SequenceInput
from kvist.openai.requests import SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """Requests at once, tokens a prompt and of an answer, and whether prompts share their beginning."""

    num_requests: int
    prompt_len: int
    output_len: int
    is_shared: bool = False

    def prompts(self, rng: random.Random) -> Prompts:
        """Return fresh random prompts."""
        stem_len = self.prompt_len - 16 if self.is_shared else 0
        stem = [rng.randrange(5, 3000) for _ in range(stem_len)]
        tail_len = self.prompt_len - stem_len
        return [stem + [rng.randrange(5, 3000) for _ in range(tail_len)] for _ in range(self.num_requests)]


CASES = [
    Case(1, 64, 64),
    Case(8, 64, 64),
    Case(32, 64, 64),
    Case(1, 1024, 64),
    Case(8, 512, 32),
    Case(8, 512, 32, is_shared=True),
]


def kvist_runner() -> Callable[[Prompts, int], None]:
    """Return a function that generates with the bundled engine; memory is fresh for each call's prompts."""
    core = load_engine(EngineConfig(model_dir=bundled_model_path())).core

    def run(prompts: Prompts, output_len: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), SequenceInput(prompt, params))
        while core.has_work:
            core.step()

    return run


def transformers_runner() -> Callable[[Prompts, int], None]:
    """Return a function that generates one batch with transformers, in float32 as the engine does."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32)

    def run(prompts: Prompts, output_len: int) -> None:
        ids = torch.tensor(prompts)
        length = {"min_new_tokens": output_len, "max_new_tokens": output_len}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)

    return run


def best_cpu_s(runs: Sequence[Callable[[Prompts, int], None]], case: Case, repetitions: int) -> list[float]:
    """Return each one's least CPU seconds of some repetitions in turns, every one on prompts never seen before."""
    rng = random.Random(0)
    for run in runs:
        run(case.prompts(rng), 2)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repetitions):
        for run, of_run in zip(runs, times, strict=True):
            prompts = case.prompts(rng)
            start = process_time()
            run(prompts, case.output_len)
            of_run.append(process_time() - start)
    return [min(of_run) for of_run in times]


def main() -> None:
    """Measure every case on both sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run a case, for a look")
    parser.add_argument("--save", action="store_true", help="write the results below benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = kvist_runner(), transformers_runner()
    rows, results = [], []
    for case in CASES:
        repetitions = 1 if args.quick else 5
        mine, baseline = best_cpu_s((ours, theirs), case, repetitions)
        num_tokens = case.num_requests * case.output_len
        name = f"{case.num_requests} x {case.prompt_len} -> {case.output_len}{' shared' if case.is_shared else ''}"
        ratio = baseline / mine
        rows.append([name, f"{num_tokens / mine:,.0f}", f"{num_tokens / baseline:,.0f}", f"{ratio:.2f}x"])
        results.append({"case": name, "kvist_cpu_s": round(mine, 4), "transformers_cpu_s": round(baseline, 4)})
    markdown = table(["requests x prompt -> output", "kvist tokens/s", "transformers tokens/s", "ratio"], rows)
    report("engine", markdown, {"cases": results}, ["torch", "transformers"], args.save)


if __name__ == "__main__":
    main()
