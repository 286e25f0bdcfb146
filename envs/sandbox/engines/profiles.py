"""The profiles: which settings a container gets. One place for all of them; `doctor` measures the effect.

    control              strict                     build                      compat
    user                 1000:1000                  1000:1000                  the image's
    capabilities         none                       none                       those that package managers need
    no-new-privileges    yes                        yes                        yes
    seccomp              Docker's default, under Podman what is equal to it (`envs.sandbox.engines.seccomp`)
    masked paths         the engine's default       the engine's default       the engine's default
    root file system     read-only                  its own layer, watched     its own layer, watched
    /work                in memory, sized           in its layer               in its layer
    /tmp /run /var/tmp   in memory, sized           in memory, sized           in memory, sized
    memory               limit, no swap             limit, no swap             limit, no swap
    processes, CPU       limited                    limited                    limited
    network              none                       none, or bridge            none, or bridge

Nothing of the host is mounted, no port is published, no variable of the host's environment is passed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines import bundle
from flash.errors import SandboxRefusedError

USER = "1000:1000"
"""Whom commands run as, except under `compat`."""
MIB = 1 << 20
TMP_MIB = 64
"""Size of /tmp; its content counts as memory of the sandbox."""
SMALL_MIB = 16
"""Size of /run, /var/tmp and /dev/shm, where programs expect to be able to write."""
OPEN_FILES = 4096
"""Descriptors of one process."""
OOM_SCORE = 500
"""Added badness: a sandbox is to be killed rather than the service."""
COMPAT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID")
"""Enough for `apt`, `pip` and `su` as root of the container; no network, device, trace or mount capability."""


class ProfileSettings(msgspec.Struct, frozen=True):
    """What differs between profiles."""

    user: str | None
    capabilities: tuple[str, ...]
    read_only: bool
    networks: tuple[str, ...]


PROFILES = {
    "strict": ProfileSettings(USER, (), True, ("none",)),
    "build": ProfileSettings(USER, (), False, ("none", "bridge")),
    "compat": ProfileSettings(None, COMPAT_CAPABILITIES, False, ("none", "bridge")),
}


def check(spec: Spec) -> ProfileSettings:
    """The profile of a spec.

    Raises:
        SandboxRefusedError: the spec asks for what its profile does not allow.
    """
    profile = PROFILES[spec.profile]
    if spec.network not in profile.networks:
        raise SandboxRefusedError(
            f"profile {spec.profile} gives no network {spec.network!r}; use profile `build` or `compat`"
        )
    if spec.require_runtime and not spec.runtime:
        raise SandboxRefusedError("require_runtime needs a runtime to require; name one, such as `runsc`")
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise SandboxRefusedError(f"{name!r} cannot be the name of an environment variable")
    return profile


def work_in_memory(spec: Spec) -> bool:
    """Whether the working directory is a file system in memory, and so no part of the container's layer."""
    return PROFILES[spec.profile].read_only


def owner_of_work(spec: Spec) -> int | None:
    """Who must own the working directory in the container's layer; None where nothing has to be done for that."""
    profile = PROFILES[spec.profile]
    return None if profile.read_only or profile.user is None else int(profile.user.partition(":")[0])


def container(spec: Spec, labels: dict[str, str], *, owned_tmpfs: bool, seccomp: Path | None) -> dict[str, object]:
    """The engine's configuration of a container, in the form of Docker's API.

    Args:
        spec: what is wanted.
        labels: of the container.
        owned_tmpfs: whether the engine can give a file system in memory an owner: Docker can, Podman refuses.
        seccomp: a file with a system call filter; None: the engine's own.

    Raises:
        SandboxRefusedError: as of `check`.
    """
    profile = check(spec)
    memory = spec.memory_mib * MIB
    config: dict[str, object] = {
        "Image": spec.image,
        "Entrypoint": bundle.command()[:1],
        "Cmd": bundle.command()[1:],
        "Env": [f"{name}={value}" for name, value in {"HOME": spec.workdir, **spec.env}.items()],
        "WorkingDir": spec.workdir,
        "Labels": labels,
        "Hostname": "sandbox",
        "OpenStdin": True,
        "StdinOnce": False,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "NetworkDisabled": spec.network == "none",
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "HostConfig": {
            "NetworkMode": spec.network,
            "CapDrop": ["ALL"],
            "CapAdd": list(profile.capabilities),
            "SecurityOpt": ["no-new-privileges", *([f"seccomp={seccomp}"] if seccomp else [])],
            "Privileged": False,
            "ReadonlyRootfs": profile.read_only,
            "Tmpfs": _tmpfs(spec, profile, owned=owned_tmpfs),
            "ShmSize": SMALL_MIB * MIB,
            "Memory": memory,
            # Equal to Memory: no swap, which would double the limit without this.
            "MemorySwap": memory,
            "OomScoreAdj": OOM_SCORE,
            "NanoCpus": int(spec.cpus * 1e9),
            "PidsLimit": spec.pids,
            "Ulimits": [
                # Given explicitly: the engine's defaults may lie above what it may set itself.
                {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
                {"Name": "nproc", "Soft": 1 << 15, "Hard": 1 << 15},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
            # Unbounded logs of a talkative container would fill the host's disk.
            "LogConfig": {"Type": "none"},
            "IpcMode": "private",
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
            "Init": False,
            **({"Runtime": spec.runtime} if spec.runtime else {}),
        },
    }
    if profile.user is not None:
        config["User"] = profile.user
    return config


def _tmpfs(spec: Spec, profile: ProfileSettings, *, owned: bool) -> dict[str, str]:
    """File systems in memory. Programs may be run from them: compilers write to /tmp what is then run."""
    # runc gives the mount the mode of the image's folder, whatever mode is asked for; then only the owner may write.
    owner = "uid={},gid={},".format(*profile.user.split(":")) if owned and profile.user else ""
    sizes = {"/tmp": TMP_MIB, "/run": SMALL_MIB, "/var/tmp": SMALL_MIB}
    if profile.read_only:
        sizes[spec.workdir] = spec.disk_mib
    return {path: f"rw,nosuid,nodev,exec,{owner}mode=1777,size={size}m" for path, size in sizes.items()}
