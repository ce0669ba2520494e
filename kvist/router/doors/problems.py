"""Lists what is wrong by the answers of `/workers` and `/readiness`, with the page of docs/ that explains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvist.router.doors.explain import CONDITIONS
from kvist.router.index import APPROXIMATE

_MIN_REPORT_TOKENS, _MIN_FOUND_SHARE = 10_000, 0.8
"""A worker that finds a smaller share of the tokens predicted is a problem, once its reports cover so many tokens."""
_KINDS = {"live": "good", "gone": "bad", "failed": "bad"}


def shown_of(worker: dict[str, Any]) -> dict[str, tuple[str, str | None, str]]:
    """Return a worker's state and how well its cache is known, each as a word, its reason, and good, warn or bad."""
    why, events = worker["unavailable_reason"], worker["kv_events"]
    state = worker["state"], why, "bad" if worker["state"] == "unhealthy" else "warn"
    if worker["state"] == "healthy":
        state = ("unavailable", why, "warn") if why else ("warming" if worker["warming"] else "healthy", None, "good")
    streams = sorted(events["sources"], key=lambda each: [*CONDITIONS].index(each["condition"]))
    known: tuple[str, str | None, str] = ("none", None, "")
    if any(rank["state"] == APPROXIMATE for rank in events["ranks"]):
        known = "approximate", "estimated from its prompts, without KV events", "warn"
    elif events["error"] is not None:
        known = "not followed", events["error"], "bad"
    elif streams:
        condition, lags = streams[-1]["condition"], [each["lag_s"] or 0.0 for each in streams]
        known = condition, streams[-1]["reason"] or f"lag {1e3 * max(lags):.1f} ms", _KINDS.get(condition, "warn")
    return {"state": state, "events": known}


def problems_of(workers: list[dict[str, Any]], readiness: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all problems, under keys that stay the same for as long as a problem does."""
    found = [(worker["url"], _of_worker(worker)) for worker in workers]
    found.append(("router", _of_router(readiness)))
    return {f"{where} {each['what']}": {"where": where, **each} for where, problems in found for each in problems}


def _problem(what: str, why: str | None, page: str, *, is_bad: bool = True) -> dict[str, Any]:
    return {"what": what, "why": why, "page": f"docs/{page}.md", "is_bad": is_bad}


def _of_worker(worker: dict[str, Any]) -> Iterator[dict[str, Any]]:
    events, hits = worker["kv_events"], worker["hits"]
    if worker["state"] != "healthy":
        is_bad = worker["state"] == "unhealthy"
        yield _problem(f"is {worker['state']}", worker["last_failure"], "operating", is_bad=is_bad)
    elif worker["unavailable_reason"] is not None:
        yield _problem("gets no requests", worker["unavailable_reason"], "operating")
    if events["error"] is not None:
        is_expected = any(rank["state"] == APPROXIMATE for rank in events["ranks"])
        yield _problem("has no KV events that can be followed", events["error"], "engines", is_bad=not is_expected)
    for source in events["sources"]:
        if source["condition"] != "live":
            state = source["condition"].replace("no_events", "without events")
            yield _problem(f"has an event stream that is {state}: {source['url']}", source["reason"], "recovery")
        if source["malformed"] or source["refused_batches"] or source["refused_ranks"]:
            counts = {name: source[name] for name in ("malformed", "refused_batches", "refused_ranks") if source[name]}
            why = ", ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in counts.items())
            yield _problem(f"sends events that are refused: {source['url']}", why, "engines")
    rendering = worker["rendering"]
    if rendering is not None and rendering["state"] == "differs":
        yield _problem("renders chats differently than the router", rendering["reason"], "engines")
    if hits is not None and hits["prompt_tokens_with_report"] > _MIN_REPORT_TOKENS:
        predicted, reported = hits["predicted_tokens"], hits["reported_tokens"]
        if reported < _MIN_FOUND_SHARE * predicted:
            why = f"its engine reports {reported:,} cached tokens where {predicted:,} were predicted"
            yield _problem("finds less in its cache than was predicted", why, "why")


def _of_router(readiness: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not readiness["ready"]:
        yield _problem("cannot take requests", readiness["reason"], "operating")
    if readiness.get("index") == "compiling":
        yield _problem("routes by load", "the index is being compiled", "index-service", is_bad=False)
    for name, model in readiness["models"].items():
        if "index" in readiness and model.get("problem"):
            yield _problem(f"cannot read prompts of {name}", model["problem"], "engines")
    for source in readiness.get("discovery", ()):
        if source["reason"] is not None:
            yield _problem(f"cannot query the worker source {source['source']}", source["reason"], "fleet")
    if (problem := readiness.get("replicas", {}).get("problem")) is not None:
        yield _problem("is not connected to other routers", problem, "fleet")
    if (failure := readiness.get("state", {}).get("last_save_failure")) is not None:
        yield _problem("cannot save its state", failure, "recovery")
