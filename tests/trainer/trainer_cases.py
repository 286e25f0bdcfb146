"""Tiny models, batches and reference gradients for the trainer's tests.

A *version* is the weights after a training step, and the *age* of a token is the version that a step trains minus the
version that sampled the token. A *shard* is the part of a batch that one rank trains; with one rank it is the whole
batch. A *branch* is one token sequence of a sample. The *kept set* of a token has the tokens that settings such as
top_k, or a grammar, left in the distribution from which it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flash.branches import count_trained_branches
from flash.config.tree import Config
from flash.foreign.forking import ForkedProcess, ForkServer
from flash.samples.batches import split_into_shards, split_rounds
from flash.sampling import Kept, Sampling
from flash.trainer import checkpoint, checkpoint_files, step
from flash.trainer.model.model import published_parameters
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.model.packing_check import use_own_attention
from flash.types import Batch, Outcome, Shard, ShardSample, Span, Task, Trajectory, Turn, VersionRun
from flash.waiting import run_to_end
from tests.branching import joined

VOCABULARY = 40
"""Number of token ids of the models of `write_model`."""


class Trainer(step.Trainer):
    """Trainer that shares the result of the packing check, which takes half of a trainer's start, with other trainers.

    The comparison has tests of its own, in test_packing_check.py.
    """

    packed: ClassVar[dict[tuple[object, ...], bool]] = {}
    """True if sequences may share rows, by `packing_key`."""

    @staticmethod
    def packing_key(own: Config) -> tuple[object, ...]:
        """Return everything that the packing check of this configuration depends on, except the weights."""
        model = own.model
        described = (Path(model.path) / "config.json").read_bytes()
        sizes = (model.dtype, model.head_dtype, model.max_length, own.train.max_tokens_per_microbatch)
        return (described, *sizes, own.train.activation_checkpointing, repr((own.lora, own.parallel, own.cluster)))

    def _check_packing(self) -> None:
        """Check a configuration once in this process; later trainers only take over the result."""
        key = self.packing_key(self._config)
        if key not in self.packed:
            super()._check_packing()
            self.packed[key] = takes_packed_rows(self.model)
        elif not self.packed[key]:
            use_own_attention(self.model)


def kept(content: bytes) -> checkpoint.WriteHubState:
    """Return a function that writes `content` as the hub's state; `checkpoint.save` takes it in place of a hub."""

    def write(file: Path) -> checkpoint_files.FileEntry:
        # Return the manifest entry, as `WriteHubState` demands.
        file.write_bytes(content)
        return checkpoint_files.file_entry(file, file.parent)

    return write


def state_of(path: Path) -> bytes:
    """Return the hub's state in a checkpoint."""
    with checkpoint_files.hub_state(path) as data:
        return bytes(data)


def write_model(folder: Path, *, tied: bool, **options: Any) -> Path:
    """Write a random Qwen3 of two layers as a Hugging Face folder, and return the folder.

    The weights are always the same. `tied` is True if the output layer shares its weights with the embedding. `options`
    replace values of the model's configuration.
    """
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        # Weights are larger than usual, so that the distribution is far from uniform and every error is visible.
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
    }
    Qwen3ForCausalLM(Qwen3Config(**sizes | options)).save_pretrained(folder)
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    """Return a new copy of the model in plain Hugging Face with eager attention, in float64."""
    return deepcopy(loaded_reference(folder))


