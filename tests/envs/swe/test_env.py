"""Episodes of mending, in local processes; in real containers in `tests/envs/sandbox/test_swe.py`."""

from __future__ import annotations

from typing import Any

import pytest

from envs.sandbox.api import Result
from envs.sandbox.text import result_text
from envs.swe import SweEnv, SweOptions
from envs.swe.shell import ShellOrder, read_order
from flash.config.objects import check_options
from flash.environment import HELD_OUT, Checked, Informed, Prepared, StepResult, WarmStart, sharing
from flash.environment.results import check_step_result, metrics_of, note_of
from flash.errors import ConfigError, EnvError, SandboxLostError
from flash.types import Message, Observation
from tests.envs.sandboxes import ScriptedProvider, local_processes, result


class Local(SweEnv):
    """In local processes."""

    opener = staticmethod(local_processes)


def plain(**options: Any) -> SweOptions:
    return SweOptions(template="plain", **options)


def solution(env: SweEnv, prompt: Observation) -> str:
    """The command that solves the task of this prompt."""
    examples = env.solved_examples(200, seed=1)
    return next(example.answer for example in examples if example.prompt == prompt)


async def played(options: SweOptions, *answers: str, seed: int = 0) -> tuple[list[Observation], StepResult]:
    """What was shown after each answer, and how it ended. `SOLVE` stands for the solution."""
    env = Local(options)
    prompt, _ = await env.reset(seed)
    shown: list[Observation] = []
    try:
        for answer in answers:
            step = check_step_result(await env.step(answer.replace("SOLVE", solution(env, prompt))))
            shown.append(step[0])
            if step[2] or step[3]:
                return shown, step
    finally:
        await env.close()
    raise AssertionError("it did not end")


def test_it_offers_what_an_environment_may_offer() -> None:
    env = SweEnv(SweOptions())
    assert isinstance(env, Informed)
    assert isinstance(env, WarmStart)
    assert isinstance(SweEnv, Checked)
    assert isinstance(SweEnv, Prepared)


@pytest.mark.anyio
async def test_a_bug_is_mended_in_turns_and_the_turns_are_counted() -> None:
    async with sharing("test"):
        shown, (_, reward, terminated, truncated, info) = await played(
            plain(), "ls", "cd / && x=5", "echo $x; ls", "", "SOLVE", "submit"
        )
    assert ".py" in str(shown[0])
    assert shown[2] == str(shown[0]).replace("code 0", "code 0\n")
    assert shown[1] == shown[4] == "\nexit code 0\n$ "
    assert shown[3] == "\nThere is no command in your answer\n$ "
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert metrics_of(info) == {
        "solved": 1, "fixed": 1, "kept": 1, "turns": 6, "no_command": 1, "command_timeouts": 0,
    }  # fmt: skip
    assert note_of(info) == "passed"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("submit", "wrong output"),
        ("rm -rf *\nsubmit", "crash"),
        ("find . -name '*test*' -delete; rm -rf tests; exit 0\nsubmit", "wrong output"),
        ("for f in $(find . -name '*.py'); do echo 'import os; print(1); os._exit(0)' > $f; done\nsubmit", "wrong"),
        ("cd ..; rm -rf repository\nsubmit", "cannot be taken out"),
        ("ln -s /etc/passwd here\nsubmit", "cannot be taken out"),
        ("echo 'import builtins; builtins.print = lambda *a: None' > sitecustomize.py\nsubmit", "wrong output"),
    ],
)
async def test_nothing_but_mending_is_rewarded(answer: str, cause: str) -> None:
    async with sharing("test"):
        _, (_, reward, terminated, _, info) = await played(plain(), answer)
    assert (reward, terminated) == (0.0, True)
    assert metrics_of(info)["solved"] == 0
    assert cause in note_of(info)


@pytest.mark.anyio
async def test_a_solution_that_breaks_something_else_is_not_rewarded_and_shows_as_such() -> None:
    async with sharing("test"):
        _, (_, reward, _, _, info) = await played(
            plain(), "SOLVE", "for f in $(find . -name '*.py'); do echo 'del __name__' > $f; done\nsubmit"
        )
    assert reward == 0.0
    assert metrics_of(info)["kept"] < 1


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_last_answer_is_judged_as_it_stands() -> None:
    class Episode:
        turns_left = 1
        prepared = ""

        async def prepare(self, observation: Observation) -> None:
            self.prepared = observation

        def room(self, observation: Observation) -> int:
            assert observation == self.prepared, "it would be rendered on the loop"
            return 40 - len(observation)

    async with sharing("test"):
        _, step = await played(plain(turns=1), "SOLVE")
        assert step[1:4] == (1.0, True, False)
        env = Local(plain())
        env.inform(Episode())  # type: ignore[arg-type]
        prompt, _ = await env.reset(0)
        assert (await env.step("true"))[1:4] == (0.0, False, False)
        solve = solution(env, prompt)
        step = await env.step(f"{solve}\nseq 100")
        await env.close()
    assert step[1:4] == (1.0, False, True)


@pytest.mark.anyio
async def test_what_is_left_running_or_in_the_way_does_not_reach_the_judge() -> None:
    answer = "SOLVE\nmkdir -p ../secret; (while true; do rm -rf *; sleep 0.01; done) & sleep 0.3\nsubmit"
    async with sharing("test"):
        _, step = await played(plain(command_timeout=5), answer.replace("rm -rf *", "touch ../secret/x"))
    assert step[1] == 1.0


