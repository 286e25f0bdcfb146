"""Whose a container is, by its labels and a lock, and what may be removed."""

from __future__ import annotations

import os
import subprocess
import sys

import anyio
import pytest

from envs.sandbox.pool.host import Container, HostSettings
from envs.sandbox.pool.local_host import LocalHost
from envs.sandbox.pool.ownership import (
    Identity,
    Labels,
    OwnerAlive,
    OwnerLock,
    OwnerVerdict,
    Reaper,
    machine,
    owner_alive,
    verdict,
)
from flash.errors import ConfigError
from tests.envs.sandbox.pools import engine

LABELS = Labels("box", "svc", 100.0, "/nowhere", "machine", "lease", "owner", "run")


def test_labels_survive_the_engine():
    assert Labels.read(LABELS.as_dict()) == LABELS
    assert Labels.read({"other": "label"}) is None
    assert Labels.read({**LABELS.as_dict(), "flash.sandbox.deadline": "soon"}) is None


def test_a_lock_tells_whether_its_owner_lives(tmp_path):
    path = tmp_path / "lock"
    mine = Labels("b", "s", 0.0, str(path), machine())
    assert owner_alive(mine, machine()) is OwnerAlive.NO
    with OwnerLock(path):
        assert owner_alive(mine, machine()) is OwnerAlive.YES
        with pytest.raises(ConfigError, match="runs already"):
            OwnerLock(path).__enter__()
    assert owner_alive(mine, machine()) is OwnerAlive.NO
    assert owner_alive(mine, "another boot") is OwnerAlive.UNKNOWN


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
        assert owner_alive(mine, machine()) is OwnerAlive.YES
        process.kill()
        process.wait()
        assert owner_alive(mine, machine()) is OwnerAlive.NO


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_host_keeps_the_lock_file_of_its_service_from_cleaners_of_old_files(tmp_path):
    with OwnerLock(tmp_path / "lock") as lock:
        host = LocalHost("a", engine(), Identity.of("svc", lock))
        async with anyio.create_task_group() as tasks:
            await tasks.start(host.run, lambda: None)
            for _ in range(2):
                os.utime(lock.path, (0, 0))
                await anyio.sleep(HostSettings().look_s + 1)
                assert lock.path.stat().st_mtime > 0
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.virtual
async def test_the_reaper_forgets_orphans_that_the_engine_no_longer_lists():
    identity = Identity("own", "/nowhere", "machine", "run")
    reaper = Reaper(engine(), identity, HostSettings(), alive=lambda *_: OwnerAlive.NO, wall=lambda: 0.0)
    orphan = Container("id", LABELS.as_dict(), True)
    assert reaper.leftovers([orphan], ()) == []
    await anyio.sleep(HostSettings().orphan_grace_s)
    assert reaper.leftovers([orphan], ()) == [orphan]
    assert reaper.leftovers([], ()) == []
    assert reaper.leftovers([orphan], ()) == []


def test_who_may_be_removed():
    assert verdict(LABELS, OwnerAlive.YES, 1e12) is OwnerVerdict.KEEP
    assert verdict(LABELS, OwnerAlive.NO, 0.0) is OwnerVerdict.ORPHAN
    assert verdict(LABELS, OwnerAlive.UNKNOWN, 120.0) is OwnerVerdict.KEEP
    assert verdict(LABELS, OwnerAlive.UNKNOWN, 161.0) is OwnerVerdict.REMOVE
