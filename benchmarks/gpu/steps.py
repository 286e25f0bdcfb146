"""Sizes of all parts with their models, and training steps of random models on one card: `mfu`, `exact`, `memory`.

On two CPU cores the sizes are small, since the parts only show there that they work. Each step runs in a process of its
own, because the process group and the memory of a card belong to one process.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from benchmarks.episodes import GROUP_SIZE, random_shard
from benchmarks.form import Row
from benchmarks.real.engine_cost import remove_end_token
from flash.config.machine import count_gpus
from flash.config.tree import Config
from flash.trainer.checkpoint_files import atomic_folder
from flash.trainer.model.tiny_model import HEAD_DIM

if TYPE_CHECKING:
    from torch import Tensor

MODELS = Path("outputs") / "models"
"""Folder of the models that the parts make."""


Shape = dict[str, Any]
"""Settings of a Qwen3 model with random weights, as its configuration in transformers names them."""


def title(shape: Shape) -> str:
    """Return a description of a shape, for the case of a row."""
    return f"{shape['num_hidden_layers']} layers × {shape['hidden_size']}"


def qwen3(layers: int, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> Shape:
    """Return the settings of a Qwen3 model. `inner` is the width of the feed-forward layers."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,  # more than the longest sequence here
        "tie_word_embeddings": True,
    }


SMALL = qwen3(28, 1024, 3072, 16, 8, 128, 151_936)
"""Shape of Qwen3-0.6B."""
MIDDLE = qwen3(4, 512, 1536, 8, 4, 64, 8192)
"""Shape of a model that two CPU cores can train, too."""
TINY = qwen3(2, 64, 128, 2, 2, HEAD_DIM, 64)
"""Shape of the smallest model, for two CPU cores."""
MIXTURE = qwen3(4, 256, 512, 4, 2, 64, 64) | {
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
"""Shape of a small Qwen3 with experts. Its vocabulary has the tiny model's tokens, and some that it does not have."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parts. The defaults are for two CPU cores."""

    gpu: bool
    """True to run on a card."""
    swaps: int = 2
    """Versions of a run."""
    shape: Shape = msgspec.field(default_factory=lambda: TINY)
    """Shape of the model whose steps are measured."""
    sequences: int = 16
    """Sequences of a training step that is measured."""
    length: tuple[int, int] = (4, 12)
    """Shortest and longest answer there, in tokens."""
    steps: int = 2
    """Steps that are measured, after one that is not counted."""
    requests: int = 16
    """Requests that are sent to the engine at once."""
    tokens: int = 8
    """Tokens of each answer."""
    rounds: int = 1
    """Rounds of the comparison with a bare vLLM."""


FULL = Sizes(
    gpu=True, swaps=20, shape=SMALL, sequences=64, length=(256, 1792), steps=4, requests=256, tokens=256, rounds=3
)
"""Sizes for a card."""

Part = Callable[[Sizes], list[Row]]
"""A part of the check: measures, and returns its rows."""


class Skipped(Exception):
    """A part cannot run on this machine; the message says what the machine lacks."""


def random_model(folder: Path, shape: Shape, tokenizer_of: Path, *, endless: bool) -> Path:
    """Fill a folder with random weights of this shape, with or without experts, and another model's tokenizer.

    Nothing is made again if the folder has weights. `tokenizer_of` is the folder of the other model. `endless` is True
    to leave out the end-of-text token, so that all answers have the length of the limit. Returns the folder.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if not (folder / "model.safetensors").is_file():
        torch.manual_seed(0)
        experts = "num_experts" in shape
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)) if experts else Qwen3ForCausalLM(Qwen3Config(**shape))
        with atomic_folder(folder) as new:  # so that a folder with weights is complete
            model.to(torch.bfloat16).save_pretrained(new)
            AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(new)
            if endless:
                remove_end_token(new)
    return folder


GIB = 2**30
"""Bytes of a GiB."""
IMPORTS = ("flash.trainer.step", "flash.trainer.memory", "transformers.models.qwen3.modeling_qwen3")
"""Modules that the processes of `apart` need."""
Result = TypeVar("Result")
Dtype = Literal["float32", "bfloat16"]


def apart(call: Callable[[Any], Result], argument: Any) -> Result:
    """Call a function in a new process, which has its own memory and process group, and return its result.

    The function, its argument and the result travel as pickles, so the function must be one of a module.
    Without a GPU, the process is forked from a server that has imported `IMPORTS`, which take longer than a small step.
    """
    if count_gpus() > 0:
        # A forked process cannot use CUDA if one of the imports has initialised it in the server.
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*IMPORTS])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(call, argument).result()


def save_random(what: tuple[Shape, str, Dtype]) -> None:
    """Save a model with random weights, in a process of `apart`, since it changes torch's default dtype.

    `what` is the model's shape, its folder and its dtype.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape, folder, dtype = what
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Training steps with one minibatch and GRPO.

    `train_steps` gets them as the only argument that `apart` can pass.
    """

    folder: str
    """Folder of the model."""
    dtype: Dtype
    """Precision of the forward and backward passes. The master weights are float32."""
    gpu: bool
    """True to compute on the card, False on the CPU."""
    vocabulary: int
    """Number of token ids of the model."""
    groups: int
    """Groups of a step's batch."""
    answers: tuple[int, int]
    """Smallest and largest length of an answer, in tokens."""
    steps: int
    """Number of training steps."""
    tables: dict[str, dict[str, Any]] = {}
    """Further settings, as tables of a configuration."""
    gradient: str = ""
    """File to which the gradient of the last step is written; empty: none."""

    def config(self) -> Config:
        """Return the configuration of the steps, in which `tables` replace the keys that they name."""
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": "gpu-check", "steps": self.steps},
            # 64 tokens more than an answer are enough for its prompt of 12.
            "model": {"path": self.folder, "dtype": self.dtype, "max_length": self.answers[1] + 64},
            "env": {"path": "envs.arithmetic:Arithmetic"},
            "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": self.answers[1]},
            "train": {"batch_size": self.groups * GROUP_SIZE, "minibatches": 1, "max_tokens_per_microbatch": 16_384},
            "cluster": {"gpus_per_node": 1 if self.gpu else 0},
            "engine": {"share_gpus": self.gpu},
            "algorithm": {"objective": "grpo", "lag": None},
        }
        return msgspec.convert(
            tables | {name: tables.get(name, {}) | table for name, table in self.tables.items()}, Config
        )


