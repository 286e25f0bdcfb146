"""Arguments of `[engine.vllm]`: names and types are those of the installed version, and arguments that Flash sets
itself are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from flash.config.check import check_rollout
from flash.config.check_learning import check_algorithm
from flash.config.decode import ConfigProblem
from flash.config.load import key_paths
from flash.config.machine import NOT_PASSED, check_engine
from flash.config.tree import Config
from flash.foreign import vllm_arguments


def make_config(vllm: dict[str, Any], *, gpus: int = 1, alpha: float = 1, **sections: Any) -> Config:
    """Return a configuration with these arguments of vLLM. `alpha`: asynchronous ratio; `sections`: further tables."""
    tree: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "model"},
        "env": {"path": "module:Class"},
        "engine": {"vllm": vllm},
        "train": {"async_ratio": alpha},
        "cluster": {"gpus_per_node": gpus},
    }
    return msgspec.convert(tree | sections, Config)


def told(problems: Iterator[ConfigProblem]) -> list[str]:
    """Return each problem as `key: message`."""
    return [f"{key}: {message}" for key, message in problems]


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_batched_tokens": 4096, "enable_prefix_caching": False, "enable_expert_parallel": True},
        {"block_size": 64, "attention_backend": "FLASH_ATTN", "compilation_config": {"mode": 3}},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8_per_block"},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor", "ignore": ["lm_head"]}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
    ],
)
def test_arguments_of_vllm_are_passed_on(given: dict[str, Any]) -> None:
    assert told(check_engine(make_config(given))) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_num_batched_token": 1},
            "max_num_batched_token: the installed vLLM's AsyncEngineArgs have no such argument; did you mean `max_num",
        ),
        ({"max_num_batched_tokens": "many"}, 'max_num_batched_tokens: expected an integer, got "many"'),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: expected true or false, got 1"),
        ({"performance_mode": "fast"}, 'performance_mode: expected "balanced", "interactivity" or "throughput", got'),
        ({"cudagraph_capture_sizes": [1, "2"]}, "cudagraph_capture_sizes: expected a list, each item an integer, got"),
        ({"compilation_config": 3}, "compilation_config: expected a table, got 3"),
        ({"max_num_seqs": 8}, "max_num_seqs: is not passed on: use engine.max_sequences"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode: is not passed on: engines and trainer must have the"),
        ({"data_parallel_size": 2}, "data_parallel_size: is not passed on: engines are independent of each other"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: is not passed on: an engine must be"),
        ({"kv_transfer_config": {}}, "kv_transfer_config: is not passed on: blocks of the KV cache that are stored"),
        ({"load_format": "dummy"}, "load_format: expected another"),
        ({"quantization": "awq"}, 'quantization: "awq" needs weights that are quantized in their files'),
        ({"speculative_config": {"method": "eagle3", "model": "draft"}}, "speculative_config: expected method ="),
        ({"speculative_config": {"model": "ngram"}}, "speculative_config: expected method ="),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}},
            'speculative_config.rejection_sample_method: expected "standard": the trainer',
        ),
    ],
)
def test_an_argument_that_vllm_lacks_or_flash_sets_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    (problem,) = told(check_engine(make_config(given)))
    assert problem.startswith(f"engine.vllm.{message}")


def test_drafts_exclude_kept_sets() -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    (problem,) = told(check_rollout(make_config(drafts, rollout={"top_k": 20})))
    assert problem.startswith("rollout.top_k: the trainer does not know which drafted tokens it keeps")
    assert told(check_rollout(make_config(drafts))) == []


def test_drafts_are_for_engines_on_gpus() -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    (problem,) = told(check_engine(make_config(drafts, gpus=0)))
    assert problem.startswith("engine.vllm.speculative_config: expected none on the CPU")


def test_chunked_prefill_is_refused_for_seeded_responses_on_the_cpu() -> None:
    given = {"enable_chunked_prefill": True}
    (problem,) = told(check_engine(make_config(given, gpus=0, alpha=0)))
    assert problem.startswith("engine.vllm.enable_chunked_prefill: expected false on the CPU")
    assert told(check_engine(make_config(given, gpus=0))) == []


def test_engines_with_lower_precision_than_the_trainer_need_a_correction() -> None:
    for name, value in (("quantization", "fp8_per_tensor"), ("kv_cache_dtype", "fp8")):
        config = make_config({name: value}, alpha=0, algorithm={"objective": "rloo"})
        (problem,) = told(check_algorithm(config))
        assert problem.startswith(
            f"engine.vllm.{name}: engines sample from a less precise policy than the trained one, which"
        )
    kept = {"kv_cache_dtype": "auto"}
    assert told(check_algorithm(make_config(kept, alpha=0, algorithm={"objective": "rloo"}))) == []
    corrected = {"objective": "rloo", "corrections": [{"kind": "token_tis"}]}
    for objective in (corrected, {"objective": "grpo"}):
        assert told(check_algorithm(make_config({"quantization": "mxfp8"}, algorithm=objective))) == []


def test_keys_that_are_named_in_place_of_an_argument_exist() -> None:
    named = {word.strip(",:") for why in NOT_PASSED.values() for word in why.split() if "." in word.strip(",:")}
    assert named
    assert named <= set(key_paths())


@pytest.mark.integration  # imports vLLM
def test_names_and_types_that_are_read_from_the_source_are_those_of_the_class() -> None:
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = dataclasses.fields(AsyncEngineArgs)
    assert vllm_arguments.argument_names() == sorted(one.name for one in fields if not one.name.startswith("_"))
    for one in fields:
        if isinstance(one.default, bool | int | float | str) and not one.name.startswith("_"):
            kind = vllm_arguments.type_of(one.name)
            assert msgspec.convert(one.default, kind) == one.default, (one.name, kind)
