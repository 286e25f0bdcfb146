"""Reasoning Gym: the made problems of the package `reasoning-gym`, whose own graders judge; one turn.

A problem comes from one of the families that the options name, in turn by seed. The right answer earns 1, anything else
0: what a grader gives for less than the right answer is not counted. Problems and grades are made in worker processes,
under a deadline; a grader that raises or does not end is an error, never a reward of 0.

A grader is somebody else's code, and so is an answer for those that evaluate it. So a family is only played when its
grader has been certified (`envs.grader_report`): for default settings in the report that ships with this module, for
others on each node, before its engines start.

Problems are divided by their question.
"""

from __future__ import annotations

import functools
import string
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import anyio
import msgspec

from envs.generated import in_held_out_part
from envs.grader_report import PACKAGE, certified, library, read_reports
from envs.rewards.verifier import verify
from envs.workers import in_worker
from flash.environment import HELD_OUT, Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

ALL = "all"
"""Every family that is certified with its default settings."""

WINDOW = 64
"""Problems of a family that belong to one seed: the first one on its side of the division is shown."""

ALPHABET_PROBLEMS = 200
"""Problems that are looked at for characters beyond the printable ones of ASCII."""

ASKED = "\nThink as long as you like; then write your final answer between <answer> and </answer>.\n"


class ReasoningGymOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which problems are shown.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    families: list[str]
    """Their names, such as `chain_sum`; `["all"]`: every one that is certified."""
    settings: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """For a family the fields of its configuration, such as `{ max_terms = 3 }`; the others keep their defaults."""
    template: Literal["chat", "plain"] = "chat"
    """`chat`: a message that asks for the answer in tags; `plain`: the question and a line break."""
    timeout: float = 30.0
    """Seconds for a question to be made, and for an answer to be graded."""

    def __post_init__(self) -> None:
        if not self.families or len(set(self.families)) != len(self.families):
            raise ConfigError(f"families must name one or more, each once, but is {self.families!r}")
        strange = self.settings.keys() - self.names
        if strange:
            raise ConfigError(f"settings are given for {', '.join(sorted(strange))}, which families does not name")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")

    @property
    def names(self) -> list[str]:
        """The families, in their order."""
        if self.families == [ALL]:
            return [report.family for report in read_reports().families if not report.refused]
        return self.families


class ReasoningGym:
    """One problem."""

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options
        self._asked = b""

    @classmethod
    def check(cls, options: ReasoningGymOptions) -> None:
        """Look into the report; load no package.

        Raises:
            ConfigError: a family is not there, or its grader was refused; or the package is not the one of the report.
        """
        try:
            installed = version(PACKAGE)
            version("pycosat")
        except PackageNotFoundError as error:
            how = "`make env` installs it where there is a C compiler, or pip install -e '.[environments]'"
            raise ConfigError(f"{error.name} is not installed: {how} in Flash's folder") from None
        cls.check_families(options, installed)

    @staticmethod
    def check_families(options: ReasoningGymOptions, installed: str) -> None:
        """The same, of a package of which this version is installed."""
        reports = read_reports()
        if installed != reports.version:
            raise ConfigError(
                f"{PACKAGE} {installed} is installed, and graders were certified of {reports.version}: install that one"
            )
        known = {report.family: report for report in reports.families}
        for name in options.names:
            if name not in known:
                raise ConfigError(f"there is no family {name!r}, only {', '.join(known)}")
            if known[name].refused and name not in options.settings:
                raise ConfigError(known[name].sentence())

    @classmethod
    async def prepare(cls, options: ReasoningGymOptions) -> None:
        """Certify families that have settings of their own.

        Raises:
            ConfigError: settings that a family does not take, or a grader that is refused.
        """
        for name, settings in options.settings.items():
            report = await certified(name, settings)
            if report.refused:
                raise ConfigError(report.sentence())

    @classmethod
    def kind_of(cls, seed: int, options: ReasoningGymOptions) -> str:
        """The family that the problem of this seed comes from."""
        names = options.names
        return names[seed % len(names)]

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the problem of this seed."""
        family = self.kind_of(seed, self._options)
        asked = _Asked(family, self._options.settings.get(family, {}), seed)
        try:
            question = await in_worker(self._options.timeout, _question, asked)
        except TimeoutError:
            raise EnvError(f"{family} made no question within {self._options.timeout:g} s") from None
        except anyio.BrokenWorkerProcess:
            raise EnvError(f"{family}: the worker process died over a question") from None
        self._asked = msgspec.json.encode(asked)
        text = self._text(question)
        return text if self._options.template == "plain" else [Message("user", text)], {"family": family}

    async def step(self, action: str) -> StepResult:
        """Grade the answer; the episode ends."""
        if not self._asked:
            raise EnvError("step() was called before reset()")
        reward = await verify(f"{__name__}:grade", final_answer(action), self._asked.decode(), self._options.timeout)
        return "", reward, True, False, {}

    async def close(self) -> None:
        """Nothing to release: workers are the process's."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training problems with the answers that come with them."""
        asked = [self._training(seed * count + index) for index in range(count)]
        return [
            SolvedExample(self._text(entry["question"]), _tagged(entry["answer"], self._options)) for entry in asked
        ]

    def alphabet(self) -> str:
        """Printable ASCII, and what else the first problems consist of."""
        shown = (example.prompt + example.answer for example in self.solved_examples(ALPHABET_PROBLEMS, 0))
        return "".join(dict.fromkeys(string.printable[:95] + "\n" + "".join(shown)))

    def _training(self, seed: int) -> dict[str, Any]:
        family = self.kind_of(seed, self._options)
        return _entry(_Asked(family, self._options.settings.get(family, {}), seed % HELD_OUT))

    def _text(self, question: str) -> str:
        return question + (ASKED if self._options.template == "chat" else "\n")


class _Asked(msgspec.Struct, frozen=True):
    """Which problem: everything about it follows from this."""

    family: str
    settings: dict[str, Any]
    seed: int


def final_answer(said: str) -> str:
    """What stands in the last `<answer>…</answer>`, or all of it."""
    tagged = said.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in said else said
    return tagged.strip()


def grade(completion: str, asked: str) -> float:
    """Whether the grader of a family takes an answer for right: 1 or 0. A verifier, for worker processes."""
    problem = msgspec.json.decode(asked, type=_Asked)
    entry = _entry(problem)
    return float(
        _dataset(problem.family, msgspec.json.encode(problem.settings), 0).score_answer(completion, entry) >= 1
    )


def _question(asked: _Asked) -> str:
    return str(_entry(asked)["question"])


def _entry(asked: _Asked) -> dict[str, Any]:
    """The problem: the first of the seed's window that is on the seed's side."""
    held_out = is_held_out(asked.seed)
    first = held_out * HELD_OUT + asked.seed * WINDOW % HELD_OUT
    problems = _dataset(asked.family, msgspec.json.encode(asked.settings), first)
    for index in range(WINDOW):
        entry = problems[index]
        if in_held_out_part(entry["question"]) == held_out:
            return entry
    side = "held-out" if held_out else "training"
    raise EnvError(f"{asked.family}: none of {WINDOW} problems is a {side} one: it has too few different ones")


@functools.lru_cache(maxsize=16)
def _dataset(family: str, settings: bytes, seed: int) -> Any:
    options = msgspec.json.decode(settings, type=dict[str, Any])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library().create_dataset(family, **options, seed=seed, size=WINDOW)


def _tagged(answer: str, options: ReasoningGymOptions) -> str:
    return answer if options.template == "plain" else f"<answer>{answer}</answer>"
