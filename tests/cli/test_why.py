"""`kvist why` of recordings and of a running router, as its user sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvist.cli import main
from kvist.events.transports import Message
from kvist.replay import RecordedSource, RecordingWriter
from kvist.router.regret import Regret


def recorded(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def lines_of(num_blocks: int, names: int = 10**9) -> list[dict[str, Any]]:
    """Two prompts that take turns; the first is found the second time, the second never."""
    asked = {"input_length": num_blocks * 16 + 1, "output_length": 5, "block_size": 16, "model": "m", "worker": "w"}
    first, second = ([name * names + idx for idx in range(num_blocks)] for name in (1, 2))
    size = num_blocks * 16
    return [
        asked | {"timestamp": 0, "hash_ids": first, "predicted_cached_tokens": 0, "held_tokens": 0},
        asked | {"timestamp": 10_000, "hash_ids": second, "predicted_cached_tokens": 0, "held_tokens": 0},
        asked
        | {"timestamp": 20_000, "hash_ids": first, "predicted_cached_tokens": size, "held_tokens": size}
        | {"cached_tokens": size - 160},
        asked
        | {"timestamp": 70_000, "hash_ids": second, "predicted_cached_tokens": 0, "held_tokens": 320, "status": 200},
        asked | {"timestamp": 70_001, "hash_ids": second, "status": 503},
    ]


def test_a_recording_says_what_was_lost_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, size = recorded(tmp_path / "requests.jsonl", lines_of(3200)), 3200 * 16
    assert main(["why", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total"]["requests"] == 4
    lost = report["total"]["lost_tokens"]
    assert lost["predicted, but not found by the engine"] == 160
    assert lost["held by another worker, where the request would have cost more"] == 320
    assert lost["evicted before reuse"] == pytest.approx(size - 320, rel=0.3)
    assert report["retention_needed_s"].keys() == {"64"}
    assert main(["why", path]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"evicted before reuse.*larger KV cache", shown)
    assert "Evicted blocks were used again: within 64 s in half" in shown


def test_a_recording_tells_the_causes_that_its_router_knew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, _, again, *_ = lines_of(3200)
    size = 3200 * 16
    again |= {"predicted_cached_tokens": 0, "held_tokens": 0, "cached_tokens": 0}
    path = recorded(
        tmp_path / "requests.jsonl",
        [
            asked | {"exact_cache": False},
            again | {"timestamp": 1_000, "identically_rendered_tokens": size // 2},
            again | {"timestamp": 2_000, "held_tokens": size // 4},
            again | {"timestamp": 3_000, "in_flight_tokens": 160, "held_or_in_flight_tokens": size},
            {"timestamp": 4_000, "input_length": 700, "hash_ids": [], "block_size": 16, "worker": "w"},
            {"timestamp": 4_000, "input_length": 7, "hash_ids": [], "block_size": 16, "worker": "w"},
        ],
    )
    assert main(["why", path, "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert total["pooled_cache_tokens"] == pytest.approx(3 * size, rel=0.2)
    assert total["lost_tokens"] == {
        "last used on a rank whose cache is not known exactly": pytest.approx(size, rel=0.2),
        "rendered differently by the worker that used it last": pytest.approx(size / 2, rel=0.2),
        "evicted before reuse": pytest.approx(size / 4, rel=0.3),
        "held by another worker, where the request would have cost more": size // 4,
        "being computed by another worker, where the request would have cost more": size - 160,
        "predicted, but not found by the engine": 160,
        "in prompts that could not be tokenised": 700,
    }


def test_few_requests_are_counted_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "requests.jsonl", lines_of(100))
    assert main(["why", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total"]["pooled_cache_tokens"] == 2 * 1600
    assert report["total"]["lost_tokens"]["evicted before reuse"] == 1600 - 320
    assert (report["sample"]["blocks"], report["sample"]["standard_error"]) == (200, 0)
    assert report["sample"]["blocks_by_uses"] == {"4": 200}  # of 2 or 3 uses each
    assert main(["why", path, "--cache-tokens", "1600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["pooled_cache_tokens"] == 0


def test_a_share_of_which_nothing_was_sampled_is_no_further_off_than_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "requests.jsonl", [{**line, "hash_ids": [], "input_length": 9} for line in lines_of(1)])
    assert main(["why", path]) == 0
    assert "(± 0.0%, from a sample of 0 blocks)" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # a router
        patch.setattr("kvist.cli.why.ask_router", lambda *_: json.dumps(Regret().report(0.0, 60.0)))
        assert main(["why", "http://router"]) == 0
    assert "(± 100.0%, from a sample of 0 blocks)" in capsys.readouterr().out


def test_a_smaller_cache_would_not_have_held_it_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "requests.jsonl", lines_of(3200))
    assert main(["why", path, "--json", "--cache-tokens", "16000"]) == 0
    assert "evicted before reuse" not in json.loads(capsys.readouterr().out)["total"]["lost_tokens"]


def test_a_trace_that_nobody_routed_says_what_it_repeats_and_of_nothing_that_it_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["".join(chr(65 + (idx * idx + number) % 26) for idx in range(60_000)) for number in (0, 1, 0, 1)]
    for name, lines in (
        ("mooncake", [{**line, "worker": None, "held_tokens": None} for line in lines_of(3200)[:4]]),
        ("names of any size", [{**line, "worker": None} for line in lines_of(3200, 2**70 + 10**9)[:4]]),
        ("names below zero", [{**line, "worker": None} for line in lines_of(3200, -(10**9))[:4]]),
        ("vllm bench", [{"prompt": text} for text in texts]),
        ("aiperf", [{"text": text, "timestamp": 1000 * idx} for idx, text in enumerate(texts)]),
    ):
        path = recorded(tmp_path / "trace.jsonl", lines)
        assert main(["why", path, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        total = report["total"]
        assert total["requests"] == 4, name
        assert total["pooled_cache_tokens"] == pytest.approx(total["prompt_tokens"] / 2, rel=0.3), name
        assert [total["lost_tokens"], report["losses"], report["costliest_prefixes"]] == [{}, [], []]
        assert main(["why", path]) == 0
        shown = capsys.readouterr().out
        assert "one cache of --cache-tokens would have held" in shown
        assert re.search("^Blocks that it would have held were used again: within [0-9]+ s", shown, re.MULTILINE)
        assert not re.search("worker|lost|Evicted", shown)


def test_turns_without_times_of_their_own_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "trace.jsonl", [{"turns": [{"text": "a" * 1024}, {"text": "b" * 1024}]}])
    assert main(["why", path, "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert (total["requests"], total["prompt_tokens"], total["pooled_cache_tokens"]) == (2, 256 + 512, 256)


def test_how_uses_are_spread_over_blocks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *_ = lines_of(3200)
    often = [{**first, "input_length": 1600 * 16, "hash_ids": first["hash_ids"][:1600]}] * 6
    assert main(["why", recorded(tmp_path / "requests.jsonl", [second, first, *often])]) == 0
    shown = capsys.readouterr().out  # 1,600 of 6,400 blocks are used seven times
    tenth, half = map(int, re.findall(r"([0-9]+)%", shown[shown.index("Popularity: ") :]))
    assert tenth == pytest.approx(700 * 0.64 / 16, abs=6)
    assert half == pytest.approx(100 * (1600 * 7 + 1600) / 16_000, abs=6)


def test_mistakes_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for lines in ([], [{"foo": 1}], [{**line, "status": 499} for line in lines_of(2)]):
        assert main(["why", recorded(tmp_path / "empty.jsonl", lines)]) == 2
        assert "expected a line for each answered request, with its input_length" in capfd.readouterr().err
    assert main(["why", recorded(tmp_path / "bad.jsonl", [{"timestamp": "noon"}])]) == 2
    assert "bad.jsonl, line 1" in capfd.readouterr().err
    with RecordingWriter(tmp_path / "fleet.mcap") as writer:
        writer.add(RecordedSource("a", "tcp://h:1"), Message(b"kv/a/0", 0, b"x"), 10**9)
    for command in ("why", "simulate"):
        assert main([command, str(tmp_path / "fleet.mcap")]) == 2
        expected = "expected recorded requests, not the events that `kvist record` writes and `kvist replay` reads"
        assert f"trace: got '{tmp_path / 'fleet.mcap'}', {expected}" in capfd.readouterr().err
    for neither in ("/nowhere/missing.jsonl", "127.0.0.1:9"):
        assert main(["why", neither]) == 2
        assert f"got '{neither}', expected a router, as http://" in capfd.readouterr().err
    asked = recorded(tmp_path / "asked.jsonl", lines_of(1))
    for source, flags in (
        (asked, ["--window", "5m"]),
        (asked, ["--cache-tokens", "0"]),
        ("http://x", ["--cache-tokens", "9"]),
    ):
        assert main(["why", source, *flags]) == 2
        assert f"{flags[0]}: got " in capfd.readouterr().err
    assert main(["why", "http://127.0.0.1:9"]) == 1
    assert "kvist why: error: http://127.0.0.1:9/regret?window=10m cannot be reached" in capfd.readouterr().err
