"""Trains one batch: takes a shard of trajectories, and makes new weights and metrics.

`flash.trainer.loop` calls `Trainer.train_round` for each round of a step, and then `Trainer.finish_step`:

    plan_step         pack the shard, check the ages of its tokens, exchange counts with the other ranks
    loss_inputs       forward passes of other models and critics, then token advantages; no gradient
    for each minibatch of the round:
        _backward     forward and backward pass of each micro-batch (`flash.trainer.objective.token_loss`)
        _update       one optimizer update (`flash.trainer.optimizer.apply_gradient`), if the minibatch ends

`finish_step` makes the other passes of `updates_per_batch`, and the metrics. A *round* is a part of a batch whose
samples are complete; a step that is not streamed has one round, the whole batch. A minibatch may lie in several
rounds. Its gradient is the sum over them, so it is the same for all divisions into rounds.

Version n is the weights after n steps. A *shard* is the part of a round that this rank trains. A *minibatch* is the
part of a batch for one update, over all ranks. A *micro-batch* is the part of a minibatch for one pass on one rank. A
*correction* weights or rejects tokens by the ratio of the policy to the policy that sampled them.

A *collective* is a call in which ranks exchange data. All ranks must make the same collectives in the same order, or
they wait for each other until a timeout. So a fault that one rank finds in its shard is raised on all ranks.
Losses are divided by counts of the whole minibatch over all ranks, so the gradient does not depend on how the batch was
divided among ranks and micro-batches.

Shape legend: B = samples of the whole batch, S = sequences and T = action tokens of a micro-batch, N = trained tokens
of a minibatch.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.base import PackedTokens
from algorithms.sequences import token_weights
from flash.ages import age_of
from flash.config.check_learning import why_not_streamed
from flash.config.tree import Config
from flash.errors import ConfigError, ContractError
from flash.samples.batches import MinibatchPlace
from flash.trainer.critic import Critic, critic_batch, critic_metrics
from flash.trainer.lag import LagLimiter
from flash.trainer.mesh import TrainerMesh, to_device, trainer_mesh
from flash.trainer.model.adapters import empty_policy, fill_policy, fingerprint_of
from flash.trainer.model.canary import CanaryMaker, draw_canary
from flash.trainer.model.logprobs import TokenLogprobs, policy_logprobs
from flash.trainer.model.model import load_plain, recompute_mode, reshard, shard_model
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.model.packing_check import check_packing, replay_routing, share_rows
from flash.trainer.objective import (
    LossInputs,
    apply_corrections,
    ask_objective,
    make_objective,
    objective_input,
    resolve_method,
    token_loss,
)
from flash.trainer.optimizer import LossScale, apply_gradient, learning_rate, make_optimizer
from flash.trainer.packing import MicroBatch
from flash.trainer.performance import ModelArithmetic
from flash.trainer.plan import MinibatchPlan, StepPlan, plan_step, token_advantages
from flash.trainer.references import (
    StepModels,
    check_tokenizer,
    copy_weights,
    forward_passes,
    load_frozen,
    load_reference,
    start_average,
    update_average,
)
from flash.trainer.rhythm import RhythmPass
from flash.trainer.statistics import BatchCounts, ShownTokens, StepStatistics
from flash.types import Shard, TrainedSample

NO_BOUNDS = (-math.inf, math.inf)
"""Bounds for an objective that does not compare critics (value models): no token lies outside of these bounds."""


class Trainer:
    """The policy, its optimizer and its version, and all models that the policy is compared with.

    The default process group must consist of all trainer ranks.
    """

    def __init__(self, config: Config) -> None:
        """Load and shard the models. A collective.

        The order of the calls is the order of their collectives. The weights in float32 are dropped before the
        optimizer and other models are made, to bound the memory.

        Raises:
            ConfigError: a model or the objective cannot be made from the configuration.
        """
        # Make the method, and the groups of ranks.
        self._config = config
        self._objective = make_objective(config.algorithm)
        self._method = resolve_method(config, self._objective)
        device: Literal["cpu", "cuda"] = "cuda" if config.gpus_per_node > 0 else "cpu"
        offloads = "weights" in config.train.offload
        self.mesh = mesh = trainer_mesh(device, config.parallel, config.deadlines.collective, offloads=offloads)
        # Make the policy, and fill it with `plain`, the weights at `model.path` in float32. The canary, a short text on
        # which engines are checked, is drawn from `plain`.
        plain = load_plain(config.model, mesh)
        text = draw_canary(plain, config)
        policy = empty_policy(config)
        # Count before the policy is sharded, because its parameters still have their full shapes now.
        self._arithmetic = ModelArithmetic.of(policy)
        self.model = shard_model(policy, mesh, config.model, recompute=recompute_mode(config.train))
        self.base_fingerprint: tuple[int, ...] = () if config.lora is None else fingerprint_of(plain)
        """Fingerprint of the weights at `model.path`, if adapters are trained on top of them; else empty."""
        self.lora_alpha = config.lora and config.lora.alpha
        """`lora.alpha`, which a checkpoint records and a resumed run must not change; None without adapters."""
        fill_policy(self.model, plain, config.run.seed)
        del plain
        if config.lora is not None:
            gc.collect()  # reference cycles of FSDP hold the base in float32
            if device == "cuda":
                torch.cuda.empty_cache()  # an engine may share the card
        self._check_packing()
        self.canaries = CanaryMaker(text, self.model, config)
        """Makes the canary of each version. Its text and tolerance come from the weights at `model.path`."""
        self.optimizer = make_optimizer(self.model, config.train)
        self.scale = LossScale(config.model.dtype)
        """Factor of the loss in float16; 1 in other dtypes."""
        # Make everything else that a step needs: critics, average, rhythm, lag, reference and teacher.
        if self._method.critics and config.critic is not None and config.critic.path is not None:
            check_tokenizer(config, "critic.path", config.critic.path)
        self.critics = [Critic(config, mesh) for _ in range(self._method.critics)]
        """Critics; empty if the estimator needs none."""
        self.average: dict[str, Tensor] | None = None
        """Moving average of the weights by parameter name, sharded like the policy. None unless it is the proximal
        policy, which bounds the size of an update (`algorithms.base.Proximal`)."""
        if self._method.proximal == "ewma":
            self.average = start_average(self.model)
        self.rhythm: RhythmPass | None = None
        """Multiplies advantages by a factor that the policy's attention gives each token; None if not configured."""
        if config.algorithm.rhythm is not None:
            if not takes_packed_rows(self.model):
                raise ConfigError(
                    "algorithm.rhythm: expected none with this model.path, whose attention cannot be observed"
                )
            with torch.no_grad():
                self.rhythm = RhythmPass(config.algorithm.rhythm, self.model)
            reshard(self.model)
        self.lag: LagLimiter | None = None
        """Limits learning rates by the distance of the policy from the policies that sampled; None if not configured,
        or if there can be no such distance."""
        # Without old tokens and with one update per batch, all tokens come from the policy that the update changes.
        can_lag = config.train.max_age > 0 or config.train.minibatches * config.train.updates_per_batch > 1
        if config.algorithm.lag is not None and can_lag:
            self.lag = LagLimiter(config.algorithm.lag, config.train, config.run.steps, mesh)
        self.reference = load_reference(config, mesh, self.model)
        """Reference of the KL, sharded like the policy. With `kl.refresh`, it is a copy of an earlier policy."""
        teacher = config.algorithm.teacher
        self._teacher: PreTrainedModel | None = None
        if teacher is not None and teacher.path is not None:
            self._teacher = load_frozen(config, mesh, "algorithm.teacher.path", teacher.path)
        if config.rollout.routing_replay:
            replay_routing(self.model)
        backbones = [critic.model.backbone for critic in self.critics]
        self._share_rows = share_rows(mesh, self.model, backbones, self.reference, self._teacher)
        """True if a micro-batch may hold several sequences. All models get the same micro-batches, so one model that
        cannot take several sequences makes this False."""
        self.version = 0
        """Policy version of the weights: the number of steps taken."""
        self.skipped_steps = 0
        """Number of optimizer updates left out so far because their gradient was not finite."""
        self.flops = 0.0
        """Model FLOPs of the last step on the samples of this rank, as `ModelArithmetic` counts them."""
        self._running: _RunningStep | None = None
        """Step whose rounds are being trained; None between two steps."""
        self._why_whole = why_not_streamed(config)
        """Reason why a step must not have several rounds, as a clause; None if it may."""
        self.shown: list[TrainedSample] = []
        """On rank 0: the samples of the last step that the run shows, token by token."""

    def _check_packing(self) -> None:
        """Check that the policy computes packed sequences as it computes each alone. Tests replace this method.

        Raises:
            ConfigError: the policy cannot be trained with this configuration.
        """
        check_packing(self.model, self._config)

    @property
    def refreshes(self) -> bool:
        """True if the reference is replaced by the policy every `kl.refresh` steps, so that checkpoints hold it."""
        kl = self._config.algorithm.kl
        return kl is not None and kl.refresh is not None

    def train_step(self, shard: Shard) -> dict[str, float]:
        """Train on a batch that has one round, and make the next version. A collective. Returns the metrics.

        Supervised training calls this. `flash.trainer.loop` calls the two methods itself, since its steps may have
        several rounds.

        Raises:
            ContractError, ConfigError: `train_round` or `finish_step` raised it.
        """
        self.train_round(shard)
        return self.finish_step()

    def train_round(self, shard: Shard) -> None:
        """Train on one round of a step: add its gradient, and update the policy when a minibatch is complete.

        A minibatch is complete when no later round has a part of it. A collective. The caller passes the rounds of a
        step in order, and then calls `finish_step`. While the critics warm up, the policy keeps its weights, but its
        version is still counted up.

        Raises:
            ContractError: the round has tokens of a version that this step may not train, other counts than it claims,
                or a number that is not finite; a token or expert is unknown to a model; a gradient is not finite and
                train.on_nonfinite is "stop"; or the method needs the whole batch, and this is only a part of it. The
                version does not change then, but updates of this step that were made before stay in the weights.
            ConfigError: the objective raised an error or returned a wrong shape, or the model changes its logits in a
                way that is not known.
        """
        # Most calls below are collectives, so no branch here may depend on data that a single rank holds.
        config, is_part = self._config, shard.round.samples_before > 0 or not shard.round.last
        if is_part and (why := self._why_whole) is not None:
            raise ContractError(f"step {shard.step}: a part of a batch was dealt, and steps need all of it: {why}")
        # Plan first: this raises an error that any rank finds on every rank, and gives all ranks equally many
        # micro-batches.
        plan = plan_step(shard, config, self._method, self.version, self.mesh, share_rows=self._share_rows)
        step = self._running = self._running or _RunningStep(config, self.mesh)
        step.counts.add(shard, plan)
        step.shown.begin_round(shard)
        # Compute the inputs of the loss before an update of this round, because they describe the weights at the start
        # of the step. Methods for which later rounds would come too late for this are not streamed.
        inputs = iter(self.loss_inputs(plan))
        parts = [
            _Part(minibatch, list(islice(inputs, len(minibatch.micro_batches))), plan.critic_B)
            for minibatch in plan.minibatches
        ]
        step.bounds = self._bounds(plan, [one for part in parts for one in part.inputs])
        for part in parts:
            minibatch = step.minibatch = step.minibatch or _RunningMinibatch()
            self._train_part(step, minibatch, part, shard.step)
            if part.plan.place.ends:
                step.minibatch = None
                self._end_minibatch(step, minibatch)
        # `finish_step` makes the passes after the first one, on the same micro-batches, so they are counted here.
        passes = config.train.updates_per_batch
        step.flops += passes * self._arithmetic.flops(plan.micro_batches, backward=not self._warming_up)
        if not shard.round.last and self.mesh.device.type == "cuda":
            # Wait until the GPU has done its work. Otherwise this rank would ask for the next round long before it can
            # train it. The hub would then reply with a small round: the few groups that are complete by then.
            torch.cuda.synchronize()

    def finish_step(self) -> dict[str, float]:
        """Make the other passes over the batch, and the next version, after the last round of a step. A collective.

        Returns:
            The metrics over all ranks, which are equal on each rank.

        Raises:
            ContractError: a gradient is not finite and train.on_nonfinite is "stop".
            ConfigError: the objective raised an error or returned a wrong shape.
        """
        config, step = self._config, self._running
        assert step is not None, "a step has at least one round"
        assert step.minibatch is None, "the last round of a step ends its last minibatch"
        passes, minibatches = config.train.updates_per_batch, step.minibatches
        for _ in range(passes - 1):
            for trained in minibatches:
                minibatch = trained.again()
                for part in trained.parts:
                    self._train_part(step, minibatch, part, self.version)
                self._end_minibatch(step, minibatch)
        # Finish: count up the version, and gather the metrics.
        self._running, self.flops = None, step.flops
        # Metrics are reduced once per step, so that ranks need not wait for each other between minibatches. All calls
        # before `_finish_version`, which counts the version up, need the version that was trained.
        metrics = step.counts.metrics() | step.statistics.metrics(len(minibatches), passes)
        if self.critics:
            metrics |= critic_metrics(self.critics) | {"critic_warmup": float(self._warming_up)}
        if self.lag is not None:
            metrics |= self.lag.finish(self.version)
        rate = learning_rate(config.train, config.run.steps, self.version)
        self._finish_version()
        self.shown = step.shown.gather(self.mesh)
        if self.rhythm is not None:
            metrics |= self.rhythm.report(self.mesh)
        finite = [norm for norm in step.norms if math.isfinite(norm)]
        return metrics | {
            "grad_norm": sum(finite) / len(finite) if finite else 0.0,
            "learning_rate": rate,
            "skipped_steps": float(self.skipped_steps),
            **({"loss_scale": self.scale.value} if self.scale.active else {}),
        }

    def give_up_step(self) -> None:
        """Drop the gradient of the running step, if there is one: its other rounds will not come, as the run ends.

        Updates that the step has already made stay in the weights, which are then between two versions. The hub knows
        this, and lets nobody save them (`may_save` of its reply is False).
        """
        self._running = None
        self.optimizer.zero_grad()

    def _train_part(self, step: _RunningStep, minibatch: _RunningMinibatch, part: _Part, version: int) -> None:
        """Add the gradient of the part of a minibatch that is in one round. A collective.

        The counts of each micro-batch go into `minibatch.kept`, and its loss into the statistics of `step`. `version`
        is the version that the step trains. Raises the errors of `_limit` and `_backward`.
        """
        # Compute the limit before the backward passes, each of which needs the limit of the whole minibatch. A method
        # with limits is not streamed, so the part is then the whole minibatch.
        limit = self._limit(part.plan, part.inputs, version, updated=step.updates > 0)
        minibatch.add(part)
        minibatch.kept += [
            self._backward(
                micro,
                micro_inputs,
                minibatch,
                step=version,
                limit=limit,
                bounds=step.bounds,
                statistics=step.statistics,
                shown=None if minibatch.repeated else step.shown,
            )
            for micro, micro_inputs in zip(part.plan.micro_batches, part.inputs, strict=True)
        ]

    def _end_minibatch(self, step: _RunningStep, minibatch: _RunningMinibatch) -> None:
        """Update the critics and the policy, once all parts of a minibatch are trained. A collective.

        While the critics warm up, only they are updated. Raises the errors of `_train_critics` and `_update`.
        """
        # The share is known only after the backward passes, which decide which tokens are rejected. The update needs
        # it, because it divides by the share.
        share = self._kept_share(minibatch)
        step.statistics.end_minibatch(share)
        # Steps with critics are not streamed (`_why_whole`). So the minibatch has one part, and each critic one update.
        for part in minibatch.parts if self.critics else ():
            self._train_critics(part.plan, part.inputs, part.critic_B)
        if not self._warming_up:
            rate = learning_rate(self._config.train, self._config.run.steps, self.version)
            step.norms.append(self._update(rate, share, trained=minibatch.tokens > 0 and share > 0))
        step.updates += 1
        if not minibatch.repeated:
            step.minibatches.append(minibatch if self._config.train.updates_per_batch > 1 else minibatch.emptied())

    def loss_inputs(self, plan: StepPlan) -> list[LossInputs]:
        """Return the inputs of the loss that are computed before the policy changes, per micro-batch. A collective.

        `train_round` calls this before its first update. The rhythm multiplies advantages by factors that it computes
        from the policy's attention. It does not multiply the regression targets of the critics, which learn the rewards
        themselves.

        Raises:
            ContractError: on every rank, if a trained token of any rank has an advantage that is not finite; on one
                rank alone, if a model does not know a token or an expert of the samples (`forward_passes`).
        """
        config, credit, device, rhythm = self._config, plan.credit, self.mesh.device, self.rhythm
        models = StepModels(self.model, self.reference, self._teacher, self.critics, self.average)
        outputs = forward_passes(
            plan.micro_batches,
            models,
            device,
            start=self._needs_start,
            rhythm=rhythm,
            served_teacher=config.algorithm.teacher is not None and self._teacher is None,
        )
        found = token_advantages(plan.micro_batches, outputs, credit, config, self._method, self.mesh)
        if rhythm is not None:
            rhythm.choose_heads(self.mesh)

        inputs: list[LossInputs] = []
        for micro, output, own in zip(plan.micro_batches, outputs, found, strict=True):
            advantage_T = own.advantage_T
            if rhythm is not None:
                assert output.signals is not None, "the forward passes observed the attention"
                advantage_T = rhythm.multiply(advantage_T, output.signals, micro)
            # σ says how much the critics disagree. `bounds` and some objectives use it.
            if output.value_MT is None:
                deviation_T = torch.zeros(len(micro.target_T), device=device)
            else:
                deviation_T = output.value_MT.double().std(dim=0, correction=0).float()
            inputs.append(
                LossInputs(
                    advantage_T=to_device(advantage_T.astype(np.float32), device),
                    reward_T=to_device(credit.reward_B[micro.index_T].astype(np.float32), device),
                    weight_T=to_device(credit.weights(micro).astype(np.float32), device),
                    in_loss_T=to_device(credit.in_loss_B[micro.index_T], device),
                    start_T=output.start_T,
                    average_T=output.average_T,
                    reference_T=output.reference_T,
                    teacher_T=output.teacher_T,
                    value_MT=output.value_MT,
                    return_T=to_device(own.return_T.astype(np.float32), device) if self.critics else None,
                    deviation_T=deviation_T,
                )
            )
        return inputs

    @property
    def _needs_start(self) -> bool:
        """True if the policy's log-probs at the start of the step need a forward pass of their own.

        A method needs these log-probs for a KL in the reward, or if its proximal policy is the policy at the start of
        the step. In the second case a step with a single update needs no such pass, because its training pass computes
        the same log-probs.
        """
        divergence, train = self._config.algorithm.kl, self._config.train
        recomputes = self._method.proximal == "recompute" and train.minibatches * train.updates_per_batch > 1
        return recomputes or (divergence is not None and divergence.place == "reward")

    @torch.no_grad()
    def mean_loss(self, shard: Shard) -> float:
        """Return the mean of −log-prob, in nats, over the tokens of a batch that could be trained now, over all ranks.

        The mean is 0 if there is no such token. A collective. Nothing is trained. Supervised training
        (`flash.run.sft_rank`) calls this for its held-out examples.

        Raises:
            ContractError: the batch has tokens of a version that may not be trained now, other counts than it claims,
                or is damaged.
        """
        plan = plan_step(shard, self._config, self._method, self.version, self.mesh, share_rows=self._share_rows)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for micro in plan.micro_batches:
            logp_T = policy_logprobs(self.model, micro).logp_T.double()
            total -= logp_T.where(to_device(micro.mask_T, self.mesh.device), 0.0).sum()
        reshard(self.model)
        self.mesh.reduce_sum(total)
        return total.item() / max(sum(plan.shard_tokens), 1)

    @property
    def _warming_up(self) -> bool:
        """True if only the critics learn in this step: the first `critic.warmup_steps` steps of a run with critics."""
        config = self._config.critic
        return bool(self.critics) and config is not None and self.version < config.warmup_steps

    def _finish_version(self) -> None:
        """Count up the version, and bring the models that follow the policy up to date.

        The average of the weights is updated, if there is one. Every `kl.refresh` steps the policy is copied to the
        reference of the KL; without this key, or without a KL, nothing is copied.
        """
        if self._warming_up:
            # Free the gathered weights of the forward pass. In other steps the backward pass has freed them.
            reshard(self.model)
        self.version += 1
        if self.average is not None:
            # The share of the newest weights depends on how many versions the average has: the version says it.
            update_average(self.average, self.model, self._objective.proximal_decay, self.version)
        kl = self._config.algorithm.kl
        if self.reference is not None and kl is not None and kl.refresh and self.version % kl.refresh == 0:
            copy_weights(dict(self.reference.named_parameters()), self.model)

    @torch.no_grad()
    def _limit(self, minibatch: MinibatchPlan, inputs: Sequence[LossInputs], step: int, *, updated: bool) -> float:
        """Return `Objective.limit` for a minibatch. A collective.

        If the objective has no limits, or no token of the minibatch is trained, returns inf without a collective.

        The limit is a number that the objective computes from all trained tokens of the minibatch over all ranks, under
        the weights just before the update. This costs a forward pass, unless no update was made in this step and the
        log-probs at its start are known.

        Args:
            minibatch: the minibatch.
            inputs: the inputs of its micro-batches on this rank.
            step: the version that is trained.
            updated: True if the policy has been updated since the start of the step.

        Raises:
            ConfigError, ContractError: the objective raised an error, or `policy_logprobs` did.
        """
        if not self._objective.limits or minibatch.total_tokens == 0:
            return math.inf
        pairs: list[Tensor] = []
        for micro, micro_inputs in zip(minibatch.micro_batches, inputs, strict=True):
            if updated or micro_inputs.start_T is None:
                now = policy_logprobs(self.model, micro)
            else:
                now = TokenLogprobs(micro_inputs.start_T, torch.zeros_like(micro_inputs.start_T))
            tokens = self._objective_input(micro, now, micro_inputs, step)
            # A rejected token must count as if it had never been sampled: an advantage of 0 makes `Objective.limit`
            # ignore the token.
            _, accepted_T = apply_corrections(self._config.algorithm, tokens, micro_inputs)
            pair = torch.stack([tokens.logp_T - tokens.behaviour_T, tokens.advantage_T.where(accepted_T, 0.0)])
            pairs.append(pair[:, tokens.mask_T])
        log_ratio_N, advantage_N = self.mesh.gather_ragged(torch.cat(pairs, dim=1), minibatch.shard_tokens)
        return ask_objective(self._objective, lambda: self._objective.limit(log_ratio_N, advantage_N))

    def _objective_input(self, micro: MicroBatch, now: TokenLogprobs, inputs: LossInputs, step: int) -> PackedTokens:
        """Return the objective's input for one micro-batch, without limit and bounds."""
        teacher = self._config.algorithm.teacher
        return objective_input(micro, now, inputs, self._method.proximal, step=step, teacher=teacher)

    def _bounds(self, plan: StepPlan, inputs: Sequence[LossInputs]) -> tuple[float, float]:
        """Return `Objective.bounds`: a range of σ, outside of which the objective leaves out a part of a token's loss.

        σ is the standard deviation of the critics' values. The range is computed from all trained tokens of the batch,
        which is a collective. If the objective does not compare critics, or no token of the batch is trained, the range
        is infinite, and no collective is made.

        Raises:
            ConfigError: on every rank, if the objective raised an error.
        """
        if self._method.critics < 2 or sum(plan.shard_tokens) == 0:
            return NO_BOUNDS
        deviations = [
            micro_inputs.deviation_T[to_device(micro.mask_T, micro_inputs.deviation_T.device)]
            for micro, micro_inputs in zip(plan.micro_batches, inputs, strict=True)
        ]
        deviation_N = self.mesh.gather_ragged(torch.cat(deviations)[None], plan.shard_tokens)[0]
        return ask_objective(self._objective, lambda: self._objective.bounds(deviation_N))

    def _backward(
        self,
        micro: MicroBatch,
        inputs: LossInputs,
        minibatch: _RunningMinibatch,
        *,
        step: int,
        limit: float,
        bounds: tuple[float, float],
        statistics: StepStatistics,
        shown: ShownTokens | None,
    ) -> Tensor:
        """Compute one micro-batch's loss, and add its gradient and its statistics. A collective.

        While the critics warm up, there is a forward pass only, for the statistics. Raises the errors of
        `policy_logprobs` and `token_loss`, on this rank alone.

        Args:
            micro: the micro-batch.
            inputs: the inputs of its loss, which were computed before the policy changed.
            minibatch: the minibatch of the micro-batch, whose assumed counts divide the loss.
            step: the version that is trained.
            limit: number that the objective computed from all trained tokens of the minibatch (`_limit`).
            bounds: range of the critics' disagreement that the objective computed from the whole batch (`_bounds`).
            statistics: collects the statistics of the step.
            shown: collects tokens for the run's pages, if given.

        Returns:
            int64 [2]: the number of tokens in the loss, and of sequences with such a token. A token is not in the loss
            if a correction rejected it, or if its sample is truncated and `mask_truncated` is set.
        """
        algorithm = self._config.algorithm
        with torch.set_grad_enabled(not self._warming_up):
            now = policy_logprobs(self.model, micro, entropy_gradient=algorithm.entropy_bonus > 0)
            tokens = self._objective_input(micro, now, inputs, step)._replace(limit=limit, bounds=bounds)
            if self.lag is not None:
                self.lag.add(tokens, age_of(micro.version_T, step), micro.mask_T)
            loss = token_loss(self._objective, algorithm, tokens, inputs, now.entropy_T)
            # share_T is the part of the minibatch's loss that comes from each token.
            share_T = loss.loss_T * token_weights(
                self._method.aggregation,
                loss.mask_T,
                tokens.sequence_T,
                tokens.sequences,
                total_tokens=minibatch.assumed_tokens,
                total_sequences=minibatch.assumed_sequences,
                # The aggregation `constant` divides each sequence by this number of tokens.
                constant=self._config.rollout.max_new_tokens,
            )
            if not self._warming_up:
                # FSDP averages gradients over data shards. The loss is already a share of the whole minibatch, so the
                # gradients must be summed instead: the factor `data_shards` undoes the division.
                (share_T.sum() * (self.mesh.data_shards * self.scale.value)).backward()
        age_T = to_device(age_of(micro.version_T, step), self.mesh.device)
        start_T = inputs.start_or(now)
        statistics.add(tokens, start_T, now.entropy_T, age_T, micro.kinds_S, loss, share_T)
        if shown is not None:
            shown.add(micro, tokens, start_T, now.entropy_T, loss)
        # Return tensors, and do not read a value from the GPU (such as with `.item()`): the GPU would then be idle
        # until the next micro-batch is queued.
        kept_S = torch.zeros(tokens.sequences, dtype=torch.int64, device=loss.mask_T.device)
        kept_S.index_add_(0, tokens.sequence_T, loss.mask_T.long())
        return torch.stack([kept_S.sum(), kept_S.count_nonzero()])

    def _kept_share(self, minibatch: _RunningMinibatch) -> float:
        """Return the loss's real denominator as a share of the one that the backward passes divided by.

        They differ for two reasons. The number of tokens was only assumed when the first part of the minibatch was
        trained. And a correction decides by the log-probs of the training pass itself, so the tokens that it rejects
        are known only afterwards; tokens of truncated samples, which `mask_truncated` leaves out, count as rejected.
        The caller divides the gradient by the share. If anything can be rejected, this is a collective.

        The denominator counts tokens if the aggregation is `token_mean`. All other aggregations divide by a number of
        sequences (`algorithms.sequences.token_weights`). The share is 0 if no token has a loss.
        """
        algorithm, by_tokens = self._config.algorithm, self._method.aggregation == "token_mean"
        tokens, sequences = minibatch.tokens, minibatch.sequences
        if algorithm.mask_truncated or any(correction.rejects for correction in algorithm.corrections):
            tokens, sequences = self.mesh.gather_rows(torch.stack(minibatch.kept).sum(0)).sum(0).tolist()
        if by_tokens:
            return tokens / max(minibatch.assumed_tokens, 1)
        return sequences / max(minibatch.assumed_sequences, 1)

    def _update(self, rate: float, share: float, *, trained: bool) -> float:
        """Make one update of the policy, and return the gradient's norm before clipping, which may be inf or NaN.

        A collective. `_end_minibatch` calls this, but not while only the critics learn.

        An update whose gradient is not finite is left out if `train.on_nonfinite` is "skip", or if the loss was scaled
        too far in float16. `skipped_steps` counts the updates that are left out.

        Args:
            rate: the scheduled learning rate.
            share: result of `_kept_share`.
            trained: True if at least one token of the minibatch has a loss.

        Raises:
            ContractError: the gradient is not finite and train.on_nonfinite is "stop".
        """
        train = self._config.train
        if self.lag is not None:
            rate = self.lag.limit(rate, self.version)
        norm, applied = apply_gradient(
            self.model,
            self.optimizer,
            self.scale,
            rate=rate,
            max_norm=train.max_grad_norm,
            trained=trained,
            share=share,
            on_nonfinite=train.on_nonfinite,
            name=f"step {self.version}",
            advice="look at the last metrics for a loss or ratio that runs away, lower train.learning_rate",
        )
        # An update without a token to train does not count as left out; `trained_tokens` reports it.
        self.skipped_steps += trained and not applied
        if self.lag is not None:
            self.lag.record(rate if applied else 0.0)
        return norm

    def _train_critics(self, minibatch: MinibatchPlan, inputs: Sequence[LossInputs], critic_B: np.ndarray) -> None:
        """Make one update of each critic, on the responses that this critic learns from. A collective with critics.

        Does nothing without critics. `critic_B` has, for each sample of the batch, the number of the critic that learns
        from it. Raises the errors of `Critic.update`.
        """
        for number, (critic, total_tokens) in enumerate(zip(self.critics, minibatch.critic_tokens, strict=True)):
            batches = [
                critic_batch(micro, own.return_T, own.value_MT[number], critic_B[micro.index_S] == number)
                for micro, own in zip(minibatch.micro_batches, inputs, strict=True)
                if own.return_T is not None and own.value_MT is not None  # always, in a run with critics
            ]
            critic.update(batches, total_tokens)


