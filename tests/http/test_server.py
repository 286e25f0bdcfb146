"""Addresses and sockets at which a server listens."""

from __future__ import annotations

import socket

import pytest

from flash.errors import ConfigError
from flash.http.server import HttpAddress, open_socket


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_a_public_address_needs_tls(host):
    with pytest.raises(ConfigError, match="travel in the clear"):
        open_socket(HttpAddress(host=host, port=0))


def test_tls_needs_a_key_and_loopback_nothing(tmp_path):
    with pytest.raises(ConfigError, match="both a certificate and its key"):
        open_socket(HttpAddress(certificate=tmp_path / "c"))
    for host in ("127.0.0.1", "::ffff:127.0.0.1"):
        open_socket(HttpAddress(host=host, port=0)).close()


def test_a_unix_socket_is_its_owners(tmp_path):
    path = tmp_path / "s"
    bound = open_socket(HttpAddress(unix=path))
    assert path.stat().st_mode & 0o777 == 0o600
    bound.listen()
    with pytest.raises(ConfigError, match=r"listens at .* already"):
        open_socket(HttpAddress(unix=path))
    bound.close()
    open_socket(HttpAddress(unix=path)).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        open_socket(HttpAddress(unix=path))
    assert path.read_text() == "precious"


def test_a_port_in_use_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            open_socket(HttpAddress(port=taken.getsockname()[1]))


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    with open_socket(HttpAddress()) as bound:
        # Where asyncio looks before it turns Nagle's algorithm off.
        assert bound.proto == socket.IPPROTO_TCP
