"""Verdicts on programs in local processes, and the judge's attempts with sandboxes that a script lets fail."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from envs.judging.calls import printed_this, returned_this
from envs.judging.judge import Judge
from envs.judging.options import (
    COMPILE_FACTOR,
    LANGUAGES,
    JudgePool,
    JudgingLimits,
    Suite,
    SuiteCase,
    check_suite,
    judge_pool_of,
    languages_with,
)
from envs.judging.tests import run_tests
from envs.sandbox.api import MAX_TIMEOUT_S, Spec, check_timeout
from envs.sandbox.open import BoundedSandboxes
from flash.config.objects import check_options
from flash.errors import (
    ConfigError,
    SandboxBusyError,
    SandboxLimitError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    SandboxTimeoutError,
)
from tests.envs.sandboxes import FINE, ScriptedProvider, ScriptedSandbox, local_processes, result

LIMITS = JudgingLimits(timeout=20.0)
PYTHON = LANGUAGES["python"]
ADD = Suite(language="python", tests=[SuiteCase(stdin="1 2", stdout="3"), SuiteCase(stdin="5 6", stdout="11\n")])


async def _verdict(program: str, suite: Suite, *, every: bool = True, limits: JudgingLimits = LIMITS):
    """Return the verdict on a program that runs in a local process."""
    language = LANGUAGES[suite.language]
    async with local_processes(None) as pool, pool.acquire(Spec(image=language.image)) as box:
        return await run_tests(box, program, language, suite, limits, every=every)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("program", "passed", "cause"),
    [
        ("x, y = map(int, input().split())\nprint(x + y, ' ')", 2, "passed"),
        ("print(3)", 1, "wrong output"),
        ("print(30)", 0, "wrong output"),
        ("print(3, flush=True)\nraise SystemExit(1)", 0, "crash"),
        ("import os\nos.kill(os.getpid(), 9)", 0, "crash"),
        ("syntax error", 0, "crash"),
        ("print('x' * 3_000_000)", 0, "too much output"),
        (" \n", 0, "no program"),
    ],
)
async def test_a_verdict_says_how_many_tests_passed_and_how_the_first_failed(program, passed, cause):
    verdict = await _verdict(program, ADD)
    assert (verdict.passed, verdict.total, verdict.cause) == (passed, 2, cause)
    assert verdict.share == passed / 2


@pytest.mark.anyio
async def test_a_program_that_does_not_end_has_failed_and_the_time_of_an_answer_is_bounded():
    limits = JudgingLimits(timeout=0.4, total=0.6)
    suite = Suite(language="python", tests=[SuiteCase(stdout="")] * 50)
    verdict = await _verdict("while True: pass", suite, limits=limits)
    assert (verdict.passed, verdict.cause) == (0, "timeout")


SPIN = "import os, time\nos.sched_setaffinity(0, {CORE})\nwhile time.process_time() < 0.5: pass\nprint(input())"


@pytest.fixture
def crowded_core():
    """Yield the number of a CPU core that seven other processes keep busy."""
    core = min(os.sched_getaffinity(0))
    hog = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(7)]
    yield core
    for each in hogs:
        each.kill()
        each.wait()


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_right_program_passes_beside_neighbours_that_keep_it_from_the_cpu(crowded_core):
    """The program's 0.5 s of CPU take some 4 s on the clock. It may use 1 s, without its waits for a CPU."""
    suite = Suite(language="python", tests=[SuiteCase(stdin="1", stdout="1")])
    verdict = await _verdict(SPIN.replace("CORE", str(crowded_core)), suite, limits=JudgingLimits(timeout=1.0))
    assert (verdict.passed, verdict.cause, verdict.detail) == (1, "passed", "")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "program",
    [
        "import time\ntime.sleep(600)",
        "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
        "import os, time\nif os.fork() == 0:\n    while True: pass\ntime.sleep(600)",
    ],
    ids=["sleeps", "spins in a thread", "waits for a child that spins"],
)
async def test_a_program_that_does_not_end_has_failed_in_whatever_way_it_passes_the_time(program):
    suite = Suite(language="python", tests=[SuiteCase(stdout="")])
    assert (await _verdict(program, suite, limits=JudgingLimits(timeout=0.5))).cause == "timeout"


