"""Requests as lines of a trace: what they say, what nobody can read there, and how much room they take."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvist.cli import main
from kvist.errors import InvalidValueError
from kvist.events.hashing import block_hashes
from kvist.replay import RecordingReader, RecordingWriter
from kvist.replay.envelope import read_envelope
from kvist.replay.recorder import Recorder, SourceSpec
from kvist.router import access_log, recording
from kvist.router.recording import Beginning, Recorded, RequestRecorder
from kvist.router.regret import Cause
from kvist.simulate.trace import read_trace

TOKENS = list(range(100, 196))
HASHES = block_hashes(TOKENS, 16)
NONE = np.empty(0, np.uint64)


def record(
    recorder: RequestRecorder,
    hashes: NDArray[np.uint64] = NONE,
    at_s: float = 1.0,
    end_s: float = 2.0,
    session: bytes | None = None,
    **told: object,
) -> None:
    begin_s = recorder._beginning.at_s
    recorder.write(Recorded(begin_s + at_s, begin_s + end_s, session, lambda: hashes, told), len(hashes))


def text_of(path: Path) -> str:
    """What can be unpacked of a file, in order, without the module that wrote it or the one that reads traces."""
    return zlib.decompressobj(wbits=31).decompress(path.read_bytes()).decode()


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gz"))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for path in parts_of(folder) for text in text_of(path).splitlines()]


@pytest.fixture(autouse=True)
def _written_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a recorder write all that waits as it is closed, however busy the machine is."""
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT_S", 180.0)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have lines wait until the recorder is closed."""
    monkeypatch.setattr(access_log, "FLUSH_INTERVAL_S", 3600.0)


def test_a_line_says_what_is_known_in_the_form_of_a_trace(tmp_path: Path) -> None:
    beginning = Beginning()
    recorder = RequestRecorder(str(tmp_path), 2**26, beginning)
    record(recorder, HASHES, 1.2341, 2.0, input_length=96, output_length=7, worker="w", status=200, first_byte_s=None)
    record(recorder, output_length=0, status=400)
    recorder.close()
    full, bare = lines_of(tmp_path)
    hash_ids = full.pop("hash_ids")
    assert full == {
        "timestamp": 1234,
        "input_length": 96,
        "output_length": 7,
        "worker": "w",
        "status": 200,
        "recording_started_at": beginning.at,
    }
    assert (len(set(hash_ids)), all(0 <= each < 2**53 for each in hash_ids)) == (6, True)
    assert bare["hash_ids"] == []


def test_equal_prefixes_are_equal_within_a_recording_and_differ_between_recordings(tmp_path: Path) -> None:
    beginning, other = block_hashes([*TOKENS[:48], *range(48)], 16), Beginning()
    found = []
    for folder, secret in (("a", Beginning()), ("b", other), ("c", other)):
        recorder = RequestRecorder(str(tmp_path / folder), 2**26, secret)
        record(recorder, HASHES)
        record(recorder, beginning)
        recorder.close()
        found.append([line["hash_ids"] for line in lines_of(tmp_path / folder)])
    (first, second), other_process, third = found[0], found[1], found[2]
    assert [mine == theirs for mine, theirs in zip(first, second, strict=True)] == [True] * 3 + [False] * 3
    assert other_process == third
    known = {int(each) >> shift for each in (*HASHES, *beginning) for shift in (0, 11)}
    every = {each for hash_ids in (first, second, *third) for each in hash_ids}
    assert len(every) == 18
    assert not every & known


def test_sessions_have_other_names_and_the_pauses_between_their_turns(tmp_path: Path) -> None:
    recorder = RequestRecorder(str(tmp_path), 2**26, Beginning())
    turns = [(b"ann", 1.0, 2.0), (b"bob", 1.5, 9.0), (b"ann", 5.25, 8.0), (b"bob", 3.0, 10.0), (None, 11.0, 12.0)]
    for session, at_s, end_s in turns:
        record(recorder, at_s=at_s, end_s=end_s, session=session)
    recorder.close()
    ann, bob, ann_again, bob_meanwhile, nobody = lines_of(tmp_path)
    assert ann["session"] == ann_again["session"] != bob["session"] == bob_meanwhile["session"]
    assert "ann" not in ann["session"]
    assert "session" not in nobody
    pauses = [line.get("pause_s") for line in (ann, bob, ann_again, bob_meanwhile, nobody)]
    assert pauses == [None, None, pytest.approx(3.25), None, None]