class Measured(msgspec.Struct, frozen=True):
    """Measurements of some training steps."""

    seconds: list[float]
    """Seconds of each step; the first one also creates the optimizer's state."""
    metrics: list[dict[str, float]]
    """Metrics of each step."""
    tokens: int
    """Tokens that went through the model in a step, in the mean, prompts included."""
    step_flops: float
    """Model FLOPs of the last step, as the column `mfu` counts them."""
    peak_bytes: int
    """Most bytes of the card that were allocated in the whole process; 0 without a card."""
    card: str
    """Name of the card, or `cpu`."""


def train_steps(work: Work) -> Measured:
    """Train the steps, and measure them. Call it through `apart`, because it makes a process group."""
    import torch

    from flash.foreign.torch import single_process_group
    from flash.trainer.mesh import process_group_backend
    from flash.trainer.step import Trainer

    config = work.config()
    seconds: list[float] = []
    metrics: list[dict[str, float]] = []
    tokens = 0
    found: dict[str, Tensor] = {}
    with single_process_group(process_group_backend(cuda=work.gpu, offloads="weights" in config.train.offload)):
        trainer = Trainer(config)

        def keep(*_: Any) -> None:
            """Copy the gradient of each parameter to `found`. Called before each step of the optimizer, so the last
            step's gradient remains."""
            for name, weight in trainer.model.named_parameters():
                assert weight.grad is not None
                found[name] = weight.grad.full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]

        if work.gradient:
            trainer.optimizer.register_step_pre_hook(keep)
        for step in range(work.steps):
            shard = random_shard(step, work.groups, work.answers, work.vocabulary)
            start = time.perf_counter()
            metrics.append(trainer.train_step(shard))
            if work.gpu:
                torch.cuda.synchronize()  # the call returns before the card has computed
            seconds.append(time.perf_counter() - start)
            tokens += sum(sample.trajectory.length for sample in shard.samples)
        if work.gradient:
            torch.save(found, work.gradient)
        peak = torch.cuda.max_memory_allocated() if work.gpu else 0
        card = torch.cuda.get_device_name() if work.gpu else "cpu"
        return Measured(seconds, metrics, tokens // work.steps, trainer.flops, peak, card)


MFU_GOAL = 0.35
"""Goal of the model FLOPs of a step, as a share of the peak in the card's data sheet."""


def mfu_rows(sizes: Sizes) -> list[Row]:
    """Return the rows of whole training steps: time, throughput, memory, and model FLOPs per second. The part `mfu`.

    The FLOPs per second are shares of the peak in the card's data sheet. The first step is not counted.
    """
    from flash.trainer.performance import peak_flops

    with tempfile.TemporaryDirectory() as folder:
        apart(save_random, (sizes.shape, folder, "bfloat16"))
        work = Work(
            folder=folder,
            dtype="bfloat16" if sizes.gpu else "float32",
            gpu=sizes.gpu,
            vocabulary=sizes.shape["vocab_size"],
            groups=sizes.sequences // GROUP_SIZE,
            answers=sizes.length,
            steps=sizes.steps + 1,
        )
        found = apart(train_steps, work)
    step_s = statistics.median(found.seconds[1:])
    case = f"training step, {title(sizes.shape)}, {found.tokens:,} tokens"
    peak = peak_flops(found.card)
    rows = [
        Row(case, "step_s", "s", step_s),
        Row(case, "trained_tokens_per_s", "tokens/s", found.tokens / step_s),
        Row(case, "peak_gib", "GiB", found.peak_bytes / GIB),
    ]
    share = None if peak is None else found.step_flops / step_s / peak
    return rows if share is None else [*rows, Row(case, "mfu", "share", share, at_least=MFU_GOAL)]


GRADIENT_GOALS: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest distance of a gradient from the reference, relative to the norm of the reference."""


def exact_rows(sizes: Sizes) -> list[Row]:
    """Return the rows of the part `exact`: the gradient of one training step, without clipping.

    Each precision on the card is compared with float32 on the processor, and with the same step again.
    """
    import torch

    shape = MIDDLE if sizes.gpu else sizes.shape
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        apart(save_random, (shape, folder, "float32"))

        def gradient(name: str, dtype: Dtype, *, gpu: bool) -> dict[str, Tensor]:
            """Compute a gradient in a process of its own, and return it by parameter."""
            work = Work(
                folder=folder,
                dtype=dtype,
                gpu=gpu,
                vocabulary=shape["vocab_size"],
                groups=4,
                answers=(40, 200),
                steps=1,
                tables={"train": {"max_grad_norm": 1e9}},  # so large that nothing is clipped
                gradient=f"{folder}/{name}.pt",
            )
            apart(train_steps, work)
            return torch.load(work.gradient)

        exact = gradient("reference", "float32", gpu=False)
        for dtype, goal in GRADIENT_GOALS.items():
            ours = gradient(dtype, dtype, gpu=sizes.gpu)
            again = gradient(f"{dtype}-again", dtype, gpu=sizes.gpu)
            case = f"gradient in {dtype}, {title(shape)}"
            same = all(torch.equal(again[name], value) for name, value in ours.items())
            rows += [
                Row(case, "error_of_float32", "share", distance(ours, exact), at_most=goal),
                Row(case, "same_again", "yes/no", float(same), at_least=1.0),
            ]
    return rows


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return ‖ours − exact‖ / ‖exact‖ of two gradients, given by the names of the parameters in `ours`."""
    difference = sum(float((value.double() - exact[name].double()).square().sum()) for name, value in ours.items())
    norm = sum(float(value.double().square().sum()) for value in exact.values())
    return (difference / norm) ** 0.5


NEAR = 0.15
"""Goal: largest relative error of a prediction."""
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
"""Settings of `[train]` that compute activations again instead of keeping them."""
LEVERS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "recomputed": {"train": RECOMPUTED},
    "moved": {"train": RECOMPUTED | {"offload": ["activations", "moments"]}},
    "weights moved": {"train": RECOMPUTED | {"offload": ["activations", "weights"]}},
    "adapters": {"train": RECOMPUTED, "lora": {"rank": 32}},
}
"""Ways to save memory, as tables of a configuration."""
MOVED = ("moved", "weights moved")
"""Levers that move parts to the host's memory. Their steps are compared with those of "recomputed"."""
ALIKE = 1e-3
"""Goal: largest relative difference of losses, entropies and gradient norms from those of "recomputed"."""


