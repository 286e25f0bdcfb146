"""SweEnv: an environment in which the policy fixes a bug in a small repository, turn by turn.

The first observation is the report of the bug and the names of the files. Each answer is one or more lines of shell.
They run in the repository's folder, in a sandbox without a network, and the next observation is their output. The line
`submit`, or the last answer that is allowed, ends the episode. The files are then copied out of the sandbox, put into a
clean sandbox, and checked there (`envs.swe.tasks`). The reward is 1 if every check passes: the bug is fixed, and the
features that worked before still work.

Only files are judged. Processes, variables and everything else that the policy left behind stay in the policy's
sandbox, which is returned before the check. A sandbox that fails ends the episode with its error, never with a reward.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec

from envs.judging.judge import shared_judge
from envs.judging.options import JudgingLimits, Language, limits_of, spec_of
from envs.judging.tests import CaseOutcome, SuiteVerdict, run_cases, verdict_of
from envs.sandbox.api import Result
from envs.sandbox.sandbox import Sandbox
from envs.swe.shell import SUBMIT, ShellEnv, ShellOptions
from envs.swe.tasks import SHIPPED, SweTask, load_tasks
from flash.environment import Info, SolvedExample, StepResult
from flash.errors import ConfigError, SandboxFileError, SandboxLimitError
from flash.types import Observation

REPOSITORY = "repository"
"""Folder of the repository in the policy's sandbox, relative to the sandbox's working directory."""
VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Environment variables of the policy's commands. They switch off byte code: Python would run outdated byte code for a
file that was changed within the same second to a text of the same length."""
PLAIN = "\n\t" + "".join(chr(code) for code in range(32, 127))
"""All characters that are shown with `template = "plain"`."""

RULES = """Mend this bug. Answer with shell commands in a block that begins with ```bash: they run in the repository's \
folder, for at most {seconds:g} s, and you are shown what they write. Each answer starts there anew. When you are \
done, answer with a block whose last line is `{submit}`: hidden tests then check what is reported here, and that what \
worked before still does. You have {turns} answers."""
"""Instructions of the first observation, with `template = "chat"`."""


