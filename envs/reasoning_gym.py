"""Reasoning Gym: generated problems of the package `reasoning-gym`, judged by its own graders. One turn.

The options name families of problems, and the seed chooses the family in turn. The right answer earns 1 and any other
answer 0: partial marks of a grader are not counted. Problems and grades are made in worker processes, under a deadline.
A grader that raises an error or does not end causes an error, never a reward of 0.

A grader is foreign code, and some graders evaluate the answer as code. So a family is used only if its grader has been
certified (`envs.grader_report`). The report that ships with this module certifies default settings. Other settings are
certified on each node before its engines start.

Problems are divided by their question into training and held-out ones; held-out problems are for evaluation only.
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
from flash.errors import ConfigError, EnvError, advice_for_extra
from flash.types import Message, Observation

ALL = "all"
"""Name that stands for every family that is certified with its default settings."""

WINDOW = 64
"""Number of problems that belong to one seed. The first of them that is on the seed's side of the division is shown."""

ALPHABET_PROBLEMS = 200
"""Number of problems that are searched for characters beyond printable ASCII."""

INSTRUCTION = "\nThink as long as you like; then write your final answer between <answer> and </answer>.\n"
"""Text after the question in a chat."""


class ReasoningGymOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Families of problems and their settings.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    families: list[str]
    """Names of the families, such as `chain_sum`. `["all"]`: every family that is certified."""
    settings: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """For a family, fields of its configuration, such as `{ max_terms = 3 }`. Other fields keep their defaults."""
    template: Literal["chat", "plain"] = "chat"
    """Form of the prompt. `chat`: a message that asks for the answer in tags. `plain`: the question and a newline."""
    timeout: float = 30.0
    """Seconds in which a question must be made, and in which an answer must be graded."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not self.families or len(set(self.families)) != len(self.families):
            raise ConfigError(f"families must name one or more, each once, but is {self.families!r}")
        strange = self.settings.keys() - self.names
        if strange:
            raise ConfigError(f"settings are given for {', '.join(sorted(strange))}, which families does not name")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")

    @property
    def names(self) -> list[str]:
        """The families' names, in the order in which seeds take them."""
        if self.families == [ALL]:
            return [report.family for report in read_reports().families if not report.refused]
        return self.families


