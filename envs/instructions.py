"""Instructions: write one sentence about a topic that keeps one or more checkable rules of form. One turn.

An example: "Write one sentence about a river. Use exactly 8 words." The reward is 1.0 if the answer is one sentence
that contains the topic and keeps every rule, else 0.0. The note names the first fault. The rules are of the kind that
IFEval uses (Zhou et al. 2023, arXiv 2311.07911): a program can check them. Nothing else is judged, so training may make
sentences senseless.

Topics are divided into training and held-out ones: an evaluation uses only held-out topics, which are never trained.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from envs.generated import in_held_out_part
from envs.judging.programs import final_part
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
"""Topics of the sentences. The plural of each noun begins with the noun, so that plurals are recognized too."""

BEGINNINGS: Final = "Yesterday Today Sometimes Once Perhaps Every Many When If After Although Nobody".split()  # noqa: SIM905
"""Words with which a rule may let a sentence begin."""
ENDINGS: Final = "today again forever together tomorrow home outside alone now here".split()  # noqa: SIM905
"""Words with which a rule may let a sentence end."""
WORDS: Final = "small old happy never always quiet bright because under while strange green people world".split()  # noqa: SIM905
"""Words that a rule may require."""
LETTERS: Final = "abcdghiklmnoprstuwy"
"""Letters that a rule may forbid. Rare letters are left out, and `e`, which nearly every sentence needs."""

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+")
"""Pattern of a word, or of a number."""
GAP = re.compile(r"\w+")
"""Pattern that separates the gaps between words. All patterns here must take linear time: a degenerate answer may be a
single character that is repeated many times."""

LEAST_WORDS = 4
"""Fewest different words of a sentence. A shorter answer says nothing about its topic."""

MOST_RULES = 3
"""Largest value of `rules`. More rules could hardly ever be kept together."""


class Rule(NamedTuple):
    """A rule of form for the sentence, such as its number of words. A function of `KINDS` draws it."""

    text: str
    """Text of the rule in the prompt."""
    kept: Callable[[str], bool]
    """Function that returns True if an answer, stripped of surrounding white space, keeps the rule."""
    needed: str = ""
    """Words that the rule requires in the answer."""


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
    """Draw a rule on the number of words."""
    count = rng.randint(5, 12)
    return Rule(f"Use exactly {count} words.", lambda answer: len(words(answer)) == count)


def _lower(rng: random.Random, needed: str) -> Rule:
    """Return the rule of lower case."""
    return Rule("Write it in lower case only.", lambda answer: answer == answer.lower())


def _upper(rng: random.Random, needed: str) -> Rule:
    """Return the rule of upper case."""
    return Rule("Write it in CAPITAL LETTERS only.", lambda answer: answer == answer.upper())


def _begin(rng: random.Random, needed: str) -> Rule:
    """Draw a rule on the first word."""
    word = rng.choice(BEGINNINGS)
    return Rule(f'Begin with the word "{word}".', lambda answer: words(answer)[:1] == [word.lower()], word)


def _end(rng: random.Random, needed: str) -> Rule:
    """Draw a rule on the last word."""
    word = rng.choice(ENDINGS)
    return Rule(f'End with the word "{word}".', lambda answer: words(answer)[-1:] == [word], word)


def _contain(rng: random.Random, needed: str) -> Rule:
    """Draw a rule that requires two words."""
    pair = rng.sample(WORDS, 2)
    text = 'Use the words "{}" and "{}".'.format(*pair)
    return Rule(text, lambda answer: set(pair) <= set(words(answer)), " ".join(pair))


def _question(rng: random.Random, needed: str) -> Rule:
    """Return the rule of a question mark at the end."""
    return Rule("Make it a question.", lambda answer: answer.endswith("?"))


def _exclaim(rng: random.Random, needed: str) -> Rule:
    """Return the rule of an exclamation mark at the end."""
    return Rule("End it with an exclamation mark.", lambda answer: answer.endswith("!"))


def _quoted(rng: random.Random, needed: str) -> Rule:
    """Return the rule of quotation marks around the sentence, and nowhere else."""
    text = "Put it in double quotation marks."
    return Rule(text, lambda answer: re.fullmatch(r'["“][^"“”]+["”]', answer) is not None)


def _without(rng: random.Random, needed: str) -> Rule:
    """Draw a rule that forbids a letter. The words in `needed` must not have it, since other rules require them."""
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
"""Functions that draw a rule, by name. `draw` calls them in this order with a source of random numbers, and with
`needed`, the words that the topic and the earlier rules require. Only `without`, the last one, uses these words."""

CONFLICTS: Final = ({"lower", "upper", "begin"}, {"question", "exclaim", "quoted", "end"})
"""Groups of rules of which a problem has at most one each."""


class InstructionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Number and kinds of the rules.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    rules: int = 1
    """Largest number of rules of one problem. Each number from 1 to `rules` is equally likely."""
    kinds: list[str] = msgspec.field(default_factory=lambda: [*KINDS])
    """Names of the rules to draw from."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        kinds = self.kinds
        if not kinds or len(set(kinds)) != len(kinds) or not set(kinds) <= KINDS.keys():
            raise ConfigError(f"kinds must be one or more of {', '.join(KINDS)}, each once, but is {kinds!r}")
        if not 1 <= self.rules <= MOST_RULES:
            raise ConfigError(f"rules must be a whole number from 1 to {MOST_RULES}, but is {self.rules!r}")


