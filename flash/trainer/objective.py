"""Makes the configured objective, checks it, and computes the loss of each token with it.

    loss = objective(tokens) · Π corrections · weight + β · KL − entropy_bonus · entropy · the objective's bonus factor

The term of the KL is part of the loss only if `algorithm.kl.place` is "loss".

`flash.trainer.step` calls `objective_input` and `token_loss` for each micro-batch, and aggregates the token losses. The
corrections and the weight multiply the policy's loss only. A token that a correction rejects leaves the mask: it then
has no loss of any kind. A teacher's log-probs enter the advantage that the objective sees (`algorithms.references`).

An *action token* is a token that the policy sampled. The *behaviour* policy is the policy that sampled it: an older
version, or the same weights in an engine. The *proximal* policy is a recent policy to which an objective may keep the
new policy close. A *correction* multiplies the loss of a token, or rejects the token, by the ratio of the proximal to
the behaviour policy.

The objective may be a user's own class, so its results are checked, and `try_objective` calls it before a run starts.

Shape legend: T = action tokens of a micro-batch, M = critics. Tensors are float32 on the policy's device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from algorithms.base import Advantage, Aggregation, CriticTarget, Objective, ObjectiveOutput, PackedTokens, Proximal
from algorithms.corrections import correct
from algorithms.references import Teacher, distilled, kl, loglinear
from flash.ages import age_of
from flash.config.check_learning import is_off_policy
from flash.config.learning import AlgorithmConfig
from flash.config.objects import check_options, load_objective
from flash.config.tree import Config
from flash.environment.calls import describe_error
from flash.errors import ConfigError
from flash.trainer.mesh import to_device

if TYPE_CHECKING:  # the launcher tries an objective, and need not import transformers for it
    from flash.trainer.model.logprobs import TokenLogprobs
    from flash.trainer.packing import MicroBatch


T = TypeVar("T")


class Method(NamedTuple):
    """Choices that a method consists of beside its objective, made once for a run by `resolve_method`.

    The configuration may set some of these choices; the objective makes the others. `algorithms.base` explains the
    types.
    """

    estimator: Advantage
    """Estimator of advantages."""
    aggregation: Aggregation
    """Way to sum the losses of tokens."""
    proximal: Proximal
    """Source of the proximal policy's log-probs."""
    critics: int
    """Number of critics; 0 if the estimator needs none."""
    critic_target: CriticTarget
    """Regression target of the critics; not used without critics."""


def make_objective(config: AlgorithmConfig) -> Objective:
    """Return the configured objective with its options. It may be one of Flash or a user's own class.

    Raises:
        ConfigError: there is no such objective, or an option does not fit.
    """
    kind = load_objective(config.objective)
    return kind(**check_options(kind, config.options, "algorithm.options"))


def resolve_method(config: Config, objective: Objective) -> Method:
    """Return how a run with this objective estimates advantages, aggregates losses and trains its critics.

    Only the estimator `gae` uses critics; with any other estimator the number of critics is 0.

    Raises:
        ConfigError: the estimator needs a critic, and none is configured.
    """
    algorithm, critic = config.algorithm, config.critic
    estimator = algorithm.advantage or objective.advantage
    count, target = 0, objective.critic_target
    if estimator == "gae":
        if critic is None:
            raise ConfigError("critic: is missing: advantage 'gae' takes its values from a critic")
        count, target = objective.critics, critic.target or target
    aggregation = algorithm.aggregation or objective.aggregation
    return Method(estimator, aggregation, objective.proximal_policy, count, target)


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a micro-batch's loss that are computed before the policy changes (`flash.trainer.step`).

    Places of tokens that are not trained may hold any value, even NaN.
    """

    advantage_T: Tensor
    """Advantage of the token, without the term of a teacher, which depends on the present weights."""
    reward_T: Tensor
    """Reward of the token's whole trajectory, as the environment returned it."""
    weight_T: Tensor
    """Factor of the objective's loss, which depends on the age of the sample."""
    in_loss_T: Tensor
    """bool: False if the loss leaves the token out because its sample is truncated. Such a token is treated as one that
    a correction has rejected."""
    start_T: Tensor | None
    """Log-prob under the weights at the start of the step; None if the first training pass computes it."""
    average_T: Tensor | None
    """Log-prob under the moving average of the weights; None if this average is not the proximal policy."""
    reference_T: Tensor | None
    """Log-prob under the reference policy; None without a KL."""
    teacher_T: Tensor | None
    """Log-prob under the teacher; None without a teacher."""
    value_MT: Tensor | None
    """Value that each critic gives to the state before each token; None without critics."""
    return_T: Tensor | None
    """Regression target of the critics (value models); None without critics."""
    deviation_T: Tensor
    """Standard deviation of the critics' values; 0 with fewer than two critics."""

    def start_or(self, now: TokenLogprobs) -> Tensor:
        """Return [T], no gradient: the log-prob at the start of the step, or else the log-prob of the pass `now`.

        `now` is the training pass of the minibatch, with the weights just before the minibatch's update. Its log-probs
        are used if no pass was made at the start of the step: either this is the first update, so that the weights are
        equal, or the method does not need the log-probs at the start.
        """
        return now.logp_T.detach() if self.start_T is None else self.start_T


