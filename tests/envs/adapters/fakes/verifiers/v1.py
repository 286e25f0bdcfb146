"""A task set of sums. Its harness asks each twice, streamed, at the address that the client's config names.

One who says `fail` makes it fail, one who says `wait` makes it ask no more, and one who says `hide` leaves no trace.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx

waits = asyncio.Event()
"""Set when one was told to."""
over = asyncio.Event()
"""Set when an episode is, however it ended."""


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class AgentConfig:
    harness: dict[str, Any] | None = None
    runtime: dict[str, Any] | None = None


class EnvConfig:
    """A table `[env]`, which has an entry for each agent that the task set declares, and refuses others."""

    def __init__(self, taskset: dict[str, Any], **agents: dict[str, Any]) -> None:
        declared = {"sums": {"agent": None}, "secrets": {"player": None, "user": {"id": "bash"}}}[taskset["id"]]
        if unknown := agents.keys() - declared.keys():
            raise ValueError(f"{unknown} are not permitted")
        self.taskset = taskset
        self.agents = {
            name: AgentConfig(**{"harness": harness, **agents.get(name, {})}) for name, harness in declared.items()
        }

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield "taskset", self.taskset
        yield from self.agents.items()


def resolve_env_config(table: dict[str, Any]) -> EnvConfig:
    return EnvConfig(**table)


class Env:
    def __init__(self, config: EnvConfig) -> None:
        assert all(agent.harness for agent in config.agents.values())
        assert all(agent.runtime for agent in config.agents.values())
        self.config = config
        # The words of `secrets` are in other data of its tasks.
        prompts = [f"{number}+{number}=" if "agent" in config.agents else "Guess:" for number in range(6)]
        self.taskset = [
            SimpleNamespace(key=f"{number}", data=SimpleNamespace(prompt=prompt, system_prompt=None))
            for number, prompt in enumerate(prompts)
        ]
        self._served = False

    @asynccontextmanager
    async def serving(self):
        self._served = True
        yield
        self._served = False

    async def run_episode(self, task: Any, context: ModelContext) -> Any:
        assert self._served
        try:
            said = await self._told(task.data.prompt, context)
        except httpx.HTTPStatusError as error:
            problem = SimpleNamespace(type="ProviderError", message=f"upstream {error.response.status_code}")
            return SimpleNamespace(ok=False, errors=[], traces=[SimpleNamespace(errors=[problem])])
        finally:
            over.set()
        right = SimpleNamespace(value=float(said[-1] == said[0]))
        trace = SimpleNamespace(
            agent=SimpleNamespace(trainable=True),
            reward=right.value,
            rewards={"same": right, "unscored": None},
            metrics={"length": float(len(said[-1])), "skipped": None},
        )
        judge = SimpleNamespace(agent=SimpleNamespace(trainable=False), reward=7.0, rewards={}, metrics={})
        return SimpleNamespace(ok=True, errors=[], traces=[judge] if said[-1] == "hide" else [trace, judge])

    async def _told(self, prompt: str, context: ModelContext) -> list[str]:
        messages: list[dict[str, str]] = []
        said: list[str] = []
        headers = {"authorization": "Bearer EMPTY", "x-session-id": "1"}
        async with httpx.AsyncClient(base_url=context.client.base_url, headers=headers, trust_env=False) as client:
            for content in (prompt, "Are you sure?"):
                messages.append({"role": "user", "content": content})
                body = {"model": context.model, "messages": messages, "stream": True}
                reply = (await client.post("/chat/completions", json=body)).raise_for_status()
                events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line != "data: [DONE]"]
                deltas = [json.loads(event)["choices"][0]["delta"] for event in events if event]
                said.append("".join(delta.get("content") or "" for delta in deltas))
                if said[-1] == "fail":
                    raise RuntimeError("out of paper")
                if said[-1] == "wait":
                    waits.set()
                    await asyncio.sleep(1000)
                messages.append({"role": "assistant", "content": said[-1]})
        return said


def load_environment(config: EnvConfig) -> Env:
    return Env(config)