@lru_cache(maxsize=8)
def loaded_reference(folder: Path) -> PreTrainedModel:
    """Return the model of `reference_model`. Loading it takes longer than copying it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def make_config(model: Path, /, **tables: dict[str, Any]) -> Config:
    """Return a configuration in float32 on the CPU. No limit ever lowers its gradient or its rate.

    `tables` replace single keys of the tables of the configuration, by table.
    """
    defaults: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "output_dir": str(model.parent), "steps": 10},
        "model": {"path": str(model), "dtype": "float32", "max_length": 64},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "train": {"learning_rate": 1e-3, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 64},
        "algorithm": {"objective": "decoupled_ppo", "lag": None},
        "cluster": {"gpus_per_node": 0},
    }
    merged = {name: defaults.get(name, {}) | tables.get(name, {}) for name in defaults | tables}
    return msgspec.convert(merged, Config)


def make_trajectory(
    group: int, member: int, versions: list[VersionRun], rng: np.random.Generator, *, reward: float, prompt: int = 4
) -> Trajectory:
    """Return random tokens: the group's prompt, and two spans of actions with one token of the environment between.

    Args:
        group: number of the group; samples of a group have the same prompt.
        member: number of the sample in its group.
        versions: versions that sampled the action tokens, one run after another. A single action token has one span.
        rng: source of the tokens after the prompt, and of the log-probs, which do not belong to any model.
        reward: reward of the sample, of which each turn gets an equal part.
        prompt: number of tokens of the prompt.
    """
    actions = sum(run.count for run in versions)
    first = (actions + 1) // 2
    spans = [Span(prompt, prompt + first)]
    if actions > first:
        spans.append(Span(prompt + first + 1, prompt + actions + 1))
    begun = np.random.default_rng(group).integers(0, VOCABULARY, prompt)
    token_ids = np.concatenate([begun, rng.integers(0, VOCABULARY, spans[-1].stop - prompt)])
    return Trajectory(
        task=Task(group * 100 + member, group, member, seed=group),
        outcome=Outcome.OK,
        reward=reward,
        token_ids=token_ids.astype("<i4").tobytes(),
        action_spans=spans,
        logprobs=(-2.0 + 0.7 * rng.standard_normal(actions)).astype("<f4").tobytes(),
        versions=versions,
        turns=[Turn("", "", reward / len(spans), 0.0, 0.0, 0.0) for _ in spans],
    )


def with_tokens(one: Trajectory, ids: np.ndarray) -> Trajectory:
    """Return the trajectory with the token ids `ids`, which must be as many as before."""
    assert len(ids) == one.length
    return replace(one, token_ids=ids.astype("<i4").tobytes())


def make_shard(trajectories: list[Trajectory], *, step: int = 0, min_version: int = 0) -> Shard:
    """Return the complete batch as one rank's shard. Tokens of versions below `min_version` are not trained."""
    return Shard(
        step=step,
        min_version=min_version,
        samples=[ShardSample(index, one) for index, one in enumerate(trajectories)],
        batch=[one.batch_sample(min_version) for one in trajectories],
        total_tokens=sum(one.trained_tokens(min_version) for one in trajectories),
        total_sequences=sum(count_trained_branches(one, min_version) for one in trajectories),
    )


def branched_shard(seed: int = 0) -> Shard:
    """Return the shard of step 3: two groups of four samples, with one to three branches each.

    Tokens of version 1 are too old to be trained. A branch, or a sample, may have no other tokens.
    """
    rng = np.random.default_rng(seed)
    trajectories = []
    for group in (0, 1):
        for member in range(4):
            runs = [
                [VersionRun(version, int(rng.integers(1, 8))) for version in (1, 2, 3)[int(rng.integers(0, 3)) :]]
                if branch or member
                else [VersionRun(1, 3)]
                for branch in range(member % 3 + 1)
            ]
            rewards = rng.normal(size=len(runs)).tolist()
            trajectories.append(
                joined(
                    [
                        make_trajectory(group, member, run, rng, reward=reward, prompt=int(rng.integers(1, 6)))
                        for run, reward in zip(runs, rewards, strict=True)
                    ]
                )
            )
    return make_shard(trajectories, step=3, min_version=2)


def random_shard(seed: int = 0) -> Shard:
    """Return the shard of step 0: four groups of 4, 3, 1 and 5 samples, with 1 to 19 action tokens each."""
    rng = np.random.default_rng(seed)
    trajectories = [
        make_trajectory(group, member, [VersionRun(0, int(rng.integers(1, 20)))], rng, reward=float(rng.normal()))
        for group, size in enumerate((4, 3, 1, 5))
        for member in range(size)
    ]
    return make_shard(trajectories)


def forked_shard(seed: int = 0) -> Shard:
    """Return the shard of step 0: three groups, whose samples and branches diverge at any token, also at actions.

    The samples are in random order, not sorted by group. Some sequences end where others continue, and some are equal.
    An action in one may be prompt in another.
    """
    rng = np.random.default_rng(seed)
    trajectories: list[Trajectory] = []
    for group, size in enumerate((6, 4, 1)):
        grown: list[np.ndarray] = []
        for member in range(size):
            branches: list[Trajectory] = []
            for _ in range(member % 3 + 1):
                runs = [VersionRun(0, int(rng.integers(1, 20)))]
                one = make_trajectory(
                    group, member, runs, rng, reward=float(rng.normal()), prompt=int(rng.integers(1, 5))
                )
                ids = one.tokens().copy()
                if grown:
                    parent = grown[int(rng.integers(len(grown)))]
                    kept = int(rng.integers(0, min(len(parent), len(ids)) + 1))
                    ids[:kept] = parent[:kept]
                grown.append(ids)
                branches.append(with_tokens(one, ids))
            trajectories.append(joined(branches))
    return make_shard([trajectories[place] for place in rng.permutation(len(trajectories))])


