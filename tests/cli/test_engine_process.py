"""An engine beside the sidecar is found by its command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvist.publisher.engine_config import EngineProcess, find_engines

ON = '{"enable_kv_cache_events": true}'


@pytest.fixture
def proc(tmp_path):
    """Return a function that adds a process to a folder like /proc, and the folder."""

    def run(pid: int, *words: str):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
        return tmp_path

    return run


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        (["vllm", "serve", "m"], "vllm"),
        (["/usr/bin/python3", "/opt/bin/vllm", "serve", "m"], "vllm"),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "vllm"),
        (["python", "-m", "sglang.launch_server", "--model-path", "m"], "sglang"),
        (["sglang", "serve", "m"], "sglang"),
    ],
)
def test_an_engine_is_known_by_its_program(proc, words, engine):
    assert find_engines(proc(7, *words, "--kv-events-config", ON)) == [EngineProcess(7, engine, ON, 1, 0)]


def test_processes_that_are_no_engine_or_publish_nothing_are_passed_over(proc):
    proc(1, "bash", "-c", f"vllm serve m --kv-events-config '{ON}'")
    proc(2, "kvist", "publish", "--to", "tcp://h:1", "--engine", "vllm", "--kv-events-config", ON)
    proc(3)
    (proc(4, "vllm", "serve", "m") / "not-a-process").mkdir()
    assert find_engines(proc(5, "VLLM::EngineCore")) == []


def test_the_configuration_may_be_given_key_by_key(proc):
    flags = ["--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.endpoint=tcp://*:6000"]
    (found,) = find_engines(proc(7, "vllm", "serve", "m", *flags))
    assert json.loads(found.config_json) == {"enable_kv_cache_events": True, "endpoint": "tcp://*:6000"}


@pytest.mark.parametrize(
    ("engine", "flags", "ranks"),
    [
        ("vllm", "--data-parallel-size 4", (4, 0)),
        ("vllm", "-dp=4 --data_parallel_size_local 2 --data-parallel-start-rank 2", (2, 2)),
        ("vllm", "-dp 4 --data-parallel-rank 3", (1, 3)),
        ("vllm", "-dp many", (1, 0)),
        ("sglang", "--dp-size 2", (2, 0)),
        ("sglang", "--dp 2 --attn-dp-size 4", (8, 0)),
    ],
)
def test_the_ranks_that_a_process_runs_follow_from_its_flags(proc, engine, flags, ranks):
    (found,) = find_engines(proc(7, engine, "serve", f"--kv-events-config={ON}", *flags.split()))
    assert (found.num_ranks, found.first_rank) == ranks


def test_processes_of_one_engine_count_once_and_other_engines_for_themselves(proc):
    other = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:7000"}'
    for pid, config in [(10, ON), (11, ON), (12, other)]:
        root = proc(pid, "vllm", "serve", "m", "--kv-events-config", config)
    assert [(each.pid, each.config_json) for each in find_engines(root)] == [(10, ON), (12, other)]


def test_a_process_that_runs_is_found(tmp_path):
    config = json.dumps({"publisher": "zmq", "endpoint": f"ipc://{tmp_path}/kv"})
    program = tmp_path / "sglang.launch_server"
    program.write_text("import sys; print('up', flush=True); sys.stdin.read()")
    command = [sys.executable, str(program), "--kv-events-config", config]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        mine = [found for found in find_engines() if found.config_json == config]
        assert process.stdin is not None
        process.stdin.close()
    assert mine == [EngineProcess(process.pid, "sglang", config, 1, 0)]
