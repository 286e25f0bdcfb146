"""Where the service listens, and who may: addresses, sockets, token files, cookies."""

from __future__ import annotations

import os
import socket

import pytest

from envs.sandbox.protocol.tokens import ADMIN, Token, Tokens, read_tokens
from envs.sandbox.service.server import Address, open_socket
from flash.errors import ConfigError
from tests.envs.sandbox.services import OTHER_TOKEN, TOKEN


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:127.0.0.1", "::ffff:0.0.0.0"])
def test_a_public_address_needs_tls(host):
    with pytest.raises(ConfigError, match="travel in the clear"):
        open_socket(Address(host=host, port=0))


def test_tls_needs_a_key_and_loopback_nothing(tmp_path):
    with pytest.raises(ConfigError, match="both a certificate and its key"):
        open_socket(Address(certificate=tmp_path / "c"))
    open_socket(Address(port=0)).close()


def test_a_unix_socket_is_its_owners(tmp_path):
    path = tmp_path / "s"
    bound = open_socket(Address(unix=path))
    assert path.stat().st_mode & 0o777 == 0o600
    bound.listen()
    with pytest.raises(ConfigError, match=r"listens at .* already"):
        open_socket(Address(unix=path))
    bound.close()
    open_socket(Address(unix=path)).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        open_socket(Address(unix=path))
    assert path.read_text() == "precious"


def test_a_port_in_use_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            open_socket(Address(port=taken.getsockname()[1]))


def test_a_token_file_is_made_once_and_must_be_private(tmp_path):
    path = tmp_path / "tokens"
    made = read_tokens(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(made[ADMIN].secret) >= 32
    assert read_tokens(path) == made
    for mode in (0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="readable by nobody else"):
            read_tokens(path)
    path.chmod(0o600)
    assert read_tokens(path) == made
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in ("link", "pipe", ".", "missing/tokens"):
        with pytest.raises(ConfigError):
            read_tokens(tmp_path / other)


@pytest.mark.parametrize("text", ["admin", "admin a b", f"a {TOKEN}\na {OTHER_TOKEN}", "\udcff x"])
def test_a_token_file_that_is_wrong_is_refused(tmp_path, text):
    path = tmp_path / "tokens"
    path.write_bytes(os.fsencode(text))
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        read_tokens(path)


def test_short_tokens_and_none_are_refused():
    with pytest.raises(ConfigError, match="no token"):
        Tokens({})
    with pytest.raises(ConfigError, match="at least 22"):
        Tokens({"a": Token("short")})
    with pytest.raises(ConfigError, match="a header cannot carry"):
        Tokens({"a": Token("ü" * 40)})
    with pytest.raises(ConfigError, match="the same token"):
        Tokens({ADMIN: Token(TOKEN), "other": Token(TOKEN)})


def test_a_cookie_ends_and_cannot_be_changed():
    now = [0.0]
    tokens = Tokens({"a": Token(TOKEN), "b": Token(OTHER_TOKEN)}, wall=lambda: now[0])
    cookie = tokens.cookie_for("a")
    assert tokens.name_of_cookie(cookie) == "a"
    assert tokens.name_of_cookie("b" + cookie[1:]) is None
    assert tokens.name_of_cookie(cookie.replace("|43200|", "|99999|")) is None
    now[0] = 50_000.0
    assert tokens.name_of_cookie(cookie) is None
