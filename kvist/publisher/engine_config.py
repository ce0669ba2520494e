"""Finds an engine's event sockets, from the JSON that the engine was given as `--kv-events-config`.

A sidecar can read that JSON from the command line of an engine in the same PID namespace.

The rules are vLLM 0.33.0's (`config/kv_events.py`, `distributed/kv_events.py`) and SGLang 0.5.23's
(`srt/disaggregation/kv_events.py`): each data-parallel rank has a stream and a replay socket of its own, at the
configured port plus its number. The engine binds wildcard and ipc addresses and connects to others, where a subscriber
binds instead; replay addresses it always binds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint
from kvist.events.types import MAX_RANKS

EngineName: TypeAlias = Literal["vllm", "sglang"]

FIELD = "--kv-events-config"
_LOOPBACK_OF = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]", "localhost": "127.0.0.1"}
_MAX_PORT = 65535

_ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
_NUM_WORDS_LOOKED_AT = 4
"""Words among which an engine's name is: `vllm serve`, `python3 /usr/bin/vllm`, `python3 -m sglang.launch_server`."""

# The flags for how many data-parallel ranks there are and which of them a process starts.
_SIZE_FLAGS = {"vllm": ("--data-parallel-size", "-dp"), "sglang": ("--dp-size", "--dp", "--data-parallel-size")}
_ATTENTION_SIZE_FLAGS = ("--attn-dp-size", "--attention-data-parallel-size")
_LOCAL_SIZE_FLAGS = ("--data-parallel-size-local", "-dpl")
_START_RANK_FLAGS = ("--data-parallel-start-rank", "-dpr")
_RANK_FLAGS = ("--data-parallel-rank", "-dpn")


class _KvEventsConfig(msgspec.Struct, frozen=True):
    """The fields of both engines' configurations that matter here, with vLLM's defaults; others are ignored."""

    enable_kv_cache_events: bool | None = None
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None


def engine_endpoints(
    config_json: str, *, engine: EngineName | None = None, num_ranks: int = 1, first_rank: int = 0
) -> list[Endpoint]:
    """Return where to follow each of an engine's ranks from `first_rank` on, on the engine's own host.

    Without `engine` a configuration that has vLLM's `enable_kv_cache_events` is vLLM's, and any other SGLang's.
    Raises InvalidValueError that says what is wrong: no JSON, events that are off, an address nobody else can reach.
    """
    if not 1 <= num_ranks <= MAX_RANKS - first_rank or first_rank < 0:
        raise InvalidValueError("data-parallel ranks", f"{num_ranks} from {first_rank}", f"within 0 to {MAX_RANKS - 1}")
    try:
        config = msgspec.json.decode(config_json, type=_KvEventsConfig)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidValueError(FIELD, config_json, f"the JSON object that the engine was given ({error})") from None
    if engine is None:
        engine = "sglang" if config.enable_kv_cache_events is None else "vllm"
    _check_is_on(config, engine, config_json)
    return [_endpoint(config, engine, rank) for rank in range(first_rank, first_rank + num_ranks)]


def _check_is_on(config: _KvEventsConfig, engine: EngineName, config_json: str) -> None:
    if engine == "vllm" and not config.enable_kv_cache_events:
        raise InvalidValueError(FIELD, config_json, 'events to be on: vLLM wants "enable_kv_cache_events": true')
    # vLLM publishes by zmq once events are on; SGLang publishes nothing unless told.
    publisher = config.publisher or ("zmq" if engine == "vllm" else "null")
    if publisher != "zmq":
        raise InvalidValueError(FIELD, config_json, f'"publisher": "zmq", not {publisher!r}, for {engine}')


def _endpoint(config: _KvEventsConfig, engine: EngineName, rank: int) -> Endpoint:
    address, replay = _address(config.endpoint, "endpoint", rank), config.replay_endpoint
    replay_address = None if not replay else _address(replay, "replay_endpoint", rank)
    return Endpoint(address, replay_address, engine, is_bound=not _is_bound(config, engine))


def _is_bound(config: _KvEventsConfig, engine: EngineName) -> bool:
    """Return whether the engine binds its stream, as its own publisher decides."""
    endpoint = config.endpoint
    if engine == "sglang" and config.bind is not None:
        return config.bind
    is_wildcard = "*" in endpoint or "::" in endpoint or (engine == "sglang" and "0.0.0.0" in endpoint)
    return is_wildcard or endpoint.startswith("ipc://")


def _address(endpoint: str, name: str, rank: int) -> str:
    """Return the address of one rank's socket as another process on the host reaches it."""
    field = f"{FIELD} {name}"
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        if rank > 0:
            raise InvalidValueError(field, endpoint, "tcp:// where there are several data-parallel ranks")
        return endpoint
    split = _split(endpoint)
    if split is None or not split[0]:
        raise InvalidValueError(field, endpoint, "tcp://host:port or ipc://path, which another process can reach")
    host, port = split
    if not 0 < port + rank <= _MAX_PORT or port == 0:
        raise InvalidValueError(field, endpoint, f"a port that can be known, and rank {rank}'s below {_MAX_PORT + 1}")
    return f"tcp://{_LOOPBACK_OF.get(host, host)}:{port + rank}"


def _split(endpoint: str) -> tuple[str, int] | None:
    """Return host and port of a tcp address, None for any other."""
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (host, int(port)) if port.isascii() and port.isdecimal() else None


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine's process: its `--kv-events-config`, and the data-parallel ranks that it runs."""

    pid: int = field(compare=False)
    engine: EngineName
    config_json: str
    num_ranks: int
    first_rank: int


def find_engines(proc: Path = Path("/proc")) -> list[EngineProcess]:
    """Return the engines that publish events, oldest first; of the processes of one engine, the first."""
    found = []
    for pid, words in sorted(_command_lines(proc)):
        engine = _engine_of(words)
        if engine is not None and (config_json := _config_of(words)) is not None:
            found.append(EngineProcess(pid, engine, config_json, *_ranks_of(engine, words)))
    return list(dict.fromkeys(found))  # processes that an engine forks keep its command line


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
    whole = _value_of(words, (FIELD,))
    by_key: dict[str, object] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith(f"{FIELD}."):
            key, has_value, value = word.removeprefix(f"{FIELD}.").partition("=")
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
