"""Responses that a real vLLM engine samples under a grammar, against a trainer's log-probs of them.

A *form* is a grammar that a response must follow, for example JSON of a schema. Its kept sets are the tokens that the
grammar allowed at each place. Law 4: at equal weights, the ratio of trainer and engine is 1 for every token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from flash.config.tree import ModelConfig
from flash.foreign.grammars import text_tag
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.sampling import FIRST_MASK, WHOLE, Grammar, Sampling, join_kept
from flash.types import ANY_CALL, Completion, ResponseForm, Trajectory
from tests.envs.agents import make, play
from tests.envs.forms import ADD, FORMS
from tests.rollout.engine_contract import complete
from tests.rollout.test_vllm_engine import Served, serving
from tests.trainer.test_vllm_sampling import PROMPT, ROUNDING, log_ratios, trajectory

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

QWEN = FORMS["qwen"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["km", "m"]},
        "name": {"type": "string", "maxLength": 12},
        "at": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["unit", "name", "at"],
    "additionalProperties": False,
}
TEXT = Grammar(text_tag(SCHEMA))
"""Form of a response that is JSON of `SCHEMA`."""
NUMBERS: Any = {**SCHEMA, "properties": {"at": SCHEMA["properties"]["at"]}, "required": ["at"]}
# A tool that a response can call, in the format of chat templates.
GO: Any = {"type": "function", "function": {"name": "go", "parameters": NUMBERS}}
SPARE = 272
"""Token id for which the model has logits, and the tokenizer has no text."""
# Settings of sampling, by name.
HOW = {
    "plain": Sampling(),
    "cold": Sampling(0.6),
    "top_k": Sampling(top_k=7),
    "everything": Sampling(1.4, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias=((40, 2.0),)),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """Return a small tokenizer with the chat template and the tool calls of Qwen."""
    folder = QWEN.save(tmp_path_factory.mktemp("model"))
    return HfTokenizer(
        ModelConfig(path=folder, tool_parser=QWEN.tool_parser, reasoning_parser=QWEN.reasoning_parser)
    ).ready()


@pytest.fixture(scope="module")
def served(tokenizer: HfTokenizer) -> Iterator[Served]:
    """Yield a vLLM engine with a random model that has loaded version 0."""
    import transformers

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": SPARE + 3,  # as models that have rows for no token
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.end[0],
    }
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, tie_word_embeddings=False))
    model.float().eval()
    # A call that begins in the reasoning ends it. The model never begins one, unless a form wants it.
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 4.0
        outputs = model.get_output_embeddings().weight
        outputs[:, 0] = 0.0
        outputs[tokenizer.inner.convert_tokens_to_ids("<tool_call>")] = 0.0
        outputs[tokenizer.inner.convert_tokens_to_ids("<tool_call>"), 0] = -30.0
    # Many models have several end tokens. A form that is complete may end with each of them.
    model.generation_config.eos_token_id = ends(tokenizer)
    folder = Path(tokenizer.inner.name_or_path)
    model.save_pretrained(folder)
    with serving(folder, model, reasoning_parser=QWEN.reasoning_parser) as served:
        served.canary = list(range(24))
        served.load(served.publish())
        yield served


def ends(tokenizer: HfTokenizer) -> list[int]:
    """Return the end tokens of the model: the tokenizer's own, and two more."""
    return [tokenizer.end[0], tokenizer.inner.convert_tokens_to_ids("<|im_start|>"), SPARE + 1]


def asked(grammar: Grammar | None, how: Sampling = HOW["plain"], count: int = 400, seed: int = 1) -> ResponseRequest:
    """Return a request for a response of at most `count` tokens under a grammar; None: without a form."""
    return ResponseRequest(PROMPT, count, key=0, sampling=how, seed=seed, grammar=grammar)


def continued(request: ResponseRequest, tokens: Sequence[int]) -> ResponseRequest:
    """Return the request as it moves to another engine after some tokens of its response."""
    return msgspec.structs.replace(
        request,
        prompt=[*request.prompt, *tokens],
        max_new_tokens=request.max_new_tokens - len(tokens),
        generated=len(tokens),
    )


def ratio(served: Served, completion: Completion, how: Sampling = HOW["plain"]) -> float:
    """Return the largest log-ratio of engine and trainer, as it would be at temperature 1."""
    return float(log_ratios(served, [trajectory(completion, how)]).abs().max()) * min(1, how.temperature)


def read(text: str) -> Any:
    """Return a JSON value. xgrammar allows control characters in strings with `maxLength`."""
    return json.loads(text, strict=False)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", HOW)
