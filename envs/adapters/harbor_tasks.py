"""Tasks in Harbor's format, which Terminal-Bench 2 uses too: https://harborframework.com/docs/tasks.

    NAME/task.toml                 resources of the sandbox and of the tests
    NAME/instruction.md            the prompt
    NAME/environment/Dockerfile    the sandbox's image, which you build, unless task.toml names one that exists
    NAME/tests/test.sh             runs as /tests/test.sh in the sandbox and leaves a reward in /logs/verifier
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

from envs.data.split import Split, divide
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

_Network = Literal["public", "no-network", "allowlist"]
"""Network mode: the internet, no network, or only a list of hosts, which is not supported."""
_Positive = Annotated[float, Meta(gt=0)]
"""A positive number."""


class HarborVerifier(msgspec.Struct, frozen=True):
    """Table `[verifier]` of a task.toml: the tests that judge the work."""

    timeout_sec: _Positive = 600.0
    """Seconds that the tests may take."""
    env: dict[str, str] = {}
    """Environment variables of the tests."""
    user: str | int | None = None
    """User that runs the tests. Only None is supported."""
    environment_mode: str = "shared"
    """Place of the tests. Only `shared`, the sandbox of the policy, is supported."""
    network_mode: _Network | None = None
    """Network of the tests. None: the sandbox's. Only the sandbox's is supported."""


class HarborAgent(msgspec.Struct, frozen=True):
    """Table `[agent]` of a task.toml: the program that works on the task, here the policy."""

    user: str | int | None = None
    """User that runs the commands. Only None is supported."""
    network_mode: _Network | None = None
    """Network of the commands. None: the sandbox's. Only the sandbox's is supported."""


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


class HarborTask(msgspec.Struct, frozen=True):
    """A task and its files."""

    name: str
    """Name of the task's folder."""
    prompt: str
    """Text of instruction.md."""
    image: str
    """Image of the sandbox."""
    workdir: str
    """Working directory of commands in the sandbox."""
    tests: Path
    """Folder of the tests on this machine."""
    verifier: HarborVerifier
    """Options of the tests."""
    machine: HarborMachine
    """Resources of the sandbox."""


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
        workdir = machine.workdir or _workdir(folder)
    except (OSError, ValueError, RecursionError) as error:  # a RecursionError: nested too deeply
        raise ConfigError(f"{folder} is no task of Harbor: {error}") from error
    if unsupported := _unsupported(folder, file):
        raise ConfigError(f"{path}: sandboxes have no {', no '.join(unsupported)}; leave this task out")
    if not prompt.strip():
        raise ConfigError(f"{folder}/instruction.md is empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder} has no tests/test.sh, which gives the reward")
    name = folder.name
    built = machine.docker_image or image.replace("{name}", name.lower())
    return HarborTask(name, prompt, built, workdir, folder / "tests", file.verifier, machine)


def _unsupported(folder: Path, file: _File) -> list[str]:
    """Return each request of the task that a sandbox cannot fulfil, as an end of the sentence `sandboxes have no …`."""
    machine, verifier, agent = file.environment, file.verifier, file.agent
    asked = {
        "GPUs (environment.gpus)": machine.gpus > 0,
        "TPUs (environment.tpu)": machine.tpu is not None,
        "other system than Linux (environment.os)": machine.os.lower() != "linux",
        "list of hosts that may be reached (environment.network_mode)": machine.network_mode == "allowlist",
        "network of their own for a part of the task (agent.network_mode, verifier.network_mode)": any(
            one.network_mode not in (None, "public" if machine.online else "no-network") for one in (agent, verifier)
        ),
        "check before they are used (environment.healthcheck)": machine.healthcheck is not None,
        "servers beside them (environment.mcp_servers)": bool(machine.mcp_servers),
        "containers beside them (docker-compose.yaml)": (folder / "environment" / "docker-compose.yaml").exists(),
        "second container for tests (verifier.environment_mode)": verifier.environment_mode != "shared",
        "other user than their image's (agent.user, verifier.user)": any(
            one.user is not None for one in (agent, verifier)
        ),
        "variables of the host (${…} in an env)": any(
            "${" in value for one in (machine, verifier) for value in one.env.values()
        ),
        "steps ([[steps]])": bool(file.steps),
    }
    return [what for what, wanted in asked.items() if wanted]


def _workdir(folder: Path) -> str:
    """Return the working directory of the Dockerfile's last stage.

    The WORKDIRs of a stage are resolved one against another. A stage that begins with an earlier stage inherits its
    directory. Raises ValueError if the directory depends on a variable.
    """
    root, stage = PurePosixPath("/"), ""
    path, path_of = root, dict[str, PurePosixPath]()
    dockerfile = folder / "environment" / "Dockerfile"
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
    """Return a size in MiB, at least 1. Raises ValueError if the text is no size."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size such as 2G or 512M")
    return max(1, round(float(match[1]) * MIB[match[2].upper()]))


@functools.lru_cache(maxsize=4)
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
