"""Files of a sandbox: ranges, atomic writes, listings, trees in both directions."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from envs.sandbox.agent.files import FolderChain, list_folder, receive_entry, remove
from envs.sandbox.agent.wire import CallRefusal
from envs.sandbox.api import Spec
from envs.sandbox.engines.fake import FakeBackend, FakeImages
from envs.sandbox.local.sandbox import LocalSandbox
from envs.sandbox.trees import TreeLimits, pack
from flash.errors import SandboxClosedError, SandboxError, SandboxFileError, SandboxLimitError
from tests.envs.sandbox.conftest import IMAGE, Bench, room_for

pytestmark = pytest.mark.anyio

LIMIT = 20.0
DEEP = "d=t/$(printf 'd/%.0s' $(seq 1100)); mkdir -p $d; echo bottom > $d/file"


async def test_ranges_of_files(bench):
    data = bytes(range(256)) * 10_000
    async with bench.sandbox() as sandbox:
        await sandbox.write("deep/er/file", data, mode=0o600)
        assert await sandbox.read("deep/er/file") == data
        assert await sandbox.read("deep/er/file", offset=2_000_000, limit=10) == data[2_000_000:2_000_010]
        assert await sandbox.read("deep/er/file", offset=2_559_990, limit=1000) == data[-10:]
        assert await sandbox.read("deep/er/file", offset=9_999_999, limit=10) == b""
        assert await sandbox.read("deep/er/file", limit=0) == b""
        await sandbox.write("deep/er/file", b"more", append=True)
        assert await sandbox.read("deep/er/file", offset=2_560_000) == b"more"
        assert (await sandbox.run("stat -c %a deep/er/file", timeout=LIMIT)).stdout == b"600\n"
        assert await sandbox.read("/proc/self/stat", limit=100) != b""


async def test_an_append_creates_a_file_with_its_whole_mode(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.write("appended", b"x", mode=0o666, append=True)
        await sandbox.write("replaced", b"x", mode=0o666)
        await sandbox.write("appended", b"x", mode=0o600, append=True)
        result = await sandbox.run("stat -c %a appended replaced", timeout=LIMIT)
        assert result.stdout == b"666\n666\n"


async def test_an_empty_folder_is_uploaded(bench, tmp_path):
    (tmp_path / "empty").mkdir()
    async with bench.sandbox() as sandbox:
        await sandbox.upload(tmp_path / "empty", "deep/new")
        assert await sandbox.list("deep/new") == []


@pytest.mark.parametrize("missing", [1 << 20, 100], ids=["in the middle", "at the end, which is buffered"])
async def test_a_full_disk_of_temporary_files_is_a_typed_error(bench, tmp_path, missing):
    (tmp_path / "file").write_bytes(b"x" * (2 << 20))
    archive = io.BytesIO()
    pack(tmp_path / "file", archive, TreeLimits())
    room = len(archive.getvalue()) - missing
    async with bench.sandbox() as sandbox:
        await sandbox.upload(tmp_path / "file", "file")
        # No SandboxFileError, which environments count as a fault of the policy's files.
        with room_for(room), pytest.raises(SandboxError, match=r"file cannot be downloaded: .*File too large") as down:
            await sandbox.download("file", tmp_path / "back")
        with room_for(room), pytest.raises(SandboxError, match=r"file cannot be uploaded: .*File too large") as up:
            await sandbox.upload(tmp_path / "file", "again")
        assert type(down.value) is type(up.value) is SandboxError


async def test_an_archive_may_name_its_folder_itself(bench, tmp_path):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_text("content")

    async def archive() -> AsyncGenerator[bytes]:
        yield (await anyio.run_process(["tar", "-c", "."], cwd=tmp_path / "tree")).stdout

    async with bench.sandbox() as sandbox:
        await sandbox.put_archive("there", archive())
        assert await sandbox.read("there/sub/file") == b"content"


async def test_what_would_block_or_never_end_is_refused(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.run("mkfifo pipe; mkdir folder; ln -s /dev/zero zero", timeout=LIMIT)
        for path in ("pipe", "folder", "zero", "missing", "/dev/stdin"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)
        with pytest.raises(SandboxFileError):
            await sandbox.write("pipe", b"x", append=True)
        with pytest.raises(SandboxFileError):
            await sandbox.write("folder", b"x")
        with pytest.raises(SandboxLimitError, match="ranges"):
            await sandbox.read("missing", limit=1 << 30)
        with pytest.raises(SandboxFileError):
            await sandbox.read("missing", offset=-1)


async def test_a_file_is_replaced_in_one_step(bench):
    """A reader in the sandbox sees the old or the new content, never a part; a cancelled write leaves nothing."""
    watch = "while [ ! -e stop ]; do head -c 1 file; tail -c 1 file; echo; done | sort -u"
    async with bench.sandbox() as sandbox:
        await sandbox.write("file", b"a" * 500_000)
        job = await sandbox.start(watch)
        for letter in (b"b", b"c", b"b", b"c"):
            await sandbox.write("file", letter * 500_000)
            with anyio.move_on_after(0.002):
                await sandbox.write("file", b"x" * 20_000_000)
        await sandbox.write("stop", b"")
        seen = (await job.wait(LIMIT)).stdout.split()
        assert all(len(pair) == 2 for pair in seen)
        names = {entry.name for entry in await sandbox.list()}
        assert names == {"file", "stop"}


async def test_a_name_may_be_as_long_as_the_system_allows(bench):
    async with bench.sandbox() as sandbox:
        for name in ("a" * 255, "\U0001f600" * 63, "\udcff" * 255):
            await sandbox.write(name, b"content")
            assert await sandbox.read(name) == b"content"
            assert [each.name for each in await sandbox.list()] == [name]
            await sandbox.remove(name)


async def test_a_link_is_replaced_and_not_followed_by_a_write(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.run("echo target > target; ln -s target link", timeout=LIMIT)
        await sandbox.write("link", b"new")
        assert await sandbox.read("target") == b"target\n"
        assert await sandbox.read("link") == b"new"


async def test_listing_and_removing(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.run("mkdir -p d/sub; echo 12345 > d/file; ln -s file d/link; mkfifo d/pipe", timeout=LIMIT)
        found = {entry.name: entry for entry in await sandbox.list("d")}
        assert {name: entry.kind for name, entry in found.items()} == {
            "file": "file", "link": "link", "pipe": "other", "sub": "folder"
        }  # fmt: skip
        assert found["file"].size == 6
        assert [entry.name for entry in await sandbox.list("d/file")] == ["file"]
        await sandbox.remove("d/link")
        assert await sandbox.read("d/file") == b"12345\n"
        await sandbox.remove("d")
        await sandbox.remove("d")
        with pytest.raises(SandboxFileError):
            await sandbox.list("d")


async def test_the_working_directory_is_not_removed_by_any_of_its_paths(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.run("mkdir -p sub; touch sub/file; ln -s . here", timeout=LIMIT)
        workdir = (await sandbox.run("pwd -P", timeout=LIMIT)).stdout.decode().strip()
        above = workdir.rpartition("/")[0]
        names = ("", ".", "./.", "..", "../..", "sub/..", "/", "//", workdir, f"/{workdir}", f"{workdir}/", above)
        for path in (*names, f"{workdir}/.", f"{workdir}/sub/..", f"{workdir}/here/sub/.."):
            with pytest.raises(SandboxFileError, match="is or contains the working directory"):
                await sandbox.remove(path)
        for path in ("sub/.", f"{workdir}/sub/."):
            with pytest.raises(SandboxFileError, match="Invalid argument"):
                await sandbox.remove(path)
        assert await sandbox.list("sub/file") != []
        await sandbox.remove("here")
        await sandbox.remove("sub")
        assert await sandbox.list() == []


async def test_names_that_are_no_text_can_be_used(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.run(r"touch $'\xff\xfe' 'with space' $'new\nline'", timeout=LIMIT)
        names = {entry.name for entry in await sandbox.list()}
        assert names == {"\udcff\udcfe", "with space", "new\nline"}
        await sandbox.write("\udcff\udcfe", b"data")
        assert await sandbox.read("\udcff\udcfe") == b"data"


async def test_trees_go_up_and_come_down(bench, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "data").write_bytes(b"\xff" * 400_000)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/data")
    async with bench.sandbox() as sandbox:
        await sandbox.upload(source, "tree")
        assert (await sandbox.run("tree/run.sh; wc -c < tree/link", timeout=LIMIT)).stdout == b"ran\n400000\n"
        await sandbox.download("tree", tmp_path / "back")
        assert (tmp_path / "back" / "link").read_bytes() == b"\xff" * 400_000
        await sandbox.upload(source / "run.sh", "one/file.sh")
        await sandbox.download("one/file.sh", tmp_path / "file.sh")
        assert (tmp_path / "file.sh").read_text() == "#!/bin/sh\necho ran\n"
        with pytest.raises(SandboxFileError):
            await sandbox.download("nothing", tmp_path / "nothing")
        assert not (tmp_path / "nothing").exists()


async def test_a_file_with_several_names_comes_down_under_each(bench, tmp_path):
    async with bench.sandbox() as sandbox:
        await sandbox.run("mkdir -p t/s; head -c 5000 /dev/zero > t/a; ln t/a t/s/b; ln t/a t/c", timeout=LIMIT)
        await sandbox.download("t", tmp_path / "t")
    for name in ("a", "s/b", "c"):
        assert (tmp_path / "t" / name).stat().st_size == 5000
        assert (tmp_path / "t" / name).stat().st_nlink == 1


async def test_a_sandbox_cannot_write_to_the_host_through_a_download(bench, tmp_path):
    async with bench.sandbox() as sandbox:
        sandbox.tree_limits = TreeLimits(total=1 << 20, entries=100)
        for trap in ("ln -s /etc out", "ln -s .. out", "mkfifo pipe", "truncate -s 1T huge", "mkdir $(seq 200)"):
            await sandbox.run(f"rm -rf t; mkdir t; cd t; {trap}", timeout=LIMIT)
            with pytest.raises(SandboxError):
                await sandbox.download("t", tmp_path / "t")
            assert list(tmp_path.iterdir()) == []
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_a_tree_however_deep_is_removed_and_not_taken_out(bench, tmp_path):
    async with bench.sandbox() as sandbox:
        assert (await sandbox.run(f"{DEEP}; ln -s / $d/link", timeout=LIMIT)).ok
        with pytest.raises(SandboxLimitError, match="more than 200 folders in one another"):
            await sandbox.download("t", tmp_path / "t")
        assert list(tmp_path.iterdir()) == []
        await sandbox.remove("t")
        assert await sandbox.list() == []


@pytest.mark.integration
async def test_what_cannot_be_removed_is_named(containers):
    engine, labels = containers
    async with LocalSandbox(engine, Spec(image=IMAGE), labels=labels) as sandbox:
        await sandbox.run("mkdir -p t/a/closed/in; chmod 0 t/a/closed", timeout=LIMIT)
        with pytest.raises(SandboxFileError, match="Permission denied: '/work/t/a/closed'"):
            await sandbox.remove("t")


@pytest.mark.integration
async def test_a_snapshot_holds_a_tree_however_deep_and_names_what_it_cannot_hold(containers):
    engine, labels = containers
    async with LocalSandbox(engine, Spec(image=IMAGE), labels=labels) as sandbox:
        await sandbox.run(DEEP, timeout=LIMIT)
        async with Bench(engine, labels).copy(sandbox) as copied:
            found = await copied.run(
                "find . -name file | tr -cd / | wc -c; find . -name file -exec cat {} +", timeout=LIMIT
            )
        assert found.stdout.split() == [b"1102", b"bottom"]
        await sandbox.run("mkdir closed; chmod 0 closed", timeout=LIMIT)
        with pytest.raises(SandboxFileError, match="Permission denied: '/work/closed'"):
            await sandbox.snapshot()


class LateImages(FakeImages):
    """Asked for a snapshot when the container is on its way out already."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend.folder)
        self._containers = backend.containers

    async def commit(self, container_id, *, name, labels, files, most) -> int:
        while self._containers.kept:  # noqa: ASYNC110  # a fake tells nobody
            await anyio.sleep(0.01)
        raise SandboxError("the engine refused POST commit: no such container")


