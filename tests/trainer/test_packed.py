"""Packed rows with shared prefixes: each sequence has the log-probs and gradients that it has alone, in every model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash.foreign import kernels
from flash.foreign.kernels import AttentionOptions
from flash.trainer.model.attention import RaggedKernels, RaggedPart, RowIndex, ScoreOptions, row_index
from flash.trainer.model.logprobs import policy_logprobs, token_logprobs
from flash.trainer.model.packed import attend_in_parts, packed_row
from flash.trainer.packing import Computed, SequenceRow, in_one_row, pack
from tests.trainer.packed_cases import one_by_one, packed_batch, sharded
from tests.trainer.trainer_cases import (
    VOCABULARY,
    aged_shard,
    branched_shard,
    reference_model,
    relative_error,
    write_model,
)

MIXED = (0.8, 1.0, 1.3)
"""Temperatures that the sequences take in turn."""


def drawn_tree(rng: np.random.Generator) -> list[Tensor]:
    """Return sequences that continue prefixes of one another. Some are equal, and some have nothing in common."""
    sequences = [torch.from_numpy(rng.integers(0, VOCABULARY, int(rng.integers(2, 12))))]
    for _ in range(int(rng.integers(2, 9))):
        parent = sequences[int(rng.integers(len(sequences)))]
        kept = parent[: int(rng.integers(0, len(parent) + 1))]
        more = torch.from_numpy(rng.integers(0, VOCABULARY, int(rng.integers(0 if len(kept) > 1 else 2, 15))))
        sequences.append(torch.cat([kept, more]))
    return sequences


def unshared(packed: SequenceRow) -> SequenceRow:
    """Return the row with each token computed in its own place, even if sequences begin with the same tokens."""
    everything = np.arange(len(packed.input_P))
    return packed._replace(computed=Computed(everything, everything))


@pytest.fixture(scope="module", params=["all", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model: in turn one whose layers see all tokens, and one with a window in one layer."""
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    options = window if request.param == "window" else {}
    return write_model(tmp_path_factory.mktemp("packed") / "model", tied=False, **options)


@pytest.mark.parametrize("seed", range(3))
def test_log_probs_and_gradients_of_a_tree_are_those_of_its_sequences(folder: Path, seed: int) -> None:
    sequences = drawn_tree(np.random.default_rng(seed))
    batch = packed_batch(sequences, *MIXED)
    weight_T = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=len(batch["before_T"]))).float()
    with torch.no_grad():
        expected_T, _ = one_by_one(reference_model(folder), sequences, *MIXED)
    grads: list[dict[str, Tensor]] = []
    for packed in (batch["sequences"], unshared(batch["sequences"])):
        model = sharded(folder)
        logp_T, entropy_T = token_logprobs(model, **batch | {"sequences": packed}, entropy_gradient=True)
        (logp_T @ weight_T + entropy_T @ weight_T.flip(0)).backward()
        grads.append({name: value.grad.full_tensor() for name, value in model.named_parameters()})
        torch.testing.assert_close(logp_T.double(), expected_T, rtol=0, atol=2e-5)
    assert relative_error(*grads) < 1e-5


def attend_one_by_one(*given: Any) -> Any:
    """Compute attention for one sequence after the other with the CPU's kernel, which takes them padded."""
    *states, how, among = given
    found = [kernels.attend(*_batches(places, *states), seen) for places, seen in _each(how, among)]
    return [torch.cat([_tokens(one) for one in some]) for some in zip(*found, strict=True)]


def gradients_one_by_one(*given: Any) -> Any:
    """Compute the gradients of query, key and value for one sequence after the other, as `attend_one_by_one`."""
    *tensors, how, among = given
    totals = [torch.zeros_like(one) for one in tensors[1:4]]
    for places, seen in _each(how, among):
        batches = _batches((places[0], *places, places[0], places[0]), *tensors)
        for total, rows, part in zip(totals, places, kernels.attend_backward(*batches, seen), strict=True):
            total[rows] = _tokens(part)
    return totals


def _each(
    how: AttentionOptions, among: kernels.RaggedSequences
) -> Iterator[tuple[tuple[slice, slice, slice], AttentionOptions]]:
    """Yield for each sequence the slices of its queries, keys and values, and the options with a mask for a window."""
    for (begin, end), (first, last) in zip(*(pairwise(one.tolist()) for one in among.begins), strict=True):
        assert end - begin <= among.most[0]
        assert last - first <= among.most[1]
        mask = None
        if among.window is not None:
            assert how.causal
            mask = torch.ones(1, 1, end - begin, last - first).tril().triu(1 - among.window).bool()
        yield (slice(begin, end), slice(first, last), slice(first, last)), how._replace(mask=mask)


