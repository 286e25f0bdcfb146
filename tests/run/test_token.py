"""Token of the hub: only the owner can read it, and only an address that is proven by it is believed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from flash.errors import ConfigError, RunDirectoryError, TransportError
from flash.run.processes.hub_place import HubPlace, hub_token, sign, verify

GIVEN = "ab" * 32
"""Token as a user sets it in FLASH_TOKEN."""


def test_the_token_lies_in_a_file_that_only_its_owner_reads_and_nowhere_else(tmp_path: Path) -> None:
    with hub_token(tmp_path, None) as (token, file):
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600
        stored = sign(b"where the hub is", token, file)
        assert verify(stored, tmp_path, None) == (b"where the hub is", token)
        for secret in (token, token.hex().encode()):
            assert secret not in stored
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_hub_that_was_killed_is_swept_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "hub-0123456789abcdef.token"
    left.write_text("00" * 32)
    with hub_token(tmp_path, None) as (_, file):
        assert [path.name for path in tmp_path.iterdir()] == [file]


def test_a_token_of_the_environment_lies_in_no_file(tmp_path: Path) -> None:
    with hub_token(tmp_path, GIVEN) as (token, file):
        assert (token.hex(), file, list(tmp_path.iterdir())) == (GIVEN, "", [])
        stored = sign(b"there", token, file)
        assert verify(stored, tmp_path / "not shared", GIVEN) == (b"there", token)
        with pytest.raises(ConfigError, match="the first host has FLASH_TOKEN set, and this one has not"):
            verify(stored, tmp_path, None)
        with pytest.raises(ConfigError, match="FLASH_TOKEN differs between the hosts"):
            verify(stored, tmp_path, "cd" * 32)


@pytest.mark.parametrize("given", ["", "secret", "ab" * 15, "zz" * 32])
def test_a_token_of_the_environment_that_is_none_is_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="FLASH_TOKEN is no token: expected at least 32 hexadecimal digits"):
        hub_token(tmp_path, given).__enter__()


def test_a_host_that_does_not_see_the_file_is_refused_with_the_folder_to_share(tmp_path: Path) -> None:
    with hub_token(tmp_path, None) as (token, file):
        stored = sign(b"there", token, file)
    with pytest.raises(ConfigError, match=r"all hosts must see the same run\.output_dir"):
        verify(stored, tmp_path, None)


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"hub-\w+\.token cannot be written"):
        hub_token(tmp_path / "missing", None).__enter__()


@pytest.mark.parametrize("file", ["config.toml", "../hub-0123456789abcdef.token", "/etc/hostname", "hub-x.token\n"])
def test_a_stranger_cannot_have_a_file_taken_for_the_token(tmp_path: Path, file: str) -> None:
    """A stranger could announce a file whose content the stranger knows, and prove that content as the token."""
    known = b"\x11" * 32
    (tmp_path / "config.toml").write_text(known.hex())
    with pytest.raises(TransportError, match="as the file of its token"):
        verify(sign(b"elsewhere", known, file), tmp_path, None)


def test_a_stranger_cannot_send_the_job_elsewhere(tmp_path: Path) -> None:
    with (
        hub_token(tmp_path, None) as (_, file),
        pytest.raises(ConfigError, match="somebody else wrote to the run directory"),
    ):
        verify(sign(b"elsewhere", b"\x11" * 32, file), tmp_path, None)


@pytest.mark.parametrize("address", [b"", b"\xff", b'{"host": "\xff"}', b'{"host": "there", "port": "x", "token": ""}'])
def test_a_proven_address_of_another_form_is_an_error_that_a_search_survives(tmp_path: Path, address: bytes) -> None:
    with hub_token(tmp_path, None) as (token, file):
        (tmp_path / "hub.json").write_bytes(sign(address, token, file))
        with pytest.raises(TransportError, match=r"cannot be read: .*; do all hosts run the same code"):
            HubPlace(run_dir=str(tmp_path)).find(None)


@pytest.mark.parametrize(
    "stored", [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"body": 1, "token_file": 2, "proof": 3}']
)
def test_an_announcement_that_is_none_is_one_clear_error(tmp_path: Path, stored: bytes) -> None:
    with pytest.raises(TransportError, match="the hub's announcement cannot be read"):
        verify(stored, tmp_path, None)


def test_a_run_directory_at_which_the_file_system_cannot_look_announces_no_hub() -> None:
    place = HubPlace(run_dir="a" * 300)
    assert not place.announced
    with pytest.raises(ConfigError, match=r"^a+ cannot be read: File name too long$"):
        place.find(None)
