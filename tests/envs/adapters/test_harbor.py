"""Tasks in Harbor's format: how they are read and refused, and what their rewards come to.

Their sandboxes are scripted here; in a real container in `tests/envs/sandbox/test_harbor.py`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import pytest

from envs.adapters.harbor import Harbor, HarborOptions, read_json, read_text
from envs.adapters.harbor_tasks import HarborTask, read_task
from envs.data.split import Split
from envs.sandbox.api import FileInfo, Result, Spec
from flash.config.objects import check_options
from flash.environment import HELD_OUT, Checked, Environment, Informed, Prepared, StepResult, sharing
from flash.environment.results import check_step_result, metrics_of, note_of
from flash.errors import (
    ConfigError,
    EnvError,
    RewardError,
    SandboxFileError,
    SandboxLimitError,
    SandboxLostError,
    SandboxTimeoutError,
)
from flash.types import Message
from tests.envs.adapters.harbor_folder import write_task
from tests.envs.sandboxes import ScriptedProvider, ScriptedSandbox, result

APART = 'environment_mode = "separate"'
"""The line of a task.toml that asks for a second sandbox for the tests."""
SUBMIT = "```bash\nsubmit\n```"


class Shelled(ScriptedSandbox):
    """A sandbox with a shell that echoes, and tests that leave what `reward` has: names of files and their text."""

    reward: Mapping[str, str] = MappingProxyType({})
    tested = result()
    made = result()
    full = False
    crowded = False

    async def run(self, command: str | Sequence[str], **given: Any) -> Result:
        if self.state == "lost":
            raise SandboxLostError("it is gone")
        if command[0] == "mkdir":
            return self.made
        if command == ["bash", "/tests/test.sh"]:
            if self.crowded:
                raise SandboxLimitError("no process can be started")
            assert "/tests/test.sh" in self.files
            self.files |= {f"/logs/verifier/{name}": text.encode() for name, text in self.reward.items()}
            self.seen.append(repr(given).encode())
            return self.tested
        return result(stdout=str(command).encode())

    async def remove(self, path: str) -> None:
        self.files = {name: data for name, data in self.files.items() if not f"{name}/".startswith(f"{path}/")}

    async def upload(self, source: Path, path: str) -> None:
        if self.full:
            raise SandboxFileError("no space left")
        if await anyio.Path(source).is_file():
            self.files[path] = await anyio.Path(source).read_bytes()
            return
        names = [file async for file in anyio.Path(source).iterdir()]
        self.files |= {f"{path}/{file.name}": await file.read_bytes() for file in names}

    async def download(self, path: str, target: Path) -> None:
        inside = {
            name.removeprefix(f"{path}/"): data for name, data in self.files.items() if name.startswith(f"{path}/")
        }
        if path in self.files:
            await anyio.Path(target).write_bytes(self.files[path])
        elif inside:
            await anyio.Path(target).mkdir()
            for name, data in inside.items():
                await (anyio.Path(target) / name).write_bytes(data)
        else:
            raise SandboxFileError(path)

    async def list(self, path: str = ".") -> Sequence[FileInfo]:
        names = [name.removeprefix(f"{path}/") for name in self.files if name.startswith(f"{path}/")]
        if not names:
            raise SandboxFileError(path)
        return [FileInfo(name, "file", 0, 0o644, 0.0) for name in names]

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        if path not in self.files:
            raise SandboxFileError(path)
        return self.files[path][:limit]

    @asynccontextmanager
    async def session(self, name: str = "main") -> AsyncGenerator[Shelled]:
        yield self


class Provider(ScriptedProvider):
    """Gives such sandboxes."""

    def __init__(self, of_images: Mapping[str, dict[str, bytes]] = MappingProxyType({}), **of_sandboxes: Any) -> None:
        super().__init__()
        self.of_images = of_images
        self.of_sandboxes = of_sandboxes

    @asynccontextmanager
    async def acquire(self, spec: Spec, **given: Any) -> AsyncGenerator[Shelled]:
        sandbox = Shelled(spec)
        for name, value in self.of_sandboxes.items():
            setattr(sandbox, name, value)
        sandbox.files |= self.of_images.get(spec.image, {})
        self.sandboxes.append(sandbox)
        self.out += 1
        self.most = max(self.most, self.out)
        try:
            yield sandbox
        finally:
            self.out -= 1


async def played(folder: Path, provider: Provider, *answers: str, **options: Any) -> tuple[list[Any], StepResult]:
    """What was shown, from the beginning, and how it ended."""

    class Scripted(Harbor):
        opener = staticmethod(provider.open)

    async with sharing("test"):
        env = Scripted(HarborOptions(path=str(folder), held_out_fraction=0.5, **options))
        shown: list[Any] = [(await env.reset(0))[0]]
        try:
            for answer in answers:
                step = check_step_result(await env.step(answer))
                if step[2] or step[3]:
                    return shown, step
                shown.append(step[0])
        finally:
            await env.close()
    raise AssertionError("it did not end")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of two tasks."""
    for name in ("Greet", "count"):
        write_task(tmp_path / name, f"Do {name}.")
    return tmp_path


