"""Whole workers that can be stopped, looked into and killed, and a model with much KV for little computing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from kvist.engine import bundled_model_path

DEADLINE_S, ANSWER_TIMEOUT_S = 300.0, 300.0  # far more than a machine with nothing else to do needs
READY = re.compile(r"^kvist serve: \S+ on (http://127\.0\.0\.1:\d+), ", re.MULTILINE)
FAILURE = re.compile(r"kv transfer failed request_id=\S+ reason=(.*)")
GAUGES = (
    "engine_kv_blocks_used",
    "engine_prompts_held",
    "engine_requests_receiving",
    "engine_fetches_abandoned",
    "transfer_writing",
    "transfer_quarantined_bytes",
    "transfer_bounce_used_bytes",
    "transfer_bounce_quarantined_bytes",
)


async def until(condition: Callable[[], object]) -> None:
    """Poll a condition, and fail past a deadline."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"never became true: {condition}"
        await asyncio.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Worker:
    """A `kvist serve` process, reached over HTTP, by signals, and through /proc."""

    client: httpx.AsyncClient
    pid: int
    pidfd: int
    log: Path
    transfer_port: int

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"temperature": 0, "ignore_eos": True} | body)

    async def text(self, body: dict[str, Any]) -> str:
        answer = await self.post(body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Have a prompt computed and held; return how to fetch it."""
        answer = await self.post({"prompt": prompt, "max_tokens": 4, "kv_transfer_params": {"do_remote_decode": True}})
        assert answer.status_code == 200, answer.text
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params

    async def metrics(self) -> dict[str, float]:
        """Return every metric, summed over its labels."""
        sums: dict[str, float] = {}
        for line in (await self.client.get("/metrics")).text.splitlines():
            if not line.startswith("#"):
                name = re.split(r"[ {]", line, maxsplit=1)[0].removeprefix("kvist_").removesuffix("_total")
                sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
        return sums

    async def metric(self, name: str) -> float:
        return (await self.metrics())[name]

    async def reaches(self, name: str, value: float) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.metric(name) != value:
                pass  # a request is wait enough

    async def is_idle(self) -> None:
        """Fail unless soon nothing is held here, reserved, written or kept out of use."""
        give_up_s = time.monotonic() + DEADLINE_S
        while left := {name: value for name, value in (await self.metrics()).items() if name in GAUGES and value}:
            assert time.monotonic() < give_up_s, f"never idle: {left}\n{self.log.read_text()}"
            await asyncio.sleep(0.01)

    async def describe(self) -> str:
        """Return what every thread of it does, what it counts and what it has logged."""
        self._send(signal.SIGUSR1)
        counts = {name: value for name, value in (await self.metrics()).items() if value and "transfer" in name}
        return f"{counts}\n{self.log.read_text()}"

    async def stop(self) -> None:
        """Stop every thread of it, as SIGSTOP does."""
        self._send(signal.SIGSTOP)
        await self.stops()

    async def stops(self) -> None:
        await until(lambda: self.is_stopped)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    async def kill(self) -> None:
        """End it as kill -9 does, and wait until it is gone."""
        if not self.has_ended:
            self._send(signal.SIGKILL)
        await until(lambda: self.has_ended)

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    @property
    def is_stopped(self) -> bool:
        return self._states() == {"T"}

    def failures(self) -> list[str]:
        """Return the reasons of the fetches that have failed here."""
        return FAILURE.findall(self.log.read_text())

    def unread_bytes(self) -> int:
        """Return how much of what its peers have sent lies in the sockets behind its endpoint."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(f":{self.transfer_port:04X}"))

    def shared_bytes(self) -> int:
        """Return how much of its shared memory, pools and bounce regions, has ever been written to, by whomever."""
        port = self.client.base_url.port
        mine = [fd for fd in Path(f"/proc/{self.pid}/fd").iterdir() if f"memfd:kvist-127.0.0.1:{port}/" in _link(fd)]
        sizes = {status.st_ino: status.st_blocks * 512 for status in map(os.stat, mine)}
        return sum(sizes.values())

    def _send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def _states(self) -> set[str]:
        """Return the states of its threads: T is stopped."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


class Factory:
    """A process of which workers are forked."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("factory.py"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        command = [sys.executable, script]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self._hear() == "ready"

    def fork(self, **asked: Any) -> int:
        """Return the id of a new worker's process."""
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return int(self._hear())

    def close(self) -> None:
        """End it, and with it every worker."""
        self._process.kill()
        self._process.communicate()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="session")
def factory() -> Iterator[Factory]:
    factory = Factory()
    yield factory
    factory.close()


@pytest.fixture(scope="session")
def much_kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model that computes a token's mebibyte of KV about as fast as it can be copied."""
    path = tmp_path_factory.mktemp("much-kv")
    vocab_size = json.loads((bundled_model_path() / "config.json").read_text())["vocab_size"]
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=128,
        num_key_value_heads=128,
        head_dim=256,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.5))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model_path() / name, path)
    return path


@pytest.fixture(scope="session")
def serve(factory: Factory, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a context manager that is a running worker of a model, with these flags."""
    logs = tmp_path_factory.mktemp("logs")

    @asynccontextmanager
    async def serve_(
        model: Path,
        *flags: str,
        is_bounced: bool = False,
        scatter_gate: Path | None = None,
        stops_amid_copy: bool = False,
        environment: dict[str, str] | None = None,
        hash_root: int | None = None,
    ) -> AsyncIterator[Worker]:
        log = logs / f"{len(list(logs.iterdir()))}.log"
        log.touch()
        arguments = ["--log-level", "warning", "serve", "--model", str(model)]
        if "--served-model-name" not in flags:
            arguments += ["--served-model-name", "tiny"]
        arguments += ["--port", "0", "--kv-events", "none", "--kv-transfer", "tcp://127.0.0.1:0", *flags]
        pid = factory.fork(
            arguments=arguments,
            log=str(log),
            is_bounced=is_bounced,
            scatter_gate=None if scatter_gate is None else str(scatter_gate),
            stops_amid_copy=stops_amid_copy,
            environment=environment or {},
            hash_root=hash_root,
        )
        async with AsyncExitStack() as exits:
            pidfd = os.pidfd_open(pid)
            exits.callback(os.close, pidfd)
            await until(lambda: READY.search(log.read_text()) or select.select([pidfd], [], [], 0)[0])
            match = READY.search(log.read_text())
            assert match, log.read_text()
            # A worker that was stopped for seconds ends its idle connections as soon as it goes on.
            limits = httpx.Limits(max_keepalive_connections=0)
            client = httpx.AsyncClient(base_url=match[1], timeout=ANSWER_TIMEOUT_S, limits=limits)
            await exits.enter_async_context(client)
            transfer = re.search(r"tcp://127\.0\.0\.1:(\d+)", (await client.get("/server_info")).text)
            assert transfer
            worker = Worker(client, pid, pidfd, log, int(transfer[1]))
            exits.push_async_callback(worker.kill)
            yield worker

    return serve_
