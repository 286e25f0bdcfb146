"""Doctor: measures from inside a sandbox which limits a spec really gets, and tries to break out of it.

`flash sandbox doctor` calls `doctor` and prints the `lines` of its diagnosis. `flash doctor` calls `engine_name`, to
check for an engine before a run.

A check that could not be made counts as failed: without a measurement nothing is guaranteed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from envs.sandbox.api import Result, Spec
from envs.sandbox.engines import profiles
from envs.sandbox.engines.backend import Backend
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import DECODE_ERRORS, SandboxError

_log = logging.getLogger(__name__)

PROBE = Path(__file__).parent / "agent" / "probe.py"
"""Program that runs in the sandbox and prints `ProbeFindings`."""
PROBE_SECONDS = 60.0
"""Seconds that the probe may take."""
BOMB_SECONDS = 20.0
"""Seconds that each of the other programs may take."""
CAPABILITY_BITS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "SETGID": 6, "SETUID": 7}
"""Numbers of the capabilities that a profile may have, in the kernel's bit mask."""
ALLOWED = {
    "build": {"write to /etc": "the image's own permissions"},
    "compat": {"write to /usr": "root of the image", "write to /etc": "root of the image", "become root": "is root"},
}
"""Attempts that may succeed under the weaker profiles, and why. Writing to the container's own layer is no escape."""

REFUSALS = {
    "EPERM": "forbidden",
    "EACCES": "forbidden",
    "EROFS": "cannot be written to",
    "ENOENT": "is not there",
    "ENXIO": "is not there",
    "ENODEV": "is not there",
    "ESRCH": "is not there",
    "ENOSYS": "the kernel does not offer it",
    "EPROTONOSUPPORT": "the kernel does not offer it",
    "EAFNOSUPPORT": "the kernel does not offer it",
    "ENETUNREACH": "no way there",
    "killed": "ends the program",
}
"""Errors that count as a refusal of an attempt. Another error, such as that of a wrong argument, means that the attempt
was permitted but made wrongly."""
FORK_BOMB = """\
import os, signal, time
count = 0
try:
    while count < 100000:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        count += 1
except OSError: pass
print(count)
"""
"""Program that starts processes until it cannot, and prints their number."""
READ_SHELL = 'import os; os.open("/proc/%d/fd/0" % os.getppid(), os.O_RDONLY)'
"""Program that tries to open the input of the session's shell, its parent."""
MEMORY_BOMB = """\
import sys
held = []
for _ in range(int(sys.argv[1])): held.append(bytearray(1 << 20))
print('worked')
"""
"""Program that takes as many MiB of memory as its argument says."""


ADVICE = {
    ("memory", "swap", "memory and swap", "processes", "CPUs", "fork bomb", "memory bomb"): (
        "the engine cannot set this limit. Without root it needs control groups, version 2, delegated to its user "
        "(systemd: Delegate=yes); as root, --cgroup-manager cgroupfs works without systemd"
    ),
    ("shell of a session hidden from programs",): (
        "the image needs Python 3.8 or newer, and the kernel must run programs that are in memory only "
        "(vm.memfd_noexec = 0 or 1); else a program can answer for the next command of its session"
    ),
    ("agent hidden from commands", "probe"): (
        "the image needs Python 3.6 or newer with its standard library; else commands can disturb their own sandbox"
    ),
    (
        "runtime",
        "kernel",
    ): "the engine runs another one; Podman takes its runtime from containers.conf, or from --runtime",
    (
        "limit the agent",
        "change the agent's priority",
        "change the priority of all",
        "change the agent's I/O priority",
        "change the I/O priority of all",
        "change the agent's scheduling",
        "choose the agent's CPUs",
        "reach the hypervisor",
        "use the kernel's ciphers",
        "use 32-bit system calls",
    ): (
        "a program may disturb what judges it, or reach what is no part of its sandbox. Our own system call filter is "
        "derived from the one of the package golang-github-containers-common on this machine; install that"
    ),
    ("seccomp filter",): "the engine was built or configured without seccomp; look at `podman info` or `docker info`",
}
"""Advice for failed checks, by the names of the checks."""


class DoctorCheck(msgspec.Struct, frozen=True):
    """Measurement of one setting or attempt, with the expected value."""

    name: str
    """Name of the setting or of the attempt to break out."""
    wanted: str
    """Expected value, as text."""
    measured: str
    """Measured value, as text."""
    ok: bool
    """True if the measurement is acceptable."""


