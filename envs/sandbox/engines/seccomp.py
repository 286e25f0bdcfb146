"""System call filter of sandboxes: an engine's default filter, made stricter.

Docker's default filter refuses new user namespaces and the kernel's keys to containers without capabilities; Podman's
allows both, and each has been a way out of containers. Neither is made for programs that share a user with the agent
that supervises them. So one filter is derived for both engines, which also

- lets a process change only its own limits, priority and scheduling: a program that could set a CPU limit of 0 on the
  agent would end its sandbox, and so escape its judgement;
- refuses `fallocate`, which takes gigabytes of disk in an instant, before any measurement notices it;
- opens only sockets of the families that a profile names: even without a network, `AF_VSOCK` reaches the machine's
  hypervisor, and other families reach rarely used parts of the kernel;
- refuses the system calls of other architectures, such as 32-bit ones, which no rule here covers.

Docker takes the filter with each container. Podman takes it as a file on its own machine, in a folder that only this
user may write to.
"""

from __future__ import annotations

import errno
import hashlib
import socket
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from envs.sandbox.user_folder import user_folder
from flash.errors import ConfigError, SandboxRefusedError

DEFAULTS = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
"""Paths of the default filter, in the format that Docker and Podman share."""
REFUSED = frozenset({
    "unshare", "setns", "mount", "umount", "umount2", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount",
    "fspick", "mount_setattr", "pivot_root", "keyctl", "add_key", "request_key", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "userfaultfd", "name_to_handle_at", "open_by_handle_at", "bpf", "perf_event_open",
})  # fmt: skip
"""System calls that are refused with EPERM, whatever the default filter allows."""
RESERVING = "fallocate"
"""System call that is refused with EOPNOTSUPP: the C library's `posix_fallocate` then writes the blocks one by one."""
NAMESPACES = 0x7E020000
"""Flags of `clone` that create namespaces."""
OWN_ONLY: dict[str, dict[int, int]] = {
    "sched_setaffinity": {0: 0},
    "sched_setattr": {0: 0},
    "sched_setparam": {0: 0},
    "sched_setscheduler": {0: 0},
    "setpriority": {0: 0, 1: 0},
    "ioprio_set": {0: 1, 1: 0},
}
"""System calls that change a process, with the values of the arguments (by position) that mean the caller itself.
Neither its user nor its group is allowed, because the agent belongs to them too."""
UNIX = (socket.AF_UNIX,)
"""Socket families of a profile without TCP/IP."""
INTERNET = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Socket families of a profile with TCP/IP. The filter then also allows the part of `AF_NETLINK` that lists network
interfaces."""


def tighten(profile: dict[str, Any], families: Sequence[int]) -> dict[str, Any]:
    """Return a stricter filter, as the module's docstring says, that allows only sockets of these families.

    `profile` is the engine's default filter: a dict with the list `syscalls` of rules. Rules that this module changes
    are removed from the list, and the stricter ones are added.
    """
    changed = (
        REFUSED | OWN_ONLY.keys() | {"clone", "clone3", "prlimit64", "socket", "socketpair", "socketcall", RESERVING}
    )
    rules: list[dict[str, Any]] = []
    for rule in profile["syscalls"]:
        names = [name for name in rule["names"] if name not in changed]
        if names:
            rules.append({**rule, "names": names})
    rules.append(_refuse(errno.EPERM, *sorted(REFUSED)))
    rules.append(_refuse(errno.EOPNOTSUPP, RESERVING))
    # Without any of the flags that create namespaces.
    rules.append(_allow("clone", _argument(0, "MASKED_EQ", NAMESPACES)))
    # Its flags are in memory, where no filter can read them. On ENOSYS, programs use `clone` instead.
    rules.append(_refuse(errno.ENOSYS, "clone3"))
    for name, own in OWN_ONLY.items():
        rules.append(_allow(name, *(_argument(place, "EQ", value) for place, value in own.items())))
        rules += [_refuse(errno.EPERM, name, arguments=[_argument(place, "NE", value)]) for place, value in own.items()]
    rules.append(_allow("prlimit64", _argument(0, "EQ", 0)))
    # A call without new limits (argument 2 is 0) only reads.
    rules.append(_allow("prlimit64", _argument(0, "NE", 0), _argument(2, "EQ", 0)))
    rules.append(_refuse(errno.EPERM, "prlimit64", arguments=[_argument(0, "NE", 0), _argument(2, "NE", 0)]))
    rules += _sockets(families)
    architectures = [{**entry, "subArchitectures": []} for entry in profile.get("archMap", [])]
    return {**profile, "archMap": architectures, "syscalls": rules}


def _sockets(families: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the rules that allow sockets of these families and refuse all others.

    A profile with the internet's families also gets AF_NETLINK with protocol 0, with which programs list their own
    network interfaces. A filter can only compare an argument with one value, so the families in between are refused one
    by one.
    """
    for family in families:
        yield _allow("socket", _argument(0, "EQ", family))
    yield _allow("socketpair", _argument(0, "EQ", socket.AF_UNIX))
    refused = [_argument(0, "EQ", family) for family in range(max(families)) if family not in families]
    beyond = max(families)
    if len(families) > 1:  # Only `INTERNET` has several.
        yield _allow("socket", _argument(0, "EQ", socket.AF_NETLINK), _argument(2, "EQ", 0))
        yield _refuse(
            errno.EAFNOSUPPORT, "socket", arguments=[_argument(0, "EQ", socket.AF_NETLINK), _argument(2, "NE", 0)]
        )
        refused += [_argument(0, "EQ", family) for family in range(beyond + 1, socket.AF_NETLINK)]
        beyond = socket.AF_NETLINK
    refused.append(_argument(0, "GT", beyond))
    for argument in refused:
        yield _refuse(errno.EAFNOSUPPORT, "socket", arguments=[argument])
    yield _refuse(errno.EAFNOSUPPORT, "socketpair", arguments=[_argument(0, "NE", socket.AF_UNIX)])


