"""Fuzzes the port of the sandbox service: a client works in a sandbox while others ask for anything.

What is wrong is in heads, paths, queries and bodies, made from the service's own table of endpoints, and in bytes. The
sandboxes of this test are local processes without any isolation: hostile requests never name one that lives, but for
the running of one harmless command.

Oracles: no answer says that the service itself failed (5xx but 503), errors are problem documents, nothing is logged
with a traceback, connections end, and the working client's commands go on.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import anyio
import httpx

from envs.sandbox.protocol import PROBLEM_JSON
from envs.sandbox.service.endpoint import Endpoint
from envs.sandbox.service.web import ENDPOINTS
from tests.envs.sandbox.raw import END_S, bare, bearer, connected, head
from tests.envs.sandbox.services import SPEC, TOKEN, Running, running
from tests.fuzz.hub import Records
from tests.fuzz.mutate import HOSTILE, damaged, flipped

WORK_EVERY = 25
"""Requests between two commands of the working client."""
NAMES = ("", "x", "..", "%2e%2e", "a/b", "\x00", "é", "x" * 3000, "-1", "0", "' OR 1", "\r\nset-cookie: x=1", "{id}")
"""What may stand for a part of a path."""
BODIES: tuple[dict[str, Any], ...] = (
    {"command": ["true"], "timeout": 5.0, "env": {"A": "b"}, "cwd": "."},
    {"owner": "me", "priority": 0, "on_lost": "fail", "lease_s": 5.0},
    {"command": "true", "timeout": 5.0},
    {"signal": "TERM"},
    {"count": 2},
)
"""None of them a whole order of a sandbox."""


def query(endpoint: Endpoint, rng: Random) -> dict[str, str]:
    """Some of what this endpoint takes, and something it does not."""
    fields: Sequence[str] = getattr(endpoint.query, "__struct_fields__", ())
    values = ("", "0", "-1", "1e400", "nan", "true", "9" * 400, "/etc/passwd", "..", "\x00", "é", "[]", "1")
    found = {name: rng.choice(values) for name in fields if rng.random() < 0.7}
    if rng.random() < 0.2:
        found[rng.choice(("x", "", "path", "token"))] = rng.choice(values)
    return found


def content(rng: Random) -> tuple[bytes, dict[str, str]]:
    """A body and the headers that speak of it."""
    kinds = ("application/json", "application/msgpack", "application/octet-stream", "text/plain", "", "x" * 500)
    headers = {"content-type": rng.choice(kinds)} if rng.random() < 0.9 else {}
    if rng.random() < 0.3:
        headers["idempotency-key"] = rng.choice(("", "a", "x" * 1000, "\t", "same"))
    roll = rng.random()
    if roll < 0.1:
        return rng.randbytes(rng.choice((0, 1, 100, 5000))), headers
    if roll < 0.15:
        return b"[" * rng.choice((10, 1100, 100_000)), headers
    made: Any = damaged(rng.choice(BODIES), rng)
    data = json.dumps(made, default=lambda value: value.decode("latin-1")).encode("utf-8", "surrogatepass")
    return (flipped(data, rng) if rng.random() < 0.2 else data), headers


async def ask(client: httpx.AsyncClient, live: str, rng: Random) -> int:
    """One hostile request; the status of its answer."""
    if rng.random() < 0.15:
        value = {"command": ["true"], "timeout": 5.0} | {rng.choice(("timeout", "env", "stdin", "x")): _plain(rng)}
        answer = await client.post(f"/v1/sandboxes/{live}/run", content=json.dumps(value))
    else:
        endpoint = rng.choice(ENDPOINTS)
        path = re.sub(r"{\w+}", lambda _: quote(rng.choice(NAMES), safe="%/"), endpoint.path)
        data, headers = content(rng)
        method = endpoint.method if rng.random() < 0.9 else rng.choice(("GET", "PUT", "PATCH", "TRACE", "BREW"))
        answer = await client.request(method, path, params=query(endpoint, rng), content=data, headers=headers)
    assert answer.status_code < 500 or answer.status_code == 503, f"{answer.request.url}: {answer.text[:300]}"
    if answer.status_code >= 400 and answer.content and answer.status_code not in (401, 404, 405):
        assert answer.headers["content-type"] == PROBLEM_JSON, f"{answer.request.url}: {answer.text[:300]}"
        assert "Traceback" not in answer.text
    return answer.status_code


def _plain(rng: Random) -> Any:
    """Something hostile that JSON can say."""
    return rng.choice([value for value in HOSTILE if not isinstance(value, bytes)])


async def shout(world: Running, rng: Random) -> None:
    """Bytes that are nearly a request, and the end of the connection."""
    upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: x")
    lines = rng.choice(
        ((), ("content-length: 5",), ("transfer-encoding: chunked",), ("expect: 100-continue",), upgrade)
    )
    path = rng.choice(("/v1/status", "/", "/v1/sandboxes/none/terminal", "/v1/sandboxes/none/run"))
    data = head(rng.choice(("GET", "POST")), path, *lines, token=rng.choice((TOKEN, None)))
    data += rng.choice((b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffff\r\n", rng.randbytes(200)))
    if rng.random() < 0.7:
        data = flipped(data, rng)
    async with connected(world) as connection:
        with suppress(anyio.BrokenResourceError):
            await connection.stream.send(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
            if rng.random() < 0.2:
                return
            await connection.stream.send_eof()
        assert await connection.ended(), f"{data[:200]!r} holds its connection"


async def fuzz(requests: int, seed: int) -> dict[str, int]:
    """So many; raises AssertionError, naming the request's seed, where an oracle does not hold."""
    records, counts = Records(), {"asked": 0, "refused": 0, "shouted": 0, "worked": 0}
    logging.getLogger().addHandler(records)
    try:
        with TemporaryDirectory() as folder:
            async with (
                running(Path(folder)) as world,
                world.client.acquire(SPEC) as sandbox,
                bare(world, **bearer()) as client,
            ):
                for number in range(requests):
                    try:
                        await _one(world, client, sandbox.sandbox_id, Random(f"{seed}/{number}"), counts)
                        if number % WORK_EVERY == 0:
                            done = await sandbox.run(f"echo {number}", timeout=10)
                            assert done.stdout == f"{number}\n".encode()
                            counts["worked"] += 1
                        assert not records.bad, records.bad
                    except Exception as error:
                        raise AssertionError(f"service: seed {seed}, request {number}: {error!r}") from error
    finally:
        logging.getLogger().removeHandler(records)
    return counts


async def _one(world: Running, client: httpx.AsyncClient, live: str, rng: Random, counts: dict[str, int]) -> None:
    if rng.random() < 0.3:
        await shout(world, rng)
        counts["shouted"] += 1
        return
    with anyio.fail_after(END_S), suppress(httpx.InvalidURL, httpx.LocalProtocolError):
        counts["refused"] += await ask(client, live, rng) >= 400
    counts["asked"] += 1
