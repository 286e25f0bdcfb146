"""A small Qwen3 for machines without a model hub: made here, taught just enough by the environment's solved examples.

The result is an ordinary Hugging Face folder with a tokenizer of the environment's characters. The supervised warm
start ends as soon as the model would sample nearly a quarter of the answers right: it can then answer at all, and
reinforcement learning has most of the way before it. A fingerprint file of all options makes the folder its own cache;
a folder without one belongs to somebody else and is never written to.

torch and transformers are imported where they are used: asking whether a folder is current needs neither.

Shape legend: B = examples of a step; T = tokens of the longest example, padded on the right.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flash.config.objects import check_options, load_object
from flash.config.tree import Config, TinyModelConfig
from flash.environment.interface import SolvedExample, WarmStart
from flash.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

FINGERPRINT = "flash_tiny.json"
"""The file, inside the model folder, that holds all options it was made from."""

RECIPE = 1
"""Part of the fingerprint: raised when this file makes another model from the same options."""

STOP_AT = 0.22
"""The warm start ends when the model's mean probability of a right answer (its accuracy when sampled at temperature 1)
reaches this share. Stopping by steps instead would not do: seeds differ by a factor of two in how fast they learn."""

SMOOTHING = 0.1
"""Weight of the newest step in the running mean that is compared with `STOP_AT`."""

LR_WARMUP_STEPS = 20
"""Steps of linear learning-rate warm-up."""

HEAD_DIM = 32
"""Size of an attention head: the smallest that vLLM's kernels serve."""

CONTEXT = 4096
"""Positions the model accepts, in tokens; rotary embeddings make a generous number free."""

PAD, EOS = "<pad>", "<eos>"
IGNORED = -100
"""Target of positions without a loss, as torch's cross entropy expects it."""

Progress = Callable[[int, int, float], None]
"""Called after each step with steps done, steps in all (as many as done, when it was the last), and the loss."""


def make_missing_model(config: Config) -> None:
    """Make the tiny model a configuration asks for, unless it is there already."""
    if config.tiny_model is None:
        return
    path, wanted = Path(config.model.path), (config.tiny_model, config.env.path, config.env.options)
    if not is_current(path, *wanted):
        make_tiny_model(path, *wanted, show_progress)


def show_progress(step: int, steps: int, loss: float) -> None:
    """Tell of every fiftieth supervised step, and of the last."""
    if step == steps or step % 50 == 0:
        sys.stdout.write(f"tiny model: supervised step {step}/{steps}, loss {loss:.3f}\n")
        sys.stdout.flush()


def is_current(path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any]) -> bool:
    """Whether the folder holds the model that exactly these options make."""
    try:
        found = json.loads((path / FINGERPRINT).read_text())
    except (OSError, ValueError):
        return False
    return found == _fingerprint(config, env_path, env_options)


def make_tiny_model(
    path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any], progress: Progress
) -> None:
    """Make the model and put it at `path`, whole or not at all; an older one of ours is replaced.

    Raises:
        ConfigError: `path` holds something else, the width does not divide into heads, or the environment offers no
            usable examples.
    """
    if path.exists() and not _is_ours(path):
        raise ConfigError(
            f"{path} exists and was not made by flash tiny-model (it has no {FINGERPRINT}); choose another model.path, "
            "or remove the [tiny_model] section to use the folder as it is"
        )
    if config.width % HEAD_DIM:
        raise ConfigError(f"tiny_model.width must be a multiple of {HEAD_DIM}, but is {config.width}")
    env = _example_source(env_path, env_options)
    tokenizer = _make_tokenizer(env.alphabet())
    model = _make_model(config, tokenizer)
    _warm_start(model, tokenizer, env, config, progress)
    with _replacing(path) as folder:
        with _quiet_saving():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
        (folder / FINGERPRINT).write_text(json.dumps(_fingerprint(config, env_path, env_options), indent=2))


def _fingerprint(config: TinyModelConfig, env_path: str, env_options: dict[str, Any]) -> dict[str, Any]:
    made_from = {"recipe": RECIPE, "tiny_model": config, "env": {"path": env_path, "options": env_options}}
    return json.loads(msgspec.json.encode(made_from))


def _is_ours(path: Path) -> bool:
    return path.is_dir() and ((path / FINGERPRINT).is_file() or not any(path.iterdir()))


