"""Ledger: counts of every task and every generated token of a run, by what has become of them.

`flash.samples.store` enters (*books*) each change. `check` compares the ledger with the numbers of tasks and tokens
that the store holds, which are counted independently.

Law of conservation: `issued = trained + filtered + given_up + in_flight` and
`generated = trained_tokens + discarded_tokens + buffered_tokens` hold after every event.
"""

from __future__ import annotations

import msgspec

from flash.errors import ContractError
from flash.types import Outcome


class Ledger(msgspec.Struct):
    """Counters of one run. They are part of each checkpoint, so they include the work of all hubs of the run."""

    issued: int = 0
    """Number of tasks that were issued."""
    trained: int = 0
    """Number of tasks of which at least one token entered the loss of a committed step."""
    filtered: int = 0
    """Number of tasks whose finished trajectory was filtered out."""
    given_up: dict[Outcome, int] = {}
    """Number of tasks that left untrained for another reason than a filter, by reason."""
    retried: dict[Outcome, int] = {}
    """Number of attempts that failed and were tried again, by reason. Retries do not end a task."""
    generated_tokens: int = 0
    """Number of action tokens, which the policy sampled, that were delivered or were lost with a reported failure."""
    trained_tokens: int = 0
    """Number of action tokens that entered a loss."""
    discarded_tokens: dict[Outcome, int] = {}
    """Number of action tokens that will never enter a loss, by reason."""

    def give_up(self, outcome: Outcome, count: int = 1) -> None:
        """Book tasks that leave untrained, for the reason `outcome`."""
        self.given_up[outcome] = self.given_up.get(outcome, 0) + count

    def retry(self, outcome: Outcome) -> None:
        """Book a failed attempt that will be repeated."""
        self.retried[outcome] = self.retried.get(outcome, 0) + 1

    def discard(self, outcome: Outcome, tokens: int) -> None:
        """Book generated tokens that will not be trained."""
        if tokens:
            self.discarded_tokens[outcome] = self.discarded_tokens.get(outcome, 0) + tokens

    def train(self, trained: int, tokens: int, times: int = 1) -> None:
        """Book a task of a committed step.

        Args:
            trained: number of the task's tokens that entered the loss. A task without any is booked as given up because
                it is stale, that is, too old.
            tokens: number of all action tokens of the task. The tokens that did not enter the loss are booked as stale.
            times: 1 books the task. -1 undoes an earlier booking, because the step will be trained again.
        """
        self.trained_tokens += times * trained
        self.discard(Outcome.STALE, times * (tokens - trained))
        if trained:
            self.trained += times
        else:
            self.give_up(Outcome.STALE, times)

    def check(self, in_flight: int, buffered_tokens: int) -> None:
        """Compare the ledger with independent counts.

        Args:
            in_flight: number of tasks that were issued, and are neither trained, filtered out nor given up.
            buffered_tokens: number of action tokens of finished trajectories of these tasks.

        Raises:
            ContractError: a task or a token is unaccounted for.
        """
        booked = self.trained + self.filtered + sum(self.given_up.values()) + in_flight
        if booked != self.issued:
            raise ContractError(f"tasks are not conserved: issued {self.issued}, accounted for {booked}: {self}")
        tokens = self.trained_tokens + sum(self.discarded_tokens.values()) + buffered_tokens
        if tokens != self.generated_tokens:
            raise ContractError(
                f"tokens are not conserved: generated {self.generated_tokens}, accounted for {tokens}: {self}"
            )

    def totals(self, in_flight: int) -> dict[str, int]:
        """Return all counts as one flat dictionary, for summaries and metrics."""
        flat = {
            "issued": self.issued,
            "trained": self.trained,
            "filtered": self.filtered,
            "given_up": sum(self.given_up.values()),
            "in_flight": in_flight,
            "generated_tokens": self.generated_tokens,
            "trained_tokens": self.trained_tokens,
            "discarded_tokens": sum(self.discarded_tokens.values()),
        }
        flat |= {f"given_up_{outcome}": count for outcome, count in sorted(self.given_up.items())}
        flat |= {f"retried_{outcome}": count for outcome, count in sorted(self.retried.items())}
        flat |= {f"discarded_tokens_{outcome}": count for outcome, count in sorted(self.discarded_tokens.items())}
        return flat
