"""Load failures: the kind that a worker's error becomes, and its way to the node loop as plain data."""

from __future__ import annotations

import msgspec
import pytest

from flash.errors import DeadlineError, FlashError, TransportError, VersionGoneError, WeightsError
from flash.weights.versions import LoadFailure


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (VersionGoneError("version 3 is not held any more"), "gone"),
        (WeightsError("tensor a is damaged"), "damaged"),
        (TransportError("a message that quotes: version 3 is not held any more, tensor a is damaged"), "failed"),
        (DeadlineError("weights version 3", 5.0, "the trainer's rank 0"), "failed"),
    ],
)
def test_the_kind_of_a_failure_is_the_type_of_its_error_and_not_its_message(error: FlashError, kind: str) -> None:
    failure = LoadFailure.of(error)
    assert (failure.kind, failure.message) == (kind, str(error))
    assert LoadFailure.from_plain(failure.to_plain()) == failure


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        LoadFailure.from_plain({"kind": "lost", "message": ""})
