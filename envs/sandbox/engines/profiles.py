"""Profiles: the settings that a container gets. All of them are set in this module; `doctor` measures their effect.

`DockerContainers.create` calls `container`, and the engine enforces the result. `Spec.profile` names the column.

    control              strict                     build                      compat
    user                 its own (or 1000:1000)     1000:1000                  the image's
    capabilities         none                       none                       for package managers
    no-new-privileges    yes                        yes                        yes
    seccomp              stricter than Docker's default (`envs.sandbox.engines.seccomp`)
    sockets              AF_UNIX                    and IPv4, IPv6             and IPv4, IPv6
    masked paths         the engine's default, and files that count or list resources of all sandboxes
    root file system     read-only                  its own layer, watched     its own layer, watched
    /work                in memory, sized           in its layer               in its layer
    /tmp /run /var/tmp   in memory, sized           in memory, sized           in memory, sized
    memory               limit, no swap             limit, no swap             limit, no swap
    number of files      limited in layers, and in memory by Docker; under Podman 4.3 too many files take all memory
    processes, CPU       limited                    limited                    limited
    network              none                       none, or bridge            none, or bridge

No file of the host is mounted, no port is published, and no variable of the host's environment is passed.
"""

from __future__ import annotations

import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines import bundle
from envs.sandbox.engines.machine import LayerUse
from envs.sandbox.engines.seccomp import INTERNET, UNIX
from flash.errors import SandboxRefusedError

USER = "1000:1000"
"""User and group that commands run as, except under `compat`."""
MIB = 1 << 20
"""Bytes of a MiB."""
DISK_MIB = 256
"""Disk of a sandbox in MiB if the spec sets none."""
TMP_MIB = 64
"""Largest size of /tmp in MiB; an eighth of the memory if that is less."""
SMALL_MIB = 16
"""Largest size of /run, /var/tmp and /dev/shm in MiB; a 32nd of the memory if that is less. Programs expect to be able
to write there. Under Podman, they can write to /run only if every user may write to the image's folder, as in Flash's
images."""
RESERVE_MIB = 32
"""Memory in MiB that files cannot take, for the agent and a small program; a quarter of the memory if that is more. In
a very small sandbox it is less: files may always take a quarter of the memory."""
INODES_PER_MIB = 128
"""Files that a file system in memory can hold per MiB. Empty files take up to a kilobyte each beside its size."""
SHARED_MEMORY = "/dev/shm"
"""File system in memory that the engine mounts itself, with the size of `ShmSize`."""
MASKED = (
    "/proc/locks", "/proc/key-users", "/proc/sys/kernel/pty/nr", "/proc/sys/fs/aio-nr", "/proc/sys/fs/file-nr",
    "/proc/sys/fs/inode-nr", "/proc/sys/fs/inode-state", "/proc/sys/fs/dentry-state",
)  # fmt: skip
"""Paths where the kernel shows state of the whole machine: one sandbox could use it to send data to another."""
DOCKER_MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap",
    "/sys/firmware",
)  # fmt: skip
"""Docker's default list, which an own list replaces. Podman adds an own list to its default."""
FILES_PER_MIB = 256
"""Files, folders and links that a sandbox may have in its own layer for each MiB of its disk. Empty ones take the
host's inodes, of which a file system has a fixed number."""
OPEN_FILES = 4096
"""Most file descriptors of one process."""
OOM_SCORE = 500
"""Addition to the kernel's OOM score, so that the kernel kills a sandbox rather than the service."""
COMPAT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID")
"""Capabilities that `apt`, `pip` and `su` need as root of the container; none for network, devices, trace or mount."""


