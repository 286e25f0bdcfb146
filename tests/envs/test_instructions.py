"""Instructions: every rule is kept by a sentence that does, and broken by its kin; problems can always be solved."""

from __future__ import annotations

import random

import pytest

from envs.generated import in_held_out_part
from envs.instructions import (
    CONFLICTS,
    KINDS,
    TOPICS,
    InstructionOptions,
    InstructionProblem,
    Instructions,
    Rule,
    draw,
    ends_early,
    words,
)
from flash.environment import HELD_OUT, Environment
from flash.errors import ConfigError, EnvError
from flash.types import Message


def rule(kind: str, text: str) -> Rule:
    """The rule of this kind with this text."""
    for seed in range(1000):
        drawn = KINDS[kind](random.Random(seed), "river")
        if drawn.text == text:
            return drawn
    raise AssertionError(text)


RULES = [
    ("exactly", "Use exactly 5 words.", "The river's bed is dry.", "The river bed is dry now."),
    ("lower", "Write it in lower case only.", "the river is cold.", "The river is cold."),
    ("upper", "Write it in CAPITAL LETTERS only.", "THE RIVER IS COLD.", "THE RIVER IS COLd."),
    ("begin", 'Begin with the word "Once".', "Once a river was here.", "Onceover a river was here."),
    ("begin", 'Begin with the word "Once".', '"Once, a river was here."', "A river was here once."),
    ("end", 'End with the word "home".', "The river is my Home!", "The river has no homes."),
    ("contain", 'Use the words "old" and "under".', "Under it an old river runs.", "An older river runs under it."),
    ("question", "Make it a question.", "Where does the river end?", "Where does the river end."),
    ("exclaim", "End it with an exclamation mark.", "The river is so cold!", "The river! It is so cold"),
    ("quoted", "Put it in double quotation marks.", '"The river is cold."', '"The river" is cold.'),
    ("quoted", "Put it in double quotation marks.", "“The river is cold.”", "'The river is cold.'"),
    ("without", 'Do not use the letter "s".', "The river can be cold.", "The river is cold."),
]


@pytest.mark.parametrize(("kind", "text", "kept", "broken"), RULES)
def test_a_rule_is_kept_by_what_keeps_it_alone(kind: str, text: str, kept: str, broken: str) -> None:
    problem = InstructionProblem("river", [rule(kind, text)])
    assert problem.asked() == f"Write one sentence about a river. {text}"
    assert problem.missing(f" {kept}\n") is None
    assert problem.missing(broken) is not None


@pytest.mark.parametrize(
    "answer", ["", "river", "river river river river", "A river runs. It is cold.", "A road is long."]
)
def test_without_one_sentence_about_the_topic_nothing_is_earned(answer: str) -> None:
    assert InstructionProblem("river", []).missing("Two rivers, wide and cold, meet near St.Ives.") is None
    assert InstructionProblem("river", []).missing(answer) is not None


@pytest.mark.parametrize(
    ("answer", "early"),
    [
        ("A river runs", False),
        ("A river runs. ", False),
        ("A river runs. It", True),
        ("A river runs.It", False),
        ('A river runs." (It', True),
        ("A river runs.\n\nIt", True),
        (". A river runs", True),
        ("A river . . . runs", True),
        (" A, river; runs?!", False),
    ],
)
def test_a_sentence_that_another_one_follows_ends_early(answer: str, early: bool) -> None:
    assert ends_early(answer) == early


def solved(problem: InstructionProblem) -> str:
    """A sentence that keeps all rules, put together from what they ask for."""
    texts = [one.text for one in problem.rules]
    asked = [word.strip('".') for text in texts for word in text.split() if word.startswith('"')]
    first, last = [problem.topic], list[str]()
    for text in texts:
        if text.startswith("Begin"):
            first = [asked.pop(0), *first]
        elif text.startswith("End with"):
            last = [asked.pop(0)]
        elif text.startswith("Use the words"):
            first += [asked.pop(0), asked.pop(0)]
        elif text.startswith("Do not"):
            asked.pop(0)
    count = next((int(text.split()[2]) for text in texts if text.startswith("Use exactly")), 8)
    letter = next((text[-3] for text in texts if text.startswith("Do not")), "0")
    strange = "xyx zef fej vee qov zzz jij xix exe vov quz jef ziz fof".split()  # noqa: SIM905
    fill = [word for word in strange if letter not in word]
    sentence = " ".join([*first, *fill[: count - len(first) - len(last)], *last])
    joined = " ".join(texts)
    sentence = sentence.upper() if "CAPITAL" in joined else sentence.lower() if "lower" in joined else sentence
    ending = {"question": "?", "exclamation": "!"}
    sentence += next((mark for name, mark in ending.items() if name in joined), "")
    return f'"{sentence}"' if "quotation" in joined else sentence


def test_every_problem_can_be_solved() -> None:
    for seed in range(3000):
        problem = draw(random.Random(seed), [*TOPICS], InstructionOptions(rules=3))
        assert problem.missing(solved(problem)) is None, (problem.asked(), solved(problem))
        assert 1 <= len(problem.rules) <= 3


@pytest.mark.anyio
async def test_held_out_topics_are_never_trained() -> None:
    env = Instructions(InstructionOptions(rules=2, kinds=["begin", "question"]))
    assert isinstance(env, Environment)
    shown: dict[bool, set[str]] = {False: set(), True: set()}
    for seed in [*range(300), *range(HELD_OUT, HELD_OUT + 300)]:
        observation, _ = await env.reset(seed)
        assert await env.reset(seed) == (observation, {})
        assert isinstance(observation, list)
        (message,) = observation
        assert isinstance(message, Message)
        topic = words(message.content)[5]
        assert in_held_out_part(topic) == (seed >= HELD_OUT)
        shown[seed >= HELD_OUT].add(topic)
    assert len(shown[True]) > 10
    assert not shown[True] & shown[False]
    _, reward, ended, cut, info = await env.step("No.")
    assert (reward, ended, cut) == (0.0, True, False)
    assert info["note"]


@pytest.mark.anyio
async def test_only_the_sentence_after_the_reasoning_is_checked() -> None:
    env = Instructions(InstructionOptions(kinds=["question"]))
    observation, _ = await env.reset(0)
    topic = words(observation[0].content)[5]  # pyright: ignore[reportAttributeAccessIssue]
    sentence = f"Where does the {topic} go now?"
    for answer, reward in ((f"<think>A question. Good.</think>\n{sentence}", 1.0), (f"<think>{sentence}", 0.0)):
        await env.reset(0)
        assert (await env.step(answer))[1] == reward


def test_rules_that_exclude_each_other_are_never_asked_for_together() -> None:
    options = InstructionOptions(rules=3)
    for seed in range(500):
        texts = [one.text for one in draw(random.Random(seed), ["river"], options).rules]
        assert sum(text.startswith(("Write", "Begin")) for text in texts) < 2
        assert sum(text.startswith(("Make", "End", "Put")) for text in texts) < 2
    assert all(group <= KINDS.keys() for group in CONFLICTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": 0}, "rules must be a whole number from 1 to 3, but is 0"),
        ({"kinds": []}, r"kinds must be one or more of exactly, .*, but is \[\]"),
        ({"kinds": ["lower", "lower"]}, "each once"),
        ({"kinds": ["rhyme"]}, "rhyme"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InstructionOptions(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.anyio
async def test_a_step_before_a_reset_is_named() -> None:
    with pytest.raises(EnvError, match="before reset"):
        await Instructions(InstructionOptions()).step("A river.")
