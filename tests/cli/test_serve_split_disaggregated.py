"""Workers of split models that hand prompts to each other, as processes; answers are those of one unsplit engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import transformers

from kvist.engine import bundled_model_path
from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore
from kvist.engine.loading import load_engine
from kvist.engine.request import RequestOutput, SequenceInput
from kvist.openai.requests import SamplingParams
from kvist.openai.tokenization import ChatTokenizer

pytestmark = pytest.mark.xdist_group("split workers")

READY = re.compile(r"kvist serve: \S+ on (http://127\.0\.0\.1:\d+), ")
DEADLINE_S = 600.0  # two ranks take 15 CPU-seconds each to start, while others may have the machine
NUM_TOKENS = 16
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
}
MODELS: dict[str, transformers.PretrainedConfig] = {
    "llama, one KV head": transformers.LlamaConfig(**COMMON, num_key_value_heads=1, num_hidden_layers=2),
    "gemma3": transformers.Gemma3TextConfig(
        **COMMON,
        num_key_value_heads=2,
        num_hidden_layers=6,
        sliding_window=8,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        query_pre_attn_scalar=24,
    ),
}
# Small blocks, and chunks of prompts smaller than a prompt.
SERVE = (
    *("--port", "0", "--kv-events", "none", "--kv-transfer", "tcp://127.0.0.1:0", "--served-model-name", "tiny"),
    *("--block-size", "4", "--num-blocks", "700", "--max-model-len", "1024", "--max-num-batched-tokens", "40"),
    *("--max-num-seqs", "8"),
)
IDLE = (
    *("engine_kv_blocks_used", "engine_prompts_held", "engine_requests_receiving", "engine_fetches_abandoned"),
    *("transfer_quarantined_bytes", "transfer_bounce_used_bytes", "transfer_bounce_quarantined_bytes"),
)
ONE, TWO = (("--tensor-parallel-size", size) for size in "12")
NIXL = ("--kv-transfer-agent", "nixl")


BOUNCE = ("--kv-transfer-bounce-mib", "32")
ALWAYS_BOUNCE = """
import sys
from kvist.transfer.bounce import Bounce

Bounce.max_fragment_bytes = 1 << 40

from kvist.cli import main

if __name__ == "__main__":  # which followers, who are spawned, import as well
    sys.exit(main())