def test_law_4_the_ratio_is_1_at_equal_weights_under_a_grammar(
    served: Served, tokenizer: HfTokenizer, name: str, seed: int
) -> None:
    how = HOW[name]
    completion = served.call(complete, served.engine, asked(TEXT, how, seed=seed))
    assert completion.kept is not None
    assert completion.kept.fault(len(completion.token_ids)) is None
    assert ratio(served, completion, how) < ROUNDING
    # Without the kept sets the ratio is another.
    assert how.has_kept_sets or ratio(served, msgspec.structs.replace(completion, kept=None), how) > 0.1
    if completion.finish == "stop":
        assert read(tokenizer.decode(completion.token_ids))["unit"] in ("km", "m")


def test_kept_sets_are_lists_where_few_tokens_may_follow_and_masks_that_are_stored_once(served: Served) -> None:
    kept = served.call(complete, served.engine, asked(TEXT)).kept
    counts = kept.numbers()[1]
    assert (counts >= 0).sum() > 5
    assert (counts <= FIRST_MASK).any()
    assert np.unique(counts[counts <= FIRST_MASK]).size == len(kept.masks) == len({*kept.masks})


def test_a_response_that_reaches_its_limit_is_the_beginning_of_its_form_and_is_trained(served: Served) -> None:
    whole = served.call(complete, served.engine, asked(TEXT))
    cut = served.call(complete, served.engine, asked(TEXT, count=9))
    assert (cut.finish, cut.token_ids) == ("length", whole.token_ids[:9])
    assert cut.kept == whole.kept.part(0, 9)
    assert ratio(served, cut) < ROUNDING


@pytest.mark.parametrize("at", [1, 3, 10, 14])
def test_a_response_that_moves_to_another_engine_continues_its_form(
    served: Served, tokenizer: HfTokenizer, at: int
) -> None:
    whole = served.call(complete, served.engine, asked(TEXT))
    begun = whole.token_ids[:at]
    rest = served.call(complete, served.engine, continued(asked(TEXT), begun))
    kept = join_kept([whole.kept.part(0, at), rest.kept], [at, len(rest.token_ids)])
    (first,) = whole.versions
    versions = [msgspec.structs.replace(first, count=at), *rest.versions]
    tokens, logprobs = begun + rest.token_ids, whole.logprobs[:at] + rest.logprobs
    assert ratio(served, Completion(tokens, logprobs, versions, rest.finish, kept)) < ROUNDING
    if rest.finish == "stop":
        assert set(read(tokenizer.decode(tokens))) == {"unit", "name", "at"}


@pytest.mark.parametrize("keep_cache", [False, True])
def test_law_4_a_response_keeps_its_form_while_weights_are_swapped(
    served: Served, tokenizer: HfTokenizer, keep_cache: bool
) -> None:
    words = {"type": "array", "items": {"enum": ["ab", "cd", "ef"]}, "minItems": 60, "maxItems": 60}
    published = served.publish()

    async def swapped() -> list[Completion]:
        # Sample eight responses, load the same weights again once the first one runs, and return the responses.
        done: list[Completion] = []
        running = anyio.Event()

        async def one(seed: int) -> None:
            request = asked(Grammar(text_tag(words)), count=900, seed=seed)
            done.append(await complete(served.engine, request, running.set))

        async with anyio.create_task_group() as group:
            for seed in range(8):
                group.start_soon(one, seed)
            with anyio.fail_after(60):
                await running.wait()
            await served.engine.load(published, keep_cache=keep_cache)
        return done

    done = served.call(swapped)
    assert any(len(completion.versions) == 2 for completion in done)
    for completion in done:
        assert ratio(served, completion) < ROUNDING
        if completion.finish == "stop":
            assert len(read(tokenizer.decode(completion.token_ids))) == 60


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_is_read_as_a_call_whatever_the_weights_are(
    served: Served, tokenizer: HfTokenizer, seed: int
) -> None:
    grammar = anyio.run(tokenizer.grammar, ResponseForm(call=ANY_CALL, single=True), [GO])
    grammar = msgspec.structs.replace(grammar, reasoning=None)
    completion = served.call(complete, served.engine, asked(grammar, seed=seed))
    assert ratio(served, completion) < ROUNDING
    if completion.finish == "stop":
        spoken = tokenizer.read_response(completion.token_ids, True, PROMPT, [GO], calling=True)
        (call,) = spoken.message.tool_calls
        assert call.name == "go"
        assert set(read(call.arguments)) == {"at"}


