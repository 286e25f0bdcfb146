"""Instructions that can be checked: a sentence about a topic that keeps one or more rules of form; one turn.

"Write one sentence about a river. Use exactly 8 words." The reward is 1.0 where the answer is one sentence with that
word in it and keeps every rule, else 0.0; the note says what is missing. Such rules are those of IFEval (Zhou et al.
2023, arXiv 2311.07911): a program decides whether they are kept. Nothing else is judged: training need not keep a
sentence sensible.

Topics are divided into training and held-out ones: an evaluation asks of topics that were never trained.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from envs.generated import in_held_out_part
from flash.environment import Info, StepResult, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

TOPICS: Final = """
apple autumn baker banana beach bear bee bicycle bird boat book bottle bread bridge brother bus cake camera candle car
castle cat chair chicken child clock cloud coat coffee cook corn cow dancer desert doctor dog door dragon dream drum
duck eagle earth egg elephant engine eye farmer father feather film fire fish flower forest fox friend frog fruit game
garden ghost giant gift girl glass goat gold grandmother grass guitar hammer hat honey horse hospital house island
jacket journey key king kitchen kite ladder lake lamp lemon letter lion machine map market milk mirror money monkey
moon morning mother mountain museum music nest neighbour night nurse ocean orange owl painter palace paper parrot
pencil penguin phone piano picture pilot pirate planet poem potato prince puzzle queen rabbit radio rain ring river
road robot rocket roof rose sailor salt sand school season shadow sheep ship shoe shop singer sister sky snake snow
soldier song soup spider spring star stone storm street student summer sun sword table tailor tea teacher tiger tomato
tower town train tree truck uncle valley village violin voice wall watch water whale wheel wind window winter witch
wood writer
""".split()  # noqa: SIM905
"""What sentences are about: nouns whose plural begins with them."""

BEGINNINGS: Final = "Yesterday Today Sometimes Once Perhaps Every Many When If After Although Nobody".split()  # noqa: SIM905
ENDINGS: Final = "today again forever together tomorrow home outside alone now here".split()  # noqa: SIM905
WORDS: Final = "small old happy never always quiet bright because under while strange green people world".split()  # noqa: SIM905
LETTERS: Final = "abcdghiklmnoprstuwy"

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+")
GAP = re.compile(r"\w+")
"""Separates the gaps between words. Patterns here must take linear time: a degenerate answer is one sign, repeated."""

LEAST_WORDS = 4
"""Different words of a sentence; what has fewer says nothing about its topic."""

MOST_RULES = 3


class Rule(NamedTuple):
    """A rule of form."""

    text: str
    """As the model is told."""
    kept: Callable[[str], bool]
    """Whether an answer without space around it keeps it."""
    needed: str = ""
    """Words that it asks for."""


def words(answer: str) -> list[str]:
    """Return the words of an answer, in lower case."""
    return WORD.findall(answer.lower())


def ends_early(answer: str) -> bool:
    """Return True if a sentence ends before the last word: an end mark and then white space stand in a gap."""
    for gap in GAP.split(answer)[:-1]:
        end = re.search(r"[.!?]", gap)
        if end and re.search(r"\s", gap[end.end() :]):
            return True
    return False


def _exactly(rng: random.Random, needed: str) -> Rule:
    count = rng.randint(5, 12)
    return Rule(f"Use exactly {count} words.", lambda answer: len(words(answer)) == count)


def _lower(rng: random.Random, needed: str) -> Rule:
    return Rule("Write it in lower case only.", lambda answer: answer == answer.lower())


def _upper(rng: random.Random, needed: str) -> Rule:
    return Rule("Write it in CAPITAL LETTERS only.", lambda answer: answer == answer.upper())


def _begin(rng: random.Random, needed: str) -> Rule:
    word = rng.choice(BEGINNINGS)
    return Rule(f'Begin with the word "{word}".', lambda answer: words(answer)[:1] == [word.lower()], word)


def _end(rng: random.Random, needed: str) -> Rule:
    word = rng.choice(ENDINGS)
    return Rule(f'End with the word "{word}".', lambda answer: words(answer)[-1:] == [word], word)


def _contain(rng: random.Random, needed: str) -> Rule:
    pair = rng.sample(WORDS, 2)
    text = 'Use the words "{}" and "{}".'.format(*pair)
    return Rule(text, lambda answer: set(pair) <= set(words(answer)), " ".join(pair))


def _question(rng: random.Random, needed: str) -> Rule:
    return Rule("Make it a question.", lambda answer: answer.endswith("?"))


def _exclaim(rng: random.Random, needed: str) -> Rule:
    return Rule("End it with an exclamation mark.", lambda answer: answer.endswith("!"))


def _quoted(rng: random.Random, needed: str) -> Rule:
    text = "Put it in double quotation marks."
    return Rule(text, lambda answer: re.fullmatch(r'["“][^"“”]+["”]', answer) is not None)


def _without(rng: random.Random, needed: str) -> Rule:
    letter = rng.choice([one for one in LETTERS if one not in needed.lower()])
    return Rule(f'Do not use the letter "{letter}".', lambda answer: letter not in answer.lower())


KINDS: Final[dict[str, Callable[[random.Random, str], Rule]]] = {
    "exactly": _exactly,
    "lower": _lower,
    "upper": _upper,
    "begin": _begin,
    "end": _end,
    "contain": _contain,
    "question": _question,
    "exclaim": _exclaim,
    "quoted": _quoted,
    "without": _without,
}
"""What draws a rule, by its name; `needed` are words that the sentence has to have, which the last one depends on."""

CONFLICTS: Final = ({"lower", "upper", "begin"}, {"question", "exclaim", "quoted", "end"})
"""At most one of each of these is asked for at once."""


class InstructionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked for.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    rules: int = 1
    """Most rules of one problem; each number from 1 on is as likely."""
    kinds: list[str] = msgspec.field(default_factory=lambda: [*KINDS])
    """Names of those to draw from."""

    def __post_init__(self) -> None:
        kinds = self.kinds
        if not kinds or len(set(kinds)) != len(kinds) or not set(kinds) <= KINDS.keys():
            raise ConfigError(f"kinds must be one or more of {', '.join(KINDS)}, each once, but is {kinds!r}")
        if not 1 <= self.rules <= MOST_RULES:
            raise ConfigError(f"rules must be a whole number from 1 to {MOST_RULES}, but is {self.rules!r}")


class InstructionProblem(NamedTuple):
    """What is asked of one sentence."""

    topic: str
    rules: list[Rule]

    def asked(self) -> str:
        """The prompt."""
        article = "an" if self.topic[0] in "aeiou" else "a"
        return " ".join([f"Write one sentence about {article} {self.topic}.", *(rule.text for rule in self.rules)])

    def missing(self, answer: str) -> str | None:
        """Return the first thing that an answer lacks; None if it lacks nothing."""
        text, said = answer.strip(), words(answer)
        if len(set(said)) < LEAST_WORDS or ends_early(text):
            return f"not one sentence of at least {LEAST_WORDS} different words"
        if not any(word.startswith(self.topic) for word in said):
            return f"not about {self.topic}"
        return next((rule.text for rule in self.rules if not rule.kept(text)), None)


def draw(rng: random.Random, topics: list[str], options: InstructionOptions) -> InstructionProblem:
    """A topic and rules that can be kept together."""
    topic, chosen = rng.choice(topics), _kinds(rng, options)
    rules: list[Rule] = []
    for kind in chosen:
        rules.append(KINDS[kind](rng, " ".join([topic, *(rule.needed for rule in rules)])))
    return InstructionProblem(topic, rules)


def _kinds(rng: random.Random, options: InstructionOptions) -> list[str]:
    """Of rules that can be kept together, in the order of their table."""
    chosen: list[str] = []
    for kind in rng.sample(options.kinds, rng.randint(1, min(options.rules, len(options.kinds)))):
        if not any(kind in group and group & {*chosen} for group in CONFLICTS):
            chosen.append(kind)
    return [kind for kind in KINDS if kind in chosen]


@functools.cache
def _topics(*, held_out: bool) -> list[str]:
    """Of one side of the division."""
    return [topic for topic in TOPICS if in_held_out_part(topic) == held_out]


class Instructions:
    """One sentence, in chat form."""

    def __init__(self, options: InstructionOptions) -> None:
        self._options = options
        self._problem: InstructionProblem | None = None

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Ask what this seed asks."""
        self._problem = draw(random.Random(seed), _topics(held_out=is_held_out(seed)), self._options)
        return [Message("user", self._problem.asked())], {}

    async def step(self, action: str) -> StepResult:
        """Check the answer; the episode ends."""
        if self._problem is None:
            raise EnvError("step() was called before reset()")
        missing = self._problem.missing(action)
        return "", float(missing is None), True, False, {"note": missing or ""}

    async def close(self) -> None:
        """Nothing to release."""