def _argument(place: int, compare: str, value: int) -> dict[str, Any]:
    """Return a condition of a rule: the argument at position `place`, from 0 on, compares with `value` in this way.

    `compare` is `EQ`, `NE`, `GT` or `MASKED_EQ`. With `MASKED_EQ`, none of the bits of `value` is set in the argument.
    """
    # Only `MASKED_EQ` uses `valueTwo`: the argument's bits under the mask `value` are equal to it.
    return {"index": place, "value": value, "valueTwo": 0, "op": f"SCMP_CMP_{compare}"}


def _allow(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a rule that allows a system call if all conditions hold."""
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _refuse(number: int, *names: str, arguments: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return a rule that lets system calls fail with the error `number` if all conditions hold."""
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": list(arguments)}


@cache
def filter_text(families: Sequence[int]) -> bytes | None:
    """Return the filter as JSON; None if this machine has no default filter to derive it from.

    `families` is a tuple, so that the result can be cached: the filter is the same for each container.
    """
    source = next((path for path in map(Path, DEFAULTS) if path.is_file()), None)
    if source is None:
        return None
    return msgspec.json.encode(tighten(msgspec.json.decode(source.read_bytes()), families))


def podman_filter(families: Sequence[int]) -> Path:
    """Write the filter that allows these socket families to a file, unless it is there, and return its path.

    Podman reads it at each start, and the system may clean the folder up, so this must be called for each container.

    Raises:
        SandboxRefusedError: there is no default filter, or `user_folder` cannot be used.
    """
    content = filter_text(families)
    if content is None:
        raise SandboxRefusedError(
            f"Podman's system call filter is at none of {', '.join(DEFAULTS)}; install golang-github-containers-common"
        )
    try:
        folder = user_folder()
    except ConfigError as error:
        raise SandboxRefusedError(str(error)) from error
    target = folder / f"seccomp-{hashlib.sha256(content).hexdigest()[:16]}.json"
    if not target.exists():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        Path(file.name).replace(target)
    return target