def test_a_form_begins_after_the_reasoning(served: Served, tokenizer: HfTokenizer) -> None:
    """Tokens of the reasoning, which ends with `</think>`, are drawn from the whole vocabulary."""
    grammar = msgspec.structs.replace(TEXT, reasoning={})
    free = served.call(complete, served.engine, asked(grammar, count=30))
    assert ratio(served, free) < ROUNDING
    end = tokenizer.inner.convert_tokens_to_ids("</think>")
    reasoned = free.token_ids.index(end) + 1 if end in free.token_ids else 30
    assert (free.kept.part(0, reasoned).numbers()[1] == WHOLE).all()
    # Reasoning that looks like the form, and a response that moves within it, at its end, and after it.
    begun = tokenizer.inner.encode('<think>{"unit": 5</think>{"un', add_special_tokens=False)
    for at in range(begun.index(end) - 2, len(begun) + 1):
        rest = served.call(complete, served.engine, continued(asked(grammar), begun[:at]))
        free_after = (rest.kept.numbers()[1] == WHOLE).sum()
        if at > begun.index(end):
            assert free_after == 0
            text = tokenizer.decode(begun[begun.index(end) + 1 : at] + rest.token_ids)
            assert rest.finish == "length" or set(read(text)) == {"unit", "name", "at"}
        else:
            assert free_after > 0


def test_responses_with_and_without_forms_share_a_step_of_the_engine_and_a_micro_batch(served: Served) -> None:
    async def all_at_once() -> dict[tuple[str, bool], Completion]:
        # Return the responses by their settings, and by whether they have a form.
        found: dict[tuple[str, bool], Completion] = {}

        async def one(name: str, formed: bool) -> None:
            found[name, formed] = await complete(served.engine, asked(TEXT if formed else None, HOW[name], 60))

        async with anyio.create_task_group() as group:
            for name in HOW:
                for formed in (True, False):
                    group.start_soon(partial(one, name, formed))
        return found

    found = served.call(all_at_once)
    together = [trajectory(one, HOW[name], group) for group, ((name, _), one) in enumerate(found.items())]
    assert log_ratios(served, together).abs().max() * 0.6 < ROUNDING
    assert found["plain", False].kept is None


def test_a_response_at_temperature_0_has_a_form_and_no_kept_sets(served: Served, tokenizer: HfTokenizer) -> None:
    completion = served.call(complete, served.engine, asked(TEXT, Sampling(0.0)))
    assert completion.kept is None
    assert tokenizer.decode(completion.token_ids).lstrip()[:1] in ("{", "")


