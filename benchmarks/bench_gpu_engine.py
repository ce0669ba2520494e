"""How many tokens a second does the engine generate on a GPU, and how many does vLLM on the same GPU?

A dense model of Llama 3.2's 1B shape with random weights in bfloat16; prompts of random tokens, greedy answers of 128.
Decode is the time of a batch less that of the same batch with answers of one token: what a step takes, beside the time
in which its memory traffic, weights and cached keys and values, passes at the speed of a device copy. Both engines with
their defaults, at most 64 sequences and 2,048 tokens a step, no prefix cache; each in a process of its own, one after
the other. Medians of three runs after a warm-up.

    python benchmarks/bench_gpu_engine.py [--vllm PYTHONPATH] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
from _common import report, table

Generate: TypeAlias = Callable[[list[list[int]], int], int]  # prompts, and tokens of each answer, to tokens generated

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
MAX_LEN, MAX_SEQS, MAX_STEP_TOKENS = 16384, 64, 2048
OUTPUT_LEN = 128
CASES = [(1, 512), (8, 512), (32, 512), (64, 512), (64, 1024), (8, 8192)]  # requests at once, tokens of each prompt
KV_BYTES = 2 * 2 * 8 * 64 * 16  # of one token, in all layers
ENGINES = ("kvist", "vllm")


def write_model(path: Path) -> None:
    """Write a checkpoint with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(path)


def kvist_engine(model: Path) -> Generate:
    from kvist.engine.config import EngineConfig
    from kvist.engine.loading import load_engine
    from kvist.engine.request import SequenceInput
    from kvist.openai.requests import SamplingParams

    limits: dict[str, Any] = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_STEP_TOKENS}
    config = EngineConfig(model_dir=model, device="cuda", max_model_len=MAX_LEN, has_prefix_cache=False, **limits)
    core = load_engine(config).core

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), SequenceInput(prompt, params))
        num_tokens = 0
        while core.has_work:
            num_tokens += sum(len(output.token_ids) for output in core.step())
        return num_tokens

    return generate


def vllm_engine(model: Path) -> Generate:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    limits: dict[str, Any] = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_STEP_TOKENS}
    llm = LLM(str(model), skip_tokenizer_init=True, max_model_len=MAX_LEN, enable_prefix_caching=False, **limits)

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return generate


def measure(engine: str, model: Path) -> None:
    """Print one line of JSON a case."""
    start = perf_counter()
    generate = {"kvist": kvist_engine, "vllm": vllm_engine}[engine](model)
    print(json.dumps({"start_s": round(perf_counter() - start, 1)}), flush=True)
    rng = random.Random(0)

    def seconds(num_requests: int, prompt_len: int, output_len: int) -> float:
        prompts = [[rng.randrange(1000, 120_000) for _ in range(prompt_len)] for _ in range(num_requests)]
        start = perf_counter()
        num_tokens = generate(prompts, output_len)
        taken = perf_counter() - start
        assert num_tokens == num_requests * output_len, f"{num_tokens} tokens"
        return taken

    for num_requests in (1, MAX_SEQS):
        seconds(num_requests, 512, 4)
    for num_requests, prompt_len in CASES:
        whole, first = (median(seconds(num_requests, prompt_len, n) for _ in range(3)) for n in (OUTPUT_LEN, 1))
        step_ms = (whole - first) / (OUTPUT_LEN - 1) * 1e3
        print(json.dumps({"whole_s": whole, "prefill_s": first, "step_ms": step_ms}), flush=True)


def copy_gb_s() -> float:
    """Return the bytes that a device copy reads and writes in a second."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(5):
        torch.cuda.synchronize()
        start = perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return 2 * source.nbytes / min(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHONPATH", help="where vLLM is installed; empty: beside this")
    parser.add_argument("--save", action="store_true", help="also write the output below benchmarks/results")
    parser.add_argument("--measure", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], Path(arguments.measure[1]))
        return
    gb_s, results = copy_gb_s(), {}
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model)
        weight_bytes = (model / "model.safetensors").stat().st_size
        torch.cuda.empty_cache()
        for engine in ENGINES[: 1 if arguments.vllm is None else 2]:
            paths = [arguments.vllm if engine == "vllm" else "", os.environ.get("PYTHONPATH", "")]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            command = [sys.executable, __file__, "--measure", engine, folder]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
            if run.returncode or len(lines) != len(CASES) + 1:
                raise SystemExit(f"{engine} ended with exit code {run.returncode} after {len(lines)} results")
            results[engine] = lines
    rows = []
    for i, (num_requests, prompt_len) in enumerate(CASES, 1):
        kv_bytes = num_requests * (prompt_len + OUTPUT_LEN // 2) * KV_BYTES
        floor_ms = (weight_bytes + kv_bytes) / gb_s / 1e6
        ours, *theirs = (lines[i] for lines in results.values())
        row: list[object] = [f"{num_requests} x {prompt_len}", f"{floor_ms:.2f}"]
        for each in (ours, *theirs):
            row += [f"{each['step_ms']:.2f}", f"{each['prefill_s'] * 1e3:.0f}"]
            row.append(f"{num_requests * OUTPUT_LEN / each['whole_s']:,.0f}")
        row += [f"{each['whole_s'] / ours['whole_s']:.2f}" for each in theirs]
        rows.append(row)
    columns = [f"{engine} {what}" for engine in results for what in ("step ms", "prefill ms", "tokens/s")]
    headers = ["requests x prompt", "floor ms", *columns, *["tokens/s / vLLM's"] * (len(results) - 1)]
    starts = ", ".join(f"{engine} {lines[0]['start_s']} s" for engine, lines in results.items())
    name = torch.cuda.get_device_name()
    markdown = f"{name}: copies {gb_s:,.0f} GB/s. Start to ready: {starts}.\n\n{table(headers, rows)}"
    facts = {"gpu": name, "copy_gb_s": gb_s, "weight_bytes": weight_bytes, "cases": CASES}
    report("gpu_engine", markdown, facts | results, ["torch", "triton", "transformers"], arguments.save)


if __name__ == "__main__":
    main()
