"""Processes that an engine has forgotten: found by the id of their container, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from envs.sandbox.engines.machine import find_leftovers, kill_leftovers, remove_groups

ID = "5ca5b21beccb3336807f07160c7134fe7f2a35d203e197ec36435f5b06058f4a"
OTHER = "fbd3f4645e1301c7fd975b22901c72bec76827ce24673b2281b2894aa8ce2143"


def process(proc: Path, pid: int, group: str, *words: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cgroup").write_text(f"3:pids:{group}\n0::{group}\n")
    (proc / str(pid) / "cmdline").write_bytes("\0".join([*words, ""]).encode())


def test_what_is_in_the_group_of_a_container_and_its_helpers_are_found(tmp_path):
    process(tmp_path, 10, f"/libpod_parent/libpod-{ID}", "/usr/bin/runc", "init")
    process(tmp_path, 11, "/libpod_parent/conmon", "/usr/bin/conmon", "--api-version", "1", "-c", ID)
    process(tmp_path, 12, "/user", "/usr/bin/runc", "create", "--bundle", "/somewhere", ID)
    process(tmp_path, 20, f"/libpod_parent/libpod-{OTHER}", "sleep", "1")
    process(tmp_path, 21, "/user", "/usr/bin/podman", "inspect", ID)
    process(tmp_path, 22, "/libpod_parent/conmon", "/usr/bin/conmon", "-c", OTHER)
    process(tmp_path, 23, f"/libpod_parent/libpod-{ID}")  # A zombie.
    (tmp_path / "30").mkdir()  # It has ended meanwhile.
    (tmp_path / "self").mkdir()
    assert sorted(find_leftovers([ID], tmp_path)) == [10, 11, 12]
    assert sorted(find_leftovers([ID, OTHER], tmp_path)) == [10, 11, 12, 20, 22]
    assert find_leftovers([], tmp_path) == []


def test_leftovers_are_killed(tmp_path):
    conmon = tmp_path / "conmon"
    conmon.symlink_to(sys.executable)
    words = ["-c", "import time; print(flush=True); time.sleep(600)", "--", ID]
    with subprocess.Popen([conmon, *words], stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()
        assert kill_leftovers([ID]) == 1
        assert left.wait() == -9
    assert kill_leftovers([ID]) == 0


def test_control_groups_are_removed_by_their_containers_id_and_no_others(tmp_path):
    mine, other = "a" * 64, "b" * 64
    for controller in ("memory", "pids", "."):
        for id in (mine, other):
            (tmp_path / controller / "libpod_parent" / f"libpod-{id}" / "inner").mkdir(parents=True)
    (tmp_path / "memory" / "docker" / mine).mkdir(parents=True)
    assert remove_groups(mine, tmp_path) == 4
    assert remove_groups(mine, tmp_path) == 0
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if mine in path.name)
    assert left == []
    assert len(list(tmp_path.rglob(f"libpod-{other}/inner"))) == 3
