"""Bundle of the agent as one piece of code, and the way it gets into a sandbox.

The first process of a sandbox is `/bin/sh -c BOOT`. It waits for one line, the host's greeting, and becomes Python.
`LOADER` answers with the greeting and the magic number of its bytecode. Then the host sends the agent: as bytecode if
that Python has the host's magic number, else as source.
"""

from __future__ import annotations

import importlib.util
import marshal
import re
import struct
from functools import cache
from pathlib import Path

import msgspec

PARTS = (
    "wire", "loop", "launcher", "proc", "process", "leftovers", "command", "bash", "shell", "paths", "files",
    "archives", "calls", "takeover", "main",
)  # fmt: skip
"""Modules of the agent, each after the modules that it needs."""
_OWN_IMPORT = re.compile(r"^from envs\.\S+ import (?:\([^)]*\)|.*)\n", re.MULTILINE)
FOLDER = Path(__file__).parent.parent / "agent"
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


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options that the agent gets before its first call."""

    workdir: str
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