STARVED = result(timed_out=True, exit_code=None, signal="SIGTERM", wall_s=150.0, waited_s=146.0)


@pytest.mark.anyio
async def test_no_time_that_an_option_allows_is_longer_than_a_sandbox_takes():
    asked: list[float] = []

    class Sandbox(ScriptedSandbox):
        """A sandbox that checks the times of each command, as real ones do."""

        async def run(self, command, *, timeout, patience=None, stdin=b"", env=None, cwd=None):
            for seconds in (timeout, patience):
                check_timeout(seconds)
            asked.append(timeout)
            return result()

    limits = check_options(JudgingLimits, {"timeout": MAX_TIMEOUT_S / COMPILE_FACTOR}, "limits")
    suite, language = Suite(language="c", tests=[SuiteCase(stdout="")]), LANGUAGES["c"]
    verdict = await run_tests(Sandbox(Spec(image="any")), "x", language, suite, JudgingLimits(**limits), every=False)
    assert (verdict.cause, asked) == ("passed", [MAX_TIMEOUT_S, JudgingLimits().total])
    with pytest.raises(ConfigError, match=r"`limits\.timeout`"):
        check_options(JudgingLimits, {"timeout": MAX_TIMEOUT_S}, "limits")


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize(("waited", "cause"), [(0.0, "timeout"), (80.0, "timeout"), (146.0, None)])
async def test_a_timeout_is_a_verdict_only_about_a_program_that_had_its_time(waited, cause):
    ended = msgspec.structs.replace(STARVED, waited_s=waited)
    box = ScriptedSandbox(Spec(image="img"), lambda command, stdin: ended)
    suite, limits = Suite(language="python", tests=[SuiteCase(stdout="3")]), JudgingLimits(timeout=5.0)
    if cause is None:
        with pytest.raises(SandboxTimeoutError, match=r"waited 146\.0 s for a CPU"):
            await run_tests(box, "p", PYTHON, suite, limits, every=True)
    else:
        assert (await run_tests(box, "p", PYTHON, suite, limits, every=True)).cause == cause


@pytest.mark.anyio
@pytest.mark.virtual
async def test_law_5_a_program_that_was_kept_from_the_cpu_is_judged_again_and_never_called_wrong():
    runs = []

    def starved_first(command, stdin):
        runs.append(command[0])
        return STARVED if runs.count("python3") < 3 and command[0] == "python3" else result(stdout=b"3")

    provider = ScriptedProvider(starved_first)
    sandboxes, limits = BoundedSandboxes(provider, owner="run", most=1), JudgingLimits(timeout=5.0)
    judge = Judge(sandboxes, JudgePool())
    assert (await judge.judge("print(3)", ADD, LANGUAGES, limits, every=True)).passed == 1
    runs.clear()
    with pytest.raises(SandboxTimeoutError):
        await Judge(sandboxes, JudgePool(attempts=2)).judge("print(3)", ADD, LANGUAGES, limits, every=True)


@pytest.mark.anyio
async def test_time_without_a_cpu_does_not_count_against_the_time_of_an_answer():
    box = ScriptedSandbox(Spec(image="img"), lambda command, stdin: result(wall_s=40.0, waited_s=39.0, stdout=b"3"))
    suite = Suite(language="python", tests=[SuiteCase(stdout="3")] * 9)
    assert (await run_tests(box, "p", PYTHON, suite, JudgingLimits(), every=True)).passed == 9


@pytest.mark.anyio
async def test_unless_all_are_wanted_nothing_runs_after_the_first_failure():
    box = ScriptedSandbox(Spec(image="img"))
    suite = Suite(language="python", tests=[SuiteCase(stdin=str(n), stdout="x") for n in range(9)])
    assert (await run_tests(box, "p", PYTHON, suite, LIMITS, every=False)).total == 9
    assert b"0" in box.seen
    assert b"1" not in box.seen