def test_it_offers_what_an_environment_may_offer(folder: Path) -> None:
    env = Harbor(HarborOptions(path=str(folder)))
    for protocol in (Environment, Informed):
        assert isinstance(env, protocol)
    for protocol in (Checked, Prepared):
        assert isinstance(Harbor, protocol)


@pytest.mark.anyio
async def test_a_task_is_worked_on_in_a_shell_and_its_own_tests_judge(folder: Path) -> None:
    provider = Provider(reward={"reward.txt": "1\n"})
    shown, (_, reward, terminated, truncated, info) = await played(
        folder, provider, "Hm.", "```bash\ncd /tmp\n```", "```bash\ntouch x\nsubmit\n```", turns=9
    )
    (question,) = shown[0]
    assert question.content.startswith(("Do Greet.\n\nAnswer with shell", "Do count.\n\nAnswer with shell"))
    assert "You have 9 answers." in question.content
    assert "no command" in shown[1][0].content
    assert shown[2] == [Message("user", "exit code 0\ncd /tmp")]
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert metrics_of(info) == {"reward": 1, "no_reward": 0, "turns": 3, "no_command": 1, "command_timeouts": 0}
    assert note_of(info) == "exit code 0: {'reward': 1.0}"
    (sandbox,) = provider.sandboxes
    assert b"'timeout': 120.0" in sandbox.seen[-1]
    assert b"'env': {'LEVEL': '3'}" in sandbox.seen[-1]
    assert provider.out == 0


def write_apart(folder: Path, *, dockerfile: str | None, artifacts: str = "", verifier: str = APART) -> None:
    """Two tasks, of which one is held out, whose tests run in a second sandbox."""
    for name in ("greet", "count"):
        write_task(folder / name, f"Do {name}.", top=artifacts, verifier=verifier)
        if dockerfile is not None:
            (folder / name / "tests" / "Dockerfile").write_text(dockerfile)


@pytest.mark.anyio
async def test_separate_tests_see_the_artifacts_alone_and_wait_for_no_second_place(tmp_path: Path) -> None:
    write_apart(tmp_path, dockerfile="FROM a\nWORKDIR /check\n", artifacts='artifacts = ["/out/", "/x.txt", "/none"]')
    made = {
        "/out/a": b"new",
        "/x.txt": b"x",
        "/logs/artifacts/log": b"l",
        "/tests/test.sh": b"planted",
        "/secret": b"s",
    }
    image = {"/tests/test.sh": b"own", "/out/a": b"old", "/out/b": b"old"}
    provider = Provider({"work": made, "work-tests": image}, reward={"reward.txt": "1"})
    _, (_, reward, terminated, _, _) = await played(tmp_path, provider, SUBMIT, image="work")
    assert (reward, terminated, provider.out, provider.most) == (1.0, True, 0, 1)
    first, second = provider.sandboxes
    assert (first.spec.image, first.spec.workdir) == ("work", "/app/src")
    assert (second.spec.image, second.spec.workdir) == ("work-tests", "/check")
    assert second.files == {
        "/tests/test.sh": b"own",
        "/out/a": b"new",
        "/x.txt": b"x",
        "/logs/artifacts/log": b"l",
        "/logs/verifier/reward.txt": b"1",
    }


@pytest.mark.anyio
async def test_separate_tests_without_an_image_of_their_own_use_the_image_of_the_task(
    tmp_path: Path,
) -> None:
    write_apart(tmp_path, dockerfile=None)
    provider = Provider({"work": {"/tests/test.sh": b"planted"}}, reward={"reward.txt": "1"})
    _, (_, reward, *_) = await played(tmp_path, provider, SUBMIT, image="work")
    _, second = provider.sandboxes
    assert (reward, second.spec.image, second.spec.workdir) == (1.0, "work", "/app/src")
    assert second.files["/tests/test.sh"].startswith(b"#!/bin/bash")


