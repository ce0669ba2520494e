"""A file is whole or not there; a folder is one process's at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from kvist.errors import InvalidValueError
from kvist.files import AtomicFile, exclusive_folder, in_thread, write_atomically


def test_what_is_written_replaces_what_was_there(tmp_path):
    path = tmp_path / "state"
    assert write_atomically(path, b"onetwo") == 6
    assert write_atomically(path, b"three") == 5
    assert path.read_bytes() == b"three"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "state"
    write_atomically(path, b"old")

    def fail(_):
        raise OSError("full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "state"
    file = AtomicFile(path)
    for piece in (b"one", b"", b"two"):
        file.write(piece)
    assert not path.exists()
    file.commit()
    assert (path.read_bytes(), file.size_bytes) == (b"onetwo", 6)


def test_a_file_that_is_given_up_leaves_no_trace(tmp_path):
    path = tmp_path / "state"
    write_atomically(path, b"old")
    file = AtomicFile(path)
    file.write(b"new")
    file.discard()
    file.discard()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [None, OSError("full"), ValueError("closed")], ids=repr)
async def test_writing_that_is_cancelled_again_and_again_ends_first(error):
    may_end, has_ended = threading.Event(), threading.Event()

    def write():
        assert may_end.wait(60)
        has_ended.set()
        if error is not None:
            raise error

    writing = asyncio.create_task(in_thread(write))
    for _ in range(3):
        assert not (await asyncio.wait([writing], timeout=0.01))[0]
        writing.cancel()
    may_end.set()
    await asyncio.wait([writing])
    assert writing.cancelled()
    assert has_ended.is_set()


async def test_what_fails_in_the_thread_is_raised():
    def write(path):
        raise FileNotFoundError(path)

    with pytest.raises(FileNotFoundError, match="there"):
        await in_thread(write, "there")


def test_a_folder_belongs_to_one_at_a_time_and_says_to_whom(tmp_path):
    folder = tmp_path / "a" / "b"
    with exclusive_folder("state_dir", folder):
        with (
            pytest.raises(InvalidValueError, match=f"no other process uses, as pid {os.getpid()} does") as caught,
            exclusive_folder("state_dir", folder),
        ):
            pass
        assert (caught.value.field, caught.value.value) == ("state_dir", str(folder))
    with exclusive_folder("state_dir", folder):
        pass


def test_a_folder_whose_holder_was_killed_is_free(tmp_path):
    script = (
        "import os, pathlib, signal, sys; from kvist.files import exclusive_folder\n"
        "with exclusive_folder('state_dir', pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    with exclusive_folder("state_dir", tmp_path):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(InvalidValueError, match="expected a folder that can be written"),
        exclusive_folder("state_dir", tmp_path / "file"),
    ):
        pass
