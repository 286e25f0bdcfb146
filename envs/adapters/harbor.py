"""Harbor and Terminal-Bench 2: the policy works in a shell in a sandbox, and the task's own tests judge the result.

Each answer is one or more lines of shell. They run in one shell session, which lives as long as the episode, and their
output is the observation. `submit`, or the last allowed answer, ends the work. Then the tests run as the task says. The
reward is the number that they write to /logs/verifier.

- `shared`: the tests are copied to /tests and run in the same sandbox. Earlier contents of these two folders are
  removed first. But the tests run beside everything else that the policy has changed, so they are only as hard to
  deceive as their author made them.
- `separate`: the tests run in a second sandbox, which gets only the artifacts of the policy's sandbox. The first
  sandbox is returned before the second one is borrowed, so that episodes never wait for each other's sandboxes.

If there is no reward file in time, or an empty one, the reward is 0 and the note gives the reason. A reward file with
something other than finite numbers, tests that cannot be read on this machine, or a sandbox that fails, ends the
episode with an error and without a reward.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

import anyio
import anyio.to_thread

from envs.adapters.harbor_tasks import HarborSandbox, HarborTask, load_tasks
from envs.data.split import Split
from envs.judging.judge import shared_judge
from envs.judging.tests import run_fairly
from envs.sandbox.api import Result, Session, Spec, check_command
from envs.sandbox.engines import profiles
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.text import how_ended
from envs.swe.shell import SUBMIT, ShellEnv, ShellOptions
from flash.environment import Info, StepResult
from flash.errors import (
    ConfigError,
    RewardError,
    SandboxFileError,
    SandboxLimitError,
    SandboxRefusedError,
    SandboxTimeoutError,
)
from flash.types import Observation

REWARDS = "/logs/verifier"
"""Folder in the sandbox in which tests leave their reward."""
LARGEST_REWARD = 1 << 16
"""Largest size of a reward file, in bytes."""
UNNAMED = "reward"
"""Name of a reward that has no name of its own: the number in reward.txt, or the only one in reward.json."""
SETUP_S = 60.0
"""Seconds that the creation of the folders may take."""

RULES = """Answer with shell commands in a block that begins with ```bash: they run for at most {seconds:g} s, in one \
shell that lives on, and you are shown what they write. When you are done, answer with a block whose last line is \
`{submit}`. You have {turns} answers."""
"""Instructions after the text of the task."""


class HarborOptions(ShellOptions, frozen=True, kw_only=True, dict=True):
    """Tasks, and limits of the policy.

    Raises:
        ConfigError: an option or a file is invalid. The message names the fault and what was expected.
    """

    path: str
    """Folder of the tasks; each task is a subfolder."""
    held_out_path: str | None = None
    """Folder of other tasks for evaluation. None: a part of the tasks of `path` is held out."""
    held_out_fraction: float = 0.2
    """Share of the tasks that is held out if `held_out_path` is None."""
    image: str = "harbor-{name}"
    """Image of tasks whose task.toml names none. `{name}` stands for the task's folder, in lower case."""
    reward: str = UNNAMED
    """Name of the number in reward.json that is the reward. All numbers are metrics."""
    network: Literal["none", "bridge"] = "none"
    """Network of the sandboxes. `bridge`: tasks that allow the internet get it, also in their tests. The policy's
    programs can then reach everything that this machine can reach."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        super().__post_init__()
        if self.held_out_path is None and not 0 < self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction must lie between 0 and 1, but is {self.held_out_fraction!r}")

    def tasks(self) -> Split[HarborTask]:
        """Return all tasks. The first call in a process reads them; they are cached there.

        Raises:
            ConfigError: a folder is not a valid task, or one of the two sides would be empty.
        """
        held_out = None if self.held_out_path is None else Path(self.held_out_path)
        return load_tasks(Path(self.path), held_out, self.held_out_fraction, self.image)

    def spec_of(self, sandbox: HarborSandbox) -> Spec:
        """Return the description of a task's sandbox, which runs as the image's user and can change every file."""
        machine = sandbox.machine
        return Spec(
            image=sandbox.image,
            profile="compat",  # the one with the image's user and a root file system that can be written
            cpus=machine.cpus,
            memory_mib=machine.memory_mib,
            disk_mib=machine.storage_mib,
            network=self.network if machine.online else "none",
            env=machine.env,
            workdir=sandbox.workdir,
        )


class Harbor(ShellEnv[HarborOptions, HarborTask]):
    """Environment of one task. The rollout node makes one object for each episode."""

    def __init__(self, options: HarborOptions) -> None:
        super().__init__(options)
        self._box_and_shell: tuple[Sandbox, Session] | None = None
        """The episode's sandbox and its shell session; None until the first use."""

    @classmethod
    def check(cls, options: HarborOptions) -> None:
        """Refuse wrong options when the configuration is read, before a run starts. Reads the tasks.

        Starts no sandbox: a configuration may be checked on a machine without a container engine.

        Raises:
            ConfigError: an option or a file is invalid. The message names the fault and what was expected.
        """
        tasks = options.tasks()
        for task in (*tasks.train, *tasks.held_out):
            try:
                profiles.check(options.spec_of(task.sandbox))
                if task.second is not None:
                    profiles.check(options.spec_of(task.second))
                check_command(["bash"], task.verifier.timeout_sec, None, task.verifier.env)
            except SandboxRefusedError as error:
                raise ConfigError(f"no sandbox can be given for {task.tests.parent}: {error}") from error

    @classmethod
    async def prepare(cls, options: HarborOptions) -> None:
        """Open the node's pool of sandboxes and start one for the first task.

        Each node calls this once before its first episode, so that missing parts are found early.

        Raises:
            ConfigError: there is no engine, a package or a token is missing, or a folder is not a valid task.
            SandboxError: the engine or the service does not answer, or the image does not start.
        """
        tasks = await anyio.to_thread.run_sync(options.tasks, abandon_on_cancel=True)
        # The judge of a node holds the pool of sandboxes that all environments of the node share.
        judge = await shared_judge(options.pool, cls.opener)
        async with judge.sandboxes.borrow(options.spec_of(tasks.train[0].sandbox), options.pool.wait):
            pass

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the instruction of this seed's task, with the rules of the shell. Borrows no sandbox yet.

        Raises:
            ConfigError: a folder is not a valid task.
        """
        options = self._options
        tasks = await anyio.to_thread.run_sync(options.tasks, abandon_on_cancel=True)
        self._task = tasks.of_seed(seed)
        rules = RULES.format(seconds=options.command_timeout, submit=SUBMIT, turns=options.turns)
        return self._shown(f"{self._task.prompt.strip()}\n\n{rules}"), {"task": self._task.name}

    async def _run(self, task: HarborTask, command: str) -> Result:
        """Run commands in the episode's shell session, which keeps variables and the working directory.

        Raises:
            SandboxError: no sandbox is free in time, or the sandbox failed.
        """
        _, shell = await self._sandbox_and_shell(task)
        return await shell.run(command, timeout=self._options.command_timeout)

    async def _sandbox_and_shell(self, task: HarborTask) -> tuple[Sandbox, Session]:
        """Return the episode's sandbox and shell session.

        The first call opens them, so that an episode holds no sandbox before its first answer. `close` ends them, with
        `_resources`. Only `step` calls this, so no two calls overlap. Raises SandboxError if no sandbox can be opened.
        """
        if self._box_and_shell is None:
            options = self._options
            # The judge of the node holds the pool of sandboxes; it judges nothing here.
            judge = await self._judge()
            borrowed = judge.sandboxes.borrow(options.spec_of(task.sandbox), options.pool.wait)
            sandbox = await self._resources.enter_async_context(borrowed)
            self._box_and_shell = sandbox, await self._resources.enter_async_context(sandbox.session())
        return self._box_and_shell

    async def _judged(self, task: HarborTask, *, truncated: bool) -> StepResult:
        """Run the tests on the current state of the sandbox, and return the last step of the episode.

        In a shared sandbox, background processes of the policy keep running. Tests that are stopped at their timeout
        give no reward, also if they have left a number. Time in which they had no CPU does not count.

        Raises:
            RewardError: the tests left something other than finite numbers, or not the one that `reward` names.
            SandboxError: a sandbox failed, and the policy has not caused it.
        """
        sandbox, _ = await self._sandbox_and_shell(task)
        try:
            if task.second is None:
                ran, files = await _run_tests(sandbox, task, upload=True)
            else:
                ran, files = await self._run_tests_apart(sandbox, task, task.second)
        except (SandboxFileError, SandboxLimitError) as error:
            numbers, note = {}, f"the tests cannot be run: {error}"
        else:
            # A number that stopped tests have left may not be their last one.
            numbers = {} if ran.timed_out else _numbers(files, task.name, self._options.reward)
            note = f"{how_ended(ran)}: {numbers or f'no number in {REWARDS}'}"
        wanted = self._options.reward
        if numbers and wanted not in numbers:
            raise RewardError(f"{task.name} has no reward {wanted!r}, only {', '.join(numbers)}: name one in `reward`")
        metrics = {**numbers, "no_reward": float(not numbers), **self._counts}
        info = {"task": task.name, "metrics": metrics, "note": note}
        return "", numbers.get(wanted, 0.0), not truncated, truncated, info

    async def _run_tests_apart(
        self, first: Sandbox, task: HarborTask, second: HarborSandbox
    ) -> tuple[Result, dict[str, str]]:
        """Return the policy's sandbox, and run the tests in a second one that has only the artifacts of the first.

        Folders of the second sandbox that are artifacts have nothing but the artifact's files. Artifacts that the
        policy has not made are left out. Returns and raises the same as `_run_tests`.
        """
        options = self._options
        async with anyio.TemporaryDirectory(prefix="flash-harbor-") as place:
            copies: dict[str, Path] = {}
            for number, path in enumerate(task.artifacts):
                with suppress(SandboxFileError):  # the policy has not made it, or has made it unreadable
                    await first.download(path, Path(place) / str(number))
                    copies[path] = Path(place) / str(number)
            self._box_and_shell = None
            await self._resources.aclose()
            judge = await self._judge()
            async with judge.sandboxes.borrow(options.spec_of(second), options.pool.wait) as sandbox:
                for path, copy in copies.items():
                    if copy.is_dir():
                        with suppress(SandboxFileError):  # there is no such folder yet
                            for entry in await sandbox.list(path):
                                await sandbox.remove(f"{path}/{entry.name}")
                    await sandbox.upload(copy, path)
                return await _run_tests(sandbox, task, upload=not task.tests_in_image)


def _numbers(files: dict[str, str], task: str, wanted: str) -> dict[str, float]:
    """Return the numbers in the reward files that the tests left, by name; empty if there is no file or an empty one.

    Of two files only reward.json counts, because it may have several numbers with names.

    Args:
        files: text of each reward file, by the name of the file.
        task: name of the task, for the error message.
        wanted: name of the number that is the reward.

    Raises:
        RewardError: a file contains something other than finite numbers.
    """
    for name, read in (("reward.json", read_json), ("reward.txt", read_text)):
        text = files.get(name, "").strip()
        if text:
            try:
                numbers = read(text)
            except (ValueError, OverflowError, RecursionError) as error:
                raise RewardError(
                    f"the tests of {task} left no finite number in {REWARDS}/{name}, but {text[:200]!r}: {error}"
                ) from error
            # As in Harbor, a single number is the reward whatever its name, unless the option asks for a name.
            return {UNNAMED: next(iter(numbers.values()))} if len(numbers) == 1 and wanted == UNNAMED else numbers
    return {}


def read_text(text: str) -> dict[str, float]:
    """Return the number of a reward.txt. Raises ValueError if it is not a finite number."""
    return {UNNAMED: _finite(float(text))}


def read_json(text: str) -> dict[str, float]:
    """Return the numbers of a reward.json by name. A number without a name is named `reward`.

    As in Harbor, the values true and false of a name are the numbers 1 and 0.

    Raises:
        ValueError: there is no number, or a value is not a finite number.
    """
    found: object = json.loads(text)
    table = cast("dict[str, object]", found) if isinstance(found, dict) else {UNNAMED: found}
    numbers: dict[str, float] = {}
    for name, value in table.items():
        if isinstance(found, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name or UNNAMED} is {value!r:.80}, which is no number")
        numbers[name or UNNAMED] = _finite(float(value))
    if not numbers:
        raise ValueError("there is no number")
    return numbers


def _finite(number: float) -> float:
    """Return a number, or raise ValueError if it is infinite or NaN."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


async def _run_tests(sandbox: Sandbox, task: HarborTask, *, upload: bool) -> tuple[Result, dict[str, str]]:
    """Run the tests of a task. Returns their result, and the text of each reward file that they left, by its name.

    `upload` is False if the image has the tests.

    Raises:
        SandboxFileError: the sandbox, as the policy left it, cannot have the tests.
        SandboxLimitError: the sandbox, as the policy left it, has no room for the tests or their processes.
        SandboxError: another failure, which is no fault of the policy.
    """
    for path in ("/tests", REWARDS) if upload else (REWARDS,):
        await sandbox.remove(path)
    # The format promises both folders to the tests.
    made = await run_fairly(sandbox, ["mkdir", "-p", REWARDS, "/logs/agent"], SETUP_S)
    if made.timed_out:
        raise SandboxTimeoutError(f"{REWARDS} was not made within {SETUP_S:g} s: is this machine overloaded?")
    if not made.ok:
        raise SandboxFileError(f"{REWARDS} cannot be made: {how_ended(made)}")
    if upload:
        await sandbox.upload(task.tests, "/tests")
    ran = await run_fairly(sandbox, ["bash", "/tests/test.sh"], task.verifier.timeout_sec, env=task.verifier.env)
    files: dict[str, str] = {}
    for name in ("reward.txt", "reward.json"):
        with suppress(SandboxFileError):
            data = await sandbox.read(f"{REWARDS}/{name}", limit=LARGEST_REWARD)
            files[name] = data.decode("utf-8", "replace")
    return ran, files
