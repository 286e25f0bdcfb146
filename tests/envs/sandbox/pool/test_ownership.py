"""Whose a container is, by its labels and a lock, and what may be removed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from envs.sandbox.pool.ownership import Alive, Labels, OwnerLock, Verdict, machine, owner_alive, verdict
from flash.errors import ConfigError

LABELS = Labels("box", "svc", 100.0, "/nowhere", "machine", "lease", "owner", "run")


def test_labels_survive_the_engine():
    assert Labels.read(LABELS.as_dict()) == LABELS
    assert Labels.read({"other": "label"}) is None
    assert Labels.read({**LABELS.as_dict(), "flash.sandbox.deadline": "soon"}) is None


def test_a_lock_tells_whether_its_owner_lives(tmp_path):
    path = tmp_path / "lock"
    mine = Labels("b", "s", 0.0, str(path), machine())
    assert owner_alive(mine, machine()) is Alive.NO
    with OwnerLock(path):
        assert owner_alive(mine, machine()) is Alive.YES
        with pytest.raises(ConfigError, match="runs already"):
            OwnerLock(path).__enter__()
    assert owner_alive(mine, machine()) is Alive.NO
    assert owner_alive(mine, "another boot") is Alive.UNKNOWN


def test_a_lock_dies_with_its_process(tmp_path):
    path = tmp_path / "lock"
    code = (
        "import sys, os, signal, pathlib; from envs.sandbox.pool.ownership import OwnerLock\n"
        "OwnerLock(pathlib.Path(sys.argv[1])).__enter__(); print('held', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        mine = Labels("b", "s", 0.0, str(path), machine())
        assert owner_alive(mine, machine()) is Alive.YES
        process.kill()
        process.wait()
        assert owner_alive(mine, machine()) is Alive.NO


def test_who_may_be_removed():
    assert verdict(LABELS, Alive.YES, 1e12) is Verdict.KEEP
    assert verdict(LABELS, Alive.NO, 0.0) is Verdict.ORPHAN
    assert verdict(LABELS, Alive.UNKNOWN, 120.0) is Verdict.KEEP
    assert verdict(LABELS, Alive.UNKNOWN, 161.0) is Verdict.REMOVE