@pytest.mark.anyio
async def test_a_command_has_a_deadline_and_bounded_output() -> None:
    async with sharing("test"):
        options = plain(command_timeout=0.3, output=100)
        shown, (_, _, _, _, info) = await played(options, "seq 1000", "echo a; sleep 60", "if", "submit")
    assert len(str(shown[0])) < 200
    assert "exit code 0\n1\n2\n" in str(shown[0])
    assert "characters left out ...]" in str(shown[0])
    assert "1000" in str(shown[0])
    assert shown[1] == "\nstopped after 0 s\na\n$ "
    assert "syntax error" in str(shown[2])
    assert metrics_of(info)["command_timeouts"] == 1


@pytest.mark.anyio
async def test_a_command_that_no_shell_can_have_is_told_so() -> None:
    async with sharing("test"):
        shown, _ = await played(plain(), "echo a\0b", "submit")
    assert shown[0] == "\nerror: a command cannot have a zero byte\n$ "


@pytest.mark.anyio
async def test_messages_hold_commands_in_blocks_and_the_same_seed_is_the_same_task() -> None:
    env = SweEnv(SweOptions(turns=7))
    first, info = await env.reset(3)
    again, _ = await SweEnv(SweOptions(turns=7)).reset(3)
    assert first == again
    assert isinstance(first, list)
    (message,) = first
    assert message.role == "user"
    assert "You have 7 answers." in message.content
    assert info["level"] in range(1, 6)
    held_out, _ = await env.reset(HELD_OUT)
    assert held_out not in [(await env.reset(seed))[0] for seed in range(15)]
    async with sharing("test"):
        shown, _ = await played_chat("I would look first.", "So:\n```bash\necho $((6*7))\n```", "```\nsubmit\n```")
    assert "There is no command" in shown[0].content
    assert shown[1] == Message("user", "exit code 0\n42")


async def played_chat(*answers: str) -> tuple[list[Message], StepResult]:
    env = Local(SweOptions())
    await env.reset(0)
    shown: list[Message] = []
    for answer in answers:
        step = await env.step(answer)
        if step[2]:
            await env.close()
            return shown, step
        shown += step[0]  # type: ignore[arg-type]
    raise AssertionError("it did not end")


@pytest.mark.anyio
async def test_a_sandbox_that_is_lost_is_an_error_and_never_a_reward() -> None:
    provider = ScriptedProvider(failures=99, error=SandboxLostError("gone"))

    class Lost(SweEnv):
        opener = staticmethod(provider.open)

    async with sharing("test"):
        for answer in ("ls", "submit"):
            env = Lost(plain(sandboxes={"attempts": 1}))
            await env.reset(0)
            with pytest.raises(SandboxLostError):
                await env.step(answer)
            await env.close()
    assert provider.out == 0
    with pytest.raises(EnvError, match="before reset"):
        await SweEnv(plain()).step("ls")


@pytest.mark.parametrize(
    ("answer", "fenced", "order"),
    [
        ("ls", False, ShellOrder("ls")),
        ("ls\nsubmit\n\n", False, ShellOrder("ls", True)),
        (" submit ", False, ShellOrder("", True)),
        ("submit", True, ShellOrder("", True)),
        ("\n \n", False, None),
        ("ls", True, None),
        ("I submit", True, None),
        ("```bash\n\n```", True, None),
        ("```sh\na\n```\n```bash\nb\nsubmit\n```", True, ShellOrder("b", True)),
        ("```bash\na\n```\n```json\n{}\n```", True, ShellOrder("a")),
        ("<think>x</think>\nsubmit\n", True, ShellOrder("", True)),
        ("printf 'a\fb\u2028c\x85d'\r\nls\r\n", False, ShellOrder("printf 'a\fb\u2028c\x85d'\nls")),
        ("```bash\nprintf 'a\fb\u2028c\x85d'\nls\n```", True, ShellOrder("printf 'a\fb\u2028c\x85d'\nls")),
        ("```bash\ncat <<'E'\nx\nE", True, ShellOrder("cat <<'E'\nx\nE")),
    ],
)
def test_commands_are_found_in_an_answer(answer: str, fenced: bool, order: ShellOrder | None) -> None:
    assert read_order(answer, fenced=fenced) == order


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (result(stdout=b"a\n\n", stderr=b""), "exit code 0\na"),
        (result(exit_code=2), "exit code 2"),
        (result(exit_code=None, signal="SIGKILL"), "killed by SIGKILL"),
        (result(exit_code=None, signal="SIGKILL", oom_killed=True), "out of memory"),
        (result(stdout=b"\xff"), "exit code 0\n�"),
    ],
)
def test_an_ending_is_told_in_words(ending: Result, text: str) -> None:
    assert result_text(ending) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "turns must be at least 1, but is 0"),
        ({"output": 5}, "output must be at least 100"),
        ({"command_timeout": 0.0}, "command_timeout must be"),
        ({"command_timeout": 1e6}, "command_timeout can be at most 86400"),
        ({"limits": {"timeout": 0}}, r"`limits\.timeout`: expected a number above 0"),
        ({"sandboxes": {"at": "somewhere"}}, "at must be `local`"),
        ({"path": "/nowhere"}, "there are no tasks in /nowhere"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SweEnv.check(**check_options(SweEnv, options, "env.options"))


def test_solved_examples_are_text_of_the_alphabet() -> None:
    env = SweEnv(plain())
    examples = env.solved_examples(60, seed=2)
    assert examples == env.solved_examples(60, seed=2)
    texts = [text for example in examples for text in (example.prompt, example.answer, example.later[0].prompt)]
    assert set("".join(texts)) <= set(env.alphabet())
    with pytest.raises(ConfigError, match='set template = "plain"'):
        SweEnv(SweOptions()).solved_examples(1, 0)
