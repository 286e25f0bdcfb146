"""A teacher on a real vLLM server gives the log-probs of one in the trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from flash.config.tree import ModelConfig
from flash.errors import ConfigError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.teacher import ServedTeacher
from flash.trainer.model.logprobs import policy_logprobs
from flash.trainer.packing import pack
from flash.types import Failure, ShardSample, Trajectory
from tests.forked_command import ROOT, ForkedCommand
from tests.rollout.test_teacher import trajectory
from tests.rollout.test_vllm_engine import VOCABULARY, make_model
from tests.trainer.packed_cases import sharded

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1500)]


def free_port() -> int:
    """Return a port of this machine that was free just now."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serve a small model in float32 with `vllm serve`. Yields its address and the model's folder."""
    folder = tmp_path_factory.mktemp("teacher")
    port = free_port()
    make_model(folder)
    words = f"--model {folder} --host 127.0.0.1 --port {port} --dtype float32 --max-model-len 64 --enforce-eager"
    command = ("-m", "vllm.entrypoints.openai.api_server", *words.split())
    variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables["TORCHDYNAMO_DISABLE"] = "1"  # compile nothing: a C++ compiler would take most of the time
    with (folder / "log").open("wb") as log:
        server = ForkedCommand(command, output=log.fileno(), folder=ROOT, variables=variables)
    try:
        answers = False
        while not answers:
            assert server.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
            with suppress(httpx.TransportError):
                answers = httpx.get(f"http://127.0.0.1:{port}/health").is_success
        yield f"http://127.0.0.1:{port}", folder
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def test_a_real_server_gives_the_log_probs_of_the_trainer(served: tuple[str, Path]) -> None:
    url, model = served
    rng = np.random.default_rng(0)
    made = [trajectory(rng.integers(1, VOCABULARY, 40).tolist(), [(4, 20), (25, 40)]) for _ in range(8)]

    async def ask(work: Callable[[ServedTeacher], Awaitable[Any]]) -> Any:
        # Run `work` with a client of the server, and close the client.
        teacher = ServedTeacher(url, 600.0)
        try:
            return await work(teacher)
        finally:
            await teacher.aclose()

    async def all_scored(teacher: ServedTeacher) -> list[Trajectory | Failure]:
        # Check the server as a run does at its start, and score all trajectories in parallel.
        await teacher.check(63, VOCABULARY, HfTokenizer(ModelConfig(path=str(model))).token_texts)
        return list(await asyncio.gather(*map(teacher.score, made)))

    found = asyncio.run(ask(all_scored))
    (micro,) = pack([ShardSample(index, one) for index, one in enumerate(found)], min_version=0, max_tokens=4096)
    with torch.no_grad():
        expected_T = policy_logprobs(sharded(model), micro).logp_T
    assert np.abs(micro.teacher_T - expected_T.numpy()).max() < 1e-4
    with pytest.raises(ConfigError, match=r"HTTP 400.*, with --max-model-len above 64 "):
        asyncio.run(ask(lambda teacher: teacher.check(64, VOCABULARY, lambda tokens: [])))
