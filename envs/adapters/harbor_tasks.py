"""Tasks in Harbor's format, which Terminal-Bench 2 uses too: https://harborframework.com/docs/tasks.

    NAME/task.toml                 resources of the sandbox and of the tests
    NAME/instruction.md            the prompt
    NAME/environment/Dockerfile    the sandbox's image, which you build, unless task.toml names one that exists
    NAME/tests/test.sh             runs as /tests/test.sh in the sandbox and leaves a reward in /logs/verifier
    NAME/tests/Dockerfile          the image of the tests' own sandbox, with the tests in it, if the task asks for one
    NAME/solution/solve.sh         ignored

`envs.adapters.harbor` plays the tasks. Unknown keys of task.toml are ignored, because the format grows. Keys that
request something that a sandbox does not have are refused.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from envs.data.split import KEPT, Split, divide
from flash.errors import ConfigError

STAGE_OR_WORKDIR = re.compile(
    r"^\s*(FROM|WORKDIR)\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE | re.MULTILINE
)
"""Pattern of the lines of a Dockerfile that begin a stage, with its image and its name, or set the working
directory."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
"""Pattern of a size, such as `2G`."""
MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
"""MiB for each unit of a size."""
DEFAULT_WORKDIR = "/app"
"""Working directory if neither task.toml nor the Dockerfile sets one."""
ARTIFACTS = "/logs/artifacts"
"""Folder that a second sandbox always gets from the policy's one."""
OF_TESTS = "-tests"
"""End of the name of an image that tests/Dockerfile builds, after the name of the task's own image."""

_Network = Literal["public", "no-network", "allowlist"]
"""Network mode: the internet, no network, or only a list of hosts, which is not supported."""
_Positive = Annotated[float, Meta(gt=0)]
"""A positive number."""


class HarborMachine(msgspec.Struct, frozen=True):
    """Table `[environment]` of a task.toml: the sandbox. Fields without an effect exist so that they can be refused."""

    docker_image: str | None = None
    """Name of the image; None: the option `image` of the environment names it."""
    cpus: _Positive = 1.0
    """Number of CPUs."""
    memory_mb: Annotated[int, Meta(gt=0)] | None = None
    """Memory, in MiB."""
    memory: str | None = None
    """Older form of `memory_mb`, such as `2G`."""
    storage_mb: Annotated[int, Meta(gt=0)] | None = None
    """Disk space, in MiB."""
    storage: str | None = None
    """Older form of `storage_mb`, such as `10G`."""
    env: dict[str, str] = {}
    """Environment variables of all commands."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    """Number of GPUs. Only 0 is supported."""
    allow_internet: bool | None = None
    """Older form of `network_mode`."""
    network_mode: _Network = "public"
    """Network of the sandbox."""
    workdir: str | None = None
    """Working directory of commands. None: the Dockerfile sets it."""
    os: str = "linux"
    """Operating system. Only Linux is supported."""
    tpu: Any = None
    """Request for TPUs. Only None is supported."""
    healthcheck: Any = None
    """Check before the sandbox is used. Only None is supported."""
    mcp_servers: list[Any] = []
    """Servers beside the sandbox. Only an empty list is supported."""

    @property
    def online(self) -> bool:
        """True if the task allows access to the internet."""
        return self.network_mode == "public" if self.allow_internet is None else self.allow_internet

    @property
    def memory_mib(self) -> int:
        """Memory in MiB; 2 GiB by default."""
        return self.memory_mb or _mib(self.memory or "2G")

    @property
    def storage_mib(self) -> int:
        """Disk space in MiB; 10 GiB by default."""
        return self.storage_mb or _mib(self.storage or "10G")


class HarborVerifier(msgspec.Struct, frozen=True):
    """Table `[verifier]` of a task.toml: the tests that judge the work."""

    timeout_sec: _Positive = 600.0
    """Seconds that the tests may take."""
    env: dict[str, str] = {}
    """Environment variables of the tests."""
    user: str | int | None = None
    """User that runs the tests. Only None is supported."""
    environment_mode: Literal["shared", "separate"] | None = None
    """Place of the tests: `shared` is the sandbox of the policy, and `separate` a second one. None: `separate` if
    `environment` is given, and otherwise `shared`."""
    environment: HarborMachine | None = None
    """Description of the second sandbox. None: that of the policy's sandbox."""
    collect: list[Any] = []
    """Commands after the work and before the tests. Only an empty list is supported."""
    network_mode: _Network | None = None
    """Network of the tests. None: the sandbox's. Only the sandbox's is supported."""

    @property
    def separate(self) -> bool:
        """True if the tests run in a second sandbox."""
        return (self.environment_mode or ("shared" if self.environment is None else "separate")) == "separate"