class InstructionProblem(NamedTuple):
    """The topic and the rules of one sentence."""

    topic: str
    """Noun that the sentence is about."""
    rules: list[Rule]
    """Rules that the sentence must follow."""

    def asked(self) -> str:
        """Return the prompt: the topic, then the texts of the rules in their order."""
        article = "an" if self.topic[0] in "aeiou" else "a"
        return " ".join([f"Write one sentence about {article} {self.topic}.", *(rule.text for rule in self.rules)])

    def missing(self, answer: str) -> str | None:
        """Return the first fault of an answer, for the note of the episode; None if the answer has none."""
        text, said = answer.strip(), words(answer)
        if len(set(said)) < LEAST_WORDS or ends_early(text):
            return f"not one sentence of at least {LEAST_WORDS} different words"
        if not any(word.startswith(self.topic) for word in said):
            return f"not about {self.topic}"
        return next((rule.text for rule in self.rules if not rule.kept(text)), None)


def draw(rng: random.Random, topics: list[str], options: InstructionOptions) -> InstructionProblem:
    """Draw a topic, and rules that can be kept together. Each rule knows the words that the earlier rules require."""
    topic, chosen = rng.choice(topics), _kinds(rng, options)
    rules: list[Rule] = []
    for kind in chosen:
        rules.append(KINDS[kind](rng, " ".join([topic, *(rule.needed for rule in rules)])))
    return InstructionProblem(topic, rules)


def _kinds(rng: random.Random, options: InstructionOptions) -> list[str]:
    """Draw the names of rules that can be kept together, in the order of `KINDS`.

    A rule that conflicts with an earlier drawn one is left out, so there may be fewer names than were drawn.
    """
    chosen: list[str] = []
    for kind in rng.sample(options.kinds, rng.randint(1, min(options.rules, len(options.kinds)))):
        if not any(kind in group and group & {*chosen} for group in CONFLICTS):
            chosen.append(kind)
    return [kind for kind in KINDS if kind in chosen]


@functools.cache
def _topics(*, held_out: bool) -> list[str]:
    """Return the training topics, or with `held_out` the topics of evaluations."""
    return [topic for topic in TOPICS if in_held_out_part(topic) == held_out]


class Instructions:
    """Environment of one sentence. The prompt is a chat message. The rollout node makes one object for each episode."""

    def __init__(self, options: InstructionOptions) -> None:
        self._options = options
        self._problem: InstructionProblem | None = None
        """Problem of the episode; None before `reset`."""

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the prompt of this seed's problem."""
        self._problem = draw(random.Random(seed), _topics(held_out=is_held_out(seed)), self._options)
        return [Message("user", self._problem.asked())], {}

    async def step(self, action: str) -> StepResult:
        """Check the answer without its reasoning; the episode ends.

        Returns (observation, reward, terminated, truncated, info). Raises EnvError if `reset` was not called before.
        """
        if self._problem is None:
            raise EnvError("step() was called before reset()")
        missing = self._problem.missing(final_part(action))
        return "", float(missing is None), True, False, {"note": missing or ""}

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
