"""What log-probs, entropies and the objective cost.

Output layer: from hidden states of 1,024 numbers to log-probs and entropies over a vocabulary of 151,936 (the sizes of
Qwen3-0.6B), and back to the gradients of the log-probs' sum, weighted; in the chunks that training uses, and over whole
logits as one would write it down. Each case runs in a process of its own. The most memory is beyond the inputs; in both
ways it includes the gradients of hidden states (tokens × 1,024) and weight (0.58 GiB in float32). With a quarter of the
tokens, the chunked way should need hardly less. Where there is a GPU this part runs there, in bfloat16.

Step: real training steps of the trainer, for every objective, on the tiny model of the examples and batches of about
4,000 trained tokens in two minibatches. `objective` is what lies between the log-probs and the gradient that comes back
to them: objective, aggregation and their backward pass, for ppo also the critic's loss. `rest` is all that is neither
that, nor a pass through a model, nor an optimizer update: advantages, packing, checks, statistics. Both together must
leave nearly all of the step; with a larger model they take less of it.

Times on the CPU are processor time of one thread, so that other work on the machine stays out of them.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np

from algorithms import OBJECTIVES
from benchmarks.form import Args, Row, main
from flash.config.tree import Config
from flash.trainer.model.tiny_model import CONTEXT, HEAD_DIM
from flash.types import Outcome, Shard, ShardSample, Span, Task, Trajectory, Turn, VersionRun

if TYPE_CHECKING:
    from torch import Tensor

    from flash.trainer.step import Trainer

VOCABULARY, WIDTH = 151_936, 1024
"""Of Qwen3-0.6B."""
TEMPERATURE = 0.8
TOKENS, QUICK_TOKENS = 4096, 256
"""Of the comparison: whole logits of 4,096 tokens take about 7 GiB at their peak, with the weight gradient."""
GIB = 2**30
Result = TypeVar("Result")


# -- the output layer ------------------------------------------------------------------------------------------------


class LayerCase(msgspec.Struct, frozen=True):
    """One way to compute log-probs and entropies of so many tokens, forwards and backwards."""

    way: Literal["chunks", "whole"]
    tokens: int
    vocabulary: int = VOCABULARY


class LayerCost(msgspec.Struct, frozen=True):
    """What a way through the output layer took, and what it gave."""

    seconds: float
    peak_bytes: int
    """Beyond the inputs."""
    total: float
    """Sum of log-probs and entropies, to compare the ways."""


def layer_cost(case: LayerCase) -> LayerCost:
    """Measure one case, in a process that has done nothing else."""
    import torch

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = time.perf_counter if device == "cuda" else time.process_time
    generator = torch.Generator(device).manual_seed(0)

    def factor(rows: int) -> Tensor:
        # In place: the peak so far is what the peak of the measured part is compared with.
        drawn = torch.randn(rows, WIDTH, generator=generator, device=device).mul_(WIDTH**-0.25)
        return drawn.to(torch.bfloat16 if device == "cuda" else torch.float32).requires_grad_()

    hidden_TD, weight_VD = factor(case.tokens), factor(case.vocabulary)
    target_T = torch.randint(0, case.vocabulary, (case.tokens,), generator=generator, device=device)
    grad_T = torch.randn(case.tokens, generator=generator, device=device)
    way = {"chunks": in_chunks, "whole": over_whole_logits}[case.way]
    # Imports and thread pools are neither timed nor weighed; on a small vocabulary, for the same reason as above.
    small_T = target_T[:8] % 8
    way(hidden_TD[:8], weight_VD[:8], small_T)[0].sum().backward()
    before = memory_now(device)
    start = clock()
    logp_T, entropy_T = way(hidden_TD, weight_VD, target_T)
    (logp_T @ grad_T).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - start
    peak = memory_peak(device)
    return LayerCost(seconds, peak - before, float(logp_T.detach().double().sum() + entropy_T.double().sum()))


def in_chunks(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """As training does it."""
    import torch

    from flash.trainer.model.logprobs import selected_logprobs

    temperature_T = torch.full_like(target_T, TEMPERATURE, dtype=torch.float32)
    return selected_logprobs(hidden_TD, weight_VD, None, target_T, temperature_T=temperature_T, entropy_gradient=False)


def over_whole_logits(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """As one would write it down, with the entropy outside of the gradient."""
    log_share_TV = ((hidden_TD @ weight_VD.T).float() / TEMPERATURE).log_softmax(-1)
    logp_T = log_share_TV.gather(-1, target_T[:, None])[:, 0]
    with_no_gradient = log_share_TV.detach()
    return logp_T, -(with_no_gradient.exp() * with_no_gradient).sum(-1)


def memory_now(device: str) -> int:
    """Bytes held on a GPU now, from where the next peak counts; on a CPU the most so far."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return memory_peak(device)


