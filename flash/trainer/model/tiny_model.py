"""Make the tiny model: a small Qwen3 that is trained on the environment's solved examples, without a model hub.

`flash.run.models` makes it before a run with a `[tiny_model]` table. The result is an ordinary Hugging Face folder,
with a tokenizer of the environment's characters.

An environment with solved examples (`flash.environment.interface.WarmStart`) gives prompts with right answers. The
supervised *warm start* trains on them. It ends as soon as the model's sampled answers are right for nearly a quarter of
the examples. Then the model can answer at all, and most of the improvement is left to reinforcement learning. If the
examples are partly random, such as moves that a demonstrator draws, no model reaches this accuracy. Then the warm start
ends when the loss stops falling.

The folder has a *fingerprint* file with everything that the model depends on. The model is made again only if a part of
the fingerprint changes. A folder without this file is never written to, because Flash has not made it. If a warm start
is interrupted, the unfinished model is kept, and each later use of it prints a notice.

Functions import torch and transformers only where they need them, because a check whether a folder is current needs
neither and must be fast.

Shape legend: B = examples of a step, T = tokens of the longest example (padded on the right), V = vocabulary.
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
from flash.environment.calls import typed_errors
from flash.environment.interface import SolvedExample, WarmStart
from flash.environment.results import check_letters, check_solved_examples
from flash.errors import ConfigError, EnvError
from flash.trainer.checkpoint_files import atomic_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FINGERPRINT = "flash_tiny.json"
"""Name of the fingerprint file in the model's folder, which holds everything that the model was made from."""

INTERRUPTED = "interrupted_after"
"""Key in the fingerprint file: number of steps after which the warm start was interrupted."""

SEED = 1
"""Seed of the initial weights and of the choice of examples. It is not `run.seed`, because runs with other seeds
share the folder of a model."""

RECIPE = 3
"""Part of the fingerprint. Raise it if a change of this module makes another model from the same options."""

STOP_AT = 0.22
"""Mean probability of a right answer (accuracy when sampled at temperature 1) at which the warm start ends, so much is
left to learn. The end is no fixed step, because seeds differ by a factor of two in how fast the model learns."""

SMOOTHING = 0.1
"""Weight of the newest step in the running mean that is compared with `STOP_AT`. One step has too few examples."""

WINDOW = 150
"""Number of steps over which losses are averaged to decide whether the loss still falls. The window is longer than the
plateau of the loss at the start."""

MIN_GAIN = 0.003
"""Share by which the mean loss of a window must be below the mean loss of the window before. Otherwise the loss has
stopped falling."""

CHECKED_EXAMPLES = 3
"""Number of solved examples whose form is checked before the environment's examples are used. A fault of form is
usually in all examples, and each example that training uses is checked for unknown characters."""
FINGERPRINT_EXAMPLES = 16
"""Number of solved examples in the fingerprint. The fingerprint has examples in place of the environment's options,
because options that do not change the examples do not change the model."""

LR_WARMUP_STEPS = 20
"""Steps of linear learning-rate warm-up, in which Adam's moments are still poor estimates."""

HEAD_DIM = 32
"""Size of an attention head: the smallest that vLLM's kernels serve."""

CONTEXT = 4096
"""Largest number of tokens of a sequence. A large number costs nothing with rotary embeddings."""

PAD, EOS = "<pad>", "<eos>"
"""Texts of the two tokens that are not characters: padding and end of text."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that concatenates the messages and drops their roles. So a chat of one message gives the same text as a
prompt of the examples."""

IGNORED = -100
"""Target id of positions without a loss, as torch's cross entropy expects it."""

Progress = Callable[[int, int, float], None]
"""Callback after each step: steps done, steps in total (equal to steps done at the last step), and the loss."""


def show_progress(step: int, steps: int, loss: float) -> None:
    """Print a line for every fiftieth supervised step and for the last step."""
    if step == steps or step % 50 == 0:
        sys.stdout.write(f"tiny model: supervised step {step}/{steps}, loss {loss:.3f}\n")
        sys.stdout.flush()


