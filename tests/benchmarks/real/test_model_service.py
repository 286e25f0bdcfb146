"""The driver of the benchmark of the endpoint for agents counts what it gets."""

from __future__ import annotations

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks.real.model_service import TURNS, play_turns, question

REFUSAL = b'{"error": {"message": "the engine is dead"}}'


def in_one_piece(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def streamed(*events: bytes) -> bytes:
    chunks = [b"data: " + event + b"\n\n" for event in events]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def said(content: str) -> bytes:
    return in_one_piece(msgspec.json.encode({"choices": [{"message": {"content": content}}]}))


def delta(content: str) -> bytes:
    return msgspec.json.encode({"choices": [{"delta": {"content": content}}]})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("number", "answers"),
    [
        (4, {1: in_one_piece(REFUSAL), 2: said("5-2.xx"), 3: said("4-2.xx")}),
        (
            5,
            {
                1: in_one_piece(REFUSAL),
                2: streamed(delta("4-2"), delta(".xx"), b"[DONE]"),
                3: streamed(delta("5-2"), delta(".xx"), b"[DONE]"),
                4: streamed(delta("5-4.x"), REFUSAL),
            },
        ),
    ],
    ids=["in one piece", "streamed"],
)
async def test_only_calls_with_the_right_answer_have_a_time(number: int, answers: dict[int, bytes]) -> None:
    """Errors, before or in a stream, are lost answers, and answers to other questions are crossed ones."""

    async def serve(connection: SocketStream) -> None:
        async with connection:
            received = BufferedByteReceiveStream(connection)
            for turn in range(TURNS):
                head = await received.receive_until(b"\r\n\r\n", 1 << 16)
                await received.receive_exactly(int(head.rpartition(b" ")[2]))
                right = f"{question(number, turn)}.xx"
                whole = streamed(delta(right), b"[DONE]") if number % 2 else said(right)
                await connection.send(answers.get(turn, whole))

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        with anyio.fail_after(30):
            async with await anyio.connect_tcp("127.0.0.1", listener.extra(SocketAttribute.local_port)) as stream:
                found = await play_turns(stream, "key", number)
        tasks.cancel_scope.cancel()
    assert found["crossed"] == 2
    assert found["lost"] == len(answers) - 2
    assert [*found["took"]] == [question(number, turn) for turn in range(TURNS) if turn not in answers]