async def test_a_snapshot_beside_the_end_of_its_sandbox_says_that_it_ended():
    async def keep(call) -> None:
        with pytest.raises(SandboxClosedError, match="the sandbox was closed"):
            await call()

    async with (
        FakeBackend() as backend,
        anyio.create_task_group() as tasks,
        LocalSandbox(backend, Spec(image=IMAGE)) as sandbox,
    ):
        backend.images = LateImages(backend)
        tasks.start_soon(keep, sandbox.snapshot)
        await anyio.sleep(0.05)


@pytest.mark.parametrize("end", ["/.", "/./", "/b/.."])
def test_a_folder_whose_name_is_not_in_the_path_keeps_its_content(tmp_path, end):
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(OSError, match="Invalid argument"):
        remove(f"{tmp_path}/a{end}")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_removal_that_fails_closes_its_folders(tmp_path):
    before = os.listdir("/proc/self/fd")
    for path in (f"{tmp_path}/.", "/proc/self/status"):
        with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
            remove(path)
    assert os.listdir("/proc/self/fd") == before


def test_a_file_that_is_shorter_than_it_said_is_named():
    source = "from envs.sandbox.agent.files import send_tree; send_tree('/sys/kernel/profiling')"
    sent = subprocess.run([sys.executable, "-c", source], capture_output=True, check=False)
    assert b"unexpected end of data: '/sys/kernel/profiling'" in sent.stderr


