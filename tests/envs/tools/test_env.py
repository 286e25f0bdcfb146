"""Episodes with tools: what is called, what is shown, what is judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from envs.tools import ToolEnv, ToolOptions
from envs.tools.runner import Runner, ToolPlace, schema, within
from flash.config.objects import check_options
from flash.environment import Checked, Informed, Prepared, Spoken, sharing
from flash.environment.results import metrics_of
from flash.errors import ConfigError, SandboxLostError
from flash.types import TOOL, Message, Observation, Tool, ToolCall
from tests.envs.sandboxes import ScriptedProvider, local_processes

pytestmark = pytest.mark.anyio


class Local(ToolEnv):
    """In local processes."""

    opener = staticmethod(local_processes)


class Doubles:
    """Asks for a number twice as large; a wrong answer may be mended."""

    def __init__(self, tries: int = 1) -> None:
        self.tries = tries

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        self.number = seed
        return f"Double {seed}.", {"of": seed}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.tries -= 1
        right = action.strip() == str(2 * self.number)
        return "Wrong.", float(right), right or self.tries < 1, False, {"metrics": {"right": right}}

    async def close(self) -> None:
        pass


class Slow:
    """Two tools that take two seconds and for ever."""

    opened = closed = 0

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        type(self).opened += 1

        async def slow(arguments: dict[str, Any]) -> str:
            await anyio.sleep(2)
            return f"done with {arguments['what']}"

        async def stuck(arguments: dict[str, Any]) -> str:
            return await within(5, anyio.sleep_forever())  # type: ignore[arg-type]

        what = schema(what="Anything.")
        return [
            Runner(name="slow", description="Takes two seconds.", parameters=what, call=slow, state=None),
            Runner(name="stuck", description="", parameters={"type": "object"}, call=stuck, state=None),
        ]

    async def close(self) -> None:
        type(self).closed += 1


class Garbled(Slow):
    """What it gives is no text."""

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        async def garbled(arguments: dict[str, Any]) -> str:
            return "a\ud800"

        return [Runner(name="garbled", description="", parameters={"type": "object"}, call=garbled)]


class Lost(Slow):
    """Its sandbox is gone."""

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        async def lost(arguments: dict[str, Any]) -> str:
            raise SandboxLostError("gone")

        return [Runner(name="lost", description="", parameters={"type": "object"}, call=lost)]


class View:
    """What an episode knows of tokens, told by the test."""

    def __init__(self, turns: int = 100) -> None:
        self.offered: list[Tool] = []
        self.turns_left = turns
        self.said = Spoken(Message("assistant", ""))
        self.prepared: Observation = ""

    def offer(self, tools: Sequence[Tool]) -> None:
        self.offered = list(tools)

    async def prepare(self, observation: Observation) -> None:
        self.prepared = observation

    def room(self, observation: Observation) -> int:
        assert observation == self.prepared, "it would be rendered on the loop"
        return 1

    def spoken(self, *, calling: bool = True) -> Spoken:
        return self.said


class Play:
    """One episode of which the test says the policy's part."""

    def __init__(self, env: ToolEnv, turns: int = 100) -> None:
        self.env = env
        self.view = View(turns)
        env.inform(self.view)  # type: ignore[arg-type]

    async def say(self, content: str = "", *calls: tuple[str, str], malformed: bool = False) -> Any:
        made = tuple(ToolCall(f"id{place}", *call) for place, call in enumerate(calls))
        self.view.said = Spoken(Message("assistant", content, "", made), malformed)
        self.view.turns_left -= 1
        return await self.env.step(content)

    async def texts(self, *calls: tuple[str, str]) -> list[str]:
        shown, reward, terminated, truncated, _ = await self.say("", *calls)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert [(message.role, message.name) for message in shown] == [(TOOL, name) for name, _ in calls]
        assert [message.tool_call_id for message in shown] == [f"id{place}" for place in range(len(calls))]
        return [message.content for message in shown]


def options(*toolsets: str, tries: int = 1, **more: Any) -> ToolOptions:
    tools = {name: {"path": path} for name, path in (one.split("=") for one in toolsets)}
    return ToolOptions(tasks={"path": f"{__name__}:Doubles", "options": {"tries": tries}}, tools=tools, **more)


SLOW, PYTHON, BASH, FILES = (
    f"slow={__name__}:Slow",
    *(f"{name.lower()}=envs.tools.sandboxed:{name}" for name in ("Python", "Bash", "FileTools")),
)


def test_it_offers_what_an_environment_may_offer() -> None:
    assert isinstance(ToolEnv(options(SLOW)), Informed)
    assert isinstance(ToolEnv, Checked)
    assert isinstance(ToolEnv, Prepared)


