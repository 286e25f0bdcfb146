"""Links that a program has made into /proc lead nowhere, whatever the agent is asked to do with a path."""

from __future__ import annotations

import pytest

from flash.errors import SandboxError, SandboxFileError

pytestmark = pytest.mark.anyio

LIMIT = 20.0
CONTAINERS = pytest.mark.parametrize("kind", [pytest.param("containers", marks=pytest.mark.integration)])

TRAPS = """
import os
for number in range(3, 64):
    os.symlink(f"/proc/self/fd/{number}", f"fd{number}")
os.symlink("/proc/self", "self")
os.symlink(os.path.relpath("/proc/self"), "up")
os.symlink("self/fd", "twice")
os.symlink("/dev/fd", "dev")
os.symlink("/proc/self/oom_score_adj", "badness")
os.symlink("/proc/self/comm", "comm")
"""
SCORE = "cat /proc/1/oom_score_adj"


async def test_nothing_is_done_to_what_a_link_shows_in_proc(bench, tmp_path):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "comm").write_bytes(b"7")
    (tmp_path / "tree" / "sub" / "file").write_bytes(b"7")
    async with bench.sandbox() as sandbox:
        assert (await sandbox.run(["python3", "-c", TRAPS], timeout=LIMIT)).ok
        for path in ("self/stat", "up/stat", "twice/0", "dev/0", "badness", "comm", "self", "fd5"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)
            with pytest.raises(SandboxError):
                await sandbox.write(path, b"0", append=True)
        for folder in ("self", "up", "twice", "dev"):
            for ask in (
                sandbox.list(f"{folder}/task"),
                sandbox.write(f"{folder}/new", b""),
                sandbox.remove(f"{folder}/comm"),
                sandbox.upload(tmp_path / "tree", folder),
                sandbox.upload(tmp_path / "tree", f"{folder}/new"),
                sandbox.download(folder, tmp_path / "down"),
            ):
                with pytest.raises(SandboxError):
                    await ask
        assert not (tmp_path / "down").exists()
        with pytest.raises(SandboxFileError, match="/proc"):
            await sandbox.read("self/stat")
        # What is uploaded replaces a link, and is not written through it.
        await sandbox.upload(tmp_path / "tree", ".")
        await sandbox.upload(tmp_path / "tree" / "comm", "badness")
        assert [await sandbox.read(path) for path in ("comm", "badness", "sub/file")] == [b"7", b"7", b"7"]
        # Who names it may read it.
        assert await sandbox.read("/proc/self/stat", limit=100) != b""
        with pytest.raises(SandboxFileError, match=r"/proc/self/comm: (not a regular|Permission)"):
            await sandbox.write("/proc/self/comm", b"7", append=True)
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_other_links_are_followed_as_ever(bench, tmp_path):
    (tmp_path / "tree" / "link").mkdir(parents=True)
    (tmp_path / "tree" / "link" / "file").write_bytes(b"new")
    async with bench.sandbox() as sandbox:
        await sandbox.run(
            "mkdir -p a/b; ln -s a link; ln -s ../.. a/b/back; ln -s loop loop; ln -s no none", timeout=LIMIT
        )
        await sandbox.write("link/b/back/link/b/one", b"1")
        assert await sandbox.read("a/b/one") == b"1"
        await sandbox.upload(tmp_path / "tree", ".")
        assert await sandbox.read("a/file") == b"new"
        await sandbox.write("link/b/one", b"2", append=True)
        assert await sandbox.read("a/b/../b/one") == b"12"
        assert sorted(entry.name for entry in await sandbox.list("link/b/back")) == ["back"]
        await sandbox.write("none", b"made")
        assert await sandbox.read("none") == b"made"
        with pytest.raises(SandboxFileError, match="Too many levels"):
            await sandbox.read("loop")
        await sandbox.download("link/b/back/a/b/one", tmp_path / "one")
        assert (tmp_path / "one").read_bytes() == b"12"


async def test_a_relative_path_means_the_same_as_the_absolute_one_and_as_in_the_shell(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.run(
            "mkdir -p deep/x d; ln -s deep/x far; echo inner > deep/note; echo outer > note", timeout=LIMIT
        )
        for start in ("", f"{sandbox.hello.workdir}/"):
            assert await sandbox.read(f"{start}far/../note") == b"inner\n"
            assert (await sandbox.run("cat note", timeout=LIMIT, cwd=f"{start}far/..")).stdout == b"inner\n"
            assert [entry.name for entry in await sandbox.list(f"{start}far")] == ["far"]
            assert await sandbox.list(f"{start}far/") == []
            with pytest.raises(SandboxFileError, match="not the name of a file"):
                await sandbox.write(f"{start}new/", b"")
            with pytest.raises(SandboxFileError):
                await sandbox.remove(f"{start}d/.")
        assert sorted(entry.name for entry in await sandbox.list(".")) == ["d", "deep", "far", "note"]


async def test_a_folder_that_may_not_be_written_to_comes_with_its_files(bench, tmp_path):
    tree = tmp_path / "tree"
    (tree / "closed" / "in").mkdir(parents=True)
    (tree / "closed" / "in" / "file").write_bytes(b"there")
    (tree / "closed").chmod(0o555)
    async with bench.sandbox() as sandbox:
        await sandbox.upload(tree, "new")
        assert await sandbox.read("new/closed/in/file") == b"there"
        assert (await sandbox.run("stat -c %a new/closed; chmod -R u+w new", timeout=LIMIT)).stdout == b"555\n"


LOOK = "import os; os.listdir('/proc/%d/fd' % os.getppid())"


@CONTAINERS
async def test_no_upload_opens_the_shells_of_later_sessions(bench, tmp_path):
    async with bench.sandbox() as sandbox:
        async with sandbox.session("first") as first:
            assert (await first.run(f"python3 -c '{TRAPS}'", timeout=LIMIT)).ok
            for number in range(3, 64):
                # As a folder it is there already, and would only get another mode.
                (tmp_path / f"{number}" / f"fd{number}").mkdir(parents=True)
                try:
                    await sandbox.upload(tmp_path / f"{number}", ".")
                except SandboxError:
                    continue
        async with sandbox.session("second") as second:
            assert b"PermissionError" in (await second.run(f'python3 -c "{LOOK}"; :', timeout=LIMIT)).stderr