@pytest.mark.usefixtures("unhurried")
def test_parts_are_begun_anew_and_the_oldest_go_beyond_the_bound(tmp_path: Path) -> None:
    max_bytes, num_lines, kept = 2**22, 4000, []
    for start in range(3):
        recorder = RequestRecorder(str(tmp_path), max_bytes, Beginning(at=start))
        for number in range(num_lines):
            record(recorder, np.frombuffer(os.urandom(800), np.uint64), input_length=start, told=number)
        recorder.close()
        assert recorder.num_dropped == 0
        sizes = [path.stat().st_size for path in parts_of(tmp_path)]
        assert max(sizes) <= max_bytes // 64
        assert sum(sizes) <= max_bytes
        kept.append([(line["input_length"], line["told"]) for line in lines_of(tmp_path)])
    written = [(start, number) for start in range(3) for number in range(num_lines)]
    assert num_lines < len(kept[-1]) < len(written)
    assert sorted(kept[-1]) == written[-len(kept[-1]) :]


@pytest.mark.usefixtures("unhurried")
def test_a_part_is_begun_anew_when_it_is_old(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recording, "MAX_PART_AGE_S", 0.0)
    recorder = RequestRecorder(str(tmp_path), 2**26, Beginning())
    for number in range(600):
        record(recorder, told=number)
    recorder.close()
    assert len(parts_of(tmp_path)) == 1 + 3  # what is written at once, and the part that was begun at the start
    assert [line["told"] for line in lines_of(tmp_path)] == list(range(600))


@pytest.mark.usefixtures("unhurried")
def test_parts_that_others_write_to_stay(tmp_path: Path) -> None:
    recorders = [RequestRecorder(str(tmp_path), 64, Beginning()) for _ in range(3)]  # each line is too much
    for number in range(9):
        record(recorders[number % 3], told=number)
    for recorder in recorders:
        recorder._flush()
    assert sorted(line["told"] for line in lines_of(tmp_path)) == list(range(9))
    for recorder in recorders:
        recorder.close()
        record(recorder, told=-1)
        recorder._flush()
    assert {line["told"] for line in lines_of(tmp_path)} <= {-1}


@pytest.mark.usefixtures("unhurried")
def test_what_is_too_much_to_wait_is_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(access_log, "MAX_WEIGHT", 100)
    recorder = RequestRecorder(str(tmp_path), 2**26, Beginning())
    for number in range(200):
        record(recorder, told=number)
    long = np.arange(100_000, dtype=np.uint64)
    recorder._flush()
    for number in range(200, 210):
        record(recorder, long, told=number)
    recorder.close()
    assert [line["told"] for line in lines_of(tmp_path)] == [*range(100), 200]
    assert recorder.num_dropped == 109


@pytest.mark.usefixtures("unhurried")
def test_a_full_disk_costs_lines_and_spoils_no_others(tmp_path: Path, monkeypatch) -> None:
    recorder, system_write = RequestRecorder(str(tmp_path), 2**26, Beginning()), os.write
    record(recorder, told=0)
    recorder._flush()
    room = [10, 0]

    def write_in_part(descriptor: int, data: memoryview) -> int:
        if not room:
            return system_write(descriptor, data)
        if (left := room.pop(0)) == 0:
            raise OSError(28, "No space left on device")
        return system_write(descriptor, data[:left])

    monkeypatch.setattr(access_log.os, "write", write_in_part)
    record(recorder, HASHES, told=1)
    recorder._flush()
    record(recorder, told=2)
    recorder.close()
    assert [line["told"] for line in lines_of(tmp_path)] == [0, 2]
    assert recorder.num_dropped == 1


