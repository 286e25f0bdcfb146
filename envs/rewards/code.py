"""Verifiers that judge programs by tests in sandboxes, for data sets.

The answer column holds the tests as JSON: `{"language": "python", "tests": [{"stdin": "1 2", "stdout": "3"}]}`;
`envs.judging.options.Suite` describes all fields. `passed_share` and `all_passed` use sandboxes of this machine's
engine. For a sandbox service, other languages or other limits, make your own verifier:

    # my_rewards.py, next to the config
    from envs.rewards.code import code_verifier
    judged = code_verifier(reward="all", sandboxes={"at": "https://boxes:8700", "token_file": "tokens"})
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from envs.judging.judge import SandboxOpener, shared_judge
from envs.judging.options import Language, Suite, check_suite, judge_pool_of, languages_with, limits_of
from envs.sandbox.open import open_sandboxes
from flash.errors import DECODE_ERRORS, ConfigError, RewardError


def code_verifier(
    *,
    reward: Literal["all", "share"] = "share",
    languages: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    sandboxes: Mapping[str, Any] | None = None,
    test_programs: bool = False,
    opener: SandboxOpener = open_sandboxes,
) -> Callable[[str, str], Awaitable[float]]:
    """Make a verifier that runs the program of a completion. `envs.dataset` awaits it for each answer.

    Args:
        reward: `all`: 1 if all tests pass, else 0. `share`: the share of the tests that pass.
        languages: further languages by name, in the form of `envs.judging.options.Language`.
        limits: limits of a program, in the form of `envs.judging.options.JudgingLimits`.
        sandboxes: origin of the sandboxes, in the form of `envs.judging.options.JudgePool`.
        test_programs: allow tests of the form {program}. A program that is written to deceive such a test can pass it.
        opener: function that opens the sandboxes of a node; only tests replace it.

    Raises:
        ConfigError: an argument has the wrong form.
    """
    known, allowed, pool = languages_with(languages or {}), limits_of(limits or {}), judge_pool_of(sandboxes or {})

    async def judged(completion: str, answer: str) -> float:
        """Return the reward of a completion for the tests in the answer column.

        Raises:
            RewardError: the answer column does not hold valid tests.
            SandboxError: every sandbox failed, and not because of the program, or none was free in time.
        """
        suite = _suite(answer, known, test_programs)
        judge = await shared_judge(pool, opener)
        # For the reward `all`, the first test that fails decides, so the tests after it need not run.
        verdict = await judge.judge(completion, suite, known, allowed, every=reward == "share")
        return verdict.share if reward == "share" else float(verdict.passed == verdict.total)

    return judged


def _suite(answer: str, languages: dict[str, Language], test_programs: bool) -> Suite:
    """Return the tests in an answer column. Raises RewardError if the text does not hold valid tests."""
    try:
        suite = msgspec.json.decode(answer, type=Suite)
        check_suite(suite, languages, test_programs=test_programs)
    except (*DECODE_ERRORS, ConfigError) as error:
        raise RewardError(f"the answer column does not hold tests: {error}") from error
    return suite


passed_share = code_verifier(reward="share")
"""Verifier that returns the share of the tests that the program passes."""
all_passed = code_verifier(reward="all")
"""Verifier that returns 1.0 if the program passes all tests, else 0.0."""
