"""Models, packed or alone, have the log-probs and gradients of transformers. scripts/architectures.py has all kinds."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.architectures import compare, is_exact


@pytest.mark.parametrize(
    ("kind", "way", "options"),
    [
        ("cohere2", "packed", {}),
        ("gemma2", "packed", {}),
        ("gemma2", "packed", {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]}),
        ("gemma4_text", "packed", {}),
        ("gpt_oss", "packed", {"num_key_value_heads": 2}),
        ("granite", "packed", {}),
        ("granitemoe", "packed", {}),
        ("mimo_v2_flash", "packed", {}),
        ("nanochat", "packed", {}),
        ("qwen3_moe", "packed", {}),
        ("falcon_h1", "alone", {}),
        ("falcon_mamba", "alone", {}),
        ("lfm2_moe", "alone", {}),
        ("llama4_text", "alone", {}),
        ("minimax", "alone", {}),
        ("nemotron", "alone", {}),
        ("nemotron_h", "alone", {}),
        ("phimoe", "alone", {"sliding_window": 8}),
        ("qwen3_5_text", "alone", {}),
        ("qwen3_next", "alone", {}),
        ("bert", "refused", {}),
    ],
    ids=str,
)
def test_log_probs_and_gradients_equal_those_of_transformers(kind: str, way: str, options: dict[str, Any]) -> None:
    row = compare(kind, **options)
    assert row["way"] == way, row
    if way != "refused":
        assert row["logprob_error"] < 1e-4
        assert row["gradient_error"] < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings that torch raises for its own code while it traces
@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_compiled_layers_have_the_log_probs_and_gradients_of_transformers(kind: str) -> None:
    row = compare(kind, compiled=True)
    assert row["way"] == "packed", row
    assert row["logprob_error"] < 1e-4
    assert row["gradient_error"] < 1e-5


@pytest.mark.parametrize(
    ("logprob_error", "gradient_error", "exact"),
    [(1e-6, 1e-6, True), (1e-6, 0.1, False), (0.1, 1e-6, False), (1e-6, float("nan"), False)],
)
def test_an_error_that_is_large_or_not_a_number_is_inexact(
    logprob_error: float, gradient_error: float, exact: bool
) -> None:
    row = {"kind": "x", "way": "packed", "logprob_error": logprob_error, "gradient_error": gradient_error}
    assert is_exact(row) == exact
