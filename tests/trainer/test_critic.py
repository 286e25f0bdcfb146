"""Critics: values and gradients against a plain model in float64, metrics, failures, and two ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flash.errors import ConfigError, ContractError
from flash.trainer import checkpoint, checkpoint_files
from flash.trainer.critic import Critic, CriticBatch, critic_metrics, value_loss
from flash.trainer.mesh import trainer_mesh
from tests.trainer import two_critic_ranks
from tests.trainer.critic_cases import (
    Reference,
    Sequenced,
    critic_config,
    critic_gradient,
    critic_weights,
    make_critic,
    micro_of,
    old_of,
    random_sequences,
    returns_of,
    trained,
    update,
)
from tests.trainer.trainer_cases import Trainer, relative_error, run_ranks, write_model
from tests.trainer.two_critic_ranks import SPLITS, parts_of


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return True if the tensors of these names are equal, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_values_equal_a_plain_forward_pass_before_each_action_token(model: Path) -> None:
    sequences = random_sequences()
    value_T = make_critic(model).values(micro_of(sequences))
    with torch.no_grad():
        reference = Reference(model)
        expected_T = torch.cat([reference.values(one) for one in sequences])
    assert value_T.dtype == torch.float32
    assert not value_T.requires_grad
    torch.testing.assert_close(value_T.double(), expected_T, rtol=0, atol=5e-6)


def test_a_new_critic_gives_every_state_the_value_zero(tied_model: Path) -> None:
    critic = Critic(critic_config(tied_model), trainer_mesh("cpu"))
    assert not critic.values(micro_of(random_sequences())).any()


def test_a_critic_may_start_from_a_model_of_its_own(tied_model: Path, untied_model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "model", tied=True, num_hidden_layers=1)
    sequences = random_sequences()
    value_T = make_critic(tied_model, path=str(other)).values(micro_of(sequences))
    with torch.no_grad():
        expected_T = torch.cat([Reference(other).values(one) for one in sequences])
    torch.testing.assert_close(value_T.double(), expected_T, rtol=0, atol=5e-6)


def test_a_critic_without_a_model_is_a_config_error(tied_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^critic\.path: cannot load"):
        make_critic(tied_model, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^model\.path: cannot load"):
        make_critic(tmp_path / "absent")


def test_a_critic_that_does_not_know_a_token_of_the_policy_is_refused(tied_model: Path, tmp_path: Path) -> None:
    small = write_model(tmp_path / "model", tied=True, vocab_size=20)
    with pytest.raises(ContractError, match=r"token \d+ lies outside of the critic's vocabulary of 20"):
        make_critic(tied_model, path=str(small)).values(micro_of(random_sequences()))


def with_tokenizer(model: Path, folder: Path, words: Sequence[str]) -> Path:
    """Copy the model into a folder, with a tokenizer of these words."""
    shutil.copytree(model, folder)
    vocabulary = {word: number for number, word in enumerate(words)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a"))).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_critic_with_another_tokenizer_is_refused(tied_model: Path, tmp_path: Path) -> None:
    policy = with_tokenizer(tied_model, tmp_path / "policy", "abcd")
    other = tmp_path
    for number, words in enumerate(("abdc", "abc", "abcde")):
        other = with_tokenizer(tied_model, tmp_path / f"other-{number}", words)
        with pytest.raises(ConfigError, match=r"^critic\.path: the tokenizer of .*other.* is not that of the policy"):
            Trainer(critic_config(policy, path=str(other)))
    with pytest.raises(ConfigError, match="'e' has 4 there and no number here"):
        Trainer(critic_config(policy, path=str(other)))
    alike = with_tokenizer(tied_model, tmp_path / "alike", "abcd")
    for path in (alike, tied_model):  # the second has no tokenizer
        assert Trainer(critic_config(policy, path=str(path))).critics


def test_the_head_stays_in_float32_above_a_half_precision_backbone(tied_model: Path) -> None:
    sequences = random_sequences()
    config = critic_config(tied_model)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
    half = Critic(config, trainer_mesh("cpu"))
    with torch.no_grad():
        half.model.head.bias.fill_(1.0 + 2**-12)
    # bfloat16 would round this value to 1.
    assert torch.equal(half.values(micro_of(sequences)), torch.full((len(returns_of(sequences)),), 1.0 + 2**-12))
    update(half, [sequences], trained(sequences))
    assert all(value.dtype == torch.float32 for value in critic_weights(half).values())


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_equals_the_formula_in_float64(untied_model: Path, clip: float | None) -> None:
    sequences = random_sequences()
    critic, reference = make_critic(untied_model, clip=clip), Reference(untied_model)
    update(critic, [sequences], trained(sequences))
    assert relative_error(critic_gradient(critic), reference.gradient(sequences, clip)) < 1e-5
    with torch.no_grad():
        loss = float(Reference(untied_model).loss(sequences, clip))
    assert critic_metrics([critic])["critic_loss"] == pytest.approx(loss, rel=1e-5)


def test_the_clip_changes_the_gradient_of_the_test_batch(tied_model: Path) -> None:
    sequences = random_sequences()
    plain, clipped = (Reference(tied_model).gradient(sequences, clip) for clip in (None, 0.2))
    assert relative_error(plain, clipped) > 0.1


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (0.1, 0.81, -1.8),  # inside the clip: plain squared error
        (0.5, 0.64, 0.0),  # moved too far towards the return: the error at the clip, no gradient
        (-0.5, 2.25, -3.0),  # moved too far away from the return: full gradient
        (1.1, 0.64, 0.0),  # just beyond the return: still the error at the clip, which is larger
        (2.0, 1.0, 2.0),  # so far beyond the return that its own error is larger
    ],
)
def test_the_clipped_loss_is_the_larger_of_two_squares(value: float, loss: float, slope: float) -> None:
    """The old value is 0, the return 1, and the clip 0.2."""
    value_T = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    loss_T = value_loss(value_T, one, zero, 0.2)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss, abs=1e-12)
    assert value_T.grad is not None
    assert value_T.grad.item() == pytest.approx(slope, abs=1e-12)
    assert value_loss(value_T, one, zero, None).item() == pytest.approx((value - 1) ** 2, abs=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_numbers_of_masked_tokens_change_nothing(tied_model: Path, garbage: float) -> None:
    sequences = random_sequences()
    spoilt = [
        replace(one, returns=np.where(one.mask, one.returns, garbage), old=np.where(one.mask, one.old, -garbage))
        for one in sequences
    ]
    assert any(not np.array_equal(one.returns, two.returns) for one, two in zip(sequences, spoilt, strict=True))
    results = []
    for batch in (sequences, spoilt):
        critic = make_critic(tied_model)
        update(critic, [batch], trained(batch))
        results.append((critic_weights(critic), critic_metrics([critic])))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("cuts", [[[0, 1], [2, 3, 4, 5]], [[5], [3, 1], [], [0, 2, 4]]], ids=["two", "shuffled"])
def test_any_split_of_a_minibatch_gives_the_same_gradient_and_metrics(
    untied_model: Path, cuts: list[list[int]]
) -> None:
    sequences = random_sequences()
    whole, split = make_critic(untied_model), make_critic(untied_model)
    update(whole, [sequences], trained(sequences))
    update(split, [[sequences[index] for index in cut] for cut in cuts], trained(sequences))
    assert relative_error(critic_gradient(split), critic_gradient(whole)) < 1e-5
    assert critic_metrics([split]) == pytest.approx(critic_metrics([whole]), rel=1e-5)


def test_the_metrics_describe_the_trained_tokens_of_all_updates(tied_model: Path) -> None:
    """V is the value at the start of the step, before any of the updates."""
    critic = make_critic(tied_model)
    minibatches = [random_sequences(seed) for seed in (0, 1)]
    for sequences in minibatches:
        update(critic, [sequences[:3], sequences[3:]], trained(sequences))
    both = [one for sequences in minibatches for one in sequences]
    kept = np.concatenate([one.mask for one in both])
    returned = np.concatenate([one.returns for one in both])[kept]
    old = np.concatenate([one.old for one in both])[kept]
    metrics = critic_metrics([critic])
    assert metrics["explained_variance"] == pytest.approx(1 - np.var(returned - old) / np.var(returned), rel=1e-5)
    assert metrics["value_mean"] == pytest.approx(old.mean(), rel=1e-5)
    assert metrics["return_mean"] == pytest.approx(returned.mean(), rel=1e-5)
    assert metrics["critic_grad_norm"] > 0
    assert metrics["critic_skipped"] == 0


def test_metrics_are_cleared_by_each_call(tied_model: Path) -> None:
    # The rate is too small to change float32 weights.
    fresh, used = (make_critic(tied_model, learning_rate=1e-30) for _ in range(2))
    other, sequences = random_sequences(1), random_sequences(0)
    update(used, [other], trained(other))
    critic_metrics([used])
    for critic in (fresh, used):
        update(critic, [sequences], trained(sequences))
    assert critic_metrics([used]) == critic_metrics([fresh])


def test_the_explained_variance_is_one_of_a_perfect_critic_and_zero_of_a_constant(tied_model: Path) -> None:
    sequences, critic = random_sequences(), make_critic(tied_model)
    for old, expected in ((lambda one: one.returns, 1.0), (lambda one: np.full_like(one.returns, 7.0), 0.0)):
        batch = [replace(one, old=old(one)) for one in sequences]
        update(critic, [batch], trained(batch))
        assert critic_metrics([critic])["explained_variance"] == pytest.approx(expected, abs=1e-6)


def test_returns_that_do_not_vary_have_no_explained_variance(tied_model: Path) -> None:
    for level in (0.0, 0.3):
        batch = [replace(one, returns=np.full_like(one.returns, level)) for one in random_sequences()]
        critic = make_critic(tied_model)
        update(critic, [batch], trained(batch))
        metrics = critic_metrics([critic])
        assert "explained_variance" not in metrics
        assert metrics["return_mean"] == pytest.approx(level, abs=1e-6)


def test_a_minibatch_without_a_trained_token_changes_nothing(tied_model: Path) -> None:
    batch = [replace(one, mask=np.zeros_like(one.mask)) for one in random_sequences()]
    critic = make_critic(tied_model, train={"weight_decay": 0.5})
    before = critic_weights(critic)
    update(critic, [batch], 0)
    assert same(critic_weights(critic), before)
    assert critic_metrics([critic])["critic_loss"] == 0.0


def test_the_gradient_is_clipped_to_the_norm_of_the_training(tied_model: Path) -> None:
    sequences = random_sequences()
    free, held = make_critic(tied_model), make_critic(tied_model, train={"max_grad_norm": 0.01})
    for critic in (free, held):
        update(critic, [sequences], trained(sequences))
    norm = critic_metrics([free])["critic_grad_norm"]
    assert critic_metrics([held])["critic_grad_norm"] == pytest.approx(norm)
    expected = {name: value * 0.01 / norm for name, value in critic_gradient(free).items()}
    assert relative_error(critic_gradient(held), expected) < 1e-5


def test_an_update_uses_the_learning_rate_of_the_critic(tied_model: Path) -> None:
    sequences = random_sequences()
    critic = make_critic(tied_model, learning_rate=1e-3, train={"learning_rate": 1.0})
    before = critic_weights(critic)["head.bias"]
    update(critic, [sequences], trained(sequences))
    # Adam's first step is as long as the learning rate.
    assert float((critic_weights(critic)["head.bias"] - before).abs()) == pytest.approx(1e-3, rel=1e-2)


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(tied_model: Path) -> None:
    batch = [replace(one, returns=np.full_like(one.returns, np.inf)) for one in random_sequences()]
    critic = make_critic(tied_model)
    before = critic_weights(critic)
    with pytest.raises(ContractError, match=r"critic: the gradient norm is (nan|inf).*critic\.learning_rate"):
        update(critic, [batch], trained(batch))
    assert same(critic_weights(critic), before)


def test_a_gradient_that_is_not_finite_can_be_skipped_and_is_counted(tied_model: Path) -> None:
    sequences = random_sequences()
    bad = [replace(one, returns=np.full_like(one.returns, np.inf)) for one in sequences]
    skipping, clean = (make_critic(tied_model, train={"on_nonfinite": "skip"}) for _ in range(2))
    update(skipping, [bad], trained(bad))
    assert critic_metrics([skipping])["critic_skipped"] == 1
    for critic in (skipping, clean):
        update(critic, [sequences], trained(sequences))
    assert same(critic_weights(skipping), critic_weights(clean))
    assert critic_metrics([skipping]) == critic_metrics([clean])


@pytest.mark.slow
def test_the_critic_learns_which_prompts_are_rewarded(tied_model: Path) -> None:
    critic = Critic(critic_config(tied_model, clip=0.2, learning_rate=2e-3), trainer_mesh("cpu"))
    rng = np.random.default_rng(0)

    def sample() -> Sequenced:
        # Return a prompt token that decides about the return, 0 or 1, and four random tokens.
        good = float(rng.integers(0, 2))
        ids = np.concatenate([[5 + int(good)], rng.integers(0, 40, 4)])
        actions = np.arange(1, 5)
        return Sequenced(ids, actions, np.ones(4, dtype=np.bool_), np.full(4, good), np.zeros(4))

    explained = []
    for _ in range(40):
        batch = [sample() for _ in range(16)]
        old_T = critic.values(micro_of(batch))
        critic.update([CriticBatch(micro_of(batch), returns_of(batch), old_T)], trained(batch))
        explained.append(critic_metrics([critic])["explained_variance"])
    assert explained[0] == pytest.approx(0, abs=1e-6)
    assert min(explained[-5:]) > 0.9


@pytest.fixture(scope="module")
def ranks(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run two ranks, and return the folder of their model, the folder of their checkpoint, and each rank's results."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(two_critic_ranks.main, 2, untied_model, folder)
    results = [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return {"model": untied_model, "folder": folder, "results": results}


@pytest.mark.integration
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_give_the_values_gradient_and_metrics_of_one(ranks: dict[str, Any], split: str) -> None:
    sequences = random_sequences()
    critic = make_critic(ranks["model"])
    value_T = critic.values(micro_of(sequences))
    update(critic, [sequences], trained(sequences))
    metrics, counts = critic_metrics([critic]), [len(one.actions) for one in sequences]
    expected = dict(enumerate(value_T.split(counts)))
    for rank, results in enumerate(ranks["results"]):
        found = results[split]
        assert relative_error(found["gradient"], critic_gradient(critic)) < 1e-5
        assert found["metrics"] == ranks["results"][0][split]["metrics"] == pytest.approx(metrics, rel=1e-5)
        assert same(found["weights"], ranks["results"][0][split]["weights"])
        mine = [index for part in parts_of(split, rank) for index in part]
        theirs = torch.cat([expected[index] for index in mine]) if mine else torch.zeros(0)
        torch.testing.assert_close(found["values"], theirs, rtol=0, atol=5e-6)


@pytest.mark.integration
def test_values_use_new_weights_although_no_backward_pass_frees_the_old(ranks: dict[str, Any]) -> None:
    """Two ranks are needed: if gathered weights were kept, the second values would be computed with the old weights."""
    for results in ranks["results"]:
        before, after = results["doubled"]
        assert before.any()
        torch.testing.assert_close(after, 2 * before)


@pytest.mark.integration
def test_two_ranks_load_the_critic_that_they_saved_and_so_does_one(ranks: dict[str, Any]) -> None:
    for results in ranks["results"]:
        assert same(results["restored"], results["saved"])
    trainer = Trainer(critic_config(ranks["model"]))
    path = checkpoint_files.newest_complete(ranks["folder"])
    assert path is not None
    assert not same(critic_weights(trainer.critics[0]), ranks["results"][0]["saved"])
    checkpoint.load(path, trainer)
    assert same(critic_weights(trainer.critics[0]), ranks["results"][0]["saved"])


def test_the_test_batch_has_masked_tokens_and_a_sequence_without_a_trained_one() -> None:
    sequences = random_sequences()
    assert 0 < trained(sequences) < len(old_of(sequences))
    assert not sequences[2].mask.any()
