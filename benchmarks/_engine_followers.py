"""The indexes that follow an engine's events: `kvist index`, directly and behind a sidecar, and the baseline.

Each index is one service for all scenarios: a scenario's engines are registered as a model of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from _engine_files import FOLDER
from _engine_traffic import Engine, Prompt
from _indexers import Connection

from kvist.events import WorkerRank
from kvist.events.hashing import local_block_hashes
from kvist.events.session import SourceState
from kvist.router.healing import Healer
from kvist.router.index import RankStatus
from kvist.router.metrics import RouterMetrics
from kvist.router.prompts import ParsedRequest
from kvist.router.usage import ReportedUsage

KVIST = [sys.executable, "-m", "kvist", "--log-level", "error"]
COMMANDS = {
    "index": [*KVIST, "index"],
    "sidecar": [*KVIST, "index"],
    "dynamo": [sys.executable, "-m", "dynamo.indexer"],
}
SIDES = tuple(COMMANDS)
TIERS = ("gpu", "cpu", "disk")
START_TIMEOUT_S = 300.0
TARGET = WorkerRank("engine", 0)
INSTANCE = 1
"""Every engine's number, each of which is the only one of its model."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Where an engine's ranks publish: rank N at each port plus N."""

    engine: str
    block_size: int
    num_ranks: int
    port: int
    replay_port: int | None
    drops_last_block: bool = False

    def config_json(self) -> str:
        """Return what the engine would have been given."""
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.port}"}
        if self.engine == "sglang":
            del config["enable_kv_cache_events"]
        if self.replay_port is not None:
            config["replay_endpoint"] = f"tcp://*:{self.replay_port}"
        return json.dumps(config)


class IndexService:
    """One index in a process of its own."""

    def __init__(self, stack: ExitStack, side: str, has_full_reports: bool) -> None:
        """Start it, told that its engines are asked for full reports or not; return once it answers."""
        self.side, self.port = side, free_ports(1)
        environment = {**os.environ, "RUST_LOG": "error"}
        if side == "dynamo":
            environment["PYTHONPATH"] = str(FOLDER)
        command = [*COMMANDS[side], "--port", str(self.port)]
        command += ["--full-reports"] if has_full_reports and side != "dynamo" else []
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if side == "dynamo" else None
        )
        stack.callback(_end, process)
        self._connection = self._connect(process)
        stack.callback(self._connection.close)

    def register(self, model: str, stream: Stream, rank: int, url: str | None = None) -> None:
        """Follow a rank of an engine, or what a sidecar makes of it at a URL, which brings all ranks."""
        body: dict[str, Any] = {"instance_id": INSTANCE, "model_name": model, "block_size": stream.block_size}
        if url is None:
            replay_port = stream.replay_port
            body |= {"endpoint": f"tcp://127.0.0.1:{stream.port + rank}", "dp_rank": rank}
            if self.side != "dynamo":
                options = f"?engine={stream.engine}" + ("&replay_port=none" if replay_port is None else "")
                body["endpoint"] += options + ("&eagle=drop" if stream.drops_last_block else "")
            if replay_port is not None:
                body["replay_endpoint"] = f"tcp://127.0.0.1:{replay_port + rank}"
        else:
            body["endpoint"] = url
        self._post("register", body)

    def unregister(self, model: str) -> None:
        """Forget an engine."""
        self._post("unregister", {"instance_id": INSTANCE, "model_name": model})

    def ask(
        self, model: str, prompt: Prompt, block_size: int, names_ahead: bool, looks_at_last: bool = True
    ) -> dict[int, list[int]]:
        """Return how many of a prompt's tokens each rank holds, with each tier; asked as a router asks."""
        scope = {"lora_name": prompt.lora_name, "cache_salt": prompt.cache_salt}
        scope = {key: value for key, value in scope.items() if value is not None}
        num_usable = (len(prompt.token_ids) - 1) // block_size * block_size  # the last token is always computed
        if prompt.images:
            mm_hashes = mm_hashes_of(prompt, block_size)
            found = self._ask_by_hash(
                model, local_block_hashes(prompt.token_ids[:num_usable], block_size, mm_hashes=mm_hashes, **scope)
            )
        else:
            body = {"model_name": model, "token_ids": prompt.token_ids[:num_usable], **scope}
            if self.side != "dynamo" and not names_ahead:
                body |= {"token_ids": prompt.token_ids, "whole_prompt": True}
            found = _tokens(self._exchange("query", body))
        if names_ahead:
            tokens = prompt.token_ids[: min(num_usable + 1, len(prompt.token_ids) - (not looks_at_last))]
            found |= self._ask_by_hash(model, local_block_hashes(tokens, block_size, is_eagle=True, **scope))
        return found

    def _ask_by_hash(self, model: str, hashes: list[int]) -> dict[int, list[int]]:
        signed = [value - (1 << 64) if value >> 63 else value for value in hashes]
        body = {"model_name": model, "block_hashes": signed}
        return _tokens(self._exchange("query_by_hash", body))

    def ranks(self, model: str) -> dict[int, RankStatus]:
        """Return what the service says of how well it knows each rank; nothing where it does not say."""
        if self.side == "dynamo":
            return {}
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/workers?model_name={quote(model)}") as answer:
            members = json.load(answer)
        listeners = [each for member in members for each in member["listeners"].values()]
        return {
            int(rank): RankStatus(TARGET, SourceState(each["state"]), clearing=listener["counters"]["num_cleared"])
            for listener in listeners
            for rank, each in listener["ranks"].items()
        }

    def _connect(self, process: subprocess.Popen[bytes]) -> Connection:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                connection = Connection(self.port)
                path = b"health" if self.side == "dynamo" else b"readiness"
                connection.exchange(b"GET /%b HTTP/1.1\r\nhost: judge\r\n\r\n" % path)
                return connection
            except OSError:
                if time.monotonic() > give_up_s or process.poll() is not None:
                    raise
                time.sleep(0.05)

    def _exchange(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        text = json.dumps(body).encode()
        head = b"POST /%b HTTP/1.1\r\nhost: judge\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        answer: dict[str, Any] = json.loads(self._connection.exchange(head % (path.encode(), len(text)) + text))
        return answer

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request):
            pass


