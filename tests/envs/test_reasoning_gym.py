"""Reasoning Gym: what its graders were found to do, and problems whose graders may judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from envs import grader_report
from envs.generated import in_held_out_part
from envs.grader_report import GraderReport, certify, read_reports, same
from envs.reasoning_gym import ReasoningGym, ReasoningGymOptions, final_answer
from flash.environment import HELD_OUT, Environment, WarmStart
from flash.errors import ConfigError, EnvError
from flash.types import Message


class Problems:
    """A family of one problem with a grader that a test gives."""

    def __init__(self, grader: Callable[[str], float]) -> None:
        self._grader = grader

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"What is 40 + {index + 2}?", "answer": str(42 + index)}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else self._grader(answer)


def found(problems: Problems, most_s: float = 5.0) -> list[str]:
    """What is found out about a family."""
    return certify("sums", {}, lambda family, **settings: problems, most_s).refused


def graded(grader: Callable[[str], float], most_s: float = 5.0) -> list[str]:
    """What is found out about a grader of wrong answers."""
    return found(Problems(grader), most_s)


def test_a_grader_that_takes_right_answers_and_no_others_is_certified() -> None:
    assert graded(lambda answer: 0.0) == []
    assert graded(lambda answer: 0.9 * (len(answer) > 3)) == []


def test_a_grader_that_takes_a_bad_answer_is_refused() -> None:
    assert graded(lambda answer: float(not answer)) == ["gives full marks on an empty answer"]
    assert graded(lambda answer: float("42" in answer)) == ["gives full marks on the answer among others"]
    assert graded(lambda answer: float(len(answer) > 9999)) == [
        "gives full marks on 100 000 digits, 100 000 parentheses"
    ]


def test_a_grader_that_raises_or_runs_answers_is_refused() -> None:
    assert graded(lambda answer: float(int(answer or "0") == 7))[0].startswith("raises ValueError on white space, garb")

    def runs(answer: str) -> float:
        if "__import__" in answer:
            eval(answer)
        return 0.0

    assert graded(runs) == ["runs it as a program on a program"]

    def runs_and_raises(answer: str) -> float:
        runs(answer)
        return float(int(answer) == 7) if "__import__" in answer else 0.0

    assert graded(runs_and_raises) == ["runs it as a program on a program"]


def test_a_grader_that_does_not_end_is_refused() -> None:
    def hangs(answer: str) -> float:
        while "**" in answer:
            pass
        return 0.0

    assert graded(hangs, 0.3) == ["does not end within 0.3 s on a power without end"]


def test_a_grader_that_refuses_the_right_answer_is_refused() -> None:
    class Deaf(Problems):
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            return 0.5

    assert found(Deaf(float)) == ["gives less than full marks on the answer that comes with a problem"]


def test_problems_that_change_are_refused() -> None:
    calls: list[int] = []

    class Changing(Problems):
        def __getitem__(self, index: int) -> dict[str, Any]:
            calls.append(index)
            return super().__getitem__(len(calls))

    assert found(Changing(lambda answer: 0.0)) == ["its problems change from one call to the next"]


@pytest.mark.parametrize(
    ("bad", "answer", "equal"), [("1", "1.0", True), ("YES ", "yes", True), ("nan", "nan", True), ("1", "11", False)]
)
def test_a_bad_answer_that_happens_to_be_right_is_not_held_against_a_grader(bad: str, answer: str, equal: bool) -> None:
    assert same(bad, answer) == equal


def test_the_table_that_ships_has_every_family_and_says_why_some_are_refused() -> None:
    reports = read_reports()
    refused = {report.family: report.sentence() for report in reports.families if report.refused}
    assert len(reports.families) > 100
    assert 10 < len(refused) < 40
    assert "runs it as a program" in refused["spiral_matrix"]
    assert "`nan`" in refused["complex_arithmetic"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": []}, "must name one or more"),
        ({"families": ["gcd", "gcd"]}, "each once"),
        ({"families": ["gcd"], "settings": {"lcm": {}}}, "settings are given for lcm"),
        ({"families": ["gcd"], "timeout": 0.0}, "timeout must be"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReasoningGymOptions(**options)


def test_families_that_are_not_there_or_refused_are_refused_before_a_run() -> None:
    installed = read_reports().version
    ReasoningGym.check_families(ReasoningGymOptions(families=["all"]), installed)
    with pytest.raises(ConfigError, match="there is no family 'sums', only ab, "):
        ReasoningGym.check_families(ReasoningGymOptions(families=["sums"]), installed)
    with pytest.raises(ConfigError, match=r"the grader of spiral_matrix is refused: .*runs it as a program"):
        ReasoningGym.check_families(ReasoningGymOptions(families=["spiral_matrix"]), installed)


def test_another_version_of_the_package_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reasoning.gym 0\.0\.1 is installed, and graders were certified of \d"):
        ReasoningGym.check_families(ReasoningGymOptions(families=["gcd"]), "0.0.1")


def test_families_take_turns() -> None:
    options = ReasoningGymOptions(families=["gcd", "lcm", "ab"])
    assert [ReasoningGym.kind_of(seed, options) for seed in range(4)] == ["gcd", "lcm", "ab", "gcd"]
    every = ReasoningGymOptions(families=["all"])
    assert "spiral_matrix" not in every.names
    assert len(every.names) > 60


@pytest.mark.parametrize(
    ("said", "answer"),
    [(" 7 \n", "7"), ("so <answer>1</answer>, no: <answer> 2 </answer>.", "2"), ("<answer>3", "3"), ("", "")],
)
def test_the_final_answer_is_what_the_last_tags_hold(said: str, answer: str) -> None:
    assert final_answer(said) == answer


@pytest.mark.anyio
async def test_a_step_before_reset_is_an_environment_error() -> None:
    with pytest.raises(EnvError, match="before reset"):
        await ReasoningGym(ReasoningGymOptions(families=["gcd"])).step("1")


@pytest.mark.integration
@pytest.mark.anyio
async def test_real_problems_are_shown_and_judged_in_workers() -> None:
    options = ReasoningGymOptions(families=["gcd", "lcm"], settings={"gcd": {"max_value": 50}})
    env = ReasoningGym(options)
    assert isinstance(env, Environment)
    assert isinstance(env, WarmStart)
    alphabet = set(await anyio.to_thread.run_sync(env.alphabet))
    for seed, example in enumerate((await anyio.to_thread.run_sync(env.solved_examples, 4, 0))[::2]):
        (message,), info = await env.reset(2 * seed)
        assert isinstance(message, Message)
        assert (message.content, info) == (example.prompt, {"family": "gcd"})
        assert (await env.step(f"I think {example.answer}"))[1] == 1.0
        assert (await env.step("<answer>0</answer>"))[1] == 0.0
        assert set(example.prompt + example.answer) <= alphabet
    ((shown,), _), ((held_out,), _) = await env.reset(8), await env.reset(HELD_OUT)
    question = held_out.content.partition("\nThink")[0]
    assert in_held_out_part(question)
    assert not in_held_out_part(shown.content.partition("\nThink")[0])
    with pytest.raises(ConfigError, match="the grader of complex_arithmetic is refused: gives full marks on `nan`"):
        await ReasoningGym.prepare(
            ReasoningGymOptions(families=["complex_arithmetic"], settings={"complex_arithmetic": {"max_real": 9}})
        )
    with pytest.raises(ConfigError, match="unexpected keyword argument"):
        await ReasoningGym.prepare(msgspec.structs.replace(options, settings={"gcd": {"nonsense": 5}}))


@pytest.mark.integration
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("words", "message"), [(["--help"], "there is no family '--help'"), (["--write", "gcd"], "give it without names")]
)
async def test_wrong_words_certify_nothing_and_leave_the_table(words: list[str], message: str) -> None:
    before = grader_report.TABLE.read_bytes()
    with pytest.raises(ConfigError, match=message):
        await grader_report.main(words)
    assert grader_report.TABLE.read_bytes() == before


@pytest.mark.integration
@pytest.mark.anyio
async def test_the_table_says_what_is_found_out_now() -> None:
    kept = {report.family: report for report in read_reports().families}
    for family in ("chain_sum", "complex_arithmetic", "prime_factorization", "zebra_puzzles"):
        assert await grader_report.certified(family, {}) == kept[family]
    assert kept["chain_sum"] == GraderReport("chain_sum", [])