class ReasoningGym:
    """Environment of one problem. The rollout node makes one object for each episode."""

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options
        self._key = b""
        """Key of the problem as JSON; empty before `reset`."""

    @classmethod
    def check(cls, options: ReasoningGymOptions) -> None:
        """Check the families against the report; import no package.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: a family is unknown or its grader is refused, a package is missing, or its version is not the
                report's.
        """
        try:
            installed = version(PACKAGE)
            version("pycosat")
        except PackageNotFoundError as error:
            raise ConfigError(
                f"{error.name} is not installed, and needs a C compiler: {advice_for_extra('environments')}"
            ) from None
        cls.check_families(options, installed)

    @staticmethod
    def check_families(options: ReasoningGymOptions, installed: str) -> None:
        """Check the families against the report. `installed` is the version of the installed package.

        Raises:
            ConfigError: a family is unknown, its grader is refused, or the report is for another version.
        """
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
        """Certify the families for which settings are given. Each node calls this once, before its engines start.

        Raises:
            ConfigError: a family does not accept its settings, or its grader is refused.
            EnvError: the certification raised an error, for example because the package cannot be imported.
        """
        for name, settings in options.settings.items():
            report = await certified(name, settings)
            if report.refused:
                raise ConfigError(report.sentence())

    @classmethod
    def kind_of(cls, seed: int, options: ReasoningGymOptions) -> str:
        """Return the family of a seed's problem."""
        names = options.names
        return names[seed % len(names)]

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the question of this seed's problem, which a worker process makes, and the family in the info.

        Raises:
            EnvError: the question was not made in time, the worker died, or making it raised an error.
        """
        family = self.kind_of(seed, self._options)
        key = _ProblemKey(family, self._options.settings.get(family, {}), seed)
        try:
            question = await in_worker(self._options.timeout, _question, key)
        except TimeoutError:
            raise EnvError(f"{family} made no question within {self._options.timeout:g} s") from None
        except anyio.BrokenWorkerProcess:
            raise EnvError(f"{family}: the worker process died over a question") from None
        self._key = msgspec.json.encode(key)
        text = self._text(question)
        return text if self._options.template == "plain" else [Message("user", text)], {"family": family}

    async def step(self, action: str) -> StepResult:
        """Grade the answer; the episode ends. Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: `reset` was not called before.
            RewardError: the grader raised an error, did not end in time, or its worker died.
        """
        if not self._key:
            raise EnvError("step() was called before reset()")
        reward = await verify(f"{__name__}:grade", final_answer(action), self._key.decode(), self._options.timeout)
        return "", reward, True, False, {}

    async def close(self) -> None:
        """Do nothing: the worker processes belong to the node's process."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` training problems with the answers that the package gives, to teach a small model.

        Makes the problems in this process, and blocks meanwhile. Raises EnvError if a family has too few problems.
        """
        entries = [self._training(seed * count + index) for index in range(count)]
        return [
            SolvedExample(self._text(entry["question"]), _tagged(entry["answer"], self._options)) for entry in entries
        ]

    def alphabet(self) -> str:
        """Return printable ASCII, and the other characters of the first problems.

        They become a tiny model's vocabulary.
        """
        shown = (example.prompt + example.answer for example in self.solved_examples(ALPHABET_PROBLEMS, 0))
        return "".join(dict.fromkeys(string.printable[:95] + "\n" + "".join(shown)))

    def _training(self, seed: int) -> dict[str, Any]:
        """Return the package's entry (`question`, `answer`) for a training problem, made in this process.

        `seed` may be any number from 0: it is cut so that it never belongs to a held-out problem.
        """
        family = self.kind_of(seed, self._options)
        return _entry(_ProblemKey(family, self._options.settings.get(family, {}), seed % HELD_OUT))

    def _text(self, question: str) -> str:
        """Return the text of a prompt: the question, and in a chat the form of the answer."""
        return question + (INSTRUCTION if self._options.template == "chat" else "\n")


class _ProblemKey(msgspec.Struct, frozen=True):
    """Key of a problem: the problem follows from these fields. Workers make the problem from it again for each call."""

    family: str
    """Name of the family."""
    settings: dict[str, Any]
    """Settings of the family."""
    seed: int
    """Seed of the episode."""


def final_answer(answer: str) -> str:
    """Return the text of the last `<answer>…</answer>`, or the complete text if it has no tags."""
    tagged = answer.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in answer else answer
    return tagged.strip()


def grade(completion: str, key: str) -> float:
    """Return 1 if the family's grader gives an answer full marks, else 0.

    It is a verifier, which `step` calls in a worker process by its name. `key` is the problem's key as JSON.
    """
    problem = msgspec.json.decode(key, type=_ProblemKey)
    entry = _entry(problem)
    # Any data set of the family grades any problem of it. The one from seed 0 stays in the cache.
    return float(
        _dataset(problem.family, msgspec.json.encode(problem.settings), 0).score_answer(completion, entry) >= 1
    )


def _question(key: _ProblemKey) -> str:
    """Return the question of a problem. Runs in a worker process. Raises EnvError if `_entry` finds no problem."""
    return str(_entry(key)["question"])


def _entry(key: _ProblemKey) -> dict[str, Any]:
    """Return the package's entry (`question`, `answer`, `metadata`) for a problem.

    It is the first of the seed's `WINDOW` problems that is on the seed's side, training or held-out.

    Raises:
        EnvError: all problems of the window are on the other side.
    """
    held_out = is_held_out(key.seed)
    # Seeds of the package: each seed of an episode has `WINDOW` of them, held-out ones from `HELD_OUT` on. The modulo
    # takes `HELD_OUT` out of held-out seeds, and keeps the seeds of very late training problems below it.
    first = (HELD_OUT if held_out else 0) + key.seed * WINDOW % HELD_OUT
    problems = _dataset(key.family, msgspec.json.encode(key.settings), first)
    for index in range(WINDOW):
        entry = problems[index]
        if in_held_out_part(entry["question"]) == held_out:
            return entry
    side = "held-out" if held_out else "training"
    raise EnvError(f"{key.family}: none of {WINDOW} problems is a {side} one: it has too few different ones")


@functools.lru_cache(maxsize=16)
def _dataset(family: str, settings: bytes, seed: int) -> Any:
    """Return the package's data set of `WINDOW` problems from `seed` on, which also grades. `settings` are JSON."""
    options = msgspec.json.decode(settings, type=dict[str, Any])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library().create_dataset(family, **options, seed=seed, size=WINDOW)


def _tagged(answer: str, options: ReasoningGymOptions) -> str:
    """Return an answer in the form that the prompt asks for."""
    return answer if options.template == "plain" else f"<answer>{answer}</answer>"
