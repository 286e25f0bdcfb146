"""Held-out accuracy of saved weights, by one evaluator for both systems.

`benchmarks.versus_trl.run` calls `accuracies` after each run, so that evaluation takes no time of the run. Answers come
from `generate` of transformers. They are greedy or sampled, as `[eval]` says, with the same random numbers for every
set of weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.episodes import Prompt, held_out_seeds, prompts, rewards
from flash.config.tree import Config
from flash.observe.stats import Interval, mean_interval
from flash.rollout.episode.tokenizer import HfTokenizer

BATCH = 512
"""Number of answers that are generated at once."""


def accuracies(config: Config, saved: Iterable[tuple[int, Path]]) -> Iterator[tuple[int, Interval]]:
    """Yield each step with its accuracy: first step 0, which is the untrained model, then each saved step.

    An accuracy is the mean reward over the held-out problems, with its 95 % interval. `saved` has the steps in order,
    each with its weights: a safetensors file of TRL, or a checkpoint folder of Flash.
    """
    import torch

    model, tokenizer = load_model(config)
    seeds = held_out_seeds(config)
    asked = prompts(config, seeds)
    for step, place in ((0, None), *saved):
        if place is not None:
            load_weights(model, place)
        torch.manual_seed(config.run.seed)  # the same random numbers for every set of weights
        answers: list[str] = []
        for start in range(0, len(asked), BATCH):
            answers += generate(config, model, tokenizer, asked[start : start + BATCH])
        yield step, mean_interval(rewards(config, seeds, answers), binary=True)


def load_model(config: Config) -> tuple[Any, Any]:
    """Return the untrained model and its tokenizer. The model stops at the same tokens as Flash's engines."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path)
    tokenizer = HfTokenizer(config.model)
    tokenizer.add_ends(model.generation_config)
    # `generate` would also use the other settings of the model's folder, such as a repetition penalty.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return model.eval(), tokenizer.inner


def generate(config: Config, model: Any, tokenizer: Any, asked: list[Prompt]) -> list[str]:
    """Generate an answer to each of the prompts `asked`, without special tokens.

    Answers are greedy or sampled, as `[eval]` says, and have at most `rollout.max_new_tokens` tokens.
    """
    import torch
    from transformers import GenerationConfig

    # Chat messages become text by the model's chat template.
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in asked
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    sampling = {"do_sample": False}
    if config.eval.temperature > 0:
        sampling = {"do_sample": True, "temperature": config.eval.temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        max_new_tokens=config.rollout.max_new_tokens,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # The default cache is copied with every token.
        cache_implementation="static",
        **sampling,
    )
    with torch.no_grad():
        tokens_BT = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=settings
        )
    return tokenizer.batch_decode(tokens_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def load_weights(model: Any, place: Path) -> None:
    """Replace the weights of a model by saved ones. `place` is a file of TRL's run, or a checkpoint folder of Flash's.

    Raises:
        ValueError: the file has other tensors than the model.
        torch.distributed.checkpoint.api.CheckpointException: a tensor of the model is not in the checkpoint.
    """
    import torch.distributed.checkpoint.state_dict_loader as dcp
    from safetensors.torch import load_file

    # A tied output layer is the input embedding, which is here once, as in both kinds of files.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if place.is_dir():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is no process group
            dcp.load({"model": weights}, checkpoint_id=place / "state", no_dist=True)
        return
    tensors = load_file(place)
    if tensors.keys() != weights.keys():
        raise ValueError(f"{place} has other tensors: {sorted(tensors.keys() ^ weights.keys())}")
    for name, tensor in tensors.items():
        weights[name].copy_(tensor)