@pytest.mark.anyio
async def test_a_description_of_a_second_sandbox_asks_for_one(tmp_path: Path) -> None:
    machine = 'environment = { docker_image = "judge", memory_mb = 64, network_mode = "no-network" }'
    write_apart(tmp_path, dockerfile="FROM a\n", verifier=machine)
    provider = Provider({"judge": {"/tests/test.sh": b"own"}}, reward={"reward.txt": "1"})
    _, (_, reward, *_) = await played(tmp_path, provider, SUBMIT, network="bridge")
    first, second = provider.sandboxes
    assert (reward, second.spec.image, second.spec.memory_mib, second.spec.network) == (1.0, "judge", 64, "none")
    assert first.spec.network == "bridge"


@pytest.mark.parametrize(
    ("artifact", "message"),
    [
        ('{ source = "/app", exclude = ["*.o"] }', "no artifacts without some of their files"),
        ('{ source = "/app", service = "db" }', "no containers beside them"),
    ],
)
def test_artifacts_that_cannot_be_copied_are_refused(tmp_path: Path, artifact: str, message: str) -> None:
    write_apart(tmp_path, dockerfile=None, artifacts=f"artifacts = [{artifact}]")
    with pytest.raises(ConfigError, match=message):
        read_task(tmp_path / "greet", "work")
    write_apart(tmp_path, dockerfile=None, artifacts='artifacts = [{ source = "/app", service = "main" }]')
    assert read_task(tmp_path / "greet", "work").artifacts == ("/logs/artifacts", "/app")


def test_keys_of_a_second_sandbox_have_no_effect_without_one(tmp_path: Path) -> None:
    write_apart(
        tmp_path,
        dockerfile="FROM a\nWORKDIR $X\n",
        artifacts='artifacts = [{ source = "/app", exclude = ["*.o"] }]',
        verifier='environment_mode = "shared"\ncollect = [{ command = "true" }]',
    )
    assert read_task(tmp_path / "greet", "work").second is None


@pytest.mark.anyio
async def test_what_was_there_before_the_tests_is_no_reward(folder: Path) -> None:
    planted = {"/logs/verifier/reward.txt": b"1", "/tests/test.sh": b"echo 1 > /logs/verifier/reward.txt"}
    _, (_, reward, terminated, _, info) = await played(folder, Provider(files=planted), SUBMIT)
    assert (reward, terminated) == (0.0, True)
    assert metrics_of(info)["no_reward"] == 1
    assert note_of(info) == "exit code 0: no number in /logs/verifier"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sandbox", "note"),
    [
        ({"reward": {"reward.txt": "1"}, "tested": result(timed_out=True, wall_s=120.0)}, "stopped after 120 s: no"),
        ({"full": True}, "the tests cannot be run: no space left"),
        ({"crowded": True}, "the tests cannot be run: no process can be started"),
        ({"made": result(exit_code=1)}, "the tests cannot be run: /logs/verifier cannot be made: exit code 1"),
        ({"reward": {"reward.txt": " \n"}, "tested": result(exit_code=3)}, "exit code 3: no number"),
    ],
)
async def test_tests_that_come_to_nothing_are_no_reward(folder: Path, sandbox: dict[str, Any], note: str) -> None:
    _, (_, reward, terminated, _, info) = await played(folder, Provider(**sandbox), SUBMIT)
    assert (reward, terminated, metrics_of(info)["no_reward"]) == (0.0, True, 1)
    assert note_of(info).startswith(note)


@pytest.mark.anyio
async def test_of_several_numbers_one_is_the_reward_and_all_are_metrics(folder: Path) -> None:
    provider = Provider(reward={"reward.json": '{"speed": 2.5, "turns": 9, "right": 0.5}'})
    _, (_, reward, _, _, info) = await played(folder, provider, SUBMIT, reward="right")
    assert reward == 0.5
    assert (metrics_of(info)["speed"], metrics_of(info)["turns"]) == (2.5, 1)
    with pytest.raises(RewardError, match=r"has no reward 'reward', only speed, turns, right: name one"):
        await played(folder, provider, SUBMIT)


@pytest.mark.anyio
async def test_a_single_number_is_the_reward_under_its_own_name_and_under_none(folder: Path) -> None:
    provider = Provider(reward={"reward.json": '{"accuracy": 0.75}'})
    for name in ("accuracy", "reward"):
        _, (_, reward, _, _, info) = await played(folder, provider, SUBMIT, reward=name)
        assert (reward, metrics_of(info)[name]) == (0.75, 0.75)
    with pytest.raises(RewardError, match=r"has no reward 'speed', only accuracy: name one"):
        await played(folder, provider, SUBMIT, reward="speed")


