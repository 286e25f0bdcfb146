"""The disk that a container uses, as it is measured from outside."""

from __future__ import annotations

import os
import sys

import pytest

from envs.sandbox.engines.machine import DEPTH, LayerUse, layer_use

NOBODY = 0
"""Process of a container that does not run."""
RESERVED = "import os\nfor n in range(8): os.posix_fallocate(os.open(f'a{n}', 66), 0, 30 << 20)"
REMOVED = (
    "import os\nkept = []\nfor n in range(20):\n kept.append(open('a', 'wb', 0))\n os.unlink('a')\n"
    " kept[n].write(bytes(9 << 20))"
)
MANY = "import os\nfor n in range(30000): os.close(os.open(f'a{n}', 66))"
NO_LIMIT = LayerUse(sys.maxsize, sys.maxsize)


def test_bytes_and_entries_are_counted_and_links_are_not_followed(tmp_path):
    layer, outside = tmp_path / "layer", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"x" * 100_000)
    (layer / "a" / "b").mkdir(parents=True)
    (layer / "a" / "b" / "file").write_bytes(b"x" * 10_000)
    (layer / "a" / "same").hardlink_to(layer / "a" / "b" / "file")
    (layer / "link").symlink_to(outside)
    use = layer_use(layer, NOBODY, NO_LIMIT)
    assert use.entries == 5
    assert 10_000 <= use.size < 40_000


def test_a_sparse_file_counts_with_its_holes_where_they_are_asked_for(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert layer_use(tmp_path, NOBODY, NO_LIMIT, holes=True).size >= 1 << 30
    assert layer_use(tmp_path, NOBODY, NO_LIMIT).size < 1 << 20


def test_the_measurement_ends_soon_after_the_limit(tmp_path):
    for number in range(500):
        (tmp_path / str(number)).touch()
    most = LayerUse(sys.maxsize, 20)
    use = layer_use(tmp_path, NOBODY, most)
    assert use.over(most)
    assert use.entries == 21


def test_a_tree_that_is_too_deep_to_be_measured_counts_as_over_the_limit(tmp_path):
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(DEPTH + 10):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    most = LayerUse(sys.maxsize, 100_000)
    assert layer_use(tmp_path, NOBODY, most).over(most)


def test_a_container_that_is_gone_uses_nothing(tmp_path):
    assert layer_use(tmp_path / "gone", NOBODY, NO_LIMIT) == LayerUse()


@pytest.mark.anyio
@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (RESERVED, "more than 64 MiB"),
        (REMOVED, "more than 64 MiB"),
        (MANY, "more than 16384 files and folders"),
    ],
    ids=["reserved", "removed and open", "many"],
)
async def test_a_sandbox_that_takes_too_much_of_the_disk_is_ended(containers, code, why):
    from envs.sandbox.api import Spec
    from envs.sandbox.local.sandbox import LocalSandbox
    from flash.errors import SandboxError

    engine, labels = containers
    spec = Spec(image="flash-sandbox-python", profile="build", disk_mib=64)
    async with LocalSandbox(engine, spec, labels=labels) as sandbox:
        with pytest.raises(SandboxError, match=why):
            await sandbox.run(["python3", "-c", f"{code}\nimport time; time.sleep(60)"], timeout=60)


@pytest.mark.anyio
@pytest.mark.integration
async def test_no_disk_is_reserved_and_no_file_is_larger_than_the_disk(containers):
    from envs.sandbox.api import Spec
    from envs.sandbox.local.sandbox import LocalSandbox

    engine, labels = containers
    spec = Spec(image="flash-sandbox-python", profile="build", disk_mib=64)
    code = (
        "import errno, os\nf = os.open('f', os.O_RDWR | os.O_CREAT)\n"
        "try: os.truncate(f, 65 << 20)\nexcept OSError as error: print(errno.errorcode[error.errno])\n"
        "os.posix_fallocate(f, 0, 1 << 20)\nprint(os.fstat(f).st_size)"
    )
    async with LocalSandbox(engine, spec, labels=labels) as sandbox:
        result = await sandbox.run(["python3", "-c", code], timeout=60)
    assert result.stdout.split() == [b"EFBIG", b"1048576"], result
