"""`kvist publish` as a process of its own, between a stand-in for vLLM and an indexer."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.snapshot import block_digest
from kvist.indexer import Indexer
from kvist.publisher.state import unpack
from kvist.radix import RadixIndex

TOKENS = [1, 2, 3, 4]


def tokens_of(number: int) -> list[int]:
    return [number * 4 + idx for idx in range(4)]


def kvist(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys; from kvist.cli import main; sys.exit(main())", "publish", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_publish_stands_between_an_engine_and_an_indexer_until_signalled(start_vllm, free_port, until, number):
    port = free_port()
    engine = start_vllm(port)
    engine.store(77, TOKENS)
    endpoint = f"tcp://127.0.0.1:{port}"
    process = kvist("--engine", "vllm", "--endpoint", endpoint, "--to", "tcp://127.0.0.1:0", "--worker", "pod-1")
    assert process.stdout is not None
    ready = process.stdout.readline()
    published_at = re.fullmatch(
        r"kvist publish: ready at (\S+) worker=pod-1 block_size=from the first event.*\n", ready
    )
    assert published_at, ready
    index = RadixIndex()
    block_hash = int(block_hashes(TOKENS, 4)[0])
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w1", published_at[1])
        await until(lambda: indexer.is_exact("w1", 0) and index.digest(WorkerRank("w1", 0)).num_blocks == 1)
    assert index.digest(WorkerRank("w1", 0)).digest == block_digest(block_hash, Tier.GPU)
    process.send_signal(number)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert output.startswith("kvist publish: 1 engine batches in, 0 restarts")
    assert output.count("\n") == 1


async def test_the_engines_own_configuration_says_where_its_ranks_are(start_vllm, free_port, until):
    port = free_port()
    engine = start_vllm(port)
    engine.publish(engine.stored(77, TOKENS) | {"lora_id": 3})
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 1}"}
    process = kvist("--kv-events-config", json.dumps(config), "--to", "tcp://127.0.0.1:0", "--lora-name", "3=sql")
    assert process.stdout is not None
    published_at = process.stdout.readline().split()[4]
    block_hash = int(block_hashes(TOKENS, 4, lora_name="sql")[0])
    index = RadixIndex()
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w1", published_at)
        await until(lambda: index.digest(WorkerRank("w1", 0)).digest == block_digest(block_hash, Tier.GPU))
    process.terminate()
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert f"connecting to tcp://127.0.0.1:{port} engine=vllm replay=tcp://127.0.0.1:{port + 1}" in errors


class Killed:
    """`kvist publish` with a state folder, in front of one index: killed and started again at will."""

    def __init__(self, engine_port: int, own_port: int, folder: Path) -> None:
        self._args = (
            *("--engine", "vllm", "--endpoint", f"tcp://127.0.0.1:{engine_port}", "--worker", "w"),
            *("--to", f"tcp://127.0.0.1:{own_port}", "--state-dir", str(folder)),
        )
        self._state = folder / "sidecar-w.state"

    def start(self) -> subprocess.Popen[str]:
        self._process = kvist(*self._args)
        assert self._process.stdout is not None
        assert "ready at" in self._process.stdout.readline()
        return self._process

    def has_saved(self, next_sequence: int) -> bool:
        return self._state.exists() and unpack(self._state.read_bytes()).streams[0].next_sequence == next_sequence

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=180)

    def terminate(self) -> str:
        self._process.terminate()
        output, errors = self._process.communicate(timeout=180)
        assert self._process.returncode == 0, errors
        return output + errors


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_killed_sidecar_goes_on_unless_the_engine_is_another(
    start_vllm, free_port, until, tmp_path, is_restarted
):
    engine_port, own_port = free_port(), free_port()
    engine = start_vllm(engine_port, num_kept=5)
    for number in range(20):
        engine.store(number, tokens_of(number))
    sidecar = Killed(engine_port, own_port, tmp_path)
    sidecar.start()
    index = RadixIndex()

    def holds_exactly(*numbers: int) -> bool:
        hashes = [int(block_hashes(tokens_of(number), 4)[0]) for number in numbers]
        digest = sum(block_digest(block_hash, Tier.GPU) for block_hash in hashes) % (1 << 64)
        return indexer.states("w1") == {0: expected} and index.digest(WorkerRank("w1", 0)).digest == digest

    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w1", f"tcp://127.0.0.1:{own_port}")
        expected = SourceState.PARTIAL  # the engine keeps less than it ever said
        await until(lambda: holds_exactly(*range(15, 20)))
        engine.publish({"type": "AllBlocksCleared"})
        for number in (20, 21, 22):
            engine.store(number, tokens_of(number))
        expected = SourceState.LIVE
        await until(lambda: holds_exactly(20, 21, 22) and sidecar.has_saved(engine.next_sequence))
        sidecar.kill()
        if is_restarted:
            engine.kill()
            engine = start_vllm(engine_port, num_kept=1000)
            for number in range(40):
                engine.store(number, tokens_of(number))
        engine.store(50, tokens_of(50))
        engine.remove(20)
        sidecar.start()
        held = [*range(20), *range(21, 40), 50] if is_restarted else [21, 22, 50]
        await until(lambda: holds_exactly(*held))
    output = sidecar.terminate()
    assert ("resumed from saved state" in output) is not is_restarted
    assert ("saved state discarded" in output) is is_restarted


ONE_ENGINE = ("--endpoint", "tcp://127.0.0.1:5557")
"""Else the command looks for engines on this machine."""


def test_without_a_word_about_the_engine_the_command_says_what_it_needs():
    process = kvist("--endpoint", "tcp://h:1")
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "--engine: got None, expected vllm or sglang, beside --endpoint" in errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--to", "nowhere"], "endpoint: got 'nowhere'"),
        (["--endpoint", "tcp://h:1?engine=gpt"], "endpoint"),
        (["--block-size", "-1"], "block_size: got -1"),
        (["--worker", "a b"], "worker: got 'a b'"),
        (["--kv-events-config", "{"], "--kv-events-config: got '{'"),
        (["--kv-events-config", '{"enable_kv_cache_events": false}'], "events to be on"),
        (["--kv-events-config", "{}", "--endpoint", "tcp://h:1"], "no --endpoint"),
        (["--endpoint", "tcp://h:1", "--endpoint", "tcp://h:1"], "expected each once"),
        (["--endpoint", "tcp://h:1", "--data-parallel-size", "2"], "given, beside its data-parallel ranks"),
        (["--lora-name", "sql"], "--lora-name: got 'sql', expected ID=NAME"),
        (["--lora-name", "1=a", "--lora-name", "1=b"], "one name an ID"),
    ],
)
def test_a_wrong_argument_ends_with_code_2_and_names_it(args, message):
    engine = () if {"--endpoint", "--kv-events-config"}.intersection(args) else ONE_ENGINE
    process = kvist("--engine", "vllm", "--worker", "w", *engine, *args)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 2
    last_line = errors.splitlines()[-1]  # others may run an engine here, which the first lines name
    assert last_line.startswith("kvist publish: error: ")
    assert message in last_line


def test_a_port_in_use_ends_with_code_2_and_names_it(start_vllm, free_port):
    port = free_port()
    start_vllm(port)
    process = kvist("--engine", "vllm", *ONE_ENGINE, "--to", f"tcp://127.0.0.1:{port}")
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 2
    assert f"tcp://127.0.0.1:{port}" in errors