@pytest.mark.anyio
async def test_what_is_expected_is_never_in_the_sandbox():
    box = ScriptedSandbox(Spec(image="img"))
    suite = Suite(language="python", tests=[SuiteCase(stdin="in", stdout="SECRET")])
    await run_tests(box, "print('in')", PYTHON, suite, LIMITS, every=True)
    assert b"in" in box.seen
    assert b"SECRET" not in b"".join(box.seen)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def add(x, y): return x + y", 1),
        ("def add(x, y): return x - y", 0),
        ("import os\nos._exit(0)", 0),
        ("import sys\nprint('passed')\nsys.exit(0)", 0),
        ("import main, sys\nsys.modules['unittest'] = main\nraise SystemExit", 0),
    ],
)
async def test_a_test_program_passes_only_when_it_reaches_its_end(program, passed):
    suite = Suite(language="python", tests=[SuiteCase(program="from main import add\nassert add(1, 2) == 3")])
    assert (await _verdict(program, suite)).passed == passed


@pytest.mark.anyio
async def test_a_test_program_of_another_language():
    suite = Suite(language="bash", tests=[SuiteCase(program='. ./main.sh\n[ "$(double 4)" = 8 ] || exit 1')])
    assert (await _verdict("double() { echo $((2 * $1)); }", suite)).passed == 1
    assert (await _verdict("double() { echo $((3 * $1)); }", suite)).cause == "crash"


@pytest.mark.anyio
async def test_an_answer_cannot_read_the_rest_of_a_bash_test():
    suite = Suite(language="bash", tests=[SuiteCase(program=". ./main.sh\nfalse || exit 1")])
    for deceit in ("sed 's/^echo //'; exit 0", 'eval "$test"; exit 0'):
        assert (await _verdict(deceit, suite)).passed == 0


PAIR = "class Solution:\n    def pair(self, x):\n        print('noise')\n        return x, {'half': x / 2}\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("program", "passed", "cause"),
    [
        (PAIR, 1, "passed"),
        (PAIR.replace("/ 2", "/ 2.001"), 0, "wrong output"),
        ("class Solution:\n    def pair(self, x): return {x}", 0, "crash"),
        ("class Solution:\n    def pair(self, x): return float('nan')", 0, "wrong output"),
        ("import os\nos._exit(0)", 0, "wrong output"),
        ("print('[3, {\"half\": 1.5}]')\nimport sys\nsys.exit(0)", 0, "wrong output"),
        ("import os, json\nos.write(1, b'passed')", 0, "crash"),
        ("pair = 1", 0, "crash"),
    ],
)
async def test_a_call_passes_when_it_returns_what_never_enters_the_sandbox(program, passed, cause):
    suite = Suite(language="python", tests=[SuiteCase(call="Solution.pair", args=[3], returns=[3, {"half": 1.5}])])
    verdict = await _verdict(program, suite)
    assert (verdict.passed, verdict.cause) == (passed, cause)


LISTS = "class Solution:\n    def count(self, words: List[str]) -> Dict[str, int]:\n        return Counter(words)\n"
HEAP = "def least(numbers):\n    heapq.heapify(numbers)\n    return [heappop(numbers), math.inf > 1, gcd(4, 6)]\n"
DEEP = "def depth(n):\n    return 0 if not n else 1 + depth(n - 1)\n"
OWN = "def gcd(x, y):\n    return 7\n\ndef answer():\n    return [gcd(4, 6), 'inf' in globals(), max(1, 2)]\n"
GUARD = "def f():\n    return __name__\n\nif __name__ == '__main__':\n    raise SystemExit(1)\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("program", "call", "args", "returns"),
    [
        (LISTS, "Solution.count", [["a", "b", "a"]], {"a": 2, "b": 1}),
        (LISTS, "count", [["a"]], {"a": 1}),
        (HEAP, "least", [[3, 1, 2]], [1, True, 2]),
        (DEEP, "depth", [20_000], 20_000),
        (OWN, "answer", [], [7, False, 2]),
        (GUARD, "f", [], "main"),
    ],
)
async def test_called_functions_are_provided_with_the_imports_that_such_sites_have(program, call, args, returns):
    suite = Suite(language="python", tests=[SuiteCase(call=call, args=args, returns=returns)])
    verdict = await _verdict(program, suite)
    assert (verdict.cause, verdict.detail) == ("passed", "")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "language", "passed"),
    [
        ("```python\nprint(sum(map(int, input().split())))\n```\nOutput:\n```\n3\n```", "python", 2),
        ("Here: ```py\nprint(sum(map(int, input().split())))\n```\n```python\nprint(sum(map(\n```", "python", 2),
        ("```bash\nread x y; echo $((x + y))\n```\nOr:\n```bash\nif read x y; then\n```", "bash", 2),
        ("```sh\nread x y; echo $((x + y))\n```\nRun:\n```\n3\n```", "bash", 2),
        ("```bash\nread x y; echo $((x + y)) # \ud800\n```\nOr:\n```bash\nif read x y; then\n```", "bash", 2),
        ("```python\n```", "python", 0),
    ],
)
async def test_the_program_among_several_blocks_is_chosen_by_the_parser_of_its_language(answer, language, passed):
    suite = Suite(language=language, tests=ADD.tests)
    async with local_processes(None) as provider:
        sandboxes = BoundedSandboxes(provider, owner="run", most=1)
        verdict = await Judge(sandboxes, JudgePool()).judge(answer, suite, LANGUAGES, LIMITS, every=True)
    assert verdict.passed == passed, verdict