def test_what_was_written_can_be_read_however_the_process_ends(tmp_path: Path) -> None:
    script = f"""
from kvist.router.recording import *
recorder = RequestRecorder({str(tmp_path)!r}, 2**26, Beginning())
def record(number):
    recorder.write(Recorded(0.0, 1.0, None, lambda: np.arange(20, dtype=np.uint64), {{"told": number}}), 20)
for number in range(1000):
    record(number)
while recorder._lines or not recorder._part_size:
    pass
for number in range(1000):
    record(1000 + number)
print("written", flush=True)
while True:
    pass
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    told = [line["told"] for line in lines_of(tmp_path)]
    assert told == list(range(len(told)))
    assert len(told) >= 744


@pytest.mark.parametrize("make", [Path.touch, None])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, make) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(InvalidValueError, match="record_requests"):
        RequestRecorder(str(path if make else path / "folder"), 2**26, Beginning())


async def test_whatever_becomes_of_a_request_is_recorded(worker, router, http_bytes, until, tmp_path: Path) -> None:
    tokens, event, leaving = list(range(64)), b'data: {"choices": []}\n\n', asyncio.Event()

    async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
        user = json.loads(received.body or b"{}").get("user")
        if user == "wrong":
            writer.write(http_bytes.response(b'{"error": {}}', status=400))
        elif user is None:
            writer.write(http_bytes.response(http_bytes.completion(cached_tokens=32, prompt_tokens=64)))
        else:
            writer.write(http_bytes.event_stream_head + http_bytes.chunk(event) + http_bytes.chunk(event))
            await writer.drain()
            if user == "cut":
                writer.transport.abort()
            leaving.set()

    async with worker(answer=answer) as one, router(one.url, block_size=16, record_requests=str(tmp_path)) as front:
        front.hold(one.url, tokens[:48])
        for header in ("x-session-id", "x-claude-code-session-id"):
            body = {"model": "m", "prompt": tokens}
            await front.client.post("/v1/completions", json=body, headers={header: "ann@example.org", "thread-id": "t"})
        await front.complete("x", user="wrong")
        await front.complete("x", user="cut", stream=True)
        await front.complete(tokens, model="a secret")
        await front.client.post("/v1/completions", content=b"{")
        assert (await front.client.get("/v1/responses/r")).status_code == 200
        leaving.clear()
        async with front.client.stream("POST", "/v1/completions", json={"prompt": "x", "user": "u", "model": "m"}):
            await leaving.wait()
        await until(lambda: not front.service._forwarder.load.num_running)
        assert (await front.metrics())["kvist_router_recording_dropped_total"] == 0
    whole, again, wrong, cut, unknown, malformed, left = lines_of(tmp_path)
    said = {"input_length": 64, "output_length": 1, "block_size": 16, "model": "m", "worker": one.url, "status": 200}
    said |= {"streamed": False, "num_attempts": 1, "queue_s": 0.0, "predicted_cached_tokens": 48, "cached_tokens": 32}
    said |= {"held_tokens": 48, "in_flight_tokens": 0, "held_or_in_flight_tokens": 48, "exact_cache": False}
    assert said.items() <= whole.items()
    assert 0 < whole["first_byte_s"] <= whole["total_s"]
    assert whole["hash_ids"] == again["hash_ids"] == unknown["hash_ids"]
    assert len(set(whole["hash_ids"])) == 4
    assert whole["session"] == again["session"]
    assert again["timestamp"] / 1e3 == pytest.approx(
        whole["timestamp"] / 1e3 + whole["total_s"] + again["pause_s"], abs=2e-3
    )
    assert (wrong["status"], wrong["worker"], wrong["hash_ids"], wrong["output_length"]) == (400, one.url, [], 0)
    assert (cut["status"], cut["streamed"], cut["output_length"]) == (200, True, 2)
    assert (unknown["status"], unknown["model"], "worker" in unknown) == (404, "other", False)
    assert (malformed["status"], "input_length" in malformed, "model" in malformed) == (400, False, False)
    assert (left["status"], left["streamed"], left["first_byte_s"] > 0) == (200, True, True)
    written = "".join(text_of(path) for path in parts_of(tmp_path))
    assert not [text for text in ("secret", "ann", "example") if text in written]
    assert [len(request.blocks) for request in read_trace(tmp_path).requests] == [4, 4, 0, 0]


async def test_a_policy_that_looks_at_no_prompt_is_recorded_like_others(worker, router, tmp_path: Path) -> None:
    prompts = [list(range(40)), list(range(100))]
    async with (
        worker() as one,
        router(one.url, policy="round-robin", block_size=16, record_requests=str(tmp_path)) as front,
    ):
        for prompt in prompts:
            await front.complete(prompt)
    short, long = read_trace(tmp_path).requests
    assert (len(short.blocks), len(long.blocks)) == (2, 6)
    assert long.blocks[:2] == short.blocks


async def test_a_recording_is_simulated(worker, router, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with worker(cached_tokens=16) as one, worker(cached_tokens=16) as two:
        for _ in range(2):  # two recordings in a folder are one trace
            async with router(one.url, two.url, block_size=16, record_requests=str(tmp_path)) as front:
                for number in range(20):
                    await front.complete([*range(64), *range(1000 * (number % 4), 1000 * (number % 4) + 36)])
    trace = read_trace(tmp_path)
    assert (len(trace.requests), trace.block_size) == (40, 16)
    assert [request.idx for request in trace.requests] == list(range(40))
    at_s = [request.at_s for request in trace.requests]
    assert (at_s[0], at_s) == (0.0, sorted(at_s))
    assert len({block for request in trace.requests for block in request.blocks}) == 2 * (4 + 2 * 4)
    for path in (tmp_path, parts_of(tmp_path)[0]):
        flags = ["--policy", "kv,round-robin", "--workers", "2", "--load", "0.5", "--seeds", "1"]
        assert main(["simulate", str(path), *flags]) == 0
        rows = [row.split()[:3] for row in capsys.readouterr().out.splitlines()]
        assert [row for row in rows if row[:2] == ["0.5", "2"]] == [["0.5", "2", "kv"], ["0.5", "2", "round-robin"]]


async def test_a_recording_says_where_hits_went_as_its_router_does(
    worker, router, http_bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but what is estimated: a recording's hashes are keyed, so that other blocks are in the sample."""

    async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        num_tokens = 9 if isinstance(body["prompt"], str) else len(body["prompt"])
        told = http_bytes.completion(cached_tokens=body["cached"], prompt_tokens=num_tokens)
        writer.write(http_bytes.response(told, status=body["status"]))

    async with (
        worker(answer=answer) as one,
        worker(answer=answer) as two,
        router(one.url, two.url, block_size=16, record_requests=str(tmp_path)) as front,
    ):
        chats = [[number, *range(100, 100 + 40 * number)] for number in range(1, 9)]
        for number, tokens in enumerate(chats):
            front.hold((one.url, two.url)[number % 2], tokens[: len(tokens) // 32 * 16])
        for number, tokens in enumerate(chats * 3):
            await front.complete(tokens, cached=16 * (number % 3), status=400 if number == 7 else 200)
        await front.complete("text that nobody is able to read", cached=0, status=200)
        live = (await front.client.get("/regret")).json()
    assert main(["why", str(tmp_path), "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert live["total"]["lost_tokens"].keys() >= {Cause.ENGINE, Cause.UNREAD}
    assert live["total"]["requests"] == 24
    for row in (*live["by_worker"], *recorded["by_worker"]):
        assert row.pop("pooled_cache_tokens") >= 0
    assert recorded["by_worker"] == live["by_worker"]
    assert recorded["by_tenant"][0]["tenant"] == live["by_tenant"][0]["tenant"] == "default"


async def test_events_and_requests_are_recorded_together_by_one_clock(worker, router, engine, until, tmp_path) -> None:
    tokens, events = list(range(65)), tmp_path / "events.mcap"

    def stored_at_s() -> list[float]:
        writer.flush()
        with RecordingReader(events) as reader:
            return [each.time_ns / 1e9 for each in reader if read_envelope(each.message.payload).events]

    opened_s = time.monotonic()
    with engine("w") as cache, RecordingWriter(events) as writer:
        recorder = Recorder([SourceSpec.parse(f"w={cache.publisher.endpoint}")], writer)
        async with (
            worker(server_info=cache.server_info) as one,
            router(one.url, record_requests=str(tmp_path)) as front,
        ):
            apart_s = time.monotonic() - opened_s  # each has read both its clocks meanwhile, one after the other
            following = asyncio.create_task(recorder.run())
            await until(lambda: writer.num_messages)
            before_s = time.time()
            cache.store(tokens)
            await front.until_overlap(one.url, tokens, 4)
            await until(stored_at_s)
            between_s = time.time()
            await front.complete(tokens)
            after_s = time.time()
            following.cancel()
            await asyncio.wait([following])
    (line,) = lines_of(tmp_path)
    asked_at_s, within_s = (
        line["recording_started_at"] + line["timestamp"] / 1e3,
        apart_s + 1e-3,
    )  # a timestamp is a millisecond's
    assert before_s - within_s < stored_at_s()[-1] < between_s + within_s
    assert between_s - within_s < asked_at_s < after_s + within_s
    assert line["predicted_cached_tokens"] == 64
