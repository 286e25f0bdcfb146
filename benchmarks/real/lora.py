"""Adapters in place of weights: what travels at a swap, which version computes what, and what they learn.

*Bytes* are those of the tensors that engines are given in bfloat16, of models of these shapes, with adapters on all
linear layers. *Versions*: a real vLLM engine on the CPU answers many requests while adapters that differ strongly are
swapped under them; each token's log-prob is held to Hugging Face's of the merged weights of the version that the token
is said to be of. *Recipe*: the quickstart, whose model is a pretrained one, with all weights, sent as what has changed,
and with adapters alone, at ten times the rate; and a few steps with all weights at a rate of 1e-6, to see what changes.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from benchmarks.form import ROOT, Args, Row, main
from benchmarks.training import train
from flash.config.learning import LoraConfig
from flash.config.tree import Config, ModelConfig, TinyModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from flash.rollout.vllm.engine import VLLMEngine
    from flash.types import Completion, Published

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
}  # fmt: skip
RANKS = (8, 16, 32)
SHARE = 0.05
"""Goal: of the bytes of the whole model, at the default rank."""
REQUESTS, QUICK_REQUESTS = 1000, 100
SWAPS, QUICK_SWAPS = 50, 5
CLIENTS = 16
"""Requests at a time."""
TOKENS = (4, 40)
"""Fewest and most of an answer."""
NEAR = 1e-3
"""Goal: nats, in float32; another version's log-prob differs by 0.1 and more."""
EXAMPLE, RATE = ROOT / "examples" / "quickstart.toml", 2e-4
FEW = ["run.steps=4", "eval.problems=16"]
DELTAS = "weights.deltas=true"
RUNS = {
    "all weights": [DELTAS],
    "adapters": [f"train.learning_rate={RATE}", "lora.rank=16"],
    "all weights, rate 1e-6": [*FEW, DELTAS, "train.learning_rate=1e-6"],
}


def sizes() -> list[Row]:
    """Bytes of a swap, of models without weights."""
    from transformers import Qwen3Config

    from flash.trainer.model.adapters import add_adapters
    from flash.trainer.model.model import empty_model, published_parameters

    rows: list[Row] = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            described: Any = Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"])
            described.save_pretrained(folder)
            named = ModelConfig(path=folder)
            whole = 2 * sum(tensor.numel() for tensor in empty_model(named).parameters())
            for rank in RANKS:
                model = add_adapters(empty_model(named), named, LoraConfig(rank=rank))
                adapters = 2 * sum(tensor.numel() for _, tensor in published_parameters(model))
                goal = SHARE * whole if rank == LoraConfig().rank else None
                rows.append(Row(f"{name}, rank {rank}", "swap_bytes", "bytes", adapters, whole, goal))
    return rows