class TokenLoss(NamedTuple):
    """Losses of the tokens of a micro-batch before they are summed, and numbers for the statistics; [T] each."""

    loss_T: Tensor
    """Loss with gradient; 0 for tokens outside of `mask_T`."""
    mask_T: Tensor
    """bool: True for tokens that are trained and that no correction rejected."""
    correction_T: Tensor
    """Product of the factors of all corrections; 0 for a token that one of them rejects."""
    divergence_T: Tensor | None
    """KL estimate to the reference; None without a reference."""
    above_teacher_T: Tensor | None
    """The policy's log-prob minus the teacher's; None without a teacher."""
    stats: dict[str, Tensor]
    """Statistics that the objective reports: from name to one number per token."""


def objective_input(
    micro: MicroBatch,
    now: TokenLogprobs,
    inputs: LossInputs,
    proximal: Proximal,
    *,
    step: int,
    teacher: Teacher | None = None,
) -> PackedTokens:
    """Return the input of the objective and of the corrections, without limit and bounds, which the caller adds.

    The values of tokens that are not trained are set to 0 before any arithmetic, because 0 · NaN in a backward pass
    would still be NaN.

    Args:
        micro: the micro-batch.
        now: log-probs under the present weights, with gradient in a training pass.
        inputs: inputs of the loss that were computed before the policy changed.
        proximal: source of the proximal policy's log-probs.
        step: the version that is trained.
        teacher: the teacher that the policy shall imitate; `distilled` adds a term of its log-probs to the advantages.
    """
    device = now.logp_T.device
    mask_T = to_device(micro.mask_T, device)
    behaviour_T = to_device(micro.behaviour_T, device).where(mask_T, 0.0)
    logp_T = now.logp_T.where(mask_T, 0.0)
    if proximal == "loglinear":
        age_T = to_device(age_of(micro.version_T, step), device).where(mask_T, 0)
        proximal_T = loglinear(logp_T, behaviour_T, age_T)
    elif proximal == "ewma":
        assert inputs.average_T is not None, "the passes before the update computed it"
        proximal_T = inputs.average_T.where(mask_T, 0.0)
    else:
        proximal_T = inputs.start_or(now).where(mask_T, 0.0)
    advantage_T = inputs.advantage_T.where(mask_T, 0.0)
    if teacher is not None:
        assert inputs.teacher_T is not None, "the passes before the update computed it"
        advantage_T = distilled(advantage_T, logp_T, inputs.teacher_T.where(mask_T, 0.0), teacher.coefficient)
    return PackedTokens(
        logp_T=logp_T,
        behaviour_T=behaviour_T,
        proximal_T=proximal_T,
        advantage_T=advantage_T,
        reward_T=inputs.reward_T.where(mask_T, 0.0),
        mask_T=mask_T,
        sequence_T=to_device(micro.sequence_T, device),
        sequences=micro.sequences,
        deviation_T=inputs.deviation_T.where(mask_T, 0.0),
    )