def memory_peak(device: str) -> int:
    """Most bytes held so far."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(call: Callable[[Any], Result], argument: Any) -> Result:
    """The result of a call in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, argument).result()


def layer_rows(args: Args) -> list[Row]:
    """The chunked way against whole logits, and alone on fewer tokens."""
    tokens = QUICK_TOKENS if args.quick else TOKENS
    ours, whole, fewer = (
        apart(layer_cost, case)
        for case in (LayerCase("chunks", tokens), LayerCase("whole", tokens), LayerCase("chunks", tokens // 4))
    )
    assert math.isclose(ours.total, whole.total, rel_tol=1e-3), (ours.total, whole.total)
    logits_gib = tokens * VOCABULARY * 4 / GIB
    case = f"{tokens:,} tokens × {VOCABULARY:,}"
    less = f"{tokens // 4:,} tokens × {VOCABULARY:,}"
    # A quick run's few tokens fit into one chunk: there the memory shows nothing.
    goal = None if args.quick else logits_gib
    return [
        Row(case, "forward_backward_s", "s", ours.seconds, whole.seconds),
        Row(case, "speedup", "×", whole.seconds / ours.seconds),
        Row(case, "peak_gib", "GiB", ours.peak_bytes / GIB, whole.peak_bytes / GIB, goal),
        Row(case, "logits_gib", "GiB", logits_gib),
        Row(less, "forward_backward_s", "s", fewer.seconds),
        Row(less, "peak_gib", "GiB", fewer.peak_bytes / GIB),
    ]


# -- a training step -------------------------------------------------------------------------------------------------

GROUPS, GROUP_SIZE = 16, 8
PROMPT, ANSWERS = 12, (16, 48)
"""Tokens: of a prompt, and the range of an answer's. A batch has about 4,000 trained tokens."""
LAYERS, MODEL_WIDTH, TINY_VOCABULARY = 3, 128, 20
"""Of the examples' tiny model."""
QUICK_OBJECTIVES = ("grpo", "ppo", "m2po")
"""Of quick runs: without more, with a critic, with a limit over the whole minibatch."""
LEFT = 0.97
"""Goal: the share of a step that remains for the model and the optimizer."""


class Watch:
    """Where the time of training steps goes, seen from hooks around models and optimizers."""

    def __init__(self, trainer: Trainer) -> None:
        self.model_s = 0.0
        """Forward and backward passes of the policy, output layer included, and of the critics."""
        self.objective_s = 0.0
        """From a model's answer to the gradient that comes back to it."""
        self.optimizer_s = 0.0
        self._since = 0.0
        parts = [(trainer.model, trainer.optimizer)]
        parts += [(critic.model, critic.optimizer) for critic in trainer.critics]
        for model, optimizer in parts:
            model.register_forward_pre_hook(self._begins)
            model.register_forward_hook(self._answers)
            optimizer.register_step_pre_hook(self._begins)
            optimizer.register_step_post_hook(self._updated)

    def clear(self) -> None:
        """Count from zero, before a step."""
        self.model_s = self.objective_s = self.optimizer_s = 0.0

    def _begins(self, *_: Any) -> None:
        self._since = time.process_time()

    def _passed(self) -> float:
        """Seconds since the last event."""
        since, self._since = self._since, time.process_time()
        return self._since - since

    def _answers(self, _model: Any, _args: Any, output: Any) -> None:
        self.model_s += self._passed()
        answer = getattr(output, "logits", output)
        if answer.requires_grad:
            answer.register_hook(self._gradient_comes)

    def _gradient_comes(self, _grad: Tensor) -> None:
        from torch.autograd import Variable

        self.objective_s += self._passed()
        Variable._execution_engine.queue_callback(self._backward_ends)  # pyright: ignore[reportPrivateUsage]

    def _backward_ends(self) -> None:
        self.model_s += self._passed()

    def _updated(self, *_: Any) -> None:
        self.optimizer_s += self._passed()


class StepCase(msgspec.Struct, frozen=True):
    """Objectives to measure, over how many steps each, and of how many groups."""

    objectives: list[str]
    steps: int
    groups: int = GROUPS


class StepCost(msgspec.Struct, frozen=True):
    """Medians over steps, in seconds."""

    step_s: float
    model_s: float
    objective_s: float
    optimizer_s: float

    @property
    def rest_s(self) -> float:
        """Advantages, and with them packing, checks, statistics and the norm of the gradient."""
        return self.step_s - self.model_s - self.objective_s - self.optimizer_s


def step_costs(case: StepCase) -> dict[str, StepCost]:
    """By objective. Makes a process group, so it wants a process of its own."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        costs = {name: step_cost(name, folder, case) for name in case.objectives}
    dist.destroy_process_group()
    return costs


def make_tiny_model(folder: str, layers: int = LAYERS) -> None:
    """Random weights: what a step costs does not depend on them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = MODEL_WIDTH // HEAD_DIM
    shape = Qwen3Config(
        vocab_size=TINY_VOCABULARY,
        hidden_size=MODEL_WIDTH,
        intermediate_size=4 * MODEL_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)


def step_cost(objective: str, folder: str, case: StepCase) -> StepCost:
    """Some steps with one objective, after one that is not counted."""
    from flash.trainer.step import Trainer

    trainer = Trainer(step_config(objective, folder, case.steps + 1))
    watch = Watch(trainer)
    costs: list[tuple[float, ...]] = []
    for step in range(case.steps + 1):
        shard = random_shard(step, case.groups)
        watch.clear()
        start = time.process_time()
        trainer.train_step(shard)
        passed = time.process_time() - start
        if step:
            costs.append((passed, watch.model_s, watch.objective_s, watch.optimizer_s))
    return StepCost(*map(statistics.median, zip(*costs, strict=True)))


def step_config(objective: str, folder: str, steps: int) -> Config:
    """Two minibatches, so that objectives with a proximal policy must compute it."""
    from algorithms.base import Objective
    from flash.config.objects import load_objective

    kind = load_objective(objective)
    assert issubclass(kind, Objective)
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "objective_cost", "steps": steps},
        "model": {"path": folder, "dtype": "float32", "max_length": 64},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": ANSWERS[1]},
        "train": {"batch_size": GROUPS * GROUP_SIZE, "minibatches": 2},
        "cluster": {"gpus_per_node": 0},
        "algorithm": {"objective": objective, "lag": None},
    }
    if kind.advantage == "gae":
        tables["critic"] = {}
    return msgspec.convert(tables, Config)