def _batches(places: Sequence[slice], *states: Tensor) -> list[Tensor]:
    """Return the rows `places` of each tensor, [U, H, …], as a batch of one sequence, [1, H, rows, …]."""
    return [one[rows].transpose(0, 1)[None] for one, rows in zip(states, places, strict=True)]


def _tokens(batch: Tensor) -> Tensor:
    """Return [rows, H, …] from a batch of one sequence."""
    return batch[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_one_after_the_other_attend_as_padded_ones(seed: int, window: int | None) -> None:
    sequences = [one.numpy() for one in drawn_tree(np.random.default_rng(seed))]
    layout = packed_row(in_one_row(sequences), torch.device("cpu")).layout
    scores, plain = ScoreOptions(0.3, window, None), RaggedKernels(attend_one_by_one, gradients_one_by_one)
    ragged = [
        replace(part, kernels=plain) if isinstance(part, RaggedPart) else part
        for part in layout.attention.fewest(scores)
    ]
    assert isinstance(ragged[0], RaggedPart)
    assert len(ragged) <= 2 or window is not None
    torch.manual_seed(seed)
    heads = [torch.randn(layout.row_slice.tokens, count, 8, dtype=torch.float64) for count in (4, 2, 2)]
    grad = torch.randn_like(heads[0])
    found = list[list[Tensor]]()
    for parts in (ragged, layout.attention.padded):
        states = [one.clone().requires_grad_() for one in heads]
        answer = attend_in_parts(*states, None, parts, scores)
        found.append([answer.detach(), *torch.autograd.grad(answer, states, grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [aged_shard, branched_shard])
def test_every_model_of_a_step_computes_a_prompt_once(folder: Path, make: Any) -> None:
    shard = make()
    model = sharded(folder)
    for micro in pack(shard.samples, min_version=shard.min_version, max_tokens=64):
        row = packed_row(micro, model.device)
        prompts = {tuple(micro.input_P[start : start + 1]) for start in micro.offset_S[:-1]}
        assert len(row.input_U) < len(micro.input_P) or len(prompts) == micro.sequences
        seen = policy_logprobs(model, micro).logp_T
        whole = SequenceRow(micro.input_P, micro.position_P, micro.offset_S, micro.computed)
        alone = token_logprobs(model, unshared(whole), micro.before_T, micro.target_T).logp_T
        torch.testing.assert_close(seen, alone, rtol=0, atol=2e-5)


def test_a_watch_sees_whole_sequences_also_if_beginnings_are_shared(folder: Path) -> None:
    batch = packed_batch(drawn_tree(np.random.default_rng(3)))
    model = sharded(folder)
    looks: list[list[Tensor]] = []
    for packed in (batch["sequences"], unshared(batch["sequences"])):
        seen: list[Tensor] = []

        def watch(module: Any, query: Tensor, key: Tensor, *_: Any, seen: list[Tensor] = seen) -> None:
            seen.extend((query, key))

        with torch.no_grad():
            token_logprobs(model, **batch | {"sequences": packed}, watch=watch)
        looks.append(seen)
    for shared, alone in zip(*looks, strict=True):
        torch.testing.assert_close(shared, alone, rtol=0, atol=2e-5)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
@settings(deadline=None)
def test_slots_gather_rows_and_add_back_to_them(rows: list[int], data: st.DataObject) -> None:
    size = len(rows) + data.draw(st.integers(0, 4))
    slots = data.draw(st.permutations(range(size)))[: len(rows)]
    places: RowIndex = row_index(size, np.array(slots), np.array(rows), torch.device("cpu"))
    states = torch.randn(6, 2, 3)
    expected = torch.zeros(size, 2, 3)
    expected[slots] = states[rows]
    assert torch.equal(places.gather(states), expected)
    total, part = torch.zeros(6, 2, 3), torch.randn(size, 2, 3)
    places.scatter_add(total, part)
    torch.testing.assert_close(total, torch.zeros(6, 2, 3).index_add(0, torch.tensor(rows), part[slots]))


def test_many_small_gradients_of_a_row_are_not_lost_in_half_precision() -> None:
    places = row_index(1000, np.arange(1000), np.zeros(1000, dtype=np.int64), torch.device("cpu"))
    total = torch.zeros(1, 1)
    places.scatter_add(total, torch.ones(1000, 1, dtype=torch.bfloat16))
    assert total.item() == 1000