@pytest.mark.anyio
async def test_the_last_answer_and_limits_of_the_run_are_judged_as_things_are(folder: Path) -> None:
    class Episode:
        turns_left = 0

        async def prepare(self, message: object) -> None:
            """Render nothing ahead: results are short here."""

    provider = Provider(reward={"reward.txt": "0.25"})
    assert (await played(folder, provider, "```bash\nls\n```", turns=1))[1][1:4] == (0.25, True, False)

    class Scripted(Harbor):
        opener = staticmethod(provider.open)

    async with sharing("test"):
        env = Scripted(HarborOptions(path=str(folder)))
        env.inform(Episode())  # type: ignore[arg-type]
        await env.reset(0)
        assert (await env.step("```bash\nls\n```"))[1:4] == (0.25, False, True)
        await env.close()


@pytest.mark.anyio
async def test_a_sandbox_that_is_lost_is_an_error_and_never_a_reward(folder: Path) -> None:
    provider = Provider(state="lost")
    for answer in ("```bash\nls\n```", SUBMIT):
        with pytest.raises(SandboxLostError):
            await played(folder, provider, answer)
    assert provider.out == 0
    with pytest.raises(EnvError, match="before reset"):
        await Harbor(HarborOptions(path=str(folder))).step("x")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "sandbox",
    [
        {"made": result(timed_out=True, wall_s=60.0)},
        {"tested": result(timed_out=True, wall_s=3600.0, waited_s=3590.0)},
    ],
)
async def test_an_overloaded_machine_is_an_error_and_never_a_reward(folder: Path, sandbox: dict[str, Any]) -> None:
    with pytest.raises(SandboxTimeoutError):
        await played(folder, Provider(**sandbox), SUBMIT)


@pytest.mark.anyio
async def test_a_node_reads_the_tasks_beside_its_event_loop(folder: Path) -> None:
    readers: list[threading.Thread] = []

    class Watched(HarborOptions, frozen=True, kw_only=True, dict=True):
        def tasks(self) -> Split[HarborTask]:
            readers.append(threading.current_thread())
            return super().tasks()

    class Scripted(Harbor):
        opener = staticmethod(Provider().open)

    async with sharing("test"):
        await Scripted.prepare(Watched(path=str(folder), held_out_fraction=0.5))
    assert readers
    assert threading.current_thread() not in readers


def test_a_task_says_what_its_sandbox_may_use(folder: Path) -> None:
    options = HarborOptions(path=str(folder), network="bridge")
    spec = options.spec_of(read_task(folder / "Greet", options.image).sandbox)
    assert (spec.image, spec.profile, spec.workdir, spec.network) == ("harbor-greet", "compat", "/app/src", "bridge")
    assert (spec.cpus, spec.memory_mib, spec.disk_mib) == (1, 2048, 10240)
    write_task(
        folder / "made",
        "Do.",
        environment='docker_image = "some/one:1"\nmemory_mb = 512\nstorage_mb = 64\nallow_internet = false\ncpus = 2',
        dockerfile="FROM scratch\n",
    )
    spec = options.spec_of(read_task(folder / "made", options.image).sandbox)
    assert (spec.image, spec.workdir, spec.network) == ("some/one:1", "/app", "none")
    assert (spec.cpus, spec.memory_mib, spec.disk_mib) == (2, 512, 64)


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM a\nWORKDIR /x\nWORKDIR y\n", "/x/y"),
        ("FROM a AS build\nWORKDIR /build\nFROM b\nWORKDIR x\n", "/x"),
        ("FROM a AS build\nWORKDIR /build\nFROM --platform=linux/amd64 b\n", "/app"),
        ("FROM a AS Base\nWORKDIR /base\nFROM b\nWORKDIR /other\nFROM base\nWORKDIR x\n", "/base/x"),
        ("FROM a\nWORKDIR $ROOT\nWORKDIR /x\n", "/x"),
    ],
)
def test_commands_begin_where_the_last_stage_of_the_dockerfile_ends(
    folder: Path, dockerfile: str, workdir: str
) -> None:
    write_task(folder / "staged", "Do.", dockerfile=dockerfile)
    assert read_task(folder / "staged", "any").sandbox.workdir == workdir