@dataclass
class _Part:
    """The part of a minibatch that is in one round."""

    plan: MinibatchPlan
    inputs: list[LossInputs]
    """Inputs of the loss of each micro-batch."""
    critic_B: np.ndarray
    """Number of the critic that learns from each sample of the round."""


@dataclass
class _RunningMinibatch:
    """A minibatch whose parts are being trained.

    The loss is a mean over all tokens, or sequences, of the minibatch, whose number is not known before its last part
    is there. So the backward passes divide by an assumed number, and `Trainer._kept_share` corrects the sum.
    """

    assumed_tokens: int = 0
    """Assumed number of trained tokens of the whole minibatch, over all ranks."""
    assumed_sequences: int = 0
    """Assumed number of sequences of the whole minibatch that have a trained token, over all ranks."""
    repeated: bool = False
    """True in the passes over a batch after the first one."""
    tokens: int = 0
    """Trained tokens of the parts so far, over all ranks."""
    sequences: int = 0
    """Sequences of the parts so far that have a trained token, over all ranks."""
    kept: list[Tensor] = field(default_factory=list[Tensor])
    """Results of `Trainer._backward` for each micro-batch of this rank."""
    parts: list[_Part] = field(default_factory=list[_Part])

    def add(self, part: _Part) -> None:
        """Append a part, and add its tokens and sequences to the totals.

        The first part that has trained tokens decides the assumed numbers: the parts before it have no gradient, and
        their number says nothing about the rest.
        """
        plan = part.plan
        if self.tokens == 0 and not self.repeated:
            self.assumed_tokens = self._expected(plan.total_tokens, plan.place)
            self.assumed_sequences = self._expected(plan.total_sequences, plan.place)
        self.tokens += plan.total_tokens
        self.sequences += plan.total_sequences
        self.parts.append(part)

    @staticmethod
    def _expected(count: int, place: MinibatchPlace) -> int:
        """Return the number to expect in a minibatch whose part at `place` has `count`, and the parts before it 0."""
        if place.ends:
            return count
        # `share` is the share of the minibatch's groups that the part has, so count / share is about the final number.
        # The result is the power of two next to it: a division by a power of two changes no digit of a gradient, and a
        # number near the final one keeps the gradient inside of float16's range.
        return 2 ** round(math.log2(max(count, 1) / place.share))

    def again(self) -> _RunningMinibatch:
        """Return this minibatch for another pass over its parts, which the caller adds again. The counts are known now.

        `finish_step` calls this for each pass of `updates_per_batch` after the first one.
        """
        return _RunningMinibatch(self.tokens, self.sequences, repeated=True)

    def emptied(self) -> _RunningMinibatch:
        """Return this minibatch without its samples, for a step that makes no other pass over them."""
        return replace(self, kept=[], parts=[])


class _RunningStep:
    """State of a step from its first round to its end."""

    def __init__(self, config: Config, mesh: TrainerMesh) -> None:
        self.counts = BatchCounts()
        """Tokens, ages and rewards of all rounds so far."""
        self.statistics = StepStatistics(mesh)
        """Statistics of all micro-batches that were trained so far, in all passes."""
        self.shown = ShownTokens(config.run.log_samples)
        """Numbers for the few samples that the run's pages show."""
        self.bounds = NO_BOUNDS
        """Result of `Trainer._bounds`, which is computed from the whole batch."""
        self.minibatch: _RunningMinibatch | None = None
        """Minibatch that has begun and has not ended; None if there is none."""
        self.minibatches: list[_RunningMinibatch] = []
        """Minibatches that have ended."""
        self.norms: list[float] = []
        """Gradient norm of each update."""
        self.updates = 0
        """Number of minibatches that were trained, in all passes."""
        self.flops = 0.0
        """Model FLOPs of the rounds so far on the samples of this rank, for all passes over them."""