"""
"""Runs the command with everything bounced."""


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Fail unless a condition is soon true; followers' counts are a second old."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < give_up_s, condition
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Worker:
    client: httpx.AsyncClient
    process: asyncio.subprocess.Process

    async def text(self, prompt: list[int], params: dict[str, Any] | None = None) -> str:
        return (await self.post(prompt, params))["choices"][0]["text"]

    async def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return (await self.post(prompt, {"do_remote_decode": True}))["kv_transfer_params"]

    async def post(self, prompt: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await self.client.post("/v1/completions", json=body | {"kv_transfer_params": params})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def metric(self, name: str) -> float:
        """Return a metric's sum over its labels."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if re.match(rf"kvist_{name}(_total)?[ {{]", line)]
        assert values, f"no metric {name}"
        return sum(values)

    async def reaches(self, name: str, value: float) -> None:
        async def has_reached() -> bool:
            return await self.metric(name) == value

        await eventually(has_reached)

    async def is_idle(self) -> None:
        """Fail unless soon nothing is held here, reserved or kept out of use, on any rank."""
        for name in IDLE:
            await self.reaches(name, 0)

    def kill_follower(self) -> None:
        children = psutil.Process(self.process.pid).children()
        follower = next(child for child in children if "spawn_main" in " ".join(child.cmdline()))
        os.kill(follower.pid, signal.SIGKILL)

    async def has_ended_for_lack_of_a_rank(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            _, errors = await self.process.communicate()
        assert self.process.returncode == 1
        assert b"kvist serve: error: tensor-parallel rank 1 has ended with exit code -9" in errors


@asynccontextmanager
async def serve(model: Path, *flags: str) -> AsyncIterator[Worker]:
    kvist: tuple[str, ...] = ("-m", "kvist")
    if set(BOUNCE) <= set(flags):
        script = model.parent / "always_bounce.py"
        script.write_text(ALWAYS_BOUNCE)
        kvist = (str(script),)
    command = (sys.executable, *kvist, "--log-level", "error", "serve", "--model", str(model), *SERVE, *flags)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        match = None
        async with asyncio.timeout(DEADLINE_S):
            while match is None:  # NIXL has something to say first
                line = (await process.stdout.readline()).decode()
                assert line, (await process.communicate())[1].decode()
                match = READY.match(line)
        async with httpx.AsyncClient(base_url=match[1], timeout=DEADLINE_S) as client:
            yield Worker(client, process)
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()  # to the end of its pipes, which its followers have too


@asynccontextmanager
async def fleet(model: Path, *workers: tuple[str, ...]) -> AsyncIterator[list[Worker]]:
    """Start workers side by side, each with its flags."""
    async with AsyncExitStack() as exits:
        yield await asyncio.gather(*(exits.enter_async_context(serve(model, *flags)) for flags in workers))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a random model, with a tokenizer that knows more tokens than it has."""

    def write(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.08))
        model.save_pretrained(path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(bundled_model_path() / file, path)
        return path

    return write


class Alone:
    """One unsplit engine, in this process."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(model_dir=model, block_size=4, num_blocks=700, max_model_len=1024)
        self._core: EngineCore = load_engine(config).core
        self._tokenizer = ChatTokenizer.load(model)

    def text(self, prompt: list[int]) -> str:
        return "".join(output.text for output in self._outputs(prompt))

    def tokens(self, prompt: list[int]) -> list[int]:
        return [token_id for output in self._outputs(prompt) for token_id in output.token_ids]

    def _outputs(self, prompt: list[int]) -> list[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        self._core.add_request("0", SequenceInput(prompt, params, self._tokenizer.detokenizer()))
        outputs = []
        while self._core.has_work:
            outputs += self._core.step()
        return outputs


def make_prompt(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 512) for _ in range(count)]


async def hand_over(source: Worker, target: Worker, alone: Alone, seed: int) -> None:
    """Have prompts computed by both together: some at once, and one that goes on from another's answer."""
    prompts = [make_prompt(9 + 31 * i, seed + i) for i in range(3)]
    num_fetched = await target.metric("engine_prompts_fetched")

    async def both(prompt: list[int]) -> str:
        return await target.text(prompt, await source.prefill(prompt))

    assert await asyncio.gather(*map(both, prompts)) == [alone.text(prompt) for prompt in prompts]
    longer = [*prompts[2], *alone.tokens(prompts[2]), *make_prompt(9, seed + 3)]
    first = await source.post(longer, {"do_remote_decode": True})
    rest = await target.post(longer, first["kv_transfer_params"])
    assert rest["choices"][0]["text"] == alone.text(longer)
    for answer in (first, rest):
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64  # of the 71 that both have seen
    assert await target.metric("engine_prompts_fetched") == num_fetched + 4


async def assert_all_was_handed_over(workers: list[Worker]) -> None:
    """Fail unless every prompt was fetched, every byte that was sent was received, and nothing is left over."""
    for worker in workers:
        await worker.is_idle()
        assert await worker.metric("engine_fallbacks") == await worker.metric("engine_fetches_failed") == 0

    async def total(name: str) -> float:
        return sum([await worker.metric(name) for worker in workers])

    async def has_received_all() -> bool:
        return await total("transfer_sent_bytes") == await total("transfer_received_bytes") > 0

    await eventually(has_received_all)


async def test_ranks_that_have_the_same_head_hand_prompts_over_and_one_that_is_lost_costs_the_others_nothing(
    models, free_port
) -> None:
    model, endpoint = models("llama, one KV head"), f"tcp://127.0.0.1:{free_port()}"
    flags = ((*ONE, "--kv-transfer-timeout", "5"), (*TWO, "--kv-transfer", endpoint), TWO)
    async with fleet(model, *flags) as (one, two, other):
        alone, workers = Alone(model), [one, two, other]
        info = [(await worker.client.get("/server_info")).json()["kv_transfer"]["endpoints"] for worker in workers]
        assert [len(set(endpoints)) for endpoints in info] == [1, 2, 2]
        assert info[1][0] == endpoint
        for i, (source, target) in enumerate([(two, one), (one, two), (two, other)]):
            await hand_over(source, target, alone, 10 * i + 1)
        await assert_all_was_handed_over(workers)

        prompt, nobodys = make_prompt(50, 90), make_prompt(50, 91)
        params, unfetched = await two.prefill(prompt), await one.prefill(nobodys)
        two.kill_follower()
        other.kill_follower()
        assert await one.text(prompt, params) == alone.text(prompt)
        assert await one.metric("engine_fallbacks") == 1
        with pytest.raises((httpx.HTTPError, AssertionError)):
            await other.text(nobodys, unfetched)
        for worker in (two, other):
            await worker.has_ended_for_lack_of_a_rank()
        await one.is_idle()


async def test_ranks_share_a_bounce_region_where_a_windowed_models_heads_are_split_differently(models) -> None:
    """By NIXL, where it is installed: splits and agents without bounces are in tests/transfer."""
    agent = NIXL if importlib.util.find_spec("nixl") else ()
    model = models("gemma3")
    async with fleet(model, (*ONE, *BOUNCE, *agent), (*TWO, *BOUNCE, *agent)) as (one, two):
        alone = Alone(model)
        await hand_over(two, one, alone, 1)

        async def has_bounced_all() -> bool:
            return await two.metric("transfer_bounced_bytes") == await two.metric("transfer_sent_bytes") > 0

        await eventually(has_bounced_all)
        await hand_over(one, two, alone, 11)
        await assert_all_was_handed_over([one, two])
