"""A small Qwen3 for machines without a model hub: made here, taught just enough by the environment's solved examples.

The result is an ordinary Hugging Face folder with a tokenizer of the environment's characters. The supervised warm
start ends as soon as the model would sample nearly a quarter of the answers right: it can then answer at all, and
reinforcement learning has most of the way before it. Where the examples leave something open, such as the moves of a
demonstrator that draws them, no model gets there: then it ends when the loss falls no further. A fingerprint file of
what the model is made from makes the folder its own cache; a folder without one belongs to somebody else and is never
written to. A warm start that is interrupted leaves what it has come to, and says so, as does each use of that.

torch and transformers are imported where they are used: asking whether a folder is current needs neither.

Shape legend: B = examples of a step; T = tokens of the longest example, padded on the right.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flash.config.objects import check_options, load_object
from flash.config.tree import TinyModelConfig
from flash.environment.calls import describe_error
from flash.environment.interface import SolvedExample, WarmStart
from flash.environment.results import check_letters, check_solved_examples
from flash.errors import ConfigError, EnvError
from flash.trainer.checkpoint_files import atomic_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

FINGERPRINT = "flash_tiny.json"
"""The file, inside the model folder, that holds all options it was made from."""

INTERRUPTED = "interrupted_after"
"""In that file: steps of a warm start that was interrupted."""

RECIPE = 3
"""Part of the fingerprint: raised when this file makes another model from the same options."""

STOP_AT = 0.22
"""The warm start ends when the model's mean probability of a right answer (its accuracy when sampled at temperature 1)
reaches this share. Stopping by steps instead would not do: seeds differ by a factor of two in how fast they learn."""

SMOOTHING = 0.1
"""Weight of the newest step in the running mean that is compared with `STOP_AT`."""

WINDOW = 150
"""Steps over which losses are averaged, to see whether the loss still falls: longer than the plateau at the start."""

LEAST_GAIN = 0.003
"""Share by which the mean loss of a window has to be below that of the one before, or the loss falls no further."""

TRIED = 3
"""Solved examples that an environment is asked for before all else."""
SAMPLE = 16
"""Examples in the fingerprint: what they show of the environment's options is what the model depends on."""

LR_WARMUP_STEPS = 20
"""Steps of linear learning-rate warm-up."""

HEAD_DIM = 32
"""Size of an attention head: the smallest that vLLM's kernels serve."""

CONTEXT = 4096
"""Positions the model accepts, in tokens; rotary embeddings make a generous number free."""

PAD, EOS = "<pad>", "<eos>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""What is said, one after the other and by whomever: a chat of one message is the prompt that the examples have."""

IGNORED = -100
"""Target of positions without a loss, as torch's cross entropy expects it."""

Progress = Callable[[int, int, float], None]
"""Called after each step with steps done, steps in all (as many as done, when it was the last), and the loss."""


def show_progress(step: int, steps: int, loss: float) -> None:
    """Tell of every fiftieth supervised step, and of the last."""
    if step == steps or step % 50 == 0:
        sys.stdout.write(f"tiny model: supervised step {step}/{steps}, loss {loss:.3f}\n")
        sys.stdout.flush()


def is_current(path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any]) -> bool:
    """Whether the folder holds the model that these options make."""
    return not what_changed(path, config, env_path, env_options)


def what_changed(path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any]) -> list[str]:
    """Of what the model is made from, the parts that the one in the folder was not made from: nothing, or a word each.

    Raises:
        ConfigError: the environment offers no examples.
    """
    wanted, found = _fingerprint(config, _example_source(env_path, env_options), env_options), _read_fingerprint(path)
    return [name for name in wanted if found.get(name) != wanted[name]]


def _read_fingerprint(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / FINGERPRINT).read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def interrupted_after(path: Path) -> int:
    """Steps after which the warm start of the model in the folder was interrupted; 0: it was not."""
    return int(_read_fingerprint(path).get(INTERRUPTED, 0))