class ProbeFacts(msgspec.Struct, frozen=True):
    """Settings as the kernel shows them to the probe, `agent/probe.py`. Numbers of limits are texts of the kernel."""

    uid: int
    """Number of the user that commands run as."""
    gid: int
    """Number of that user's group."""
    capabilities: str
    """Effective capabilities, as a hexadecimal mask."""
    bounding: str
    """Capabilities that a process can ever have, as a hexadecimal mask."""
    no_new_privs: str
    """`1` if no program can gain rights when it is executed."""
    seccomp: str
    """`2` if a system call filter is active."""
    interfaces: list[str]
    """Names of the network interfaces."""
    memory: str
    """Limit of memory in bytes, or `max`."""
    swap: str
    """Limit of swap in bytes; empty under version 1 of control groups."""
    memory_and_swap: str
    """Limit of memory and swap together in bytes; empty under version 2 of control groups."""
    pids: str
    """Limit of processes and threads."""
    cpus: float | None
    """Number of CPUs; None if it is not limited."""
    open_files: int
    """Limit of open files of one process."""
    core: int
    """Limit of the size of a core dump in bytes."""
    sizes: dict[str, int]
    """Size in bytes of the file system at each path."""
    environment: list[str]
    """Names of the environment variables."""
    host_name: str
    """Host name of the sandbox."""
    kernel: str
    """Text of /proc/version."""


class ProbeFindings(msgspec.Struct, frozen=True):
    """Output of the probe."""

    facts: ProbeFacts
    """Settings of the sandbox."""
    attempts: dict[str, str]
    """Outcome of each attempt to break out: `worked`, or the name of the error that stopped it."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Measurements of one spec on one engine."""

    engine: str
    """Name and version of the engine."""
    isolated: bool
    """False if the engine does not isolate sandboxes at all; then nothing was measured."""
    spec: Spec
    """Kind of the sandbox that was measured."""
    runtime: str
    """Container runtime of the sandbox; empty if the engine does not report it."""
    checks: list[DoctorCheck]
    """Measurements, in the order in which they are shown."""

    @property
    def ok(self) -> bool:
        """True if all checks passed and the engine isolates sandboxes."""
        return self.isolated and all(check.ok for check in self.checks)


async def engine_name() -> str:
    """Return the name and the address of this machine's engine.

    Raises:
        ConfigError: there is no engine.
        SandboxError: the engine does not answer.
    """
    async with DockerBackend() as engine:
        info = await engine.info()
        return f"{info.name} at {info.address}"


async def doctor(backend: Backend, spec: Spec) -> Diagnosis:
    """Measure the limits and the isolation that a sandbox of this spec gets on this engine.

    Raises:
        SandboxError: no sandbox could be started.
    """
    info = await backend.info()
    if not info.isolated:
        # The probe tries to break out. Without isolation it would succeed, so it is not run.
        return Diagnosis(info.name, False, spec, info.default_runtime, [])
    async with LocalSandbox(backend, spec) as sandbox:
        found = await backend.containers.inspect(sandbox.container_id, runtime=True)
        runtime = found.runtime if found else ""
        checks = [
            DoctorCheck(
                "agent hidden from commands", "yes", "yes" if sandbox.hello.protected else "no", sandbox.hello.protected
            )
        ]
        checks += await _probe(sandbox, info.users)
        checks += [await _fork_bomb(sandbox), await _memory_bomb(sandbox), *await _disk(sandbox)]
        checks += await _session(sandbox)
        checks.append(await _timeout(sandbox))
    if spec.runtime:
        checks.append(DoctorCheck("runtime", spec.runtime, runtime, Path(runtime).name == spec.runtime))
    return Diagnosis(info.name, True, spec, runtime, checks)


async def _probe(sandbox: LocalSandbox, users: tuple[int, int] | None) -> list[DoctorCheck]:
    """Run the probe in the sandbox, and compare its findings with the spec.

    `users` is the range of user ids from which `strict` sandboxes get their own; None: they get none.
    """
    arguments = ["python3", "-IS", "-c", PROBE.read_text(), sandbox.spec.workdir, sandbox.spec.network]
    answer = await sandbox.run(arguments, timeout=PROBE_SECONDS)
    try:
        findings = msgspec.json.decode(answer.stdout, type=ProbeFindings)
    except DECODE_ERRORS as error:
        transcript = answer.stderr.decode("utf-8", "replace")[-300:]
        return [DoctorCheck("probe", "measured from inside", f"failed: {error}; {transcript}", False)]
    return [*_settings(sandbox.spec, findings.facts, users), *_escapes(sandbox.spec, findings.attempts)]


