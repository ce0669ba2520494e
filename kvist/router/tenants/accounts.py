"""What each tenant has used of each model, for metrics and `GET /usage`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, Metric

PREFIX = "kvist_router_tenant_"


@dataclass(slots=True)
class Account:
    """Requests whose answers began, and their tokens; `cached_tokens` are among `prompt_tokens`.

    `limited` requests got no answer, as the tenant had reached a limit.
    """

    requests: int = 0
    limited: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


Accounts: TypeAlias = defaultdict[tuple[str, str], Account]
"""What this process has counted since it started, by tenant and the model's name in metrics."""


def account_metrics(accounts: Accounts) -> Iterator[Metric]:
    """Yield a counter for each number of the accounts."""
    for field in fields(Account):
        text = f"Of each tenant, {field.name.replace('_', ' ')} (docs/tenants.md)"
        counter = CounterMetricFamily(PREFIX + field.name, text, labels=["tenant", "model"])
        for names, account in accounts.items():
            counter.add_metric(names, getattr(account, field.name))
        yield counter


def used(metrics: Iterable[Metric | None], tenant: str | None) -> list[dict[str, Any]]:
    """Return the accounts found in metrics, those of one tenant or of all."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for metric in metrics:
        if metric is not None and metric.name.startswith(PREFIX):
            for sample in metric.samples:
                names = sample.labels["tenant"], sample.labels["model"]
                if tenant in (None, names[0]):
                    row = rows.setdefault(names, {"tenant": names[0], "model": names[1]})
                    row[metric.name.removeprefix(PREFIX)] = int(sample.value)
    return [rows[names] for names in sorted(rows)]
