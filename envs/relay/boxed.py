"""Runs the program of an agent in a sandbox of its own: the option `box` of `envs.agent`.

Such a sandbox has no network. A relay (`envs.relay.outside`) leads from a port inside to the endpoint of the episode,
and to nothing else. `Agent.prepare` opens and closes one sandbox with a relay on each node as a trial. Later each
episode opens its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from envs.judging.judge import SandboxOpener, shared_judge
from envs.judging.options import judge_pool_of, limits_of
from envs.programs import STDERR_SHOWN, endpoint_variables, too_long
from envs.relay.outside import open_relay
from envs.sandbox.api import Spec
from envs.sandbox.open import open_sandboxes
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.text import how_ended
from flash.config.objects import check_options
from flash.environment.calls import shortened
from flash.errors import EnvError

LIFE_S = 24 * 3600.0
"""Seconds that a sandbox lives at most. The episode's own deadlines end it earlier."""
TRIAL_PORT = 9
"""Port to which the relay of `try_box` leads. Nothing ever connects through it."""


class BoxOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the sandbox that an agent runs in.

    Raises:
        ConfigError: an option is wrong. The message names it.
    """

    image: str
    """Image of the sandbox. It needs Python 3.6 or newer, and everything that the agent uses."""
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    """Resource limits of the agent: see `envs.judging.options.JudgingLimits`. Only `memory_mib`, `pids` and
    `cpus` are used."""
    sandboxes: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of the pool that provides the sandbox: see `envs.judging.options.JudgePool`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        # Parsed only to refuse wrong tables when the configuration is read.
        _ = limits_of(self.limits), judge_pool_of(self.sandboxes)


def box_of(table: dict[str, Any]) -> BoxOptions:
    """Parse the table `box` of an agent's options.

    Raises:
        ConfigError: an option is wrong. The message names it.
    """
    return BoxOptions(**check_options(BoxOptions, table, "box"))


async def try_box(box: BoxOptions, opener: SandboxOpener = open_sandboxes) -> None:
    """Start one such sandbox and a relay in it, to test both before a run.

    `opener` opens the pool of sandboxes; tests give a fake.

    Raises:
        ConfigError: there is no engine of containers, or a package or a token for the pool is missing.
        SandboxError: the sandbox cannot be started, or its image has no Python.
    """
    async with _opened(box, opener) as sandbox, open_relay(sandbox, "127.0.0.1", TRIAL_PORT):
        pass


async def run_boxed(
    box: BoxOptions,
    command: list[str],
    base_url: str,
    api_key: str,
    task: str,
    *,
    opener: SandboxOpener = open_sandboxes,
) -> str:
    """Run a program in a sandbox of its own, and return its standard output, which is the answer.

    Args:
        box: options of the sandbox.
        command: the program and its arguments.
        base_url: endpoint of the episode. The program gets the address of the relay in its place.
        api_key: key for the endpoint.
        task: standard input of the program.
        opener: opens the pool of sandboxes.

    Raises:
        EnvError: the program failed, or its standard output was cut at the sandbox's limit.
        SandboxError: no sandbox was available, it was lost, or the relay did not start in it.
    """
    address = urlsplit(base_url)
    assert address.hostname is not None
    assert address.port is not None
    async with _opened(box, opener) as sandbox, open_relay(sandbox, address.hostname, address.port) as port:
        inside = address._replace(netloc=f"127.0.0.1:{port}").geturl()
        variables = endpoint_variables(inside, api_key)
        result = await sandbox.run(command, timeout=LIFE_S, stdin=task.encode("utf-8", "replace"), env=variables)
    if not result.ok:
        said = shortened(result.stderr.decode("utf-8", "replace").strip(), STDERR_SHOWN)
        raise EnvError(f"`{command[0]}` failed ({how_ended(result)}): {said}")
    if result.stdout_truncated:
        raise too_long(command)
    return result.stdout.decode("utf-8", "replace")


@asynccontextmanager
async def _opened(box: BoxOptions, opener: SandboxOpener) -> AsyncGenerator[Sandbox]:
    """Borrow a sandbox of these options for the time of the block.

    The node's judge of the same pool lends it, so that agents and judges share the limit on sandboxes.

    Raises:
        ConfigError: there is no engine of containers, or a package or a token for the pool is missing.
        SandboxError: no sandbox was free in time, or it cannot be started.
    """
    limits, pool = limits_of(box.limits), judge_pool_of(box.sandboxes)
    spec = Spec(
        image=box.image,
        # Profile `build` without a network: unlike `strict`, it allows sockets, which reach the sandbox's own loopback.
        profile="build",
        memory_mib=limits.memory_mib,
        pids=limits.pids,
        cpus=limits.cpus,
        deadline_s=LIFE_S,
    )
    lender = (await shared_judge(pool, opener)).sandboxes
    async with lender.borrow(spec, pool.wait) as sandbox:
        yield sandbox
