"""Measures the steps of a trainer rank: arithmetic, memory, and a trace of torch's profiler.

The loops of `flash train` and of `flash sft` call `StepMeter.begin` before a step and `StepMeter.finish` after it,
which returns the metrics `memory_gib` and `mfu` (the share of the cards' peak arithmetic that the model uses). They
call `StepProfiler.begin_step` before each step, and `close` once at their end. Measuring does not change any number
that a step computes, and never ends the run: if a trace cannot be written, a warning is logged.

A *micro-batch* is the input of one forward and backward pass: some sequences, one after another. A *data shard* is the
part of a batch that one rank trains, or several ranks that compute the same sequences together.

Shape legend: U = computed tokens of a micro-batch (a prefix that several sequences share is computed once), R = trainer
ranks.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from flash.foreign.transformers import AttentionLayer, attention_layers, routed_share
from flash.trainer.mesh import TrainerMesh
from flash.trainer.packing import DUMMY, MicroBatch

log = logging.getLogger("flash")

GIB = 2**30
"""Number of bytes of one GiB."""
PEAKS: dict[str, float] = {
    "GB200": 2500e12,  # NVIDIA: 5 PFLOP/s with sparsity
    "B200": 2250e12,  # NVIDIA: 4.5 PFLOP/s with sparsity
    "GH200": 989e12,  # tables
    "H200 NVL": 835e12,  # tables
    "H200": 989e12,  # NVIDIA: 1,979 TFLOP/s with sparsity
    "H100 PCIe": 756e12,  # NVIDIA: 1,513 TFLOP/s with sparsity
    "H100 NVL": 835e12,  # tables
    "H100": 989e12,  # NVIDIA: 1,979 TFLOP/s with sparsity
    "H20": 148e12,  # tables
    "A100": 312e12,  # NVIDIA: 312 TFLOP/s
    "L40S": 362e12,  # NVIDIA: 362.05 TFLOP/s
    "RTX 4090(?! )": 165e12,  # tables; the 4090 D and the 4090 of laptops, whose names go on, are slower
}
"""Peak bfloat16 FLOP/s of NVIDIA's cards for dense matrices, by a part of the name that torch gives the card.

The comments name the source: the number in NVIDIA's data sheet, or `tables` of other projects that agree with each
other. Data sheets often give only the peak with sparsity, which is twice the peak for dense matrices. The names are
regular expressions, and the first match counts. A card without a confirmed number is left out, and runs on it report no
`mfu`.
"""
TRACES = "profile"
"""Name of the folder inside the run's folder that holds the traces."""
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables that keep torch's profiler from printing a line at each start and stop."""


