"""The doctor on real containers: settings as they should be, and every way out of its list refused."""

from __future__ import annotations

import pytest

from envs.sandbox.agent import probe
from envs.sandbox.api import Spec
from envs.sandbox.doctor import ALLOWED, REFUSALS, Diagnosis, DoctorCheck, doctor, lines
from envs.sandbox.engines.fake import FakeBackend

pytestmark = pytest.mark.anyio

CONTAINERS = pytest.mark.parametrize("kind", [pytest.param("containers", marks=pytest.mark.integration)])
WAYS_OUT = (
    "mount a file system",
    "unmount /proc",
    "new user namespace",
    "new mount namespace",
    "new network namespace",
    "enter a namespace",
    "chroot",
    "pivot_root",
    "make a device",
    "become root",
    "set the host name",
    "set the clock",
    "load a kernel module",
    "load a kernel",
    "load a BPF program",
    "open a performance counter",
    "use the kernel's keys",
    "handle page faults",
    "open a file by its number",
    "reach I/O ports",
    "trace the agent",
    "read the agent's memory",
    "use the agent's descriptors",
    "kill the agent",
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
    "see processes of the host",
    "see what others hold",
    "read physical memory",
    "read kernel memory",
    "read the kernel's log",
    "set the core dump program",
    "send a system request",
    "change the kernel",
    "change control groups",
    "find the engine's socket",
    "open a raw socket",
    "open a packet socket",
    "write to /usr",
    "write to /etc",
    "connect to the metadata service",
    "connect to the private network",
    "connect to the internet",
    "connect to the engine",
)
"""Each by its name: what the doctor tries, and nothing may come of it."""
BOMBS = {
    "memory bomb": "killed for memory, works",
    "fill the disk": "no space left",
    "command that ignores its timeout": "killed with all it started",
    "agent hidden from commands": "yes",
    "shell of a session hidden from programs": "yes",
}


def test_the_list_of_ways_out_is_complete():
    assert set(WAYS_OUT) == {*probe.ATTEMPTS, *probe.NETWORK}


@CONTAINERS
async def test_every_way_out_is_refused_under_strict(bench):
    spec = Spec(image="flash-sandbox-python", memory_mib=128, pids=64, disk_mib=32)
    found = {check.name: check for check in (await doctor(bench.backend, spec)).checks}
    for name in WAYS_OUT:
        assert found[name].wanted == "refused"
        assert found[name].measured in REFUSALS, name
    for name, measured in BOMBS.items():
        assert found[name].measured == measured
    count, _, alive = found["fork bomb"].measured.partition(", ")
    assert int(count) < spec.pids
    assert alive == "works"
    assert [check for check in found.values() if not check.ok] == []


@pytest.mark.parametrize("profile", ["build", "compat"])
@CONTAINERS
async def test_the_weaker_profiles_allow_what_they_say_and_nothing_else(bench, profile):
    spec = Spec(image="flash-sandbox-python", profile=profile, memory_mib=128, pids=64, disk_mib=32)
    diagnosis = await doctor(bench.backend, spec)
    assert diagnosis.isolated
    assert [check for check in diagnosis.checks if not check.ok] == []
    worked = {check.name for check in diagnosis.checks if check.measured == "worked"}
    assert worked <= set(ALLOWED[profile])


async def test_the_doctor_says_that_processes_are_not_isolated():
    async with FakeBackend() as backend:
        diagnosis = await doctor(backend, Spec(image="any"))
    assert not diagnosis.isolated
    assert not diagnosis.ok
    text = "\n".join(lines(diagnosis))
    assert "no isolation at all" in text
    assert "apt-get install podman runc" in text


def test_a_person_is_told_what_failed_and_what_to_do():
    checks = [
        DoctorCheck("user", "1000:1000", "1000:1000", True),
        DoctorCheck("chroot", "refused", "EPERM", True),
        DoctorCheck("memory", "134217728", "max", False),
        DoctorCheck("load a BPF program", "refused", "EFAULT", False),
    ]
    first, *rest = lines(Diagnosis("podman 4.3.1", True, Spec(image="any"), "runc", checks))
    assert first == "engine podman 4.3.1, runtime runc, profile strict"
    assert rest[:5] == [
        "ok       user: 1000:1000",
        "ok       chroot: EPERM, forbidden",
        "FAILED   memory: max (wanted: 134217728)",
        "FAILED   load a BPF program: EFAULT (wanted: refused)",
        "2 of 4 checks failed: run nothing here that you do not trust.",
    ]
    assert "Delegate=yes" in rest[5]
    assert "runsc" in rest[6]
    *_, last = lines(Diagnosis("podman 4.3.1", True, Spec(image="any"), "runc", checks[:2]))
    assert last == "All 2 checks are as they should be."
