"""Log-probs of packed sequences under sharded models, against whole logits of single sequences in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash.trainer.model.canary import canary_logprobs
from flash.trainer.model.logprobs import OutputLayer, token_logprobs
from tests.trainer import two_logprob_ranks
from tests.trainer.packed_cases import (
    EVEN_LENGTHS,
    LENGTHS,
    gradient,
    one_by_one,
    packed_batch,
    random_sequences,
    sharded,
    weighted,
    write_biased_model,
)
from tests.trainer.trainer_cases import VOCABULARY, reference_model, relative_error, run_ranks, write_model


@pytest.fixture(scope="session")
def biased_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose output layer has a bias."""
    return write_biased_model(tmp_path_factory.mktemp("biased") / "model")


@pytest.fixture(params=["tied", "untied", "biased"])
def any_model(request: pytest.FixtureRequest, tied_model: Path, untied_model: Path, biased_model: Path) -> Path:
    """Return each of three tiny models in turn."""
    return {"tied": tied_model, "untied": untied_model, "biased": biased_model}[request.param]


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch, and look at the tensors that it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("lengths", [LENGTHS, EVEN_LENGTHS, (5,)], ids=["ragged", "even", "one"])
@pytest.mark.parametrize("temperatures", [(1.0,), (0.6,), (0.6, 1.0, 1.4)])
def test_packed_numbers_equal_those_of_whole_logits(
    any_model: Path, temperatures: tuple[float, ...], lengths: tuple[int, ...]
) -> None:
    sequences = random_sequences(lengths=lengths)
    result = token_logprobs(sharded(any_model), **packed_batch(sequences, *temperatures))
    with torch.no_grad():
        logp_T, entropy_T = one_by_one(reference_model(any_model), sequences, *temperatures)
    torch.testing.assert_close(result.logp_T.double(), logp_T, rtol=0, atol=6e-6)
    torch.testing.assert_close(result.entropy_T.double(), entropy_T, rtol=0, atol=5e-6)
    assert (result.logp_T.double() - logp_T).norm() < 1e-6 * logp_T.norm()
    assert result.logp_T.dtype == result.entropy_T.dtype == torch.float32
    assert result.logp_T.requires_grad
    assert not result.entropy_T.requires_grad


def test_packed_gradients_equal_those_of_whole_logits(any_model: Path) -> None:
    everything = range(len(LENGTHS))
    reference = reference_model(any_model)
    weighted(*one_by_one(reference, random_sequences(), 0.8), everything).backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    found = gradient(sharded(any_model), everything)
    assert relative_error(found, expected) < 2e-6


def test_several_chunks_give_the_gradient_of_one(any_model: Path) -> None:
    everything = range(len(LENGTHS))
    model = sharded(any_model)
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer)
    layer.chunk_bytes = 5 * VOCABULARY * 4
    assert relative_error(gradient(model, everything), gradient(sharded(any_model), everything)) < 1e-6


def test_a_micro_batch_without_predicted_tokens_has_a_zero_gradient(model: Path) -> None:
    ours = sharded(model)
    nothing = {name: np.zeros(0, dtype=np.int64) for name in ("before_T", "target_T")}
    result = token_logprobs(ours, **packed_batch(random_sequences()) | nothing)
    assert result.logp_T.shape == result.entropy_T.shape == (0,)
    result.logp_T.sum().backward()
    assert all(not value.grad.full_tensor().any() for value in ours.parameters())


def test_half_precision_runs_close_to_full_and_keeps_float32_weights(any_model: Path) -> None:
    batch = packed_batch(random_sequences())
    half = sharded(any_model, "bfloat16")
    result = token_logprobs(half, **batch, entropy_gradient=True)
    (result.logp_T.sum() + result.entropy_T.sum()).backward()
    full = token_logprobs(sharded(any_model), **batch)
    assert result.logp_T.dtype == result.entropy_T.dtype == torch.float32
    assert 0 < (result.logp_T - full.logp_T).abs().mean() < 0.1
    assert 0 < (result.entropy_T - full.entropy_T).abs().mean() < 0.1
    assert all(value.dtype == value.grad.dtype == torch.float32 for value in half.parameters())


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_neither_whole_logits_nor_their_gradient_are_ever_held(tmp_path: Path, entropy_gradient: bool) -> None:
    vocabulary, chunk_rows = 4000, 4
    folder = write_model(tmp_path / "model", tied=True, vocab_size=vocabulary)
    sequences = [ids.repeat(8) for ids in random_sequences(vocabulary)]
    batch = packed_batch(sequences)
    model = sharded(folder)
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer)
    layer.chunk_bytes = chunk_rows * vocabulary * 4
    with Largest() as ours:
        logp_T, entropy_T = token_logprobs(model, **batch, entropy_gradient=entropy_gradient)
        (logp_T.sum() + entropy_T.sum()).backward()
    with Largest() as whole:
        torch.stack(one_by_one(reference_model(folder), [torch.cat(sequences)], 1.0)).sum().backward()
    logits = len(batch["before_T"]) * vocabulary
    assert whole.elements >= logits
    # The largest tensor is the embedding itself, or FSDP's buffer for all parameters of the root.
    assert ours.elements <= 1.1 * sum(value.numel() for value in model.parameters()) < logits / 4


def test_the_canary_is_the_plain_log_prob_of_each_next_token(any_model: Path) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        expected, _ = one_by_one(reference_model(any_model), [torch.tensor(tokens)], 1.0)
    assert canary_logprobs(sharded(any_model), tokens) == pytest.approx(expected.tolist(), abs=5e-6)


def test_the_canary_uses_new_weights_although_no_backward_pass_frees_the_old(model: Path) -> None:
    ours, reference = sharded(model), reference_model(model)
    # Keep the parameters from before the forward pass, as an optimizer does.
    parameters = [*ours.parameters(), *reference.parameters()]
    before = canary_logprobs(ours, [1, 2, 3, 4])
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.1)
        expected, _ = one_by_one(reference, [torch.tensor([1, 2, 3, 4])], 1.0)
    after = canary_logprobs(ours, [1, 2, 3, 4])
    assert after == pytest.approx(expected.tolist(), abs=5e-6)
    assert after != before


@pytest.mark.integration
def test_two_ranks_give_the_gradient_of_one(
    tied_model: Path, untied_model: Path, biased_model: Path, tmp_path: Path
) -> None:
    models = [str(tied_model), str(untied_model), str(biased_model)]
    run_ranks(two_logprob_ranks.main, 2, tmp_path, after=models)
    results = torch.load(tmp_path / "gradients.pt")
    assert len(results) == 6
    for (folder, dtype), found in results.items():
        expected = gradient(sharded(Path(folder), dtype), range(len(LENGTHS)))
        assert relative_error(found, expected) < (1e-5 if dtype == "float32" else 2e-2)
