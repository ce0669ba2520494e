"""Compiled code is loaded while the event loop runs on, whatever becomes of the process that compiles."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from kvist.indexer import compilation

Threads = list[str]


@pytest.fixture
def compiled_in(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """Return the names of the threads that imported the compiled modules."""
    threads: Threads = []
    monkeypatch.setattr(compilation, "compile_all", lambda: threads.append(threading.current_thread().name))
    return threads


async def test_another_process_compiles_before_this_one_imports(compiling, compiled_in: Threads, caplog) -> None:
    caplog.set_level(logging.INFO)
    async with asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(compilation.load())
        await compiling.started.wait()
        assert not loading.done()
        assert not compiled_in
        compiling.tell(is_done=True)
    assert compiled_in == ["kvist-compile"]
    messages = [record.message for record in caplog.records if record.name == compilation.__name__]
    assert "compiling the index" in messages[0]
    assert "directory=/" in messages[0]
    assert "index compiled after" in messages[1]


async def test_where_that_process_fails_a_thread_compiles_and_the_log_says_why(
    compiling, compiled_in: Threads, caplog
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(compilation.load())
        await compiling.started.wait()
        compiling.tell(is_done=False)
    assert compiled_in == ["kvist-compile"]
    assert "compiling in a thread, as the process for it failed: code=1 told to fail" in caplog.text


@pytest.mark.usefixtures("compiling")
async def test_where_no_process_can_be_started_a_thread_compiles(
    compiled_in: Threads, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "COMMAND", ("/nowhere/python",))
    await compilation.load()
    assert compiled_in == ["kvist-compile"]
    assert "compiling in a thread, as no process can be started" in caplog.text


async def test_where_nothing_can_be_written_a_thread_compiles_and_the_log_says_what_to_set(
    compiling, compiled_in: Threads, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none")
    await compilation.load()
    assert compiled_in == ["kvist-compile"]
    assert not compiling.started.is_set()
    assert "set NUMBA_CACHE_DIR" in caplog.text


async def test_with_a_filled_cache_no_process_is_started(
    compiling, compiled_in: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "find_filled", lambda: "filled")
    await compilation.load()
    assert compiled_in == ["kvist-compile"]
    assert not compiling.started.is_set()


async def test_who_no_longer_waits_ends_the_process_that_compiles(compiling, compiled_in: Threads) -> None:
    loading = asyncio.create_task(compilation.load())
    await compiling.started.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await compiling.ended.wait()
    assert not compiled_in


@pytest.mark.usefixtures("compiling")
async def test_what_compiling_in_this_process_fails_of_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise SyntaxError("in compiled code")

    monkeypatch.setattr(compilation, "compile_all", fail)
    monkeypatch.setattr(compilation, "COMMAND", ("/nowhere/python",))
    with pytest.raises(SyntaxError, match="in compiled code"):
        await compilation.load()
