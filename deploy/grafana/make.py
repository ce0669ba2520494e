"""Writes the dashboard for Grafana, and the alerts for Prometheus and for its Operator: `make dashboard`.

With the URL of a Prometheus that scrapes a router, it sends every query instead, and names those without an answer.
Tests compare the files in `deploy/` with what this makes, and the metrics in its queries with those of a router.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

DEPLOY = Path(__file__).parents[1]
DASHBOARD, RULES = DEPLOY / "grafana" / "kvist.json", DEPLOY / "prometheus" / "kvist.rules.yaml"
PROMETHEUS_RULE = DEPLOY / "kubernetes" / "podmonitor" / "prometheusrule.yaml"
RUNBOOKS = "docs/operating.md"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
NUM_COLUMNS, HEIGHT = 24, 8
HEALTHY, NOT_HEALTHY = 'state="healthy"', 'state!="healthy"'
NOT_EXACT = 'sign!="exact"'
EVENTS_REFUSED = ("event_malformed", "event_batches_refused", "event_ranks_refused")


def of(metric: str, labels: str = "") -> str:
    """Return a selector of a router's metric, for the routers that were chosen."""
    name = metric if metric.startswith(("process_", "kvist_")) else f"kvist_router_{metric}"
    return f'{name}{{job=~"$job", instance=~"$instance"{labels and ", "}{labels}}}'


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """Return the rate of a counter, a second, over all chosen routers; 0 if it has counted nothing yet."""
    name = metric if metric.endswith("_sum") else f"{metric}_total"
    grown = f"(rate({of(name, labels)}[$__rate_interval]))"
    return f"sum by ({by}) {grown}" if by else f"(sum {grown} or vector(0))"


def rates(*metrics: str) -> dict[str, str]:
    """Return the rate of each of some counters, a second."""
    return {metric.replace("_", " "): rate(metric) for metric in metrics}