def peak_flops(card: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a card from `PEAKS`, given its name in torch; None if it is not known."""
    # A part of a card (MIG) has the name of the whole card in its own name, but is slower.
    if "MIG" in card:
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", card)), None)


@dataclass(frozen=True)
class ModelArithmetic:
    """Floating point operations (FLOPs) that a model needs for its tokens, as MFU counts them.

    MFU is the share of the device's peak that the model's own arithmetic takes (PaLM, arXiv 2204.02311, appendix B). A
    forward pass has one multiplication and one addition for each weight and token, which are 2 FLOPs. A backward pass
    needs 2 FLOPs for the gradient of the layer's input, and 2 more for the gradient of the weight if the weight is
    trained. So a trained weight costs 6 FLOPs per token, and a frozen weight (under LoRA) 4.

    For each token, an attention layer costs 2 · (number of tokens that it sees) · (numbers in all queries and all
    values of one token) FLOPs in the forward pass, and twice as many in the backward pass. A token sees itself and the
    tokens before it, as far as the window of the layer reaches.

    A prefix that several sequences of a micro-batch share is computed once, and counts once. Activations that are
    computed again for the backward pass do not count. Passes of critics, a reference or a teacher do not count, nor do
    passes that only read log-probs. In a mixture of experts, only the experts that a token is sent to count. The output
    layer counts for action tokens only, because it is not computed for other tokens.
    """

    trained: float
    """Number of trained weights that are multiplied with each token, without the output layer."""
    frozen: float
    """Number of frozen weights that are multiplied with each token, without the output layer."""
    output: int
    """Number of weights of the output layer."""
    output_trained: bool
    """True if the output layer is trained."""
    attention: list[AttentionLayer]
    """The size of each attention layer."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Count the weights of a model, which must not be divided over ranks yet: the counts are of whole tensors."""
        # `experts` is the number of experts of a layer, 0 without any; `share` is the share that a token is sent to.
        experts, share = routed_share(model)
        output: Any = model.get_output_embeddings()
        # Embeddings are not counted, since a lookup multiplies nothing. The output layer is counted on its own, and may
        # share its weights with the embedding.
        apart = {id(weight) for weight in output.parameters()}
        apart |= {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        weights = {True: 0.0, False: 0.0}
        for weight in model.parameters():
            # Biases and the scales of norms are not multiplied with matrices.
            if weight.dim() < 2 or id(weight) in apart:
                continue
            # A tensor of three dimensions holds one matrix per expert, and a token is sent to a share of the experts.
            routed = experts > 1 and weight.dim() == 3 and weight.shape[0] == experts
            weights[weight.requires_grad] += weight.numel() * (share if routed else 1.0)
        return cls(
            trained=weights[True],
            frozen=weights[False],
            output=sum(weight.numel() for weight in output.parameters() if weight.dim() == 2),
            output_trained=any(weight.requires_grad for weight in output.parameters()),
            attention=attention_layers(model),
        )

    def flops(self, micro_batches: Sequence[MicroBatch], *, backward: bool = True) -> float:
        """Return the FLOPs of one forward pass over micro-batches, and of its backward pass if `backward`.

        `flash.trainer.step` calls this for each step. `backward` is False in a step that trains only the critics (value
        models), in which the policy runs forward alone. The class explains what is counted.
        """
        total = 0.0
        for micro in micro_batches:
            if micro is DUMMY:  # a dummy only makes the ranks have equally many micro-batches
                continue
            # `place_U` leaves out tokens of shared prefixes that another sequence of the micro-batch computes.
            place_U = micro.computed.place_U
            # Count the forward pass, and the gradients of the layers' inputs, which cost as much.
            total += 2 * (self.trained + self.frozen) * len(place_U) * (2 if backward else 1)
            total += 2 * self.output * len(micro.before_T) * (2 if backward else 1)
            if backward:  # count the gradients of trained weights
                total += 2 * self.trained * len(place_U) + 2 * self.output * self.output_trained * len(micro.before_T)
            seen_U = micro.position_P[place_U] + 1
            # Layers of equal size are counted together.
            for layer, layers in Counter(self.attention).items():
                seen = float(np.minimum(seen_U, layer.window).sum())
                total += layers * 2 * layer.width * seen * (3 if backward else 1)
        return total


class StepMeter:
    """Measures the memory of the trainer ranks in a step, and the share of the cards' peak arithmetic that a step uses.

    In each step all ranks call `begin`, then `finish`.

    Args:
        mesh: the trainer ranks. `finish` is a collective of all ranks.
    """

    def __init__(self, mesh: TrainerMesh) -> None:
        self._mesh = mesh
        self._cuda = mesh.device.type == "cuda"
        # Peak FLOP/s of this rank's card; 0 if it is unknown, or on a CPU.
        self._peak = (peak_flops(torch.cuda.get_device_name()) or 0.0) if self._cuda else 0.0
        self._begun = 0.0  # time of `begin`, in seconds of `perf_counter`

    def begin(self) -> None:
        """Begin to measure a step. On a GPU, torch's record of the largest allocated memory is reset."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self._begun = time.perf_counter()

    def finish(self, flops: float, waited_s: float = 0.0) -> dict[str, float]:
        """Return `memory_gib`, and `mfu` if the peak of every rank's card is known. A collective of all ranks.

        On a CPU the memory is the memory of the process at this moment, not its largest value in the step.

        Args:
            flops: the FLOPs of the step on the samples of this rank. Ranks of one data shard have the same samples, so
                only one of them is counted.
            waited_s: seconds since `begin` in which this rank waited for samples. They do not count.
        """
        # A step ends by reading metrics from the GPU, so the GPU has finished all work of the step by now.
        seconds = time.perf_counter() - self._begun - waited_s
        memory = torch.cuda.max_memory_allocated() if self._cuda else resident_bytes()
        own = [float(memory), seconds, flops if self._mesh.leads_shard else 0.0, self._peak]
        row = torch.tensor(own, dtype=torch.float64, device=self._mesh.device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return performance_metrics(torch.stack(rows).cpu())


def performance_metrics(rows_R4: Tensor) -> dict[str, float]:
    """Return `memory_gib`, the largest memory of a rank, and `mfu` if all peaks are known.

    `mfu` is all FLOPs, divided by the seconds of the slowest rank and by the sum of all cards' peaks.

    Args:
        rows_R4: for each rank, bytes of memory, seconds of the step, FLOPs, and the peak FLOP/s of its card, which is 0
            if unknown.
    """
    memory_R, seconds_R, flops_R, peak_R = rows_R4.unbind(dim=1)
    metrics = {"memory_gib": memory_R.max().item() / GIB}
    if peak_R.min() > 0:
        metrics["mfu"] = (flops_R.sum() / (seconds_R.max() * peak_R.sum())).item()
    return metrics


def resident_bytes() -> int:
    """Return the bytes of main memory that this process uses now, including memory shared with other processes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class StepProfiler:
    """Records some steps of one trainer rank, and writes them as one Chrome trace.

    The trace begins when the rank asks for the batch of the first recorded step, and ends when it asks for the batch
    after the last recorded step. If the rank's process is replaced in between, the new process records the remaining
    steps, and its file replaces the earlier file. Each step is a bar with the name `step N` in the trace.

    Args:
        steps: the steps to record; nothing is recorded if it is empty.
        folder: the run's folder. The trace becomes `profile/rank-N.json.gz` inside it.
        rank: the number of this rank, N.
        cuda: True if the rank computes on a GPU, whose kernels are recorded too.
    """

    def __init__(self, steps: range, folder: Path, rank: int, *, cuda: bool) -> None:
        self._steps = steps
        self._file = folder / TRACES / f"rank-{rank}.json.gz"
        self._rank = rank
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler: Any = None  # torch's profiler while it records; None otherwise
        self._bar: Any = None  # the bar of the step that is being recorded; None otherwise

    def begin_step(self, step: int) -> None:
        """Begin a step: start recording at the first of the steps to record, and write the trace after the last one.

        The caller is about to request the batch of `step`. If `step` is not to be recorded, a recording in progress
        ends here, and its trace is written.
        """
        self._end_bar()
        if step not in self._steps:
            self.close()
            return
        if self._profiler is None:
            # torch reads these variables when its first profiler starts.
            for name, level in QUIET.items():
                os.environ.setdefault(name, level)
            self._profiler = profile(activities=self._activities, record_shapes=True, profile_memory=True)
            self._profiler.start()
        self._bar = record_function(f"step {step}")
        self._bar.__enter__()

    def close(self) -> None:
        """Stop recording and write the trace. Does nothing if nothing is being recorded."""
        self._end_bar()
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        # The trace is written under another name first, so that a reader never finds an unfinished file. This name ends
        # with .gz, too, because torch compresses only such files.
        part = self._file.with_name(f".{self._file.name}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part))
            os.replace(part, self._file)
        except (OSError, RuntimeError) as error:
            log.warning("the profile of trainer rank %d was not written to %s: %s", self._rank, self._file, error)
            with suppress(OSError):
                part.unlink()
            return
        if self._rank == 0:
            log.info("the profile is written to %s: open it at https://ui.perfetto.dev", self._file)

    def _end_bar(self) -> None:
        """End the bar of the step that is being recorded, if there is one."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.__exit__(None, None, None)