def _example_source(env_path: str, env_options: dict[str, Any]) -> WarmStart:
    kind = load_object(env_path)
    env = kind(**check_options(kind, env_options, "env.options"))
    if not isinstance(env, WarmStart):
        raise ConfigError(
            f"{env_path} offers no solved examples, which a tiny model is taught with; give it the methods "
            "solved_examples and alphabet (see flash.environment.WarmStart), or set model.path to an existing model"
        )
    return env


def _make_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet, then padding and end of text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = list(dict.fromkeys(alphabet))
    vocabulary = {token: index for index, token in enumerate([*characters, PAD, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def _make_model(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with random float32 weights, the same for the same seed."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    heads = config.width // HEAD_DIM
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        intermediate_size=4 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=config.tied,
        # The usual 0.02 keeps a model this narrow on a plateau for hundreds of steps.
        initializer_range=config.width**-0.5,
        bos_token_id=None,
        eos_token_id=cast("int", tokenizer.eos_token_id),
        pad_token_id=cast("int", tokenizer.pad_token_id),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(shape).float()
    model.generation_config = GenerationConfig.from_model_config(shape)
    return model


def _warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    env: WarmStart,
    config: TinyModelConfig,
    progress: Progress,
) -> None:
    """Supervised steps on fresh solved examples, until the model is good enough or the steps are used up."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    accuracy = 0.0
    for step in range(config.warm_start_steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / LR_WARMUP_STEPS)
        examples = env.solved_examples(config.batch_size, config.seed * config.warm_start_steps + step)
        ids_BT, targets_BT = _encode(tokenizer, examples)
        loss, probability = _loss(model, ids_BT, targets_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accuracy += SMOOTHING * (probability - accuracy)
        good_enough = accuracy >= STOP_AT
        progress(step + 1, step + 1 if good_enough else config.warm_start_steps, loss.item())
        if good_enough:
            return


def _encode(tokenizer: PreTrainedTokenizerFast, examples: list[SolvedExample]) -> tuple[Tensor, Tensor]:
    """Token ids and targets, int64 [B, T]; targets are `IGNORED` except where the next token is the answer's or EOS."""
    import torch

    rows = [_encode_example(tokenizer, example) for example in examples]
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), length), cast("int", tokenizer.pad_token_id))
    targets_BT = torch.full((len(rows), length), IGNORED)
    for row, (ids, targets) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        targets_BT[row, : len(targets)] = torch.tensor(targets)
    return ids_BT, targets_BT


def _encode_example(tokenizer: PreTrainedTokenizerFast, example: SolvedExample) -> tuple[list[int], list[int]]:
    """Token ids and targets of all turns, in the order in which an episode has them."""
    alphabet = tokenizer.get_vocab()
    ids: list[int] = []
    learned: list[int] = []
    for turn in (example, *example.later):
        strange = set(turn.prompt + turn.answer) - alphabet.keys()
        if strange:
            raise ConfigError(
                f"the example {turn.prompt!r} → {turn.answer!r} has characters that the environment's alphabet() "
                f"lacks: {''.join(sorted(strange))!r}"
            )
        prompt = tokenizer.encode(turn.prompt, add_special_tokens=False)
        answer = [*tokenizer.encode(turn.answer, add_special_tokens=False), cast("int", tokenizer.eos_token_id)]
        ids += [*prompt, *answer]
        learned += [*[IGNORED] * len(prompt), *answer]
    return ids, [*learned[1:], IGNORED]


def _loss(model: Qwen3ForCausalLM, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, float]:
    """Mean loss per answer token, and the mean probability with which the model gets an example all right."""
    import torch

    # Padding stands on the right, where causal attention never looks: no mask is needed.
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    loss_BT = torch.nn.functional.cross_entropy(
        logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORED, reduction="none"
    )
    loss = loss_BT.sum() / (targets_BT != IGNORED).sum()
    return loss, (-loss_BT.detach().sum(dim=1)).exp().mean().item()


@contextlib.contextmanager
def _quiet_saving() -> Generator[None]:
    """Without transformers' own progress bar, which would cut into the caller's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _replacing(path: Path) -> Generator[Path]:
    """A new folder beside `path` that takes its place when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        if path.exists():
            path.rename(Path(scratch) / "old")
        new.rename(path)
