"""The system call filter as engines are given it; what it does is measured in `test_doctor` and `test_hostile`."""

from __future__ import annotations

import errno
import socket

import pytest

from envs.sandbox.engines.seccomp import INTERNET, UNIX, filter_text, podman_filter, tighten

DEFAULT = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]}],
    "syscalls": [
        {"names": ["read", "clone", "unshare", "prlimit64", "setpriority"], "action": "SCMP_ACT_ALLOW", "args": []},
        {"names": ["socket", "socketpair", "socketcall"], "action": "SCMP_ACT_ALLOW", "args": []},
    ],
}
MATCHES = {
    "SCMP_CMP_EQ": lambda given, rule: given == rule["value"],
    "SCMP_CMP_NE": lambda given, rule: given != rule["value"],
    "SCMP_CMP_GT": lambda given, rule: given > rule["value"],
    "SCMP_CMP_MASKED_EQ": lambda given, rule: given & rule["value"] == rule["valueTwo"],
}


def outcome(families, name, *arguments) -> int:
    """0 when the filter lets the call, otherwise its error. At most one rule may match, since their order is open."""
    found = [
        0 if rule["action"] == "SCMP_ACT_ALLOW" else rule["errnoRet"]
        for rule in tighten(DEFAULT, families)["syscalls"]
        if name in rule["names"] and all(MATCHES[each["op"]](arguments[each["index"]], each) for each in rule["args"])
    ]
    assert len(set(found)) <= 1, found
    return found[0] if found else errno.ENOSYS


@pytest.mark.parametrize("families", [UNIX, INTERNET])
def test_each_family_of_sockets_is_allowed_or_refused_by_one_rule(families):
    for family in [*range(64), 1 << 31, 2**64 - 1]:
        expected = 0 if family in families else errno.EAFNOSUPPORT
        if family == socket.AF_NETLINK and families == INTERNET:
            expected = 0
        assert outcome(families, "socket", family, socket.SOCK_STREAM, 0) == expected, family
        assert outcome(families, "socketpair", family, 1, 0) == (0 if family == 1 else errno.EAFNOSUPPORT)
    assert outcome(families, "socket", socket.AF_NETLINK, socket.SOCK_RAW, 9) == errno.EAFNOSUPPORT
    assert outcome(families, "socketcall", 1, 0) == errno.ENOSYS


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("read", (0, 0, 0), 0),
        ("unshare", (0,), errno.EPERM),
        ("clone", (17,), 0),
        ("clone", (0x10000000,), errno.ENOSYS),
        ("prlimit64", (0, 7, 1234, 0), 0),
        ("prlimit64", (0, 7, 0, 1234), 0),
        ("prlimit64", (1, 7, 0, 1234), 0),
        ("prlimit64", (1, 7, 1234, 0), errno.EPERM),
        ("setpriority", (0, 0, 5), 0),
        ("setpriority", (0, 1, 5), errno.EPERM),
        ("setpriority", (1, 0, 5), errno.EPERM),
        ("setpriority", (2, 0, 5), errno.EPERM),
        ("setpriority", (2, 1000, 5), errno.EPERM),
        ("ioprio_set", (1, 0, 0), 0),
        ("ioprio_set", (1, 1, 0), errno.EPERM),
        ("ioprio_set", (3, 1000, 0), errno.EPERM),
        ("sched_setaffinity", (0, 8, 1234), 0),
        ("sched_setaffinity", (1, 8, 1234), errno.EPERM),
        ("sched_setattr", (1, 1234, 0), errno.EPERM),
        ("sched_setparam", (1, 1234), errno.EPERM),
        ("sched_setscheduler", (1, 3, 1234), errno.EPERM),
    ],
)
def test_a_process_changes_itself_only(name, arguments, expected):
    assert outcome(UNIX, name, *arguments) == expected


def test_no_other_architecture_gets_through():
    assert [entry["subArchitectures"] for entry in tighten(DEFAULT, UNIX)["archMap"]] == [[]]


@pytest.mark.skipif(filter_text(UNIX) is None, reason="there is no default filter on this machine")
def test_a_filter_that_was_cleaned_up_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    podman_filter(UNIX).unlink()
    assert podman_filter(UNIX).read_bytes() == filter_text(UNIX)