def _settings(spec: Spec, facts: ProbeFacts, users: tuple[int, int] | None) -> Iterator[DoctorCheck]:
    """Compare the settings that the kernel reports with those that the profile and the spec promise.

    `users` is the range of user ids from which `strict` sandboxes get their own; None: they get none.
    """
    profile = profiles.PROFILES[spec.profile]
    if profile.own_user and users:
        own = users[0] <= facts.uid <= users[1] and facts.gid == facts.uid
        yield DoctorCheck("user", "one of its own", f"{facts.uid}:{facts.gid}", own)
    elif profile.user is not None:
        yield _same("user", profile.user, f"{facts.uid}:{facts.gid}")
    mask = sum(1 << CAPABILITY_BITS[name] for name in profile.capabilities)
    yield _same("capabilities", f"{mask:016x}", facts.bounding)
    yield _same("no-new-privileges", "1", facts.no_new_privs)
    yield _same("seccomp filter", "2", facts.seccomp)
    if spec.network == "none":
        yield _same("network interfaces", "lo", ", ".join(facts.interfaces))
    memory = spec.memory_mib * profiles.MIB
    yield _same("memory", str(memory), facts.memory)
    if facts.swap:
        yield _same("swap", "0", facts.swap)
    else:
        yield _same("memory and swap", str(memory), facts.memory_and_swap)
    yield _same("processes", str(spec.pids), facts.pids)
    yield _same("CPUs", f"{spec.cpus:g}", f"{facts.cpus:g}" if facts.cpus is not None else "unlimited")
    yield _same("open files", str(profiles.OPEN_FILES), str(facts.open_files))
    yield _same("core dumps", "0", str(facts.core))
    for path, size in profiles.sizes_mib(spec).items():
        yield _same(f"size of {path}", str(size * profiles.MIB), str(facts.sizes.get(path, "missing")))
    yield _same("host name", "sandbox", facts.host_name)
    if spec.runtime and "runsc" in spec.runtime:
        # gVisor is a kernel of its own, which reports this old version of Linux.
        gvisor = "gVisor" if "gvisor" in facts.kernel.lower() or "4.4.0" in facts.kernel else facts.kernel[:60]
        yield _same("kernel", "gVisor", gvisor)


def _same(name: str, wanted: str, measured: str) -> DoctorCheck:
    """Return a check that passes if the measured value is the wanted one."""
    return DoctorCheck(name, wanted, measured, wanted == measured)


def _escapes(spec: Spec, attempts: dict[str, str]) -> Iterator[DoctorCheck]:
    """Check that each attempt to break out was refused, unless the profile allows it."""
    allowed = ALLOWED.get(spec.profile, {})
    for name, outcome in attempts.items():
        refused = outcome in REFUSALS
        if refused or name not in allowed:
            yield DoctorCheck(name, "refused", outcome, refused)
        else:
            yield DoctorCheck(name, f"allowed: {allowed[name]}", outcome, True)


async def _fork_bomb(sandbox: LocalSandbox) -> DoctorCheck:
    """Check that the limit on processes stops a program that only forks, and that the sandbox works afterwards."""
    answer = await sandbox.run(["python3", "-ISc", FORK_BOMB], timeout=BOMB_SECONDS)
    count = answer.stdout.decode().strip()
    alive = await _alive(sandbox)
    return DoctorCheck(
        "fork bomb", f"fewer than {sandbox.spec.pids} processes, then gone", f"{count or '?'}, {alive}",
        count.isdigit() and int(count) < sandbox.spec.pids and alive == "works",
    )  # fmt: skip


async def _memory_bomb(sandbox: LocalSandbox) -> DoctorCheck:
    """Check that a program which takes twice the memory limit is killed, and that the sandbox works afterwards."""
    answer = await sandbox.run(["python3", "-ISc", MEMORY_BOMB, str(2 * sandbox.spec.memory_mib)], timeout=BOMB_SECONDS)
    outcome = f"{_how(answer)}, {await _alive(sandbox)}"
    return DoctorCheck(
        "memory bomb", "killed for memory, sandbox works", outcome, outcome == "killed for memory, works"
    )


