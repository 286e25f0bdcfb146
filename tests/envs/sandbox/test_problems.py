"""Errors over HTTP: the same class at both ends."""

from __future__ import annotations

import pytest

from envs.sandbox.protocol import STATUS, error_of, problem_of
from flash import errors


@pytest.mark.parametrize("name", [name for name in STATUS if name.startswith("Sandbox")])
def test_an_error_travels_as_itself(name):
    error = getattr(errors, name)("what happened")
    problem = problem_of(error)
    assert problem.status == STATUS[name]
    again = error_of(problem)
    assert type(again) is type(error)
    assert str(again) == "what happened"
