"""Spans from one request to the collector, and what they cost those who do not want them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from kvist.errors import InvalidValueError, MissingExtraError
from kvist.tracing import NO_SPAN, check_traces_endpoint, open_tracing, otlp
from kvist.tracing.otlp import Tracing

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

Until = Callable[[Callable[[], object]], None]


def parent(flags: str = "01", version: str = "00") -> list[tuple[bytes, bytes]]:
    return [(b"traceparent", f"{version}-{TRACE_ID}-{SPAN_ID}-{flags}".encode())]


@contextmanager
def tracing(collector: Any) -> Iterator[Tracing]:
    opened = open_tracing(collector.url, "tested", "here:1")
    yield opened
    opened.close(30)


def test_a_request_goes_on_with_its_clients_trace_and_its_steps_nest(trace_collector: Any) -> None:
    with tracing(trace_collector) as opened:
        began_ns = time.time_ns()
        with opened.request("POST /x", [*parent(), (b"tracestate", b"a=1")], {"asked": 1, "unsaid": None}) as request:
            with request.step("read"):
                pass
            with request.call("prefill") as call:
                call.set(lambda status: {"http.response.status_code": status}, 200)
                told = dict(call.headers([(b"host", b"h"), (b"traceparent", b"theirs"), (b"tracestate", b"a=1")]))
            request.mark("retry", {"why": "it failed"})
            now_s = time.monotonic()
            request.record("wait", now_s - 0.25, now_s, {"names": ["a", "b"]}, error="too late")
        ended_ns = time.time_ns()
    spans = {span.name: span for span in trace_collector.spans}
    root = spans["POST /x"]
    assert (root.trace_id, root.parent_id, root.kind, root.attributes) == (TRACE_ID, SPAN_ID, "SERVER", {"asked": 1})
    assert {span.trace_id for span in trace_collector.spans} == {TRACE_ID}
    assert [spans[name].parent_id for name in ("read", "prefill", "retry", "wait")] == [root.span_id] * 4
    assert (spans["prefill"].kind, spans["read"].kind) == ("CLIENT", "INTERNAL")
    assert spans["prefill"].attributes == {"http.response.status_code": 200}
    assert told[b"traceparent"] == f"00-{TRACE_ID}-{spans['prefill'].span_id}-01".encode()
    assert (told[b"tracestate"], told[b"host"]) == (b"a=1", b"h")
    for name in ("read", "prefill", "retry"):
        assert began_ns <= root.start_ns <= spans[name].start_ns <= spans[name].end_ns <= root.end_ns <= ended_ns
    assert spans["retry"].start_ns == spans["retry"].end_ns
    assert spans["wait"].end_ns - spans["wait"].start_ns == pytest.approx(250_000_000, abs=1000)
    assert (spans["wait"].error, spans["wait"].attributes) == ("too late", {"names": ["a", "b"]})
    assert root.service == "tested"
    assert len(trace_collector.spans) == 5
    assert trace_collector.requests[0][0] == "/v1/traces"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"traceparent", b"")],
        [(b"traceparent", b"\xff\x00")],
        [(b"traceparent", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01")],
        [(b"traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01-more".encode())],
        [(b"traceparent", f"ff-{TRACE_ID}-{SPAN_ID}-01".encode())],
        [(b"traceparent", f"00-{TRACE_ID.upper()}-{SPAN_ID}-01".encode())],
        [(b"traceparent", b"0" * 100_000), (b"tracestate", b"a" * 100_000)],
    ],
)
def test_without_a_trace_that_can_be_read_a_new_one_begins(
    trace_collector: Any, headers: list[tuple[bytes, bytes]]
) -> None:
    with tracing(trace_collector) as opened, opened.request("r", headers, {}) as request:
        (told,) = (value.decode() for name, value in request.headers(headers) if name == b"traceparent")
    (span,) = trace_collector.spans
    assert (span.parent_id, span.trace_id != TRACE_ID) == ("", True)
    ids, _, flags = told.rpartition("-")
    assert (ids, int(flags, 16) & 1) == (f"00-{span.trace_id}-{span.span_id}", 1)


def test_no_step_ends_before_it_begins(trace_collector: Any) -> None:
    with tracing(trace_collector) as opened, opened.request("r", [], {}) as request:
        now_s = time.monotonic()
        request.record("back", now_s, now_s - 1, {})
    (span,) = (span for span in trace_collector.spans if span.name == "back")
    assert span.end_ns == span.start_ns


def test_headers_that_cannot_be_read_are_not_passed_on_and_do_not_fill_the_log(
    trace_collector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with tracing(trace_collector) as opened:
        for trace, state in ((b"x" * 600, b"a=1"), (parent()[0][1], b"a=\xff"), (parent()[0][1], b"k=v," * 4000)):
            headers = [(b"traceparent", trace), (b"tracestate", state)]
            with opened.request("POST /x", headers, {}) as request:
                assert [name for name, _ in request.headers(headers)] == [b"traceparent"]
    assert not caplog.records


def test_a_trace_that_its_client_does_not_sample_is_passed_on_and_not_made(trace_collector: Any) -> None:
    with tracing(trace_collector) as opened:
        with opened.request("r", parent("00"), {}) as request, request.call("prefill") as call:
            (told,) = (value for name, value in call.headers(parent("00")) if name == b"traceparent")
            assert not call.is_recorded
        assert told.startswith(f"00-{TRACE_ID}-".encode())
        assert told.endswith(b"-00")
    assert not trace_collector.spans


def test_the_environment_says_what_is_sampled_and_what_the_service_is_called(
    trace_collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with tracing(trace_collector) as opened:
        with opened.request("new", [], {}):
            pass
        with opened.request("old", parent(), {}):
            pass
    assert [(span.name, span.service) for span in trace_collector.spans] == [("old", "mine")]
    assert trace_collector.requests[0][1]["x-key"] == "secret"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with tracing(trace_collector) as opened, opened.request("sampled elsewhere", parent("03"), {}) as request:
        assert dict(request.headers([]))[b"traceparent"].endswith(b"-02"), "others are not told to record"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with tracing(trace_collector) as opened:
        assert opened.request("r", parent(), {}) is NO_SPAN


def test_an_error_that_ends_a_step_is_its_own_and_its_requests(trace_collector: Any) -> None:
    with tracing(trace_collector) as opened:
        with pytest.raises(ValueError, match="no"), opened.request("r", [], {}) as request, request.step("s"):
            raise ValueError("no")
        with pytest.raises(asyncio.CancelledError), opened.request("left", [], {}):
            raise asyncio.CancelledError
    told = [(span.name, span.error, span.attributes["error.type"]) for span in trace_collector.spans]
    assert sorted(told) == [
        ("left", "CancelledError", "CancelledError"),
        ("r", "no", "ValueError"),
        ("s", "no", "ValueError"),
    ]


def test_a_collector_that_takes_nothing_is_logged_once_a_minute(
    trace_collector: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_collector.status = 400  # which is not tried again
    for minute in (1, 2):
        monkeypatch.setattr(otlp.export_log, "next_s", 0.0)
        for number in (1, 2, 3):
            with tracing(trace_collector) as opened, opened.request("r", [], {}):
                pass
            assert len(trace_collector.requests) == 3 * (minute - 1) + number
        messages = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
        assert len(messages) == minute
        assert "400" in messages[-1]


def test_a_queue_that_is_full_drops_spans_and_waits_for_nobody(
    trace_collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_QUEUE_SIZE", "4"), ("MAX_EXPORT_BATCH_SIZE", "4"), ("SCHEDULE_DELAY", "60000")):
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    trace_collector.may_answer.clear()
    with tracing(trace_collector) as opened:
        for number in range(100):
            with opened.request(str(number), [], {}):
                pass
        assert not trace_collector.spans
        trace_collector.may_answer.set()
    names = [span.name for span in trace_collector.spans]
    assert 4 <= len(names) <= 8, "what was queued at last, and what was on its way if it was early enough"
    assert set(names) >= {"96", "97", "98", "99"}


def test_closing_waits_no_longer_than_it_is_told_and_what_is_left_is_lost(
    trace_collector: Any, until_true: Until
) -> None:
    trace_collector.status = 503
    opened = open_tracing(trace_collector.url, "tested", "here:1")
    with opened.request("r", [], {}):
        pass
    opened.close(0.01)  # where the exporter would try for ten seconds
    until_true(lambda: not [thread for thread in threading.enumerate() if thread.name == "kvist-traces"])
    opened.close(0.01)


def test_what_is_not_traced_does_nothing() -> None:
    def never() -> dict[str, str]:
        raise AssertionError

    headers = [(b"traceparent", b"anything")]
    with NO_SPAN.step("a") as step, step.call("b") as call:
        call.set(never)
        call.mark("c", {})
        call.fail("d")
        assert call.headers(headers) is headers
        call.record("e", 0, 1, {})
        assert call is NO_SPAN
        assert not call.is_recorded


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp/v1/traces", "https://a/otlp/v1/traces"),
        ("http://[::1]:4318/v1/traces", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_is_a_collectors(given: str, url: str) -> None:
    assert check_traces_endpoint(given) == url


@pytest.mark.parametrize("given", ["", "a:4318", "grpc://a:4317", "http://", "http://a:x", "http://a:0"])
def test_an_endpoint_that_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(InvalidValueError, match="otlp_traces_endpoint"):
        check_traces_endpoint(given)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvist.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvist\[tracing\]'"):
        open_tracing("http://127.0.0.1:4318", "tested", "here:1")


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_nothing_of_opentelemetry_is_imported_where_nothing_is_traced() -> None:
    program = (
        "import sys, kvist.router.doors.service, kvist.engine.server.api, kvist.cli.serve\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
