import argparse
import math
import random
import warnings

import anyio
import pytest

from benchmarks import episodes as versus_trl_problems
from benchmarks.form import Args
from benchmarks.versus_trl import curves as versus_trl_curves
from benchmarks.versus_trl import run as versus_trl
from benchmarks.versus_trl.curves import Case, Curve, Point, keep, over_seeds, read, rows, seconds_to
from benchmarks.versus_trl.run import CASES, OTHERS, WORKLOADS, configured, label
from benchmarks.versus_trl.settings import TrlChoices, adamw_arguments, grpo_arguments
from benchmarks.versus_trl.task import CountedSums, LaggedOptions, LaggedSums
from envs.counting import CountingOptions
from flash.config.load import load
from flash.environment import HELD_OUT
from flash.errors import ConfigError, EnvError
from flash.samples.tasks import TaskSource

BOTH = pytest.mark.parametrize("case", list(CASES))


@pytest.fixture(autouse=True)
def no_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def workload(case, *overrides):
    return load([WORKLOADS / f"versus_trl_{case}.toml"], list(overrides))


def points(*pairs):
    return [
        Point(10 * index, at, accuracy, accuracy - 0.1, accuracy + 0.1) for index, (at, accuracy) in enumerate(pairs)
    ]


def curve(system, *pairs, case="short", seed=0):
    return Curve(
        case=case,
        system=system,
        seed=seed,
        software={},
        points=points(*pairs),
    )


# -- what is read off the curves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "seconds"),
    [
        (((0, 0.2), (10, 0.4), (30, 0.8)), 20.0),
        (((0, 0.2), (10, 0.6)), 10.0),
        (((0, 0.7), (10, 0.2)), 0.0),
        (((0, 0.2), (10, 0.6), (20, 0.3), (30, 0.9)), 10.0),
        (((0, 0.2), (10, 0.4), (20, 0.4), (30, 0.8)), 25.0),
    ],
    ids=["between evaluations", "at one", "at once", "and lost again", "after a plateau"],
)
def test_the_time_to_an_accuracy_is_its_first_crossing(pairs, seconds):
    assert seconds_to(points(*pairs), 0.6) == pytest.approx(seconds)


def test_an_accuracy_that_is_never_reached_has_no_time():
    assert math.isnan(seconds_to(points((0, 0.2), (10, 0.59)), 0.6))


def figures(ours, *theirs):
    case = Case(title="", accuracy=0.6, goal=2.5)
    others = [curve(f"TRL {number}", *pairs) for number, pairs in enumerate(theirs)]
    return {(row.case, row.metric): row for row in rows(case, "long", curve("Flash", *ours), others)}


def test_the_speedup_is_of_the_times_to_the_accuracy_and_not_of_the_steps():
    found = figures([(0, 0.2), (10, 0.6), (20, 0.8)], [(0, 0.2), (40, 0.6), (60, 0.8)], [(0, 0.2), (20, 0.6)])
    assert found["long, over TRL 0", "speedup"].ours == 4.0
    assert found["long, over TRL 0", "speedup"].met
    assert found["long, over TRL 0", "step_speedup"].ours == 3.0
    assert found["long, over TRL 1", "speedup"].ours == 2.0
    assert found["long, over TRL 1", "speedup"].at_least is None
    assert found["long, Flash", "to_60%_s"].ours == 10
    assert found["long, TRL 0", "step_s"].ours == 3.0


@pytest.mark.parametrize(("last", "same"), [(0.65, 1.0), (0.55, 0.0), (0.99, 1.0)])
def test_quality_is_the_same_unless_ours_ends_significantly_lower(last, same):
    found = figures([(0, 0.2), (10, 0.6), (20, last)], [(0, 0.2), (40, 0.6), (60, 0.8)])
    assert found["long, over TRL 0", "same_quality"].ours == same


def test_a_run_that_misses_the_accuracy_is_no_speedup_and_one_of_trl_is_a_lower_bound():
    never, soon = [(0, 0.2), (50, 0.5)], [(0, 0.2), (10, 0.6)]
    missed, bound = figures(never, soon), figures(soon, never)
    assert missed["long, over TRL 0", "speedup"].ours == 0.0
    assert missed["long, over TRL 0", "speedup"].met is False
    assert ("long, Flash", "to_60%_s") not in missed
    assert bound["long, over TRL 0", "speedup"].ours == 5.0


