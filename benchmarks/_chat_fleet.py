"""Fleets of stand-in workers that answer chats at once, and the routers in front of them, as processes.

A fleet is four workers in two processes: one answers from prepared bytes; the other caches the prompts' blocks in an
LRU and publishes the changes as vLLM does, with a replay endpoint.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import msgspec
import psutil
import uvloop
import zmq
from _chats import MODEL, NUM_EVENTS, WORKS, Chats
from _engines import BLOCK_SIZE, ENGINE_HWM, encode_vllm

from kvist.events import FULL, EngineStored

NUM_WORKERS = 4
CACHE_BLOCKS = 6_000
"""Of a worker: a pool of prompts fits the fleet, not one worker."""
COUNT, OPENED = b"count", b"opened"
COUNT_PATH = b"/count"
HASH_MASK = (1 << 64) - 1
REPLAYED_MESSAGES = 10_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
BACKLOG = 4096
START_TIMEOUT_S = 300.0
ABOUT_CHAT = f'"id":"chatcmpl-1","created":1,"model":"{MODEL}"'
USAGE = '"usage":{"prompt_tokens":1000,"completion_tokens":20,"total_tokens":1020}'


def _chunk(event: str) -> bytes:
    return f"{len(event) + 8:x}\r\ndata: {event}\n\n\r\n".encode()


def _delta(delta: str, reason: str = "null") -> bytes:
    choice = f'{{"index":0,"delta":{delta},"finish_reason":{reason}}}'
    return _chunk(f'{{{ABOUT_CHAT},"object":"chat.completion.chunk","choices":[{choice}]}}')


def _answer(status: bytes, body: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_MESSAGE = '{"role":"assistant","content":"' + "An answer of twenty tokens. " * 4 + '"}'
_CHOICE = f'{{"index":0,"message":{_MESSAGE},"finish_reason":"stop"}}'
UNARY = _answer(b"200 OK", f'{{{ABOUT_CHAT},"object":"chat.completion","choices":[{_CHOICE}],{USAGE}}}'.encode())
UNARY_END = UNARY[-24:]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST_EVENT = _delta('{"role":"assistant","content":""}')
EVENT = _delta('{"content":" token"}')
STREAM_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
LAST_EVENTS = _delta("{}", '"stop"') + b"e\r\n" + STREAM_END
PAGES = {
    b"/v1/models": _answer(b"200 OK", b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'),
    b"/health": _answer(b"200 OK"),
    COUNT_PATH: _answer(b"200 OK", b"{}"),
    b"/version": _answer(b"200 OK", b'{"version":"0.11.0"}'),
}
NOT_FOUND = _answer(b"404 Not Found")


class Chat(msgspec.Struct):
    """What a worker reads of a request."""

    user: str
    stream: bool = False


_decode_chat = msgspec.json.Decoder(Chat).decode


class Engine:
    """One worker's prefix cache, and the stream of its changes."""

    def __init__(self, chats: Chats) -> None:
        self.num_tokens = self.num_cached = 0
        self._chats = chats
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._number = 0
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(ENGINE_HWM)
        self._socket.bind("tcp://127.0.0.1:*")
        self._sent: deque[list[bytes]] = deque(maxlen=REPLAYED_MESSAGES)
        replay = zmq.Context.instance().socket(zmq.ROUTER)
        port = replay.bind_to_random_port("tcp://127.0.0.1")
        Thread(target=self._replay, args=(replay,), daemon=True).start()
        self.endpoint = f"{self._socket.get_string(zmq.LAST_ENDPOINT)}?replay_port={port}"

    def _replay(self, replay: zmq.Socket[bytes]) -> None:
        """Answer each request with the messages from its number on that are still kept."""
        while True:
            client, empty, start = replay.recv_multipart()
            for number, payload in [message for message in [*self._sent] if message[0] >= start]:
                replay.send_multipart([client, empty, number, payload])
            replay.send_multipart([client, empty, END_OF_REPLAY, b""])

    def compute(self, user: str) -> None:
        """Cache a prompt and publish what changed."""
        token_ids = self._chats.token_ids(user)
        blocks, size_bytes, data = self._blocks, 4 * BLOCK_SIZE, token_ids.tobytes()
        hashes: list[int] = []
        parent = None
        for start in range(0, len(data) - size_bytes + 1, size_bytes):
            parent = hash((parent, data[start : start + size_bytes])) & HASH_MASK
            hashes.append(parent)
        num_held = next((idx for idx, block_hash in enumerate(hashes) if block_hash not in blocks), len(hashes))
        self.num_tokens += len(token_ids)
        self.num_cached += num_held * BLOCK_SIZE
        for block_hash in reversed(hashes):  # a prompt's end is dropped first
            blocks[block_hash] = None
            blocks.move_to_end(block_hash)
        if num_held < len(hashes):
            removed = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - CACHE_BLOCKS)]
            tokens = token_ids[num_held * BLOCK_SIZE : len(hashes) * BLOCK_SIZE].tolist()
            parent = hashes[num_held - 1] if num_held else None
            stored = EngineStored(hashes[num_held:], tokens, BLOCK_SIZE, parent, window=FULL, group=0)
            payload = encode_vllm("map", removed, stored)
            message = [self._number.to_bytes(8, "big"), payload]
            self._sent.append(message)
            self._socket.send_multipart([b"", *message])
            self._number += 1