class Healing:
    """What Kvist's router makes of the requests to one rank of vLLM that its index knows in part."""

    def __init__(self, service: IndexService, model: str, rank: int) -> None:
        self._service, self._model, self._rank = service, model, rank
        self.status = RankStatus(TARGET)
        fleet = SimpleNamespace(get=lambda _worker: SimpleNamespace(engine="vllm"), ranks=lambda _worker: [self.status])
        self._healer = Healer(fleet, RouterMetrics())

    def send(self, prompt: Prompt, engine: Engine) -> Prompt:
        """Return the request as it comes to the engine, and learn from what its answer will say was cached."""
        asking = json.loads(self._healer.body_for(TARGET, ParsedRequest(None, 0), b"{}"))
        if self.status.state is SourceState.PARTIAL:
            size = engine.block_size
            given = self._service.ask(self._model, prompt, size, engine.names_ahead).get(self._rank, [0])[0]
            decision = SimpleNamespace(
                chosen=SimpleNamespace(target=TARGET), prompt=SimpleNamespace(is_exact=True), overlap_tokens=given
            )
            usage = ReportedUsage(len(prompt.token_ids), engine.hits(prompt)[-1])
            self._healer.on_answer(
                decision,
                usage,
                lambda start, end: [hash(prompt.token_ids[:at]) for at in range(start + size, end + 1, size)],
            )
        is_full = asking.get("vllm_xargs") == {"kv_cache_report_mode": "full"}
        return replace(prompt, is_reported=is_full, session_id=asking["session_id"]) if asking else prompt


def start_sidecar(stack: ExitStack, stream: Stream, has_full_reports: bool) -> str:
    """Start `kvist publish` beside an engine; return where it publishes."""
    command = [*KVIST, "publish", "--engine", stream.engine, "--block-size", str(stream.block_size)]
    if stream.drops_last_block:
        options = f"?replay_port={stream.replay_port}&eagle=drop"
        command += ["--endpoint", f"tcp://127.0.0.1:{stream.port}{options}"]
    else:
        command += ["--kv-events-config", stream.config_json(), "--data-parallel-size", str(stream.num_ranks)]
    command += ["--to", "tcp://127.0.0.1:0", "--worker", "engine", "--groups", "all"]
    command += ["--full-reports"] if has_full_reports else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    assert process.stdout is not None
    line = process.stdout.readline()
    if "ready at " not in line:
        raise RuntimeError(f"the sidecar said {line!r}")
    return line.partition("ready at ")[2].split()[0]


def free_ports(num_ports: int) -> int:
    """Return the first of so many ports in a row that nobody listens at."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
        try:
            for number in range(port, port + num_ports):
                socket.create_server(("", number)).close()
        except OSError:
            continue
        return port


def _tokens(answer: Mapping[str, Any]) -> dict[int, list[int]]:
    found = answer["instances"].get(str(INSTANCE), {"dp": {}})
    return {int(rank): [num, *(found[tier] for tier in TIERS[1:])] for rank, num in found["dp"].items()}


def mm_hashes_of(prompt: Prompt, block_size: int) -> list[list[int]]:
    """Return the hashes of the images in each block."""
    blocks: list[list[int]] = [[] for _ in range(-(-len(prompt.token_ids) // block_size))]
    for name, at, length in prompt.images:
        for idx in range(at // block_size, -(-(at + length) // block_size)):
            blocks[idx].append(int(name[:16], 16))
    return blocks


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