def make_tiny_model(
    path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any], progress: Progress
) -> None:
    """Make the model and put it at `path`; an older one of ours is replaced.

    Interrupted, it puts there what it has come to, unless what is there was made from the same and is whole.

    Raises:
        ConfigError: `path` holds something else, the width does not divide into heads, or the environment offers no
            usable examples.
    """
    refuse_foreign(path)
    if config.width % HEAD_DIM:
        raise ConfigError(f"tiny_model.width must be a multiple of {HEAD_DIM}, but is {config.width}")
    from flash.foreign.transformers import open_weights, without_bars

    env = _example_source(env_path, env_options)
    tokenizer = _make_tokenizer(env.alphabet())
    model = _make_model(config, tokenizer)
    made_from = _fingerprint(config, env, env_options)

    def save() -> None:
        with atomic_folder(path) as folder:
            with without_bars():
                model.save_pretrained(folder)
            open_weights(folder)
            tokenizer.save_pretrained(str(folder))
            (folder / FINGERPRINT).write_text(json.dumps(made_from, indent=2))

    done = 0

    def count(step: int, steps: int, loss: float) -> None:
        nonlocal done
        done = step
        progress(step, steps, loss)

    try:
        with _one_thread():
            _warm_start(model, tokenizer, env, config, count)
    except KeyboardInterrupt:
        whole = is_current(path, config, env_path, env_options) and not interrupted_after(path)
        if done and not whole:
            made_from[INTERRUPTED] = done
            save()
            sys.stdout.write(f"tiny model: interrupted after {done} steps; {path} has the model as it is by now\n")
        raise
    save()


def refuse_foreign(path: Path) -> None:
    """Raises ConfigError: there is something at `path` that was not made here, and is never written to."""
    if path.exists() and not _is_ours(path):
        raise ConfigError(
            f"{path} exists and is no tiny model of ours (it has no {FINGERPRINT}); name another folder, or "
            "use this one as it is: without the [tiny_model] table or, for the critics' model, critic.tiny_layers"
        )


def save_tokenizer(folder: Path, env_path: str, env_options: dict[str, Any]) -> None:
    """The tokenizer that such a model would have, without the model.

    Raises:
        ConfigError: the environment offers no usable examples.
    """
    _make_tokenizer(_example_source(env_path, env_options).alphabet()).save_pretrained(str(folder))


def _fingerprint(config: TinyModelConfig, env: WarmStart, env_options: dict[str, Any]) -> dict[str, Any]:
    """Of the environment only what the model is taught: most options, such as a failure rate, change nothing of it."""
    examples = env.solved_examples(SAMPLE, config.seed)
    # An environment that draws without the seed shows others each time: its options have to do.
    repeatable = examples == env.solved_examples(SAMPLE, config.seed)
    made_from = {
        "recipe": RECIPE,
        "tiny_model": config,
        "alphabet": env.alphabet(),
        "examples": examples if repeatable else env_options,
    }
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
    try:
        check_solved_examples(env.alphabet(), env.solved_examples(TRIED, 0), TRIED)
    except Exception as error:  # somebody else's code
        raised = f"its examples or its alphabet raised {describe_error(error)}"
        told = str(error) if isinstance(error, EnvError) else raised
        raise ConfigError(f"env.path: {env_path}: {told}") from error
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
        chat_template=CHAT_TEMPLATE,
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
    """Supervised steps on fresh solved examples, until the model is good enough, learns no more, or no step is left."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    accuracy = 0.0
    losses: list[float] = []
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
        losses.append(loss.item())
        good_enough = accuracy >= STOP_AT or _falls_no_further(losses)
        progress(step + 1, step + 1 if good_enough else config.warm_start_steps, losses[-1])
        if good_enough:
            return
    if config.warm_start_steps:
        sys.stdout.write(
            f"tiny model: warm_start_steps = {config.warm_start_steps} are made; the model is kept, though it would "
            f"get {accuracy:.1%} of the examples right and not {STOP_AT:.0%}\n"
        )


def _falls_no_further(losses: list[float]) -> bool:
    """Looked at once per window: the mean of the last one against the one before."""
    if len(losses) < 2 * WINDOW or len(losses) % WINDOW:
        return False
    before, now = sum(losses[-2 * WINDOW : -WINDOW]), sum(losses[-WINDOW:])
    return now > (1 - LEAST_GAIN) * before


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
    try:
        check_letters(example, tokenizer.get_vocab().keys())
    except EnvError as error:
        raise ConfigError(str(error)) from None
    ids: list[int] = []
    learned: list[int] = []
    for turn in (example, *example.later):
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
def _one_thread() -> Generator[None]:
    """Let torch compute in one thread: in models this small, threads that wait for each other decide how long it takes.

    Where another program shares two cores, a step of examples/tiny.toml takes 0.2 s in one thread, and 3 s in two.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