def _run_engines(pipe: Connection, folder: Path) -> None:
    """Compute what the fronts name; on `COUNT` answer with what was received before."""
    chats = Chats(folder)
    engines = [Engine(chats) for _ in range(NUM_WORKERS)]
    named = zmq.Context.instance().socket(zmq.PULL)
    named.set_hwm(0)
    named.bind("tcp://127.0.0.1:*")
    pipe.send((named.get_string(zmq.LAST_ENDPOINT), [engine.endpoint for engine in engines]))
    num_received: Counter[str] = Counter()
    num_opened = 0
    while True:
        worker, user = named.recv_multipart()
        if user == OPENED:
            num_opened += 1
        elif user != COUNT:
            num_received[user.decode()] += 1
            engines[worker[0]].compute(user.decode())
        else:
            counts = {
                "tokens": sum(engine.num_tokens for engine in engines),
                "cached": sum(engine.num_cached for engine in engines),
                "chats": num_received.total(),
                "repeated": sum(number > 1 for number in num_received.values()),
                "opened": num_opened,
            }
            pipe.send(counts)


class WorkerConnection(asyncio.Protocol):
    """Answers chats from prepared bytes, a stream's events at its work's pace, in a turn of the loop each."""

    def __init__(self, worker_idx: int, engines: zmq.Socket[bytes]) -> None:
        self._worker = bytes([worker_idx])
        self._engines = engines
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._engines.send_multipart([self._worker, OPENED])

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        head = bytes(self._received[:end]).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(self._received) < end + length:
            return
        body = bytes(self._received[end : end + length])
        self._received.clear()  # neither routers nor generators send ahead
        path = head.split(b" ")[1]
        if path != b"/v1/chat/completions":
            if path == COUNT_PATH:
                self._engines.send_multipart([self._worker, COUNT])
            self._transport.write(PAGES.get(path, NOT_FOUND))
            return
        chat = _decode_chat(body)
        if chat.stream:
            self._transport.write(STREAM_HEAD + FIRST_EVENT)
            event_s = WORKS[chat.user.partition("/")[0]].event_s
            self._loop.call_later(event_s, self._send_event, event_s, NUM_EVENTS - 2)
        else:
            self._transport.write(UNARY)
        self._engines.send_multipart([self._worker, chat.user.encode()])

    def _send_event(self, event_s: float, num_left: int) -> None:
        self._transport.write(EVENT if num_left else LAST_EVENTS)
        if num_left:
            self._loop.call_later(event_s, self._send_event, event_s, num_left - 1)


async def _answer_chats(pipe: Connection, engines_at: str) -> None:
    loop = asyncio.get_running_loop()
    engines = zmq.Context.instance().socket(zmq.PUSH)
    engines.set_hwm(0)
    engines.connect(engines_at)
    servers = [
        await loop.create_server(partial(WorkerConnection, idx, engines), "127.0.0.1", 0, backlog=BACKLOG)
        for idx in range(NUM_WORKERS)
    ]
    pipe.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _run_fronts(pipe: Connection, engines_at: str) -> None:
    uvloop.run(_answer_chats(pipe, engines_at))