async def _disk(sandbox: LocalSandbox) -> list[DoctorCheck]:
    """Check that the working directory holds no more than the disk limit, with a file that is 8 MiB larger.

    There is no check for profiles whose limit is only watched.
    """
    if not profiles.work_in_memory(sandbox.spec):
        return []
    size = (profiles.disk_mib(sandbox.spec) + 8) * profiles.MIB
    answer = await sandbox.run(
        f"head -c {size} /dev/zero > fill; code=$?; rm -f fill; exit $code", timeout=BOMB_SECONDS
    )
    full = b"No space left" in answer.stderr or answer.oom_killed
    return [DoctorCheck("fill the disk", "no space left", "no space left" if full else _how(answer), full)]


async def _session(sandbox: LocalSandbox) -> list[DoctorCheck]:
    """Check that programs cannot read the shell of their session.

    Not for `compat`: root of the image may read everything in its sandbox.
    """
    if not sandbox.hello.bash or sandbox.spec.profile == "compat":
        return []
    async with sandbox.session() as session:
        answer = await session.run(f"python3 -ISc '{READ_SHELL}'; :", timeout=BOMB_SECONDS)
    hidden = b"PermissionError" in answer.stderr
    return [DoctorCheck("shell of a session hidden from programs", "yes", "yes" if hidden else "no", hidden)]


async def _timeout(sandbox: LocalSandbox) -> DoctorCheck:
    """Check that a timeout kills a command that ignores SIGTERM, and a process that has left its session."""
    answer = await sandbox.run("trap '' TERM; (setsid sleep 61 &); sleep 60", timeout=0.5)
    left = await sandbox.run("grep -lz '^6[01]$' /proc/[0-9]*/cmdline", timeout=BOMB_SECONDS)
    measured = "killed with all it started" if answer.timed_out and not left.stdout else "something lives on"
    return DoctorCheck("command that ignores its timeout", "killed with all it started", measured, "killed" in measured)


def _how(answer: Result) -> str:
    """Return how a command ended, in a few words for a check."""
    if answer.oom_killed:
        return "killed for memory"
    return "timed out" if answer.timed_out else f"ended with {answer.signal or answer.exit_code}"


async def _alive(sandbox: LocalSandbox) -> str:
    """Return "works" if the sandbox still runs commands, else what happened instead."""
    try:
        answer = await sandbox.run("echo alive", timeout=BOMB_SECONDS)
    except SandboxError as error:
        _log.warning("the sandbox did not survive: %s", error)
        return str(error)
    return "works" if answer.stdout == b"alive\n" else "broken"


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the text of a diagnosis: one line per check, failed ones marked, and advice at the end."""
    yield f"engine {diagnosis.engine}, runtime {diagnosis.runtime or '?'}, profile {diagnosis.spec.profile}"
    if not diagnosis.isolated:
        yield "FAILED   no isolation at all: commands run as processes of this machine"
    failed = [check for check in diagnosis.checks if not check.ok]
    for check in diagnosis.checks:
        measured = f"{check.measured}, {REFUSALS[check.measured]}" if check.measured in REFUSALS else check.measured
        mark = "ok      " if check.ok else "FAILED  "
        yield f"{mark} {check.name}: {measured}" + ("" if check.ok else f" (wanted: {check.wanted})")
    if diagnosis.ok:
        yield f"All {len(diagnosis.checks)} checks are as they should be."
        return
    yield f"{len(failed)} of {len(diagnosis.checks)} checks failed: run nothing here that you do not trust."
    for advice in dict.fromkeys(_advice(check) for check in failed):
        yield f"- {advice}"
    if not diagnosis.isolated:
        yield "- Sandboxes need a container engine: apt-get install podman runc, or name one with --engine."


def _advice(check: DoctorCheck) -> str:
    """Return the advice for a failed check."""
    for names, advice in ADVICE.items():
        if check.name in names:
            return f"{check.name}: {advice}"
    if check.wanted == "refused":
        return (
            f"{check.name}: a program may do this to the machine or to its neighbours. Update the kernel, the engine "
            "and its runtime; a runtime with a kernel of its own (--runtime runsc) has fewer ways out"
        )
    return f"{check.name}: the engine does not keep this setting; look at its own configuration, and at its version"
