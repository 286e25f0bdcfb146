"""Code by value: functions and classes of a program, in modules that other processes import."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from envs.rewards.exact import exact_match
from flash.config.objects import import_from, load_object
from flash.config.shipping import LARGEST, import_paths, shipped_modules, unpacked
from flash.errors import ConfigError


def main_program(source: str) -> dict[str, Any]:
    """Return the names that a main program with this source has."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "my_script.py", "exec"), names)
    return names


def sent(folder: Path, **objects: Any) -> dict[str, Any]:
    """Return the objects as another process has them: imported from the folder."""
    paths, modules = import_paths(objects)
    for name, content in modules.items():
        (folder / name).write_bytes(content)
    import_from([str(folder)])
    return {key: load_object(path) for key, path in paths.items()}


def local_function() -> Any:
    """Return a function that another process cannot import."""
    return lambda answer, row: len(answer)


def test_objects_of_modules_are_named_and_not_sent() -> None:
    paths, modules = import_paths({"reward": exact_match, "error": ConfigError})
    assert paths == {"reward": "envs.rewards.exact:exact_match", "error": "flash.errors:ConfigError"}
    assert modules == {}


@pytest.mark.usefixtures("imports")
def test_functions_and_classes_of_the_main_program_arrive_with_the_objects_that_they_use(tmp_path: Path) -> None:
    names = main_program("""
BONUS = 0.5
def helper(text): return BONUS * len(text)
def reward(answer, row): return helper(answer) + row["extra"]
class Env:
    bonus = BONUS
    def step(self, action): return helper(action) + self.bonus
""")
    there = sent(tmp_path, reward=names["reward"], env=names["Env"])
    assert there["reward"]("four", {"extra": 1}) == 3.0
    assert there["env"]().step("four") == 2.5
    assert there["reward"] is not names["reward"]


@pytest.mark.usefixtures("imports")
def test_lambdas_and_closures_arrive(tmp_path: Path) -> None:
    there = sent(tmp_path, one=local_function(), other=local_function())
    assert there["one"]("four", {}) == there["other"]("four", {}) == 4


def pickles(modules: dict[str, bytes]) -> bytes:
    """Return the pickles in modules with code by value."""
    return b"".join(base64.b85decode(re.findall(rb'", "(.*)"', one)[0]) for one in modules.values())


@pytest.mark.usefixtures("imports")
def test_environment_variables_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "first-secret")
    names = main_program("""
from os import environ, environb
def reward(answer, row): return environ["MY_KEY"], environb[b"MY_KEY"]
""")
    paths, modules = import_paths({"reward": names["reward"]})
    assert b"secret" not in pickles(modules)
    there = sent(tmp_path, reward=names["reward"])
    monkeypatch.setenv("MY_KEY", "other-secret")
    assert there["reward"]("", {}) == ("other-secret", b"other-secret")
    assert import_paths({"reward": names["reward"]})[0] == paths, "variables are no part of the code"


CACHED = """
import functools
from typing import Generic, TypeVar
@functools.cache
def count(n): return 0 if n == 0 else 1 + count(n - 1)
class Env:
    @functools.lru_cache(maxsize=3)
    def words(self): return count(2)
def reward(answer, row): return count(len(answer)) + Env().words()
@functools.lru_cache
def alone(answer, row): return 1.5
def made():
    return functools.cache(lambda: 7)
T = TypeVar("T")
class Box(Generic[T]):
    seven = made()
    def get(self, one: T) -> T: return self.seven
"""


@pytest.mark.usefixtures("imports")
def test_functions_with_a_cache_arrive_with_an_empty_one(tmp_path: Path) -> None:
    names = main_program(CACHED)
    names["count"](3)
    there = sent(
        tmp_path, reward=names["reward"], alone=names["alone"], env=names["Env"], count=names["count"], box=names["Box"]
    )
    assert there["reward"]("four", {}) == 6
    assert there["alone"]("", 0) == 1.5
    assert there["env"].words.cache_parameters() == {"maxsize": 3, "typed": False}
    assert there["box"].seven() == 7
    assert there["count"] is not names["count"]
    assert there["count"].__name__ == "count"


def test_changed_code_below_a_cache_has_another_name() -> None:
    def path(program: str) -> str:
        """Return the import path of the function `reward` of a program."""
        return import_paths({"reward": main_program(program)["reward"]})[0]["reward"]

    assert path(CACHED) == path(CACHED)
    assert path(CACHED) != path(CACHED.replace("1 + count", "2 + count"))
    assert path(CACHED) != path(CACHED.replace("maxsize=3", "maxsize=4"))


def test_the_main_program_of_a_process_of_multiprocessing_is_sent_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    exec("class Row: bonus = 2\ndef helper(): return Row.bonus\ndef reward(answer, row): return helper()", vars(main))
    paths, modules = import_paths({"reward": vars(main)["reward"]})
    for name, content in modules.items():
        (tmp_path / name).write_bytes(content)
    module, _, name = paths["reward"].partition(":")
    command = [sys.executable, "-c", f"from {module} import {name}; print({name}('', 0))"]
    variables = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout == "2\n"