class HarborAgent(msgspec.Struct, frozen=True):
    """Table `[agent]` of a task.toml: the program that works on the task, here the policy."""

    user: str | int | None = None
    """User that runs the commands. Only None is supported."""
    network_mode: _Network | None = None
    """Network of the commands. None: the sandbox's. Only the sandbox's is supported."""


class HarborArtifact(msgspec.Struct, frozen=True):
    """Entry of `artifacts` in a task.toml: a file or folder that a second sandbox gets from the policy's one."""

    source: str
    """Path in both sandboxes."""
    exclude: list[str] = []
    """Patterns of files that are left out. Only an empty list is supported."""
    service: str | None = None
    """Container that has the file or folder. Only the main one is supported."""


class _File(msgspec.Struct, frozen=True):
    """Contents of a task.toml."""

    verifier: HarborVerifier = HarborVerifier()
    """Settings of the tests that judge the task."""
    agent: HarborAgent = HarborAgent()
    """Settings of the agent, here the policy."""
    environment: HarborMachine = HarborMachine()
    """Description of the sandbox."""
    steps: list[Any] = []
    """Steps of a task of several parts. Only an empty list is supported."""
    artifacts: list[str | HarborArtifact] = []
    """Files and folders that a second sandbox gets from the policy's one; a text is the path of one."""


class HarborSandbox(msgspec.Struct, frozen=True):
    """Sandbox of the policy, or second sandbox for the tests."""

    image: str
    """Image of the sandbox."""
    workdir: str
    """Working directory of commands in the sandbox."""
    machine: HarborMachine
    """Resources of the sandbox."""


class HarborTask(msgspec.Struct, frozen=True):
    """A task and its files."""

    name: str
    """Name of the task's folder."""
    prompt: str
    """Text of instruction.md."""
    sandbox: HarborSandbox
    """Sandbox of the policy."""
    tests: Path
    """Folder of the tests on this machine."""
    verifier: HarborVerifier
    """Options of the tests."""
    second: HarborSandbox | None
    """Sandbox of the tests; None: the policy's sandbox."""
    tests_in_image: bool
    """True if the image of the second sandbox contains the tests."""
    artifacts: tuple[str, ...]
    """Paths of the files and folders that the second sandbox gets from the policy's one."""


def read_task(folder: Path, image: str) -> HarborTask:
    """Read the task of a folder. `image` is used if the task names none; `{name}` in it stands for the task's name.

    Raises:
        ConfigError: a file is invalid. The message names the file and the fault.
    """
    path = folder / "task.toml"
    try:
        prompt = (folder / "instruction.md").read_text(encoding="utf-8")
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File, strict=False)
        machine = file.environment
        _ = machine.memory_mib, machine.storage_mib  # Parsed now, so that a wrong size is found here.
        built = image.replace("{name}", folder.name.lower())
        workdir = machine.workdir or _workdir(folder / "environment")
        sandbox = HarborSandbox(machine.docker_image or built, workdir, machine)
        second, in_image = _second(folder, file, sandbox, built) if file.verifier.separate else (None, False)
    except (OSError, ValueError, RecursionError) as error:  # a RecursionError: nested too deeply
        raise ConfigError(f"{folder} is no task of Harbor: {error}") from error
    if unsupported := _unsupported(folder, file):
        raise ConfigError(f"{path}: sandboxes have no {', no '.join(unsupported)}; leave this task out")
    if not prompt.strip():
        raise ConfigError(f"{folder}/instruction.md is empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder} has no tests/test.sh, which gives the reward")
    artifacts = [one if isinstance(one, str) else one.source for one in file.artifacts]
    paths = tuple(dict.fromkeys([ARTIFACTS, *(path.rstrip("/") for path in artifacts)]))
    return HarborTask(folder.name, prompt, sandbox, folder / "tests", file.verifier, second, in_image, paths)


def _second(folder: Path, file: _File, first: HarborSandbox, built: str) -> tuple[HarborSandbox, bool]:
    """Return the sandbox of a task's tests, and True if its image contains the tests.

    `first` is the policy's sandbox, and `built` the image that environment/Dockerfile builds. Raises ValueError if a
    size or a working directory is not understood, and OSError if a Dockerfile cannot be read.
    """
    given = file.verifier.environment  # the tests' own description of their sandbox, if there is one
    machine = given or file.environment
    _ = machine.memory_mib, machine.storage_mib  # Parsed now, so that a wrong size is found here.
    if given is not None and given.docker_image is not None:
        return HarborSandbox(given.docker_image, machine.workdir or _workdir(folder / "tests"), machine), True
    if (folder / "tests" / "Dockerfile").is_file():
        return HarborSandbox(built + OF_TESTS, machine.workdir or _workdir(folder / "tests"), machine), True
    return HarborSandbox(first.image, machine.workdir or first.workdir, machine), False


