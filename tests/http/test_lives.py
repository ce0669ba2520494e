"""Random lives of clients and workers with a proxy between them: each answer is whole and its own, or visibly not."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import h11
import pytest
from lives import seeds

LIVES = seeds(8)
NUM_TURNS = 25
POST = b"POST /smuggled HTTP/1.1\r\nHost: a\r\n"
AMBIGUOUS = {
    POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd": 400,
    POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd": 400,
    POST + b"Content-Length: 4, 4\r\n\r\nabcd": 400,
    POST + b"Content-Length: +4\r\n\r\nabcd": 400,
    POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
    POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 501,
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n": 501,
    POST + b"Transfer-Encoding: chunked\r\n\r\n4\nabcd\r\n0\r\n\r\n": 400,
    POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcdX\r\n0\r\n\r\n": 400,
    POST + b"Transfer-Encoding: chunked\r\n\r\n0x4\r\nabcd\r\n0\r\n\r\n": 400,
    POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 4\r\n\r\n": 400,
    POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n": 400,
    POST + b"Content-Length: 4\r\n folded\r\n\r\nabcd": 400,
    POST + b"X: a\nContent-Length: 4\r\n\r\nabcd": 400,
    POST + b"X: a\rContent-Length: 4\r\n\r\nabcd": 400,
    POST + b"Host: b\r\n\r\n": 400,
    POST + b"X: " + b"y" * 40_000 + b"\r\n\r\n": 431,
    b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n": 414,
    b"\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n": 400,
    b"GET /smuggled\r\n\r\n": 400,
}


@dataclass(eq=False)
class Plan:
    """What one request is, and what its worker does with it."""

    method: str
    version: bytes
    body: bytes
    is_chunked: bool
    expects: bool
    is_last: bool
    status: int
    answer: bytes
    framing: str
    ends: str
    """How the worker goes on: `keeps` the connection, says `close` or closes without a word, or dies amid its bytes."""
    answers_early: bool
    num_interim: int
    is_seen: bool = field(default=False, init=False)
    num_before_death: int = field(default=0, init=False)

    @property
    def has_body(self) -> bool:
        return self.method != "HEAD" and self.status not in (204, 304)

    @property
    def talks_on(self) -> bool:
        """Whether bytes come behind the answer, on a connection that stays open."""
        return self.ends == "talks on" and self.framing != "until close" and self.has_body


class Life:
    """Clients, a proxy and workers of one seed."""

    def __init__(self, seed: int, port: int) -> None:
        self.random = random.Random(seed)
        self.port = port
        self.plans: dict[int, Plan] = {}
        self.numbers = count()
        self.faults: list[str] = []

    def plan(self, *, is_pipelined: bool = False) -> int:
        choose, sizes = self.random.choice, (0, 1, 7, 300, 70_000, 300_000)
        method = choose(("GET", "POST", "POST", "PUT", "HEAD", "DELETE", "OPTIONS"))
        has_body = method in ("POST", "PUT") or choose((True, False, False))
        body = self.random.randbytes(choose(sizes)) if has_body else b""
        version = b"1.0" if self.random.randrange(8) == 0 else b"1.1"
        status = choose((200, 200, 200, 200, 201, 204, 304, 404, 500, 503))
        framing = choose(("length", "chunked", "chunked", "until close"))
        plan = Plan(
            method,
            version,
            body,
            is_chunked=has_body and version == b"1.1" and choose((True, False)),
            expects=bool(body) and not is_pipelined and self.random.randrange(4) == 0,
            is_last=self.random.randrange(8) == 0,
            status=status,
            answer=b"" if method == "HEAD" or status in (204, 304) else self.random.randbytes(choose(sizes)),
            framing=framing,
            ends=choose(("keeps", "keeps", "keeps", "close", "unsaid close", "dies", "talks on")),
            answers_early=self.random.randrange(8) == 0,
            num_interim=choose((0, 0, 0, 1, 3)),
        )
        number = next(self.numbers)
        self.plans[number] = plan
        return number

    def pieces(self, data: bytes) -> list[bytes]:
        """Cut bytes as a network may."""
        cuts = sorted(self.random.randrange(len(data) + 1) for _ in range(self.random.choice((0, 0, 1, 3, 9))))
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]

    # --- What workers do --------------------------------------------------------------------------------------------

    async def work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection; what comes must be what a client sent, with the proxy's own framing."""
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            parser.receive_data(head)
            asked = parser.next_event()
            assert isinstance(asked, h11.Request)
            headers = dict(asked.headers)
            number = int(asked.target.removeprefix(b"/"))
            plan = self.plans[number]
            self.check(asked.method.decode() == plan.method, f"{number}: method {asked.method!r}")
            self.check(b"transfer-encoding" not in headers and b"expect" not in headers, f"{number}: {headers}")
            self.check(headers[b"x-kept"] == b"a, b", f"{number}: {headers}")
            self.check(b"x-hop" not in headers and b"connection" not in headers, f"{number}: {headers}")
            num_body_bytes = int(headers.get(b"content-length", b"0"))
            self.check(num_body_bytes == len(plan.body), f"{number}: {num_body_bytes} bytes of body")
            self.check(not plan.is_seen, f"{number}: came twice")
            plan.is_seen = True
            if not plan.answers_early:
                self.check(await reader.readexactly(num_body_bytes) == plan.body, f"{number}: another body")
            wire = self.wire(number, plan)
            if plan.ends == "dies":
                plan.num_before_death = self.random.choice((0, 9, len(wire) // 2, len(wire) - 1))
                wire = wire[: plan.num_before_death]
            for piece in self.pieces(wire):
                writer.write(piece)
                await writer.drain()
            if plan.answers_early:
                await reader.readexactly(num_body_bytes)
            if plan.ends == "dies":
                writer.transport.abort() if self.random.choice((True, False)) else writer.close()
            if plan.talks_on:
                self.check(not await reader.read(1), f"{number}: its connection is used again")
            if plan.ends != "keeps" or plan.framing == "until close":
                return

    def wire(self, number: int, plan: Plan) -> bytes:
        """Return what the worker says, with what a client is not to see of it."""
        head = b"HTTP/1.1 %d Whatever\r\nX-Number: %d\r\nX-Kept: yes\r\nX-Hop: no\r\n" % (plan.status, number)
        options = b"X-Hop, close" if plan.ends == "close" else b"X-Hop"
        head += b"Connection: %b\r\nKeep-Alive: timeout=5\r\n" % options
        wire = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * plan.num_interim
        if plan.framing == "length":
            wire += head + b"Content-Length: %d\r\n\r\n%b" % (len(plan.answer), plan.answer)
        elif plan.framing == "chunked" and plan.status not in (204, 304):
            wire += head + b"Transfer-Encoding: chunked\r\n\r\n"
            for piece in self.pieces(plan.answer):
                extension = self.random.choice((b"", b"", b";a=b", b';c="d e"'))
                wire += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
            trailer = self.random.choice((b"", b"X-Sum: dropped\r\n"))
            wire += b"0\r\n" + trailer + b"\r\n" if plan.has_body else b""
        else:
            wire += head + b"\r\n" + plan.answer
        return wire + b"HTTP/1.1 200 OK\r\n" * plan.talks_on

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.faults.append(what)

    # --- What clients do --------------------------------------------------------------------------------------------

    def request(self, number: int) -> tuple[bytes, bytes]:
        """Return a request's head and its body as it is framed."""
        plan = self.plans[number]
        fields = [b"Host: a", b"X-Kept: a, b", b"X-Hop: c"]
        options = [b"x-hop"]
        if plan.is_last:
            options.append(b"close")
        elif plan.version == b"1.0":
            options.append(b"keep-alive")
        fields.append(b"Connection: " + b", ".join(options))
        body = plan.body
        if plan.is_chunked:
            fields.append(b"Transfer-Encoding: chunked")
            body = b"".join(b"%X;x\r\n%b\r\n" % (len(piece), piece) for piece in self.pieces(body)) + b"0\r\n\r\n"
        elif body or plan.method in ("POST", "PUT"):
            fields.append(b"Content-Length: %d" % len(body))
        if plan.expects:
            fields.append(b"Expect: 100-continue")
        self.random.shuffle(fields)
        line = b"%b /%d HTTP/%b\r\n" % (plan.method.encode(), number, plan.version)
        return line + b"\r\n".join(fields) + b"\r\n\r\n", body

    async def be_a_client(self) -> None:
        while len(self.plans) < NUM_TURNS:
            client = Client(*await asyncio.open_connection("127.0.0.1", self.port), self)
            try:
                is_open = True
                while is_open and len(self.plans) < NUM_TURNS:
                    is_open = await self.random.choices(
                        [self.ask, self.ask_several, self.leave, self.say_what_is_ambiguous], [6, 3, 1, 1]
                    )[0](client)
            finally:
                client.writer.close()
                with suppress(OSError):
                    await client.writer.wait_closed()

    async def ask(self, client: Client) -> bool:
        number = self.plan()
        head, body = self.request(number)
        if self.plans[number].expects and self.plans[number].version == b"1.1":
            await client.send(head)
            interim = await client.read_head()
            if not interim.startswith(b"HTTP/1.1 100 Continue\r\n"):
                self.check(is_right=False, what=f"{number}: {interim!r} and no 100")
                return False
            await client.send(body)
        else:
            await client.send(head + body)
        return await self.hear(client, number)

    async def ask_several(self, client: Client) -> bool:
        """Pipeline requests; those behind one that ends the connection are nobody's."""
        numbers = [self.plan(is_pipelined=True) for _ in range(self.random.randint(2, 6))]
        data = b"".join(b"".join(self.request(number)) for number in numbers)
        sending = asyncio.create_task(client.send(data))
        is_open = True
        for number in numbers:
            is_open = is_open and await self.hear(client, number)
        await sending
        return is_open

    async def leave(self, client: Client) -> bool:
        head, body = self.request(self.plan())
        data = head + body
        await client.send(data[: self.random.choice((len(data), len(head), self.random.randrange(len(data))))])
        await asyncio.sleep(self.random.choice((0.0, 0.002)))
        return False

    async def say_what_is_ambiguous(self, client: Client) -> bool:
        """Behind a valid request, perhaps, and before one that must never be taken for one."""
        wire, status = self.random.choice([*AMBIGUOUS.items()])
        number = self.plan(is_pipelined=True) if self.random.choice((True, False)) else None
        before = b"" if number is None else b"".join(self.request(number))
        sending = asyncio.create_task(client.send(before + wire + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"))
        if number is None or await self.hear(client, number):
            got, _ = await client.answer("GET")
            self.check(got == status, f"{wire[:90]!r}: {got}, not {status}")
            self.check(await client.is_at_end(), f"{wire[:90]!r}: more than a refusal")
        await sending
        return False

    async def hear(self, client: Client, number: int) -> bool:
        """Read an answer, compare it with the plan, and return whether another may be asked."""
        plan = self.plans[number]
        try:
            status, body = await client.answer(plan.method)
        except (h11.RemoteProtocolError, ConnectionError):
            self.check(plan.ends == "dies", f"{number}: cut, though nobody died")
            return False
        if "x-number" not in client.headers:  # it is the proxy's own
            is_told = plan.ends == "dies" or not plan.is_seen or self.was_closed_unsaid()
            self.check(is_told and status in (500, 502), f"{number}: {status}, though nobody died")
        else:
            is_whole = plan.ends != "dies" or self.cannot_tell(plan)
            self.check(status == plan.status, f"{number}: {status}, not {plan.status}")
            self.check(client.headers.get("x-number") == str(number), f"{number}: {client.headers}")
            self.check(client.headers.get("x-kept") == "yes" and "x-hop" not in client.headers, f"{client.headers}")
            self.check("keep-alive" not in client.headers, f"{number}: {client.headers}")
            self.check(body == plan.answer or (is_whole and plan.ends == "dies"), f"{number}: {len(body)} bytes")
            self.check(is_whole, f"{number}: whole, though its worker died")
        self.check(client.is_closing >= plan.is_last, f"{number}: the connection stays open")
        return not client.is_closing

    def cannot_tell(self, plan: Plan) -> bool:
        """Whether an answer that broke off looks whole, since its head is all that says where it ends."""
        return plan.framing == "until close" or not plan.answer

    def was_closed_unsaid(self) -> bool:
        """Whether a worker may have closed a connection at the moment in which it was used again."""
        return any(plan.is_seen and plan.ends == "unsaid close" for plan in self.plans.values())


class Client:
    """Sends bytes as they are, and reads answers with h11."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, life: Life) -> None:
        self.reader, self.writer, self.life = reader, writer, life
        self.unread = b""
        self.headers: dict[str, str] = {}
        self.is_closing = False

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):  # the server says why
            for piece in self.life.pieces(data):
                self.writer.write(piece)
                await self.writer.drain()
                await asyncio.sleep(0)

    async def read_head(self) -> bytes:
        while b"\r\n\r\n" not in self.unread:
            data = await self.reader.read(65536)
            if not data:
                return self.unread
            self.unread += data
        head, _, self.unread = self.unread.partition(b"\r\n\r\n")
        return head + b"\r\n"

    async def answer(self, method: str) -> tuple[int, bytes]:
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "test")]))
        parser.send(h11.EndOfMessage())
        if self.unread:
            parser.receive_data(self.unread)
        status, pieces = 0, []
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                parser.receive_data(await self.reader.read(65536))
            elif isinstance(event, h11.Response):
                status, self.headers = event.status_code, {k.decode(): v.decode() for k, v in event.headers}
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError
        self.unread = parser.trailing_data[0]
        self.is_closing = parser.their_state is not h11.DONE
        return status, b"".join(pieces)

    async def is_at_end(self) -> bool:
        with suppress(ConnectionResetError):
            return not self.unread and not await self.reader.read(1)
        return True


@pytest.mark.parametrize("seed", LIVES)
async def test_a_random_life_of_clients_and_workers(
    seed: int, serve: Any, worker: Any, make_pool: Any, forward_to: Any
) -> None:
    life = Life(seed, 0)
    pool, made = await make_pool(), await worker(life.work)
    server = await serve(forward_to(pool, made.url), linger_timeout_s=0.05, close_timeout_s=5.0)
    life.port = server.port
    async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
        for _ in range(3):
            clients.create_task(life.be_a_client())
    assert life.faults == []
    for task in made.tasks:
        if task.done() and not task.cancelled():
            assert task.exception() is None
    async with asyncio.timeout(60):
        while server.statistics().num_connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert server.statistics().num_body_bytes_held == 0
    assert server.statistics().num_handler_failures == 0
