"""`kvist simulate`, called as the command line calls it."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from html import escape
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest

from kvist.cli import main
from kvist.cli._terminal import display, make_table
from kvist.router.config import PolicyName
from kvist.simulate import fleet
from kvist.simulate.report import COLUMNS

SMALL = ["simulate", "tool-agents", "--requests", "40", "--seeds", "2"]


def test_a_row_for_each_load_size_and_policy_and_every_run_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    flags = ["--policy", "kv,round-robin", "--workers", "2..5", "--load", "0.5,0.9", "--json", str(path)]
    assert main([*SMALL, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["load", "fleet", "policy"]
    expected = [[load, size, name] for load in ("0.5", "0.9") for size in "245" for name in ("kv", "round-robin")]
    assert [line.split()[:3] for line in lines[2:14]] == expected
    written = json.loads(path.read_text())
    assert [len(row["runs"]) for row in written["results"]] == [2] * 12
    assert written["requests"] == 40


def test_the_smallest_fleet_for_a_bound_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    for bound, expected in (("1000", "1"), ("0.000001", "none")):
        assert main([*SMALL, "--max-ttft-p99", bound, "--policy", "kv", "--workers", "1..4"]) == 0
        assert capsys.readouterr().out.splitlines()[2].split()[2] == expected


def test_what_more_workers_and_everybodys_events_would_change_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policy", "kv", "--workers", "2", "--load", "0.8", "--add-workers", "2", "--silent", "1"]
    assert main([*SMALL, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    column = lines[0].index("fleet")
    assert [line[column:].split("  ")[0] for line in lines[2:5]] == ["2", "2 + 2", "2 (all with events)"]
    assert lines[6].startswith("kv, load 0.8, 2 + 2 instead of 2 workers: mean TTFT ")
    assert lines[7].startswith("kv, load 0.8, 2 (all with events) instead of 2 workers: mean TTFT ")
    slow, fast = lines[6].split("mean TTFT ")[1].split(" s,")[0].split(" -> ")
    assert float(fast) < float(slow)


def test_a_fleet_that_falls_behind_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policy", "kv", "--workers", "2"]
    for load, said in (("0.2", ""), ("0.75", "is near collapse"), ("2", "collapses")):
        assert main([*SMALL, *flags, "--load", load]) == 0
        warnings = capsys.readouterr().out.splitlines()[4:]
        assert [said in line for line in warnings] == [True] * bool(said)


def test_a_trace_can_be_sent_at_its_own_pace_or_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = []
    for speedup in ("1", "2"):
        path = tmp_path / "runs.json"
        flags = ["--policy", "round-robin", "--speedup", speedup, "--seeds", "1", "--json", str(path)]
        assert main([*SMALL, *flags]) == 0
        left.append(json.loads(path.read_text())["results"][0]["runs"][0]["load_after_hits"])
    assert left[1] == pytest.approx(2 * left[0])
    assert "2x pace" in capsys.readouterr().out


def test_a_report_is_one_file_with_charts_of_each_policy_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    for flags, policy_lines in (
        (["--closed-loop", "--load", "0.5,2", "--workers", "2,3"], ["kv, 2 workers", "kv, 3 workers"]),
        (["--speedup", "1", "--workers", "2,3", "--add-workers", "1"], ["kv", "kv, 2 + 1 workers"]),
        (["--max-ttft-p99", "0.000001", "--workers", "1,2"], []),
    ):
        assert main([*SMALL, "--policy", "kv,dynamo", *flags, "--report", str(path)]) == 0
        printed, html = capsys.readouterr().out, path.read_text()
        charts = [ElementTree.fromstring(f"<svg {each}</svg>") for each in re.findall("<svg (.*?)</svg>", html, re.S)]
        assert len(charts) == (6 if policy_lines else 0)
        for chart in charts:
            texts = {text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")}
            assert {*policy_lines, policy_lines[0].replace("kv", "dynamo")} <= texts
            assert ("near collapse" in texts) == ("load after hits" in texts)
        assert html.count("<tr>") == 1 + printed.count("kv  ") + printed.count("dynamo  ")
        assert not re.search(r'(?:src|href)="(?!#)', html), "the file needs no other"
        (title,) = re.findall("<h1>kvist simulate: (.*)</h1>", html)
        assert title.startswith("tool-agents --policy kv,dynamo ")
        assert title.endswith(", 40 requests")
        assert " --seeds 2" in title
        assert {*title.replace(", 40", "").split()} >= {each for each in flags if each.startswith("--") or "," in each}
        assert "True" not in title
        said = [line for line in printed.splitlines() if " instead of " in line or "collapse" in line]
        assert all(f"<p>{escape(line)}</p>" in html for line in said)


@pytest.mark.parametrize(("num_runs", "loads"), [(5, [0.3, 0.5]), (1, None)])
def test_what_is_done_when_it_is_interrupted_is_shown_and_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_runs: int,
    loads: list[float] | None,
) -> None:
    measure, left, path = fleet.measure, iter(range(num_runs)), tmp_path / "runs.json"

    def until_ctrl_c(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(fleet, "measure", until_ctrl_c)
    flags = ["--policy", "kv", "--workers", "2", "--load", "0.3,0.5,0.7", "--json", str(path)]
    assert main([*SMALL, *flags]) == 130
    assert capsys.readouterr().out.count(" kv ") == len(loads or [])
    assert (loads is None) == (path.read_text() == "")
    assert loads is None or [row["load"] for row in json.loads(path.read_text())["results"]] == loads


def test_every_run_moves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, float, float | None]] = []
    monkeypatch.setattr("kvist.cli.simulate.progress_line", lambda: nullcontext(lambda *told: shown.append(told)))
    assert main([*SMALL, "--policy", "kv", "--workers", "2", "--load", "0.5", "--add-workers", "1"]) == 0
    assert main([*SMALL, "--policy", "kv", "--workers", "2", "--max-ttft-p99", "9"]) == 0
    fleets = ["kv, 2 workers, load 0.5"] * 2 + ["kv, 2 + 1 workers, load 0.5"] * 2
    assert shown[:4] == [(fleet, number, 4) for number, fleet in enumerate(fleets)]
    assert shown[4:] == [("kv, 2 workers", 0, None)] * 2


def test_rates_are_learnt_from_a_recording_and_simulated_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, rates = tmp_path / "requests.jsonl", tmp_path / "rates.json"
    with recording.open("w") as lines:
        for idx in range(30):
            num_tokens, num_output = 100 * (1 + idx % 10), 2 + idx % 7
            line = {"timestamp": 10_000 * idx, "input_length": num_tokens, "output_length": num_output, "worker": "w"}
            first_s = 0.01 + num_tokens * 1e-3
            line |= {"hash_ids": [], "first_byte_s": first_s, "total_s": first_s + 0.01 * (num_output - 1)}
            lines.write(json.dumps(line) + "\n")
    assert main(["simulate", "fit", str(recording), "--cache-tokens", "5000"]) == 0
    printed = capsys.readouterr()
    assert "w: 30 answers" in printed.err
    rates.write_text(printed.out)
    learnt = json.loads(printed.out)["w"]
    assert (learnt["step_s"], learnt["cache_tokens"]) == (pytest.approx(0.01, rel=0.01), 5000)
    flags = [
        "--speedup",
        "1",
        "--policy",
        "kv",
        "--workers",
        "1",
        "--seeds",
        "1",
        "--json",
        str(tmp_path / "runs.json"),
    ]
    assert main(["simulate", str(recording), "--rates", str(rates), *flags]) == 0
    (run,) = json.loads((tmp_path / "runs.json").read_text())["results"][0]["runs"]
    assert run["ttft_p99_s"] == pytest.approx(1.01, rel=0.02)
    assert main(["simulate", "fit"]) == 2
    assert "RECORDING" in capsys.readouterr().err
    recording.write_text(json.dumps(line))
    assert main(["simulate", "fit", str(recording)]) == 2
    assert "streamed answers in the recording: got 1, expected 20 or more of one worker" in capsys.readouterr().err


def test_windows_the_hosts_memory_and_prefill_workers_change_what_is_found_and_how_long_tokens_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, between = [], []
    for flags in ([], ["--window", "1024:0.83"], ["--host-tokens", "100000"], ["--prefill-workers", "2"]):
        path = tmp_path / "runs.json"
        fleet = ["--workers", "2", "--policy", "kv", "--seeds", "1", "--speedup", "2", "--cache-tokens", "40000"]
        assert main(["simulate", "tool-agents", "--requests", "200", *fleet, *flags, "--json", str(path)]) == 0
        (run,) = json.loads(path.read_text())["results"][0]["runs"]
        found.append(run["cached"])
        between.append(run["itl_p99_s"])
    assert len(set(found)) == 4
    assert found[2] > found[0] + 0.05
    assert between[3] < between[0] / 2
    assert "ITL p99" in capsys.readouterr().out


def test_policies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "conversations", "--policy", "list"]) == 0
    others = {"kv-blocks", "dynamo", "sglang", "llm-d", "lmetric", "hashing"}
    assert set(capsys.readouterr().out.split()) == others | {*get_args(PolicyName)}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--policy", "kv,best"], "--policy: got 'best'"),
        (["--workers", "0"], "--workers"),
        (["--workers", "8..4"], "--workers"),
        (["--workers", "8.."], "--workers: got '8..', expected numbers above 0, with '..' between them"),
        (["--workers", "many"], "--workers"),
        (
            ["--workers", "4,41"],
            "--workers: got '4,41', expected fleets of no more workers than the trace has requests, 40",
        ),
        (["--load", "0"], "--load"),
        (["--seeds", "0"], "--seeds"),
        (["--requests", "1"], "--requests"),
        (["--prefill-rate", "-1"], "--prefill-rate"),
        (["--lost-events", "2"], "--lost-events"),
        (["--silent", "9"], "--silent"),
        (["--speeds", "1,0"], "--speeds"),
        (["--outage", "0.5"], "--outage"),
        (["--outage", "0.6..0.4"], "--outage"),
        (["--outage", "0.4..0.6", "--workers", "1"], "--workers"),
        (["--burstiness", "0"], "--burstiness"),
        (["--window", "1024"], "--window"),
        (["--window", "1024:1.5"], "--window"),
        (["--window", "1024:"], "--window: got '1024:', expected numbers above 0, with ':' between them"),
        (["--host-tokens", "-1"], "--host-tokens"),
        (["--prefill-workers", "-1"], "--prefill-workers"),
        (
            ["--prefill-workers", "33"],
            "--workers: got '8', expected fleets of no more workers than the trace has requests, 40",
        ),
        (["--accelerator", "h100"], "--accelerator"),
        (["--workers", "2.5"], "--workers"),
        (["--outage", "0.4,0.6"], "--outage: got '0.4,0.6', expected two shares"),
        (["--max-ttft-p99", "-1"], "--max-ttft-p99"),
        (["--max-ttft-p99", "nan"], "--max-ttft-p99"),
        (["--max-ttft-p99", "5", "--add-workers", "1"], "--add-workers"),
        (["--speedup", "1", "--load", "0.5"], "--load"),
        (["--cache-tokens", "1"], "cache_tokens: got 1, expected room for a block of"),
        (["--rates", "/nowhere/rates.json"], "rates: got '/nowhere/rates.json'"),
        (["--report", "/nowhere/report.html"], "--report: got '/nowhere/report.html', expected a file that can be wri"),
        (["--json", "/"], "--json: got '/', expected a file that can be written (Is a directory)"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "/nowhere/trace.jsonl"]) == 2
    assert "TRACE: got '/nowhere/trace.jsonl', expected a file" in capsys.readouterr().err
    assert main(["simulate"]) == 2
    assert "TRACE: got None, expected a file" in capsys.readouterr().err
    for recording in (["fit", "/nowhere"], ["tool-agents", "/nowhere"]):
        assert main(["simulate", *recording]) == 2
        assert "RECORDING: got '/nowhere', expected" in capsys.readouterr().err


def test_no_load_is_made_of_requests_that_all_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, flags = tmp_path / "trace.jsonl", ["--policy", "kv", "--workers", "1", "--seeds", "1"]
    asked = {"input_length": 2000, "output_length": 3}
    turns = [{**asked, "timestamp": 1000 * idx, "hash_ids": [*range(2 + idx)]} for idx in range(3)]
    for lines, more in (([{**turns[0], "timestamp": 5}] * 3, []), (turns, ["--closed-loop"])):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["simulate", str(path), *flags, *more]) == 2
        assert "--load: got '0.7,0.9', expected a trace, or sessions in it, that begin at" in capsys.readouterr().err
        assert main(["simulate", str(path), *flags, *more, "--speedup", "1"]) == 0


def test_figures_are_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    cells = ["0.7", "8", "kv-blocks", *["0.472 (0.469 to 0.608)"] * 5, *["98.5% (91.5% to 108.5%)"] * 3]
    display(make_table(["load", "fleet", "policy", *COLUMNS.values()], [cells]))
    shown = capsys.readouterr().out.split()
    assert {word for cell in cells for word in cell.split()} <= {*shown}
