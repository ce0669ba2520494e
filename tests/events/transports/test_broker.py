"""A broker's URL says where a worker's stream is, its names are reversible, and its secrets stay its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Message, open_publication, public_url, redacted
from kvist.events.transports.broker import STREAM, BrokerUrl, Host, escape, pack, unpack
from kvist.events.transports.received import MalformedCounter


def test_a_url_names_brokers_model_and_worker() -> None:
    url = BrokerUrl.parse(
        "nats+tls://u%40x:p%3Aw@a,b:5,[::1]:6/meta-llama%2FLlama-3.1-8B/pod-1.ns?tls_ca=/ca&jetstream=KV"
    )
    assert url.hosts == (Host("a", 4222), Host("b", 5), Host("::1", 6))
    assert (url.user, url.password, url.has_tls, url.is_mqtt) == ("u@x", "p:w", True, False)
    assert (url.model, url.worker) == ("meta-llama/Llama-3.1-8B", "pod-1.ns")
    assert url.public == "nats+tls://a:4222,b:5,[::1]:6/meta-llama%2FLlama-3.1-8B/pod-1.ns?jetstream=KV"
    assert BrokerUrl.parse(url.public).public == url.public


@pytest.mark.parametrize(
    ("url", "port", "user", "password"),
    [
        ("nats://token@h/m/w", 4222, "token", None),
        ("mqtt://h/m/w", 1883, None, None),
        ("mqtts://u:@h/m/w", 8883, "u", ""),
    ],
)
def test_what_a_url_leaves_out_is_the_schemes_default(url, port, user, password) -> None:
    parsed = BrokerUrl.parse(url)
    assert (parsed.hosts[0].port, parsed.user, parsed.password) == (port, user, password)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://h", "a slash within a name written as %2F"),
        ("nats://h/", "a slash within a name written as %2F"),
        ("nats://h/m/", "a slash within a name written as %2F"),
        ("nats://h/org/model/worker", "a slash within a name written as %2F"),
        ("nats:///m/w", "host:port"),
        ("nats://h:0/m/w", "host:port"),
        ("nats://h:65536/m/w", "host:port"),
        ("nats://a,,b/m/w", "host:port"),
        ("nats://h/m/w?jetstrem=S", "not jetstrem"),
        ("mqtt://h/m/w?jetstream=S", "not jetstream"),
        ("nats://h/m/w?tls_ca=/ca", "not tls_ca"),
        ("nats+tls://h/m/w?tls_cert=/c", "tls_cert and tls_key together"),
        ("nats://h/m/w?jetstream=", "jetstream to be a name of letters"),
        ("nats://h/m/w?jetstream=a.b", "letters, digits, _ and -"),
        ("nats://h/m/w?max_age_s=5", "jetstream=STREAM beside"),
        ("nats://h/m/w?jetstream=S&max_bytes=-1", "a positive number of bytes"),
        ("nats://h/m/w?jetstream=S&deliver=new", "deliver to be all"),
        ("nats://h/m/w?engine=gpt", "vllm, sglang"),
    ],
)
def test_a_wrong_url_is_an_error_that_says_what_is_expected(url, expected) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        Endpoint.parse(url)


def test_a_subscriber_must_name_the_worker_and_a_publisher_may_leave_it_out() -> None:
    with pytest.raises(InvalidValueError, match="/MODEL/WORKER"):
        Endpoint.parse("nats://h/m")
    assert BrokerUrl.parse("nats://h/m").with_worker("w").public == "nats://h:4222/m/w"


def test_a_models_plain_slash_is_not_taken_for_a_worker() -> None:
    with pytest.raises(InvalidValueError, match="a slash within MODEL is written as %2F"):
        open_publication("nats://h/meta-llama/Llama-3.1-8B", "pod-1")


@pytest.mark.parametrize(
    "url",
    [
        "nats://user:secret@h/m/w?creds=/file",
        "nats://secret@h/m/w",
        "nats://secret@@/m/w",
        "nats://user:se/secret@h/m/w",
        "nats://user:secret@h/m",
        "nats://user:secret@h:x/m/w",
        "nats://token/x?secret@h/m/w",
        "nats://user:1/b?jetstream=x&secret@h/m",
        "natss://user:secret@h/m/w",
    ],
)
def test_no_text_of_a_url_shows_its_secrets(url) -> None:
    texts = [redacted(f"1={url}")]
    try:
        endpoint = Endpoint.parse(url)
    except InvalidValueError as error:
        texts += [str(error), repr(error.value)]
    else:
        texts += [public_url(url), str(endpoint), repr(endpoint.broker), endpoint.address, endpoint.url]
    assert not any("secret" in text for text in texts)


@given(name=st.text())
def test_a_name_is_one_token_of_plain_characters(name) -> None:
    assert set(escape(name)) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-~%")


@given(worker=st.text(min_size=1), topic=st.binary())
def test_the_token_of_a_topic_leads_back_to_it(worker, topic) -> None:
    url = BrokerUrl.parse("mqtt://h/m").with_worker(worker)
    for each in (topic, b"kv/" + worker.encode(errors="replace") + b"/" + topic):
        assert url.topic_of(url.token_of(each)) == each
        assert "/" not in url.token_of(each)


def test_a_ranks_topic_has_the_rank_as_its_token() -> None:
    url = BrokerUrl.parse("nats://h/org%2Fm.1/w.1")
    assert url.name(STREAM, url.token_of(b"kv/w.1/12")) == "kvist.org%2Fm%2E1.w%2E1.12"
    assert [url.token_of(topic) for topic in (b"kv/w.1/012", b"kv/w/1", b"t", b"")] == [
        "-kv%2Fw%2E1%2F012",
        "-kv%2Fw%2F1",
        "-t",
        "-",
    ]


def test_a_message_is_packed_with_the_publications_number_and_its_sequence() -> None:
    malformed = MalformedCounter("h")
    message = Message(b"t", 1 << 63, b"payload")
    assert unpack(b"t", pack(7, message), malformed) == (7, message)
    assert unpack(b"t", pack(7, message)[:15], malformed) is None
    assert malformed.num == 1