class Fleet:
    """Four workers in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._processes: list[BaseProcess] = []
        self._pipe = self._start(_run_engines, folder)
        engines_at, endpoints = self._pipe.recv()
        ports = self._start(_run_fronts, engines_at).recv()
        self.workers: list[tuple[int, str]] = list(zip(ports, endpoints, strict=True))
        """The port of each, and where its events are."""

    def _start(self, target: Callable[..., None], argument: object) -> Connection:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._processes.append(spawn.Process(target=target, args=(theirs, argument), daemon=True))
        self._processes[-1].start()
        return ours

    @property
    def urls(self) -> list[str]:
        """Return where the workers are."""
        return [f"http://127.0.0.1:{port}" for port, _ in self.workers]

    def counts(self) -> dict[str, int]:
        """Return the prompt tokens of all workers, those cached, chats, those received twice, and connections opened.

        All prompts that were received before are computed then.
        """
        _get_json(self.urls[0] + COUNT_PATH.decode())
        counts: dict[str, int] = self._pipe.recv()
        return counts

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


class Router:
    """A router as a process, in front of a fleet of its own; `side` is a key of `SIDES`, or "direct" for no router."""

    def __init__(self, side: str, folder: Path) -> None:
        """Return when it routes to every worker and has compiled what it compiles."""
        self.fleet = Fleet(folder)
        self.port = self.fleet.workers[0][0]
        self._process: subprocess.Popen[bytes] | None = None
        if side == "direct":
            return
        self.port, metrics_port = _free_ports(2)
        program, *arguments = SIDES[side]
        if program == "kvist":
            command = [sys.executable, "-m", "kvist", "--log-level", "error", "route", "--block-size", str(BLOCK_SIZE)]
            command += ["--model-path", str(folder)]
            sources = zip(self.fleet.urls, self.fleet.workers, strict=True)
            arguments += [part for url, (_, at) in sources for part in ("--kv-event-source", f"{url}={at}")]
        else:
            command = [sys.executable, "-m", "smg", "launch", "--log-level", "error"]
            arguments += ["--prometheus-port", str(metrics_port)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--worker-urls", *self.fleet.urls]
        self._process = subprocess.Popen(
            command + arguments,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),  # not as a batch job
        )
        self._await_ready()

    def _await_ready(self) -> None:
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_at_s and self._process is not None and self._process.poll() is None:
            with suppress(OSError):
                page = _get_json(f"http://127.0.0.1:{self.port}/readiness")
                workers = page.get("workers")  # Kvist's, which also says when its index is compiled
                num_ready = workers["healthy"] if workers else page["healthy_workers"]
                if num_ready == NUM_WORKERS and page.get("index") != "compiling":
                    return
            time.sleep(0.1)
        raise TimeoutError(f"{self._process and self._process.args}: not ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.fleet.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int | None:
        """Return the router's process, None for "direct"."""
        return self._process.pid if self._process else None

    def cpu_s(self) -> float:
        """Return the CPU time of the process and those it started, of user and system; 0 for "direct"."""
        return sum(sum(process.cpu_times()[:2]) for process in self._tree())

    def peak_bytes(self) -> int:
        """Return the peak of the resident size, over the process and those it started."""
        pages = (Path(f"/proc/{process.pid}/status").read_text() for process in self._tree())
        return sum(1024 * int(page.partition("VmHWM:")[2].split()[0]) for page in pages)

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]


SIDES = {
    "kvist kv": ("kvist", "--policy", "kv"),
    "kvist kv, 2 processes": ("kvist", "--policy", "kv", "--processes", "2"),
    "kvist round-robin": ("kvist", "--policy", "round-robin"),
    "smg cache_aware": ("smg", "--policy", "cache_aware"),
    "smg round_robin": ("smg", "--policy", "round_robin"),
}
"""The routers, each as its command line begins."""


def _get_json(url: str):  # type: ignore[no-untyped-def]
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
