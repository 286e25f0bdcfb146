"""Answers that are one fragment, repeated: each reader of answers takes linear time, on the loop or in a worker."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable

import pytest

from envs.arithmetic import last_number
from envs.countdown import what_is_wrong
from envs.frozen_lake import read_move
from envs.instructions import KINDS, InstructionProblem
from envs.reasoning_gym import final_answer
from envs.rewards.exact import exact_match
from envs.textworld.game import command_of

FRAGMENTS = r"""
 |.|.. |!?|, |;|-|- |--|/|*|**|_|_{|_{=|^|^{|%|=|x=|==|:|"|'|’|“|(|)|()|[|]|{|}|{}|\|\\|\{|\}|$|$$|$1|1$|$ |
\(|\[|\(1|#|# |####|#### |1|9|0|1.|.1|1,|1,234|1 |1 234|123 |1/|1 / |1e|1e9|1-|-1|1+|1 + |1^|1^{1|1!|1%|
1 percent|1:|1x|1 x |1 or |1m |1 m|1 m/|1 a.|a|a |a-|a'|a.|a. |a.\n|ab, |A|(A) |A) |É|x_|x(|not |word |and |
to |1 to |\boxed|\boxed{|\boxed{}|\boxed{1|\boxed{1}|\boxed{\boxed{1}|\boxed 1|\fbox{|\frac|\frac{|\frac{1}|
\frac{1}{2}|\sqrt|\sqrt{|\sqrt(|\text{|\text{a|\text{a}|\mathrm{1}|\pi|\pi |\left|\left(|\,|\!|\ |~|\quad|
\times |\cdot|1\times 10|1\times 10^{|\approx |1\approx |\binom{|answer|answer |answer is|answer is |
answer is 1|answer is 1 |answer a |Answer: |Answer: 1. |**Answer:** |answer is not |final answer is $|
<answer>|</answer>|<answer>1|>|> |<|left |1 + 1 = 2|dollars|$5 |\$|\$1|€|€1|USD ||
""".replace("\n", "").split("|")

LENGTH = 10_000
MOST_S = 0.5
"""Processor seconds for one answer; quadratic patterns took 1.2 to 10."""


def texts() -> list[str]:
    """Return each fragment repeated, alone and within something that a pattern can begin or end with."""
    repeated = [
        fragment * (LENGTH // len(fragment)) for fragment in [*filter(None, FRAGMENTS), "\n", "\t", "\r\n", "\u2009"]
    ]
    return [
        around.replace("…", text)
        for text in repeated
        for around in ("…", "a river is wide and…", "…x", "1…1", r"\boxed{…}", "#### …", "The answer is …\n…")
    ]


def slowest(read: Callable[[str], object]) -> tuple[float, str]:
    """Return the processor seconds of the slowest text, and how it begins."""
    worst = 0.0, ""
    for text in texts():
        start = time.process_time()
        read(text)
        worst = max(worst, (time.process_time() - start, text[:60]))
    return worst


_quoted = KINDS["quoted"](random.Random(0), "river")

READERS: dict[str, Callable[[str], object]] = {
    "arithmetic": last_number,
    "countdown": lambda answer: what_is_wrong(answer, (1, 2), 3),
    "exact": lambda answer: exact_match(answer, "1"),
    "frozen lake": read_move,
    "instructions": InstructionProblem("river", [_quoted]).missing,
    "reasoning gym": final_answer,
    "text game": command_of,
}


@pytest.mark.parametrize("name", READERS)
def test_an_answer_of_repeated_fragments_is_read_in_linear_time(name: str) -> None:
    seconds, text = slowest(READERS[name])
    assert seconds < MOST_S, text


@pytest.mark.slow
def test_mathematics_of_repeated_fragments_is_read_in_linear_time() -> None:
    pytest.importorskip("math_verify")
    rewards = importlib.import_module("envs.rewards.math")
    seconds, text = slowest(lambda answer: rewards.math_equal(answer, "5"))
    assert seconds < MOST_S + rewards.MOST_CPU_S, text
