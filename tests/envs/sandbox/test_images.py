"""Errors of the programs that make images."""

from __future__ import annotations

import pytest

from envs.sandbox.api import Spec
from envs.sandbox.engines.profiles import SHARED_MEMORY, sizes_mib
from envs.sandbox.images import _main, _run, finish
from flash.errors import ConfigError, SandboxError


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-program"], "needs `no-such-program`"),
        (["sh", "-c", "echo why >&2; exit 1"], "sh -c echo why >&2; exit 1 … failed: why"),
        (["sleep", "600"], r"sleep 600 … did not end within 0\.1 s"),
    ],
)
def test_a_program_that_makes_no_image_is_one_clear_error(command, message):
    with pytest.raises(ConfigError, match=message):
        _run(command, timeout_s=0.1 if command[0] == "sleep" else 60.0)


def test_every_user_may_write_to_the_folders_that_become_file_systems_in_memory(tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    finish(tmp_path)
    spec = Spec(image="any")
    folders = [path for path in sizes_mib(spec) if path != SHARED_MEMORY]
    assert {tmp_path.joinpath(path[1:]).stat().st_mode & 0o7777 for path in folders} == {0o1777}


@pytest.mark.anyio
async def test_images_are_not_built_without_a_recipe_or_an_engine_that_answers(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no recipe of nosuch; expected flash-sandbox-python or"):
        await _main(["nosuch"])
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing")
    monkeypatch.setenv("PATH", "")  # so that a build would fail in another way
    with pytest.raises(SandboxError, match="cannot be reached for GET version"):
        await _main(["flash-sandbox-python"])