def is_current(path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any]) -> bool:
    """Return True if the folder holds the model that these options make.

    Raises:
        ConfigError: the environment offers no usable examples.
    """
    return not changed_parts(path, config, env_path, env_options)


def changed_parts(path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any]) -> list[str]:
    """Return the names of the fingerprint's parts in which the model in the folder differs; empty if it is current.

    If the folder has no tiny model, the names of all parts are returned.

    Raises:
        ConfigError: the environment offers no usable examples.
    """
    wanted = _fingerprint(config, _example_source(env_path, env_options), env_options)
    found = _read_fingerprint(path)
    return [name for name in wanted if found.get(name) != wanted[name]]


def _read_fingerprint(path: Path) -> dict[str, Any]:
    """Return the fingerprint of the model in a folder; empty if there is none that can be read."""
    try:
        found = json.loads((path / FINGERPRINT).read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def interrupted_after(path: Path) -> int:
    """Return the steps after which the warm start of the model in the folder was interrupted; 0 if it was not."""
    return int(_read_fingerprint(path).get(INTERRUPTED, 0))


def make_tiny_model(
    path: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any], progress: Progress
) -> None:
    """Make the model and write it to `path`. An older tiny model in this folder is replaced.

    `progress` is called after each step of the warm start. On KeyboardInterrupt, the unfinished model is written, and
    the interrupt is raised again. Then nothing is written if no step is done, or if `path` already has a finished model
    of the same options.

    Raises:
        ConfigError: `path` holds something else, the width is not a multiple of the head size, or the environment
            offers no usable examples.
    """
    refuse_foreign(path)
    _check_width(config)
    from flash.foreign.transformers import hidden_progress_bars, make_weights_readable

    env = _example_source(env_path, env_options)
    tokenizer = _make_tokenizer(env.alphabet())
    model = _make_model(config, tokenizer)
    made_from = _fingerprint(config, env, env_options)

    def save() -> None:
        with atomic_folder(path) as folder:
            with hidden_progress_bars():
                model.save_pretrained(folder)
            make_weights_readable(folder)
            tokenizer.save_pretrained(str(folder))
            (folder / FINGERPRINT).write_text(json.dumps(made_from, indent=2))

    done = 0  # steps of the warm start so far, for the notice after an interrupt

    def count(step: int, steps: int, loss: float) -> None:
        nonlocal done
        done = step
        progress(step, steps, loss)

    try:
        with _one_thread():
            _warm_start(model, tokenizer, env, config, count)
    except KeyboardInterrupt:
        finished = is_current(path, config, env_path, env_options) and not interrupted_after(path)
        if done and not finished:
            made_from[INTERRUPTED] = done
            save()
            sys.stdout.write(f"tiny model: interrupted after {done} steps; {path} has the model after these steps\n")
        raise
    save()


def refuse_foreign(path: Path) -> None:
    """Refuse to write to a path that holds anything but a tiny model or an empty folder.

    Raises:
        ConfigError: `path` holds something else.
    """
    if path.exists() and not _is_ours(path):
        raise ConfigError(
            f"{path} exists and is no tiny model of ours (it has no {FINGERPRINT}); name another folder, or "
            "use this one as it is: without the [tiny_model] table"
        )


def save_tokenizer(folder: Path, env_path: str, env_options: dict[str, Any]) -> None:
    """Write the tokenizer that the environment's tiny model would have.

    `flash.run.checks.dry_run` calls this, because it needs only the tokenizer.

    Raises:
        ConfigError: the environment offers no usable examples.
    """
    _make_tokenizer(_example_source(env_path, env_options).alphabet()).save_pretrained(str(folder))


def save_shape(folder: Path, config: TinyModelConfig, env_path: str, env_options: dict[str, Any]) -> None:
    """Write the config.json that the tiny model would have. `flash plan` needs no more of a model.

    Raises:
        ConfigError: the width is not a multiple of the head size, or the environment offers no usable examples.
    """
    _check_width(config)
    _shape(config, _make_tokenizer(_example_source(env_path, env_options).alphabet())).save_pretrained(folder)