def received(folder: Path, kind: bytes, mode: int = 0o644) -> None:
    """Receive an entry `name` of this kind, without content, into a folder."""
    member = tarfile.TarInfo("name")
    member.type, member.linkname, member.mode = kind, "target", mode
    with tarfile.open(fileobj=io.BytesIO(), mode="w") as archive:
        receive_entry(archive, member, FolderChain(os.open(folder, os.O_PATH), follow=True))


def test_an_entry_that_is_refused_leaves_the_file_of_its_name(tmp_path):
    (tmp_path / "name").write_text("old")
    for kind in (tarfile.LNKTYPE, tarfile.CHRTYPE):
        with pytest.raises(OSError, match="Invalid argument"):
            received(tmp_path, kind)
    assert (tmp_path / "name").read_text() == "old"


def test_a_received_pipe_has_its_exact_mode(tmp_path):
    received(tmp_path, tarfile.FIFOTYPE, 0o666)
    assert stat.filemode((tmp_path / "name").stat().st_mode) == "prw-rw-rw-"


def test_a_listing_reads_no_more_names_than_it_may_give(tmp_path):
    for number in range(3000):
        (tmp_path / f"{number:0200}").touch()
    tracemalloc.start()
    with pytest.raises(CallRefusal, match="more than the 100 entries of one listing"):
        list_folder(str(tmp_path), lambda batch: None, limit=100)
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