@pytest.mark.anyio
async def test_where_the_parser_fails_the_last_block_is_graded():
    def answer(command, stdin):
        return result(timed_out=True) if b"blocks" in stdin else result(stdout=b"3")

    provider = ScriptedProvider(answer)
    sandboxes = BoundedSandboxes(provider, owner="run", most=1)
    text = "```python\nprint(1)\n```\n```python\nprint(3)\n```"
    verdict = await Judge(sandboxes, JudgePool()).judge(text, ADD, LANGUAGES, LIMITS, every=True)
    assert verdict.passed == 1
    assert provider.sandboxes[0].files == {"main.py": b"print(3)\n"}


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (b"1", 1, True),
        (b"1", True, False),
        (b"true", 1, False),
        (b"1", 1.0, True),
        (b"1.0", 1, True),
        (b"10000000009.0", 10_000_000_000, False),
        (b"[10000000009]", [10_000_000_000.0], True),
        (b"1e999", 1, False),
        (b"0.30000000000000004", 0.3, True),
        (b"0.3333333333333333", 0.33333, True),
        (b"0.3334", 0.33333, False),
        (b"NaN", 0.5, False),
        (b"9" * 400, 1e300, False),
        (b"9" * 5000, 1, False),
        (b"[" * 100_000, [], False),
        (b"noise\n[1, [2]]\n", [1, [2]], True),
        (b"[1, 2]", [1], False),
        (b'{"a": null}', {"a": None}, True),
        (b'{"a": null}', {}, False),
        (b'"1"', 1, False),
        (b"", None, False),
    ],
)
def test_what_a_call_returned_is_compared_by_value(found, expected, same):
    assert returned_this(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        # LiveCodeBench/LiveCodeBench#129, NVIDIA-NeMo/Gym#2956
        ("0.3333333333333333", "0.333333333333", True),
        ("0.333333333", "0.33333333333333333", True),
        ("0.3334", "0.333333333333", False),
        ("Case #1: 0.50", "Case #1: 0.5", True),
        ("Case #2: 0.50", "Case #1: 0.5", False),
        ("1e-07", "0.0000001", True),
        ("-0.0", "0.0", True),
        ("100000000.1", "100000000.2", True),
        ("0.5 0.25", "0.5", False),
        ("nan", "0.5", False),
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("3.5", "3", False),
        ("12345678901234567890123", "12345678901234567890124", False),
        ("12345678901234567890123.0", "12345678901234567890124", False),
        ("1  2 ", "1 2", True),
        ("1 2", "12", False),
        ("1\n2", "1 2", False),
        ("0101", "101", False),
        ("1e5", "100000", False),
        ("YES", "Yes", False),
        (" *\n***", "*\n***", False),
        ("a  b", "a b", False),
        ("1.2.3", "1.2.30", False),
        # huggingface/open-r1#504
        ("a\nb", "\na \r\nb  \n\n", True),
        ("", "\n", True),
        ("a\n\nb", "a\nb", False),
        ("  \n\t\n 5 \n \n", "5", True),
        ("  \n *\n***", "*\n***", False),
        ("?", "\ud800", True),
    ],
)
def test_what_a_program_printed_is_compared_by_lines_and_numbers_by_value(found, expected, same):
    assert printed_this(found.encode(), expected) is same


