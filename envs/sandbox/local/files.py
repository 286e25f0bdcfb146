"""Files of a sandbox, over the channel to its agent."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal

import anyio
import msgspec

from envs.sandbox.api import FileInfo
from envs.sandbox.local.channel import OUTPUT_WINDOW, Channel, decode, in_time
from envs.sandbox.local.commands import ANSWER_SECONDS, Ending, HasAgent, encoded_path
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError, SandboxLostError

READ_LIMIT = 1 << 26
"""Most bytes that one `read` returns."""
READ_PIECE = 1 << 20
"""Bytes that are requested from the agent at a time."""
WRITE_LIMIT = 1 << 28
"""Most bytes that one `write` takes."""
LIST_ROOM = 1 << 26
"""Most bytes of one listing."""
TREE_SECONDS = 600.0
"""Seconds to copy or remove a tree."""
ARCHIVE_BYTES = 1 << 26
"""Bytes that an archive may have beyond twice the size of its files, since each file has a header of up to 2 KiB."""
_NO_ROOM = ("No space left", f"Errno {errno.EFBIG}")
"""Parts of the agent's error messages that mean that a limit was reached."""
_Entry = tuple[bytes, Literal["file", "folder", "link", "other"], int, int, float]
"""Entry of a folder as the agent sends it: name, kind, size, mode, modification time."""


async def read_file(agent: HasAgent, path: str, offset: int, limit: int | None) -> bytes:
    """Return bytes of a regular file, from `offset` on: at most `limit`, or all.

    Raises:
        SandboxFileError: the file cannot be read, or changed meanwhile.
        SandboxLimitError: more than `READ_LIMIT` bytes.
    """
    if offset < 0 or (limit is not None and limit < 0):
        raise SandboxFileError(f"{path}: offset and limit cannot be negative")
    if limit is not None and limit > READ_LIMIT:
        raise SandboxLimitError(f"{path}: one read gives {READ_LIMIT} bytes, not {limit}; read it in ranges")
    channel = await agent.channel()
    wanted = READ_LIMIT + 1 if limit is None else limit
    data, first = bytearray(), None
    while len(data) < wanted or first is None:
        size = min(wanted - len(data), READ_PIECE)
        asked = {"path": encoded_path(path), "offset": offset + len(data), "limit": size}
        identity, output = await channel.ask("read", asked, list[int], ANSWER_SECONDS, room=size)
        if first not in (None, identity):
            raise SandboxFileError(f"{path}: changed while it was read; try again")
        first, piece = identity, output.get("stdout", b"")
        data += piece
        if len(piece) < size or not size:
            break
    if len(data) > READ_LIMIT:
        raise SandboxLimitError(f"{path}: has more than the {READ_LIMIT} bytes of one read; read it in ranges")
    return bytes(data)


async def write_file(agent: HasAgent, path: str, data: bytes, mode: int, append: bool) -> None:
    """Replace a file in one step, or append to it. `mode` holds the permissions of a new file."""
    if len(data) > WRITE_LIMIT:
        raise SandboxLimitError(f"{path}: one write takes {WRITE_LIMIT} bytes, not {len(data)}")
    channel = await agent.channel()
    asked = {"path": encoded_path(path), "mode": mode & 0o7777, "append": append}
    timeout = ANSWER_SECONDS + len(data) / (1 << 20)
    async with channel.call("write", asked, timeout) as call:
        await call.send(data, last=True)
        await call.result(type(None))


async def list_folder(agent: HasAgent, path: str) -> list[FileInfo]:
    """Return the entries of a folder."""
    channel = await agent.channel()
    entries: list[FileInfo] = []
    async with channel.call("list", {"path": encoded_path(path)}, ANSWER_SECONDS, room=LIST_ROOM) as call:
        while not isinstance(piece := await call.next(), msgspec.Raw):
            batch = decode(piece[1], list[_Entry])
            if any(b"/" in name or b"\0" in name for name, *_ in batch):
                raise SandboxLostError(f"{path}: the agent sent a name that no file can have")
            entries += [FileInfo(os.fsdecode(name), kind, size, mode, at) for name, kind, size, mode, at in batch]
    return entries


