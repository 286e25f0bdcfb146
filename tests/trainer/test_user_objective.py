"""An objective outside of the project, which only its import path names."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.config.load import load
from flash.errors import ConfigError
from flash.trainer.step import Trainer
from tests.trainer.step_reference import group_credit, tokens_of
from tests.trainer.trainer_cases import gradient_of, random_shard, reference_model, relative_error

# Module of a user's package: an objective with an option, and three faulty ones.
PACKAGE = '''
"""A user's own objective: the log-likelihood weighed by a power of the advantage."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens


class Powered(Objective, frozen=True):
    corrects_staleness = False

    power: Annotated[float, Meta(gt=0)] = 1.0
    """Exponent of |A|."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        weight_T = tokens.advantage_T.sign() * tokens.advantage_T.abs() ** self.power
        return ObjectiveOutput(-weight_T * tokens.logp_T, {"weight": weight_T})


class Averaged(Powered, frozen=True):
    def __call__(self, tokens):
        return ObjectiveOutput(super().__call__(tokens).loss_T.mean(), {})


class Limited(Powered, frozen=True):
    limits = True

    def limit(self, log_ratio_N, advantage_N):
        raise IndexError(f"{len(log_ratio_N)} tokens")


class Bare(Powered, frozen=True):
    def __call__(self, tokens):
        return super().__call__(tokens).loss_T
'''


@pytest.fixture
def settings(tmp_path: Path, tied_model: Path, imports: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the settings of a run with an objective from a package in the current directory."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "my_objectives"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "powered.py").write_text(PACKAGE)
    file = tmp_path / "run.toml"
    file.write_text(f"""
        run = {{ name = "own" }}
        model = {{ path = "{tied_model}", dtype = "float32", max_length = 64 }}
        env = {{ path = "envs.arithmetic:Arithmetic" }}
        rollout = {{ group_size = 2, max_new_tokens = 16 }}
        train = {{ batch_size = 8, async_ratio = 0, max_grad_norm = 1e9, max_tokens_per_microbatch = 64 }}
        cluster = {{ gpus_per_node = 0 }}

        [algorithm]
        objective = "my_objectives.powered:Powered"
        options = {{ power = 2 }}
    """)
    return file


def test_an_objective_of_a_users_package_trains_a_step_with_the_gradient_of_its_formula(
    settings: Path, tied_model: Path
) -> None:
    trainer = Trainer(load([settings]))
    shard = random_shard()
    metrics = trainer.train_step(shard)
    model = reference_model(tied_model)
    tokens = tokens_of(model, None, shard)
    group_credit(shard, tokens)
    loss = -sum(token.advantage * abs(token.advantage) * token.logp for token in tokens) / len(tokens)
    loss.backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["weight_max"] == pytest.approx(max(token.advantage * abs(token.advantage) for token in tokens))


def test_options_and_declarations_of_a_users_objective_are_checked_at_the_start(settings: Path) -> None:
    with pytest.raises(ConfigError, match=r"`algorithm.options.powr` .*did you mean `power`\?"):
        load([settings], ["algorithm.options.powr=1"])
    with pytest.raises(ConfigError, match=r"`train.async_ratio` .*does not correct for"):
        load([settings], ["train.async_ratio=1"])
    with pytest.raises(ConfigError, match=r"no `Powred`; did you mean `Powered`\?"):
        load([settings], ["algorithm.objective=my_objectives.powered:Powred"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Averaged",
            r"Averaged must return .* one number per token, shape \(\d+,\), but .* loss_T of shape \(\)$",
        ),
        ("Bare", r"Bare must return ObjectiveOutput\(loss_T, stats\) .* but returned Tensor$"),
    ],
)
def test_a_loss_that_is_not_one_number_per_token_is_refused(settings: Path, name: str, message: str) -> None:
    trainer = Trainer(load([settings], [f"algorithm.objective=my_objectives.powered:{name}"]))
    with pytest.raises(ConfigError, match=message):
        trainer.train_step(random_shard())


def test_an_error_in_the_limit_of_an_objective_is_an_error_of_the_configuration(settings: Path) -> None:
    trainer = Trainer(load([settings], ["algorithm.objective=my_objectives.powered:Limited"]))
    with pytest.raises(
        ConfigError, match=r"algorithm.objective: Limited raised IndexError: \d+ tokens \(.*powered.py:"
    ):
        trainer.train_step(random_shard())