class SweOptions(ShellOptions, frozen=True, kw_only=True, dict=True):
    """Options of the tasks, and of the sandboxes that the policy may use.

    Raises:
        ConfigError: an option is wrong. The message gives the value and the expected one.
    """

    path: str | None = None
    """Folder with your own tasks, in the form that `envs.swe.tasks` describes. None: the twenty tasks that ship with
    Flash."""
    image: str = "flash-sandbox-python"
    """Image of the sandboxes. It needs Python 3.6 or newer, and a shell."""
    turns: int = 12
    """Number of answers in an episode."""
    command_timeout: float = 10.0
    """Seconds that the commands of one answer may take."""
    output: int = 2000
    """Characters shown of the commands' output: the first half and the last half."""
    template: Literal["chat", "plain"] = "chat"
    """Form of observations and answers. `chat`: messages, and commands in fenced blocks. `plain`, for tiny models:
    text, and the whole answer is commands."""
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    """Resource limits of the sandboxes and of the checks: see `envs.judging.options.JudgingLimits`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        super().__post_init__()
        _ = self.allowed  # Parsed now, so that its faults are found here.

    @functools.cached_property
    def allowed(self) -> JudgingLimits:
        """The resource limits: `limits`, and defaults for the rest."""
        return limits_of(self.limits)

    @property
    def language(self) -> Language:
        """The language that the judge uses to run the checks: Python scripts that are read from standard input."""
        return Language(image=self.image, file="-", run=("python3", "-"))

    @property
    def folder(self) -> Path:
        """Folder of the tasks."""
        return SHIPPED if self.path is None else Path(self.path)


class SweEnv(ShellEnv[SweOptions, SweTask]):
    """Environment in which each episode is one bug to fix. The rollout node makes one object for each episode."""

    def __init__(self, options: SweOptions) -> None:
        super().__init__(options)
        self.fenced = options.template == "chat"
        """True if commands stand in fenced blocks."""
        self._sandbox: Sandbox | None = None
        """Sandbox of the policy; None until its first command."""

    @classmethod
    def check(cls, options: SweOptions) -> None:
        """Read the tasks, so that a fault is found when the configuration is read, before a run. Starts no sandbox.

        Raises:
            ConfigError: a task or an option is wrong. The message gives the error and the expected form.
        """
        load_tasks(options.folder)

    @classmethod
    async def prepare(cls, options: SweOptions) -> None:
        """Open the pool of sandboxes and start one sandbox, so that a missing part is found before a run begins.

        Each node calls this once, before its engines start.

        Raises:
            ConfigError: there is no engine, or a package or a token is missing.
            SandboxError: the engine or the service does not answer, or the image does not start.
        """
        judge = await shared_judge(options.pool, cls.opener)
        await judge.try_out(options.language, options.allowed)

    @classmethod
    def held_out_problems(cls, options: SweOptions) -> int:
        """Return the number of held-out tasks, which are used for evaluation only.

        An evaluation shows each of them once. The first call of a process reads the tasks. Raises ConfigError.
        """
        return len(load_tasks(options.folder).held_out)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the report of the bug that belongs to this seed. Borrows no sandbox yet.

        Raises ConfigError if a task is wrong; the first call of a process reads them.
        """
        tasks = await anyio.to_thread.run_sync(load_tasks, self._options.folder, abandon_on_cancel=True)
        self._task = tasks.of_seed(seed)
        return self._shown(self._question(self._task)), {"level": self._task.level}

    # -- the policy's sandbox ----------------------------------------------------------------------------------------

    async def _run(self, task: SweTask, command: str) -> Result:
        """Run commands in the repository's folder. The first call borrows the sandbox.

        Errors are part of the output, so that the policy sees both in the order in which they were written. Raises
        SandboxError if no sandbox is free in time or the sandbox fails.
        """
        if self._sandbox is None:
            self._sandbox = await self._borrowed(task)
        # The prefix is on the same line, so that line numbers in the shell's error messages are those of the policy's
        # command.
        command = f"exec 2>&1; {command}"
        timeout = self._options.command_timeout
        return await self._sandbox.run(command, timeout=timeout, env=VARIABLES, cwd=REPOSITORY)

    async def _borrowed(self, task: SweTask) -> Sandbox:
        """Borrow a sandbox for the policy until the end of its work, and write the repository into it.

        Raises SandboxError if no sandbox is free in time or the sandbox fails.
        """
        # The judge of the node holds the pool of sandboxes.
        judge = await self._judge()
        spec = spec_of(self._options.language, self._options.allowed)
        sandbox = await self._resources.enter_async_context(judge.sandboxes.borrow(spec, self._options.pool.wait))
        for name, text in task.files.items():
            await sandbox.write(f"{REPOSITORY}/{name}", text.encode())
        return sandbox

    # -- the judge's sandbox -----------------------------------------------------------------------------------------

    async def _judged(self, task: SweTask, *, truncated: bool) -> StepResult:
        """Check the current files in a clean sandbox, and return the last step of the episode.

        Files that cannot be copied out of the policy's sandbox, such as too large ones, count as failed checks: the
        policy has made them. `truncated`: True if the run's limits ended the work.

        Raises:
            SandboxError: a sandbox failed, and the policy has not caused it.
        """
        options = self._options
        outcomes: list[CaseOutcome] = []
        async with _temporary_folder() as folder:
            try:
                await self._copy_out(task, folder)
            except (SandboxFileError, SandboxLimitError) as error:
                verdict = SuiteVerdict(0, len(task.checks), "crash", f"the files cannot be taken out: {error}")
            else:
                # The policy's sandbox is returned first. Otherwise episodes that each hold one sandbox and wait for
                # another could wait for each other forever.
                await self._resources.aclose()
                judge = await self._judge()

                async def judged(sandbox: Sandbox) -> SuiteVerdict:
                    """Copy the files into a clean sandbox, and run the checks there. `outcomes` has those of the last
                    sandbox that was tried."""
                    await judge.check_image(options.language, sandbox)
                    await sandbox.upload(folder, ".")
                    cases = [check.case for check in task.checks]
                    outcomes[:] = await run_cases(sandbox, options.language, cases, options.allowed, every=True)
                    return verdict_of(outcomes, len(cases))

                spec = spec_of(options.language, options.allowed)
                verdict = await judge.try_in(spec, judged, len(task.checks), options.allowed.total)
        solved = verdict.passed == verdict.total
        metrics = {"solved": solved, **_shares(task, outcomes), **self._counts}
        info = {"level": task.level, "cause": verdict.cause, "metrics": metrics, "note": verdict.note()}
        return "", float(solved), not truncated, truncated, info

    async def _copy_out(self, task: SweTask, folder: Path) -> None:
        """Copy the repository's files, as the policy left them, into `folder` on this machine.

        If the policy has run no command, the files of the task are written instead, and no sandbox is needed.

        Raises:
            SandboxFileError: the repository's folder is gone.
            SandboxLimitError: the repository is too large, or a link leads out of it.
        """
        if self._sandbox is not None:
            await self._sandbox.download(REPOSITORY, folder)
            return
        for name, text in task.files.items():
            path = anyio.Path(folder, name)
            await path.parent.mkdir(parents=True, exist_ok=True)
            await path.write_bytes(text.encode())  # as `_borrowed` does, whatever the locale of this machine is

    # -- observations ------------------------------------------------------------------------------------------------

    def _question(self, task: SweTask) -> str:
        """Return the text of the first observation: the report, the names of the files, and in a chat the rules."""
        about = f"{task.issue.strip()}\n\nFiles: {', '.join(sorted(task.files))}"
        if self._options.template == "plain":
            return about
        options = self._options
        rules = RULES.format(seconds=options.command_timeout, submit=SUBMIT, turns=options.turns)
        return f"{about}\n\n{rules}"

    def _shown(self, text: str) -> Observation:
        """Return a text as an observation: a message, or with `plain` a text that ends in a shell prompt."""
        if self.fenced:
            return super()._shown(text)
        # The newline ends the answer before it. The first observation has no answer before it.
        start = "\n" if self._counts["turns"] else ""
        return start + "".join(char if char in PLAIN else "?" for char in text) + "\n$ "

    # -- solved examples for tiny models ------------------------------------------------------------------------------

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` training tasks, drawn with replacement, each with commands that solve it.

        The run teaches a tiny model with them before the training, so that it answers with commands at all.

        Raises:
            ConfigError: the template is `chat`; the examples have the form of `plain`.
        """
        if self._options.template == "chat":
            raise ConfigError('solved examples are text: set template = "plain", or model.path to an existing model')
        rng, tasks = random.Random(seed), load_tasks(self._options.folder).train
        return [self._example(rng.choice(tasks)) for _ in range(count)]

    def alphabet(self) -> str:
        """Return every character that can be shown. They become a tiny model's vocabulary."""
        return PLAIN

    def _example(self, task: SweTask) -> SolvedExample:
        """Return a task with a solution in two answers: a Python program that makes the edits, and the submission."""
        edits = "".join(
            f"p={edit.file!r};s=open(p).read()\nopen(p,'w').write(s.replace({edit.old!r},{edit.new!r}))\n"
            for edit in task.solution
        )
        done = SolvedExample("\nexit code 0\n$ ", SUBMIT)
        return SolvedExample(f"{self._question(task)}\n$ ", f"python3 - <<'E'\n{edits}E", (done,))


def _shares(task: SweTask, outcomes: list[CaseOutcome]) -> dict[str, float]:
    """Return the shares of checks that pass: `fixed`, among checks that failed before, and `kept`, among all others.

    `outcomes` are in the order of the task's checks; a check without an outcome has not passed. The share of no checks
    is 1.
    """
    shares: dict[str, float] = {}
    for name, broken in (("fixed", True), ("kept", False)):
        places = [place for place, check in enumerate(task.checks) if check.broken == broken]
        passed = sum(place < len(outcomes) and outcomes[place].passed for place in places)
        shares[name] = passed / len(places) if places else 1.0
    return shares


@asynccontextmanager
async def _temporary_folder() -> AsyncGenerator[Path]:
    """Make an empty temporary folder on this machine for the time of the block, and remove it also on cancellation."""
    path = Path(await anyio.to_thread.run_sync(lambda: tempfile.mkdtemp(prefix="flash-swe-")))
    try:
        yield path
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(path, ignore_errors=True))
