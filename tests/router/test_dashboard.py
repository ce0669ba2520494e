"""What the dashboard and the alerts of `deploy/` ask for is what a router measures, and what Prometheus can answer."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
WITHOUT_ANSWER = {
    "Age of the last event, by worker",
    "Prefixes fetched, by outcome",
    "Queue time",
    "Rejected, by cause",
    "Time between tokens",
    "Waiting, by model",
    "Wrongly predicted, by sign",
}
"""What scripted workers give no cause for: event streams, streamed answers, queues, prefixes of others."""
OF_PROMETHEUS = {"job", "instance"}


def _load() -> ModuleType:
    spec = spec_from_file_location("kvist_dashboard", ROOT / "deploy" / "grafana" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["kvist_dashboard"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load()


def expressions() -> list[str]:
    """Return every query of the dashboard, as Grafana sends it, and of the alerts."""
    queries = [target["expr"] for panel in make.panels() for target in panel.get("targets", ())]
    assert len(queries) > 50
    return [make.filled(query, "1m") for query in queries] + [alert.expr for alert in make.ALERTS]


def walked(node: Any) -> Iterator[Any]:
    """Yield an expression and all in it."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield from walked(child)
    for child in getattr(node, "args", ()):
        yield from walked(child)


@pytest.fixture
async def measuring(worker, router) -> AsyncIterator[Any]:
    """Yield a router that answered, failed, retried, refused and turned away requests."""
    async with worker() as one, worker() as two, router(one.url, two.url, max_worker_requests=1) as front:
        for number in range(12):
            await front.complete([number] * 64)
        assert (await front.complete([1] * 64, model=7)).status_code == 400
        two.kill()
        for number in range(4):
            await front.complete([number] * 640)
        yield front


async def families(front: Any) -> dict[str, Metric]:
    page = (await front.client.get("/metrics")).text
    return {sample: each for each in text_string_to_metric_families(page) for sample in names_of(each)}


def names_of(metric: Metric) -> set[str]:
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
    return {metric.name + suffix for suffix in suffixes}


def test_the_files_are_as_they_are_made() -> None:
    for path, text in make.made().items():
        assert path.read_text() == text, f"{path}: make dashboard"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "localhost:9090", "nowhere"])
def test_a_prometheus_that_cannot_be_asked_is_an_error_of_one_line(url: str) -> None:
    asked = subprocess.run([sys.executable, make.__file__, url], capture_output=True, text=True, check=False)
    assert asked.returncode == 1
    assert re.fullmatch(f"{re.escape(url)} does not answer as Prometheus does: .*\n", asked.stderr)


async def test_every_metric_and_label_that_is_asked_for_is_one_that_routers_have(measuring) -> None:
    known = await families(measuring)
    for expression in expressions():
        parsed = [*walked(promql_parser.parse(expression))]
        found: set[str] = set()
        for selector in parsed:
            if not isinstance(selector, promql_parser.VectorSelector) or selector.name == "up":
                continue
            assert selector.name in known, expression
            samples = [sample for sample in known[selector.name].samples if sample.name == selector.name]
            names = samples[0].labels if samples else ()
            labels = {label: {sample.labels[label] for sample in samples} for label in names}
            found |= labels.keys()
            for matcher in selector.matchers.matchers:
                if samples and matcher.name not in OF_PROMETHEUS:
                    values = labels[matcher.name]
                    wanted = {*matcher.value.split("|")}
                    assert matcher.name in ("status", "sign") or values >= wanted, expression
        for each in parsed:
            if isinstance(each, promql_parser.AggregateExpr) and each.modifier is not None and found:
                assert {*each.modifier.labels} <= found | OF_PROMETHEUS, expression


