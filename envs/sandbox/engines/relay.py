"""Relay: a process of the container that connects a new host to the agent, after the agent's own host is gone.

The relay receives the agent's secret, so no program of the sandbox may ever trace, signal or read it. The kernel
ensures this, because the relay runs as another user: root without capabilities. And no program may choose what the
relay runs: it gets none of the spec's environment variables, and looks for Python only where the sandbox's user cannot
write. If programs may be root themselves (`compat`), there is no such user, and those sandboxes are not taken over.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from flash.errors import SandboxLostError

USER = "0"
"""User that the relay runs as. Root of a container has the container's capabilities, which are none."""
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Folders of programs that belong to root in every image."""
WRITABLE = ("/tmp", "/run", "/var/run", "/var/tmp", "/dev", "/proc")
"""Folders where a sandbox's user can write although the root file system is read-only, beside the working directory."""
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
"""Program that joins an exec to the agent's socket. It trusts only the container's first process, and hides its memory
from all others."""
FIND_PYTHON = """\
for python in python3 /usr/bin/python3 /usr/local/bin/python3; do
  if command -v "$python" >/dev/null 2>&1; then exec "$python" -ISc "$1" "$2"; fi
done
"""


def command(address: str) -> list[str]:
    """Return the command that runs in the container."""
    return ["/bin/sh", "-c", FIND_PYTHON, "relay", SCRIPT, address]


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the relay's environment variables. Every variable of the container is emptied.

    Args:
        container: the engine's description of the container.

    Raises:
        SandboxLostError: programs of this container may run as root.
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