@pytest.mark.parametrize("system", ["Flash", "TRL 0"])
def test_an_accuracy_that_the_untrained_policy_has_is_refused(system):
    soon, trained = [(0, 0.6), (10, 0.7)], [(0, 0.2), (10, 0.7)]
    with pytest.raises(ConfigError, match=rf"untrained policy of {system} already has the accuracy 0\.6"):
        figures(*((soon, trained) if system == "Flash" else (trained, soon)))


def test_the_speedup_of_several_seeds_is_their_mean_with_an_interval():
    case = Case(title="", accuracy=0.6, goal=2.5)
    made = [
        row
        for seed, seconds in enumerate((20, 40, 80))
        for row in rows(
            case,
            "long",
            curve("Flash", (0, 0.2), (10, 0.6), seed=seed),
            [curve("TRL", (0, 0.2), (seconds, 0.6), seed=seed)],
        )
    ]
    found = {row.metric: row for row in over_seeds("long", made)}
    spread = 4.3027 * math.log(2) / math.sqrt(3)
    assert {row.case for row in found.values()} == {"long, 3 seeds, over TRL"}
    assert found["speedup"].ours == pytest.approx(4.0)
    assert found["speedup"].met
    assert found["speedup_low"].ours == pytest.approx(4 * math.exp(-spread))
    assert found["speedup_high"].ours == pytest.approx(4 * math.exp(spread))
    never = rows(case, "long", curve("Flash", (0, 0.2), (10, 0.5), seed=3), [curve("TRL", (0, 0.2), (9, 0.6), seed=3)])
    assert over_seeds("long", [*made, *never])[0].ours == 0.0
    assert not over_seeds("long", never)


def test_a_file_of_curves_keeps_the_other_runs_and_replaces_the_same_one(tmp_path):
    file = tmp_path / "results" / "curves.json"
    keep(file, [curve("TRL", (0, 0.1)), curve("Flash", (0, 0.1))])
    kept = keep(file, [curve("TRL", (0, 0.5)), curve("TRL", (0, 0.2), seed=1), curve("TRL", (0, 0.3), case="long")])
    assert kept == read(file)
    first = [(entry.case, entry.seed, entry.system, entry.points[0].accuracy) for entry in kept]
    assert first == [
        ("long", 0, "TRL", 0.3),
        ("short", 0, "Flash", 0.1),
        ("short", 0, "TRL", 0.5),
        ("short", 1, "TRL", 0.2),
    ]


def test_there_are_no_curves_where_there_is_no_file(tmp_path):
    assert read(tmp_path / "none.json") == []