def _check_width(config: TinyModelConfig) -> None:
    """Raise ConfigError if the width is not a multiple of the head size."""
    if config.width % HEAD_DIM:
        raise ConfigError(f"tiny_model.width must be a multiple of {HEAD_DIM}, but is {config.width}")


def _fingerprint(config: TinyModelConfig, env: WarmStart, env_options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the model depends on, by the names of the parts.

    The parts that come from the environment are its alphabet and the examples from which the model learns. Most of its
    options, such as a failure rate, do not change the model.

    Raises:
        ConfigError: the examples or the alphabet are not usable.
    """
    examples = env.solved_examples(FINGERPRINT_EXAMPLES, SEED)
    # An environment that ignores the seed returns other examples each time. The fingerprint then has its options.
    repeatable = examples == env.solved_examples(FINGERPRINT_EXAMPLES, SEED)
    made_from = {
        "recipe": RECIPE,
        # Models of earlier versions, in which `seed` and `tied` were options, stay current with these values.
        "tiny_model": {**msgspec.to_builtins(config), "seed": SEED, "tied": True},
        "alphabet": env.alphabet(),
        "examples": examples if repeatable else env_options,
    }
    return json.loads(msgspec.json.encode(made_from))


def _is_ours(path: Path) -> bool:
    """Return True for a folder that is empty or has a tiny model."""
    return path.is_dir() and ((path / FINGERPRINT).is_file() or not any(path.iterdir()))


def _example_source(env_path: str, env_options: dict[str, Any]) -> WarmStart:
    """Return the environment that gives the solved examples.

    Raises:
        ConfigError: the environment offers no examples, or its examples or alphabet are not usable.
    """
    kind = load_object(env_path)
    kwargs = check_options(kind, env_options, "env.options")
    with _config_errors(env_path, "start"):
        env = kind(**kwargs)
    if not isinstance(env, WarmStart):
        raise ConfigError(
            f"{env_path} offers no solved examples, which a tiny model learns from; give it the methods "
            "solved_examples and alphabet (see flash.environment.WarmStart), or set model.path to an existing model"
        )
    source = _CheckedExamples(env_path, env)
    source.solved_examples(CHECKED_EXAMPLES, 0)
    return source


class _CheckedExamples:
    """The solved examples of a user's environment. Each method returns usable values, or raises a ConfigError.

    Args:
        path: the environment's `module:Class`, for the errors.
        env: the environment.
    """

    def __init__(self, path: str, env: WarmStart) -> None:
        self._path = path
        self._env = env

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` examples, whose characters are all in the alphabet. Raises ConfigError if they are wrong."""
        with _config_errors(self._path, "solved_examples"):
            examples = self._env.solved_examples(count, seed)
            check_solved_examples(self._env.alphabet(), examples, count)
            return examples

    def alphabet(self) -> str:
        """Return all characters of the examples. Raises ConfigError if the user's method raises an exception."""
        with _config_errors(self._path, "alphabet"):
            return self._env.alphabet()


@contextlib.contextmanager
def _config_errors(path: str, call_name: str) -> Generator[None]:
    """Turn exceptions of the block, which calls the environment `path`, into a ConfigError.

    A cancellation, the user's interrupt, and errors of Flash other than an EnvError pass unchanged. `call_name` names
    the call in the error.

    Raises:
        ConfigError: the block raised any other exception.
    """
    try:
        with typed_errors(call_name):
            yield
    except EnvError as error:
        raise ConfigError(f"env.path: {path}: {error}") from error


def _make_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of the alphabet, then padding and end of text.

    A character that occurs several times in the alphabet gets one token.
    """
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
    """Return a Qwen3 of the configured shape with random float32 weights, drawn from `SEED`.

    The random state of the CPU is neither used nor changed, so the same options always make the same model. The seeds
    of GPUs are set, but tiny models are made on the CPU, before anything draws on a GPU.
    """
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    shape = _shape(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(shape).float()
    model.generation_config = GenerationConfig.from_model_config(shape)
    return model


def _shape(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Return the configuration of a Qwen3 with the configured layers and width, and a vocabulary for the tokenizer."""
    from transformers import Qwen3Config

    heads = config.width // HEAD_DIM
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        intermediate_size=4 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        # With the usual 0.02, the loss of such a narrow model stays on a plateau for hundreds of steps.
        initializer_range=config.width**-0.5,
        bos_token_id=None,
        eos_token_id=cast("int", tokenizer.eos_token_id),
        pad_token_id=cast("int", tokenizer.pad_token_id),
    )


