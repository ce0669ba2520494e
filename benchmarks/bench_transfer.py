"""When does bouncing pay: gather, one write and scatter, against a write for every fragment?

Senders in their own processes write to this one, both ways in turns and in a random order, for each agent, fragment
size and number of fragments, which are in random order at both ends. Last come the fragments of a model whose heads are
split over two senders: 32 layers, 8 KV heads of 128, blocks of 16 tokens. Both ways are timed from the request until
every byte is in its place.

Moving the bytes of a bounce is bound by 1/(1/gather + 1/write + 1/scatter), each measured alone in the same turns. The
baseline is the better way, with which a worker's choice (`Bounce.max_fragment_bytes`) is compared. Fragments are
written twice a turn: the difference between the two is the noise, and a choice has lost if it takes longer by more than
that.

    python benchmarks/bench_transfer.py [--quick] [--runs N] [--save]
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _common import report, table

from kvist.errors import MissingExtraError
from kvist.transfer.agents import SharedMemoryAgent, TransferAgent, Write, finish
from kvist.transfer.bounce import Bounce
from kvist.transfer.copier import TorchCopier

POOL_BYTES = 64 << 20
SIZES = tuple(1 << bits for bits in range(10, 19))
# Of a block of 32 layers, keys and values, each sender has the half of the heads: 4 * 16 * 128 numbers of 2 bytes.
HEADS_PIECES, HEADS_BYTES = 32 * 2, 4 * 16 * 128 * 2
WAYS = ("fragments", "again", "bounced", "gather", "write", "scatter")


@dataclass(frozen=True, slots=True)
class Shape:
    """What each of some senders moves."""

    size_bytes: int
    num_fragments: int
    num_writers: int = 1
    has_split_heads: bool = False

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all senders."""
        return self.size_bytes * self.num_fragments * self.num_writers

    def offsets(self, rank: int, seed: int) -> tuple[Any, Any]:
        """Return where one sender's fragments lie in its pool, and where they belong in the receiver's."""
        there, here = np.random.default_rng(seed), np.random.default_rng((seed, rank))
        if self.has_split_heads:
            num_blocks, pieces = self.num_fragments // HEADS_PIECES, np.arange(HEADS_PIECES)
            num_slots = POOL_BYTES // (self.size_bytes * self.num_writers * HEADS_PIECES)
            ours, theirs = (rng.permutation(num_slots)[:num_blocks, None] * HEADS_PIECES for rng in (here, there))
            theirs = ((theirs + pieces) * self.num_writers + rank).ravel()
            return (ours + pieces).ravel() * self.size_bytes, theirs * self.size_bytes
        num_slots = POOL_BYTES // self.size_bytes
        targets = there.permutation(num_slots)[: self.num_fragments * self.num_writers][rank :: self.num_writers]
        return here.permutation(num_slots)[: self.num_fragments] * self.size_bytes, targets * self.size_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """One agent and shape: the seconds of each turn, and what a worker would choose."""

    agent: str
    shape: Shape
    seconds: dict[str, list[float]]
    is_chosen: bool

    def ratios(self, way: str, other: str) -> list[float]:
        """Return what one way took of the other, in each turn."""
        return sorted(a / b for a, b in zip(self.seconds[way], self.seconds[other], strict=True))

    @property
    def bounced_of_fragments(self) -> float:
        """Return the time of bounces over that of fragments: the median of the turns, against both repetitions."""
        return median(self.ratios("bounced", "fragments") + self.ratios("bounced", "again"))

    @property
    def noise(self) -> float:
        """Return how much longer the same may seem to take: where the median of 19 in 20 repetitions of this lies."""
        ratios = np.array(self.ratios("fragments", "again"))
        medians = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.quantile(medians, (0.025, 0.975))
        return float(max(high, 1 / low)) - 1

    @property
    def of_bound(self) -> float:
        """Return the share of the bound that moving the bytes reaches."""
        steps = zip(*(self.seconds[way] for way in ("gather", "write", "scatter", "bounced")), strict=True)
        return median((gather + write + scatter) / bounced for gather, write, scatter, bounced in steps)

    @property
    def chosen_over_other(self) -> float:
        """Return the time of the chosen way over that of the other."""
        return self.bounced_of_fragments if self.is_chosen else 1 / self.bounced_of_fragments


def agent_class(kind: str) -> Callable[[str], TransferAgent]:
    """Return what makes an agent of a kind; raises MissingExtraError."""
    if kind == "shared_memory":
        return SharedMemoryAgent
    made: Callable[[str], TransferAgent] = importlib.import_module("kvist.transfer.agents.nixl").NixlAgent
    return made