def apply_corrections(algorithm: AlgorithmConfig, tokens: PackedTokens, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return [T] each: the product of the corrections' factors, and True for tokens that no correction rejects.

    Tokens where `in_loss_T` is False count as rejected, with the factor 0.
    """
    correction_T, accepted_T = correct(algorithm.corrections, tokens)
    return correction_T.where(inputs.in_loss_T, 0.0), accepted_T & inputs.in_loss_T


def token_loss(
    objective: Objective, algorithm: AlgorithmConfig, tokens: PackedTokens, inputs: LossInputs, entropy_T: Tensor
) -> TokenLoss:
    """Return the loss of each token before aggregation, by the formula in the module's docstring.

    Args:
        objective: the configured objective.
        algorithm: the configuration of the method.
        tokens: result of `objective_input`, with limit and bounds. Tokens that a correction rejects are masked here.
        inputs: inputs of the loss that were computed before the policy changed.
        entropy_T: entropies of the policy's distribution at each token, for the entropy bonus.

    Raises:
        ConfigError: the objective raised an error, or returned a wrong shape.
        torch.OutOfMemoryError: the device has no memory left.
    """
    correction_T, accepted_T = apply_corrections(algorithm, tokens, inputs)
    # The objective must see a rejected token as if it had never been sampled.
    tokens = tokens._replace(
        logp_T=tokens.logp_T.where(accepted_T, 0.0),
        behaviour_T=tokens.behaviour_T.where(accepted_T, 0.0),
        proximal_T=tokens.proximal_T.where(accepted_T, 0.0),
        advantage_T=tokens.advantage_T.where(accepted_T, 0.0),
        reward_T=tokens.reward_T.where(accepted_T, 0.0),
        deviation_T=tokens.deviation_T.where(accepted_T, 0.0),
        mask_T=tokens.mask_T & accepted_T,
    )
    mask_T = tokens.mask_T
    # Compute the policy's loss with its factors, and then add the terms that no factor multiplies.
    output = apply_objective(objective, tokens)
    loss_T = output.loss_T.where(mask_T, 0.0) * correction_T * inputs.weight_T.where(mask_T, 0.0)
    divergence_T = None
    if algorithm.kl is not None:
        assert inputs.reference_T is not None, "a KL comes with a reference"
        divergence_T = kl(algorithm.kl.estimator, tokens.logp_T, inputs.reference_T.where(mask_T, 0.0))
        if algorithm.kl.place == "loss":
            loss_T = loss_T + algorithm.kl.coefficient * divergence_T
    if algorithm.entropy_bonus:
        bonus_T = algorithm.entropy_bonus * entropy_T.where(mask_T, 0.0)
        loss_T = loss_T - (bonus_T if output.bonus_T is None else bonus_T * output.bonus_T.where(mask_T, 0.0))
    above_teacher_T = None
    if algorithm.teacher is not None:
        assert inputs.teacher_T is not None, "the passes before the update computed it"
        above_teacher_T = tokens.logp_T.detach() - inputs.teacher_T.where(mask_T, 0.0)
    return TokenLoss(loss_T.where(mask_T, 0.0), mask_T, correction_T, divergence_T, above_teacher_T, output.stats)


def apply_objective(objective: Objective, tokens: PackedTokens) -> ObjectiveOutput:
    """Call the objective, check the shapes of its result, and return it.

    Raises:
        ConfigError: the objective raised an error, or returned a wrong shape.
        torch.OutOfMemoryError: the device has no memory left.
    """
    output: object = ask_objective(objective, lambda: objective(tokens))
    return _check_output(output, objective, tokens.mask_T)


def ask_objective(objective: Objective, call: Callable[[], T]) -> T:
    """Return the result of `call`, which calls a method of the objective.

    `flash.trainer.step` calls `Objective.limit` and `Objective.bounds` in this way.

    Raises:
        ConfigError: the objective raised an error. A ConfigError ends the run, since a restart would not help.
        torch.OutOfMemoryError: the device has no memory left, which is not the objective's fault.
    """
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # a user's objective may raise anything; Ctrl-C passes
        raise ConfigError(f"algorithm.objective: {type(objective).__name__} raised {describe_error(error)}") from error


def _check_output(output: object, objective: Objective, mask_T: Tensor) -> ObjectiveOutput:
    """Return the output of an objective, after a check of its shapes.

    Without the check, an objective that returns its mean loss would go unnoticed: torch would broadcast the one number.

    Raises:
        ConfigError: the output is no `ObjectiveOutput`, or one of its tensors does not have one number per token.
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


def try_objective(config: Config) -> None:
    """Call the configured objective on a few ordinary tokens before the run starts, and check its loss and gradient.

    So a mistake in a user's objective is reported at once, and not after the first batch was sampled.

    Raises:
        ConfigError: the objective raises, returns a wrong shape, gives a number that is not finite or no gradient; or,
            if the run needs it to correct for old samples, it claims to and gives the same result for every behaviour
            policy.
    """
    objective = make_objective(config.algorithm)
    name = type(objective).__name__
    log_ratio_T = torch.tensor([-0.1, 0.1] * 4)
    first = _try_tokens(objective, log_ratio_T)
    for what, value_T in zip(("a loss", "a gradient"), first, strict=True):
        if not value_T.isfinite().all():
            odd = value_T[~value_T.isfinite()][0].item()
            raise ConfigError(
                f"algorithm.objective: {name} gives {what} of {odd} on ordinary tokens (log-probs from -3 to -0.05, "
                "ratios of 0.9 and 1.1, advantages of 1 and -1)"
            )
    # Old samples need a loss that depends on the policy that sampled them. Check that the loss does, unless no sample
    # is old, a correction by weight takes this over, or the user allows that nothing corrects (`is_off_policy`).
    if not objective.corrects_staleness or not is_off_policy(config):
        return
    # Ratios from 0.4 to 2.5, on both sides of each clip range that an objective may have.
    others = [_try_tokens(objective, factor * log_ratio_T) for factor in (-9.0, -3.0, 3.0, 9.0)]
    if all(torch.equal(one, other) for found in others for one, other in zip(first, found, strict=True)):
        raise ConfigError(
            f"algorithm.objective: {name} gives the same loss and gradient whatever tokens.behaviour_T is, so it does "
            f"not correct for the age of samples, and train.async_ratio = {config.train.async_ratio:g} makes some old; "
            f"weigh by exp(logp_T - behaviour_T), or set `corrects_staleness: ClassVar[bool] = False` in {name}, which "
            "then needs a correction by weight ('token_tis'), async_ratio = 0 or train.allow_uncorrected = true"
        )


def _try_tokens(objective: Objective, log_ratio_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of the objective for seven trained tokens; an eighth token is masked.

    The tokens form two sequences, with advantages of 1 and −1. `log_ratio_T`, [8], is logp − behaviour of the tokens.

    Raises:
        ConfigError: the objective raises, returns a wrong shape, or its loss does not depend on the policy.
    """
    logp_T = torch.linspace(-3.0, -0.05, 8).requires_grad_()
    behaviour_T = logp_T.detach() - log_ratio_T
    mask_T = torch.arange(8) < 7
    advantage_T = torch.tensor([1.0] * 4 + [-1.0] * 4)
    try:
        limit = objective.limit(log_ratio_T, advantage_T) if objective.limits else torch.inf
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
    except (Exception, SystemExit, GeneratorExit) as error:  # a user's objective may raise anything; Ctrl-C passes
        raise ConfigError(f"algorithm.objective: {type(objective).__name__} raised {describe_error(error)}") from error
    loss_T = _check_output(output, objective, mask_T).loss_T[mask_T]
    if not loss_T.requires_grad:
        raise ConfigError(
            f"algorithm.objective: the loss of {type(objective).__name__} does not depend on tokens.logp_T"
        )
    loss_T.sum().backward()
    gradient_T = torch.zeros(8) if logp_T.grad is None else logp_T.grad
    return loss_T.detach(), gradient_T[mask_T]
