"""Who may use the service: token files."""

from __future__ import annotations

import os

import pytest

from envs.sandbox.tokens import ADMIN, Token, Tokens, read_tokens
from flash.errors import ConfigError
from tests.envs.sandbox.services import OTHER_TOKEN, TOKEN


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