@pytest.mark.virtual
async def test_calls_of_a_turn_run_at_the_same_time_and_each_has_its_deadline() -> None:
    before = Slow.opened - Slow.closed
    async with sharing("test"):
        play = Play(ToolEnv(options(SLOW, most=3)))
        prompt, info = await play.env.reset(21)
        assert (prompt, info) == ([Message("user", "Double 21.")], {"of": 21})
        assert [tool["function"]["name"] for tool in play.view.offered] == ["slow", "stuck"]
        start = anyio.current_time()
        texts = await play.texts(("slow", '{"what": "a"}'), ("stuck", ""), ("slow", '{"what": "b"}'), ("stuck", "{}"))
        assert texts == [
            "done with a",
            "error: no answer within 5 s",
            "done with b",
            "error: not carried out: no more than 3 calls at once",
        ]
        assert anyio.current_time() - start == 5.0
        _, reward, terminated, _, info = await play.say("42")
        await play.env.close()
    assert (reward, terminated) == (1.0, True)
    assert metrics_of(info) == {"tool_calls": 4, "malformed_calls": 0, "late_calls": 1, "right": 1}
    assert Slow.opened - Slow.closed == before


@pytest.mark.virtual
async def test_results_are_rendered_ahead_before_the_room_for_them_is_asked_for() -> None:
    async with sharing("test"):
        play = Play(ToolEnv(options(f"garbled={__name__}:Garbled")))
        await play.env.reset(1)
        shown = (await play.say("", ("garbled", "{}")))[0]
        await play.env.close()
    assert play.view.prepared == shown


@pytest.mark.virtual
async def test_a_result_that_is_no_text_is_shown_as_text() -> None:
    async with sharing("test"):
        play = Play(ToolEnv(options(f"garbled={__name__}:Garbled")))
        await play.env.reset(1)
        assert await play.texts(("garbled", "{}")) == ["a\\ud800"]
        await play.env.close()


@pytest.mark.virtual
async def test_a_call_that_cannot_be_carried_out_is_told_what_is_wrong() -> None:
    async with sharing("test"):
        play = Play(ToolEnv(options(SLOW, tries=2, most=20, system_prompt="Call.")))
        assert (await play.env.reset(1))[0] == [Message("system", "Call."), Message("user", "Double 1.")]
        texts = await play.texts(
            ("fast", "{}"), ("slow", '{"what": '), ("slow", "[1]"), ("slow", "{}"), ("slow", '{"what": 5}'),
            ("slow", '{"what": "", "why": 1}'),
        )  # fmt: skip
        shown, *_ = await play.say("<tool_call>{", malformed=True)
        assert "could not be read" in shown[0].content
        assert shown[0].role == "user"
        again, reward, terminated, _, _ = await play.say("3")
        assert (again, reward, terminated) == ([Message("user", "Wrong.")], 0.0, False)
        _, reward, _, _, info = await play.say("2")
        await play.env.close()
    for text, part in zip(
        texts,
        [
            "there is no function 'fast'; there are slow, stuck",
            "the arguments of slow are no JSON",
            "must be one JSON object, not [1]",
            "slow needs the argument 'what'; its arguments are what",
            "the argument 'what' of slow must be of type string, but is 5",
            "slow has no argument 'why'",
        ],
        strict=True,
    ):
        assert part in text
    assert reward == 1.0
    assert metrics_of(info)["malformed_calls"] == 7
    assert metrics_of(info)["tool_calls"] == 7


@pytest.mark.virtual
async def test_an_episode_that_is_over_before_its_answer_is_truncated_and_judged_on_none() -> None:
    async with sharing("test"):
        play = Play(ToolEnv(options(SLOW)), turns=1)
        await play.env.reset(1)
        _, reward, terminated, truncated, info = await play.say("", ("slow", '{"what": "a"}'))
        await play.env.close()
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert metrics_of(info)["tool_calls"] == 1


@pytest.mark.virtual
async def test_a_sandbox_that_is_lost_in_a_call_is_an_error_and_never_a_result() -> None:
    async with sharing("test"):
        play = Play(ToolEnv(options(f"lost={__name__}:Lost", SLOW)))
        await play.env.reset(1)
        with pytest.raises(SandboxLostError, match="gone"):
            await play.say("", ("lost", "{}"), ("slow", '{"what": "a"}'))
        await play.env.close()


async def test_tools_share_the_sandbox_of_their_episode() -> None:
    async with sharing("test"):
        await Local.prepare(options(PYTHON, BASH, FILES))
        play = Play(Local(options(PYTHON, BASH, FILES, output=120)))
        await play.env.reset(1)
        assert await play.texts(("write_file", '{"path": "a/b.txt", "text": "h\\u00e9"}')) == ["written"]
        code = '{"code": "print(open(\'a/b.txt\').read() * 2)"}'
        assert await play.texts(("python", code), ("bash", '{"command": "ls a; exit 3"}')) == [
            "exit code 0\nhéhé",
            "exit code 3\nb.txt",
        ]
        assert await play.texts(("read_file", '{"path": "a/b.txt"}'), ("list_files", '{"path": "."}')) == ["hé", "a/"]
        (missing,) = await play.texts(("read_file", '{"path": "none"}'))
        assert missing.startswith("error: ")
        (long,) = await play.texts(("bash", '{"command": "seq 1000"}'))
        assert "characters left out" in long
        assert len(long) < 170
        await play.env.close()