def _warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    env: WarmStart,
    config: TinyModelConfig,
    progress: Progress,
) -> None:
    """Train on new solved examples in each step.

    Training ends when the running mean of the accuracy reaches `STOP_AT`, when the loss stops falling, or when all
    steps are made. If the steps are used up first, a notice with the accuracy is printed.

    Raises:
        ConfigError: an example has a character that is not in the alphabet.
    """
    # A change of this training needs a new `RECIPE`. The β and the clip norm of 1 are usual values.
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    accuracy = 0.0
    losses: list[float] = []
    for step in range(config.warm_start_steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / LR_WARMUP_STEPS)
        # Each step has its own seed, so that its examples are new ones. Another `SEED` gives none of these seeds.
        examples = env.solved_examples(config.batch_size, SEED * config.warm_start_steps + step)
        ids_BT, targets_BT = _encode(tokenizer, examples)
        loss, probability = _loss(model, ids_BT, targets_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accuracy += SMOOTHING * (probability - accuracy)
        losses.append(loss.item())
        finished = accuracy >= STOP_AT or _has_stopped_falling(losses)
        progress(step + 1, step + 1 if finished else config.warm_start_steps, losses[-1])
        if finished:
            return
    if config.warm_start_steps:
        sys.stdout.write(
            f"tiny model: warm_start_steps = {config.warm_start_steps} are made; the model is kept, though it would "
            f"get {accuracy:.1%} of the examples right and not {STOP_AT:.0%}\n"
        )


def _has_stopped_falling(losses: list[float]) -> bool:
    """Return True if the mean loss of the last `WINDOW` steps is hardly below the mean loss of the `WINDOW` steps
    before.

    "Hardly" means by less than the share `MIN_GAIN`. The means are compared only at the end of each window; in between,
    False is returned.
    """
    if len(losses) < 2 * WINDOW or len(losses) % WINDOW:
        return False
    before, now = sum(losses[-2 * WINDOW : -WINDOW]), sum(losses[-WINDOW:])
    return now > (1 - MIN_GAIN) * before


def _encode(tokenizer: PreTrainedTokenizerFast, examples: list[SolvedExample]) -> tuple[Tensor, Tensor]:
    """Return token ids and targets, int64 [B, T] each.

    The target of a position is the next token if this token belongs to an answer or ends an answer, else `IGNORED`.
    Shorter examples are padded on the right, with the target `IGNORED`.
    """
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
    """Return token ids and targets of an example with all its turns (prompt and answer each), in the order of an
    episode.

    Only the tokens of answers, and the end of each answer, have a loss.

    Raises:
        ConfigError: the example has a character that is not in the tokenizer's alphabet.
    """
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
    """Return the mean loss per answer token, and the mean probability of sampling all answers of an example."""
    import torch

    # No mask is needed: padding is on the right, where causal attention does not look.
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    loss_BT = torch.nn.functional.cross_entropy(
        logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORED, reduction="none"
    )
    loss = loss_BT.sum() / (targets_BT != IGNORED).sum()
    return loss, (-loss_BT.detach().sum(dim=1)).exp().mean().item()


@contextlib.contextmanager
def _one_thread() -> Generator[None]:
    """Let torch use one thread inside the block, and restore the number of threads afterwards.

    In a model this small, several threads mostly wait for each other. For example, on a machine with two cores that
    another program also uses, a step of examples/tiny.toml takes 0.2 s with one thread and 3 s with two threads. The
    number of threads is a setting of the whole process.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
