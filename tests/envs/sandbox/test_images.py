"""Errors of the programs that make images."""

from __future__ import annotations

import pytest

from envs.sandbox.images import _run
from flash.errors import ConfigError


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
