"""JetStream streams: created as the URL says, and read in order from any message on.

Nothing newer than nats-server 2.9 is used. The settings that the server reports are compared with those that were
asked for, since older servers ignore settings they do not know.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.broker import STREAM, BrokerUrl, escape, unpack
from kvist.events.transports.received import MalformedCounter, ReplayAnswer

_logger = logging.getLogger(__name__)

DEFAULT_MAX_AGE_S, DEFAULT_MAX_BYTES = 86_400, 1 << 30
"""What a stream keeps at most if the URL does not say: a day, and 1 GiB."""
PAGE_MESSAGES = 256
PULL_TIMEOUT_S = 10.0
CONSUMER_TIMEOUT_S = 60.0
"""When the server removes the consumer of a reader that asks for nothing any more."""


async def ensure_stream(client: Client, url: BrokerUrl) -> None:
    """Create the URL's stream, or raise InvalidValueError naming the setting and both values if it has others."""
    name, subjects = url.options["jetstream"], f"{STREAM}.{escape(url.model)}.>"
    limits = {setting: int(url.options[setting]) for setting in ("max_age_s", "max_bytes") if setting in url.options}
    try:
        found = (await client.jsm().stream_info(name)).config
    except nats.js.errors.NotFoundError:
        limits = {"max_age_s": DEFAULT_MAX_AGE_S, "max_bytes": DEFAULT_MAX_BYTES, **limits}
        found = await _created(client, name, subjects, limits)
    except nats.js.errors.ServiceUnavailableError as error:
        raise InvalidValueError("jetstream", name, f"a server with JetStream ({error.description})") from None
    wanted = {"subjects": [subjects], "retention": "limits", "discard": "old", **limits}
    for setting, value in wanted.items():
        held = getattr(found, "max_age" if setting == "max_age_s" else setting)
        if held != value:
            expected = f"{held!r}, which the stream on the server has"
            raise InvalidValueError(f"jetstream={name}, {setting}", value, expected)


async def _created(client: Client, name: str, subjects: str, limits: dict[str, int]) -> api.StreamConfig:
    config = api.StreamConfig(
        name=name,
        subjects=[subjects],
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.OLD,
        storage=api.StorageType.FILE,
        max_age=limits["max_age_s"],
        max_bytes=limits["max_bytes"],
    )
    try:
        created = (await client.jsm().add_stream(config)).config
    except (nats.js.errors.BadRequestError, nats.js.errors.ServerError) as error:
        raise InvalidValueError("jetstream", name, f"a stream that can be created ({error.description})") from None
    _logger.info("stream created stream=%s max_age_s=%d max_bytes=%d", name, limits["max_age_s"], limits["max_bytes"])
    return created


async def read_stream(
    client: Client, stream: str, subject: str, start_sequence: int, *, waits: bool = False
) -> AsyncGenerator[list[Msg], None]:
    """Yield pages of the stream's messages on a subject, wildcards allowed, from a sequence of the stream on.

    The first page is empty, and comes once the server has the consumer. With `waits` there is no end. Raises
    nats.errors.Error, or TimeoutError, when the server stops answering.
    """
    config = api.ConsumerConfig(
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=start_sequence,
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=CONSUMER_TIMEOUT_S,
        mem_storage=True,
    )
    subscription = await client.jetstream().pull_subscribe(subject, stream=stream, config=config)
    try:
        num_pending = (await subscription.consumer_info()).num_pending
        yield []
        while num_pending or waits:
            try:
                page = await subscription.fetch(PAGE_MESSAGES, PULL_TIMEOUT_S)
            except TimeoutError:
                if not waits:
                    raise
                await subscription.consumer_info()  # raises if the server has forgotten this reader
            else:
                num_pending = page[-1].metadata.num_pending  # as of when it was sent
                yield page
    finally:
        with suppress(OSError, nats.errors.Error, TimeoutError):
            await subscription.unsubscribe()
            await client.jsm().delete_consumer(stream, str(config.name))


async def read_kept(client: Client, url: BrokerUrl, request: ReplayRequest) -> list[Message] | None:
    """Return the stream's messages of the worker's last publication from a sequence on; None if it has none at all."""
    stream = url.options["jetstream"]
    if request.topic:
        subjects = [url.name(STREAM, url.token_of(request.topic))]
    else:
        state = (await client.jsm().stream_info(stream, url.name(STREAM, "*"))).state
        subjects = sorted(state.subjects or ())
    answers = [await _read_subject(client, url, subject, request.start_sequence) for subject in subjects]
    known = [answer for answer in answers if answer is not None]
    return [message for answer in known for message in answer] if known else None


async def _read_subject(client: Client, url: BrokerUrl, subject: str, start_sequence: int) -> list[Message] | None:
    """Return the messages on one subject of the publication that sent there last; None if there are none."""
    stream, topic = url.options["jetstream"], url.topic_of(subject.rpartition(".")[2])
    malformed = MalformedCounter(url.public)
    try:
        last = await client.jsm().get_msg(stream, subject=subject)
    except nats.js.errors.NotFoundError:
        return None
    newest = unpack(topic, last.data or b"", malformed)
    if newest is None or last.seq is None:
        return None

    def is_wanted(unpacked: tuple[int, Message] | None) -> bool:
        return unpacked is not None and unpacked[0] == newest[0] and unpacked[1].sequence >= start_sequence

    low, high = 1, last.seq
    while low < high:  # a binary search: the wanted messages are the last ones of the subject
        middle = (low + high) // 2
        found = await client.jsm().get_msg(stream, seq=middle, subject=subject, next=True)
        is_far_enough = is_wanted(unpack(topic, found.data or b"", malformed))
        low, high = (low, middle) if is_far_enough else ((found.seq or middle) + 1, high)
    answer = ReplayAnswer()
    async with aclosing(read_stream(client, stream, subject, low)) as pages:
        async for page in pages:
            for message in page:
                unpacked = unpack(topic, message.data, malformed)
                if unpacked is not None and is_wanted(unpacked) and not answer.add(unpacked[1]):
                    return None
    return answer