class End:
    """One end: an agent, a pool, and a bounce whose copier knows the pool, and which bounces everything."""

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self.pool = agent.allocate(POOL_BYTES)
        self.pool[:] = 1  # every page is there before anything is timed
        agent.register(self.pool.ctypes.data, POOL_BYTES)
        self.base = int(self.pool.ctypes.data)
        self.copier = TorchCopier([torch.from_numpy(self.pool)])
        self.memory: list[torch.Tensor] = []
        self.bounce = Bounce(agent, self.copier, self._region)
        self.bounce.max_fragment_bytes = 1 << 40

    def _region(self) -> torch.Tensor:
        self.memory.append(torch.from_numpy(self.agent.allocate(POOL_BYTES)))
        self.memory[-1].fill_(1)
        return self.memory[-1]

    def close(self) -> None:
        """Let go of everything."""
        self.bounce.close()
        self.agent.close()


def serve(kind: str, rank: int) -> None:
    """Be a sender: hear where the receiver is, then what to send, and how, and say how long each took."""
    torch.set_num_threads(1)
    end = End(agent_class(kind)(f"sender {rank}"))
    print("{}", flush=True)
    receiver = json.loads(sys.stdin.readline())
    peer = end.agent.connect(base64.b64decode(receiver["metadata"]))
    fragments, base = np.empty((0, 3), np.int64), 0

    def gather() -> None:
        size_bytes = int(fragments[:, 2].sum())
        end.copier.gather(fragments[:, 0], fragments[:, 2], end.memory[0][:size_bytes])

    def write() -> None:
        move(end.agent.write(peer, [(end.memory[0].data_ptr(), base, int(fragments[:, 2].sum()))]))

    ways = {
        "fragments": lambda: move(end.agent.write(peer, fragments)),
        "bounced": lambda: move(end.bounce.send(peer, fragments, base)),
        "gather": gather,
        "write": write,
    }
    for line in sys.stdin:
        asked = json.loads(line)
        if "way" in asked:
            print(json.dumps({"s": timed(ways[asked["way"]])}), flush=True)
            continue
        shape, base = Shape(**asked["shape"]), asked["base"]
        sources, targets = shape.offsets(rank, asked["seed"])
        sizes = np.full(shape.num_fragments, shape.size_bytes, np.int64)
        fragments = np.stack((end.base + sources, receiver["pool"] + targets, sizes), axis=1)
        print("{}", flush=True)
    end.close()


class Sender:
    """A sender, in a process of its own."""

    def __init__(self, kind: str, rank: int) -> None:
        command = [sys.executable, __file__, "--serve", kind, "--rank", str(rank)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hear()

    def end(self) -> None:
        """Let it end."""
        self._process.communicate()

    def say(self, **asked: Any) -> None:
        """Ask for something."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(asked)}\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the answer."""
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):  # NIXL logs here as well
            if not line:
                raise SystemExit("a sender has died")
        return dict(json.loads(line))


def move(write: Write | None) -> None:
    """Move a write or a send on to its end; raises WriteFailedError."""
    assert write is not None
    finish(write)


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = perf_counter()
    function()
    return perf_counter() - began


class Receiver:
    """This process: asks senders for one shape, one way at a time, and scatters."""

    def __init__(self, kind: str, end: End) -> None:
        self.end, self._kind = end, kind
        self._senders: list[Sender] = []

    def close(self) -> None:
        """Let go of everything."""
        for sender in self._senders:
            sender.end()
        self.end.close()

    def prepare(self, shape: Shape, seed: int) -> None:
        """Reserve room, and let everybody know what will be moved."""
        self._shape = shape
        while len(self._senders) < shape.num_writers:  # not before they are needed: agents keep a core busy
            self._senders.append(Sender(self._kind, len(self._senders)))
            metadata = base64.b64encode(self.end.agent.metadata()).decode()
            self._senders[-1].say(metadata=metadata, pool=self.end.base)
        room = self.end.bounce.reserve(shape.total_bytes, shape.num_fragments * shape.num_writers)
        assert room is not None
        self.room, self._parts = room, []
        for rank, sender in enumerate(self._senders[: shape.num_writers]):
            base = room + rank * shape.size_bytes * shape.num_fragments
            sender.say(shape=asdict(shape), seed=seed, base=base)
            targets = self.end.base + shape.offsets(rank, seed)[1]
            self._parts.append((base, np.stack([targets, np.full_like(targets, shape.size_bytes)], axis=1)))
            sender.hear()

    def move(self, way: str) -> float:
        """Return the seconds of one way, or of one step of a bounce."""
        if way == "scatter":
            targets, sizes = np.concatenate([pieces for _, pieces in self._parts]).T
            piece = self.end.memory[1][self.room - self.end.memory[1].data_ptr() :][: self._shape.total_bytes]
            return timed(lambda: self.end.copier.scatter(targets, sizes, piece))
        began = perf_counter()
        for sender in self._senders[: self._shape.num_writers]:
            sender.say(way="fragments" if way == "again" else way)
        alone_s = max(sender.hear()["s"] for sender in self._senders[: self._shape.num_writers])
        if way in ("gather", "write"):
            return alone_s
        if way == "bounced":
            self.end.bounce.scatter(self._parts)
        return perf_counter() - began