def aged_shard(seed: int = 0, step: int = 3, prompt: int = 4) -> Shard:
    """Return a shard with tokens of ages 0 to 3, of which tokens of age 3 are too old to be trained.

    The groups have the sizes of the groups of `random_shard`. `prompt` is the number of tokens of each prompt.
    """
    rng = np.random.default_rng(seed)
    trajectories = []
    for group, size in enumerate((4, 3, 1, 5)):
        for member in range(size):
            oldest = int(rng.integers(0, 4))
            runs = [VersionRun(step - age, int(rng.integers(1, 7))) for age in range(oldest, -1, -1)]
            one = make_trajectory(group, member, runs, rng, reward=float(rng.normal()), prompt=prompt)
            if len(one.turns) > 1:
                first = float(rng.normal())
                rewards = (first, one.reward - first)
                turns = [replace(turn, reward=reward) for turn, reward in zip(one.turns, rewards, strict=True)]
                one = replace(one, turns=turns)
            trajectories.append(one)
    return make_shard(trajectories, step=step, min_version=step - 2)


def trainer_at(version: int, model: Path, **tables: dict[str, Any]) -> Trainer:
    """Return a new trainer whose weights count as this version."""
    trainer = Trainer(make_config(model, **tables))
    trainer.version = version
    return trainer


def frozen_at(version: int, model: Path, **tables: dict[str, Any]) -> Trainer:
    """Return a new trainer whose steps change neither its weights nor the gradients of later steps.

    The learning rate is too small to change a float32 weight. β1 is 0, so Adam's first moment is the last gradient.
    """
    frozen = {"learning_rate": 1e-30, "betas": [0.0, 0.95], "max_grad_norm": 1e9, "max_tokens_per_microbatch": 64}
    return trainer_at(version, model, **tables | {"train": frozen | tables.get("train", {})})


def sampled_at(shard: Shard, *temperatures: float) -> Shard:
    """Return the shard with its groups sampled at these temperatures in turn."""
    places = [sample.trajectory.task.group_id % len(temperatures) for sample in shard.samples]
    heated = [at(temperatures[place], sample.trajectory) for place, sample in zip(places, shard.samples, strict=True)]
    return replace(shard, samples=[ShardSample(index, one) for index, one in enumerate(heated)])


def at(temperature: float, one: Trajectory) -> Trajectory:
    """Return the trajectory, sampled at another temperature."""
    return replace(one, task=replace(one.task, sampling=Sampling(temperature)))


def drawn_from_some(one: Trajectory, sampling: Sampling) -> Trajectory:
    """Return the trajectory with each token drawn from a kept set of one to four tokens, with these settings."""
    rng = np.random.default_rng(one.task.task_id)
    drawn = one.tokens()[one.action_mask()]
    others = [
        [token for token in rng.permutation(VOCABULARY).tolist() if token != own][: rng.integers(0, 4)] for own in drawn
    ]
    kept = Kept.of([token for each in others for token in each], [len(each) for each in others])
    return replace(one, task=replace(one.task, sampling=sampling), kept=kept)


