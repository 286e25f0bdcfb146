"""Log-probs and entropies of the output layer, computed in chunks, against whole logits in float64.

Shape legend: T = positions, V = vocabulary, D = width of a hidden state.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from flash.foreign.transformers import LogitChange
from flash.trainer.kept import KeptTokens
from flash.trainer.model.logprobs import UNCHANGED, KeptSets, LogprobRequest, OutputLayer, selected_logprobs

VOCABULARY, WIDTH = 23, 6
"""Sizes V and D of the output layer."""
ROW = VOCABULARY * 8
"""Bytes of one row of logits in float64."""


def factors(tokens: int, *, bias: bool = True, dtype: torch.dtype = torch.float64, hot: float = 1.0) -> dict[str, Any]:
    """Return random hidden states, weight and bias with gradients, and targets. Temperatures go from 1 to `hot`."""
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        # The numbers are drawn in float64, so that they are the same in all dtypes, up to rounding.
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "hidden_TD": leaf(tokens, WIDTH),
        "weight_VD": leaf(VOCABULARY, WIDTH),
        "bias_V": leaf(VOCABULARY) if bias else None,
        "target_T": torch.randint(0, VOCABULARY, (tokens,), generator=generator),
        "temperature_T": torch.linspace(1.0, hot, tokens, dtype=torch.float64),
    }


def some_kept(target_T: Tensor, *, changed: bool = True) -> KeptSets | None:
    """Return kept sets, in turn: all tokens; the target; the target and up to seven others; a mask with the target.

    Some logits of listed tokens are changed.
    """
    # All kept tokens have a bias, and about half of them a penalty, unless `changed` is False.
    rng = np.random.default_rng(5)
    sets: list[list[int]] = []
    masks: list[npt.NDArray[np.uint8]] = []
    for place, target in enumerate(target_T.tolist()):
        others = rng.permutation([token for token in range(VOCABULARY) if token != target])
        sets.append([[], [target], [target, *others[: rng.integers(1, 8)]], []][place % 4])
        if place % 4 == 3:
            # A mask may have more bits than there are tokens.
            masks.append(np.packbits(rng.random(32) < 0.7, bitorder="little"))
            masks[-1][target // 8] |= 1 << target % 8
    number = np.arange(len(target_T))
    mask_T = np.where(number % 4 == 3, number // 4, -1)
    mask_KB = np.array(masks, dtype=np.uint8).reshape(len(masks), 4)
    flat = np.array([token for one in sets for token in one], dtype=np.int64)
    bias, penalty = rng.normal(size=len(flat)) * changed, np.where(rng.random(len(flat)) < changed / 2, 1.7, 1.0)
    counts = np.array([len(one) for one in sets], dtype=np.int64)
    return KeptSets.from_tokens(KeptTokens(flat, counts, bias, penalty, mask_T, mask_KB))


def as_drawn(kept: KeptSets | None, logits_TV: Tensor) -> Tensor:
    """Return the logits, [T, V], by which tokens were drawn. Tokens that could not be drawn have minus infinity."""
    if kept is None:
        return logits_TV
    rows: list[Tensor] = []
    for place, logits_V in enumerate(logits_TV):
        start, count, mask = int(kept.start_T[place]), int(kept.count_T[place]), int(kept.mask_T[place])
        drawn_V = logits_V if count == 0 else torch.full_like(logits_V, -torch.inf)
        if mask >= 0:
            bits = np.unpackbits(kept.mask_KB[mask].numpy(), bitorder="little")[: len(logits_V)]
            drawn_V = logits_V.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
        for at in range(start, start + count):
            logit = logits_V[kept.token_N[at]] + kept.bias_N[at]
            one = logit / kept.penalty_N[at] if logit > 0 else logit * kept.penalty_N[at]
            drawn_V = drawn_V.index_put((kept.token_N[at],), one)
        rows.append(drawn_V)
    return torch.stack(rows) if rows else logits_TV


def whole_logits(factors: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return float64 leaves, and the log-probs and entropies that follow from them through the full logits.

    `factors` are arguments of `selected_logprobs`. The leaves are hidden states, weight and bias by their names.
    """
    leaves = {
        name: value.detach().double().requires_grad_()
        for name, value in factors.items()
        if name in ("hidden_TD", "weight_VD") or (name == "bias_V" and value is not None)
    }
    logits_TV = leaves["hidden_TD"] @ leaves["weight_VD"].T + leaves.get("bias_V", 0.0)
    change = factors.get("change", UNCHANGED)
    logits_TV = logits_TV * change.scale
    if change.cap is not None:
        logits_TV = change.cap * (logits_TV / change.cap).tanh()
    drawn_TV = as_drawn(factors.get("kept"), logits_TV)
    log_share_TV = (drawn_TV / factors["temperature_T"][:, None]).log_softmax(-1)
    logp_T = log_share_TV.gather(-1, factors["target_T"][:, None])[:, 0]
    return leaves, logp_T, -(log_share_TV.exp() * log_share_TV.masked_fill(drawn_TV == -torch.inf, 0.0)).sum(-1)


