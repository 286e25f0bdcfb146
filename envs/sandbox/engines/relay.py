"""The relay: a process of the container that joins a new host to the agent, when the agent's own host is gone.

It is told the agent's secret, so no program of the sandbox may trace, signal or read it, from its first moment on. That
is the kernel's doing: it is another user's, root without a capability. And none may choose what it runs: its variables
are none of the spec's, and its Python is looked for only where the sandbox's user cannot write. Where programs may be
root themselves (`compat`) there is no such user; those sandboxes are not taken over.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from flash.errors import SandboxLostError

USER = "0"
"""Whom it runs as. Root of a container has the capabilities that the container has: none."""
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Where programs are that belong to root in every image."""
WRITABLE = ("/tmp", "/run", "/var/run", "/var/tmp", "/dev", "/proc")
"""Where a sandbox's user can write although its root file system is read-only, and in its working directory."""
SCRIPT = """\
import os, select, socket, struct, sys
try:
    import _ctypes as c
    c.call_function(c.dlsym(c.dlopen(None, 2), 'prctl'), (4, 0, 0, 0, 0))
except Exception: pass
s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1])
assert struct.unpack('iii', s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] == 1
while True:
    for f in select.select([0, s], [], [])[0]:
        b = os.read(0, 65536) if f == 0 else s.recv(65536)
        if not b: os._exit(0)
        if f == 0: s.sendall(b)
        while f != 0 and b: b = b[os.write(1, b):]
"""
"""Joins an exec to the agent's socket. Trusts only the first process of the container; hides from the others."""
FIND_PYTHON = """\
for python in python3 /usr/bin/python3 /usr/local/bin/python3; do
  if command -v "$python" >/dev/null 2>&1; then exec "$python" -ISc "$1" "$2"; fi
done
"""


def command(address: str) -> list[str]:
    """What is run in the container."""
    return ["/bin/sh", "-c", FIND_PYTHON, "relay", SCRIPT, address]


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Its variables, from what the engine says of the container: all of the container's are emptied.

    Raises:
        SandboxLostError: programs of this container may be of any user.
    """
    config = container["Config"]
    if str(config.get("User") or "0").partition(":")[0] in ("", "0", "root"):
        raise SandboxLostError(
            "its programs may be root, as the process would be by which another host takes over; such a sandbox ends "
            "with its host"
        )
    given = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    folders = [*FOLDERS]
    if container["HostConfig"].get("ReadonlyRootfs"):
        unsafe = (*WRITABLE, str(config.get("WorkingDir") or "/"))
        folders += [folder for folder in given.get("PATH", "").split(":") if _is_safe(folder, unsafe)]
    return {**dict.fromkeys(given, ""), "HOME": "/", "PATH": ":".join(folders)}


def _is_safe(folder: str, unsafe: tuple[str, ...]) -> bool:
    path = posixpath.normpath(folder)
    return folder.startswith("/") and not any(path == each or path.startswith(f"{each}/") for each in unsafe)
