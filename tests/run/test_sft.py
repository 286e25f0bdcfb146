"""Rows as tokens, and the rows of each step: compared with transformers' own mask and with the prompts of episodes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from flash.config.load import dump, load, load_checked
from flash.config.tree import Config, ModelConfig
from flash.data.shapes import example_of
from flash.data.tables import read_rows
from flash.errors import ConfigError, FlashError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.run.checks.preflight import sft_problems
from flash.run.sft_rank import other_rows
from flash.run.sft_rows import PARALLEL_FROM, Course, CourseTokens, TokenRow, TokenTable, read_tokens, tokenize_row
from flash.trainer.checkpoint_files import HUB_STATE, MANIFEST, Manifest, file_entry
from flash.types import Message
from flash.waiting import worker_deaths_named
from tests.rollout.families import FAMILIES, family

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template in the format ChatML."""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
"""Chat template like the one above, with the marks by which transformers finds the messages of the assistant."""

TALK = [
    {"role": "user", "content": "the first"},
    {"role": "assistant", "content": "an answer, in two\nlines"},
    {"role": "user", "content": "and the second?"},
    {"role": "assistant", "content": " that too "},
]
"""Conversation with two answers."""


def written(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    """Write rows to a JSONL file, and return the file. A text is written as it is."""
    file = folder / name
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def row_of(file: Path, tokenizer: HfTokenizer, most: int = 10_000) -> TokenRow:
    """Return the tokens of the only row."""
    (row,) = read_rows(str(file))
    return tokenize_row(example_of(row), row.place, tokenizer, most)


def only(file: Path, tokenizer: HfTokenizer, most: int = 10_000) -> tuple[list[int], list[int]]:
    """Return the tokens of the only sequence of the only row, and the learned tokens."""
    (one,) = row_of(file, tokenizer, most).sequences
    return one.tokens, [token for span in one.spans for token in one.tokens[span.start : span.stop]]


def test_the_learned_tokens_are_those_that_transformers_marks_as_the_assistants(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", CHATML)
    (one,) = row_of(written(tmp_path, {"messages": TALK}), tokenizer, 10_000).sequences
    expected: Any = tokenizer.inner.apply_chat_template(
        TALK, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = [0] * len(one.tokens)
    for span in one.spans:
        mask[span.start : span.stop] = [1] * (span.stop - span.start)
    # What the template puts behind the last end of a turn is neither said nor needed.
    assert expected["input_ids"][: len(one.tokens)] == one.tokens
    assert expected["assistant_masks"] == mask + [0] * (len(expected["input_ids"]) - len(mask))
    assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_learned_after_the_prompt_of_an_engine_and_to_its_end(tmp_path: Path, name: str) -> None:
    tokenizer = family(name, tmp_path / "model")
    row = row_of(written(tmp_path, {"messages": TALK}), tokenizer, 10_000)
    said = [(one.tokens, span) for one in row.sequences for span in one.spans]
    assert len(said) == 2
    for place, (tokens, span) in zip((1, 3), said, strict=True):
        before = [Message(m["role"], m["content"]) for m in TALK[:place]]
        assert tokens[: span.start] == tokenizer.render(before)
        answer = tokens[span.start : span.stop]
        assert tokenizer.ends_turn(answer[-1])
        assert TALK[place]["content"].strip() in tokenizer.decode(answer)


def test_a_turn_behind_which_the_template_drops_reasoning_begins_a_sequence_of_its_own(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model")
    talk = [*TALK[:1], {**TALK[1], "reasoning_content": "in thought"}, *TALK[2:]]
    row = row_of(written(tmp_path, {"messages": talk}), tokenizer, 10_000)
    first, second = row.sequences
    assert "in thought" in tokenizer.decode(first.tokens)
    assert "in thought" not in tokenizer.decode(second.tokens)
    assert [len(one.spans) for one in row.sequences] == [1, 1]


def test_a_text_that_looks_like_a_control_token_is_letters(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", CHATML)
    odd = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"}]
    tokens, _ = only(written(tmp_path, {"messages": odd}), tokenizer)
    assert tokens.count(tokenizer.inner.convert_tokens_to_ids("<|im_end|>")) == 2


def test_texts_are_learned_to_the_end_of_the_text_and_of_messages_the_completion_alone(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", CHATML)
    tokens, learned = only(written(tmp_path, {"prompt": "one ", "completion": "two", "id": 7}), tokenizer)
    assert tokenizer.decode(tokens) == "one two"
    assert learned == [*tokenizer.inner.encode("two", add_special_tokens=False), *tokenizer.end]
    _, learned = only(written(tmp_path, {"prompt": TALK[:3], "completion": TALK[3:]}), tokenizer)
    assert tokenizer.decode(learned) == TALK[3]["content"]
    _, mixed = only(written(tmp_path, {"prompt": "the first", "completion": TALK[1:2]}), tokenizer)
    assert tokenizer.decode(mixed) == TALK[1]["content"]


def test_calls_and_tools_are_shown_as_in_an_episode(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    talk = [
        TALK[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        TALK[1],
    ]
    tokens, learned = only(written(tmp_path, {"messages": talk, "tools": tools}), tokenizer)
    assert '"name": "add", "arguments": {"x": 1}' in tokenizer.decode(learned)
    assert "<tool_response>" in tokenizer.decode(tokens)
    assert "<tool_response>" not in tokenizer.decode(learned)


def test_rows_that_are_too_long_are_cut_and_counted(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", CHATML)
    file = written(tmp_path, {"messages": TALK})
    (whole,) = row_of(file, tokenizer).sequences
    row = row_of(file, tokenizer, whole.spans[1].start + 3)
    (cut,) = row.sequences
    assert row.cut
    assert cut.tokens == whole.tokens[: whole.spans[1].start + 3]
    assert cut.spans[0] == whole.spans[0]
    assert cut.spans[1].stop - cut.spans[1].start == 3
    assert row_of(file, tokenizer, whole.spans[0].start).sequences == []


def tokens_of(config: Config, tell: Callable[[str], object] = lambda line: None) -> CourseTokens:
    """Tokenize the rows of a configuration. `tell` gets the lines about the progress."""
    return CourseTokens.read(config, tell)


def test_rows_that_cannot_be_learned_are_refused_together_by_file_and_row(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path / "model"))
    family(
        "qwen",
        tmp_path / "model",
        CHATML + "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}",
    )
    odd = [{"role": "robot", "content": "x"}, TALK[1]]
    led = [{"role": "system", "content": "x"}, *TALK]
    rows = [{"messages": TALK}, {"prompt": "x"}, {"messages": TALK[:1]}, {"messages": odd}, {"messages": led}]
    with pytest.raises(ConfigError) as caught:
        read_tokens("sft.data", str(written(tmp_path, *rows)), model, lambda line: None)
    said = str(caught.value)
    for part in (
        "row 2 has a prompt and",
        "row 3: there is no",
        "row 4, messages[0]: Roles are",
        "row 5: the chat template",
    ):
        assert f"rows.jsonl, {part}" in said


def test_a_row_that_is_too_long_is_left_out_before_the_run_and_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path, "train.batch_size=1", "model.max_length=24", rows=10)
    with Path(str(config.sft and config.sft.data)).open("a") as file:
        file.write("\n" + json.dumps({"prompt": "word " * 200, "completion": "never reached"}))
        file.write("\n" + json.dumps({"prompt": "x ", "completion": "word " * 200}))
        file.write("\n" + json.dumps({"messages": TALK[1:2]}))
    tokens = tokens_of(config)
    assert "rows.jsonl has 12 rows with prompt and completion, 1 row with messages; 11 rows are" in tokens.lines[0]
    assert "learned: 52 of 74 tokens, at most 24 a sequence" in tokens.lines[0]
    assert tokens.lines[1] == "sft.data: 1 of these rows are cut at model.max_length = 24"
    assert "rows.jsonl, row 11): no answer begins within model.max_length = 24" in tokens.lines[2]
    assert "rows.jsonl, row 13): their answers are empty, of weight 0, or follow no message" in tokens.lines[3]
    config = tokens.with_steps(config)
    assert config.run.steps == 11
    assert all(Course(config, tokens).batch(step)[0].trajectories for step in range(11))


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_many_rows_are_tokenized_by_processes_as_one_would_and_in_order(tmp_path: Path) -> None:
    few = config_of(tmp_path / "few", rows=40)
    many = config_of(tmp_path / "many", rows=PARALLEL_FROM + 40)
    one, other = tokens_of(few).data, tokens_of(many).data
    assert len(other) == PARALLEL_FROM + 40
    assert [other.row(place) for place in range(40)] == [one.row(place) for place in range(40)]
    tokenizer = HfTokenizer(many.model)
    assert f"n{PARALLEL_FROM + 39}" in tokenizer.decode(other.row(PARALLEL_FROM + 39).sequences[0].tokens)


def test_a_fault_of_the_tokenizer_is_one_error_for_few_rows_and_for_many(tmp_path: Path) -> None:
    for rows in (40, PARALLEL_FROM):
        config = config_of(tmp_path / str(rows), "model.chat_template_kwargs.enable_thinking=false", rows=rows)
        with pytest.raises(ConfigError, match=r"model.chat_template_kwargs: the chat template of .* never reads"):
            tokens_of(config)


@pytest.mark.integration
def test_the_death_of_a_process_of_a_pool_is_an_error_that_names_its_work() -> None:
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    died = pytest.raises(FlashError, match="a process that tokenizes the rows has ended before its work was done")
    with died, worker_deaths_named("tokenizes the rows"), pool:
        pool.submit(os._exit, 1).result()


def test_rows_in_tokens_are_written_and_mapped(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    tokens = tokens_of(config)
    rows = [tokens.data.row(place) for place in range(len(tokens.data))]
    tokens.save(tmp_path / "saved")
    loaded = CourseTokens.load(tmp_path / "saved")
    assert [loaded.data.row(place) for place in range(len(loaded.data))] == rows
    assert loaded.held_out is None
    joined = TokenTable.joined([TokenTable.of(rows[:3]), TokenTable.of([]), TokenTable.of(rows[3:])])
    assert [joined.row(place) for place in range(len(joined))] == rows


def test_a_text_with_control_tokens_is_reported(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    written(tmp_path, {"text": "plain"}, {"text": "<|im_start|>user\nHi<|im_end|>"})
    (line,) = [line for line in tokens_of(config).lines if "control token" in line]
    assert "1 row (" in line
    assert "rows.jsonl, row 2)" in line


def test_a_control_token_that_is_not_special_is_reported_too(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save_pretrained(config.model.path)
    written(tmp_path, {"text": "plain"}, {"text": "<think>hm"})
    (line,) = [line for line in tokens_of(config).lines if "control token" in line]
    assert "rows.jsonl, row 2)" in line


def test_an_assistant_that_speaks_first_is_shown_and_not_learned(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", CHATML)
    tokens, learned = only(written(tmp_path, {"messages": [TALK[1], *TALK[2:]]}), tokenizer)
    assert TALK[1]["content"] in tokenizer.decode(tokens)
    assert tokenizer.decode(learned) == TALK[3]["content"]
    assert row_of(written(tmp_path, {"messages": TALK[1:2]}), tokenizer, 100).sequences == []


def test_a_template_that_refuses_a_row_is_reported_with_the_line(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", "{{ raise_exception('never') }}")
    with pytest.raises(ConfigError, match=r"row 1: the chat template .* never"):
        row_of(written(tmp_path, {"messages": TALK}), tokenizer, 100)


def config_of(folder: Path, *overrides: str, rows: int = 7) -> Config:
    """Return a configuration with `rows` rows, which differ in their answers `n0`, `n1` and so on."""
    folder.mkdir(exist_ok=True)
    file = written(folder, *({"prompt": "x ", "completion": f"n{number}"} for number in range(rows)))
    family("qwen", folder / "model", CHATML)
    (folder / "model" / "config.json").write_text("{}")
    text = f'run.name = "x"\nrun.output_dir = "{folder}"\nmodel.path = "{folder}/model"\nsft.data = "{file}"\n'
    (folder / "sft.toml").write_text(text + "cluster.gpus_per_node = 0\ntrain.batch_size = 3\n")
    return load(folder / "sft.toml", overrides)


def trained(config: Config, step: int) -> list[str]:
    """Return the answers that a step learns."""
    tokenizer = HfTokenizer(config.model)
    batch, _ = Course(config, tokens_of(config)).batch(step)
    return [tokenizer.decode(one.tokens()[one.action_mask()].tolist()) for one in batch.trajectories]


def test_every_row_is_trained_once_in_each_epoch_in_an_order_that_follows_from_the_seed(tmp_path: Path) -> None:
    config = config_of(tmp_path, "sft.epochs=2")
    config = tokens_of(config).with_steps(config)
    assert config.run.steps == 5
    steps = [trained(config, step) for step in range(5)]
    assert list(map(len, steps)) == [3, 3, 3, 3, 2]
    said = [answer for step in steps for answer in step]
    first, second = said[:7], said[7:]
    assert sorted(first) == sorted(second) == [f"n{number}" for number in range(7)]
    assert first != second
    assert trained(config, 3) == steps[3], "also when the run begins there"
    other = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, seed=1))
    assert trained(other, 0) != steps[0]


def test_an_empty_answer_is_not_learned_as_an_end_of_turn_and_its_row_is_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    written(
        tmp_path,
        {"instruction": "x", "input": "", "output": ""},
        {"prompt": "x ", "completion": " \n"},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}, *TALK]},
        {"question": "x", "answer": 5},
    )
    tokens = tokens_of(config)
    assert "2 rows are left out" in tokens.lines[-1]
    assert "row 1, …): their answers are empty" in tokens.lines[-1]
    learned = [len(tokens.data.row(index).sequences[0].spans) for index in range(2)]
    assert learned == [2, 1], "of the three answers of one row, two say something"


def test_a_run_that_goes_on_with_other_rows_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    course = Course(config, tokens_of(config))
    folder = tmp_path / "step-00000001"
    folder.mkdir()

    def keep(content: bytes) -> None:
        """Write `content` as the hub's state into the checkpoint."""
        (folder / HUB_STATE).write_bytes(content)
        files = [file_entry(folder / HUB_STATE, folder)]
        (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(1, 0, files)))

    keep(b"sft " + course.digest().encode())
    assert other_rows(folder, course) == ""
    written(tmp_path, *({"prompt": "x ", "completion": f"n{number}"} for number in range(8)))
    told = other_rows(folder, Course(config, tokens_of(config)))
    assert "sft.data: its rows, or their tokens, are not those" in told
    keep(b"sft")
    assert other_rows(folder, course) == "", "a checkpoint of an earlier version says nothing of its rows"


def test_tokens_that_the_model_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    written(tmp_path, {"messages": TALK})
    most = tokens_of(config).data.largest_id
    for described in ({"vocab_size": most}, {"text_config": {"vocab_size": most}}):
        (tmp_path / "model" / "config.json").write_text(json.dumps(described))
        with pytest.raises(
            ConfigError, match=rf"rows have the token '<.*>' \({most}\), and the model .* has {most} tok"
        ):
            tokens_of(config)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": most + 1}))
    assert len(tokens_of(config).data) == 1


def test_half_an_epoch_trains_half_of_the_rows(tmp_path: Path) -> None:
    config = config_of(tmp_path, "sft.epochs=0.5")
    config = tokens_of(config).with_steps(config)
    assert [len(trained(config, step)) for step in range(config.run.steps)] == [3, 1]


def test_a_dry_run_shows_the_learned_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    lines = list(tokens_of(config).described(HfTokenizer(config.model)))
    assert "7 rows are learned" in lines[0]
    assert "x [n0<|im_end|>]" in lines[1]


def test_a_table_of_which_nothing_can_be_learned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.data: no row of .* to learn within model\.max_length = 1"):
        tokens_of(config_of(tmp_path, "model.max_length=1"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.trainer_nodes=2", "trains on one node"),
        ("cluster.nodes=2", "trains on one node"),
        ("cluster.trainer_ranks=4", "at least 4, a row for each"),
        ("sft.epochs=0", "sft.epochs"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused_before_anything_starts(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, override)


def test_settings_of_engines_alone_stop_no_run(tmp_path: Path) -> None:
    of_engines = ("kv_cache_gib=1e6", "count=1000", "vllm={seed=1}")
    config_of(tmp_path, *(f"engine.{one}" for one in of_engines), "model.tool_parser=no-such")
    with pytest.raises(ConfigError, match=r"train\.max_tokens_per_microbatch"):
        config_of(tmp_path, "model.max_length=32", "train.max_tokens_per_microbatch=16")


@pytest.mark.parametrize("name", ["data", "held_out"])
def test_rows_that_are_gone_keep_a_run_from_starting(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    assert config.sft is not None
    gone = msgspec.structs.replace(config, sft=msgspec.structs.replace(config.sft, **{name: "nothing.jsonl"}))
    told = {problem.key: problem.message for problem in sft_problems(gone)}
    assert "there is no data set at nothing.jsonl" in told[f"sft.{name}"]


def test_the_settings_of_samples_have_no_say_and_what_is_recorded_reads_back(tmp_path: Path) -> None:
    config = config_of(tmp_path, "train.async_ratio=4")
    assert config.algorithm.objective == "algorithms.objectives.reinforce:Supervised"
    assert config.train.async_ratio == 0
    recorded = tmp_path / "recorded.toml"
    recorded.write_text(dump(config))
    assert load(recorded) == config
    assert load_checked(recorded) == config


def test_tables_that_say_nothing_of_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`algorithm` .*has no effect: .* clear it with `algorithm=\{\}`"):
        config_of(tmp_path, "algorithm.objective=ppo")
    assert config_of(tmp_path, "algorithm.objective=ppo", "algorithm={}").algorithm.objective.endswith("Supervised")
    with pytest.raises(ConfigError, match=r"`critic` .*has no effect"):
        config_of(tmp_path, "critic.warmup_steps=1")


def test_an_answer_of_weight_0_is_shown_and_not_learned(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", CHATML)
    talk = [TALK[0], {**TALK[1], "weight": 0}, TALK[2], {**TALK[3], "weight": 1}]
    tokens, learned = only(written(tmp_path, {"messages": talk}), tokenizer)
    assert tokenizer.decode(learned) == TALK[3]["content"]
    assert TALK[1]["content"] in tokenizer.decode(tokens)
    half = written(tmp_path, {"messages": [TALK[0], {**TALK[1], "weight": 0.5}]})
    with pytest.raises(ConfigError, match=r"messages\[1\].weight must be 0 .not learned. or 1, but is 0.5"):
        row_of(half, tokenizer)


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
def test_reasoning_is_learned_by_whichever_name_a_row_and_a_template_have_for_it(tmp_path: Path, name: str) -> None:
    template = CHATML.replace("m.content", "('(' + m.thinking + ')' if m.thinking else '') + m.content")
    tokenizer = family("qwen", tmp_path / "model", template)
    _, learned = only(written(tmp_path, {"messages": [TALK[0], {**TALK[1], name: "hm"}]}), tokenizer)
    assert tokenizer.decode(learned) == "(hm)" + TALK[1]["content"]


def test_a_rows_arguments_of_the_chat_template_are_those_of_its_prompts(tmp_path: Path) -> None:
    tokenizer = family("qwen", tmp_path / "model", CHATML.replace("assistant\n'", "assistant\n' + (mark or '')"))
    talk = [TALK[0], {"role": "assistant", "content": "!two"}]
    marked = {"messages": talk, "chat_template_kwargs": {"mark": "!"}}
    found = [row_of(written(tmp_path, row), tokenizer).sequences[0] for row in ({"messages": talk}, marked)]
    assert found[0].tokens == found[1].tokens
    assert [one.spans[0].stop - one.spans[0].start for one in found] == [5, 4]
    bad = written(tmp_path, {"messages": talk, "chat_template_kwargs": {"tools": []}})
    with pytest.raises(ConfigError, match="chat_template_kwargs must not have tools"):
        row_of(bad, tokenizer)
