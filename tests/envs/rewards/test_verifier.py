import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType

import anyio
import anyio.lowlevel
import pytest

from envs.rewards.verifier import START_S, inline, load_verifier, verify
from flash.errors import ConfigError, RewardError, SandboxLostError

HERE = "tests.envs.rewards.verifiers"


async def a_worker_has_started():
    """Start the worker process before a short deadline, for anyio does not close one whose start is cancelled."""
    assert await verify(f"{HERE}:length", "a", "", timeout=60) == 1.0


@inline
def own_process_id(completion, answer):
    return os.getpid()


@inline
def raises_inline(completion, answer):
    raise LookupError("no such answer")


@pytest.mark.anyio
async def test_a_verifier_runs_in_another_process():
    assert await verify(f"{HERE}:length", "four", "two", timeout=60) == 1.0
    assert await verify(f"{HERE}:process_id", "", "", timeout=60) != os.getpid()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["judge", "judge_in_part"])
async def test_an_object_whose_call_is_asynchronous_is_awaited(name):
    """huggingface/trl#7213"""
    assert await verify(f"{HERE}:{name}", "a", "a", timeout=60) == 1.0
    assert await verify(f"{HERE}:{name}", "a", "b", timeout=60) == 0.0


@pytest.mark.anyio
async def test_an_inline_verifier_runs_in_this_process():
    assert await verify(f"{__name__}:own_process_id", "", "", timeout=60) == os.getpid()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{HERE}:raises", "it raised LookupError: no such answer"),
        (f"{HERE}:raises_unpicklable", "it raised Local"),
        (f"{HERE}:dies", "its worker process died"),
        (f"{HERE}:exits", "it raised SystemExit: 3"),
        (f"{HERE}:gives_nan", "must be a finite number, but is nan"),
        (f"{HERE}:gives_none", "must be a finite number, but is None"),
        (f"{HERE}:gives_a_coroutine", "it was not awaited: make the function `async def`"),
        (f"{__name__}:raises_inline", "it raised LookupError: no such answer"),
    ],
)
async def test_a_failing_verifier_is_a_reward_error_and_never_a_zero(path, message):
    with pytest.raises(RewardError, match=message) as caught:
        await verify(path, "", "", timeout=60)
    assert path in str(caught.value)


@pytest.mark.anyio
async def test_a_verifier_that_a_worker_cannot_import_is_a_reward_error(monkeypatch):
    only_here = ModuleType("only_here")
    vars(only_here)["score"] = lambda completion, answer: 1.0
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    with pytest.raises(RewardError, match="only_here:score: there is no verifier"):
        await verify("only_here:score", "", "", timeout=60)


@pytest.mark.anyio
async def test_a_verifier_that_the_next_worker_cannot_import_is_a_reward_error(monkeypatch, tmp_path):
    (tmp_path / "imported_once.py").write_text(
        "import os, time\ndef score(completion, answer):\n    os.unlink(__file__)\n    time.sleep(3600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    await a_worker_has_started()
    with pytest.raises(RewardError, match=r"imported_once:score: no answer within 0\.5 s"):
        await verify("imported_once:score", "", "", timeout=0.5)


@pytest.mark.anyio
async def test_a_hanging_verifier_ends_at_its_deadline_and_the_next_one_works():
    await a_worker_has_started()
    with anyio.fail_after(START_S), pytest.raises(RewardError, match=r"hangs: no answer within 0\.2 s"):
        await verify(f"{HERE}:hangs", "", "", timeout=0.2)
    assert await verify(f"{HERE}:length", "a", "", timeout=60) == 1.0


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_answer_that_is_computed_without_end_is_wrong_where_the_reference_passes():
    assert await verify(f"{HERE}:computes", "10^{10^{10}}", "5", timeout=3) == 0.0


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_reward_that_computes_without_end_is_proven_by_the_solution_of_its_row():
    row, path = {"answer": "5"}, f"{HERE}:computes_on_a_row"
    assert await verify(path, "10^{10^{10}}", row, timeout=3, solution="5") == 0.0
    with pytest.raises(RewardError, match=r"no answer within 0\.5 s"):
        await verify(path, "10^{10^{10}}", row, timeout=0.5)


@pytest.mark.anyio
async def test_a_verifier_that_waits_without_end_is_no_fault_of_the_answer():
    with pytest.raises(RewardError, match=r"no answer within 0\.5 s"):
        await verify(f"{HERE}:waits_for_a_server", "4", "5", timeout=0.5)


@pytest.mark.anyio
async def test_a_cancelled_verifier_does_not_hold_its_caller():
    await a_worker_has_started()
    with anyio.move_on_after(0.2) as scope:
        await verify(f"{HERE}:hangs", "", "", timeout=3600)
    assert scope.cancelled_caught


async def waits(completion, answer):
    await anyio.sleep(float(completion))
    return float(answer)


async def raises_later(completion, answer):
    await anyio.lowlevel.checkpoint()
    raise LookupError("no such answer")


async def lost(completion, answer):
    raise SandboxLostError("the judge is gone")


@pytest.mark.anyio
@pytest.mark.virtual
async def test_an_asynchronous_verifier_is_awaited_under_its_deadline():
    assert await verify(f"{__name__}:waits", "5", "0.5", timeout=10) == 0.5
    with pytest.raises(RewardError, match="waits: no answer within 10 s"):
        await verify(f"{__name__}:waits", "11", "1", timeout=10)
    with pytest.raises(RewardError, match="must be a finite number, but is nan"):
        await verify(f"{__name__}:waits", "1", "nan", timeout=10)
    with pytest.raises(RewardError, match="it raised LookupError: no such answer"):
        await verify(f"{__name__}:raises_later", "", "", timeout=10)


@pytest.mark.anyio
async def test_an_asynchronous_verifier_may_say_that_its_surroundings_failed():
    with pytest.raises(SandboxLostError, match="the judge is gone"):
        await verify(f"{__name__}:lost", "", "", timeout=10)


@pytest.mark.parametrize("path", ["nowhere:f", f"{HERE}:nothing", HERE, "", f"{HERE}:not_a_function"])
def test_a_path_without_a_function_is_a_config_error(path):
    with pytest.raises(ConfigError, match=r"no verifier|not a function"):
        load_verifier(path)


class Judge(BaseHTTPRequestHandler):
    """Grades an answer by how often it says yes, as a served model would answer."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        assert (asked["model"], asked["temperature"]) == ("judge-model", 0)
        count = asked["messages"][0]["content"].rpartition("The answer:")[2].count("yes")
        said = f"Grade: {count}" if count else "I would rather not."
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        """To nobody."""


@pytest.mark.anyio
async def test_the_example_of_a_judge_takes_the_grade_of_a_served_model(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_MODEL", "judge-model")
        assert await verify("examples.judge:judge", "yes, yes and yes", "say yes", timeout=60) == 0.3
        assert await verify("examples.judge:judge", 10 * "yes", "say yes", timeout=60) == 1.0
        with pytest.raises(RewardError, match="the judge says no grade"):
            await verify("examples.judge:judge", "no", "say yes", timeout=60)
        server.shutdown()
