from __future__ import annotations

import pytest

from envs.sandbox.engines.docker_containers import Users, parse_users
from flash.errors import ConfigError, SandboxStartError


def test_no_two_containers_have_the_same_user_and_one_that_is_gone_gives_it_back():
    users = Users(range(500, 504))
    drawn = [users.draw() for _ in range(3)]
    assert len(set(drawn)) == 3
    assert set(drawn) < set(range(500, 504))
    users.record("a", drawn[0])
    users.give_up(drawn[0])
    users.give_up(drawn[1])
    users.set_listed({"found on the engine": drawn[1]})
    users.record("b", users.draw())
    with pytest.raises(SandboxStartError, match="each of the 4 users"):
        users.draw()
    users.release("a")
    users.release("never heard of")
    assert users.draw() == drawn[0]
    users.set_listed({"a container of another service": drawn[2]})
    assert users.draw() == drawn[1]
    users.set_listed({"found again": drawn[1]})
    users.release("found again")
    users.give_up(drawn[1])
    assert users.draw() == drawn[1]


def test_a_range_of_users_is_two_numbers():
    assert parse_users("20000-29999") == range(20000, 30000)
    for text in ("", "5", "-5", "5-", "9-3", "0-3", "a-b", "1-4294967295"):
        with pytest.raises(ConfigError, match="expected FIRST-LAST"):
            parse_users(text)
