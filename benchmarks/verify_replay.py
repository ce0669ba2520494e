"""Do `kvist index` and `dynamo.indexer` give the same, right answers when they are fed from a recording?

Engines' streams are recorded by `kvist record` while they are sent; `kvist replay` then publishes the recording, and
both indexers follow the very same sockets, at full speed. Both get the same prompts: whole ones, cut within and between
blocks, continued with unknown tokens, wrong in the middle. The right answer is what the engines hold.

The streams are vLLM's events as maps and as arrays, field for field as vLLM 0.33 writes them. The oldest conversations
are evicted, leaves first, and nothing is stored again: cases in which the baseline is right, too. verify_indexer.py has
the others.

    python benchmarks/verify_replay.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from _common import report, table
from _engines import Probe, StreamSpec
from _indexers import SIDES, Indexer, compare
from _streams import Publisher

from kvist.replay import RecordingReader

NUM_STREAMS, BLOCKS_A_STEP = 8, 8
MAX_STEPS_A_STREAM = 8_000
"""Below what a ZMQ socket keeps for a subscriber, 10,000 messages: the baseline cannot ask for what it lost."""
CAPACITY_SHARE = 0.3
"""Of all blocks that an engine stores, what it can hold; the others are evicted."""
FORMS = ("map", "array")
DELAY_S = 6.0
"""Before the first message: both indexers have subscribed by then."""
KVIST = [sys.executable, "-m", "kvist", "--log-level", "error"]


def record(publisher: Publisher, form: str, num_steps: int, path: Path) -> tuple[list[Probe], str]:
    """Record streams while their engines send; return a last block of each, and what the recorder says."""
    endpoints = publisher.endpoints[form]
    sources = [f"--from={number}={endpoint}" for number, endpoint in enumerate(endpoints, 1)]
    command = [*KVIST, "record", *sources, "--to", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        publisher.call("await_subscribers", form)
        probes, sizes = publisher.call("make", num_steps)
        publisher.call("burst", form)
        num_sent, give_up_s = sizes[form][0], time.monotonic() + 60
        while _num_recorded(path) < num_sent:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{_num_recorded(path)} messages recorded of {num_sent}")
            time.sleep(0.5)
        recorder.send_signal(signal.SIGINT)
        said, _ = recorder.communicate()
    return probes, said.splitlines()[-1].partition(": ")[2].partition(" at ")[0]


def _num_recorded(path: Path) -> int:
    return sum(1 for _ in RecordingReader(path)) if path.exists() else 0


@contextmanager
def replayed(path: Path) -> Iterator[list[str]]:
    """Publish a recording; yields where, by source."""
    arguments = ["--to", "tcp://127.0.0.1:0", "--as-fast-as-possible", "--delay", str(DELAY_S), "--linger", "600"]
    player = subprocess.Popen([*KVIST, "replay", str(path), *arguments], stdout=subprocess.PIPE, text=True)
    assert player.stdout is not None
    endpoints: dict[int, str] = {}
    try:
        while len(endpoints) < NUM_STREAMS:
            line = player.stdout.readline()
            if not line:
                raise RuntimeError("the recording cannot be played")
            if "ready at " in line:
                url, _, source = line.partition("ready at ")[2].rstrip().partition(" source=")
                endpoints[int(source)] = url.partition("?")[0]
        yield [endpoints[number] for number in sorted(endpoints)]
    finally:
        player.terminate()
        player.communicate()


def verify(form: str, num_steps: int, num_probes: int) -> list[str]:
    """Record, replay into both, and return how many of some answers are right and alike."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(TemporaryDirectory())) / "fleet.mcap"
        capacity = int(num_steps // NUM_STREAMS * BLOCKS_A_STEP * CAPACITY_SHARE)
        spec = StreamSpec(BLOCKS_A_STEP, {form: form}, capacity=capacity, num_streams=NUM_STREAMS, num_open=4)
        publisher = stack.enter_context(Publisher(spec))
        last, said = record(publisher, form, num_steps, path)
        endpoints = dict(enumerate(stack.enter_context(replayed(path)), 1))
        indexers = {}
        for side in SIDES:
            indexers[side] = Indexer(side, endpoints)
            stack.callback(indexers[side].close)
        for indexer in indexers.values():
            indexer.await_visible(last)
        probes: list[Probe] = publisher.call("probes", num_probes)
        wrong = compare(indexers, probes)
        for case in wrong[:2]:
            print(str(case)[:2000], file=sys.stderr)
        num_hits = sum(probe.num_held > 0 for probe in probes)
    return [form, said, f"{num_probes:,}, {num_hits:,} with a hit", str(num_probes - len(wrong))]


def main() -> None:
    """Verify both forms and report; fail if an answer was wrong, or not the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    args = parser.parse_args()
    share = 10 if args.quick else 1
    num_probes = 5_000 // share
    rows = [verify(form, MAX_STEPS_A_STREAM * NUM_STREAMS // share, num_probes) for form in FORMS]
    headers = ["events", "recorded", "prompts", "answered right, and alike by both"]
    text = f"# A recording, replayed into both indexers\n\n{table(headers, rows)}"
    facts = {"is_quick": args.quick, "rows": rows}
    report("verify_replay", text, facts, ("ai-dynamo-runtime", "pyzmq", "numba"), args.save)
    if any(row[-1] != str(num_probes) for row in rows):
        sys.exit("an answer was wrong, or not the same")


if __name__ == "__main__":
    main()