def config_for(folder: str, swap: str) -> Config:
    """An engine in float32 on the CPU."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "lora"},
        "model": {"path": folder, "dtype": "float32", "max_length": 128},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "rollout": {"swap": swap, "max_new_tokens": TOKENS[1]},
        "engine": {"enforce_eager": True, "max_sequences": CLIENTS, "kv_cache_gib": 0.25},
        "train": {"async_ratio": 2.0},
        "lora": {"rank": 8},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(tree, Config)


class Versions:
    """Adapters of one base, each drawn with its version as the seed."""

    def __init__(self, config: Config) -> None:
        from flash.foreign.transformers import linear_layers
        from flash.trainer.model.model import load_model
        from flash.weights.publisher import make_publisher

        assert config.lora is not None
        self._rank = config.lora.rank
        self.base: Any = load_model(config.model)
        targets = linear_layers(self.base)
        self._layers = [name for name, _ in self.base.named_modules() if name.rpartition(".")[2] in targets]
        self._canary = [*range(3, 11)]
        self.publisher = make_publisher(config, 0, "127.0.0.1")

    def pairs(self, version: int) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each layer."""
        import torch

        generator = torch.Generator().manual_seed(version)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self._layers:
            rows, columns = self.base.get_submodule(name).weight.shape
            down = torch.randn(self._rank, columns, generator=generator) * 0.1
            found[name] = down, torch.randn(rows, self._rank, generator=generator) * 0.1
        return found

    def say(self, version: int, texts: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token but the first of each text, under the merged weights of a version."""
        import torch

        said: list[list[float]] = []
        with torch.no_grad():
            model = copy.deepcopy(self.base)
            for name, (down, up) in self.pairs(version).items():
                model.get_submodule(name).weight += up @ down
            for ids in texts:
                rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                said.append([float(rows[place, token]) for place, token in enumerate(ids[1:])])
        return said

    def publish(self, version: int) -> Published:
        """As the trainer does."""
        from flash.types import Canary, Published

        tensors = {
            f"base_model.model.{name}.lora_{side}.weight": tensor
            for name, pair in self.pairs(version).items()
            for side, tensor in zip("AB", pair, strict=True)
        }
        offer = self.publisher.publish(version, tensors.items())
        assert offer is not None, "this is rank 0"
        (said,) = self.say(version, [self._canary])
        return Published(version, "tcp", offer.update_info, Canary(self._canary, said, 1e-4))


async def storm(
    engine: VLLMEngine, versions: Versions, requests: int, swaps: int
) -> list[tuple[list[int], Completion]]:
    """So many requests, and so many swaps between the first and the last of them."""
    from flash.rollout.engine import ResponseRequest
    from flash.types import Completion

    done: list[tuple[list[int], Completion]] = []
    numbers, each = iter(range(requests)), requests / (swaps + 1)
    swapped, changed = 0, anyio.Condition()

    async def client() -> None:
        for number in numbers:
            async with changed:
                while number > (swapped + 1) * each + CLIENTS:  # else all would be answered before the last swap
                    await changed.wait()
            prompt = [3 + (number * 7 + place * (1 + number % 3)) % 9 for place in range(4 + number % 37)]
            count = TOKENS[0] + number * 11 % (TOKENS[1] - TOKENS[0])
            stream = engine.generate(ResponseRequest(prompt, count, key=number))
            (said,) = [piece async for piece in stream if isinstance(piece, Completion)]
            done.append((prompt, said))
            async with changed:
                changed.notify_all()

    await engine.start()
    await engine.load(await anyio.to_thread.run_sync(versions.publish, 0), keep_cache=False)
    async with anyio.create_task_group() as group:
        for _ in range(CLIENTS):
            group.start_soon(client)
        for version in range(1, swaps + 1):
            published = await anyio.to_thread.run_sync(versions.publish, version)
            async with changed:
                while len(done) < swapped * each:
                    await changed.wait()
            await engine.load(published, keep_cache=False)
            async with changed:
                swapped = version
                changed.notify_all()
    return done


async def answers(config: Config, versions: Versions, requests: int, swaps: int) -> list[tuple[list[int], Completion]]:
    """What an engine says in a storm."""
    from flash.rollout.vllm.engine import VLLMEngine

    engine = VLLMEngine(config, 0)
    try:
        return await storm(engine, versions, requests, swaps)
    finally:
        await engine.close()


def exactness(args: Args) -> list[Row]:
    """Both ways of swapping."""
    from flash.trainer.model.tiny_model import make_tiny_model

    rows: list[Row] = []
    requests, swaps = (QUICK_REQUESTS, QUICK_SWAPS) if args.quick else (REQUESTS, SWAPS)
    with tempfile.TemporaryDirectory() as above:
        folder, tiny = Path(above) / "model", TinyModelConfig(warm_start_steps=0)
        make_tiny_model(folder, tiny, "envs.arithmetic:Arithmetic", {"digits": 2}, lambda *_: None)
        for swap in ("recompute", "drain"):
            config = config_for(str(folder), swap)
            versions = Versions(config)
            try:
                done = anyio.run(partial(answers, config, versions, requests, swaps))
            finally:
                versions.publisher.close()
            rows += judged(f'rollout.swap = "{swap}"', versions, done)
    return rows


def judged(case: str, versions: Versions, done: list[tuple[list[int], Completion]]) -> list[Row]:
    """Each token against the version that it is said to be of."""
    worst, tokens, mixed = 0.0, 0, 0
    seen = {run.version for _, said in done for run in said.versions}
    for version in sorted(seen):
        some = [(prompt, said) for prompt, said in done if any(run.version == version for run in said.versions)]
        exact = versions.say(version, [prompt + said.token_ids for prompt, said in some])
        for (prompt, said), logprobs in zip(some, exact, strict=True):
            place = 0
            for run in said.versions:
                stop = place + run.count
                if run.version == version:
                    own = zip(said.logprobs[place:stop], logprobs[len(prompt) - 1 + place :], strict=False)
                    worst = max(worst, *(abs(ours - theirs) for ours, theirs in own))
                    tokens += run.count
                place = stop
    mixed = sum(len(said.versions) > 1 for _, said in done)
    return [
        Row(case, "requests", "requests", len(done)),
        Row(case, "versions", "versions", len(seen)),
        Row(case, "of_several_versions", "requests", mixed),
        Row(case, "tokens", "tokens", tokens),
        Row(case, "logprob_error", "nats", worst, goal=NEAR),
    ]


def recipe(args: Args) -> list[Row]:
    """The example with all weights and with adapters; what of its versions travels."""
    few = FEW if args.quick else []
    runs = {
        case: train(EXAMPLE, f"bench-lora-{number}", [*few, *overrides])
        for number, (case, overrides) in enumerate(RUNS.items())
    }
    rows: list[Row] = []
    model_bytes = runs["all weights"].metrics[0]["version_bytes"]
    for case, run in runs.items():
        # The first version is whole.
        sent = statistics.fmean(row["version_bytes"] for row in run.metrics[1:])
        rows.append(Row(case, "version_bytes", "bytes", sent, model_bytes))
    whole, adapters = (runs[case].evals for case in ("all weights", "adapters"))
    for case, evals in (("all weights", whole), ("adapters", adapters)):
        rows += [
            Row(case, "first_accuracy", "share", evals[0]["mean_reward"]),
            Row(case, "final_accuracy", "share", evals[-1]["mean_reward"]),
            Row(case, "final_accuracy_low", "share", evals[-1]["low"]),
            Row(case, "final_accuracy_high", "share", evals[-1]["high"]),
        ]
    overlap = float(whole[-1]["low"] <= adapters[-1]["high"])
    return [*rows, Row("adapters as good as all weights", "overlap", "0 or 1", overlap, goal=1.0)]


def measure(args: Args) -> list[Row]:
    """All three."""
    return [*sizes(), *exactness(args), *recipe(args)]


if __name__ == "__main__":
    main("lora", __doc__ or "", measure)
