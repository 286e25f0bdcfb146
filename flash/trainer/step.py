"""One training step: a shard in, new weights and metrics out.

plan → what other policies and the critics say, no gradient → token advantages → per minibatch, once or more often:
forward and backward, one update. Every rank is given its part of the same batch and makes the same collectives in the
same order; a fault that one rank finds in its part is raised on all. Losses are weighed with denominators of the whole
batch, so the gradient does not depend on how the batch was cut into ranks and micro-batches.

Shape legend: T = action tokens of a micro-batch, N = trained tokens of a minibatch.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.base import PackedTokens
from algorithms.rhythm import Rhythm
from algorithms.sequences import token_weights
from flash.ages import age_of
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.trainer.critic import Critic, check_tokenizer, critic_metrics, lesson_of
from flash.trainer.ewma import start_average, take_over, update_average
from flash.trainer.firstpass import (
    Models,
    TokenFacts,
    asks_policy,
    facts_in_rhythm,
    first_pass,
)
from flash.trainer.loss import LossLimits, corrected, first_logprobs, pack_tokens, token_loss
from flash.trainer.mesh import TrainerMesh, to_device, trainer_mesh
from flash.trainer.model.adapters import empty_policy, fill_policy, fingerprint_of
from flash.trainer.model.canary import CanaryMaker, draw_canary
from flash.trainer.model.logprobs import TokenLogprobs, policy_logprobs
from flash.trainer.model.model import load_plain, load_sharded, recompute_mode, reshard, shard_model
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.model.packing_check import check_packing, replay_routing, use_own_attention
from flash.trainer.objective import make_objective, method_of
from flash.trainer.optimizer import LagLimiter, LossScale, apply_gradient, learning_rate, make_optimizer
from flash.trainer.packing import MicroBatch
from flash.trainer.performance import ModelArithmetic
from flash.trainer.plan import MinibatchPlan, StepPlan, plan_step
from flash.trainer.rhythm import RhythmPass
from flash.trainer.statistics import StepStatistics, TokenLook, batch_metrics
from flash.types import Shard, TrainedSample


class Trainer:
    """The policy, its optimizer and its version. The default process group must consist of all trainer ranks."""

    def __init__(self, config: Config) -> None:
        """Load and shard the models.

        Raises:
            ConfigError: a model or the objective cannot be made from the configuration.
        """
        self._config = config
        self._objective = make_objective(config.algorithm)
        self._method = method_of(config, self._objective)
        device: Literal["cpu", "cuda"] = "cuda" if config.gpus_per_node > 0 else "cpu"
        offloads = "weights" in config.train.offload
        self.mesh = mesh = trainer_mesh(device, config.parallel, config.deadlines.collective, offloads=offloads)
        plain = load_plain(config.model, mesh)
        text = draw_canary(plain, config)
        recompute = recompute_mode(config.train)
        policy = empty_policy(config)
        self._arithmetic = ModelArithmetic.of(policy)
        self.model = shard_model(policy, mesh, config.model, recompute=recompute)
        self.base: tuple[int, ...] = () if config.lora is None else fingerprint_of(plain)
        """Of the weights at `model.path`, where adapters are trained and these stay."""
        self.alpha = config.lora and config.lora.alpha
        fill_policy(self.model, plain, config.run.seed)
        del plain
        if config.lora is not None:
            gc.collect()  # FSDP's circles hold the base in float32
            if device == "cuda":
                torch.cuda.empty_cache()  # an engine may share the card
        self._check_packing()
        self.canaries = CanaryMaker(text, self.model, config)
        """What engines are held to; the text and the tolerance are those of the weights at `model.path`."""
        self.optimizer = make_optimizer(self.model, config.train)
        self.scale = LossScale(config.model.dtype)
        if self._method.critics and config.critic is not None and config.critic.path is not None:
            check_tokenizer(config, "critic.path", config.critic.path)
        self.critics = [Critic(config, mesh) for _ in range(self._method.critics)]
        """Empty where advantages need none."""
        self.ewma: dict[str, Tensor] | None = None
        """The average of the weights by parameter name, sharded alike, where the proximal policy is one."""
        if self._method.proximal == "ewma":
            self.ewma = start_average(self.model)
        self.rhythm: RhythmPass | None = None
        """Where advantages follow the policy's attention."""
        if config.algorithm.rhythm is not None:
            if not takes_packed_rows(self.model):
                raise ConfigError("algorithm.rhythm: expected none with this model.path, which attends by itself")
            self.rhythm = _look_once(config.algorithm.rhythm, self.model)
        self.lag: LagLimiter | None = None
        """Where learning rates are held to a budget of divergence."""
        # Without it no update ever meets tokens of a policy other than the one that it changes.
        lags = config.train.max_age > 0 or config.train.minibatches * config.train.updates_per_batch > 1
        if config.algorithm.lag is not None and lags:
            self.lag = LagLimiter(config.algorithm.lag, config.train, config.run.steps, mesh)
        kl, teacher = config.algorithm.kl, config.algorithm.teacher
        self.reference = kl and _load_reference(config, mesh, self.model, kl.reference or config.model.path)
        """What a KL pulls to, sharded like the policy; with `kl.refresh`, what that was some steps ago."""
        _check_refreshed(self.reference, self.model, config)
        self._teacher: PreTrainedModel | None = None
        if teacher is not None and teacher.path is not None:
            self._teacher = _load_frozen(config, mesh, "algorithm.teacher.path", teacher.path)
        if config.rollout.routing_replay:
            replay_routing(self.model)
        self._share_rows = _share_rows(mesh, self.model, self.critics, self.reference, self._teacher)
        """Whether sequences share micro-batches, which all models are given."""
        self.version = 0
        """Policy version of the weights: the number of steps taken."""
        self.skipped_steps = 0
        """Optimizer updates left out so far: their gradient was not finite, or they had no token to train."""
        self.flops = 0.0
        """Model FLOPs of the last step on the samples of this rank, as `ModelArithmetic` counts them."""
        self.seen: list[TrainedSample] = []
        """On rank 0: what the last step found at the tokens of the samples that the run shows."""

    def _check_packing(self) -> None:
        check_packing(self.model, self._config)

    @property
    def refreshes(self) -> bool:
        """Whether the reference is one of the run's own policies, sooner or later."""
        kl = self._config.algorithm.kl
        return kl is not None and kl.refresh is not None

    def train_step(self, shard: Shard) -> dict[str, float]:
        """Train on one batch and make the next version. Returns metrics over all ranks, the same on each.

        While the critics warm up the policy keeps its weights, and its version counts on.

        Raises:
            ContractError: the batch breaks the age contract or its own counts, has a number that is not finite, or a
                gradient is not finite and train.on_nonfinite is "stop". The version stays what it was.
        """
        plan = plan_step(shard, self._config, self._method, self.version, self.mesh, share_rows=self._share_rows)
        along = self._along(plan)
        rhythm = None if along else self.rhythm
        models = Models(self.mesh, self.model, self.reference, self._teacher, self.critics, self.ewma, rhythm)
        facts = first_pass(plan, self._config, self._method, models)
        bounds = self._bounds(plan, facts)
        rate = learning_rate(self._config.train, self._config.run.steps, self.version)
        statistics, norms = StepStatistics(self.mesh), list[float]()
        look = TokenLook(shard, self._config.run.log_samples)
        passes = self._config.train.updates_per_batch
        updates = [*zip(plan.minibatches, facts, strict=True)] * passes
        for index, (minibatch, known) in enumerate(updates):
            limits = LossLimits(self._limit(minibatch, known, shard.step, updated=index > 0), bounds)
            looking = look if index < len(plan.minibatches) else None
            kept = [
                self._backward(micro, facts_of, minibatch, shard.step, limits, statistics, looking, along)
                for micro, facts_of in zip(minibatch.micro_batches, known, strict=True)
            ]
            share = self._kept_share(minibatch, kept)
            statistics.end_minibatch(share)
            self._train_critics(minibatch, known, plan.critic_B)
            if not self._warming_up:
                norms.append(self._update(rate, share, trained=minibatch.total_tokens > 0 and share > 0))
        micro_batches = [micro for minibatch in plan.minibatches for micro in minibatch.micro_batches]
        self.flops = passes * self._arithmetic.flops(micro_batches, backward=not self._warming_up)
        metrics = batch_metrics(shard, plan) | statistics.metrics(len(plan.minibatches), passes)
        metrics |= self._critic_metrics()
        if self.lag is not None:
            metrics |= self.lag.finish(self.version)
        self._finish()
        self.seen = look.gather(self.mesh)
        finite = [norm for norm in norms if math.isfinite(norm)]
        if self.rhythm is not None:
            metrics |= self.rhythm.report(self.mesh)
        return metrics | {
            "grad_norm": sum(finite) / len(finite) if finite else 0.0,
            "learning_rate": rate,
            "skipped_steps": float(self.skipped_steps),
            **({"loss_scale": self.scale.value} if self.scale.active else {}),
        }

    @torch.no_grad()
    def mean_loss(self, shard: Shard) -> float:
        """Mean −log-prob of the tokens of a batch that could be trained now, over all ranks. A collective.

        Raises:
            ContractError: as `train_step`.
        """
        plan = plan_step(shard, self._config, self._method, self.version, self.mesh, share_rows=self._share_rows)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for micro in (micro for minibatch in plan.minibatches for micro in minibatch.micro_batches):
            logp_T = policy_logprobs(self.model, micro).logp_T.double()
            total -= logp_T.where(self._tensor(micro.mask_T), 0.0).sum()
        reshard(self.model)
        self.mesh.reduce_sum(total)
        return total.item() / max(sum(plan.shard_tokens), 1)

    def _along(self, plan: StepPlan) -> RhythmPass | None:
        """What looks on at the training pass itself, where this is the first over the weights that start the step."""
        updates = len(plan.minibatches) * self._config.train.updates_per_batch
        if self.rhythm is None or not self.rhythm.settled or self._objective.limits or updates > 1:
            return None
        again = self._config.train.activation_checkpointing or asks_policy(plan, self._config, self._method)
        return None if again else self.rhythm

    @property
    def _warming_up(self) -> bool:
        """Whether only the critics learn in this step."""
        config = self._config.critic
        return bool(self.critics) and config is not None and self.version < config.warmup_steps

    def _finish(self) -> None:
        """The weights are those of the next version."""
        if self._warming_up:
            reshard(self.model)
        self.version += 1
        if self.ewma is not None:
            update_average(self.ewma, self.model, self._objective.proximal_decay, self.version)
        kl = self._config.algorithm.kl
        if self.reference is not None and kl is not None and kl.refresh and self.version % kl.refresh == 0:
            take_over(dict(self.reference.named_parameters()), self.model)

    @torch.no_grad()
    def _limit(self, minibatch: MinibatchPlan, known: Sequence[TokenFacts], step: int, *, updated: bool) -> float:
        """What the objective makes of all trained tokens of the minibatch, of all ranks; inf where it does not ask."""
        if not self._objective.limits or minibatch.total_tokens == 0:
            return math.inf
        pairs: list[Tensor] = []
        for micro, facts in zip(minibatch.micro_batches, known, strict=True):
            if updated or facts.first_T is None:
                now = policy_logprobs(self.model, micro)
            else:
                now = TokenLogprobs(facts.first_T, torch.zeros_like(facts.first_T))
            tokens = self._packed(micro, now, facts, step, LossLimits())
            # A rejected token is as if never sampled: without an advantage no rule counts it.
            _, keep_T = corrected(self._config.algorithm, tokens, facts)
            pair = torch.stack([tokens.logp_T - tokens.behaviour_T, tokens.advantage_T.where(keep_T, 0.0)])
            pairs.append(pair[:, tokens.mask_T])
        log_ratio_N, advantage_N = self.mesh.gather_ragged(torch.cat(pairs, dim=1), minibatch.shard_tokens)
        return self._objective.limit(log_ratio_N, advantage_N)

    def _packed(
        self, micro: MicroBatch, now: TokenLogprobs, facts: TokenFacts, step: int, limits: LossLimits
    ) -> PackedTokens:
        proximal, teacher = self._method.proximal, self._config.algorithm.teacher
        return pack_tokens(micro, now, facts, proximal, step=step, limits=limits, teacher=teacher)

    def _bounds(self, plan: StepPlan, facts: Sequence[Sequence[TokenFacts]]) -> tuple[float, float]:
        """What the objective makes of the critics' disagreement on all trained tokens of the batch, of all ranks."""
        asked = self._objective.critics > 1 and self._method.critics > 1
        if not asked or sum(plan.shard_tokens) == 0:
            return LossLimits().bounds
        deviations = [
            known.deviation_T[to_device(micro.mask_T, known.deviation_T.device)]
            for minibatch, row in zip(plan.minibatches, facts, strict=True)
            for micro, known in zip(minibatch.micro_batches, row, strict=True)
        ]
        return self._objective.bounds(self.mesh.gather_ragged(torch.cat(deviations)[None], plan.shard_tokens)[0])

    def _backward(
        self,
        micro: MicroBatch,
        facts: TokenFacts,
        whole: MinibatchPlan,
        step: int,
        limits: LossLimits,
        statistics: StepStatistics,
        look: TokenLook | None,
        along: RhythmPass | None,
    ) -> Tensor:
        """Add one micro-batch's share of the gradient, and book its statistics. Returns its kept tokens, sequences."""
        algorithm = self._config.algorithm
        with torch.set_grad_enabled(not self._warming_up):
            entropy_gradient = algorithm.entropy_bonus > 0
            watch = None if along is None else along.watch(micro)
            now = policy_logprobs(self.model, micro, entropy_gradient=entropy_gradient, watch=watch)
            if along is not None and watch is not None:
                facts = facts_in_rhythm(facts, along, watch)
            tokens = self._packed(micro, now, facts, step, limits)
            if self.lag is not None:
                self.lag.add(tokens, age_of(micro.version_T, step), micro.mask_T)
            loss = token_loss(self._objective, algorithm, tokens, facts, now.entropy_T)
            share_T = loss.loss_T * self._weights(tokens._replace(mask_T=loss.mask_T), whole)
            if not self._warming_up:
                # FSDP averages gradients over data shards; the loss is already a share of the whole batch.
                (share_T.sum() * (self.mesh.data_shards * self.scale.value)).backward()
        age_T = self._tensor(age_of(micro.version_T, step))
        first_T = first_logprobs(now, facts)
        statistics.add(tokens, first_T, now.entropy_T, age_T, micro.kinds_S, loss, share_T)
        if look is not None:
            look.add(micro, tokens, first_T, now.entropy_T, loss)
        # Nothing here waits for the GPU, which so has the next micro-batch to work on before it has done this one.
        kept_S = torch.zeros(tokens.sequences, dtype=torch.int64, device=loss.mask_T.device)
        kept_S.index_add_(0, tokens.sequence_T, loss.mask_T.long())
        return torch.stack([kept_S.sum(), kept_S.count_nonzero()])

    def _kept_share(self, whole: MinibatchPlan, kept: Sequence[Tensor]) -> float:
        """The part of the loss's denominator that no correction rejected, over all ranks.

        What is rejected follows from the log-probs of the very pass that trains, so it is known only afterwards.
        """
        algorithm = self._config.algorithm
        if not algorithm.mask_truncated and not any(correction.rejects for correction in algorithm.corrections):
            return 1.0
        tokens, sequences = self.mesh.gather_rows(torch.stack(list(kept)).sum(0)).sum(0).tolist()
        if self._method.aggregation == "token_mean":
            return tokens / max(whole.total_tokens, 1)
        return sequences / max(whole.total_sequences, 1)

    def _weights(self, tokens: PackedTokens, whole: MinibatchPlan) -> Tensor:
        """[T]: what each token's loss weighs in the loss of the minibatch."""
        return token_weights(
            self._method.aggregation,
            tokens.mask_T,
            tokens.sequence_T,
            tokens.sequences,
            total_tokens=whole.total_tokens,
            total_sequences=whole.total_sequences,
            constant=self._config.algorithm.constant_length or self._config.rollout.max_new_tokens,
        )

    def _update(self, rate: float, share: float, *, trained: bool) -> float:
        """One update of the policy. Returns the gradient's norm before clipping."""
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
        # A batch whose every token is masked has no update to leave out; `trained_tokens` is 0 for it.
        self.skipped_steps += trained and not applied
        if self.lag is not None:
            self.lag.record(rate if applied else 0.0)
        return norm

    def _train_critics(self, minibatch: MinibatchPlan, known: Sequence[TokenFacts], critic_B: np.ndarray) -> None:
        """One update of each critic, on the responses that were dealt to it."""
        for index, (critic, tokens) in enumerate(zip(self.critics, minibatch.critic_tokens, strict=True)):
            lessons = [
                lesson_of(micro, facts.return_T, facts.value_MT[index], critic_B[micro.index_S] == index)
                for micro, facts in zip(minibatch.micro_batches, known, strict=True)
                if facts.return_T is not None and facts.value_MT is not None
            ]
            critic.update(lessons, tokens)

    def _critic_metrics(self) -> dict[str, float]:
        if not self.critics:
            return {}
        return critic_metrics(self.critics) | {"critic_warmup": float(self._warming_up)}

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.mesh.device)