class ProfileSettings(msgspec.Struct, frozen=True):
    """Settings that differ between profiles."""

    user: str | None
    """User and group of all programs; None: those of the image."""
    own_user: bool
    """True if a sandbox gets a user id of its own instead of `user`, where the engine can assign one. False if programs
    write to the image's files, because those belong to `user`."""
    capabilities: tuple[str, ...]
    """Linux capabilities that root of the container has."""
    read_only: bool
    """True if the root file system is read-only. The working directory is then a file system in memory."""
    networks: tuple[str, ...]
    """Values of `Spec.network` that are allowed."""
    families: tuple[int, ...]
    """Socket families. `build` and `compat` have TCP/IP without a network too, because programs under test often serve
    at 127.0.0.1."""


PROFILES = {
    "strict": ProfileSettings(USER, True, (), True, ("none",), UNIX),
    "build": ProfileSettings(USER, False, (), False, ("none", "bridge"), INTERNET),
    "compat": ProfileSettings(None, False, COMPAT_CAPABILITIES, False, ("none", "bridge"), INTERNET),
}
"""Settings of each profile, by the name in `Spec.profile`."""


def check(spec: Spec) -> ProfileSettings:
    """Check a spec, and return the settings of its profile.

    Raises:
        SandboxRefusedError: the spec is wrong, or asks for something that its profile does not allow.
    """
    try:
        # The constructor of a struct does not check types.
        msgspec.convert(msgspec.to_builtins(spec), Spec)
    except (msgspec.ValidationError, TypeError) as error:
        raise SandboxRefusedError(f"the spec of a sandbox is wrong: {error}") from None
    profile = PROFILES[spec.profile]
    if spec.network not in profile.networks:
        raise SandboxRefusedError(
            f"profile {spec.profile} gives no network {spec.network!r}; use profile `build` or `compat`"
        )
    if spec.disk_mib is not None and profile.read_only and spec.disk_mib > (most := _work_mib(spec)):
        raise SandboxRefusedError(
            f"files under profile {spec.profile} are in memory: with memory_mib = {spec.memory_mib}, disk_mib can be "
            f"at most {most}, not {spec.disk_mib}"
        )
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name:
            raise SandboxRefusedError(f"{name!r} cannot be the name of an environment variable")
        if "\0" in value:
            raise SandboxRefusedError(f"the environment variable {name!r} has a zero byte, which no value may have")
    return profile


def layer_limit(spec: Spec) -> LayerUse:
    """Return the most that a sandbox may have in its own layer; `LocalSandbox` ends a sandbox that exceeds it."""
    return LayerUse(disk_mib(spec) * MIB, FILES_PER_MIB * disk_mib(spec))


def work_in_memory(spec: Spec) -> bool:
    """Return True if the working directory is a file system in memory, and so not part of the container's layer."""
    return PROFILES[spec.profile].read_only


def owner_of_work(spec: Spec) -> int | None:
    """Return the user id that must own the working directory in the container's layer; None if none must be set."""
    profile = PROFILES[spec.profile]
    return None if profile.read_only or profile.user is None else int(profile.user.partition(":")[0])


def disk_mib(spec: Spec) -> int:
    """Return the size of a sandbox's disk in MiB."""
    if spec.disk_mib is not None:
        return spec.disk_mib
    return min(DISK_MIB, _work_mib(spec)) if work_in_memory(spec) else DISK_MIB