@pytest.mark.anyio
async def test_a_long_output_of_numbers_is_compared_beside_the_loop():
    suite = Suite(language="python", tests=[SuiteCase(stdout="0.5\n" * 10_000)])
    assert (await _verdict("print('0.50\\n' * 10_000)", suite)).cause == "passed"


@pytest.mark.anyio
async def test_numbers_of_any_length_are_printed_and_returned():
    program = "def f(n): return len(str(3**n))\nif __name__ == '__main__': print(f(20000))"
    suite = Suite(language="python", tests=[SuiteCase(stdout="9543"), SuiteCase(call="f", args=[20000], returns=9543)])
    assert (await _verdict(program, suite)).passed == 2


@pytest.mark.anyio
async def test_a_language_that_is_compiled_is_compiled_once():
    calls = []

    def answer(command, stdin):
        calls.append(command[0])
        return result(stdout=b"3")

    box = ScriptedSandbox(Spec(image="img"), answer)
    suite = Suite(language="c", tests=[SuiteCase(stdout="3")] * 2)
    assert (await run_tests(box, "int main;", LANGUAGES["c"], suite, LIMITS, every=True)).passed == 2
    assert calls == ["tcc", "./main", "./main"]
    box = ScriptedSandbox(Spec(image="img"), lambda command, stdin: result(exit_code=1, stderr=b"no"))
    verdict = await run_tests(box, "int main;", LANGUAGES["c"], suite, LIMITS, every=True)
    assert (verdict.passed, verdict.cause, verdict.detail) == (0, "compile", "no")


@pytest.mark.anyio
async def test_a_program_that_uses_up_its_sandbox_has_failed_but_one_that_never_ran_has_not():
    def exhausted(after: int):
        """Return a sandbox in which no process starts after `after` commands."""
        calls = []

        def answer(command, stdin):
            calls.append(command)
            if len(calls) > after:
                raise SandboxLimitError("no process can be started")
            return FINE

        return ScriptedSandbox(Spec(image="img"), answer)

    suite = Suite(language="python", tests=[SuiteCase(stdout="")] * 3)
    verdict = await run_tests(exhausted(1), "fork bomb", PYTHON, suite, LIMITS, every=True)
    assert (verdict.passed, verdict.cause) == (1, "crash")
    with pytest.raises(SandboxLimitError):
        await run_tests(exhausted(0), "fine", PYTHON, suite, LIMITS, every=True)


async def _judged(provider: ScriptedProvider, pool: JudgePool):
    """Return the verdict of a judge whose sandboxes do what `provider` was told."""
    sandboxes = BoundedSandboxes(provider, owner="run", most=pool.parallel)
    return await Judge(sandboxes, pool).judge("print(3)", ADD, LANGUAGES, LIMITS, every=True)


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize("error", [SandboxLostError("gone"), SandboxStartError("no")])
async def test_a_sandbox_that_fails_is_replaced_and_the_answer_is_judged(error):
    provider = ScriptedProvider(lambda command, stdin: result(stdout=b"3"), failures=2, error=error)
    assert (await _judged(provider, JudgePool())).passed == 1


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize(
    ("error", "left"), [(SandboxLostError("gone"), 6), (SandboxRefusedError("never"), 8), (SandboxBusyError("full"), 8)]
)
async def test_law_5_a_failure_of_the_infrastructure_is_an_error_and_never_a_verdict(error, left):
    provider = ScriptedProvider(failures=9, error=error)
    with pytest.raises(type(error)):
        await _judged(provider, JudgePool())
    assert provider.failures == left


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("harmless", ["lives", "is lost as well"])
async def test_a_sandbox_lost_in_each_test_of_one_program_only_is_the_programs_crash(attempts, harmless):
    runs = []

    def lost(command, stdin):
        """Lose the sandbox of the program, and perhaps of the harmless one."""
        runs.append(command[0])
        if command[0] == "python3" or (command[0] == "sleep" and harmless != "lives"):
            raise SandboxLostError("killed")
        return FINE

    # Once says nothing: it must repeat.
    if attempts > 1 and harmless == "lives":
        verdict = await _judged(ScriptedProvider(lost), JudgePool(attempts=attempts))
        assert (verdict.passed, verdict.total, verdict.cause) == (0, 2, "sandbox lost")
        assert verdict.metrics()["sandbox_lost"] == 1.0
    else:
        with pytest.raises(SandboxLostError):
            await _judged(ScriptedProvider(lost), JudgePool(attempts=attempts))
    assert runs.count("python3") == attempts


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_program_is_not_blamed_where_a_sandbox_was_also_lost_without_it():
    """The first sandbox never starts. The loss of the others, while the program ran, may have the same cause."""

    def lost(command, stdin):
        if command[0] == "python3":
            raise SandboxLostError("killed")
        return FINE

    with pytest.raises(SandboxLostError):
        await _judged(ScriptedProvider(lost, failures=1), JudgePool())