def plain(factors: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies in float64."""
    _, logp_T, entropy_T = whole_logits(factors)
    return logp_T.detach(), entropy_T.detach()


def plain_gradients(factors: dict[str, Any], grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of Σ (log-prob · grad + entropy · grad) from full logits, in float64."""
    leaves, logp_T, entropy_T = whole_logits(factors)
    (logp_T @ grads[0] + entropy_T @ grads[1]).backward()
    return {name: value.grad for name, value in leaves.items() if value.grad is not None}


def random_grads(tokens: int) -> tuple[Tensor, Tensor]:
    """Return random gradients of a loss by the log-probs and by the entropies, [T] each."""
    generator = torch.Generator().manual_seed(4)
    first, second = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return first, second


# Changes that a model makes to logits: none, a scale, and a scale with a cap.
CHANGES = (UNCHANGED, LogitChange(scale=0.4), LogitChange(scale=1.5, cap=2.0))
CHUNKED = [
    # Every number of tokens is cut into every size of chunks. Every change of logits occurs with and without kept sets.
    (tokens, chunk_bytes, at % 2 == 1, CHANGES[at % 3])
    for at, (tokens, chunk_bytes) in enumerate(product((0, 1, 7, 10), (1, 3 * ROW, 7 * ROW, 100 * ROW)))
]


@pytest.mark.parametrize(("tokens", "chunk_bytes", "kept", "change"), CHUNKED)
def test_any_chunking_gives_the_numbers_and_gradients_of_whole_logits(
    tokens: int, chunk_bytes: int, kept: bool, change: LogitChange
) -> None:
    given = factors(tokens, hot=0.3) | {"change": change}
    if kept:
        given["kept"] = some_kept(given["target_T"])
    grads = random_grads(tokens)
    logp_T, entropy_T = selected_logprobs(
        **given,
        entropy_gradient=True,
        chunk_bytes=chunk_bytes,
    )
    (logp_T @ grads[0] + entropy_T @ grads[1]).backward()
    torch.testing.assert_close((logp_T, entropy_T), plain(given), rtol=1e-12, atol=1e-13)
    for name, expected in plain_gradients(given, grads).items():
        torch.testing.assert_close(given[name].grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("hot", "bias", "kept"), [(0.3, True, False), (0.3, False, True), (1.0, False, False), (1.7, True, True)]
)
def test_gradients_are_the_finite_differences(hot: float, bias: bool, kept: bool) -> None:
    given = factors(4, bias=bias, hot=hot)
    sets = some_kept(given["target_T"]) if kept else None

    def numbers(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor]:
        # Return log-probs and entropies as a function of the three factors alone, as `gradcheck` needs it.
        return selected_logprobs(
            hidden_TD,
            weight_VD,
            bias_V,
            given["target_T"],
            temperature_T=given["temperature_T"],
            kept=sets,
            entropy_gradient=True,
            chunk_bytes=3 * ROW,
        )

    assert torch.autograd.gradcheck(numbers, (given["hidden_TD"], given["weight_VD"], given["bias_V"]), rtol=1e-6)


@pytest.mark.parametrize(("offset", "tolerance"), [(0.0, 1e-6), (100.0, 2e-5)])
@pytest.mark.parametrize("kept", [False, True])
def test_float32_is_as_exact_as_its_logits(offset: float, tolerance: float, kept: bool) -> None:
    given = factors(50, dtype=torch.float32, hot=0.01 if kept else 1.0)
    if kept:
        given["kept"] = some_kept(given["target_T"])
        tolerance *= 4
    with torch.no_grad():
        # Logits near 100 have an error of 8e-6, and e¹⁰⁰ overflows float32.
        given["bias_V"] += offset
    grads = random_grads(50)
    numbers = selected_logprobs(**given, entropy_gradient=True, chunk_bytes=9 * ROW)
    (numbers[0] @ grads[0].float() + numbers[1] @ grads[1].float()).backward()
    for found, expected in zip(numbers, plain(given), strict=True):
        assert (found.double() - expected).norm() < tolerance * expected.norm()
    for name, gradient in plain_gradients(given, grads).items():
        assert (given[name].grad.double() - gradient).norm() < tolerance * gradient.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_tokens_outside_of_kept_sets_have_no_share_in_half_precision(dtype: torch.dtype, wide: bool) -> None:
    given = factors(40, dtype=dtype, hot=0.02)
    given["kept"] = some_kept(given["target_T"])
    logp_T, entropy_T = selected_logprobs(**given, entropy_gradient=True, wide=wide)
    (logp_T.sum() + entropy_T.sum()).backward()
    assert logp_T.isfinite().all()
    assert logp_T[1::4].abs().max() == entropy_T[1::4].abs().max() == 0, "nothing else could be drawn"
    assert not given["hidden_TD"].grad[1::4].any()
    assert all(given[name].grad.isfinite().all() for name in ("hidden_TD", "weight_VD", "bias_V"))


def test_entropy_has_no_gradient_unless_asked_for() -> None:
    given = factors(5)
    logp_T, entropy_T = selected_logprobs(**given, entropy_gradient=False)
    assert logp_T.requires_grad
    assert not entropy_T.requires_grad


def test_a_frozen_weight_gets_no_gradient() -> None:
    given = factors(5)
    given["weight_VD"].requires_grad_(False)
    logp_T, _ = selected_logprobs(**given, entropy_gradient=False)
    logp_T.sum().backward()
    assert given["weight_VD"].grad is None
    zero = torch.zeros(5, dtype=torch.float64)
    expected = plain_gradients(given, (torch.ones_like(zero), zero))
    torch.testing.assert_close(given["hidden_TD"].grad, expected["hidden_TD"])


def test_bfloat16_factors_give_float32_numbers_within_the_rounding_of_their_logits() -> None:
    given = factors(40, dtype=torch.bfloat16)
    logp_T, entropy_T = selected_logprobs(**given, entropy_gradient=False)
    expected = plain(given)
    assert logp_T.dtype == entropy_T.dtype == torch.float32
    # Logits go up to about 10, and bfloat16 has 8 bits.
    torch.testing.assert_close((logp_T.double(), entropy_T.double()), expected, rtol=0, atol=10 * 2**-8)


def test_the_weight_gradient_of_bfloat16_factors_does_not_lose_small_parts_of_long_sums() -> None:
    tokens = 2000
    given = factors(tokens, dtype=torch.bfloat16)
    grads = (torch.ones(tokens, dtype=torch.float64), torch.zeros(tokens, dtype=torch.float64))
    logp_T, _ = selected_logprobs(**given, entropy_gradient=False, chunk_bytes=1)
    logp_T.sum().backward()
    expected = plain_gradients(given, grads)
    for name in ("weight_VD", "bias_V"):
        found = given[name].grad.double()
        assert (found - expected[name]).norm() < 2**-7 * expected[name].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_wide_logits_are_not_rounded_to_half_precision(dtype: torch.dtype, bias: bool) -> None:
    given = factors(40, dtype=dtype, bias=bias, hot=0.7)
    expected_T, expected_entropy_T = plain(given)
    found_T, entropy_T = selected_logprobs(**given, entropy_gradient=False, wide=True)
    torch.testing.assert_close(found_T.double(), expected_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy_T.double(), expected_entropy_T, rtol=0, atol=1e-5)
    rounded_T, _ = selected_logprobs(**given, entropy_gradient=False)
    assert (rounded_T.double() - expected_T).abs().max() > 1e-3
    found_T.sum().backward()
    weight = given["weight_VD"].grad
    assert weight.dtype == dtype
    grads = (torch.ones(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64))
    wanted = plain_gradients(given, grads)["weight_VD"]
    assert (weight.double() - wanted).norm() < 2**-7 * wanted.norm()


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_has_the_parameters_of_the_one_it_replaces(bias: bool) -> None:
    given = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    layer = OutputLayer(given, wide=False)
    expected = dict(given.named_parameters())
    assert dict(layer.named_parameters()).keys() == expected.keys()
    assert all(value is expected[name] for name, value in layer.named_parameters())


def test_a_request_ends_with_its_block_also_after_an_error() -> None:
    layer = OutputLayer(nn.Linear(WIDTH, VOCABULARY), wide=False)
    hidden = torch.randn(1, 3, WIDTH)
    selection = LogprobRequest(torch.tensor([1, 2, 3]), torch.ones(3), entropy_gradient=False)
    with layer.answering(selection):
        assert layer(hidden).shape == (1, 3, 2)
    with pytest.raises(RuntimeError), layer.answering(selection):
        layer(hidden[..., 1:])
    with pytest.raises(AssertionError, match="token_logprobs"):
        layer(hidden)