def test_some_tasks_are_kept_aside_unless_others_are_given(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tasks = HarborOptions(path=str(folder), held_out_fraction=0.5).tasks()
    assert {tasks.of_seed(seed).name for seed in range(4)} != {tasks.of_seed(HELD_OUT + seed).name for seed in range(4)}
    other = tmp_path_factory.mktemp("other")
    write_task(other / "third", "Do third.")
    tasks = HarborOptions(path=str(folder), held_out_path=str(other)).tasks()
    assert (len(tasks.train), [task.name for task in tasks.held_out]) == (2, ["third"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1\n", 1),
        ("0.5", 0.5),
        (".50", 0.5),
        ("1.", 1),
        ("01", 1),
        ("+1", 1),
        ("1e-1", 0.1),
        (" 1 \r\n", 1),
        ("-0.0", 0),
    ],
)
def test_a_reward_file_of_text_is_read_as_harbor_reads_it(text: str, number: float) -> None:
    assert read_text(text) == {"reward": number}


@pytest.mark.parametrize("text", ["true", "yes", "NaN", "inf", "[1]", "1/2", "50%", "1,5", '"1"', "{}"])
def test_a_reward_file_of_text_without_a_finite_number_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - float's own words
        read_text(text)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1", {"reward": 1}),
        ('{"accuracy": 0.75}', {"accuracy": 0.75}),
        ('{"": 0.75}', {"reward": 0.75}),
        ('{"reward": 1, "x": 2}', {"reward": 1, "x": 2}),
        ('{"reward": true, "x": false}', {"reward": 1, "x": 0}),
    ],
)
def test_a_reward_file_of_json_has_numbers_by_name(text: str, numbers: dict[str, float]) -> None:
    assert read_json(text) == numbers


@pytest.mark.parametrize(
    "text",
    [".50", "true", "[1]", "null", "{}", '{"a": "1"}', '{"a": NaN}', "1e999", "1" * 400, "[" * 60_000],
)
def test_a_reward_file_of_json_with_anything_but_finite_numbers_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, OverflowError, RecursionError)):
        read_json(text)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "text"),
    [("reward.txt", "well done"), ("reward.txt", "true"), ("reward.json", "[1]"), ("reward.json", "{}")],
)
async def test_a_reward_that_is_no_number_is_an_error_and_never_a_zero(folder: Path, name: str, text: str) -> None:
    with pytest.raises(RewardError, match=rf"left no finite number in /logs/verifier/{name}, but"):
        await played(folder, Provider(reward={name: text}), SUBMIT)


@pytest.mark.anyio
async def test_a_reward_file_of_json_counts_before_one_of_text(folder: Path) -> None:
    _, (_, reward, *_) = await played(folder, Provider(reward={"reward.txt": "0", "reward.json": "0.5"}), SUBMIT)
    assert reward == 0.5


@pytest.mark.parametrize(
    ("section", "lines", "message"),
    [
        ("environment", "gpus = 1", "no GPUs"),
        ("environment", 'tpu = { type = "v5" }', "no TPUs"),
        ("environment", 'os = "windows"', "no other system than Linux"),
        ("environment", 'network_mode = "allowlist"', "no list of hosts"),
        ("environment", 'healthcheck = { command = "true" }', "no check before"),
        ("environment", 'mcp_servers = [{ name = "x" }]', r"no servers beside them \(environment\.mcp_servers"),
        ("verifier", 'environment_mode = "apart"', "is no task of Harbor: Invalid enum value 'apart'"),
        ("verifier", "environment = { gpus = 1 }", "no GPUs"),
        ("verifier", 'environment = { memory = "much" }', "'much' is no size such as 2G"),
        ("verifier", 'environment = { docker_image = "a b" }', r"at `\$\.image`"),
        ("verifier", f'{APART}\ncollect = [{{ command = "true" }}]', "no commands before the tests"),
    ],
)
def test_a_task_that_no_sandbox_can_be_given_for_is_refused(
    folder: Path, section: str, lines: str, message: str
) -> None:
    write_task(folder / "odd", "Do odd.", **{section: lines})
    with pytest.raises(ConfigError, match=message) as caught:
        Harbor.check(**check_options(Harbor, {"path": str(folder)}, "env.options"))
    assert "odd" in str(caught.value)


def test_a_folder_without_what_a_task_needs_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "count" / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"count has no tests/test\.sh"):
        Harbor.check(HarborOptions(path=str(folder)))
    (folder / "count" / "instruction.md").write_text("\n")
    with pytest.raises(ConfigError, match=r"instruction\.md is empty"):
        Harbor.check(HarborOptions(path=str(folder)))
    with pytest.raises(ConfigError, match="there are no tasks in /nowhere"):
        Harbor.check(HarborOptions(path="/nowhere"))
    for wrong in ({"turns": 0}, {"output": 1}, {"command_timeout": 0.0}, {"held_out_fraction": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            check_options(Harbor, {"path": str(folder), **wrong}, "env.options")