def test_every_alert_has_a_runbook_and_panels_named_there_exist() -> None:
    page = (ROOT / make.RUNBOOKS).read_text()
    headings = re.findall(r"^### (\w+)$", page, re.M)
    assert [name for name in headings if name.startswith("Kvist")] == [alert.name for alert in make.ALERTS]
    runbooks = page.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    named = {" ".join(name.split()) for name in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", runbooks)}
    assert named
    assert named <= {panel["title"] for panel in make.panels()}


def test_panels_lie_side_by_side_and_have_numbers_of_their_own() -> None:
    panels, taken = [*make.panels()], set()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= make.NUM_COLUMNS
        taken |= cells


BUCKETS = {"10": ("0x60", "0+9x60"), "30": ("0+9x60", "0+9x60"), "+Inf": ("0+9x60", "0+9x60")}
SERIES = {
    "up": ("0x60", "1x60"),
    'kvist_router_worker_state{worker="w", state="healthy"}': ("0x60", "1x60"),
    'kvist_router_worker_state{worker="w", state="unhealthy"}': ("1x60", "0x60"),
    'kvist_router_circuit_state{worker="w", state="open"}': ("0x60", "0x60"),
    'kvist_router_requests_total{status="200"}': ("0+9x60", "0+9x60"),
    'kvist_router_requests_total{status="0"}': ("0+1x60", "0x60"),
    'kvist_router_rejections_total{cause="full"}': ("0+1x60", "0x60"),
    **{f'kvist_router_queue_seconds_bucket{{model="m", le="{le}"}}': values for le, values in BUCKETS.items()},
    **{f'kvist_router_time_to_first_byte_seconds_bucket{{model="m", le="{le}"}}': each for le, each in BUCKETS.items()},
    'kvist_router_ranks{worker="w", state="partial"}': ("1x60", "0x60"),
    'kvist_router_event_malformed_total{worker="w"}': ("0+1x60", "0x60"),
    'kvist_router_event_batches_refused_total{worker="w"}': ("0x60", "0x60"),
    'kvist_router_event_ranks_refused_total{worker="w"}': ("0x60", "0x60"),
    'kvist_router_overlap_tokens_total{worker="w"}': ("0+900x60", "0+900x60"),
    'kvist_router_overlap_error_tokens_sum{worker="w", sign="over"}': ("0+300x60", "0+9x60"),
    'kvist_router_readings_total{outcome="tokens"}': ("0+9x60", "0+99x60"),
    'kvist_router_readings_total{outcome="text"}': ("0+9x60", "0+1x60"),
    "kvist_router_loop_late_seconds_total": ("0+30x60", "0+1x60"),
}
"""What alerts look at, minute by minute: where all is wrong, and where all is well enough."""


@needs_prometheus
@pytest.mark.parametrize("is_well", [False, True])
def test_every_alert_fires_where_something_is_wrong_and_none_where_all_is_well(is_well: bool, tmp_path: Path) -> None:
    of_router = 'job="kvist/kvist-router", instance="r:1"'
    named = {
        name.replace("{", f"{{{of_router}, ") if "{" in name else f"{name}{{{of_router}}}": v
        for name, v in SERIES.items()
    }
    firing = [] if is_well else [{"labels": f'{{alertname="{alert.name}"}}', "value": 1} for alert in make.ALERTS]
    asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "45m", "exp_samples": firing}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values[is_well]} for name, values in named.items()],
        "promql_expr_test": [asked],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(make.RULES)], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", path], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_operator_is_given_the_same_rules() -> None:
    rule = yaml.safe_load(make.PROMETHEUS_RULE.read_text())
    assert (rule["kind"], rule["spec"]) == ("PrometheusRule", yaml.safe_load(make.RULES.read_text()))


@contextmanager
def prometheus(folder: Path, target: str, port: int) -> Iterator[str]:
    """Yield the URL of a Prometheus that scrapes a router, and watches it by the rules."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(make.RULES)],
        "scrape_configs": [{"job_name": "kvist-router", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    at = f"127.0.0.1:{port}"
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data", "web.listen-address": at}
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{at}"
        finally:
            process.terminate()


@needs_prometheus
async def test_prometheus_answers_what_panels_ask_of_a_router(measuring, free_port, tmp_path: Path) -> None:
    target = measuring.client.base_url.netloc.decode()
    with prometheus(tmp_path, target, free_port()) as url:
        async with httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=60, trust_env=False) as client:

            async def has_traffic() -> bool:
                await measuring.complete([1] * 64)
                try:
                    told = await client.get("/query", params={"query": "rate(kvist_router_requests_total[10s]) > 0"})
                except httpx.TransportError:
                    return False
                return told.status_code == 200 and told.json()["data"]["result"] != []

            async def answers_the_others() -> bool:
                unanswered = await asyncio.to_thread(make.unanswered, url, "10s")
                return {name.partition(":")[0] for name in unanswered} == WITHOUT_ANSWER

            await measuring.until(has_traffic)
            await measuring.until(answers_the_others)  # it knows of none for a moment if the router is slow once
            (group,) = (await client.get("/rules")).json()["data"]["groups"]
            assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(make.ALERTS)