def test_each_function_is_sent_alone_with_the_values_that_it_uses() -> None:
    names = main_program("""
KEY = "secret"
def objective(tokens): return 1.0
def reward(answer, row): return len(KEY)
""")
    paths, modules = import_paths({"algorithm.objective": names["objective"], "reward": names["reward"]})
    module = f"{paths['algorithm.objective'].partition(':')[0]}.py"
    assert b"secret" in pickles(modules)
    assert b"secret" not in pickles({module: modules[module]})


@pytest.mark.usefixtures("imports")
def test_two_functions_of_one_name_stay_two(tmp_path: Path) -> None:
    one, other = (main_program(f"def f(): return {number}")["f"] for number in (1, 2))
    there = sent(tmp_path, one=one, other=other)
    assert (there["one"](), there["other"]()) == (1, 2)


PROGRAM = """
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from flash.config.shipping import import_paths

WORDS = {"a", "b", "c", "d", "e"}
@dataclass
class Row:
    text: str
    words: tuple = ("a",)
class Base(ABC):
    @abstractmethod
    def step(self): ...
class Env(Base):
    __slots__ = ("row",)
    row_type = Row
    def step(self): return super().__init__(), reward("", ROW)
ROW = Row("x")
def reward(answer, row): return answer in {"u", "v", "w"} and other(answer)
def other(answer): return Env if answer in WORDS else reward(answer, ROW)
print(import_paths({"env": Env, "reward": reward, "part": functools.partial(other, 1)})[0]["env"])
"""


@pytest.mark.slow
def test_the_same_code_has_the_same_name_in_each_process_and_changed_code_another(tmp_path: Path) -> None:
    def name_of(program: str, seed: str) -> str:
        """Return the import path that a program prints in a process with this seed of Python's hashes."""
        file = tmp_path / f"program_{seed}.py"
        file.write_text(program)
        variables = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout

    first = name_of(PROGRAM, "1")
    assert first == name_of(f"\n\n# moved\n{PROGRAM}", "2")
    for before, after in (
        ('"w"}', '"x"}'),
        ('Row("x")', 'Row("y")'),
        (', "e"}', "}"),
        ("if answer in", "if answer not in"),
    ):
        changed = PROGRAM.replace(before, after)
        assert changed != PROGRAM
        assert name_of(changed, "3") != first


def test_the_modules_that_a_configuration_names_are_found(
    tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    paths, modules = import_paths({"reward": local_function()})
    (name, content), *_ = modules.items()
    text = f'[env.options]\nreward = "{paths["reward"]}"\n'
    assert shipped_modules(text) == {}
    (tmp_path / name).write_bytes(content)
    (tmp_path / "flash_code_0123456789abcdef.py").touch()
    assert shipped_modules(text) == {name: content}


UNSENDABLE = """
import socket, threading
from abc import ABC

LOG, LOCK = open("log", "w"), threading.Lock()
READ = open("log")
PAIR = socket.socketpair()
class Held:
    def __init__(self): self.lock = threading.Lock()
HELD = Held()
def helper(): LOG.write("")
def file(answer, row): helper()
def read(answer, row): return READ.read()
def lock(answer, row):
    with LOCK: return 1.0
def held(answer, row): return HELD.lock
def made(rows):
    def reward(answer, row): return next(rows)
    return reward
rows = made(x for x in [1])
class Named:
    def __reduce__(self): return "NAMED"
NAMED = Named()
def named(answer, row): return NAMED
class kept(ABC):
    __slots__ = ("a",)
    kept = [threading.Lock()]
def pair(answer, row, to=PAIR): return to
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", "the global variable `LOG` of the global variable `helper` is an open file"),
        ("read", "the global variable `READ` is an open file"),
        ("lock", "the global variable `LOCK` is a lock"),
        ("held", "the attribute `lock` of the global variable `HELD` is a lock"),
        ("rows", "the variable `rows` around it is a running generator"),
        (
            "named",
            "the global variable `NAMED` is an object of Named (PicklingError: pickle sends only the name `NAMED`",
        ),
        ("kept", "an item of the attribute `kept` is a lock"),
        ("pair", "an item of a default value is an open connection"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named_with_its_place(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = main_program(UNSENDABLE)
    with pytest.raises(ConfigError) as refused:
        import_paths({"reward": names[name]})
    for one in (names["LOG"], names["READ"], *names["PAIR"]):
        one.close()
    assert f"cannot be sent to the processes of the run, because {told}" in str(refused.value)
    assert str(refused.value).startswith("`reward`: ")


def test_the_script_and_line_of_a_function_that_cannot_be_sent_are_reported() -> None:
    names = main_program("\n\nimport threading\nLOCK = threading.Lock()\ndef reward(answer, row): return LOCK")
    with pytest.raises(ConfigError, match=r"`reward`: reward \(my_script\.py, line 5\) cannot"):
        import_paths({"reward": names["reward"]})


def test_large_data_is_not_sent_as_code() -> None:
    names = main_program(f"TABLE = bytes({LARGEST})\ndef reward(answer, row): return len(TABLE)")
    told = r"at most 16 MiB can be sent .* the largest part is the global variable `TABLE`"
    with pytest.raises(ConfigError, match=told):
        import_paths({"reward": names["reward"]})


def test_code_of_another_python_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in Python 2\.7, and only that version can read it"):
        unpacked("2.7", "")
