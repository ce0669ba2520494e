"""How much quality does an eight-bit KV cache cost, compared with a 16-bit one?

At every position of some texts: how far the next token's distribution is from that of bfloat16 (KL divergence in nats)
and how often the likeliest token is another one. Of greedy answers: how many are the same, and how many tokens come
before the first different one. For comparison there is float32, which differs from bfloat16 by rounding to 16 bits.
Scales are 1, or calibrated: each layer's largest key and value becomes the format's largest number. Texts are this
repository's documents for the bundled model, and noise for a random one of 40 million parameters, plain and again
with keys and values 2,048 times as large, which its other weights compensate. Nothing is timed.

    python benchmarks/bench_kv_dtypes.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import report, table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvist.engine import bundled_model_path
from kvist.engine.batch import GroupPages, HostBatch
from kvist.engine.models.config import load_model_config
from kvist.engine.models.weights import load_model
from kvist.engine.runner import Runner
from kvist.kvcache import KvDtype, plan_windows
from kvist.kvcache.tensors import KvTensors

BLOCK_SIZE, MAX_LEN, TEXT_LEN = 16, 1024, 512
NUM_PROMPT, NUM_ANSWER = 256, 64
LARGEST = {KvDtype.FP8_E4M3: 448.0, KvDtype.FP8_E5M2: 57344.0}
DOCS = Path(__file__).parent.parent / "docs"
Texts = list[list[int]]


class Reader:
    """A model over a cache of one dtype, which holds one sequence."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, kv_dtype: KvDtype) -> None:
        config = load_model_config(model_dir)
        self.model = load_model(model_dir, config, MAX_LEN, dtype, torch.device("cpu"))
        plan = plan_windows(config.layer_kv(kv_dtype), MAX_LEN)
        self._num_groups, num_blocks = len(plan.groups), MAX_LEN // BLOCK_SIZE
        self._tensors = KvTensors(plan, [num_blocks] * self._num_groups, BLOCK_SIZE, torch.device("cpu"))
        self._runner = Runner(self.model, plan, self._tensors, BLOCK_SIZE)
        self._table = np.arange(num_blocks, dtype=np.int32)[None, None]

    def read(self, token_ids: list[int], start: int = 0) -> torch.Tensor:
        """Return the logits of the tokens from `start` on; what is before them was read."""
        rows, end = np.arange(start, len(token_ids)), len(token_ids)
        group = GroupPages(self._table, np.zeros(1, np.int32), rows[None])
        is_decode = end - start == 1
        batch = HostBatch(
            input_ids=np.array(token_ids[start:]),
            positions=rows,
            seq_lens=np.array([end], np.int32),
            num_decodes=int(is_decode),
            prefill_start_loc=np.array([0] if is_decode else [0, end - start], np.int32),
            logit_rows=rows - start,
            groups=(group,) * self._num_groups,
        )
        return self._runner.compute(batch)

    def answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation."""
        token_ids, start = list(prompt), 0
        for _ in range(num_tokens):
            logits = self.read(token_ids, start)
            start = len(token_ids)
            token_ids.append(int(logits[-1].argmax()))
        return token_ids[len(prompt) :]

    def peaks(self) -> list[tuple[float, float]]:
        """Return each layer's largest key and value of the text that was read last."""
        caches = (
            self._tensors.by_slot(layer)[: TEXT_LEN // BLOCK_SIZE] for layer in range(len(self.model.config.layers))
        )
        return [(float(cache[:, 0].abs().max()), float(cache[:, 1].abs().max())) for cache in caches]


def bundled(num_texts: int) -> tuple[Path, Texts]:
    """Return the bundled model and the beginnings of documents."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    texts = [tokenizer.encode(path.read_text()[: 8 * TEXT_LEN])[:TEXT_LEN] for path in sorted(DOCS.glob("*.md"))]
    return bundled_model_path(), texts[:num_texts]


def at_random(num_texts: int, directory: Path, factor: float) -> tuple[Path, Texts]:
    """Return a random model whose keys and values are so much larger, in all else the same, and noise for it."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 12}
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": MAX_LEN}
    model = LlamaForCausalLM(LlamaConfig(**heads, **sizes))
    factors = {"k_proj": factor, "q_proj": 1 / factor, "v_proj": factor, "o_proj": 1 / factor, "lm_head": 5.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(factors.get(name.split(".")[-2], 1.0))
    model.save_pretrained(directory)
    return directory, torch.randint(sizes["vocab_size"], (num_texts, TEXT_LEN)).tolist()


def measure(name: str, model_dir: Path, texts: Texts) -> list[dict[str, Any]]:
    """Compare float32 and caches of eight bits, by scales of 1 and calibrated, with bfloat16."""
    base = Reader(model_dir, torch.bfloat16, KvDtype.BFLOAT16)
    expected = [base.read(text).log_softmax(-1) for text in texts]
    peaks = base.peaks()
    prompts = [text[:NUM_PROMPT] for text in texts]
    answers = [base.answer(prompt, NUM_ANSWER) for prompt in prompts]
    rows = []
    for kv_dtype in (KvDtype.FLOAT32, *LARGEST):
        reader = Reader(model_dir, torch.float32 if kv_dtype is KvDtype.FLOAT32 else torch.bfloat16, kv_dtype)
        for scales in (None, "calibrated") if kv_dtype in LARGEST else (None,):
            if scales:
                limit = LARGEST[kv_dtype]
                reader.model.kv_scales = {
                    layer: (key / limit, value / limit) for layer, (key, value) in enumerate(peaks)
                }
            got = [reader.read(text).log_softmax(-1) for text in texts]
            pairs = list(zip(expected, got, strict=True))
            divergence = torch.cat([(wanted.exp() * (wanted - found)).sum(-1) for wanted, found in pairs])
            is_other = torch.cat([wanted.argmax(-1) != found.argmax(-1) for wanted, found in pairs])
            found_answers = [reader.answer(prompt, NUM_ANSWER) for prompt in prompts]
            alike = [
                next((i for i, (a, b) in enumerate(zip(*each, strict=True)) if a != b), NUM_ANSWER)
                for each in zip(answers, found_answers, strict=True)
            ]
            rows.append(
                {
                    "model": name,
                    "cache": kv_dtype.value,
                    "scales": scales or "1",
                    "kl_mean": float(divergence.mean()),
                    "kl_p99": float(divergence.quantile(0.99)),
                    "other_top": float(is_other.float().mean()),
                    "answers_equal": sum(count == NUM_ANSWER for count in alike) / len(alike),
                    "tokens_equal": sum(alike) / len(alike),
                }
            )
    return rows


def main() -> None:
    """Measure all three models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer texts")
    parser.add_argument("--save", action="store_true", help="also write the output below benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_texts = 2 if arguments.quick else 8
    results = measure("bundled", *bundled(num_texts))
    for name, factor in (("random", 1.0), ("random, large keys and values", 2048.0)):
        with tempfile.TemporaryDirectory() as directory:
            results += measure(name, *at_random(num_texts // 2, Path(directory), factor))
    headers = ["model", "cache", "scales", "KL mean", "KL p99", "other likeliest token", "answers equal"]
    lines = []
    for row in results:
        cells = [row["model"], row["cache"], row["scales"], f"{row['kl_mean']:.1e}", f"{row['kl_p99']:.1e}"]
        cells += [f"{row['other_top']:.1%}", f"{row['answers_equal']:.0%}"]
        lines.append([*cells, f"{row['tokens_equal']:.0f} of {NUM_ANSWER}"])
    markdown = table([*headers, "tokens before another"], lines)
    report("bench_kv_dtypes", markdown, {"rows": results}, ["torch", "transformers"], arguments.save)


if __name__ == "__main__":
    main()
