"""When does bouncing pay: gather, one write and scatter, against a write of every fragment as it is?

Both in the same run, in turns, for each agent and fragment size, from a process to a peer of its own; the fragments are
in random order at both ends. Bound by the copies and one large write, each measured alone in the same turns: the bound
is 1/(1/gather + 1/write + 1/scatter). The baseline is the better of both ways; the gate's choice is held against it.

    python benchmarks/bench_transfer.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _common import report, table

from kvist.errors import MissingExtraError
from kvist.transfer.agents import SharedMemoryAgent, TransferAgent, WriteState
from kvist.transfer.bounce import BounceConfig, CostModel, RegionBounce
from kvist.transfer.bounce.calibration import calibrate_peer
from kvist.transfer.bounce.copier import TorchCopier, host_region
from kvist.transfer.bounce.gate import CostCurve

MIB = 1 << 20
SIZES = tuple(1 << bits for bits in range(10, 19))
REGION_BYTES = 64 * MIB
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """One agent and fragment size: the median seconds of each way and of each step of a bounce, alone."""

    agent: str
    fragment_bytes: int
    num_fragments: int
    per_fragment_s: float
    bounced_s: float
    gather_s: float
    write_s: float
    scatter_s: float
    is_bounced_by_gate: bool

    @property
    def bound_s(self) -> float:
        """Return what a bounce would take if its steps cost nothing to put together."""
        return self.gather_s + self.write_s + self.scatter_s

    @property
    def of_bound(self) -> float:
        """Return the share of the bound that bouncing reaches."""
        return self.bound_s / self.bounced_s

    @property
    def gate_against_better(self) -> float:
        """Return how much longer the gate's choice takes than the better way: 1 is the best."""
        chosen_s = self.bounced_s if self.is_bounced_by_gate else self.per_fragment_s
        return chosen_s / min(self.bounced_s, self.per_fragment_s)

    def row(self) -> list[object]:
        """Return a row of the table."""
        rates = [
            f"{self.num_fragments * self.fragment_bytes / s / 1e9:.2f}" for s in (self.per_fragment_s, self.bounced_s)
        ]
        ratio, gate = self.per_fragment_s / self.bounced_s, "bounce" if self.is_bounced_by_gate else "fragments"
        size = f"{self.fragment_bytes >> 10} KiB"
        last = [f"{ratio:.2f}", f"{self.of_bound:.2f}", gate, f"{self.gate_against_better:.2f}"]
        return [self.agent, size, f"{self.num_fragments} : 1", *rates, *last]


def agent_class(kind: str) -> Callable[[str], TransferAgent]:
    """Return what makes an agent of a kind; raises MissingExtraError."""
    if kind == "shared_memory":
        return SharedMemoryAgent
    made: Callable[[str], TransferAgent] = importlib.import_module("kvist.transfer.agents.nixl").NixlAgent
    return made


class End:
    """One end: an agent, a pool, and a bounce whose copier knows the pool."""

    def __init__(self, kind: str, name: str, pool_bytes: int) -> None:
        torch.set_num_threads(1)
        new_agent = agent_class(kind)
        self.agent = new_agent(name)
        self.pool = self.agent.allocate(pool_bytes)
        self.pool[:] = 1  # every page is there before anything is timed
        self.agent.register(self.pool.ctypes.data, pool_bytes)
        self.copier = TorchCopier([torch.from_numpy(self.pool)])
        size_bytes = max(REGION_BYTES, pool_bytes)
        # The gate is asked apart, so that both ways can be timed whatever it says.
        self.memory = [host_region(self.agent, size_bytes) for _ in range(2)]
        for memory in self.memory:
            memory.part(0, size_bytes).fill_(1)
        regions = iter(self.memory)
        never_asked = CostModel(*[CostCurve((1,), (1.0,))] * 3, write_fixed_s=1.0)
        self.bounce = RegionBounce(self.agent, self.copier, lambda: next(regions), never_asked, BounceConfig())


def serve(kind: str, pool_bytes: int) -> None:
    """Be the peer: scatter what lies in the region when told to, and say how long that took."""
    end = End(kind, "peer", pool_bytes)
    facts = {
        "metadata": base64.b64encode(end.agent.metadata()).decode(),
        "pool": int(end.pool.ctypes.data),
        "region": end.memory[1].address,
    }
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        addresses, sizes = plan_of(json.loads(line), end.pool.ctypes.data)
        print("{}", flush=True)
        sys.stdin.readline()
        began = perf_counter()
        end.copier.scatter(addresses, sizes, end.memory[1].part(0, int(sizes.sum())))
        print(json.dumps({"scatter_s": perf_counter() - began}), flush=True)
    end.bounce.close()
    end.agent.close()


def plan_of(asked: dict[str, int], base: int) -> tuple[Any, Any]:
    """Return addresses in a random order, and sizes, of the fragments that are asked for."""
    order = np.random.default_rng(asked["seed"]).permutation(asked["count"]) * asked["size"]
    return base + order, np.full(asked["count"], asked["size"], np.int64)