async def test_names_and_commands_that_there_cannot_be_are_results_that_say_so() -> None:
    async with sharing("test"):
        play = Play(Local(options(BASH, FILES)))
        await play.env.reset(1)
        assert await play.texts(
            ("bash", '{"command": "echo a\\u0000b"}'),
            ("read_file", '{"path": "a\\u0000b"}'),
            ("write_file", json.dumps({"path": "x/" * 3000, "text": ""})),
            ("bash", json.dumps({"command": "x" * 200_000})),
            ("bash", json.dumps({"command": "#" + "€" * 40_000})),
        ) == [
            "error: a command cannot have a zero byte",
            "error: a path cannot have a zero byte",
            "error: a path cannot have more than 4095 bytes",
            "error: a command cannot have more than 100000 bytes, but this one has 200000; write a file",
            "error: a command cannot have more than 100000 bytes, but this one has 120001; write a file",
        ]
        assert await play.texts(("bash", json.dumps({"command": "printf x > $(printf 'caf\\351')"}))) == ["exit code 0"]
        assert await play.texts(("list_files", '{"path": "."}')) == ["caf\\udce9"]
        await play.env.close()


async def test_a_cache_spares_the_sandbox_of_an_episode_that_does_what_another_did() -> None:
    provider = ScriptedProvider()

    class Scripted(ToolEnv):
        opener = staticmethod(provider.open)

    spared = []
    async with sharing("test"):
        for command in ("ls", "ls", "pwd"):
            play = Play(Scripted(options(BASH, cache=True)))
            await play.env.reset(1)
            before = len(provider.sandboxes)
            assert await play.texts(("bash", f'{{"command": "{command}"}}')) == ["exit code 0"]
            *_, info = await play.say("2")
            spared.append((len(provider.sandboxes) - before, metrics_of(info)["cached_calls"]))
            await play.env.close()
    assert provider.out == 0
    assert spared[0][1] == spared[2][1] == 0
    assert spared[1] == (0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": {}}, "`tools` is empty"),
        ({"tools": {"x": {"path": "envs.code:CodeEnv"}}}, r"`tools\.x\.path`: envs\.code:CodeEnv is no toolset"),
        ({"tools": {"x": {"path": "envs.none:X"}}}, r"`tools\.x\.path`: there is no module"),
        ({"tools": {"x": {"path": "envs.tools.sandboxed:Bash", "options": {"timeout": 0}}}}, "positive number"),
        ({"tools": {"x": {"path": "envs.tools.sandboxed:Bash", "options": {"timeout": 1e6}}}}, "at most 86400"),
        ({"tools": {"x": {"path": "envs.tools.search:Search"}}}, r"tools\.x\.options\.folder.*is missing"),
        ({"tools": {"x": {"path": "envs.tools.mcp_server:McpServer", "options": {"command": []}}}}, "is empty"),
        ({"tasks": {"path": "envs.code:None"}}, r"`tasks\.path`"),
        ({"tasks": {"path": "envs.code:CodeEnv", "options": {"language": "cobol"}}}, "cobol"),
        ({"most": 0}, "most must be at least 1"),
        ({"output": 3}, "output must be at least 100"),
        ({"sandboxes": {"at": "x"}}, "at must be"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    table: dict[str, Any] = {
        "tasks": {"path": f"{__name__}:Doubles"},
        "tools": {"bash": {"path": "envs.tools.sandboxed:Bash"}},
    }
    ToolEnv.check(**check_options(ToolEnv, table, "env.options"))
    with pytest.raises(ConfigError, match=message):
        ToolEnv.check(**check_options(ToolEnv, table | changes, "env.options"))


async def test_two_tools_of_one_name_are_refused_before_a_run(tmp_path: Path) -> None:
    async with sharing("test"):
        with pytest.raises(ConfigError, match=r"`tools\.two` has a function `slow`, which another toolset has too"):
            await ToolEnv.prepare(options(SLOW, f"two={__name__}:Slow"))
        (tmp_path / "a.txt").write_text("cats sleep\n\ndogs bark")
        table = {"path": "envs.tools.search:Search", "options": {"folder": str(tmp_path), "passage": 5}}
        play = Play(ToolEnv(ToolOptions(tasks={"path": f"{__name__}:Doubles"}, tools={"s": table})))
        await play.env.reset(1)
        assert await play.texts(("search", '{"query": "dogs"}'), ("search", '{"query": "x", "results": 1}')) == [
            "[a.txt]\ndogs bark",
            "nothing was found",
        ]
        await play.env.close()