def measure(kind: str, receiver: Receiver, shape: Shape, num_turns: int) -> Case:
    """Time both ways and each step in turns, in a random order, after a turn that does not count."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(shape.size_bytes * shape.num_fragments)
    for turn in range(num_turns + 1):
        receiver.prepare(shape, turn)
        for way in order.sample(WAYS, len(WAYS)):
            taken = receiver.move(way)
            if turn:
                seconds[way].append(taken)
        receiver.end.bounce.release(receiver.room)
    return Case(kind, shape, seconds, is_chosen=shape.size_bytes <= Bounce.max_fragment_bytes)


def shapes(quick: bool) -> list[Shape]:
    """Return few and many fragments of each size, and the fragments of split heads, for short and long prompts."""
    sizes = SIZES[::4] if quick else SIZES
    counts = {size: (16, 256, POOL_BYTES // size) for size in sizes}
    swept = [Shape(size, count) for size in sizes for count in counts[size] if count * size <= POOL_BYTES]
    return list(dict.fromkeys(swept)) + [
        Shape(HEADS_BYTES, num_blocks * HEADS_PIECES, num_writers=2, has_split_heads=True) for num_blocks in (4, 32)
    ]


def run(kind: str, quick: bool) -> list[Case]:
    """Return every case of an agent."""
    receiver = Receiver(kind, End(agent_class(kind)("receiver")))
    cases = []
    for shape in shapes(quick):
        num_turns = 5 if quick else 7 if shape.total_bytes > POOL_BYTES // 8 else 15
        cases.append(measure(kind, receiver, shape, num_turns))
    receiver.close()
    return cases


def row(runs: Sequence[Case]) -> list[object]:
    """Return a row of the table: one case in all runs."""

    def of_all(way: str) -> str:
        low, middle, high = np.quantile([s * 1e3 for case in runs for s in case.seconds[way]], (0.25, 0.5, 0.75))
        return f"{middle:.3g} ({low:.3g}-{high:.3g})"

    shape = runs[0].shape
    size = f"{shape.size_bytes >> 10} KiB" + (", split heads" if shape.has_split_heads else "")
    count = f"{shape.num_writers} x {shape.num_fragments}" if shape.num_writers > 1 else str(shape.num_fragments)
    ways = ("fragments", "bounced")
    middles = [median(s for case in runs for s in case.seconds[way]) for way in ways]
    rates = [f"{shape.total_bytes / seconds / 1e9:.2f}" for seconds in middles]
    ratio = median(1 / case.bounced_of_fragments for case in runs)
    last = [f"{ratio:.2f}", f"{median(case.noise for case in runs):.2f}", f"{median(c.of_bound for c in runs):.2f}"]
    taken = [of_all(way) for way in ways]
    return [
        runs[0].agent,
        size,
        f"{count} : {shape.num_writers}",
        *rates,
        *taken,
        *last,
        "yes" if runs[0].is_chosen else "no",
    ]


def losses(cases: Sequence[Case]) -> dict[str, int]:
    """Return how often the choice was right, or not: a loss is a bounce that was slower, by more than the noise."""
    beyond = [case for case in cases if case.chosen_over_other > 1 + case.noise]
    return {
        "choices": len(cases),
        "bounced": sum(case.is_chosen for case in cases),
        "bounced_and_slower": sum(case.is_chosen and case.chosen_over_other > 1 for case in cases),
        "bounced_and_slower_beyond_noise": sum(case.is_chosen for case in beyond),
        "gains_missed_beyond_noise": sum(not case.is_chosen for case in beyond),
    }


def main() -> None:
    """Run all, or be a sender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three sizes, five turns, one run")
    parser.add_argument("--runs", type=int, default=5, help="how often everything is run (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the results below benchmarks/results")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.rank)
        return
    torch.set_num_threads(1)
    cases: dict[tuple[str, Shape], list[Case]] = {}
    for _ in range(1 if args.quick else args.runs):
        for kind in ("shared_memory", "nixl"):
            with suppress(MissingExtraError):
                for case in run(kind, args.quick):
                    cases.setdefault((kind, case.shape), []).append(case)
    every = [case for runs in cases.values() for case in runs]
    headers = ["agent", "fragment", "descriptors", "as they are GB/s", "bounced GB/s", "as they are ms", "bounced ms"]
    headers += ["as they are / bounced", "noise", "of bound", "is bounced"]
    markdown = table(headers, [row(runs) for runs in cases.values()])
    counts = losses(every)
    markdown += "\n\n" + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())
    results = {"choice": counts, "cases": [facts(runs) for runs in cases.values()]}
    report("bench_transfer", markdown, results, ["torch", "numpy"], args.save)


def facts(runs: Sequence[Case]) -> dict[str, Any]:
    """Return one case in all runs, for machines."""
    named = {"agent": runs[0].agent, **asdict(runs[0].shape), "is_chosen": runs[0].is_chosen}
    for name in ("bounced_of_fragments", "noise", "of_bound"):
        named[name] = [round(getattr(case, name), 3) for case in runs]
    return named | {way: round(median(s for case in runs for s in case.seconds[way]), 6) for way in WAYS}


if __name__ == "__main__":
    main()