def _share_rows(
    mesh: TrainerMesh, policy: PreTrainedModel, critics: Sequence[Critic], *frozen: PreTrainedModel | None
) -> bool:
    """Whether all of them take several sequences at once. Critics of the policy's kind attend as it does.

    Raises:
        ConfigError: critics do not, and rows are over several ranks.
    """
    backbones = [critic.model.backbone for critic in critics]
    for backbone in backbones:
        if not takes_packed_rows(policy) or backbone.config.model_type != policy.config.get_text_config().model_type:
            # Nothing has looked whether it may share a row.
            use_own_attention(backbone)
    together = all(takes_packed_rows(one) for one in (policy, *backbones, *frozen) if one is not None)
    if not together and mesh.context is not None:
        raise ConfigError("parallel.context: expected 1 with this critic.path, which is given one sequence at a time")
    return together


@torch.no_grad()
def _look_once(options: Rhythm, model: PreTrainedModel) -> RhythmPass:
    """Whether the policy's attention can be looked at is known before the first batch."""
    rhythm = RhythmPass(options, model)
    reshard(model)
    return rhythm


def _load_reference(config: Config, mesh: TrainerMesh, policy: PreTrainedModel, path: str) -> PreTrainedModel:
    """The reference policy of a KL, or the policy itself, where its base is meant."""
    if config.lora is not None and path == config.model.path:
        return policy
    return _load_frozen(config, mesh, "algorithm.kl.reference", path)


def _load_frozen(config: Config, mesh: TrainerMesh, key: str, path: str) -> PreTrainedModel:
    """A model that says something of the policy's tokens and is never trained, sharded like the policy."""
    described = msgspec.structs.replace(config.model, path=path)
    try:
        check_tokenizer(config, key, path)
        model = load_sharded(described, mesh).requires_grad_(False)
        check_packing(model, config)
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('model.path: ').removeprefix(key + ': ')}") from error
    return model


def _check_refreshed(reference: PreTrainedModel | None, policy: PreTrainedModel, config: Config) -> None:
    """A reference that the policy is to replace is made like it."""
    kl = config.algorithm.kl
    if reference is None or kl is None or kl.refresh is None:
        return
    own, other = ({name: value.shape for name, value in one.named_parameters()} for one in (policy, reference))
    if own != other:
        name = min(own.items() ^ other.items())[0]
        raise ConfigError(
            f"algorithm.kl.refresh: the policy cannot become the reference {kl.reference}, whose {name} has the shape "
            f"{tuple(other.get(name, ()))} and not {tuple(own.get(name, ()))}; leave one of the two out"
        )
