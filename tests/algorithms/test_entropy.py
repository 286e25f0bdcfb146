"""The coefficient of the entropy bonus, as entropy comes and goes."""

from __future__ import annotations

from algorithms.entropy import EntropyTarget


def test_the_coefficient_rises_below_the_target_falls_above_it_and_counts_only_below() -> None:
    target = EntropyTarget(nats=0.5, step=0.01)
    coefficient, found = 0.0, []
    for entropy in (0.4, 0.3, 0.5, 0.6, 0.6, 0.6, 0.4):
        coefficient = target.moved(coefficient, entropy)
        found.append((round(coefficient, 3), round(target.bonus(coefficient, entropy), 3)))
    expected = [(0.01, 0.01), (0.02, 0.02), (0.02, 0.02), (0.01, 0.0), (0.0, 0.0), (0.0, 0.0), (0.01, 0.01)]
    assert found == expected
