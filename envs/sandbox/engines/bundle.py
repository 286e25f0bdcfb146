"""Bundle of the agent as one piece of code, and the way it gets into a sandbox.

The first process of a sandbox is `/bin/sh -c BOOT`. It waits for one line, the host's greeting, and becomes Python.
`LOADER` answers with the greeting and the magic number of its bytecode. Then the host sends the agent: as bytecode if
that Python has the host's magic number, else as source. `greet` is the host's side of this, up to the point at which
the agent answers calls; `envs.sandbox.local.sandbox.LocalSandbox` calls it.
"""

from __future__ import annotations

import importlib.util
import marshal
import re
import secrets
import struct
from functools import cache
from pathlib import Path

import anyio
import msgspec

from envs.sandbox.engines.backend import Link
from flash.errors import SandboxStartError

PARTS = ("wire", "loop", "process", "command", "shell", "files", "main")
"""Modules of the agent, each after the modules that it needs."""
_OWN_IMPORT = re.compile(r"^from envs\.\S+ import (?:\([^)]*\)|.*)\n", re.MULTILINE)
"""Pattern of the imports between modules of the agent, which the joined text does not need."""
FOLDER = Path(__file__).parent.parent / "agent"
"""Folder of the agent's modules."""
HEADER = struct.Struct(">cII")
"""Header before the agent: `m` for bytecode or `s` for source, length of the code, length of the options."""

BOOT = """\
IFS= read -r greeting || exit 0
for python in python3 /usr/bin/python3 /usr/local/bin/python3; do
  if command -v "$python" >/dev/null 2>&1; then exec "$python" -ISc "$1" "$greeting"; fi
done
echo "the image has no Python" >&2
exit 1
"""
"""Shell script of a sandbox's first process. `$1` is the loader. It becomes the first Python that the image has."""
LOADER = """\
import os, sys, marshal, _frozen_importlib_external as f


def get(n):
    b = b''
    while len(b) < n:
        p = os.read(0, n - len(b))
        if not p: os._exit(0)
        b += p
    return b
os.write(1, (sys.argv[1] + ' ' + f.MAGIC_NUMBER.hex() + '\\n').encode())
h = get(9)
c, o = (get(int.from_bytes(h[i:i + 4], 'big')) for i in (1, 5))
s = {'__name__': 'flash_agent'}
exec(marshal.loads(c) if h[:1] == b'm' else compile(c, 'flash_agent', 'exec'), s)
s['main'](s['unpack'](o)[0])
"""
"""Python program that answers the greeting, receives the agent and its options, and calls the agent's `main`."""


_NOISE_LIMIT = 1 << 14
"""Bytes before the answer to the greeting that are accepted as messages of the image's shell or Python."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options that the agent gets before its first call."""

    workdir: str
    """Working directory of commands."""
    lifetime: float = msgspec.field(name="life")
    """Seconds after which the agent ends by itself, with or without a host."""
    orphan: float
    """Seconds that the agent waits without a host for one that takes over."""
    cgroup: bool
    """True if /sys/fs/cgroup describes this sandbox alone."""
    address: str = ""
    """Abstract socket on which it waits for a host that takes over; empty: the agent ends with its host."""
    secret: str = ""
    """Secret that a host needs to take over."""


def command() -> list[str]:
    """Return the command of a sandbox's first process."""
    return ["/bin/sh", "-c", BOOT, "box", LOADER]


@cache
def source() -> str:
    """Return the agent's modules as one text, without the imports of each other."""
    return "\n".join(_OWN_IMPORT.sub("", (FOLDER / f"{part}.py").read_text()) for part in PARTS)


@cache
def _code() -> bytes:
    """Return the agent as bytecode of this process's Python, without docstrings."""
    return marshal.dumps(compile(source(), "flash_agent", "exec", optimize=2, dont_inherit=True))


def load(magic: str, options: Options, prelude: str = "") -> bytes:
    """Return the bytes to send to a loader whose bytecode has this magic number.

    Args:
        magic: the magic number, in hexadecimal.
        options: options of the agent.
        prelude: source that runs before the agent; for tests.
    """
    encoded = msgspec.msgpack.encode(options)
    if magic == importlib.util.MAGIC_NUMBER.hex() and not prelude:
        code, kind = _code(), b"m"
    else:
        code, kind = (prelude + "\n" + source()).encode(), b"s"
    return HEADER.pack(kind, len(code), len(encoded)) + code + encoded


class Hello(msgspec.Struct, frozen=True):
    """Facts about the agent that it reports in its first answer."""

    uid: int
    """User id that commands run as."""
    workdir: str
    """Working directory of commands."""
    bash: bool
    """True if the image has bash, which sessions need."""
    writable: bool
    """True if files can be written to the working directory."""
    protected: bool
    """True if other processes of the sandbox can neither read the agent's memory nor use its descriptors."""
    lifetime: float = msgspec.field(name="life")
    """Seconds until the agent ends by itself."""
    sessions: list[str] = []
    """Names of the open sessions, of an earlier host."""


async def greet(link: Link, options: Options, seconds: float, prelude: str = "") -> bytes:
    """Start the agent at the other end of a link. Returns the bytes that it has sent after its answer.

    Args:
        link: link to the first process of the sandbox, which runs `BOOT`.
        options: options of the agent.
        seconds: time that it has to answer.
        prelude: source that runs before the agent; for tests.

    Raises:
        SandboxStartError: the agent did not answer within `seconds`; or the first process of the sandbox ended, or sent
            too many other bytes. The message quotes the end of these bytes.
        SandboxLostError: the link broke.
    """
    greeting = secrets.token_hex(16)
    got = b""
    with anyio.move_on_after(seconds) as scope:
        await link.send(greeting.encode() + b"\n")
        while True:
            _, found, after = got.partition(greeting.encode() + b" ")
            line, end, rest = after.partition(b"\n")
            if found and end:
                await link.send(load(line.decode("ascii", "replace"), options, prelude))
                return rest
            data = await link.receive()
            if not data or len(got) > _NOISE_LIMIT:
                # `transcript` has what the first process wrote to its standard error.
                said = (got + data + link.transcript).decode("utf-8", "replace").strip()[-500:] or "nothing"
                raise SandboxStartError(
                    f"the sandbox ended before its agent answered. Its output was: {said}. Its image needs a working "
                    "/bin/sh and a working Python 3.6 or newer"
                )
            got += data
    assert scope.cancelled_caught
    raise SandboxStartError(f"waited {seconds:g} s for the agent of the sandbox; is the machine overloaded?")
