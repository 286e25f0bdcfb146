"""Podman's system call filter, tightened to what Docker's gives.

Docker's default filter refuses new user namespaces and the kernel's keys to containers without capabilities; Podman's
allows both, and each has been a way out of containers. Podman takes a filter only as a file of its own machine, so one
is derived from its default and kept in a folder that only we may write to.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from flash.errors import SandboxRefusedError

DEFAULTS = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
"""Where Podman has its filter."""
REFUSED = frozenset({
    "unshare", "setns", "mount", "umount", "umount2", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount",
    "fspick", "mount_setattr", "pivot_root", "keyctl", "add_key", "request_key", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "userfaultfd", "name_to_handle_at", "open_by_handle_at", "bpf", "perf_event_open",
})  # fmt: skip
"""Refused with EPERM, whatever the default says."""
NAMESPACES = 0x7E020000
"""Flags of `clone` that make namespaces."""
EPERM, ENOSYS = 1, 38


def tighten(profile: dict[str, Any]) -> dict[str, Any]:
    """The same filter without `REFUSED`, and with `clone` for processes and threads only."""
    changed = REFUSED | {"clone", "clone3"}
    rules: list[dict[str, Any]] = []
    for rule in profile["syscalls"]:
        names = [name for name in rule["names"] if name not in changed]
        if names:
            rules.append({**rule, "names": names})
    flags = {"index": 0, "value": NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    rules += [
        {"names": sorted(REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [flags]},
        # Its flags lie in memory, where no filter sees them; told that it does not exist, programs use clone.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
    ]
    return {**profile, "syscalls": rules}


@cache
def podman_filter() -> Path:
    """The file to name to Podman.

    Raises:
        SandboxRefusedError: Podman's own filter is not where it should be.
    """
    source = next((path for path in map(Path, DEFAULTS) if path.is_file()), None)
    if source is None:
        raise SandboxRefusedError(
            f"Podman's system call filter is at none of {', '.join(DEFAULTS)}; install golang-github-containers-common"
        )
    content = msgspec.json.encode(tighten(msgspec.json.decode(source.read_bytes())))
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"flash-sandbox-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if info.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink() or info.st_mode & 0o022:
        raise SandboxRefusedError(f"{folder} belongs to somebody else, or others may write to it; remove it")
    target = folder / f"seccomp-{hashlib.sha256(content).hexdigest()[:16]}.json"
    if not target.exists():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        Path(file.name).replace(target)
    return target