class PeerProcess:
    """The peer, in a process of its own."""

    def __init__(self, kind: str, pool_bytes: int) -> None:
        command = [sys.executable, __file__, "--serve", kind, "--pool-bytes", str(pool_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._hear()

    def prepare(self, count: int, size: int, seed: int) -> None:
        """Let it know what to scatter next."""
        self._say(json.dumps({"count": count, "size": size, "seed": seed}))
        self._hear()

    def scatter(self) -> tuple[float, float]:
        """Return how long a scatter took there, and how long it was until that was known here."""
        began = perf_counter()
        self._say("go")
        return self._hear()["scatter_s"], perf_counter() - began

    def end(self) -> None:
        """Let it end."""
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):  # NIXL logs here as well
            if not line:
                raise SystemExit("the peer has died")
        heard: dict[str, Any] = json.loads(line)
        return heard


def waited(transfer: Any) -> None:
    """Wait until a write or a send has ended well."""
    if not transfer.wait(_TIMEOUT_S) or transfer.state is not WriteState.DONE:
        raise SystemExit(f"a write has failed: {transfer.reason}")


def measure(
    kind: str, end: End, peer: PeerProcess, costs: CostModel, size: int, total_bytes: int, num_turns: int
) -> Case:
    """Time both ways and each step in turns, after a turn that does not count."""
    peer_id = end.agent.connect(base64.b64decode(peer.facts["metadata"]))
    count = total_bytes // size
    seconds: dict[str, list[float]] = {name: [] for name in ("fragments", "bounced", "gather", "write", "scatter")}
    for turn in range(num_turns + 1):
        asked = {"count": count, "size": size, "seed": turn}
        sources, sizes = plan_of({**asked, "seed": turn + 1000}, end.pool.ctypes.data)
        targets, _ = plan_of(asked, peer.facts["pool"])
        fragments = np.stack((sources, targets, sizes), axis=1)
        times = {"fragments": _timed(lambda rows=fragments: waited(end.agent.write(peer_id, rows)))}
        region = end.memory[0]
        times["gather"] = _timed(lambda: end.copier.gather(sources, sizes, region.part(0, total_bytes)))  # noqa: B023
        whole = np.array([[region.address, peer.facts["region"], total_bytes]], np.int64)
        times["write"] = _timed(lambda rows=whole: waited(end.agent.write(peer_id, rows)))
        peer.prepare(**asked)
        times["scatter"], _ = peer.scatter()
        peer.prepare(**asked)
        began = perf_counter()
        outgoing = end.bounce.send(peer_id, fragments, peer.facts["region"])
        if outgoing is None:
            raise SystemExit("there is no room to gather in")
        waited(outgoing)
        peer.scatter()
        times["bounced"] = perf_counter() - began
        if turn:
            for name, taken in times.items():
                seconds[name].append(taken)
    medians = {name: median(taken) for name, taken in seconds.items()}
    prefers = costs.prefers_bounce(count, total_bytes)
    steps = (medians["fragments"], medians["bounced"], medians["gather"], medians["write"], medians["scatter"])
    return Case(kind, size, count, *steps, prefers)


def _timed(function: Callable[[], object]) -> float:
    began = perf_counter()
    function()
    return perf_counter() - began


def run(quick: bool) -> list[Case]:
    """Return every case of every agent that is installed."""
    sizes, total_bytes, num_turns = ((SIZES[0], SIZES[4], SIZES[8]), 16 * MIB, 3) if quick else (SIZES, 64 * MIB, 9)
    cases = []
    for kind in ("shared_memory", "nixl"):
        with suppress(MissingExtraError):
            agent_class(kind)
            peer, end = PeerProcess(kind, total_bytes), End(kind, "bench", total_bytes)
            peer_id = end.agent.connect(base64.b64decode(peer.facts["metadata"]))
            costs = calibrate_peer(end.agent, peer_id, peer.facts["region"])
            cases += [measure(kind, end, peer, costs, size, total_bytes, num_turns) for size in sizes]
            end.bounce.close()
            end.agent.close()
            peer.end()
    return cases


def main() -> None:
    """Run all, or be the peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three sizes, a quarter of the bytes")
    parser.add_argument("--save", action="store_true", help="write the results below benchmarks/results")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--pool-bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.pool_bytes)
        return
    cases = run(args.quick)
    headers = ["agent", "fragment", "descriptors", "fragments GB/s", "bounced GB/s", "bounced / fragments"]
    markdown = table([*headers, "of bound", "gate says", "gate / better"], [case.row() for case in cases])
    results = {
        "cases": [
            {"agent": case.agent, "fragment_bytes": case.fragment_bytes, "of_bound": round(case.of_bound, 3)}
            | {"speedup": round(case.per_fragment_s / case.bounced_s, 3)}
            | {"gate_against_better": round(case.gate_against_better, 3), "gate_bounces": case.is_bounced_by_gate}
            for case in cases
        ]
    }
    report("bench_transfer", markdown, results, ["torch", "numpy"], args.save)


if __name__ == "__main__":
    main()
