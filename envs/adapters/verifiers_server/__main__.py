"""Serve a task set of `verifiers` (0.4) to `envs.adapters.verifiers`. Run it with the Python that has that package:

    python envs/adapters/verifiers_server NAME [--env '{"taskset": …}'] [--port 8400] [--tasks 10000]

The program imports only `verifiers` and its requirements, and nothing of Flash. `verifiers` itself runs each episode
with a harness, a program that sends requests to the policy. A lane is a path of this server that passes the harness's
requests on to the endpoint of one episode, and to no other address. Lanes are reused, because `verifiers` keeps a
client for every address that it has used.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

HARNESS = {"id": "null"}
"""Default harness of an agent: a conversation, with the tools of the task set."""
RUNTIME = {"type": "subprocess"}
"""Default runtime of an agent: a process on this machine. The default of `verifiers` is a hosted service."""

OF_THE_HOP = frozenset({"authorization", "connection", "content-length", "host", "transfer-encoding"})
"""Request headers that are not passed on: they belong to one connection, or hold the key of the episode."""

LARGEST_REQUEST = 64 << 20
"""Largest request, in bytes."""


class Server:
    """The task set and the running episodes. `env` is a table `[env]` of `verifiers`; at most `most` tasks are read."""

    def __init__(self, name: str, env: dict[str, Any], most: int) -> None:
        self._verifiers: Any = importlib.import_module("verifiers.v1")
        """Module `verifiers.v1`."""
        table = {**env, "taskset": {**env.get("taskset", {}), "id": name}}
        # Each task set names its agents as it likes, and `verifiers` refuses a table of an agent that it does not have.
        for agent, declared in self._verifiers.resolve_env_config(table):
            if isinstance(declared, self._verifiers.AgentConfig):
                default = {"runtime": RUNTIME} if declared.harness else {"runtime": RUNTIME, "harness": HARNESS}
                table[agent] = {**default, **env.get(agent, {})}
        self._env = self._verifiers.load_environment(self._verifiers.resolve_env_config(table))
        """Environment of `verifiers`, which runs episodes."""
        self._tasks = list(islice(self._env.taskset, most))
        """Tasks by the numbers that `play` gets."""
        self._lanes: dict[str, tuple[str, str]] = {}
        """Base URL and key of the episode that uses each lane, by the lane's number as text. `_serving` also sets
        `_session`, the client for requests to these URLs."""

    def app(self) -> web.Application:
        """Return the web application with all routes."""
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.cleanup_ctx.append(self._serving)
        app.router.add_get("/tasks", self.tasks)
        app.router.add_post("/play", self.play)
        app.router.add_post("/lanes/{lane}/v1/{path:.+}", self.pass_on)
        return app

    async def _serving(self, app: web.Application) -> AsyncIterator[None]:
        """Keep the environment and the client open while the application runs, as aiohttp's cleanup context."""
        # The endpoint replies when the policy has answered, so only the run's own deadlines apply.
        async with self._env.serving(), ClientSession(timeout=ClientTimeout(total=None)) as self._session:
            yield

    async def tasks(self, request: web.Request) -> web.Response:
        """Return a digest of each task's prompt, in the tasks' order. Tasks with equal prompts have equal digests.

        If all prompts are equal, as in a game with a secret word, the complete contents of the tasks are used instead.
        """
        shown = [repr((task.data.system_prompt, task.data.prompt or task.key)) for task in self._tasks]
        if len(set(shown)) == 1:
            shown = [task.key for task in self._tasks]
        return web.json_response([hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in shown])

    async def play(self, request: web.Request) -> web.Response:
        """Run an episode of task `number` against the endpoint at `base_url`. Returns its reward and its metrics.

        The reward is the mean over the traces of agents that are trained. An episode with errors, or without such a
        trace, has status 500. If the client leaves, aiohttp cancels this call, and with it the episode.
        """
        asked = await request.json()
        # The smallest free number. No `await` stands between these two lines, so no other episode takes it, too.
        lane = next(lane for lane in map(str, count()) if lane not in self._lanes)
        self._lanes[lane] = asked["base_url"], asked["api_key"]
        try:
            # A variable that does not exist, so that the harness has no key: `pass_on` adds the episode's key.
            client = self._verifiers.EvalClientConfig(
                base_url=f"{request.url.origin()}/lanes/{lane}/v1", api_key_var="FLASH_LANE_HAS_NO_KEY"
            )
            context = self._verifiers.ModelContext(model="policy", client=client)
            episode = await self._env.run_episode(self._tasks[asked["number"]], context)
        finally:
            del self._lanes[lane]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            return web.json_response({"error": "; ".join(f"{one.type}: {one.message}" for one in errors)}, status=500)
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if not traces:
            return web.json_response({"error": "the episode has no trace of an agent that is trained"}, status=500)
        metrics = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
        rewards = {name: one.value for trace in traces for name, one in trace.rewards.items() if one is not None}
        reward = sum(trace.reward for trace in traces) / len(traces)
        return web.json_response({"reward": reward, "metrics": {**rewards, **metrics}})

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass a harness's request on to the endpoint of its episode, and stream the response back.

        A request after the end of the episode is refused with status 401, until another episode takes the lane.
        `pass_on` runs beside `play` of the episode, for any number of requests at a time.
        """
        if request.match_info["lane"] not in self._lanes:
            return web.json_response({"error": {"message": "The episode is over."}}, status=401)
        base_url, key = self._lanes[request.match_info["lane"]]
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_THE_HOP}
        headers["authorization"] = f"Bearer {key}"
        body = await request.read()
        async with self._session.post(f"{base_url}/{request.match_info['path']}", data=body, headers=headers) as reply:
            answer = web.StreamResponse(status=reply.status, headers={"content-type": reply.content_type})
            await answer.prepare(request)
            async for piece in reply.content.iter_any():
                await answer.write(piece)
            return answer


def main() -> None:
    """Serve until the process is ended. An episode is cancelled as soon as its client disconnects."""
    parser = argparse.ArgumentParser(description="Serves a task set of verifiers to envs.adapters.verifiers.")
    parser.add_argument("name", help="the task set, as `verifiers` knows it")
    parser.add_argument("--env", type=json.loads, default={}, help="a table [env] of verifiers, as JSON")
    parser.add_argument("--port", type=int, default=8400, help="of the loopback (8400)")
    parser.add_argument("--tasks", type=int, default=10_000, help="tasks that are read at most (10000)")
    given = parser.parse_args()
    # Harnesses need `uv`. It is found beside this Python, also if its virtual environment is not activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    server = Server(given.name, given.env, given.tasks)
    web.run_app(server.app(), host="127.0.0.1", port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
