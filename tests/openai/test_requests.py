from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.openai.errors import RequestError, error_body, error_event
from kvist.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Handoff,
    RemoteDecode,
    RemotePrefill,
    SamplingParams,
    convert,
    decode_handoff,
    decode_sampling_params,
    read_fields,
)
from kvist.openai.responses import DONE, encode_event, last_event_data

FIRST_USES = """
import sys
from threading import Barrier, Thread
import msgspec
from kvist.openai.requests import convert

sys.setswitchinterval(1e-6)
for _ in range(300):
    class Inner(msgspec.Struct):
        number: "int | None" = None

    class Kind(msgspec.Struct):
        model: "str | None" = None
        numbers: "list[int] | None" = None
        inner: Inner | None = None

    all_are_there = Barrier(3)

    def use():
        all_are_there.wait()
        convert({"model": "m", "inner": {"number": 1}}, Kind)

    threads = [Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_two_threads_may_be_the_first_to_read_a_kind_of_request() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USES], check=True)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_text_or_token_ids_one_or_a_batch(prompt: Any, prompts: Any) -> None:
    assert convert({"prompt": prompt}, CompletionRequest).prompts == prompts


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], [[1], "a"]])
def test_a_mixed_batch_is_refused(prompt: Any) -> None:
    request = convert({"prompt": prompt}, CompletionRequest)
    with pytest.raises(RequestError, match="prompt: expected all strings"):
        _ = request.prompts


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({}, None),
    ],
)
def test_a_bad_chat_names_the_field(body: Any, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        convert(body, ChatCompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("max_tokens", 0),
        ("presence_penalty", 3),
        ("stop_token_ids", [-1]),
        ("logprobs", 21),
        ("top_logprobs", 5),
        ("seed", 1.5),
    ],
)
def test_an_invalid_sampling_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        decode_sampling_params({field: value})
    assert caught.value.status == 400
    assert field in caught.value.message


def test_a_refusal_names_field_value_and_what_was_expected() -> None:
    with pytest.raises(RequestError) as caught:
        decode_sampling_params(json.loads('{"temperature": -1}'))
    assert caught.value.message == "temperature: got -1, expected `float` >= 0.0"


def test_a_null_is_a_field_left_out() -> None:
    params = decode_sampling_params(
        json.loads('{"temperature": null, "n": null, "stop": null, "top_k": null, "seed": 3}')
    )
    assert params == SamplingParams(seed=3)
    assert convert(json.loads('{"prompt": [5], "add_special_tokens": null}'), CompletionRequest).prompts == [[5]]
    with pytest.raises(RequestError, match="missing required field `prompt`"):
        convert(json.loads('{"prompt": null}'), CompletionRequest)
    with pytest.raises(RequestError, match="top_p: got 7"):
        decode_sampling_params(json.loads('{"temperature": null, "top_p": 7}'))


def test_more_tokens_at_least_than_at_most_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens: got 5"):
        decode_sampling_params(json.loads('{"min_tokens": 5, "max_completion_tokens": 4}'))


def test_logprobs_are_read_in_chats_and_completions_alike() -> None:
    def count(body: str) -> int | None:
        return decode_sampling_params(json.loads(body)).num_logprobs

    assert count("{}") is None
    assert count('{"logprobs": false}') is None
    assert count('{"logprobs": true}') == 0
    assert count('{"logprobs": true, "top_logprobs": 3}') == 3
    assert count('{"logprobs": 2}') == 2
    assert count('{"logprobs": 0}') == 0


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(
        lambda value: json.dumps({"messages": value, "prompt": value, "n": value}).encode()
    )
)
def test_no_body_raises_anything_but_a_request_error(body: bytes) -> None:
    with suppress(RequestError):
        decode_sampling_params(read_fields(body))
    with suppress(RequestError):
        convert(read_fields(body), ChatCompletionRequest)
    with suppress(RequestError):
        assert convert(read_fields(body), CompletionRequest).prompts


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xef\xbb\xbf{}", "not valid JSON in UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON in UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "not valid JSON in UTF-8"),
        ('{"a": 1}'.encode("utf-32-be"), "not valid JSON in UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "utf-8"),
        (rb'{"a": "\ud800"}', "not valid JSON"),
        (rb'{"\uDC00": 1}', "not valid JSON"),
        (b'{"a": NaN}', "invalid character"),
        (b'{"a": [-Infinity]}', "invalid"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": %b}' % (b"1" * 5000), "out of range"),
        (b'{"a": 1} x', "trailing characters"),
        (b'{"a": 1,}', "trailing comma"),
        (b'{"a": "\x01"}', "invalid character"),
        (b"[]", "expected `object`"),
        (b'{"model": "a", "model": "b"}', "'model' is there more than once"),
        (rb'{"model": "a", "mod\u0065l": "b"}', "'model' is there more than once"),
        (rb'{"a": "\u003A", "model": "a", "model": "b"}', "'model' is there more than once"),
        (b'{"model": "a:b", "model": "b", "x": "%b"}' % (b":" * 5000), "'model' is there more than once"),
        (rb'{"arguments": "%b"}' % (rb"\u005b" * 129 + b"]" * 129), "arguments: nested too deep"),
        (b'{"messages": [{"role": "a", "role": "b"}]}', "'role' is there more than once"),
        (b'{"n": ' + b"[" * 128 + b"]" * 128 + b"}", "nested too deep, expected at most 128"),
        (b'{"n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"n": ' + b"[" * 100_000, "nested too deep"),
        (json.dumps({"arguments": "[" * 100_000}).encode(), "arguments: nested too deep"),
        (json.dumps({"tools": [{"arguments": "[" * 129 + "]" * 129}]}).encode(), "arguments: nested too deep"),
    ],
)
def test_a_body_that_two_parsers_may_read_differently_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_fields(body)
    assert reason in caught.value.message
    assert (caught.value.status, len(caught.value.message) < 300) == (400, True)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"a": "\ud83d\ude00 \\ud800 \u00e9"}',
        '{"a": "\U0001f600"}'.encode(),
        b' {"n": ' + b"[" * 127 + b"]" * 127 + b"}\n",
        json.dumps({"a": [[]] * 1000, "b": 1.5e300}).encode(),
        json.dumps({"arguments": "not JSON " + "[" * 1000}).encode(),
        json.dumps({"arguments": "[" * 128 + "]" * 128}).encode(),
    ],
)
def test_a_body_with_one_reading_is_read(body: bytes) -> None:
    assert read_fields(body) == json.loads(body)


def test_a_refusal_has_the_shape_that_clients_of_openai_and_anthropic_read() -> None:
    refusal = RequestError(400, "n: too many", param="n")
    error = {"message": "n: too many", "type": "invalid_request_error", "param": "n", "code": None}
    assert json.loads(error_body(refusal)) == {"error": error, "type": "error"}
    assert error_event(refusal, is_named=True) == b"event: error\ndata: " + error_body(refusal) + b"\n\n"
    assert json.loads(error_body(RequestError(503, "away")))["error"]["type"] == "server_error"


def test_the_last_event_of_a_stream_is_found_in_its_tail() -> None:
    stream = encode_event({"a": 1}) + encode_event({"usage": 2}) + DONE
    assert last_event_data(stream) == b'{"usage":2}'
    assert last_event_data(stream[30:]) is None or json.loads(last_event_data(stream[30:]) or b"") == {"usage": 2}
    assert last_event_data(DONE) is None


FETCH = {
    "do_remote_prefill": True,
    "remote_endpoints": ["tcp://10.0.0.1:7101", "tcp://[fe80::1]:7102"],
    "remote_request_id": "x",
    "num_tokens": 3,
}


@pytest.mark.parametrize(
    ("params", "read"),
    [
        (None, None),
        ({"do_remote_decode": True}, RemoteDecode()),
        (FETCH, RemotePrefill(("tcp://10.0.0.1:7101", "tcp://[fe80::1]:7102"), "x", 3)),
    ],
)
def test_a_part_of_a_request_can_be_another_workers(params: Any, read: Handoff | None) -> None:
    assert decode_handoff({"prompt": "x", "kv_transfer_params": params}) == read


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "kv_transfer_params: got neither"),
        ({"do_remote_decode": False}, "kv_transfer_params: got neither"),
        (FETCH | {"do_remote_decode": True}, "kv_transfer_params: got both"),
        (FETCH | {"remote_endpoints": None}, "remote_endpoints: expected `array`, got `null`"),
        (FETCH | {"remote_endpoints": "tcp://a:1"}, "remote_endpoints: expected `array`, got `str`"),
    ],
)
def test_params_that_no_worker_would_give_are_refused_by_field(params: Any, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_handoff({"kv_transfer_params": params})
    assert reason in caught.value.message
    assert caught.value.status == 400
