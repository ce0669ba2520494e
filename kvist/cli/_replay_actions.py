"""The actions of `kvist replay`: each does one thing with a recording."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request

from kvist.charts import svg_document
from kvist.cli._client import open_url
from kvist.cli._terminal import (
    SHOW_INTERVAL_S,
    display,
    make_table,
    progress_line,
    run_until_signalled,
    serve,
    write_output,
)
from kvist.errors import InvalidValueError, KvistError
from kvist.replay.player import Player, close_publications, open_publications
from kvist.replay.reader import RecordingReader
from kvist.replay.recording import RecordingError
from kvist.replay.script import Line, Pace, Script
from kvist.replay.statistics import StatisticsCollector, charts, iso_time, statistics_json, statistics_tables

if TYPE_CHECKING:
    from kvist.replay.indexing import IndexPlayer, IndexReport

_PIECE_BYTES = 1 << 20


def publish(args: argparse.Namespace, script: Script) -> None:
    """Play to publications until the end, or until SIGINT or SIGTERM."""
    pace = Pace(None if args.as_fast_as_possible else args.speed)
    with RecordingReader(args.file) as reader:
        publications = open_publications(args.to, reader.sources())
    try:
        for source, publication in publications.items():
            engine = "" if source.engine == "vllm" else f"&engine={source.engine}"
            print(f"kvist replay: ready at {publication.endpoint}{engine} source={source.name}", flush=True)
        player = Player(script, publications, pace=pace)

        def progress() -> tuple[str, float, float | None]:
            rate = player.num_sent / max(time.monotonic() - started_s, SHOW_INTERVAL_S)
            late = f", {player.lag_s:.1f} s late" if player.lag_s > SHOW_INTERVAL_S else ""
            return f"{player.num_sent} messages, {rate:.0f}/s{late}", *script.progress

        started_s = time.monotonic()
        asyncio.run(run_until_signalled(_play_and_linger(args, player), progress=progress))
    finally:
        close_publications(publications)
    _print_warnings(script)
    print(
        f"kvist replay: {player.num_sent} messages, {player.num_sent_bytes} bytes sent, "
        f"{player.num_replays} replay requests answered",
        flush=True,
    )


def index(args: argparse.Namespace, script: Script) -> None:
    """Play into an index, and print what it holds in the end."""
    started_s = time.monotonic()
    with _play_into_index(script) as (_, report):
        seconds = time.monotonic() - started_s
        if args.json:
            print(json.dumps({**report.to_json(), "seconds": seconds}))
        else:
            print(report.to_text())
            print(f"{script.num_recorded} messages in {seconds:.2f} s")


def print_holders(args: argparse.Namespace, script: Script) -> None:
    """Print which ranks held a prompt, and how many of its tokens."""
    from kvist.events.hashing import block_hashes
    from kvist.openai.tokenization import ChatTokenizer
    from kvist.router.prompts import OneModel, PromptReader

    try:
        model = OneModel(None if args.model_path is None else ChatTokenizer.load(Path(args.model_path)))
    except InvalidValueError as error:
        raise InvalidValueError("--model-path", error.value, error.expected) from None
    try:
        ask = asyncio.run(PromptReader(model).read(None, args.prompt.read_bytes()))
    except (KvistError, OSError) as error:
        raise InvalidValueError("--prompt", str(args.prompt), f"a file with a request ({error})") from None
    if ask.token_ids is None:
        hint = ": --model-path" if ask.obstacle == "no_tokenizer" else ""
        expected = f"a prompt whose tokens are known ({ask.untokenized_reason}{hint})"
        raise InvalidValueError("--prompt", str(args.prompt), expected)
    with _play_into_index(script) as (player, _):
        sizes = player.block_sizes
        held = {
            rank: {tier: depth * size for tier, depth in depths._asdict().items()}
            for size in sorted(set(sizes.values()))
            for hashes in [block_hashes(ask.token_ids, size, cache_salt=ask.cache_salt)]
            for rank, depths in player.index.match(hashes).items()
            if sizes[rank.worker] == size
        }
        if args.json:
            holders = [rank._asdict() | {"tokens": tokens} for rank, tokens in held.items()]
            print(json.dumps({"prompt_tokens": len(ask.token_ids), "holders": holders}))
            return
        print(f"tokens held of {len(ask.token_ids)}, by tier (each includes the faster ones):")
        for (worker, rank), tokens in held.items():
            print(f"{worker} rank {rank}: " + ", ".join(f"{tier} {number}" for tier, number in tokens.items()))
        if not held:
            print("no rank held any")


def compare(args: argparse.Namespace, script: Script) -> int:
    """Print how the blocks held in the end differ from another recording's or index's; return 1 if they do."""
    from kvist.replay.indexing import chunks_of_dump, differences, holdings_of

    with _play_into_index(script) as (player, _):
        ours = holdings_of(player.index.snapshot())
    is_url = args.diff.startswith(("http://", "https://"))
    if is_url or args.diff.endswith(".state"):
        url = f"{args.diff.rstrip('/')}/dump" if is_url else Path(args.diff).absolute().as_uri()
        with open_url(Request(url)) as dump:
            theirs = holdings_of(chunks_of_dump(iter(partial(dump.read, _PIECE_BYTES), b""), args.diff))
    else:
        with _play_into_index(Script(Path(args.diff), selection=script.selection)) as (player, _):
            theirs = holdings_of(player.index.snapshot())
    found = differences(ours, theirs)
    for each in found:
        holder = f"{each.worker} rank {each.rank} {each.tier}"
        counts = f"{each.only_first} only in the first, {each.only_second} only in the second, {each.both} in both"
        print(json.dumps(each._asdict()) if args.json else f"{holder}: {counts}")
    return int(any(each.only_first or each.only_second for each in found))


@contextmanager
def _play_into_index(script: Script) -> Iterator[tuple[IndexPlayer, IndexReport]]:
    """Play the script into an index; yield the player and its report."""
    from kvist.indexer import compilation

    asyncio.run(compilation.load())
    from kvist.radix import RadixIndex
    from kvist.replay.indexing import IndexPlayer

    player = IndexPlayer(RadixIndex())
    with _read_all(script, player.apply):
        yield player, player.report()


def print_statistics(args: argparse.Namespace, script: Script) -> None:
    """Print statistics, and write the plot if there is a file for it."""
    collector = StatisticsCollector()
    with _read_all(script, partial(_count, collector)):
        statistics = collector.result()
        if args.json:
            print(json.dumps(statistics_json(statistics)))
        else:
            display(*(make_table(*table) for table in statistics_tables(statistics)))
        if args.plot is not None:
            write_output("--plot", args.plot, svg_document(*charts(statistics.spans, str(args.file))))


def show_page(args: argparse.Namespace, script: Script) -> None:
    """Serve the live page over the recording, with another one beside it if asked, until SIGINT or SIGTERM."""
    from kvist.cli._replay_page import RecordingPage
    from kvist.http import HttpServer

    scripts = [script]
    if args.beside is not None:
        scripts.append(Script(args.beside, selection=script.selection))
    collectors: dict[str, StatisticsCollector] = {}
    with ExitStack() as damages:
        for each in scripts:
            collector = collectors[str(each.path)] = StatisticsCollector()
            damage = damages.enter_context(_read_all(each, partial(_count, collector)))
            if damage is not None:  # it is raised at the end
                print(f"kvist replay: {damage}", file=sys.stderr)
        server = HttpServer(RecordingPage(collectors).handle, port=args.port)
        asyncio.run(serve(server, lambda server: f"kvist replay: http://127.0.0.1:{server.port}/ui"))


def _count(collector: StatisticsCollector, lines: list[Line]) -> None:
    for line in lines:
        if not line.is_early:
            collector.add(line.record)


@contextmanager
def _read_all(script: Script, apply: Callable[[list[Line]], object]) -> Iterator[RecordingError | None]:
    """Apply all lines of the script, and show progress; yield damage to the recording, and raise it at the end."""
    show_at_s = 0.0
    damage: RecordingError | None = None
    with progress_line() as show:
        try:
            for lines in script.lines():
                apply(lines)
                if (now_s := time.monotonic()) >= show_at_s:
                    show_at_s = now_s + SHOW_INTERVAL_S
                    show(f"{script.num_recorded} messages", *script.progress)
        except RecordingError as error:
            if script.num_recorded == 0:
                raise
            damage = error
    _print_warnings(script)
    yield damage
    if damage is not None:
        raise damage


def _print_warnings(script: Script) -> None:
    """Print on stderr where the recording is torn, and whether nothing in it was selected."""
    for torn in script.torn:
        print(f"kvist replay: {torn.path}: {torn.num_bytes} torn bytes at byte {torn.offset}", file=sys.stderr)
    if script.is_over and script.num_selected == 0:
        began = " in it" if script.first_ns is None else f" selected; the first came at {iso_time(script.first_ns)}"
        print(f"kvist replay: {script.path}: no message{began}", file=sys.stderr)


async def _play_and_linger(args: argparse.Namespace, player: Player) -> None:
    await asyncio.sleep(args.delay)
    await player.play()
    print(f"kvist replay: all {player.num_sent} messages are sent", flush=True)
    num_replays = -1
    while num_replays < player.num_replays:  # a subscriber that asked, as one that has just started, may need more
        num_replays = player.num_replays
        with suppress(TimeoutError):
            async with asyncio.timeout(args.linger):
                await player.repeat()
