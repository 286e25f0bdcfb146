"""Search of a job's processes for their hub, through a folder that others may read."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest

from flash.errors import ConfigError, DeadlineError, PeerLostError
from flash.hub import protocol as p
from flash.run.processes.hub_place import HUB_FILE, HubAddress, HubPlace, announce, hub_token, withdraw
from flash.run.processes.rendezvous import address_towards, ask, find_hub
from tests.full_disk import SmallDisk, small_disk
from tests.run.test_launcher import make_config


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the token from the environment variables."""
    monkeypatch.delenv("FLASH_TOKEN", raising=False)


def config_at(folder: Path, **deadlines: Any) -> Any:
    """Return a configuration whose run directory is `folder`."""
    return make_config(run={"name": folder.name, "output_dir": str(folder.parent)}, deadlines=deadlines)


def test_the_announcement_that_a_stranger_may_read_holds_no_token(tmp_path: Path, no_token: None) -> None:
    with hub_token(tmp_path, None) as (token, file):
        address = HubAddress("10.0.0.1", 4711, token)
        announce(tmp_path, address, file)
        assert find_hub(config_at(tmp_path), None, lambda found: found) == address
        assert HubPlace(run_dir=str(tmp_path)).find(None) == address
        left = (tmp_path / HUB_FILE).read_bytes()
        withdraw(tmp_path)
    assert b"proof" in left
    for secret in (token, token.hex().encode()):
        assert secret not in left
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_has_become_read_only_does_not_hide_why_a_hub_ends(tmp_path: Path, no_token: None) -> None:
    def end(run_dir: Path, disk: SmallDisk) -> None:
        """End like a hub whose disk becomes read-only."""
        with hub_token(run_dir, None) as (token, file):
            announce(run_dir, HubAddress("10.0.0.1", 4711, token), file)
            disk.read_only()
            try:
                raise PeerLostError("the reason")
            finally:
                withdraw(run_dir)

    with small_disk(tmp_path / "disk", 1 << 20) as disk, pytest.raises(PeerLostError, match="the reason"):
        end(disk.path, disk)


def test_a_hub_that_does_not_let_us_in_is_asked_again(tmp_path: Path, no_token: None) -> None:
    tries: list[HubAddress] = []

    def enter(address: HubAddress) -> str:
        """Fail at the first try, and succeed later."""
        tries.append(address)
        if len(tries) == 1:
            raise PeerLostError("this hub is about to end")
        return "in"

    with hub_token(tmp_path, None) as (token, file):
        announce(tmp_path, HubAddress("10.0.0.1", 4711, token), file)
        assert find_hub(config_at(tmp_path), None, enter) == "in"
    assert len(tries) == 2


def test_a_hub_that_never_comes_is_a_deadline_which_says_what_was_wrong(tmp_path: Path, no_token: None) -> None:
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s for the hub of this run.*is no run directory"):
        find_hub(config_at(tmp_path, rendezvous=0.1), None, lambda found: found)


def test_hosts_that_share_no_folder_find_the_hub_at_its_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASH_RDZV_ENDPOINT", "node7:4711")
    config = make_config(cluster={"nodes": 2, "hub": ":29500", "gpus_per_node": 0})
    found = find_hub(config, "ab" * 32, lambda address: address)
    assert found == HubAddress("node7", 29500, bytes.fromhex("ab" * 32))
    assert "FLASH_TOKEN" not in os.environ


@pytest.mark.parametrize("endpoint", ["[::1]:29577", "127.0.0.1:29577", "localhost:29577"])
def test_a_job_on_one_machine_is_reached_at_the_loopback_address_that_it_names(endpoint: str) -> None:
    host = address_towards(endpoint)
    assert host in (("::1", "127.0.0.1") if "local" in endpoint else (endpoint.rpartition(":")[0].strip("[]"),))


def test_a_first_node_that_leads_nowhere_is_named() -> None:
    with pytest.raises(ConfigError, match=r"FLASH_RDZV_ENDPOINT = no\.such\.host\.invalid:1: .* cannot be resolved"):
        address_towards("no.such.host.invalid:1")


def test_a_loopback_address_of_ones_own_name_is_not_announced_to_other_machines() -> None:
    def debian(host: str, port: int) -> list[tuple[Any, ...]]:
        """Resolve names like Debian, which gives the machine's own name a loopback address."""
        found = ["127.0.1.1"] if host == "node1" else ["127.0.1.1", "10.1.2.3"]
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (each, port)) for each in found]

    assert not address_towards("node1:29577", debian).startswith("127.")


def test_a_token_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FLASH_TOKEN is no token"), hub_token(tmp_path, "short"):
        pass


@pytest.mark.parametrize(
    ("host", "hint"), [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", False)]
)
def test_where_no_hub_lets_us_in_at_a_loopback_address_the_error_says_who_can_join(host: str, hint: bool) -> None:
    with pytest.raises(PeerLostError) as refused:
        anyio.run(ask, HubAddress(host, 9, bytes(32)), p.RunRequest(p.dialect()))
    assert ("only nodes on its own machine can join" in str(refused.value)) == hint
