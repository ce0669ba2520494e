"""Finds the engine that runs beside a sidecar, by its command line in /proc: same host, same PID namespace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvist.publisher.engine_config import EngineName

CONFIG_FLAG = "--kv-events-config"
_ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
_NUM_WORDS_LOOKED_AT = 4
"""Where an engine is named: `vllm serve`, `python3 /usr/bin/vllm`, `python3 -m sglang.launch_server`."""

# What says how many data-parallel ranks there are and which of them this process starts.
_SIZE_FLAGS = {"vllm": ("--data-parallel-size", "-dp"), "sglang": ("--dp-size", "--dp", "--data-parallel-size")}
_ATTENTION_SIZE_FLAGS = ("--attn-dp-size", "--attention-data-parallel-size")
_LOCAL_SIZE_FLAGS = ("--data-parallel-size-local", "-dpl")
_START_RANK_FLAGS = ("--data-parallel-start-rank", "-dpr")
_RANK_FLAGS = ("--data-parallel-rank", "-dpn")


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine's process: its `--kv-events-config`, and the data-parallel ranks that it runs."""

    pid: int
    engine: EngineName
    config_json: str
    num_ranks: int
    first_rank: int


def find_engines(proc: Path = Path("/proc")) -> list[EngineProcess]:
    """Return the engines that publish events, oldest first; of the processes of one engine, the first."""
    found: dict[tuple[object, ...], EngineProcess] = {}
    for pid, words in sorted(_command_lines(proc)):
        engine = _engine_of(words)
        config_json = None if engine is None else _config_of(words)
        if engine is None or config_json is None:
            continue
        num_ranks, first_rank = _ranks_of(engine, words)
        # Processes that an engine forks keep its command line.
        identity = (engine, config_json, num_ranks, first_rank)
        found.setdefault(identity, EngineProcess(pid, engine, config_json, num_ranks, first_rank))
    return list(found.values())


def _command_lines(proc: Path) -> Iterator[tuple[int, list[str]]]:
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            text = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended, or is another user's
        yield int(folder.name), [word.decode(errors="replace") for word in text.split(b"\0") if word]


def _engine_of(words: Sequence[str]) -> EngineName | None:
    for word in words[:_NUM_WORDS_LOOKED_AT]:
        name = Path(word).name
        for engine in _ENGINES:
            if name == engine or name.startswith(f"{engine}."):
                return engine
    return None


def _config_of(words: Sequence[str]) -> str | None:
    """Return the configuration as JSON; vLLM also takes it key by key, as `--kv-events-config.endpoint tcp://*:5557`."""
    whole = _value_of(words, (CONFIG_FLAG,))
    by_key: dict[str, object] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith(f"{CONFIG_FLAG}."):
            key, has_value, value = word.removeprefix(f"{CONFIG_FLAG}.").partition("=")
            by_key[key.replace("-", "_")] = _parsed(value if has_value else following)
    return msgspec.json.encode(by_key).decode() if whole is None and by_key else whole


def _parsed(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _ranks_of(engine: str, words: Sequence[str]) -> tuple[int, int]:
    """Return how many ranks the process runs, and the first one's number."""
    size = _number_of(words, _SIZE_FLAGS[engine]) or 1
    if engine == "sglang":
        return size * (_number_of(words, _ATTENTION_SIZE_FLAGS) or 1), 0
    rank = _number_of(words, _RANK_FLAGS)
    if rank is not None:
        return 1, rank
    return _number_of(words, _LOCAL_SIZE_FLAGS) or size, _number_of(words, _START_RANK_FLAGS) or 0


def _number_of(words: Sequence[str], flags: Iterable[str]) -> int | None:
    value = _value_of(words, flags)
    return int(value) if value is not None and value.isdecimal() else None


def _value_of(words: Sequence[str], flags: Iterable[str]) -> str | None:
    """Return the last value given for a flag, as `--flag value` or `--flag=value`; vLLM takes underscores too."""
    names = {name for flag in flags for name in (flag, "--" + flag.removeprefix("--").replace("-", "_"))}
    value = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, has_value, given = word.partition("=")
        if name in names:
            value = given if has_value else following
    return value
