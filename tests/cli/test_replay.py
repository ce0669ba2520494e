"""`kvist replay` as a process of its own, and what its flags refuse."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys

import httpx
import msgspec
import pytest

from kvist.cli import main
from kvist.cli._replay_actions import _play_and_linger
from kvist.events import Batch, Heartbeat, Stored, WorkerRank
from kvist.events.codec import encode_batch
from kvist.events.snapshot import blocks_digest
from kvist.events.transports import Message
from kvist.indexer import Indexer
from kvist.indexer.service.config import IndexConfig
from kvist.indexer.service.service import IndexService
from kvist.publisher import KvEventPublisher
from kvist.radix import RadixIndex
from kvist.replay import RecordedSource, RecordingReader, RecordingWriter

BLOCKS = list(range(1, 101))
ALL_SENT = "kvist replay: all 102 messages are sent\n"
DEADLINE_S = 180.0
DATA_END = b"\x0f\x04\0\0\0\0\0\0\0"
"""The head of the record behind all messages of a file; the checksum of what stands before it follows."""


def batch(sequence, *events, worker="gpu-0"):
    payload = encode_batch(Batch(worker, 0, 7, sequence, 4, 1763650000.5, events))
    return Message(f"kv/{worker}/0".encode(), sequence, payload)


@pytest.fixture
def recorded(tmp_path):
    """A recording of a publisher that stored a hundred blocks, and of an engine that stored one."""
    path = tmp_path / "fleet.mcap"
    sources = [RecordedSource("ours", "tcp://h:1"), RecordedSource("theirs", "tcp://h:2?engine=sglang", "sglang")]
    engine = {"type": "BlockStored", "block_hashes": [-9], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    with RecordingWriter(path, sources) as writer:
        for sequence, block in enumerate(BLOCKS):
            parent = BLOCKS[sequence - 1] if sequence else None
            writer.add(sources[0], batch(sequence, Stored(block.to_bytes(8, "little"), parent)), sequence * 10**7)
        writer.add(sources[0], batch(100, Heartbeat(100, blocks_digest(BLOCKS, 0))), 10**9)
        payload = msgspec.msgpack.encode([1763650000.5, [{**engine, "block_size": 4, "lora_id": None}], 0])
        writer.add(sources[1], Message(b"", 0, payload), 10**9)
    return path


def kvist(*args) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys; from kvist.cli import main; sys.exit(main())", "replay", *args]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(capsys, *args) -> tuple[int, str, str]:
    code = main(["replay", *map(str, args)])
    return code, *capsys.readouterr()


def read(path):
    with RecordingReader(path) as reader:
        return list(reader)


@pytest.mark.parametrize("is_late", [False, True])
async def test_each_source_is_published_where_an_indexer_hears_it_exactly(recorded, until, is_late):
    process = kvist(recorded, "--to", "tcp://127.0.0.1:0", "--as-fast-as-possible", "--delay", "0", "--linger", "120")
    ready = [process.stdout.readline() for _ in range(2)]
    ours = re.fullmatch(r"kvist replay: ready at (\S+) source=ours\n", ready[0])[1]
    theirs = re.fullmatch(r"kvist replay: ready at (\S+&engine=sglang) source=theirs\n", ready[1])[1]
    index = RadixIndex()
    if is_late:
        assert process.stdout.readline() == ALL_SENT
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("a", ours)
        indexer.add_source("b", theirs)
        await until(lambda: index.digest(WorkerRank("a", 0)).digest == blocks_digest(BLOCKS, 0))
        await until(lambda: index.digest(WorkerRank("b", 0)).num_blocks == 1)
        if not is_late:
            assert process.stdout.readline() == ALL_SENT
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    answered = re.search(r"102 messages, \d+ bytes sent, (\d+) replay requests answered", output)
    assert not is_late or int(answered[1]) >= 2  # who hears everything as it is played may not need to ask


async def test_whoever_asks_after_the_end_is_waited_for_anew_each_time():
    """An index that is just starting hears the end before it can ask for the rest."""

    class FakePlayer:
        num_sent = num_replays = num_waits = 0

        async def play(self):
            pass

        async def repeat(self):
            self.num_waits += 1
            self.num_replays += self.num_waits < 3
            await asyncio.Event().wait()

    player = FakePlayer()
    await _play_and_linger(argparse.Namespace(delay=0.0, linger=0.0), player)
    assert (player.num_waits, player.num_replays) == (3, 2)


def test_on_a_terminal_it_shows_rate_and_time_left(recorded):
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "kvist", "replay", recorded, "--to", "tcp://127.0.0.1:0", "--delay", "0"]
    with subprocess.Popen([*command, "--linger", "0"], stdout=subprocess.DEVNULL, stderr=end) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # how the last reader of a terminal learns of its end
            while read_bytes := os.read(terminal, 4096):
                shown += read_bytes
        assert process.wait(DEADLINE_S) == 0
    os.close(terminal)
    assert re.search(rb"\d+ messages, \d+/s", shown)
    assert "━".encode() in shown


def test_into_an_index_prints_what_it_holds(recorded, capsys):
    code, output, _ = run(capsys, recorded, "--into-index")
    assert code == 0
    assert f"gpu-0 rank 0: 100 blocks of 4 tokens, digest {blocks_digest(BLOCKS, 0):016x}, live" in output
    assert "theirs rank 0: 1 blocks" in output
    assert "101 distinct blocks in the index; 0 snapshots" in output
    code, output, _ = run(capsys, recorded, "--into-index", "--json", "--worker", "theirs")
    assert [(rank["worker"], rank["num_blocks"]) for rank in json.loads(output)["ranks"]] == [("theirs", 1)]


def test_statistics_are_printed_with_a_plot_and_as_json(recorded, capsys, tmp_path):
    plot = tmp_path / "plot.svg"
    code, output, _ = run(capsys, recorded, "--stats", "--plot", plot)
    assert code == 0
    overview, _, row, *_ = output.splitlines()
    assert dict(zip(overview.split(), row.split(), strict=False))["events"] == "101"
    assert plot.read_text().startswith("<svg")
    code, output, _ = run(capsys, recorded, "--stats", "--json", "--since", "0.5", "--until", "0.9")
    figures = json.loads(output)
    assert (code, figures["num_messages"], figures["num_events"]) == (0, 40, 40)


def test_the_page_shows_what_comes_before_damage_and_says_what_is_damaged(recorded):
    data = bytearray(recorded.read_bytes())
    data[data.index(DATA_END) + 9] ^= 0x20  # the checksum of all messages, which stand before it
    recorded.write_bytes(data)
    with kvist(recorded, "--ui") as process:
        assert re.search(rf"{recorded}: byte \d+: found", process.stderr.readline())
        assert process.stdout.readline().startswith("kvist replay: http://127.0.0.1:")
        process.terminate()
    assert process.returncode == 1


def test_a_torn_recording_is_used_and_what_is_torn_is_told(recorded, capsys):
    data = recorded.read_bytes()
    recorded.write_bytes(data[: data.index(DATA_END) + 5])
    code, output, errors = run(capsys, recorded, "--stats")
    assert code == 0
    assert output.splitlines()[2].split()[0] == "102"
    assert f"{recorded}: 5 torn bytes at byte {data.index(DATA_END)}" in errors


@pytest.mark.parametrize("action", [["--stats"], ["--into-index"]])
def test_a_damaged_recording_is_used_up_to_the_damage_and_ends_with_code_1(recorded, action):
    with RecordingWriter(recorded, [RecordedSource("more", "")], appends=True) as writer:
        writer.add(RecordedSource("more", ""), batch(0, worker="late"), 0)
    later = recorded.with_name("fleet.1.mcap")
    data = bytearray(later.read_bytes())
    data[data.index(b"\x28\xb5\x2f\xfd") + 20] ^= 1  # in the only chunk, which zstd begins so
    later.write_bytes(data)
    process = kvist(recorded, *action)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "gpu-0" in output
    assert "late" not in output
    assert re.search(rf"error: {later}: byte \d+: found ", errors)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stats", "--loop", "2"], "--loop: got 2, expected one of --to, --into-index with it"),
        (["--stats", "--speed", "2"], "--speed: got 2.0, expected one of --to with it"),
        (["--into-index", "--plot", "x.svg"], "--plot: got 'x.svg', expected one of --stats with it"),
        (
            ["--to", "tcp://127.0.0.1:0", "--json"],
            "--json: got True, expected one of --into-index, --stats, --at, --diff",
        ),
        (["--stats", "--prompt", "x"], "--prompt: got 'x', expected one of --at with it"),
        (["--at", "1", "--prompt", "/nowhere"], "--prompt: got '/nowhere', expected a file with a request ([Errno 2]"),
        (
            ["--stats", "--plot", "/nowhere/x.svg"],
            "--plot: got '/nowhere/x.svg', expected a file that can be written (No",
        ),
        (["--to", "tcp://127.0.0.1:0", "--loop", "0"], "loop: got 0, expected at least 1 round"),
        (["--to", "tcp://127.0.0.1:0", "--speed", "0"], "speed: got 0.0, expected a positive number"),
        (["--to", "tcp://127.0.0.1:0", "--linger", "-1"], "--linger: got -1.0"),
        (["--to", "tcp://127.0.0.1:5557"], "expected one URL for each of 2 sources (ours, theirs), or one with port 0"),
        (["--stats", "--since", "noon"], "--since: got 'noon'"),
        (["--stats", "--plot", "x.png"], "--plot: got 'x.png', expected a name that ends in .svg"),
    ],
)
def test_a_wrong_argument_ends_with_code_2_and_names_it(recorded, capsys, args, message):
    code, _, errors = run(capsys, recorded, *args)
    assert code == 2
    assert message in errors


def test_a_file_that_is_not_there_or_no_recording_is_said(capsys, tmp_path):
    code, _, errors = run(capsys, tmp_path / "none", "--stats")
    text = f"recording: got {str(tmp_path / 'none')!r}, expected a file that can be read (No such file or directory)"
    assert (code, errors) == (2, f"kvist replay: error: {text}\n")
    os.mkfifo(tmp_path / "pipe")
    code, _, errors = run(capsys, tmp_path / "pipe", "--stats")
    assert (code, "expected a file that can be read (it is a pipe)" in errors) == (2, True)
    (tmp_path / "letter").write_text("dear aunt")
    code, output, errors = run(capsys, tmp_path / "letter", "--stats")
    assert (code, output, "expected a recording of events, an MCAP file" in errors) == (1, "", True)


def test_an_empty_file_is_an_empty_recording(capsys, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    code, _, errors = run(capsys, tmp_path / "empty", "--stats")
    assert (code, ": no message" in errors) == (0, True)


def test_who_held_a_prompt_at_a_time(recorded, tmp_path, capsys):
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps({"token_ids": [1, 2, 3, 4, 5]}))
    code, out, _ = run(capsys, recorded, "--at", "2", "--prompt", prompt, "--json")
    assert code == 0
    tokens = {"gpu": 4, "host": 4, "disk": 4, "external": 4}
    assert json.loads(out) == {
        "prompt_tokens": 5,
        "holders": [{"worker": "theirs", "rank": 0, "tokens": tokens}],
    }
    _, out, _ = run(capsys, recorded, "--at", "0.5", "--prompt", prompt)
    assert out == "tokens held of 5, by tier (each includes the faster ones):\nno rank held any\n"
    prompt.write_text(json.dumps({"model": "m", "prompt": "some text"}))
    code, _, err = run(capsys, recorded, "--at", "2", "--prompt", prompt)
    assert code == 2
    assert "a prompt whose tokens are known (the router has no tokeniser of the model: --model-path)" in err
    code, _, err = run(capsys, recorded, "--at", "2", "--prompt", prompt, "--model-path", "/nowhere")
    assert (code, "--model-path: got '/nowhere', expected a directory with tokenizer.json" in err) == (2, True)
    prompt.write_text("")
    code, _, err = run(capsys, recorded, "--at", "2", "--prompt", prompt)
    assert (code, "(body: object missing required field `prompt`)" in err) == (2, True)
    code, _, err = run(capsys, recorded, "--at", "2")
    assert (code, "--at" in err) == (2, True)


def test_two_recordings_differ_in_what_they_hold(recorded, tmp_path, capsys):
    other = tmp_path / "other.mcap"
    source = RecordedSource("ours", "tcp://h:1")
    held = [*BLOCKS[:40], 1000]
    with RecordingWriter(other, [source]) as writer:
        for sequence, block in enumerate(held):
            parent = held[sequence - 1] if sequence else None
            writer.add(source, batch(sequence, Stored(block.to_bytes(8, "little"), parent)), sequence * 10**7)
        writer.add(source, batch(len(held), Heartbeat(len(held), blocks_digest(held, 0))), 10**9)
    code, out, _ = run(capsys, recorded, "--diff", other)
    assert code == 1
    assert out.splitlines() == [
        "gpu-0 rank 0 gpu: 60 only in the first, 1 only in the second, 40 in both",
        "theirs rank 0 gpu: 1 only in the first, 0 only in the second, 0 in both",
    ]
    code, out, _ = run(capsys, recorded, "--diff", recorded, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[0]) == {
        "worker": "gpu-0",
        "rank": 0,
        "tier": "gpu",
        "only_first": 0,
        "only_second": 0,
        "both": 100,
    }
    code, out, _ = run(capsys, recorded, "--diff", recorded, "--worker", "gpu-0", "--until", "0.3")
    assert (code, out) == (0, "gpu-0 rank 0 gpu: 0 only in the first, 0 only in the second, 30 in both\n")


async def test_a_recording_and_an_index_that_runs_differ_in_what_it_missed(recorded, tmp_path, capsys):
    publisher = KvEventPublisher("tcp://127.0.0.1:0", worker="gpu-0", block_size=4)
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        with publisher:
            publisher.stored([1, 2, 3], list(range(1, 13)))
            config = IndexConfig(port=0, workers=(f"1={publisher.endpoint}",), block_size=4)
            async with IndexService(config) as service:
                async with asyncio.timeout(DEADLINE_S):
                    while '"num_blocks":3' not in (await client.get(f"{service.url}/workers")).text:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                dump = (await client.get(f"{service.url}/dump")).content
                args = ["replay", str(recorded), "--diff", service.url]
                assert await asyncio.to_thread(main, args) == 1
    differs = "0 only in the first, 3 only in the second, 0 in both"
    assert differs in capsys.readouterr().out
    state = tmp_path / "index.state"
    state.write_bytes(dump)
    assert await asyncio.to_thread(main, ["replay", str(recorded), "--diff", str(state)]) == 1
    assert differs in capsys.readouterr().out
    state.write_bytes(dump[:-5])
    assert await asyncio.to_thread(main, ["replay", str(recorded), "--diff", str(state)]) == 1
    assert "dump: cut short" in capsys.readouterr().err


def test_that_nothing_of_a_recording_is_meant_is_said(recorded, capsys):
    for flags in (["--worker", "gpu-9"], ["--since", "3600"], ["--until", "2001-01-01T00:00Z", "--since", "1e9"]):
        code, _, err = run(capsys, recorded, "--stats", *flags)
        told = "no message selected; the first came at 1970-01-01T00:00:00+00:00"
        assert (code, err) == (0, f"kvist replay: {recorded}: {told}\n")