def choices(completion: Completion, place: int) -> set[int]:
    """Return the tokens from which the token at a place of a response was drawn."""
    assert completion.kept is not None
    kept = completion.kept.part(place, place + 1)
    if kept.masks:
        return {*np.flatnonzero(np.unpackbits(np.frombuffer(kept.masks[0], np.uint8), bitorder="little")).tolist()}
    others, counts = kept.numbers()
    assert counts.tolist() == [len(others)]
    return {completion.token_ids[place], *others.tolist()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", [Sampling(), Sampling(stop_token_ids=(SPARE,)), Sampling(top_k=40)])
def test_a_complete_form_ends_with_any_of_the_end_tokens_and_with_nothing_else(
    served: Served, tokenizer: HfTokenizer, how: Sampling, seed: int
) -> None:
    units = Grammar(text_tag({"enum": ["km", "m"]}))
    completion = served.call(complete, served.engine, asked(units, how, seed=seed))
    assert read(tokenizer.decode(completion.token_ids[:-1])) in ("km", "m")
    assert completion.finish == ("text" if completion.token_ids[-1] in how.stop_token_ids else "stop")
    assert choices(completion, len(completion.token_ids) - 1) == {*ends(tokenizer), *how.stop_token_ids}
    assert ratio(served, completion, how) < ROUNDING
    # A number may end, but may also go on.
    number = served.call(complete, served.engine, asked(Grammar(text_tag({"type": "integer"})), how, seed=seed))
    assert number.finish in ("stop", "text")
    digits = {*tokenizer.inner.convert_tokens_to_ids(list("0123456789"))}
    last = choices(number, len(number.token_ids) - 1)
    assert last in ({*ends(tokenizer), *how.stop_token_ids}, {*ends(tokenizer), *how.stop_token_ids} | digits)
    assert ratio(served, number, how) < ROUNDING


def test_a_grammar_that_is_slow_for_each_token_gives_the_right_kept_sets(
    served: Served, tokenizer: HfTokenizer
) -> None:
    slow = {"type": "string", "pattern": "((a|b|ab|aa|ba){1,40}){1,40}"}
    completion = served.call(complete, served.engine, asked(Grammar(text_tag(slow))))
    assert {*tokenizer.decode(completion.token_ids[:-1])} <= {*'"ab'}
    assert ratio(served, completion) < ROUNDING


def test_a_form_ends_when_it_is_complete_whatever_the_least_number_of_tokens_is(
    served: Served, tokenizer: HfTokenizer
) -> None:
    how = Sampling(top_k=40, min_tokens=50)
    completion = served.call(complete, served.engine, asked(Grammar(text_tag({"enum": ["km", "m"]})), how))
    assert completion.finish == "stop"
    assert read(tokenizer.decode(completion.token_ids[:-1])) in ("km", "m")
    assert ratio(served, completion, how) < ROUNDING
    # A number that could end goes on, and its end is not in the kept sets before.
    number = served.call(complete, served.engine, asked(Grammar(text_tag({"type": "integer"})), how))
    read(tokenizer.decode(number.token_ids[:-1]))
    assert ratio(served, number, how) < ROUNDING
    if len(number.token_ids) > 3:  # a 0 ends the number
        assert len(number.token_ids) > 50
        assert not choices(number, 40) & {*ends(tokenizer)}


# -- an agent with all kinds of requests -----------------------------------------------------------------------------


class Sampled:
    """A `Responder` that lets an engine sample each response."""

    def __init__(self, served: Served) -> None:
        self._engine = served.engine
        self.asked: list[ResponseRequest] = []

    async def generate(self, request: ResponseRequest) -> Completion:
        self.asked.append(request)
        async for piece in self._engine.generate(request):
            if isinstance(piece, Completion):
                return piece
            request.on_tokens(piece.token_ids)
        raise AssertionError("a stream ended without a completion")


async def asks_for_all_at_once(base_url: str, api_key: str, task: str) -> str:
    """Send plain requests, forms, a form that is cut at a stop text, a forced call and an invalid form at once."""
    import openai

    formed: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    invalid: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": {"type": "object", "not": {}}}}
    found: dict[str, Any] = {}
    client: Any
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(name: str, **more: Any) -> None:
            messages = [{"role": "user", "content": name}]
            found[name] = await client.chat.completions.create(model="policy", messages=messages, **more)

        async def stream() -> None:
            messages = [{"role": "user", "content": "streamed"}]
            events: Any = await client.chat.completions.create(
                model="policy", messages=messages, response_format=formed, stream=True
            )
            choices = [event.choices[0] async for event in events]
            found["streamed"] = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason

        async def refused() -> None:
            with pytest.raises(openai.BadRequestError, match="the keyword `not`"):
                await ask("invalid", response_format=invalid)

        async with anyio.create_task_group() as group:
            for each in (
                partial(ask, "plain", n=2),
                partial(ask, "two", n=2, response_format=formed, logprobs=True),
                partial(ask, "stopped", n=2, response_format=formed, stop='"name'),
                partial(ask, "called", tools=[ADD], tool_choice="required"),
                partial(ask, "short", response_format=formed, max_tokens=3),
                stream,
                refused,
            ):
                group.start_soon(each)
    texts = {name: [choice.message.content for choice in found[name].choices] for name in ("plain", "two", "stopped")}
    for choice in found["two"].choices:
        if choice.finish_reason == "stop":
            assert set(read(choice.message.content)) == {"unit", "name", "at"}
        assert len(choice.logprobs.content) > 3
    for choice in found["stopped"].choices:
        assert choice.finish_reason == "length" or '"unit"' in choice.message.content, choice.message.content
        assert '"name' not in choice.message.content
    (short,) = found["short"].choices
    assert short.finish_reason == "length"
    (called,) = found["called"].choices
    if called.finish_reason == "tool_calls":
        assert called.message.tool_calls[0].function.name == "add"
    text, finish = found["streamed"]
    assert finish == "length" or set(read(text)) == {"unit", "name", "at"}
    return json.dumps(texts)


def test_law_4_forms_beside_plain_requests_of_one_agent_are_trained_as_they_were_sampled(served: Served) -> None:
    import_module("openai")
    folder = served.config.model.path
    reader = HfTokenizer(ModelConfig(path=folder, tool_parser=QWEN.tool_parser)).ready()
    policy = Sampled(served)

    async def played() -> Any:
        agent = make(f"{__name__}:asks_for_all_at_once")
        limits: Any = {"max_turns": 20, "max_new_tokens": 120, "max_length": 1000, "step_s": 100.0}
        return await play(agent, policy, in_process=False, tokenizer=reader, **limits)

    episode = served.call(played)
    assert isinstance(episode, Trajectory), episode.message
    assert len(policy.asked) == len(episode.action_spans) == 9
    assert sum(request.grammar is not None for request in policy.asked) == 7
    assert log_ratios(served, [episode]).abs().max() < ROUNDING
    free = msgspec.structs.replace(episode, kept=None)
    assert log_ratios(served, [free]).abs().max() > 0.1
