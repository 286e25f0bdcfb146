"""The configured objective: made, tried on a few ordinary tokens, and its answers checked. It may be the user's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from algorithms.base import Advantage, Aggregation, CriticTarget, Objective, ObjectiveOutput, PackedTokens, Proximal
from flash.config.check_algorithm import is_off_policy
from flash.config.learning import AlgorithmConfig
from flash.config.objects import check_options, load_objective
from flash.config.tree import Config
from flash.environment.calls import describe_error
from flash.errors import ConfigError


class Method(NamedTuple):
    """What the configuration names, or else the objective's method has."""

    estimator: Advantage
    aggregation: Aggregation
    proximal: Proximal
    critics: int
    """0 where the estimator needs none."""
    target: CriticTarget


def method_of(config: Config, objective: Objective) -> Method:
    """How a run with this objective estimates advantages, adds up losses, and teaches its critics.

    Raises:
        ConfigError: the estimator needs a critic, and there is none.
    """
    algorithm, critic = config.algorithm, config.critic
    estimator = algorithm.advantage or objective.advantage
    count, target = 0, objective.critic_target
    if estimator == "gae":
        if critic is None:
            raise ConfigError("critic: is missing: advantage 'gae' takes its values from a critic")
        count, target = critic.count or objective.critics, critic.target or target
    aggregation = algorithm.aggregation or objective.aggregation
    return Method(estimator, aggregation, objective.proximal_policy, count, target)


def make_objective(config: AlgorithmConfig) -> Objective:
    """The configured objective with its options.

    Raises:
        ConfigError: there is no such objective, or an option does not fit.
    """
    kind = load_objective(config.objective)
    return kind(**check_options(kind, config.options, "algorithm.options"))


def checked_output(output: object, objective: Objective, mask_T: torch.Tensor) -> ObjectiveOutput:
    """What an objective returned. A mean, say, would be spread over all tokens unseen.

    Raises:
        ConfigError: it is not one number per token.
    """
    if not isinstance(output, ObjectiveOutput):
        found = type(output).__name__
    else:
        given = {"loss_T": output.loss_T} | output.stats
        if output.bonus_T is not None:
            given["bonus_T"] = output.bonus_T
        shapes = {name: tuple(x.shape) for name, x in given.items()}
        wrong = [f"{name} of shape {shape}" for name, shape in shapes.items() if shape != tuple(mask_T.shape)]
        if not wrong:
            return output
        found = ", ".join(wrong)
    raise ConfigError(
        f"algorithm.objective: {type(objective).__name__} must return ObjectiveOutput(loss_T, stats) with one number "
        f"per token, shape {tuple(mask_T.shape)}, but returned {found}"
    )


def applied(objective: Objective, tokens: PackedTokens) -> ObjectiveOutput:
    """Return the losses that an objective gives tokens.

    Raises:
        ConfigError: it raised, or returned another form. No restart can help.
        torch.OutOfMemoryError: the device has no room.
    """
    try:
        output: object = objective(tokens)
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # the objective may be a user's
        raise ConfigError(f"algorithm.objective: {type(objective).__name__} raised {describe_error(error)}") from error
    return checked_output(output, objective, tokens.mask_T)


def try_objective(config: Config) -> None:
    """Ask the objective for the loss of a few ordinary tokens, and for its gradient.

    Raises:
        ConfigError: the objective raises, returns another form, gives a number that is not finite or no gradient, or
            claims to correct for old samples and gives the same whatever policy drew them.
    """
    objective = make_objective(config.algorithm)
    name = type(objective).__name__
    apart_T = torch.tensor([0.1, -0.1] * 4)
    first = _try_tokens(objective, apart_T)
    for what, value_T in zip(("a loss", "a gradient"), first, strict=True):
        if not value_T.isfinite().all():
            odd = value_T[~value_T.isfinite()][0].item()
            raise ConfigError(
                f"algorithm.objective: {name} gives {what} of {odd} on ordinary tokens (log-probs from -3 to -0.05, "
                "ratios of 0.9 and 1.1, advantages of 1 and -1)"
            )
    if not objective.corrects_staleness or not is_off_policy(config):
        return
    # Ratios from 0.4 to 2.5, on both sides of each clip range that an objective may have.
    others = [_try_tokens(objective, factor * apart_T) for factor in (-9.0, -3.0, 3.0, 9.0)]
    if all(torch.equal(one, other) for found in others for one, other in zip(first, found, strict=True)):
        raise ConfigError(
            f"algorithm.objective: {name} gives the same loss and gradient whatever tokens.behaviour_T is, so it does "
            f"not correct for the age of samples, and train.async_ratio = {config.train.async_ratio:g} makes some old; "
            f"weigh by exp(logp_T - behaviour_T), or say `corrects_staleness: ClassVar[bool] = False` in {name}, which "
            "then needs a correction by weight ('token_tis'), async_ratio = 0 or train.allow_uncorrected = true"
        )


def _try_tokens(objective: Objective, apart_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient of the unmasked ones of eight tokens, whose log-ratio is -`apart_T`.

    Raises:
        ConfigError: the objective raises, returns another form, or its loss does not depend on the policy.
    """
    logp_T = torch.linspace(-3.0, -0.05, 8).requires_grad_()
    behaviour_T = logp_T.detach() + apart_T
    mask_T = torch.arange(8) < 7
    advantage_T = torch.tensor([1.0] * 4 + [-1.0] * 4)
    try:
        limit = objective.limit(-apart_T, advantage_T) if objective.limits else torch.inf
        deviation_T = torch.linspace(0.0, 0.7, 8) if objective.critics > 1 else torch.zeros(8)
        bounds = objective.bounds(deviation_T) if objective.critics > 1 else (-torch.inf, torch.inf)
        tokens = PackedTokens(
            logp_T=logp_T,
            behaviour_T=behaviour_T,
            proximal_T=logp_T.detach() + 0.02,
            advantage_T=advantage_T,
            reward_T=(advantage_T + 1) / 2,
            mask_T=mask_T,
            sequence_T=torch.arange(8) // 4,
            sequences=2,
            deviation_T=deviation_T,
            limit=limit,
            bounds=bounds,
        )
        output: Any = objective(tokens)
    except BaseException as error:  # the objective may be a user's: whatever it raises is its verdict
        raise ConfigError(f"algorithm.objective: {type(objective).__name__} raised {describe_error(error)}") from error
    loss_T = checked_output(output, objective, mask_T).loss_T[mask_T]
    if not loss_T.requires_grad:
        raise ConfigError(
            f"algorithm.objective: the loss of {type(objective).__name__} does not depend on tokens.logp_T"
        )
    loss_T.sum().backward()
    gradient_T = torch.zeros(8) if logp_T.grad is None else logp_T.grad
    return loss_T.detach(), gradient_T[mask_T]