def memory_rows(sizes: Sizes) -> list[Row]:
    """Return the rows of the part `memory`: the peak of a card's memory, compared with the prediction of `flash plan`.

    Each lever is measured on the model of `mfu`. The steps themselves are compared, too: the place where weights and
    moments are stored must not change a step.
    """
    rows: list[Row] = []
    longest = sizes.length[1]
    full = {"max_tokens_per_microbatch": 8192 if sizes.gpu else 16 * longest}
    steps: dict[str, list[float]] = {}  # loss, entropy and gradient norm of each step, by lever
    with tempfile.TemporaryDirectory() as folder:
        apart(save_random, (sizes.shape, folder, "bfloat16"))
        for lever, tables in LEVERS.items():
            work = Work(
                folder=folder,
                dtype="bfloat16" if sizes.gpu else "float32",
                gpu=sizes.gpu,
                vocabulary=sizes.shape["vocab_size"],
                groups=4,
                answers=(longest - 8, longest),
                steps=2,
                tables=tables | {"train": tables.get("train", {}) | full},
            )
            found, planned = apart(train_steps, work), apart(planned_bytes, work)
            peak = found.peak_bytes
            steps[lever] = [one[name] for one in found.metrics for name in ("loss", "entropy", "grad_norm")]
            rows.append(Row(lever, "peak_gib", "GiB", peak / GIB, planned / GIB))
            if sizes.gpu:
                rows.append(Row(lever, "plan_error", "share", abs(planned / peak - 1), at_most=NEAR))
            if lever in MOVED:
                pairs = zip(steps[lever], steps["recomputed"], strict=True)
                # Losses are sums of numbers of either sign, so near 0, where a relative error says nothing.
                error = max(abs(one - other) / max(abs(other), 1.0) for one, other in pairs)
                rows.append(Row(lever, "step_error", "share", error, at_most=ALIKE))
    return rows


def planned_bytes(work: Work) -> int:
    """Return the bytes that `flash plan` predicts for a single rank. It needs a process without a process group."""
    from flash.trainer.memory import rank_memory

    return rank_memory(work.config(), 1).total
