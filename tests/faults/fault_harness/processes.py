"""Histories with real processes, sockets and brokers: engines, sidecars, routers and brokers end by kill -9."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fault_harness.engine import BLOCK_SIZE
from fault_harness.fleet import Tally

EXACT_TIMEOUT_S = 180.0
HERE = Path(__file__).parent


class Process:
    """A process that is killed and started again at will, and may answer lines with lines."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *, is_awaited: bool = True) -> None:
        """Start it, and wait for the word `ready` if it says that."""
        folders = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if is_awaited else asyncio.subprocess.DEVNULL,
            stderr=None if is_awaited else asyncio.subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        )
        if is_awaited:
            assert self._process.stdout is not None
            assert await self._process.stdout.readline() == b"ready\n"

    async def do(self, command: str) -> Any:
        """Have it do something; return what it tells."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        return json.loads(await self._process.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None:
            if self.is_up:
                self._process.kill()
            await self._process.communicate()  # to the ends of its pipes, which are else closed in a later test
            self._process = None


class EngineProcess(Process):
    """One engine at a URL, and what its processes amount to."""

    def __init__(
        self,
        kind: str,
        url: str,
        worker: str,
        rng: random.Random,
        *,
        rate: float,
        num_ranks: int = 1,
        max_blocks: int = 150,
    ) -> None:
        super().__init__()
        self.url = url
        self.num_ranks = num_ranks
        self.num_blocks = 0
        self.faults: dict[str, int] = {}
        self._rng = rng
        self._words = (kind, url, worker), (num_ranks, rate, max_blocks)

    async def start(self, *, is_awaited: bool = True) -> None:
        (kind, url, worker), numbers = self._words
        rest = map(str, (self._rng.getrandbits(32), *numbers))
        self._command = (str(HERE / "engine_process.py"), kind, url, worker, *rest)
        await super().start(is_awaited=is_awaited)

    async def kill(self) -> None:
        if self.is_up:
            told = await self.do("live 0")
            self.num_blocks += told["blocks"]
            for kind, number in told["faults"].items():
                self.faults[kind] = self.faults.get(kind, 0) + number
        await super().kill()


class LiveFleet:
    """Engines, perhaps with sidecars, a router, and perhaps a broker between them."""

    def __init__(
        self,
        engine_urls: Sequence[str],
        urls: Sequence[str],
        seed: int,
        folder: Path,
        broker: Any = None,
        *,
        has_state: bool = False,
        have_sidecars_state: bool = True,
        **options: Any,
    ) -> None:
        """Have a sidecar publish at each URL that is not its engine's own."""
        self.tally = Tally(num_histories=1)
        self._folder = folder
        self._have_sidecars_state = have_sidecars_state
        kinds = ["embedded" if url == own else "stock" for url, own in zip(urls, engine_urls, strict=True)]
        self.engines = [
            EngineProcess(kind, url, f"pod-{number}", random.Random(f"{seed} {number}"), **options)
            for number, (kind, url) in enumerate(zip(kinds, engine_urls, strict=True))
        ]
        self.sidecars = [
            self._sidecar(engine.url, url) for engine, url in zip(self.engines, urls, strict=True) if engine.url != url
        ]
        self._router = Process(str(HERE / "router_process.py"), str(folder) if has_state else "-", *urls)
        self._rng = random.Random(seed)
        self._broker = broker

    def _sidecar(self, engine_url: str, url: str) -> Process:
        folder = self._folder / f"sidecar-{url.rpartition(':')[2]}"
        folder.mkdir()
        where = ("--engine", "vllm", "--endpoint", engine_url, "--to", url, "--worker", "any")
        # One with a state has its block size from there; of one without it is learnt from the engine.
        state = ("--block-size", str(BLOCK_SIZE), "--state-dir", str(folder)) if self._have_sidecars_state else ()
        return Process("-m", "kvist", "publish", *where, *state)

    async def play(self, num_steps: int, events_a_step: int = 60, fill: int = 0) -> Tally:
        """Do so much, then have quiet and see that all is exact."""
        try:
            for process in (*self.engines, self._router):
                await process.start()
            for sidecar in self.sidecars:
                await sidecar.start(is_awaited=False)
            if fill:
                await self._have_all(f"fill {fill}")
            for _ in range(num_steps):
                await self._step(events_a_step)
            if fill:
                await self._have_all(f"fill {fill}")
            await self._become_quiet()
            if self.sidecars:
                await self._be_silent()
                await self._become_quiet()
        finally:
            for process in (*self.engines, *self.sidecars, self._router):
                await process.kill()
            for engine in self.engines:
                self.tally.num_blocks += engine.num_blocks
                self.tally.faults.update(engine.faults)
        return self.tally

    async def _have_all(self, command: str) -> None:
        await asyncio.gather(*(engine.do(command) for engine in self.engines))

    async def _step(self, num_events: int) -> None:
        choice = self._rng.random()
        engine = self._rng.choice(self.engines)
        living = asyncio.gather(*(each.do(f"live {self._rng.randint(0, num_events)}") for each in self.engines))
        if choice < 0.25:
            await living
            self._note("publisher killed")
            await engine.kill()
            await engine.start()
        elif choice < 0.4:
            self._note("router killed")
            await self._router.kill()
            await living
            await self._router.start()
        elif choice < 0.6 and self._broker is not None:
            self._note("broker killed")
            self._broker.kill()
            await living
            self._broker.start()
        elif choice < 0.6 and self.sidecars:
            await self._kill_a_sidecar(living)
        elif choice < 0.75:
            self._note("subscriber stalled")
            self._router.signal(signal.SIGSTOP)
            await asyncio.sleep(self._rng.random() * 0.3)
            await living
            self._router.signal(signal.SIGCONT)
        else:
            await living
            await asyncio.sleep(self._rng.random() * 0.1)

    async def _kill_a_sidecar(self, living: asyncio.Future[Any]) -> None:
        """Kill one, and perhaps its engine while it is away."""
        number = self._rng.randrange(len(self.sidecars))
        self._note("sidecar killed")
        await self.sidecars[number].kill()
        await living
        if self._rng.random() < 0.5:
            self._note("engine restarted behind its sidecar")
            await self.engines[number].kill()
            await self.engines[number].start()
        await self.sidecars[number].start(is_awaited=False)

    def _note(self, kind: str) -> None:
        self.tally.faults[kind] += 1

    async def _become_quiet(self) -> None:
        await self._have_all("quiet")
        if self.sidecars:  # of an engine that never spoke nothing is heard: what was there before it counts as nothing
            await self._have_all("live 20")
        began_s = time.monotonic()
        while wrong := await self._wrong():
            assert time.monotonic() < began_s + EXACT_TIMEOUT_S, wrong
            await self._revive_sidecars()
        self.tally.until_exact_s.append(time.monotonic() - began_s)
        self.tally.num_ranks += sum(engine.num_ranks for engine in self.engines)

    async def _be_silent(self) -> None:
        """Kill an engine with its sidecar: of the next two, who say nothing, the router soon believes nothing."""
        number = self._rng.randrange(len(self.sidecars))
        self._note("sidecar killed")
        self._note("engine restarted in silence")
        await self.sidecars[number].kill()
        await self.engines[number].kill()
        await self.engines[number].start()
        await self.sidecars[number].start(is_awaited=False)
        # What an engine holds is known to be nothing where its answer shows that it is another process than before.
        states = {"live", "partial"} if self._have_sidecars_state else {"partial"}
        began_s = time.monotonic()
        while True:
            said = (await self._router.do("tell"))[number]
            if all(state in states and num_blocks == 0 for state, num_blocks, _ in said.values()):
                return
            assert time.monotonic() < began_s + EXACT_TIMEOUT_S, f"{self.engines[number].url} is silent: {said}"
            await self._revive_sidecars()

    async def _revive_sidecars(self) -> None:
        """Start those that ended, since their port was taken for a moment, and wait a little."""
        for sidecar in self.sidecars:
            if not sidecar.is_up:
                await sidecar.start(is_awaited=False)
        await asyncio.sleep(0.05)

    async def _wrong(self) -> list[str]:
        wrong = []
        told_of_all = await self._router.do("tell")
        for engine, said in zip(self.engines, told_of_all, strict=True):
            told = await engine.do("tell")
            assert told["lost"] == 0
            for rank, expected in enumerate(told["held"]):
                held = said.get(str(rank))
                if held != ["live", *expected] and not (held is None and expected[0] == 0):
                    wrong.append(f"{engine.url} rank {rank}: {held}, expected {expected}")
        return wrong


