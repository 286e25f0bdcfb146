"""The folder for lock files and filters: made for this user only, and refused with the true reason."""

from __future__ import annotations

import os

import pytest

from envs.sandbox.user_folder import user_folder
from flash.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"flash-sandbox-{os.getuid()}"


def test_the_folder_is_made_once_for_this_user_only(folder):
    assert user_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert user_folder() == folder


def test_a_file_or_link_in_its_place_is_refused(folder, tmp_path):
    folder.write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        user_folder()
    folder.unlink()
    (tmp_path / "other").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="is no folder"):
        user_folder()


def test_a_folder_that_is_open_to_others_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"is open to other users \(mode 755\)"):
        user_folder()


def test_a_runtime_folder_that_does_not_exist_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"missing.* cannot be created: No such file"):
        user_folder()