def sizes_mib(spec: Spec) -> dict[str, int]:
    """Return the size in MiB of each file system in memory, by path.

    If all of them are full, the agent and programs still have memory to run.
    """
    small = max(1, min(SMALL_MIB, spec.memory_mib // 32))
    sizes = {"/tmp": max(1, min(TMP_MIB, spec.memory_mib // 8))}
    sizes |= dict.fromkeys(("/run", "/var/tmp", SHARED_MEMORY), small)
    return sizes | ({spec.workdir: disk_mib(spec)} if work_in_memory(spec) else {})


def _work_mib(spec: Spec) -> int:
    """Return the largest size in MiB that the working directory can have in memory."""
    files = max(spec.memory_mib // 4, min(3 * spec.memory_mib // 4, spec.memory_mib - RESERVE_MIB))
    # Under `build` the working directory is not in memory: the others are left.
    others = sizes_mib(msgspec.structs.replace(spec, profile="build"))
    return max(1, files - sum(others.values()))


def container(
    spec: Spec,
    labels: dict[str, str],
    *,
    user: int | None,
    owned_tmpfs: bool,
    seccomp: str | None,
    mask_option: bool = True,
) -> dict[str, object]:
    """Return the engine's configuration of a container, in the form of Docker's API.

    Args:
        spec: the spec of the sandbox.
        labels: labels of the container.
        user: user id of this sandbox alone; None: the profile's user.
        owned_tmpfs: True if the engine can set the owner and the number of files of a file system in memory. Docker
            can; Podman refuses both.
        seccomp: the system call filter in the form that the engine takes; None: the engine's default.
        mask_option: True if the engine takes masked paths as a security option and adds them to its own, as Podman
            does. Docker takes a full list, which replaces its own.

    Raises:
        SandboxRefusedError: see `check`.
    """
    profile = check(spec)
    user_and_group = profile.user if user is None else f"{user}:{user}"
    memory, disk = spec.memory_mib * MIB, disk_mib(spec) * MIB
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
            "SecurityOpt": [
                "no-new-privileges",
                *([f"seccomp={seccomp}"] if seccomp else []),
                *([f"mask={':'.join(MASKED)}"] if mask_option else []),
            ],
            **({} if mask_option else {"MaskedPaths": [*DOCKER_MASKED, *MASKED]}),
            "Privileged": False,
            "ReadonlyRootfs": profile.read_only,
            "Tmpfs": _tmpfs(spec, user_and_group, owned=owned_tmpfs),
            "ShmSize": sizes_mib(spec)[SHARED_MEMORY] * MIB,
            "Memory": memory,
            # Equal to Memory, so there is no swap. By default swap would double the limit.
            "MemorySwap": memory,
            "OomScoreAdj": OOM_SCORE,
            "NanoCpus": int(spec.cpus * 1e9),
            "PidsLimit": spec.pids,
            "Ulimits": [
                # Set explicitly: the engine's defaults may be higher than the limits it may set itself.
                {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
                {"Name": "nproc", "Soft": 1 << 15, "Hard": 1 << 15},
                {"Name": "core", "Soft": 0, "Hard": 0},
                # No single file may be larger than the disk, because a layer is only measured from time to time.
                *([] if work_in_memory(spec) else [{"Name": "fsize", "Soft": disk, "Hard": disk}]),
            ],
            # Unlimited logs of a container that writes much would fill the host's disk.
            "LogConfig": {"Type": "none"},
            "IpcMode": "private",
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
            "Init": False,
            **({"Runtime": spec.runtime} if spec.runtime else {}),
        },
    }
    if user_and_group is not None:
        config["User"] = user_and_group
    return config


def _tmpfs(spec: Spec, user_and_group: str | None, *, owned: bool) -> dict[str, str]:
    """Return the mount options of each file system in memory, by path, without /dev/shm, which the engine mounts.

    Programs may run from them: compilers write to /tmp.

    Args:
        spec: the spec of the sandbox.
        user_and_group: `UID:GID` of the sandbox's programs; None: those of the image.
        owned: True if the engine can set the owner and the number of files of such a file system.
    """
    # runc gives the mount the mode of the image's folder, and ignores `mode`. /run is often 755, so the user of the
    # sandbox must own the mount. Podman refuses an owner.
    owner = "uid={},gid={},".format(*user_and_group.split(":")) if user_and_group and owned else ""
    return {
        path: f"rw,nosuid,nodev,exec,{owner}mode=1777,size={size}m"
        + (f",nr_inodes={INODES_PER_MIB * size}" if owned else "")
        for path, size in sizes_mib(spec).items()
        if path != SHARED_MEMORY
    }