def ratio(part: str, whole: str, by: str = "") -> str:
    """Return the rate of one counter divided by that of another."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def uncached(prompts: str, cached: str, by: str) -> str:
    """Return how many prompt tokens a second are not cached."""
    return f"{rate(prompts, by)} - {rate(cached, by)}"


def quantile(part: float, histogram: str) -> str:
    """Return a quantile of a histogram, by model."""
    return f"histogram_quantile({part}, sum by (le, model) (rate({of(f'{histogram}_bucket')}[$__rate_interval])))"


def quantiles(histogram: str) -> dict[str, str]:
    """Return the median, p90 and p99, by model."""
    return {f"{{{{model}}}} p{100 * part:.0f}": quantile(part, histogram) for part in (0.5, 0.9, 0.99)}


def now(metric: str, by: str, labels: str = "") -> str:
    """Return the value now of a gauge that every router of the fleet reports alike."""
    return f"max by ({by}) ({of(metric, labels)})"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph, or with `is_last` the last values; queries are keyed by the names of their series."""

    title: str
    means: str
    unit: str
    queries: dict[str, str]
    is_last: bool = False

    def described(self, panel_id: int, x: int, y: int, width: int) -> dict[str, Any]:
        """Return the panel as Grafana's JSON."""
        defaults: dict[str, Any] = {"unit": self.unit, "min": 0}
        if self.unit == "percentunit":
            defaults["max"] = 1
        if not self.is_last:
            defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
        calculated = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {
            "id": panel_id,
            "type": "stat" if self.is_last else "timeseries",
            "title": self.title,
            "description": self.means,
            "datasource": SOURCE,
            "gridPos": {"h": HEIGHT // 2 if self.is_last else HEIGHT, "w": width, "x": x, "y": y},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": {"reduceOptions": calculated, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
            if self.is_last
            else {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
            "targets": [
                {"refId": chr(ord("A") + idx), "datasource": SOURCE, "expr": query, "legendFormat": name, "range": True}
                for idx, (name, query) in enumerate(self.queries.items())
            ],
        }


def value(title: str, means: str, query: str, unit: str = "none") -> Panel:
    """Return a panel with the current value."""
    return Panel(title, means, unit, {title.lower(): query}, is_last=True)


def per(label: str, title: str, means: str, query: str, unit: str = "none", **others: str) -> Panel:
    """Return a graph with a line for each value of a label, and for each of `others`."""
    return Panel(f"{title}, by {label}", means, unit, {f"{{{{{label}}}}}": query} | others)


ROWS = {
    "Fleet": (
        value("Healthy workers", "Workers that get requests", f"sum ({now('worker_state', 'worker', HEALTHY)})"),
        value("Other workers", "Starting, unhealthy, draining", f"sum ({now('worker_state', 'worker', NOT_HEALTHY)})"),
        value("Running", "Requests in progress", f"sum ({now('running_requests', 'worker')})"),
        value("Requests", "Sent to workers, a second", rate("requests"), "reqps"),
        value("Waiting", "Requests queued until a worker has room", f"sum ({of('queued_requests')}) or vector(0)"),
        value("Index", "Distinct blocks in the index", f"max ({of('kvist_index_blocks')})", "short"),
    ),
    "Workers": (
        per("worker", "Running", "Requests in progress", now("running_requests", "worker")),
        per("worker", "To compute", "Uncached tokens of prompts in progress", now("prefill_tokens", "worker"), "short"),
        per("worker", "Cached", "Blocks that its ranks hold", now("worker_blocks", "worker"), "short"),
    ),
    "Requests and latencies": (
        per("status", "Answers", "0: the worker failed; 499: the client left", rate("requests", "status"), "reqps"),
        Panel("Refusals, retries, timeouts", "A second", "reqps", rates("refusals", "retries", "http_timeouts")),
        Panel("Time to first byte", "From arrival", "s", quantiles("time_to_first_byte_seconds")),
        Panel("Time to last byte", "Of complete answers", "s", quantiles("request_seconds")),
        Panel("Time between tokens", "Each stream's mean", "s", quantiles("inter_token_seconds")),
        Panel(
            "Tokens",
            "In prompts, fetched instead of computed, and in complete answers",
            "short",
            rates("prompt_tokens", "pulled_tokens", "output_tokens"),
        ),
    ),
    "Cache hits": (
        Panel(
            "Hit rate",
            "Share of prompt tokens that were cached: predicted by the router, and reported by engines",
            "percentunit",
            {
                "predicted": ratio("overlap_tokens", "prompt_tokens"),
                "reported": ratio("tenant_cached_tokens", "tenant_prompt_tokens"),
            },
        ),
        per(
            "worker",
            "Predicted",
            "Share of its prompt tokens",
            ratio("overlap_tokens", "prompt_tokens", "worker"),
            "percentunit",
        ),
        per("worker", "Computed", "Not cached", uncached("prompt_tokens", "overlap_tokens", "worker"), "short"),
    ),
    "Losses": (
        per(
            "sign", "Wrongly predicted", "Tokens a second", rate("overlap_error_tokens_sum", "sign", NOT_EXACT), "short"
        ),
        Panel(
            "Prompts not read",
            "Requests of which the router did not know all tokens, by reason",
            "reqps",
            {
                "not read": rate("readings", labels='outcome!="tokens"'),
                "{{api}}, {{outcome}}: {{obstacle}}": rate("readings", "api, outcome, obstacle"),
            },
        ),
        Panel(
            "Prefill handed over",
            "Answers begun with another worker's prefill; hand-overs that failed; prompts kept on one worker",
            "reqps",
            rates("disaggregated", "disaggregation_fallbacks", "local_prefills"),
        ),
        per(
            "outcome",
            "Prefixes fetched",
            "From another worker instead of computing them, by outcome",
            rate("pulls", "outcome"),
            "reqps",
            all=rate("pulls"),
        ),
    ),
    "Queue and admission": (
        per(
            "model",
            "Waiting",
            "Requests queued until a worker has room",
            f"sum by (model) ({of('queued_requests')})",
            all=f"sum ({of('queued_requests')}) or vector(0)",
        ),
        Panel(
            "Queue time",
            "Of requests that waited and then got a worker; total seconds waited, a second",
            "s",
            {"{{model}} p90": quantile(0.9, "queue_seconds"), "all": rate("queue_seconds_sum")},
        ),
        per(
            "cause",
            "Rejected",
            "Requests that no worker had room for, by cause",
            rate("rejections", "cause"),
            "reqps",
            all=rate("rejections"),
        ),
    ),
    "Tenants": (
        per("tenant", "Requests", "With an answer that began", rate("tenant_requests", "tenant"), "reqps"),
        per(
            "tenant",
            "Computed",
            "Not cached",
            uncached("tenant_prompt_tokens", "tenant_cached_tokens", "tenant"),
            "short",
        ),
        per("tenant", "Output tokens", "Of complete answers", rate("tenant_output_tokens", "tenant"), "short"),
        per("tenant", "Limited", "Refused for exceeding a limit", rate("tenant_limited", "tenant"), "reqps"),
    ),
    "Event streams": (
        per("state", "Ranks", "Only live is exact", f"sum by (state) ({now('ranks', 'worker, state')})"),
        per("worker", "Age of the last event", "An idle worker sends none", now("event_age_seconds", "worker"), "s"),
        Panel("Gaps and restarts", "Of event streams", "short", rates("event_gaps", "event_restarts")),
        Panel(
            "Refused",
            "Malformed messages, batches of another block size, ranks beyond the limit",
            "short",
            rates(*EVENTS_REFUSED),
        ),
    ),
    "Process": (
        per("instance", "CPU", "Cores in use", f"rate({of('process_cpu_seconds_total')}[$__rate_interval])"),
        Panel(
            "Memory",
            "Resident, and the index's part of it",
            "bytes",
            {"{{instance}}": of("process_resident_memory_bytes"), "{{instance}}: index": of("kvist_index_bytes")},
        ),
        per(
            "instance",
            "Event loop",
            "Share of time in which the loop was blocked",
            f"rate({of('loop_late_seconds_total')}[$__rate_interval])",
            "percentunit",
        ),
        Panel(
            "Clients",
            "Open connections, and file descriptors",
            "none",
            {"{{instance}}": of("connections"), "{{instance}}: descriptors": of("process_open_fds")},
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when an expression has had values for `lasts`; its runbook is the heading of its name."""

    name: str
    wrong: str
    expr: str
    lasts: str
    severity: str = "warning"

    def described(self) -> dict[str, Any]:
        """Return the alert as a Prometheus rule."""
        runbook = f"{RUNBOOKS}#{self.name.lower()}"
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.wrong, "runbook": runbook},
        }


def grown(metric: str, by: str) -> str:
    """Return the rate of a counter, a second, by these labels."""
    return f"sum by ({by}) (rate(kvist_router_{metric}[5m]))"


def share(part: str, whole: str, by: str, most: float) -> str:
    """Return whether a counter's rate is more than a share `most` of another's."""
    return f"{grown(part, by)} / {grown(whole, by)} > {most}"


def slow(histogram: str, part: float) -> str:
    """Return a quantile of a histogram, by model."""
    return f"histogram_quantile({part}, sum by (job, model, le) (rate(kvist_router_{histogram}_bucket[5m])))"


ALERTS = (
    Alert(
        "KvistRouterDown",
        "{{ $labels.instance }} cannot be reached",
        'up{job=~".*kvist-router.*"} == 0',
        "1m",
        "critical",
    ),
    Alert(
        "KvistNoHealthyWorker",
        "{{ $labels.instance }} has no worker to send requests to",
        f"sum by (job, instance) (kvist_router_worker_state{{{HEALTHY}}}) == 0",
        "1m",
        "critical",
    ),
    Alert(
        "KvistWorkerUnhealthy",
        "{{ $labels.worker }} gets no requests",
        'max by (job, worker) (kvist_router_worker_state{state="unhealthy"})'
        ' + max by (job, worker) (kvist_router_circuit_state{state="open"}) > 0',
        "5m",
    ),
    Alert(
        "KvistRequestsFail",
        "{{ $value | humanizePercentage }} of the requests sent to workers fail",
        share('requests_total{status=~"0|5.."}', "requests_total", "job", 0.05),
        "5m",
        "critical",
    ),
    Alert(
        "KvistRequestsRejected",
        "Requests are rejected: {{ $labels.cause }}",
        f"{grown('rejections_total', 'job, cause')} > 0",
        "5m",
        "critical",
    ),
    Alert(
        "KvistQueueSlow",
        "One in ten queued requests for {{ $labels.model }} waits {{ $value | humanizeDuration }} or more",
        f"{slow('queue_seconds', 0.9)} > 10",
        "10m",
    ),
    Alert(
        "KvistFirstByteSlow",
        "One in twenty answers of {{ $labels.model }} begins after {{ $value | humanizeDuration }} or more",
        f"{slow('time_to_first_byte_seconds', 0.95)} > 10",
        "10m",
    ),
    Alert(
        "KvistCacheNotKnown",
        "The cache of {{ $labels.worker }} is not known exactly",
        'max by (job, worker) (kvist_router_ranks{state=~"partial|resyncing"}) > 0',
        "15m",
    ),
    Alert(
        "KvistEventsRefused",
        "Events of {{ $labels.worker }} are refused",
        " + ".join(grown(f"{name}_total", "job, worker") for name in EVENTS_REFUSED) + " > 0",
        "10m",
    ),
    Alert(
        "KvistHitsNotFound",
        "{{ $labels.worker }} lacks {{ $value | humanizePercentage }} of the tokens that were predicted to be cached",
        share('overlap_error_tokens_sum{sign="over"}', "overlap_tokens_total", "job, worker", 0.2),
        "15m",
    ),
    Alert(
        "KvistPromptsNotRead",
        "{{ $value | humanizePercentage }} of the prompts are not fully tokenised by the router",
        share('readings_total{outcome!="tokens"}', "readings_total", "job", 0.2),
        "15m",
    ),
    Alert(
        "KvistRouterLate",
        "The event loop of {{ $labels.instance }} is blocked for {{ $value | humanizePercentage }} of the time",
        f"{grown('loop_late_seconds_total', 'job, instance')} > 0.2",
        "10m",
    ),
)


def panels() -> Iterator[dict[str, Any]]:
    """Yield each row, then its panels from left to right, as many side by side as fill the width."""
    ids, y = count(1), 0
    for title, row in ROWS.items():
        at = {"h": 1, "w": NUM_COLUMNS, "x": 0, "y": y}
        yield {"id": next(ids), "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": at}
        y += 1
        num_beside = next(num for num in (6 if row[0].is_last else 4, 3) if len(row) % num == 0)
        for panel, x in zip(row, cycle(range(0, NUM_COLUMNS, NUM_COLUMNS // num_beside))):
            described = panel.described(next(ids), x, y, NUM_COLUMNS // num_beside)
            yield described
            if x + described["gridPos"]["w"] == NUM_COLUMNS:
                y += described["gridPos"]["h"]


def variable(name: str, label: str) -> dict[str, Any]:
    among = "" if name == "job" else '{job=~"$job"}'
    query = f"label_values(kvist_router_connections{among}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports and provisions it."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return {
        "uid": "kvist",
        "title": "Kvist",
        "description": "Made by deploy/grafana/make.py",
        "tags": ["kvist", "llm"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "annotations": {"list": []},
        "templating": {"list": [source, variable("job", "Routers"), variable("instance", "Instance")]},
        "panels": [*panels()],
    }


def rules() -> dict[str, Any]:
    """Return the alerts, as Prometheus reads them."""
    return {"groups": [{"name": "kvist", "rules": [alert.described() for alert in ALERTS]}]}


def made() -> dict[Path, str]:
    """Return the text of each file."""
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "kvist"}}
    head = f"# Made by deploy/grafana/make.py. What each alert means, and what to do: {RUNBOOKS}\n"
    return {
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
        RULES: head + yaml.safe_dump(rules(), sort_keys=False, width=120),
        PROMETHEUS_RULE: head + yaml.safe_dump(kind | {"spec": rules()}, sort_keys=False, width=120),
    }


def filled(query: str, interval: str) -> str:
    """Return a query of the dashboard as Grafana sends it for all routers."""
    return query.replace('"$job"', '".*"').replace('"$instance"', '".*"').replace("$__rate_interval", interval)


def unanswered(prometheus_url: str, interval: str = "1m") -> list[str]:
    """Return the queries without a value in Prometheus, with their panels; raises HTTPError for one it refuses."""
    names = []
    for panel in panels():
        for target in panel.get("targets", ()):
            asked = urlencode({"query": filled(target["expr"], interval)})
            with urlopen(f"{prometheus_url}/api/v1/query?{asked}") as answer:
                found = json.load(answer)["data"]["result"]
            if not any(series["value"][1] != "NaN" for series in found):
                names.append(f"{panel['title']}: {target['legendFormat']}")
    return names


if __name__ == "__main__":
    if sys.argv[1:]:
        try:
            print(*unanswered(sys.argv[1]) or ["every query has an answer"], sep="\n")
        except (OSError, LookupError, ValueError) as error:
            sys.exit(f"{sys.argv[1]} does not answer as Prometheus does: {error}")
    else:
        for path, text in made().items():
            path.write_text(text)