@pytest.mark.anyio
async def test_a_program_that_kills_its_agent_each_time_has_failed_and_the_next_is_judged():
    """Sandboxes are processes of this machine here, in which a program can kill its agent."""
    kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time; time.sleep(5)"
    pool = JudgePool(parallel=1)
    async with local_processes(None) as provider:
        judge = Judge(BoundedSandboxes(provider, owner="run", most=pool.parallel), pool)
        verdict = await judge.judge(kill, ADD, LANGUAGES, LIMITS, every=True)
        assert (verdict.passed, verdict.cause) == (0, "sandbox lost")
        right = "x, y = map(int, input().split())\nprint(x + y)"
        assert (await judge.judge(right, ADD, LANGUAGES, LIMITS, every=True)).passed == 2


def test_the_removed_option_reuse_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match="reuse was removed: each answer gets a new sandbox"):
        judge_pool_of({"reuse": False})


@pytest.mark.anyio
@pytest.mark.virtual
async def test_an_image_without_the_language_is_refused_and_no_program_blamed_for_it():
    provider = ScriptedProvider(lambda command, stdin: result(exit_code=1 if command[0] == "/bin/sh" else 0))
    with pytest.raises(SandboxRefusedError, match="the image flash-sandbox-python has no `python3`"):
        await _judged(provider, JudgePool())


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"stdout": "1", "program": "x"},
        {"program": "x", "stdin": "1"},
        {"expect": "1"},
        {"call": "f", "stdin": "1"},
        {"call": "f", "stdout": "1"},
        {"program": "x", "returns": 1},
        {"stdout": "1", "args": [1]},
    ],
)
def test_a_test_is_either_an_input_with_its_output_or_a_call_or_a_program(case):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"language": "python", "tests": [case]}, Suite)


def test_languages_that_cannot_work_are_refused():
    table = {"image": "img", "file": "m.lua", "run": ["lua", "m.lua"]}
    assert languages_with({"lua": table})["lua"].run == ("lua", "m.lua")
    with pytest.raises(ConfigError, match="test_end must print"):
        languages_with({"lua": {**table, "test": ["lua", "-"]}})
    with pytest.raises(ConfigError, match=r"`languages\.lua\.run`: is missing"):
        languages_with({"lua": {"image": "img", "file": "m.lua"}})
    with pytest.raises(ConfigError, match="must be a file's name"):
        languages_with({"lua": {**table, "file": "../m.lua"}})
    with pytest.raises(ConfigError, match="there is no language 'cobol', only python, bash, c"):
        check_suite(Suite(language="cobol", tests=[SuiteCase(stdout="")]), LANGUAGES, test_programs=True)
    with pytest.raises(ConfigError, match="c has no test programs"):
        check_suite(Suite(language="c", tests=[SuiteCase(program="x")]), LANGUAGES, test_programs=True)
    with pytest.raises(ConfigError, match="bash has no calls"):
        check_suite(Suite(language="bash", tests=[SuiteCase(call="x")]), LANGUAGES, test_programs=True)
    with pytest.raises(ConfigError, match=r"runs in one process with the answer.*test_programs = true"):
        check_suite(Suite(language="python", tests=[SuiteCase(program="x")]), LANGUAGES, test_programs=False)