def _unsupported(folder: Path, file: _File) -> list[str]:
    """Return each request of the task that a sandbox cannot fulfil, as an end of the sentence `sandboxes have no …`."""
    machine, verifier, agent = file.environment, file.verifier, file.agent
    # Description of the tests' sandbox, folders with a Dockerfile, artifacts with options, and commands before the
    # tests. Without a second sandbox, artifacts and these commands have no effect on the reward, so they are allowed.
    tests, parts, artifacts, collect = machine, ["environment"], list[HarborArtifact](), list[Any]()
    if verifier.separate:
        tests, parts, collect = verifier.environment or machine, ["environment", "tests"], verifier.collect
        artifacts = [one for one in file.artifacts if isinstance(one, HarborArtifact)]
    machines = (machine, tests)
    asked = {
        "GPUs (environment.gpus)": any(one.gpus > 0 for one in machines),
        "TPUs (environment.tpu)": any(one.tpu is not None for one in machines),
        "other system than Linux (environment.os)": any(one.os.lower() != "linux" for one in machines),
        "list of hosts that may be reached (environment.network_mode)": any(
            one.network_mode == "allowlist" for one in machines
        ),
        "network of their own for a part of the task (agent.network_mode, verifier.network_mode)": any(
            part.network_mode not in (None, "public" if one.online else "no-network")
            for part, one in ((agent, machine), (verifier, tests))
        ),
        "check before they are used (environment.healthcheck)": any(one.healthcheck is not None for one in machines),
        "servers beside them (environment.mcp_servers)": any(one.mcp_servers for one in machines),
        "containers beside them (docker-compose.yaml, artifacts.service)": any(
            (folder / part / "docker-compose.yaml").exists() for part in parts
        )
        or any(one.service not in (None, "main") for one in artifacts),
        "other user than their image's (agent.user, verifier.user)": any(
            one.user is not None for one in (agent, verifier)
        ),
        "variables of the host (${…} in an env)": any(
            "${" in value for one in (*machines, verifier) for value in one.env.values()
        ),
        "steps ([[steps]])": bool(file.steps),
        "commands before the tests (verifier.collect)": bool(collect),
        "artifacts without some of their files (artifacts.exclude)": any(one.exclude for one in artifacts),
    }
    return [what for what, wanted in asked.items() if wanted]


def _workdir(folder: Path) -> str:
    """Return the working directory of the last stage of the folder's Dockerfile.

    The WORKDIRs of a stage are resolved one against another. A stage that begins with an earlier stage inherits its
    directory. Without a Dockerfile, and for the root, the result is `DEFAULT_WORKDIR`. Raises ValueError if the
    directory depends on a variable, and OSError if the file cannot be read.
    """
    root, stage = PurePosixPath("/"), ""
    # Directory of the present stage, and of each stage by its name; an unnamed stage has the name "".
    path, path_of = root, dict[str, PurePosixPath]()
    dockerfile = folder / "Dockerfile"
    text = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
    for instruction, word, name in STAGE_OR_WORKDIR.findall(text):
        if instruction.upper() == "FROM":
            path, stage = path_of.get(word.lower(), root), name.lower()
        else:
            path /= word.strip("\"'")
        path_of[stage] = path
    if "$" in str(path):
        raise ValueError(f"the WORKDIR {path} of its Dockerfile has a variable; set environment.workdir in task.toml")
    return DEFAULT_WORKDIR if str(path) == "/" else str(path)


def _mib(text: str) -> int:
    """Return a size such as `2G` in MiB, rounded, and at least 1. Raises ValueError if the text is no size."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size such as 2G or 512M")
    return max(1, round(float(match[1]) * MIB[match[2].upper()]))


@functools.lru_cache(maxsize=KEPT)
def load_tasks(folder: Path, held_out: Path | None, fraction: float, image: str) -> Split[HarborTask]:
    """Read the tasks of a folder, and divide them into training tasks and tasks held out for evaluation.

    `held_out` is a folder of other tasks for evaluation. If it is None, a `fraction` of the tasks is held out. `image`
    is used for tasks that name none.

    Raises:
        ConfigError: a folder is not a valid task, or one of the two sides would be empty.
    """
    held_out_tasks = None if held_out is None else _read_tasks(held_out, image)
    return divide(_read_tasks(folder, image), held_out_tasks, fraction, str(folder))


def _read_tasks(folder: Path, image: str) -> list[HarborTask]:
    """Read all tasks of a folder, in the order of their names.

    Raises ConfigError if there are none or one is invalid.
    """
    tasks = [read_task(file.parent, image) for file in sorted(folder.glob("*/task.toml"))]
    if not tasks:
        raise ConfigError(f"there are no tasks in {folder}: expected folders with a task.toml")
    return tasks
