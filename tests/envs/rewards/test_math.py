import importlib
import sys

import pytest

from flash.errors import ConfigError, RewardError


@pytest.fixture
def math_rewards():
    pytest.importorskip("math_verify")
    return importlib.import_module("envs.rewards.math")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "envs.rewards.math", raising=False)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[math\]'"):
        importlib.import_module("envs.rewards.math")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5"),
        (r"first \boxed{1}, then \boxed{3}", "#### 3"),
        ("it makes 1,234.", "1234"),
        (r"\boxed{x^2+1}", "1+x^2"),
        (r"\boxed{\{1,2\}}", r"\boxed{\{2,1\}}"),
    ],
)
def test_equal_values_match_however_they_are_written(math_rewards, completion, answer):
    assert math_rewards.math_equal(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [(r"\boxed{4}, not 3", "3"), ("no idea", "3"), ("", "3"), (r"\boxed{3", "4"), ("3 or maybe 4", "3")],
)
def test_other_answers_do_not_match(math_rewards, completion, answer):
    assert math_rewards.math_equal(completion, answer) == 0.0


def test_an_unreadable_reference_is_an_error_and_not_a_zero(math_rewards):
    with pytest.raises(RewardError, match="cannot be read"):
        math_rewards.math_equal("3", "")
