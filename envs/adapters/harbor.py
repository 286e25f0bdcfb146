"""Tasks of Harbor and Terminal-Bench 2, in sandboxes: the policy works in a shell, and the task's own tests judge.

Each answer is one or more lines of shell, for one shell that lives as long as the episode, and the observation is what
they wrote. `submit`, or the last answer that there may be, ends the work: the tests are copied to /tests and run in the
same sandbox, as the format has it, and the reward is the number that they leave in /logs/verifier. What was there
before is removed first, but the tests run among whatever the policy has changed: they are as hard to deceive as they
were written to be. Without a reward file in time the reward is 0, and the note says why. A file that holds no number,
or a sandbox that fails, ends the episode with an error, never with a reward.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

import anyio.to_thread

from envs.adapters.harbor_tasks import HarborTask, load_tasks
from envs.data.split import Split
from envs.judging.judge import shared_judge
from envs.sandbox.api import Result, Session, Spec
from envs.sandbox.explain import how_ended
from envs.sandbox.sandbox import Sandbox
from envs.swe.shell import SUBMIT, ShellEnv, ShellOptions
from flash.environment import Info, StepResult
from flash.errors import ConfigError, RewardError, SandboxFileError, SandboxLimitError
from flash.types import Observation

REWARDS = "/logs/verifier"
"""Where tests leave their reward."""
LARGEST_REWARD = 1 << 16
"""Bytes of its file."""
ALONE = "reward"
"""What the number of reward.txt is called."""
SETUP_S = 60.0
"""Seconds for folders to be made."""

RULES = """Answer with shell commands in a block that begins with ```bash: they run for at most {seconds:g} s, in one \
shell that lives on, and you are shown what they write. When you are done, answer with a block whose last line is \
`{submit}`. You have {turns} answers."""


class HarborOptions(ShellOptions, frozen=True, kw_only=True, dict=True):
    """Which tasks, and what the policy may use.

    Raises:
        ConfigError: an option or a file is invalid. The message names the fault and what was expected.
    """

    path: str
    """A folder of tasks, a folder each."""
    held_out_path: str | None = None
    """Another one, for evaluation. None: a part of the first is kept aside."""
    held_out_fraction: float = 0.2
    """The share that is kept aside then."""
    image: str = "harbor-{name}"
    """Of tasks whose task.toml names none; `{name}` is the task's folder, in lower case."""
    reward: str = ALONE
    """Which number of a reward.json counts; the others are metrics, as it is."""
    network: Literal["none", "bridge"] = "none"
    """`bridge`: tasks that allow the internet get it, in their tests too. The policy's programs then reach what this
    machine reaches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out_path is None and not 0 < self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction must lie between 0 and 1, but is {self.held_out_fraction!r}")

    def tasks(self) -> Split[HarborTask]:
        """All of them, read once.

        Raises:
            ConfigError: one is no task, or a side would be empty.
        """
        held_out = None if self.held_out_path is None else Path(self.held_out_path)
        return load_tasks(Path(self.path), held_out, self.held_out_fraction, self.image)

    def spec_of(self, task: HarborTask) -> Spec:
        """The sandbox of a task: it runs as its image's user, who may change every file."""
        machine = task.machine
        return Spec(
            image=task.image,
            profile="compat",
            cpus=machine.cpus,
            memory_mib=machine.memory_mib,
            disk_mib=machine.storage_mib,
            network=self.network if machine.online else "none",
            env=machine.env,
            workdir=task.workdir,
        )


class Harbor(ShellEnv[HarborOptions, HarborTask]):
    """One task."""

    def __init__(self, options: HarborOptions) -> None:
        super().__init__(options)
        self._open: tuple[Sandbox, Session] | None = None
        """The sandbox and its shell."""

    @classmethod
    def check(cls, options: HarborOptions) -> None:
        """Read the tasks; start no sandbox.

        Raises:
            ConfigError: an option or a file is invalid. The message names the fault and what was expected.
        """
        options.tasks()

    @classmethod
    async def prepare(cls, options: HarborOptions) -> None:
        """Open the sandboxes and start that of the first task, so that what is missing is missed before a run begins.

        Raises:
            ConfigError: there is no engine, a package or a token is missing.
            SandboxError: the engine or the service does not answer, or the image does not start.
        """
        judge = await shared_judge(options.pool, cls.opener)
        async with judge.sandboxes.borrow(options.spec_of(options.tasks().train[0]), options.pool.wait):
            pass

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the instruction of this seed's task."""
        options = self._options
        tasks = await anyio.to_thread.run_sync(options.tasks, abandon_on_cancel=True)
        self._task = tasks.of_seed(seed)
        rules = RULES.format(seconds=options.command_timeout, submit=SUBMIT, turns=options.turns)
        return self._shown(f"{self._task.prompt.strip()}\n\n{rules}"), {"task": self._task.name}

    async def _run(self, task: HarborTask, command: str) -> Result:
        _, shell = await self._opened(task)
        return await shell.run(command, timeout=self._options.command_timeout)

    async def _opened(self, task: HarborTask) -> tuple[Sandbox, Session]:
        if self._open is None:
            options = self._options
            judge = await self._judge()
            borrowed = judge.sandboxes.borrow(options.spec_of(task), options.pool.wait)
            sandbox = await self._held.enter_async_context(borrowed)
            self._open = sandbox, await self._held.enter_async_context(sandbox.session())
        return self._open

    async def _judged(self, task: HarborTask, *, truncated: bool) -> StepResult:
        """Run the tests as things are. What the policy runs in the background goes on meanwhile: it may be judged."""
        sandbox, _ = await self._opened(task)
        try:
            ran, left = await _tested(sandbox, task)
        except (SandboxFileError, SandboxLimitError) as error:
            numbers, note = {}, f"the tests cannot be put into the sandbox: {error}"
        else:
            numbers = {} if ran.timed_out else _numbers(left, task.name)
            note = f"{how_ended(ran)}: {numbers or f'no number in {REWARDS}'}"
        wanted = self._options.reward
        if numbers and wanted not in numbers:
            raise RewardError(f"{task.name} has no reward {wanted!r}, only {', '.join(numbers)}: name one in `reward`")
        metrics = {**numbers, "no_reward": float(not numbers), **self._counts}
        info = {"task": task.name, "metrics": metrics, "note": note}
        return "", numbers.get(wanted, 0.0), not truncated, truncated, info


def _numbers(left: dict[str, str], task: str) -> dict[str, float]:
    """Return the numbers of the files that tests left, as Harbor reads them: reward.json counts before reward.txt.

    Raises:
        RewardError: a file holds something else than finite numbers.
    """
    for name, read in (("reward.json", read_json), ("reward.txt", read_text)):
        text = left.get(name, "").strip()
        if text:
            try:
                return read(text)
            except (ValueError, OverflowError, RecursionError) as error:
                raise RewardError(
                    f"the tests of {task} left no finite number in {REWARDS}/{name}, but {text[:200]!r}: {error}"
                ) from error
    return {}


def read_text(text: str) -> dict[str, float]:
    """Return the number of a reward.txt. Raises ValueError where there is none."""
    return {ALONE: _finite(float(text))}


def read_json(text: str) -> dict[str, float]:
    """Return the numbers of a reward.json by name; one alone is called `reward`. Raises ValueError at other values."""
    found: object = json.loads(text)
    table = cast("dict[str, object]", found) if isinstance(found, dict) else {ALONE: found}
    numbers: dict[str, float] = {}
    for name, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name or ALONE} is {value!r:.80}, which is no number")
        numbers[name or ALONE] = _finite(float(value))
    return {ALONE: next(iter(numbers.values()))} if len(numbers) == 1 else numbers


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


async def _tested(sandbox: Sandbox, task: HarborTask) -> tuple[Result, dict[str, str]]:
    """Run the tests of a task. Returns how they ended, and the text of each reward file that they left."""
    for path in ("/tests", REWARDS):
        await sandbox.remove(path)
    await sandbox.run(["mkdir", "-p", REWARDS, "/logs/agent"], timeout=SETUP_S)
    await sandbox.upload(task.tests, "/tests")
    ran = await sandbox.run(["bash", "/tests/test.sh"], timeout=task.verifier.timeout_sec, env=task.verifier.env)
    left: dict[str, str] = {}
    for name in ("reward.txt", "reward.json"):
        with suppress(SandboxFileError):
            data = await sandbox.read(f"{REWARDS}/{name}", limit=LARGEST_REWARD)
            left[name] = data.decode("utf-8", "replace")
    return ran, left
