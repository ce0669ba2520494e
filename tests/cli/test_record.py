"""`kvist record` as a process of its own, beside engines, publishers and brokers."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from kvist.cli import main
from kvist.events import FULL
from kvist.publisher import KvEventPublisher
from kvist.replay import RecordingReader


def kvist(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys; from kvist.cli import main; sys.exit(main())", "record", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read(path):
    with RecordingReader(path) as reader:
        return list(reader)


@pytest.mark.parametrize(("scheme", "client", "extra"), [("nats", "nats", "nats"), ("mqtt", "aiomqtt", "mqtt")])
def test_a_missing_client_leaves_no_file(tmp_path, scheme, client, extra):
    path = tmp_path / "r"
    code = (
        f"import sys; sys.modules[{client!r}] = None\n"
        f"from kvist.cli import main; sys.exit(main(['record', '--from', '{scheme}://h/m/w', '--to', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, f"pip install 'kvist[{extra}]'" in done.stderr) == (2, True), done.stderr
    assert not path.exists()


def test_a_missing_library_leaves_no_file(tmp_path):
    path = tmp_path / "r"
    code = (
        "import sys; sys.modules['mcap'] = None\n"
        f"from kvist.cli import main; sys.exit(main(['record', '--from', 'tcp://h:1', '--to', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, "pip install 'kvist[replay]'" in done.stderr) == (2, True), done.stderr
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_engine_and_a_publisher_are_recorded_until_signalled(start_vllm, free_port, until_true, tmp_path, number):
    path, port = tmp_path / "r", free_port()
    with KvEventPublisher("tcp://127.0.0.1:0", worker="gpu-0", block_size=4) as publisher:
        engine = start_vllm(port)
        process = kvist(
            *("--from", f"engine=tcp://127.0.0.1:{port}", "--from", f"ours={publisher.endpoint}", "--to", str(path))
        )
        assert process.stdout.readline() == f"kvist record: recording 2 sources to {path}\n"

        def is_heard() -> bool:
            engine.store(engine.next_sequence + 77, [1, 2, 3, 4])
            return {record.source.name for record in read(path)} == {"engine", "ours"}

        until_true(is_heard)  # heartbeats come by themselves
        publisher.stored([901], [1, 2, 3, 4], window=FULL, group=0)
        until_true(lambda: any(b"stored" in record.message.payload for record in read(path)))
        engine.publish(is_lost=True)
        last = engine.next_sequence
        engine.publish()
        until_true(lambda: any(record.message.sequence == last for record in read(path)))
        process.send_signal(number)
        output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert re.search(r"record: engine: \d+ messages, 1 connections, 1 gaps, 0 duplicates", output)
    assert re.search(r"record: ours: \d+ messages, 1 connections, 0 gaps, 0 duplicates", output)
    recorded = [record.message for record in read(path) if record.source.name == "engine"]
    kept = dict(engine.kept)
    assert all(message.payload == kept[message.sequence] for message in recorded)
    with RecordingReader(path) as reader:
        assert [source.name for source in reader.sources()] == ["engine", "ours"]


def test_a_recording_goes_on_where_a_killed_recorder_was(start_vllm, free_port, until_true, tmp_path):
    path, port = tmp_path / "r.mcap", free_port()
    engine = start_vllm(port)
    arguments = ("--from", f"tcp://127.0.0.1:{port}", "--to", str(path), "--append")
    for session in range(2):
        process = kvist(*arguments)

        def is_heard(session: int = session) -> bool:
            engine.store(engine.next_sequence, [1, 2, 3, 4])
            return path.exists() and any(record.session == session for record in read(path))

        until_true(is_heard)
        if session == 0:
            process.kill()
            process.communicate()
            with path.open("ab") as file:
                file.write(b"\x06" + (1000).to_bytes(8, "little") + b"half")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert f"in 1 files at {path}" in output
    payloads = [record.message.payload for record in read(path)]
    assert payloads == [payload for _, payload in engine.kept][: len(payloads)]
    with RecordingReader(path) as reader:
        list(reader)
        assert [torn.num_bytes for torn in reader.torn] == [13]


def test_it_ends_by_itself_when_its_time_is_up(tmp_path, free_port):
    process = kvist("--from", f"tcp://127.0.0.1:{free_port()}", "--to", str(tmp_path / "r"), "--duration", "0.2")
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert f"0 messages, 0 bytes of payload, {(tmp_path / 'r').stat().st_size} bytes written in 1 files" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--from", "nowhere"], "endpoint: got 'nowhere'"),
        (["--from", "tcp://h:1", "--duration", "0"], "--duration: got 0.0"),
        (["--from", "tcp://h:1", "--rotate-bytes", "many"], "--rotate-bytes: got 'many'"),
        (["--from", "tcp://h:1", "--rotate-bytes", "1k"], "rotate_bytes: got 1024, expected at least 4096"),
        (["--from", "a=tcp://h:1", "--from", "a=tcp://h:2"], "source: got 'a', expected each name once"),
    ],
)
def test_a_wrong_argument_ends_with_code_2_and_names_it(args, message, tmp_path):
    process = kvist(*args, "--to", str(tmp_path / "r"))
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 2
    assert errors.startswith("kvist record: error: ")
    assert message in errors
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("away/r", "a file that can be created (No such file or directory)"),
        ("file/r", "a file that can be created (Not a directory)"),
        ("r" * 300, "a file that can be created (File name too long)"),
        ("folder", "a file that can be read (Is a directory)"),
        ("", "the name of a file"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path, monkeypatch, capsys, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["record", "--from", "tcp://h:1", "--to", name, "--append"]) == 2
    assert capsys.readouterr().err == f"kvist record: error: recording: got {name or '.'!r}, expected {reason}\n"


def test_a_disk_that_is_full_is_named_with_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    path = tmp_path / "r"
    assert main(["record", "--from", "tcp://h:1", "--to", str(path)]) == 1
    text = f"recording: got {str(path)!r}, expected room for what comes (No space left on device)"
    assert capsys.readouterr().err == f"kvist record: error: {text}\n"


def test_a_file_that_exists_is_refused_unless_it_is_to_be_appended_to(tmp_path):
    path = tmp_path / "r"
    path.write_bytes(b"a letter to my aunt")
    _, errors = (process := kvist("--from", "tcp://h:1", "--to", str(path))).communicate(timeout=180)
    assert (process.returncode, "a new file, or one to be appended to" in errors) == (2, True)
    _, errors = (process := kvist("--from", "tcp://h:1", "--to", str(path), "--append")).communicate(timeout=180)
    assert (process.returncode, f"{path}: byte 0: found" in errors) == (1, True)
    assert path.read_bytes() == b"a letter to my aunt"
