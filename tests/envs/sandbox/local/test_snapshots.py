"""A snapshot takes no more room than its sandbox may have, whatever its files say that they are."""

from __future__ import annotations

import io
import tarfile

import pytest

from envs.sandbox.engines.fake import FakeBackend
from flash.errors import SandboxLimitError

pytestmark = pytest.mark.anyio

LIMIT = 20.0


async def test_holes_in_files_are_no_way_to_the_disk_of_the_host(bench):
    async with bench.sandbox(disk_mib=8) as sandbox:
        for make in ("truncate -s 3G huge", "head -c 3M /dev/zero >huge; for n in 1 2 3; do ln huge name$n; done"):
            assert (await sandbox.run(f"rm -f *; {make}", timeout=LIMIT)).ok
            with pytest.raises(SandboxLimitError, match=r"(huge|name\d)'?$") as caught:
                await sandbox.snapshot()
            assert "over 8388608" in str(caught.value)
        await sandbox.run("rm -f *; truncate -s 5M some; echo more >more", timeout=LIMIT)
        async with bench.copy(sandbox) as copied:
            assert (await copied.run("wc -c <some; cat more", timeout=LIMIT)).stdout == b"5242880\nmore\n"


async def test_more_names_than_there_is_room_for_are_no_way_either(bench):
    async with bench.sandbox(disk_mib=1) as sandbox:
        await sandbox.run("seq 3000 | xargs touch", timeout=LIMIT)
        with pytest.raises(SandboxLimitError, match="too many files"):
            async for _ in sandbox.send_tree(sandbox.hello.workdir, 1 << 20, heads=0):
                pass


async def test_a_fake_snapshot_has_the_size_of_its_archive():
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writer:
        writer.addfile(tarfile.TarInfo("empty"))

    async def pieces():
        yield archive.getvalue()

    async with FakeBackend() as backend:
        size = await backend.images.commit("any", name="copy:1", labels={}, files=pieces(), most=1 << 20)
    assert size == len(archive.getvalue())


@pytest.mark.parametrize("kind", [pytest.param("containers", marks=pytest.mark.integration)])
async def test_holes_in_the_own_layer_are_counted_as_well(bench):
    async with bench.sandbox(profile="build", disk_mib=8) as sandbox:
        # No file may be larger than the disk; many may be as large.
        assert (await sandbox.run("for n in $(seq 40); do truncate -s 8M huge$n || exit; done", timeout=LIMIT)).ok
        with pytest.raises(SandboxLimitError, match="holes included, and the sandbox may have 8388608"):
            await sandbox.snapshot()
        assert (await sandbox.run("rm huge*; echo kept >small", timeout=LIMIT)).ok
        async with bench.copy(sandbox) as copied:
            assert await copied.read("small") == b"kept\n"
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"