async def play_live(
    transport: str,
    seed: int,
    free_port: Callable[[], int],
    broker: Any,
    *,
    num_workers: int,
    num_steps: int,
    **options: Any,
) -> Tally:
    """Play one history over a transport; over a sidecar's engines have streams of their own, and sidecars before them.

    A "forgetful-sidecar" has no state, and knows nothing that it was not told.
    """
    fill, events_a_step = options.pop("fill", 0), options.pop("events_a_step", 60)
    has_sidecars = transport in ("sidecar", "forgetful-sidecar")
    if transport == "tcp" or has_sidecars:
        urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(num_workers)]
    else:
        suffix = "?jetstream=KV" if transport == "jetstream" else ""
        base = f"{transport.replace('jetstream', 'nats')}://127.0.0.1:{broker.port}"
        urls = [f"{base}/model/pod-{number}{suffix}" for number in range(num_workers)]
    engine_urls = urls
    if has_sidecars:
        options["have_sidecars_state"] = transport == "sidecar"
        engine_urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(num_workers)]
    with tempfile.TemporaryDirectory() as folder:
        fleet = LiveFleet(engine_urls, urls, seed, Path(folder), broker, **options)
        try:
            return await fleet.play(num_steps, events_a_step, fill)
        except BaseException as error:
            error.add_note(f"fault seed {seed}, over {transport}")
            raise