def drawn_under_grammar(one: Trajectory) -> Trajectory:
    """Return the trajectory with each token drawn from a few tokens, from most tokens, or from all."""
    rng = np.random.default_rng(one.task.task_id)
    drawn = one.tokens()[one.action_mask()]
    masks: list[bytes | None] = []
    for token in drawn:
        kept = rng.random(8 * -(-VOCABULARY // 8)) < rng.choice([0.02, 0.8])
        kept[token] = True
        masks.append(None if rng.random() < 0.3 else np.packbits(kept, bitorder="little").tobytes())
    return replace(one, kept=Kept.of_masks(masks, drawn.tolist()))


def partly_kept(shard: Shard) -> Shard:
    """Return the shard with two of three samples drawn from a part of the vocabulary.

    By the index of the sample modulo 3: 0 is unchanged, 1 was drawn with top_k and changed logits, and 2 under a
    grammar.
    """
    how = Sampling(0.8, top_k=4, logit_bias=((3, 1.0), (7, -2.0)), repetition_penalty=1.5)
    ways = (lambda one: one, lambda one: drawn_from_some(one, how), drawn_under_grammar)
    drawn = [ways[one.index % 3](one.trajectory) for one in shard.samples]
    return replace(shard, samples=[ShardSample(index, one) for index, one in enumerate(drawn)])


def part_of(shard: Shard, indices: list[int]) -> Shard:
    """Return the shard of a rank that has the samples with these indices. The facts about the batch are unchanged."""
    return msgspec.structs.replace(shard, samples=[shard.samples[index] for index in indices])


def rounds_of(shard: Shard, sizes: list[int], shards: int = 1, minibatches: int = 1) -> list[list[Shard]]:
    """Return the shards of each round of a complete batch, as the hub deals them: a list per round, one per data shard.

    Args:
        shard: the complete batch.
        sizes: number of samples of each round. If it is empty, the batch is one round.
        shards: number of data shards, the ranks with different samples.
        minibatches: number of updates of the step.
    """
    trajectories = [sample.trajectory for sample in shard.samples]
    batch = Batch(shard.step, shard.min_version, trajectories, shard.earlier, sizes)
    return [run_to_end(split_into_shards(one, shards, minibatches, place)) for one, place in split_rounds(batch)]


def train_in_rounds(trainer: step.Trainer, rounds: list[Shard]) -> dict[str, float]:
    """Train a step whose rounds have these shards of the trainer's rank, and return the metrics."""
    for shard in rounds:
        trainer.train_round(shard)
    return trainer.finish_step()


class Rank(ForkedProcess):
    """Process of one of several ranks, forked from a server that has imported the ranks' modules."""

    server = ForkServer(
        *(
            f"tests.trainer.{name}_ranks"
            for name in ("two", "two_critic", "two_logprob", "parallel", "absent", "card", "streamed")
        )
    )


def run_ranks(main: Callable[..., None], count: int, *arguments: object, after: Sequence[object] = ()) -> None:
    """Run main(arguments…, rank, after…) in a process for each of `count` ranks. All must exit with 0.

    A rank has 300 seconds. At the end, also after a failure, all processes are killed.
    """
    ranks = [Rank(target=main, args=(*arguments, rank, *after), daemon=True) for rank in range(count)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300)
        assert [rank.exitcode for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()


def gradient_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the gradient of the only step so far, by parameter name.

    Adam's first moment is (1 − β1) times this gradient.
    """
    share = 1 - trainer.optimizer.param_groups[0]["betas"][0]
    return {
        name: trainer.optimizer.state[parameter]["exp_avg"].full_tensor() / share
        for name, parameter in published_parameters(trainer.model)
    }


def moments_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the moments of AdamW, by their kinds and parameters."""
    return {
        f"{moment} of {name}": whole(trainer.optimizer.state[parameter][moment]).clone()
        for name, parameter in published_parameters(trainer.model)
        for moment in ("exp_avg", "exp_avg_sq")
    }


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return full copies of the policy's weights, by parameter name."""
    return {name: whole(value).clone() for name, value in trainer.model.named_parameters()}


def whole(sharded: Any) -> torch.Tensor:
    """Return the full tensor of which the ranks hold parts."""
    return sharded.detach().full_tensor()


def local(sharded: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return sharded.to_local()


def relative_error(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the norm of the difference divided by the norm of the expected, over all parameters together."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


def unpacked_logprobs(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """Return the log-prob of each action token, from a forward pass over this sequence alone.

    The distribution is the one that the token was sampled from: after the logit biases, the repetition penalty, the
    temperature and the kept set.
    """
    how, tokens = trajectory.task.sampling, torch.tensor(trajectory.tokens().tolist())
    logits = model(input_ids=tokens[None]).logits[0]
    positions = np.flatnonzero(trajectory.action_mask())
    found: list[torch.Tensor] = []
    for place, at in enumerate(positions):
        drawn = logits[at - 1]
        drawn = drawn + torch.zeros_like(drawn).index_put(
            (torch.tensor([token for token, _ in how.logit_bias], dtype=torch.long),),
            torch.tensor([bias for _, bias in how.logit_bias], dtype=drawn.dtype),
        )
        seen = torch.isin(torch.arange(len(drawn)), tokens[:at])
        penalised = torch.where(drawn > 0, drawn / how.repetition_penalty, drawn * how.repetition_penalty)
        drawn = torch.where(seen, penalised, drawn) / how.temperature
        if trajectory.kept is not None:
            own = trajectory.kept.part(place, place + 1)
            others, (count,) = own.numbers()
            kept = torch.isin(torch.arange(len(drawn)), torch.tensor([*others.tolist(), tokens[at]]))
            if count < 0:
                bits = [np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little") for mask in own.masks]
                kept = torch.from_numpy(bits[0][: len(drawn)] > 0) if bits else torch.ones(len(drawn), dtype=torch.bool)
            drawn = drawn.where(kept, -torch.inf)
        found.append(drawn.log_softmax(-1)[tokens[at]])
    return torch.stack(found)
