"""A file is whole or not there."""

from __future__ import annotations

import pytest

from kvist.files import write_atomically


def test_the_pieces_replace_what_was_there(tmp_path):
    path = tmp_path / "state"
    assert write_atomically(path, [b"one", b"", b"two"]) == 6
    assert write_atomically(path, [b"three"]) == 5
    assert path.read_bytes() == b"three"
    assert list(tmp_path.iterdir()) == [path]


def test_pieces_that_fail_leave_what_was_there(tmp_path):
    path = tmp_path / "state"
    write_atomically(path, [b"old"])

    def pieces():
        yield b"new"
        raise KeyError

    with pytest.raises(KeyError):
        write_atomically(path, pieces())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "state"

    def pieces():
        yield b"begun"
        assert not path.exists()

    write_atomically(path, pieces())
    assert path.read_bytes() == b"begun"