async def remove_path(agent: HasAgent, path: str) -> None:
    """Remove a file, a link or a folder."""
    if path.rstrip("/") in ("", ".", ".."):
        raise SandboxFileError(f"{path!r}: not a path that can be removed")
    await _work(agent, await agent.channel(), "remove", path)


def _argument(agent: HasAgent, function: str, path: str, **more: object) -> dict[str, object]:
    """Return the argument of the operation `work`, which runs one of the agent's functions on a path."""
    limit = agent.spec.output_limit
    return {"timeout": TREE_SECONDS, "limit": limit, "function": function, "path": encoded_path(path), **more}


async def put_archive(agent: HasAgent, path: str, pieces: AsyncIterator[bytes]) -> None:
    """Unpack a tar archive in the sandbox while its pieces arrive."""
    channel = await agent.channel()
    asked = _argument(agent, "receive", path, feed=True)
    async with channel.call("work", asked, TREE_SECONDS + ANSWER_SECONDS, room=2 * agent.spec.output_limit) as call:
        async for piece in pieces:
            await call.send(piece)
        await call.send(b"", last=True)
        _check(path, (await call.result(Ending))[0])


async def _work(agent: HasAgent, channel: Channel, function: str, path: str) -> None:
    """Run one of the agent's functions on a path, to its end."""
    asked = _argument(agent, function, path)
    ending, _ = await channel.ask(
        "work", asked, Ending, TREE_SECONDS + ANSWER_SECONDS, room=2 * agent.spec.output_limit
    )
    _check(path, ending)


async def restore(agent: HasAgent, channel: Channel, workdir: str) -> None:
    """Fill the working directory with the files of the snapshot, if the image stores them separately."""
    await _work(agent, channel, "restore", workdir)


async def send_tree(
    agent: HasAgent, path: str, most: int | None = None, heads: int = ARCHIVE_BYTES
) -> AsyncGenerator[bytes]:
    """Yield a file or tree of the sandbox as a tar stream.

    Args:
        agent: the sandbox.
        path: the file or folder.
        most: most bytes of the files' content, holes included; None: no limit.
        heads: bytes that the stream may have beyond twice `most`.

    Raises:
        SandboxLimitError: the content exceeds `most`, and the message names the file; or the stream is too long,
            whatever the agent reports.
    """
    channel = await agent.channel()
    more = {} if most is None else {"most": most}
    room = math.inf if most is None else 2 * most + heads
    asked = _argument(agent, "send", path, stream=True, credit=OUTPUT_WINDOW, **more)
    deadline = anyio.current_time() + TREE_SECONDS
    call = await channel.open("work", asked, room=2 * OUTPUT_WINDOW)
    transcript = b""
    try:
        while True:
            with in_time("send", max(ANSWER_SECONDS, deadline - anyio.current_time())):
                piece = await call.next()
            if isinstance(piece, msgspec.Raw):
                _check(path, decode(piece, Ending), transcript)
                return
            data = decode(piece[1], bytes)
            await call.grant(data)
            if piece[0] == "stderr":
                transcript = (transcript + data)[:4096]
            else:
                room -= len(data)
                if room < 0:
                    raise SandboxLimitError(f"{path}: too many files for an archive of {most} bytes of content")
                yield data
    finally:
        await channel.finish(call)


def _check(path: str, ending: Ending, transcript: bytes = b"") -> None:
    """Raise the error of a function of the agent that failed."""
    if ending.exit_code == 0 and not ending.timed_out:
        return
    text = (transcript + ending.stderr).decode("utf-8", "replace").strip()[:500]
    if ending.oom_killed or ending.timed_out or any(each in text for each in _NO_ROOM):
        raise SandboxLimitError(f"{path}: {text or 'took too long, or too much memory'}")
    error: type[SandboxError] = SandboxFileError
    raise error(f"{path}: {text or f'failed with {ending.signal or ending.exit_code}'}")