def test_the_plot_has_a_panel_for_each_case_that_was_run(tmp_path):
    picture = tmp_path / "plot.png"
    versus_trl_curves.draw([curve("TRL", (0, 0.1), (1, 0.2)), curve("Flash", (0, 0.1), (1, 0.2))], CASES, picture)
    one = picture.stat().st_size
    versus_trl_curves.draw([curve("TRL", (0, 0.1)), curve("TRL", (0, 0.1), case="long")], CASES, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size != one


# -- both systems are asked for the same -----------------------------------------------------------------------------


@BOTH
def test_trl_gets_every_value_of_the_configuration(case):
    config = workload(case)
    given = grpo_arguments(config, OTHERS[case]["TRL"])
    accumulated = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
    assert accumulated == config.train.batch_size
    assert given["max_steps"] == config.run.steps
    assert given["num_generations"] == config.rollout.group_size
    assert given["max_completion_length"] == config.rollout.max_new_tokens
    assert given["temperature"] == config.rollout.temperature
    assert given["loss_type"] == "grpo"
    assert (given["epsilon"], given["epsilon_high"]) == (0.2, 0.2)
    assert given["bf16"] is (config.model.dtype == "bfloat16")
    optimizer = adamw_arguments(config.train)
    assert optimizer["lr"] == config.train.learning_rate
    assert optimizer["betas"] == config.train.betas
    assert optimizer["weight_decay"] == config.train.weight_decay


@BOTH
def test_what_trl_would_do_by_default_and_flash_does_not_is_turned_off(case):
    given = grpo_arguments(workload(case), OTHERS[case]["TRL"])
    off = ("shuffle_dataset", "gradient_checkpointing", "mask_truncated_completions", "use_vllm")
    assert {name: given[name] for name in off} == dict.fromkeys(off, False)
    assert (given["top_k"], given["top_p"], given["min_p"], given["repetition_penalty"]) == (0, 1.0, None, 1.0)
    assert (given["beta"], given["num_iterations"], given["scale_rewards"]) == (0.0, 1, "group")


def test_the_clipping_of_trl_is_flashs_at_its_own_scale_of_advantages():
    config = workload("long", "rollout.group_size=4", "train.max_grad_norm=0.5")
    assert grpo_arguments(config, TrlChoices())["max_grad_norm"] == pytest.approx(0.5 * math.sqrt(3 / 4))


@pytest.mark.parametrize(("aggregation", "loss_type"), [("token_mean", "dapo"), ("seq_mean_token_mean", "grpo")])
def test_an_aggregation_has_the_loss_type_with_the_same_denominator(aggregation, loss_type):
    config = workload("short", f"algorithm.aggregation={aggregation}")
    assert grpo_arguments(config, TrlChoices())["loss_type"] == loss_type


@pytest.mark.parametrize(
    "override",
    ["algorithm.objective=decoupled_ppo", "train.minibatches=2", "train.decay=linear"],
)
def test_what_trl_cannot_do_alike_is_refused(override):
    with pytest.raises(ValueError, match=r"not TRL's GRPO|no counterpart"):
        grpo_arguments(workload("short", override), TrlChoices())


def test_a_batch_is_cut_into_whole_groups():
    with pytest.raises(ValueError, match="cannot be cut into 3 parts"):
        grpo_arguments(workload("short"), TrlChoices(micro_batches=3))


@BOTH
def test_both_train_on_the_same_problems_in_the_same_order(case):
    config = workload(case, "run.seed=3", "run.steps=2")
    source = TaskSource(config.run.seed, config.rollout.group_size)
    groups = [source.issue(source.next_problem()) for _ in range(2 * config.groups_per_batch)]
    assert versus_trl_problems.training_seeds(config) == [group[0].seed for group in groups]


@BOTH
def test_the_held_out_problems_are_none_of_the_training_problems(case):
    config = workload(case, "run.steps=4")
    held_out = versus_trl_problems.held_out_seeds(config)
    assert len(held_out) == config.eval.problems
    assert min(held_out) >= HELD_OUT
    shown, trained = (
        {str(prompt) for prompt in versus_trl_problems.prompts(config, seeds)}
        for seeds in (held_out, versus_trl_problems.training_seeds(config))
    )
    assert not shown & trained


@BOTH
def test_flash_and_trl_may_use_both_cores(case):
    cluster = workload(case).cluster
    assert {*(cluster.node_cpus or range(2)), *(cluster.trainer_cpus or range(2))} == {0, 1}
    assert versus_trl.variables(2)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("case", ["short", "long"])
def test_there_is_room_for_the_longest_answer(case):
    config = workload(case)
    longest = max(len(text) for text in versus_trl_problems.prompts(config, versus_trl_problems.held_out_seeds(config)))
    assert longest + config.rollout.max_new_tokens <= config.model.max_length


def test_the_requirements_pin_every_package_and_share_flashs_versions():
    wanted = versus_trl.requirements()
    assert all("==" in requirement and "+" not in requirement for requirement in wanted)
    assert {"trl", "torch", "transformers"} <= {requirement.partition("==")[0] for requirement in wanted}


# -- the tasks -------------------------------------------------------------------------------------------------------


def test_every_short_answer_has_as_many_tokens_as_fit():
    config = workload("short")
    examples = LaggedSums(LaggedOptions(**config.env.options)).solved_examples(50, seed=0)
    assert {len(example.answer) + 1 for example in examples} == {config.rollout.max_new_tokens}


def test_the_long_answers_have_the_stated_tail():
    config = workload("long")
    env, rng = CountedSums(CountingOptions(**config.env.options)), random.Random(0)
    lengths = sorted(len(env._draw(rng, held_out=False, length=None).answer) for _ in range(4000))
    assert lengths[2000] == pytest.approx(24, abs=4)
    assert lengths[-1] == 20 * 24


def test_lagged_sums_are_rewarded_when_all_of_them_are_right():
    config = workload("short", "run.steps=1", "env.options={lag=4, length=6}")
    seeds = versus_trl_problems.training_seeds(config)[:3]
    right: list[str] = []
    for text in versus_trl_problems.prompts(config, seeds):
        a, b, c, d = map(int, text)
        whole = [d + a, d + a + b, d + a + b + c, 2 * d + a + b + c, 3 * d + 2 * a + b + c, 4 * d + 3 * a + 2 * b + c]
        right.append("".join(str(number % 10) for number in whole))
    wrong = [right[0][:-1] + str((int(right[0][-1]) + 1) % 10), right[1] + "0", right[2][:-1]]
    assert versus_trl_problems.rewards(config, seeds, right) == [1.0, 1.0, 1.0]
    assert versus_trl_problems.rewards(config, seeds, wrong) == [0.0, 0.0, 0.0]


def test_the_examples_of_lagged_sums_are_training_problems_with_right_answers_in_its_alphabet():
    config, env = workload("short"), LaggedSums(LaggedOptions())
    examples = env.solved_examples(300, seed=1)
    assert examples == env.solved_examples(300, seed=1)
    held_out = versus_trl_problems.prompts(config, versus_trl_problems.held_out_seeds(config))
    assert not {example.prompt for example in examples} & set(held_out)
    assert set("".join(example.prompt + example.answer for example in examples)) == set(env.alphabet())
    for example in examples:
        row = list(map(int, example.prompt + example.answer))
        assert all(row[i] == (row[i - 1] + row[i - 4]) % 10 for i in range(4, len(row)))


def test_counted_sums_recite_the_alphabet_backwards_with_the_sum_of_the_two_digits_before():
    for example in CountedSums(CountingOptions(median=5, longest=30)).solved_examples(50, seed=0):
        signs, digits = example.answer[::2], [int(digit) for digit in example.prompt[1:] + example.answer[1::2]]
        alphabet = CountedSums(CountingOptions(median=5, longest=30)).alphabet()
        assert signs == alphabet[: alphabet.index(example.prompt[0])][::-1]
        assert all(digits[i] == (digits[i - 1] + digits[i - 2]) % 10 for i in range(2, len(digits)))


def test_counted_sums_are_rewarded_by_the_share_of_right_characters():
    config = workload("long", "run.steps=1", "env.options={median=1, longest=2, spread=0.0}")
    seeds = versus_trl_problems.training_seeds(config)[:2]
    right = [f"A{(int(text[1]) + int(text[2])) % 10}" for text in versus_trl_problems.prompts(config, seeds)]
    assert versus_trl_problems.rewards(config, seeds, right) == [1.0, 1.0]
    assert versus_trl_problems.rewards(config, seeds, ["A", right[1] + "A9"]) == [0.5, 0.5]


def test_lagged_sums_need_a_problem_before_an_answer():
    async def answer():
        await LaggedSums(LaggedOptions()).step("1")

    with pytest.raises(EnvError, match="before reset"):
        anyio.run(answer)


# -- pieces ----------------------------------------------------------------------------------------------------------


def test_the_rows_cover_the_runs_of_earlier_calls_too():
    def stand_in(case, system, seed, quick):
        return curve(system, (0, 0.2), (2 if system == "Flash" else 6, 0.9), case=case, seed=seed)

    def compare(*argv):
        parser = argparse.ArgumentParser()
        versus_trl.add_options(parser)
        return versus_trl.compare(Args(quick=True, own=parser.parse_args(argv)), stand_in)

    compare("--case", "short", "--system", "Flash", "--system", "TRL", "--seed", "1")
    compare("--case", "long", "--system", "TRL")
    found = compare("--case", "long", "--system", "Flash", "--seed", "0")
    speedups = {row.case: row.ours for row in found if row.metric == "speedup"}
    assert speedups == pytest.approx({"short, seed 1, over TRL": 3.0, "long, over TRL": 3.0})


@BOTH
def test_quick_runs_differ_from_full_ones_in_size_and_name_alone(case):
    full, quick = configured(case, 0, False)[2], configured(case, 0, True)[2]
    assert quick.run.steps < full.run.steps
    assert quick.run.name == f"versus-trl-{label(case, 0, True)}" != full.run.name
    for section in ("model", "tiny_model", "env", "rollout", "engine", "train", "algorithm", "cluster"):
        assert getattr(quick, section) == getattr(full, section)


@BOTH
def test_weights_are_kept_of_every_evaluated_step(case):
    config = workload(case)
    assert config.run.steps % config.checkpoint.every == 0
    assert config.checkpoint.keep >= config.run.steps // config.checkpoint.every


# -- the evaluation of both ------------------------------------------------------------------------------------------


def saved_twice(folder, model):
    """The model's weights as TRL's runner and as Flash's checkpoints keep them."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import save

    flat, checkpoint = folder / "step-000002.safetensors", folder / "step-000002"
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, flat)
    state = {"model": model.state_dict(), "optimizer": {"state": {"model.norm.weight": {"step": torch.ones(())}}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=checkpoint / "state", no_dist=True)
    return flat, checkpoint


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_both_systems_are_read_back_exactly(tmp_path, tied):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.versus_trl.evaluate import load_weights
    from flash.run.models import make_missing_models

    config = workload("short", f"model.path={tmp_path / 'model'}", "tiny_model.warm_start_steps=0",
                      "tiny_model.layers=1")  # fmt: skip
    make_missing_models(config)
    if not tied:
        untied = AutoConfig.from_pretrained(config.model.path, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(untied).save_pretrained(config.model.path)
    fresh = AutoModelForCausalLM.from_pretrained(config.model.path)
    trained = AutoModelForCausalLM.from_pretrained(config.model.path)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    for place in saved_twice(tmp_path, trained):
        other = AutoModelForCausalLM.from_pretrained(config.model.path)
        load_weights(other, place)
        for name, parameter in trained.named_parameters():
            assert torch.equal(parameter, other.get_parameter(name))
            assert not torch.equal(parameter, fresh.get_parameter(name))
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(other(ids).logits, trained(ids).logits)


def test_an_evaluation_takes_only_the_ends_of_answers_from_the_models_generation_settings(tmp_path):
    from transformers import GenerationConfig

    from benchmarks.episodes import held_out_seeds, prompts
    from benchmarks.versus_trl.evaluate import generate, load_model
    from flash.run.models import make_missing_models

    config = workload("short", f"model.path={tmp_path / 'model'}", "tiny_model.warm_start_steps=0",
                      "tiny_model.layers=1", "eval.problems=8", "eval.temperature=0",
                      "env.options={lag=4, length=2}")  # fmt: skip
    make_missing_models(config)
    asked = prompts(config, held_out_seeds(config))
    model, tokenizer = load_model(config)
    answers = generate(config, model, tokenizer, asked)
    used = sorted({token for answer in answers for token in tokenizer(answer).input_ids})
    assert used
    GenerationConfig(suppress_tokens=used, eos_token_id=used[0]).save_pretrained(config.model.path)
    model, _ = load_model(config)
    assert set(model.generation_config.eos_token_id) == {used[0], tokenizer.eos_token_id}
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    assert generate(config, model, tokenizer, asked) == answers


def test_an_evaluation_begins_with_the_untrained_policy_and_repeats_itself(tmp_path):
    from benchmarks.versus_trl.evaluate import accuracies
    from flash.run.models import make_missing_models

    config = workload("short", f"model.path={tmp_path / 'model'}", "tiny_model.warm_start_steps=0",
                      "tiny_model.layers=1", "eval.problems=8", "env.options={lag=4, length=2}")  # fmt: skip
    make_missing_models(config)
    from transformers import AutoModelForCausalLM

    same, _ = saved_twice(tmp_path, AutoModelForCausalLM.from_pretrained(config.model.path))
    (first, untrained), (second, again) = accuracies(config, [(2, same)])
    assert (first, second) == (0, 2)
    assert untrained == again
    assert 0 <= untrained.low <= untrained.mean <= untrained.high <= 1
