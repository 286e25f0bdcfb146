"""Grammars are made in a process of their own, within limits of time and size."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from flash.config.tree import ModelConfig
from flash.errors import EngineError, EnvError
from flash.rollout.episode.grammars import KEPT_GRAMMARS, MOST_BYTES, Grammars
from flash.sampling import Grammar
from flash.types import ResponseForm
from tests.envs.forms import FORMS

pytestmark = pytest.mark.anyio

QWEN = FORMS["qwen"]
WHOLE = ResponseForm({"type": "integer"}, calling=False)
"""Form whose grammar is made at once."""
LONG = 2000
CHAIN: dict[str, Any] = {f"a{each}": {"$ref": f"#/$defs/a{each + 1}"} for each in range(LONG)}


TEXTS: dict[str, Any] = {f"p{each}": {"type": "string", "maxLength": 4000 + each} for each in range(100)}
# Forms whose grammars take minutes, even for a small vocabulary.
SLOW = {
    "lengths": ResponseForm({"type": "object", "properties": TEXTS, "required": [*TEXTS]}),
    "pattern": ResponseForm({"type": "string", "pattern": ".{1,9000}"}),
    "references": ResponseForm({"$ref": "#/$defs/a0", "$defs": {**CHAIN, f"a{LONG}": {"type": "null"}}}),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Return the configuration of a model with a small tokenizer, after the start of the fork server."""
    config = ModelConfig(path=QWEN.save(tmp_path_factory.mktemp("model")), tool_parser=QWEN.tool_parser)
    anyio.run(Grammars(config).of, WHOLE, [], {})
    return config


async def longest_pause() -> float:
    """Run until cancelled, and return the longest time in seconds for which the event loop did not run this task."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await anyio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except anyio.get_cancelled_exc_class():
        return longest


@pytest.mark.parametrize("name", SLOW)
async def test_a_form_whose_grammar_takes_too_much_is_refused_and_the_event_loop_runs_on(
    name: str, config: ModelConfig
) -> None:
    grammars = Grammars(config, most_s=2.0)
    pauses: list[float] = []
    first = ""

    async def watch() -> None:
        pauses.append(await longest_pause())

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        with anyio.fail_after(60), pytest.raises(EnvError, match="cannot have this form") as refused:
            await grammars.of(SLOW[name], [], {})
        first = str(refused.value)
        group.cancel_scope.cancel()
    assert pauses[0] < 1.0
    # The fault is kept, so the same form is refused at once.
    begun = time.monotonic()
    with pytest.raises(EnvError, match="cannot have this form") as again:
        await grammars.of(SLOW[name], [], {})
    assert str(again.value) == first
    assert time.monotonic() - begun < 0.5
    # Other forms are made as before.
    assert isinstance(await grammars.of(WHOLE, [], {}), Grammar)


async def test_a_form_that_takes_too_long_is_refused_with_the_time(config: ModelConfig) -> None:
    with pytest.raises(EnvError, match=r"its grammar takes more than 0\.5 s"):
        await Grammars(config, most_s=0.5).of(SLOW["references"], [], {})


async def test_equal_forms_that_are_asked_for_at_once_are_made_once(config: ModelConfig) -> None:
    grammars = Grammars(config, most_s=1.0)
    await grammars.of(WHOLE, [], {})
    refused: list[str] = []

    async def ask() -> None:
        with pytest.raises(EnvError) as error:
            await grammars.of(SLOW["references"], [], {})
        refused.append(str(error.value))

    begun = time.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(ask)
    assert len(refused) == 20
    assert len({*refused}) == 1
    assert time.monotonic() - begun < 10  # 20 checks would take 20 seconds


async def test_a_caller_that_is_cancelled_does_not_wait_for_the_grammar(config: ModelConfig) -> None:
    grammars = Grammars(config, most_s=3.0)
    await grammars.of(WHOLE, [], {})
    begun = time.monotonic()
    with anyio.move_on_after(0.2):
        await grammars.of(SLOW["references"], [], {})
    assert time.monotonic() - begun < 1.5
    assert isinstance(await grammars.of(ResponseForm({"type": "null"}), [], {}), Grammar)


async def test_the_process_starts_again_after_it_was_killed(config: ModelConfig) -> None:
    grammars = Grammars(config)
    await grammars.of(WHOLE, [], {})
    process = grammars._process._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(process.join)
    assert isinstance(await grammars.of(ResponseForm({"type": "boolean"}), [], {}), Grammar)


async def test_a_process_that_is_killed_while_it_makes_a_grammar_is_no_refusal_of_the_form(config: ModelConfig) -> None:
    grammars = Grammars(config, most_s=60.0)
    await grammars.of(WHOLE, [], {})
    process = grammars._process._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None

    async def kill() -> None:
        await anyio.sleep(0.3)
        process.kill()

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        with pytest.raises(EngineError, match="the process that made the grammar of a form"):
            await grammars.of(SLOW["references"], [], {})


async def test_a_process_ends_when_its_grammars_are_dropped(config: ModelConfig) -> None:
    grammars = Grammars(config)
    await grammars.of(WHOLE, [], {})
    process = grammars._process._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    del grammars
    await anyio.to_thread.run_sync(process.join, 20)
    assert process.exitcode == 0


async def test_a_form_of_many_bytes_is_refused(config: ModelConfig) -> None:
    large = ResponseForm({"type": "integer", "description": "a" * MOST_BYTES})
    with pytest.raises(EnvError, match="bytes as JSON"):
        await Grammars(config).of(large, [], {})


async def test_properties_come_in_the_order_of_the_schema(config: ModelConfig) -> None:
    grammars = Grammars(config)
    tags: list[str] = []
    for names in (["km", "m"], ["m", "km"]):
        schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
        tags.append((await grammars.of(ResponseForm(schema, calling=False), [], {})).tag)
    assert [tag.index('"km"') < tag.index('"m"') for tag in tags] == [True, False]


async def test_the_memory_of_many_forms_is_bounded(config: ModelConfig) -> None:
    grammars = Grammars(config)
    for number in range(KEPT_GRAMMARS + 20):
        await grammars.of(ResponseForm({"const": number}, calling=False), [], {})
    assert len(grammars._known) == KEPT_GRAMMARS  # pyright: ignore[reportPrivateUsage]


async def test_the_arguments_of_the_template_reach_the_engine_if_the_model_reasons(config: ModelConfig) -> None:
    path = Path(config.path)
    thinks = Grammars(ModelConfig(path=str(path), reasoning_parser=QWEN.reasoning_parser))
    assert (await thinks.of(WHOLE, [], {"enable_thinking": False})).reasoning == {"enable_thinking": False}
    assert (await thinks.of(WHOLE, [], {})).reasoning == {}
    assert (await Grammars(config).of(WHOLE, [], {"enable_thinking": False})).reasoning is None
