"""Limits of a tenant's concurrent requests, and of its requests and tokens a minute, over all processes of a router.

Requests and computed prompt tokens each have a bucket, which holds as much as may be spent in a minute and is filled at
that rate. A request takes one from its bucket when it comes. How many tokens it computes is known only later: it may
begin while there are any in the bucket, takes the predicted number when it is sent, and corrects that by its answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from kvist.openai.errors import RequestError
from kvist.router.tenants.rows import Field, TenantRows
from kvist.router.tenants.tenant import Tenant

LIMITED = "rate_limit_exceeded"


@dataclass(slots=True, eq=False)
class Spending:
    """What one request takes from its tenant's limits, until it finishes."""

    limits: Limits
    tenant: Tenant
    num_tokens: int = 0
    has_ended: bool = False

    def charge(self, num_tokens: int) -> None:
        """Take so many prompt tokens from the bucket, instead of what this request took before."""
        requests, tokens = self.limits.levels(self.tenant)
        self.limits.set_levels(self.tenant, requests, tokens - (num_tokens - self.num_tokens))
        self.num_tokens = num_tokens

    def finish(self) -> None:
        """Stop counting as a running request; further calls do nothing."""
        if not self.has_ended:
            self.has_ended = True
            self.limits.rows.count(self.tenant.name, -1)


@dataclass(frozen=True, slots=True)
class Limits:
    """Checks and updates tenants' limits. `now_s` is a monotonic clock that all processes share."""

    rows: TenantRows
    now_s: Callable[[], float]

    def enter(self, tenant: Tenant) -> Spending | None:
        """Admit a request; return what it takes, None if the tenant has no limits. Raises RequestError (429)."""
        most, per_minute = tenant.max_requests, (tenant.requests_per_minute, tenant.prefill_tokens_per_minute)
        if most is None and per_minute == (None, None):
            return None
        requests, tokens = self.levels(tenant)
        if most is not None and self.rows.num_running(tenant.name) >= most:
            raise _refusal("max_requests", most, 0.0)
        if per_minute[0] is not None and requests < 1.0:
            raise _refusal("requests_per_minute", per_minute[0], (1.0 - requests) / per_minute[0])
        if per_minute[1] is not None and tokens <= 0.0:
            raise _refusal("prefill_tokens_per_minute", per_minute[1], -tokens / per_minute[1])
        self.set_levels(tenant, requests - 1.0, tokens)
        self.rows.count(tenant.name, 1)
        return Spending(self, tenant)

    def levels(self, tenant: Tenant) -> tuple[float, float]:
        """Return how many requests and tokens are in the tenant's buckets now; they may be negative."""
        at_s, requests, tokens, _ = self.rows.read(tenant.name)
        passed_s = self.now_s() - at_s if at_s else math.inf
        return (
            _filled(requests, passed_s, tenant.requests_per_minute),
            _filled(tokens, passed_s, tenant.prefill_tokens_per_minute),
        )

    def set_levels(self, tenant: Tenant, requests: float, tokens: float) -> None:
        self.rows.write(tenant.name, Field.AT, self.now_s(), requests, tokens)


def _filled(level: float, passed_s: float, per_minute: float | None) -> float:
    return 0.0 if per_minute is None else min(max(1.0, per_minute), level + passed_s * (per_minute / 60.0))


def _refusal(limit: str, value: float, wait_minutes: float) -> RequestError:
    message = f"{limit}: the tenant's limit of {value:g} is reached"
    retry_after_s = max(1, math.ceil(wait_minutes * 60.0))
    return RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, code=LIMITED, retry_after_s=retry_after_s)
