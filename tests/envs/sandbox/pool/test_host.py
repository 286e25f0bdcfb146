"""What a sandbox is promised of a host."""

from __future__ import annotations

import msgspec
import pytest

from envs.sandbox.api import Spec
from envs.sandbox.pool.host import demand


def test_too_small_a_share_of_a_cpu_is_refused_and_not_taken_for_no_limit():
    with pytest.raises(msgspec.ValidationError, match=r">= 0.01 - at `\$.cpus`"):
        msgspec.convert({"image": "i", "cpus": 1e-10}, Spec)
    assert demand(msgspec.convert({"image": "i", "cpus": 0.01}, Spec)).millicpus == 10
