import importlib
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

from envs.rewards.final_answer import final_answer
from envs.rewards.verifier import verify
from flash.errors import ConfigError, RewardError


@pytest.fixture
def math_rewards():
    pytest.importorskip("math_verify")
    return importlib.import_module("envs.rewards.math")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "envs.rewards.math", raising=False)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="the extra `math` of Flash's wheel"):
        importlib.import_module("envs.rewards.math")


def read_forms():
    """Return completion, reference and reward of each line of the table."""
    lines = (Path(__file__).parent / "math_forms.txt").read_text(encoding="utf-8").splitlines()[1:]
    for line in lines:
        if not line.startswith("# "):
            right = " => " in line
            completion, _, answer = line.partition(" => " if right else " =/= ")
            yield completion.replace("⏎", "\n"), answer, float(right)


@pytest.mark.slow
def test_every_form_of_the_table_is_worth_what_it_says(math_rewards):
    forms = [*read_forms()]
    assert len(forms) > 350
    other = [form for form in forms if math_rewards.math_equal(*form[:2]) != form[2]]
    assert other == []


ENDLESS = [
    r"10^{10^{10}}",
    "99999999999!",
    r"9^{9^{9^{9}}}",
    "2^" * 300 + "2",
    r"\binom{1000000000}{500000000}",
    r"{1000000000 \choose 500000000}",
    r"\sum_{k=1}^{100000000} \frac{1}{k}",
    r"\prod_{k=1}^{100000000} k",
    r"\gcd(10^{10^{9}}, 3)",
    "1e999999999",
    "(" * 400 + "1" + ")" * 400,
    "9" * 100_000,
]


@pytest.mark.parametrize("expression", ENDLESS, ids=lambda text: text[:30])
def test_an_expression_too_large_to_be_evaluated_is_wrong_at_once(math_rewards, expression):
    start = time.process_time()
    assert math_rewards.math_equal(rf"\boxed{{{expression}}}", "5") == 0.0
    assert math_rewards.math_equal("5", expression) == 0.0
    assert math_rewards.math_equal(rf"\boxed{{{expression}}}", expression) == 1.0
    assert time.process_time() - start < 1.5 * math_rewards.MOST_CPU_S


@pytest.mark.slow
def test_a_comparison_may_not_use_more_than_its_processor_time(math_rewards):
    start = time.process_time()
    assert math_rewards.math_equal(r"\boxed{\int \frac{1}{x^{13}+x^7+1} dx}", "5") == 0.0
    assert time.process_time() - start < 2 * math_rewards.MOST_CPU_S


def test_a_thread_compares_without_a_bound_of_its_own(math_rewards):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_rewards.math_equal, r"\boxed{\sqrt{8}}", r"2\sqrt{2}").result() == 1.0


TINY = f"0.{'0' * 330}1"


@pytest.mark.parametrize("tiny", [TINY, f"-{TINY}"])
def test_a_decimal_too_small_for_a_float_is_a_wrong_answer_and_no_error(math_rewards, tiny):
    assert math_rewards.math_equal(f"the answer is $x+{tiny}$", "x+2") == 0.0
    assert math_rewards.math_equal("the answer is $x+2$", f"x+{tiny}") == 0.0
    assert math_rewards.math_equal(f"the answer is ${tiny}+x$", f"x+{tiny}") == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{" * 8000 + "5" + "}" * 8000, None),
        (r"\boxed{" * 4000 + "5" + r"}, \boxed{6}" * 4000, "6"),
        (r"\boxed{ . " * 8000 + "}" * 8000, None),
    ],
    ids=["nested", "nested in lists", "without a content"],
)
def test_nested_boxes_take_linear_memory(text, answer):
    tracemalloc.start()
    try:
        found = final_answer(text)
        assert tracemalloc.get_traced_memory()[1] < 150 * len(text)
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.endswith(answer or "}")


def test_many_headings_take_linear_time():
    start = time.process_time()
    assert final_answer("#### Part\n" * 200_000 + "so it is 7") == "7"
    assert time.process_time() - start < 4


def test_boxes_with_separators_between_them_are_a_list_of_different_contents():
    boxed = [rf"\boxed{{{number}}}" for number in range(70)]
    assert final_answer(r"\boxed{2}, \boxed{3} and \boxed{2}") == "2, 3"
    assert final_answer(r"\boxed{2} or rather \boxed{3}, \boxed4") == "3, 4"
    assert final_answer(", ".join(boxed)) == "64, 65, 66, 67, 68, 69"
    assert final_answer(r"\boxed{ . } is 3") is None


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_honest_answer_does_not_wait_behind_endless_ones(math_rewards):
    path = "envs.rewards.math:math_equal"
    rewards = {}

    async def judge(completion, answer):
        rewards[completion] = await verify(path, completion, answer, timeout=60)

    async with anyio.create_task_group() as tasks:
        for exponent in range(10, 18):
            tasks.start_soon(judge, rf"\boxed{{10^{{10^{{{exponent}}}}}}}", "5")
        await judge(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
    assert sorted(rewards.values()) == [0.0] * 8 + [1.0]


def test_an_unreadable_reference_is_an_error_and_not_a_zero(math_rewards):
    with pytest.raises(RewardError, match="cannot be read"):
        math_rewards.math_equal("3", "")
