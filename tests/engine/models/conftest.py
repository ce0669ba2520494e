"""A model over paged memory whose every logit can be looked at."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.models.config import load_model_config
from kvist.engine.models.weights import load_model
from kvist.engine.request import Request, TextStream
from kvist.engine.runner import Runner
from kvist.engine.scheduler import ScheduledRequest
from kvist.events import FULL
from kvist.kvcache import BlockHashChain, KvCacheManager, KvDtype, ScratchPolicy, plan_windows
from kvist.kvcache.tensors import KvTensors
from kvist.openai.requests import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 160, 512
CPU = torch.device("cpu")


class Harness:
    """A model over paged memory, without scheduler and sampler: every row's logits can be looked at.

    Each step checks that no slot is written twice and that each sequence holds exactly the blocks its window needs.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype = torch.float32,
        kv_dtype: KvDtype = KvDtype.FLOAT32,
        num_blocks: int = NUM_BLOCKS,
        has_scratch: bool = False,
    ) -> None:
        config = load_model_config(model_dir)
        self.plan = plan_windows(config.layer_kv(kv_dtype), MAX_LEN)
        self.model = load_model(model_dir, config, MAX_LEN, dtype, CPU)
        counts = [num_blocks] * len(self.plan.groups)
        self.tensors = KvTensors(self.plan, counts, BLOCK_SIZE, CPU)
        self.manager = KvCacheManager(self.plan.groups, counts, BLOCK_SIZE, scratch=ScratchPolicy())
        self.runner = Runner(self.model, self.plan, self.tensors, BLOCK_SIZE)
        self._has_scratch = has_scratch

    def open(self, token_ids: list[int], has_scratch: bool | None = None) -> Request:
        """Start a request with what the prefix cache has of it; `has_scratch` of its own, else the model's."""
        text = TextStream(None, ())
        request = Request("r", token_ids, SamplingParams(), 1, BlockHashChain(BLOCK_SIZE), text, random.Random(0))
        hit = self.manager.match(request.chain, token_ids)
        request.blocks = self.manager.open(
            hit,
            request.chain,
            token_ids,
            hit.num_tokens,
            is_scratch_allowed=self._has_scratch if has_scratch is None else has_scratch,
        )
        request.num_computed_tokens = hit.num_tokens
        return request

    def close(self, request: Request) -> None:
        """Take a request's blocks away: it ended, or was preempted."""
        assert request.blocks is not None
        self.manager.close(request.blocks)
        request.blocks = None
        request.num_computed_tokens = 0

    def step(self, *chunks: tuple[Request, int]) -> torch.Tensor:
        """Compute the next so many tokens of each request; return the logits of every row, decodes first."""
        scheduled = [ScheduledRequest(*chunk) for chunk in chunks]
        for request, num_new in scheduled:
            assert request.blocks is not None
            assert self.manager.grow(request.blocks, request.token_ids, request.num_computed_tokens + num_new)
        batch = self.runner.build_batch(scheduled)
        for pages in batch.groups:
            for written in pages.slot_mapping:
                assert len(np.unique(written[written >= 0])) == np.sum(written >= 0), "a slot is written twice"
        batch = dataclasses.replace(batch, logit_rows=np.arange(len(batch.input_ids)))
        logits = self.runner.compute(batch)
        for request, num_new in scheduled:
            self._check_held(request, num_new)
            request.num_computed_tokens += num_new
        self.manager.settle()
        return logits

    def decode(self, request: Request, until: int) -> torch.Tensor:
        """Compute tokens one at a time; return the logits of each."""
        return torch.cat([self.step((request, 1)) for _ in range(request.num_computed_tokens, until)])

    def _check_held(self, request: Request, num_new: int) -> None:
        assert request.blocks is not None
        history, num_tokens = request.num_computed_tokens, request.num_computed_tokens + num_new
        for pool, table in zip(self.manager.pools, request.blocks.tables, strict=True):
            window = pool.group.window
            first = 0 if window is FULL else max(0, history + 1 - window) // BLOCK_SIZE
            num_scratch = 0 if table.scratch is None else len(table.scratch.block_range)
            assert len(table.held()) + num_scratch == -(-num_tokens // BLOCK_SIZE) - first


@pytest.fixture
def harness(checkpoint: Callable[[str], Path]) -> Callable[..., Harness]:
    """Put a random model, by its name, or one in a directory, over memory of its own."""
    return lambda model, **settings: Harness(model if isinstance(model, Path) else checkpoint(model), **settings)


@pytest.fixture
def assert_generates_like(generate, greedy, tokens_of) -> Callable[[Any, Path], None]:
    """Hold an engine's greedy tokens, and their log probabilities, to a model of transformers."""

    def check(model: Any, model_dir: Path) -> None:
        core = load_engine(EngineConfig(model_dir=model_dir, block_size=4, num_blocks=128, max_model_len=128)).core
        prompt = list(range(3, 33))
        output = generate(core, [(prompt, greedy(20, logprobs=True))])["0"]
        sequence = prompt + tokens_of(output)
        with torch.inference_mode():
            expected = model.eval()(torch.tensor([sequence])).logits[0, len(prompt) - 1 : -1]
        assert sequence[len(prompt) :] == expected.argmax(-1).tolist()
        chosen = [each.token.logprob for part in output for each in part.logprobs]
        assert chosen == pytest.approx(expected.log_softmax(-1).max(-1).values.tolist(), abs=1e-4)

    return check


@pytest.fixture
def fp8_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Write a random model with its projections in FP8: scales have the `shape`, (-1, 1) for one a row."""

    def write(
        name: str,
        quantization: dict[str, Any],
        part: str = "weight_scale",
        shape: tuple[int, ...] = (-1, 1),
        change: Callable[[dict[str, torch.Tensor]], Any] = len,
    ) -> Path:
        tensors = load_file(checkpoint(name) / "model.safetensors")
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            weight = tensors[key]
            largest = weight.abs().amax(1, keepdim=True) if shape == (-1, 1) else weight.abs().max()
            tensors[key] = (weight / (largest / 448)).to(torch.float8_e4m3fn)
            tensors[key.replace("weight", part)] = (largest / 448).reshape(shape).clone()
        change(tensors)
        path = Path(tempfile.mkdtemp(dir=tmp_path))
        save_file(tensors, path / "model.safetensors")
        config = json.loads((checkpoint(name) / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        return path

    return write


@pytest.fixture
def keep_fp8(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """From its call on, keep FP8 weights on the CPU, too, and return a list that grows by each product's shape.

    Each product is held to what torch's `ScaledBlas.cpp` demands of scales by row on a GPU.
    """

    def keep() -> list[Any]:
        products: list[Any] = []
        genuine = functional.scaled_mm

        def scaled_mm(
            a: torch.Tensor, b: torch.Tensor, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, **options: Any
        ) -> torch.Tensor:
            assert a.dtype == b.dtype == torch.float8_e4m3fn
            assert a.is_contiguous()
            assert b.t().is_contiguous()
            assert all(size % 16 == 0 for size in b.shape)
            assert scale_a.dtype == scale_b.dtype == torch.float32
            assert (scale_a.shape, scale_b.shape) == ((len(a), 1), (1, b.shape[1]))
            assert scale_b.stride(1) == 1
            products.append(b.shape)
            return genuine(a, b, scale_a, recipe_a, scale_b, recipe_b, **options)

        monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
        monkeypatch.setattr("kvist.engine.models.weights._FP8_DEVICES", ("cpu",))
        return products

    return keep
