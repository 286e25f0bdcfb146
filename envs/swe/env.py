"""SweEnv: mend a bug in a small repository, turn by turn.

The policy is given the report of a bug and the names of the files. Each answer is one or more lines of shell, which run
in the repository's folder of a sandbox without a network, and the observation is what they wrote. `submit`, or the last
answer that there may be, ends the episode: the files are taken out, put into a clean sandbox, and checked there
(`envs.swe.tasks`). The reward is 1 when every check passes: what was broken works, and what worked still does.

What is judged is files alone: processes, variables and whatever else the policy left behind stay in its sandbox, which
is given back first. A sandbox that fails ends the episode with its error, never with a reward.
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
"""The folder in the policy's sandbox."""
VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Python takes byte code for new whose source was changed in the same second, to the same length."""
PLAIN = "\n\t" + "".join(chr(code) for code in range(32, 127))
"""All characters that are shown under `template = "plain"`."""

RULES = """Mend this bug. Answer with shell commands in a block that begins with ```bash: they run in the repository's \
folder, for at most {seconds:g} s, and you are shown what they write. Each answer starts there anew. When you are \
done, answer with a block whose last line is `{submit}`: hidden tests then check what is reported here, and that what \
worked before still does. You have {turns} answers."""


class SweOptions(ShellOptions, frozen=True, kw_only=True, dict=True):
    """Which tasks, and what the policy may use.

    Raises:
        ConfigError: naming what is wrong and what was expected.
    """

    path: str | None = None
    """A folder of tasks of your own: see `envs.swe.tasks`. None: the twenty that ship."""
    image: str = "flash-sandbox-python"
    """Of the sandboxes; it needs Python 3.6 or newer, and a shell."""
    turns: int = 12
    command_timeout: float = 10.0
    output: int = 2000
    template: Literal["chat", "plain"] = "chat"
    """`chat`: messages, with commands in blocks. `plain`, for tiny models: text, and an answer is all commands."""
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of the sandboxes and of the checks: see `envs.judging.options.JudgingLimits`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.allowed

    @functools.cached_property
    def allowed(self) -> JudgingLimits:
        """The defaults, and `limits`."""
        return limits_of(self.limits)

    @property
    def language(self) -> Language:
        """How checks are run: scripts come from the input."""
        return Language(image=self.image, file="-", run=("python3", "-"))

    @property
    def folder(self) -> Path:
        """Of the tasks."""
        return SHIPPED if self.path is None else Path(self.path)


class SweEnv(ShellEnv[SweOptions, SweTask]):
    """One bug to mend."""

    def __init__(self, options: SweOptions) -> None:
        super().__init__(options)
        self.fenced = options.template == "chat"
        self._sandbox: Sandbox | None = None

    @classmethod
    def check(cls, options: SweOptions) -> None:
        """Read the tasks; start no sandbox.

        Raises:
            ConfigError: naming what is wrong and what was expected.
        """
        load_tasks(options.folder)

    @classmethod
    async def prepare(cls, options: SweOptions) -> None:
        """Open the sandboxes and start one, so that what is missing is missed before a run begins.

        Raises:
            ConfigError: there is no engine, a package or a token is missing.
            SandboxError: the engine or the service does not answer, or the image does not start.
        """
        judge = await shared_judge(options.pool, cls.opener)
        await judge.try_out(options.language, options.allowed)

    @classmethod
    def held_out_problems(cls, options: SweOptions) -> int:
        """Return the number of held-out tasks."""
        return len(load_tasks(options.folder).held_out)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the report of this seed's bug."""
        tasks = await anyio.to_thread.run_sync(load_tasks, self._options.folder, abandon_on_cancel=True)
        self._task = tasks.of_seed(seed)
        return self._shown(self._question(self._task)), {"level": self._task.level}

    # -- the policy's sandbox ----------------------------------------------------------------------------------------

    async def _run(self, task: SweTask, command: str) -> Result:
        if self._sandbox is None:
            self._sandbox = await self._borrowed(task)
        # On one line, so that a shell that counts lines counts the policy's.
        command = f"exec 2>&1; {command}"
        timeout = self._options.command_timeout
        return await self._sandbox.run(command, timeout=timeout, env=VARIABLES, cwd=REPOSITORY)

    async def _borrowed(self, task: SweTask) -> Sandbox:
        judge = await self._judge()
        spec = spec_of(self._options.language, self._options.allowed)
        sandbox = await self._held.enter_async_context(judge.sandboxes.borrow(spec, self._options.pool.wait))
        for name, text in task.files.items():
            await sandbox.write(f"{REPOSITORY}/{name}", text.encode())
        return sandbox

    # -- the judge's -------------------------------------------------------------------------------------------------

    async def _judged(self, task: SweTask, *, truncated: bool) -> StepResult:
        """Check the files as they are now."""
        options = self._options
        outcomes: list[CaseOutcome] = []
        async with _folder() as folder:
            try:
                await self._take_out(task, folder)
            except (SandboxFileError, SandboxLimitError) as error:
                verdict = SuiteVerdict(0, len(task.checks), "crash", f"the files cannot be taken out: {error}")
            else:
                # Given back first: an episode that held one while it waits for another could wait forever.
                await self._held.aclose()
                judge = await self._judge()

                async def judged(sandbox: Sandbox) -> SuiteVerdict:
                    await judge.look_for(options.language, sandbox)
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

    async def _take_out(self, task: SweTask, folder: Path) -> None:
        """The repository's files, as the policy left them.

        Raises:
            SandboxFileError: the folder is gone.
            SandboxLimitError: there is too much of it, or a link that leads out of it.
        """
        if self._sandbox is not None:
            await self._sandbox.download(REPOSITORY, folder)
            return
        for name, text in task.files.items():
            path = anyio.Path(folder, name)
            await path.parent.mkdir(parents=True, exist_ok=True)
            await path.write_text(text)

    # -- what is shown -----------------------------------------------------------------------------------------------

    def _question(self, task: SweTask) -> str:
        about = f"{task.issue.strip()}\n\nFiles: {', '.join(sorted(task.files))}"
        if self._options.template == "plain":
            return about
        options = self._options
        rules = RULES.format(seconds=options.command_timeout, submit=SUBMIT, turns=options.turns)
        return f"{about}\n\n{rules}"

    def _shown(self, text: str) -> Observation:
        if self.fenced:
            return super()._shown(text)
        # A newline ends the answer before it.
        start = "\n" if self._counts["turns"] else ""
        return start + "".join(char if char in PLAIN else "?" for char in text) + "\n$ "

    # -- a tiny model is taught the solutions ------------------------------------------------------------------------

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training tasks with commands that solve them, drawn with replacement.

        Raises:
            ConfigError: tiny models are shown no messages.
        """
        if self._options.template == "chat":
            raise ConfigError('solved examples are text: set template = "plain", or model.path to an existing model')
        rng, tasks = random.Random(seed), load_tasks(self._options.folder).train
        return [self._example(rng.choice(tasks)) for _ in range(count)]

    def alphabet(self) -> str:
        """Every character that may be shown."""
        return PLAIN

    def _example(self, task: SweTask) -> SolvedExample:
        edits = "".join(
            f"p={edit.file!r};s=open(p).read()\nopen(p,'w').write(s.replace({edit.old!r},{edit.new!r}))\n"
            for edit in task.solution
        )
        done = SolvedExample("\nexit code 0\n$ ", SUBMIT)
        return SolvedExample(f"{self._question(task)}\n$ ", f"python3 - <<'E'\n{edits}E", (done,))


def _shares(task: SweTask, outcomes: list[CaseOutcome]) -> dict[str, float]:
    """Of the checks that failed before, those that pass; and of the others, those that still do."""
    shares: dict[str, float] = {}
    for name, broken in (("fixed", True), ("kept", False)):
        places = [place for place, check in enumerate(task.checks) if check.broken == broken]
        passed = sum(place < len(outcomes) and outcomes[place].passed for place in places)
        shares[name] = passed / len(places) if places else 1.0
    return shares


@asynccontextmanager
async def _folder() -> AsyncGenerator[Path]:
    """An empty folder for the time of the block."""
    path = Path(await anyio.to_thread.run_sync(lambda: tempfile.mkdtemp(prefix="flash-swe-")))
    try:
        yield path
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(path, ignore_errors=True))
