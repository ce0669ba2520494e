"""docs/disaggregation.md names tests, flags, reasons and metrics that exist."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from kvist.cli._worker_metrics import transfer_metrics
from kvist.transfer.bounce import BounceStatistics
from kvist.transfer.messages import RefusalReason
from kvist.transfer.service import TransferStatistics

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "disaggregation.md").read_text(encoding="utf-8")


def test_every_test_that_the_document_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", DOCUMENT)
    assert len(named) > 40
    for path, name in named:
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?(def )?{name}\b", source, re.MULTILINE), (path, name)


def test_every_row_of_slices_and_bounce_has_a_test_or_a_reason_why_not() -> None:
    rows = {row for ids in re.findall(r"^\| ([DE][\d., DE]*) \|", DOCUMENT, re.MULTILINE) for row in ids.split(", ")}
    excused = set(re.findall(r"[DE]\d+|D\.2\.6|E\.4", " ".join(re.findall(r"^- ([DE][^:]*):", DOCUMENT, re.M))))
    expected = {f"D{number}" for number in range(1, 10)} | {f"E{number}" for number in range(1, 15)}
    assert expected <= rows | excused
    assert {f"D.4.{number}" for number in range(1, 9)} | {f"E.5.{number}" for number in range(1, 8)} <= rows


def test_every_command_has_only_flags_that_exist() -> None:
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL)).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.removesuffix(" &")) for line in lines if line.startswith("kvist ")]
    assert commands
    for _, name, *arguments in commands:
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(f"kvist.cli.{name}").add_arguments(parser)
        parser.parse_args(arguments)


def test_every_reason_of_a_refusal_is_explained() -> None:
    table = DOCUMENT.partition("### Reasons")[2].partition("###")[0]
    assert set(re.findall(r"`([a-z_]+)`[^|]*\|", table)) <= {reason.value for reason in RefusalReason}
    assert {reason.value for reason in RefusalReason} <= set(re.findall(r"`([a-z_]+)`", table))


def test_every_metric_named_is_there() -> None:
    nothing = TransferStatistics(0, 0, 0, BounceStatistics(), 0, 0, 0.0, 0, 0)
    metrics = transfer_metrics(SimpleNamespace(statistics=lambda: nothing))
    known = {sample.name for metric in metrics for sample in metric.samples}
    source = (ROOT / "kvist" / "engine" / "server" / "api.py").read_text(encoding="utf-8")
    known |= {
        f"kvist_engine_{name}{end}" for name in re.findall(r'\("(\w+)", "[A-Z]', source) for end in ("", "_total")
    }
    spans = (ROOT / "kvist" / "engine" / "server" / "spans.py").read_text(encoding="utf-8")
    known |= set(re.findall(r'"(kvist_engine_\w+)"', spans))
    named = set(re.findall(r"`(kvist_(?:transfer|engine)_\w+)`", DOCUMENT))
    assert named
    assert named <= known
    assert {name for name in known if name.startswith("kvist_transfer_")} <= named
