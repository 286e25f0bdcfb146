"""A whole run of an agent that asks for JSON: real vLLM, whose weights change in the middle of answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import read_samples
from tests.integration.whole_run import CONFIG, Run, all_trained

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

FORMS = CONFIG.replace(
    """path = "envs.arithmetic:Arithmetic"
options = {{ digits = 1 }}
""",
    """path = "envs.agent:Agent"

[env.options]
function = "tests.integration.form_agent:solve"

[env.options.tasks]
path = "tests.integration.form_agent:Sums"
options = {{ digits = 1 }}
""",
).replace("max_length = 32", "max_length = 64")


@pytest.mark.parametrize("swap", ["recompute", "abort"])
def test_a_run_trains_an_agent_that_asks_for_json(start: Callable[..., Run], swap: str) -> None:
    steps = 3
    run = start(f"run.steps={steps}", "eval.every=0", "rollout.max_new_tokens=50", f"rollout.swap={swap}", text=FORMS)
    assert run.wait() == 0, run.text()
    all_trained(run, steps * 32)
    assert [row["failures"] for row in run.rows()] == [0] * steps
    mismatches = [row["mismatch_k3_age_0"] for row in run.rows() if "mismatch_k3_age_0" in row]
    assert max(mismatches) < 1e-6, "an answer is trained as it was sampled under its form"
    directory = RunDirectory(run.directory)
    samples = [sample for step in range(steps) for sample in read_samples(directory, step)]
    answers = [turn.action for sample in samples for turn in sample.turns]
    whole = [answer for answer in answers if answer.endswith("}")]
    assert len(whole) > len(answers) / 2, answers
    assert all(set(json.loads(answer)) == {"sum", "why"} for answer in whole)
    run.nothing_left()