def random_shard(
    step: int,
    groups: int = GROUPS,
    answers: tuple[int, int] = ANSWERS,
    vocabulary: int = TINY_VOCABULARY,
    prompt: int = PROMPT,
) -> Shard:
    """A batch of random answers of different lengths to a prompt of each group, sampled by the version before."""
    rng = np.random.default_rng(step)
    version = max(step - 1, 0)
    trajectories = list[Trajectory]()
    for group in range(groups):
        asked = rng.integers(0, vocabulary, prompt)
        for member in range(GROUP_SIZE):
            answer = int(rng.integers(*answers, endpoint=True))
            length, reward = prompt + answer, float(rng.random() < 0.5)
            logprobs = rng.normal(-math.log(vocabulary), 0.2, answer)
            trajectories.append(
                Trajectory(
                    task=Task(group * GROUP_SIZE + member, group, member, seed=group),
                    outcome=Outcome.OK,
                    reward=reward,
                    token_ids=np.append(asked, rng.integers(0, vocabulary, answer)).astype("<i4").tobytes(),
                    action_spans=[Span(prompt, length)],
                    logprobs=logprobs.astype("<f4").tobytes(),
                    versions=[VersionRun(version, answer)],
                    turns=[Turn("", "", reward, 0.0, 0.0, 0.0)],
                )
            )
    return Shard(
        step=step,
        min_version=version,
        samples=[ShardSample(index, one) for index, one in enumerate(trajectories)],
        batch=[one.batch_sample(version) for one in trajectories],
        total_tokens=sum(one.action_count for one in trajectories),
        total_sequences=len(trajectories),
    )


def step_rows(args: Args) -> list[Row]:
    """Each objective, and the worst of them."""
    case = StepCase(list(QUICK_OBJECTIVES), 2) if args.quick else StepCase(list(OBJECTIVES), 5)
    costs = apart(step_costs, case)
    rows: list[Row] = []
    for name, cost in costs.items():
        title = f"step, {name}"
        rows += [
            Row(title, "step_ms", "ms", 1e3 * cost.step_s),
            Row(title, "objective_ms", "ms", 1e3 * cost.objective_s),
            Row(title, "rest_ms", "ms", 1e3 * cost.rest_s),
        ]
    beside = {name: cost.objective_s / cost.step_s for name, cost in costs.items()}
    worst = max(beside, key=lambda name: beside[name])
    everything = max((cost.objective_s + cost.rest_s) / cost.step_s for cost in costs.values())
    return [
        *rows,
        Row(f"step, worst: {worst}", "left_by_objective", "share", 1 - beside[worst], goal=LEFT),
        Row("step, worst", "left_by_objective_and_rest", "share", 1 - everything, goal=LEFT),
    ]


def measure(args: Args) -> list[Row]:
    """The output layer alone, then whole steps."""
    return layer_rows(args) + step_rows(args)


if __name__ == "__main__":
    main("objective_cost", __doc__ or "", measure)
