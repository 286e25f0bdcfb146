"""Import paths, and the options of the objects that they name."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from algorithms import OBJECTIVES
from algorithms.base import Objective
from flash.config.objects import (
    IMPORT_PATH,
    check_options,
    import_from,
    load_object,
    load_objective,
    load_sink,
    own_folders,
    share_import_path,
    take_import_path,
)
from flash.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


ITSELF = "ITSELF"
"""Annotation that is a text, whose evaluation gives the same text again."""


class Options:
    """Class with an option for each kind of annotation. `wrong` and `endless` have annotations that name no type."""

    def __init__(
        self,
        digits: int,
        scale: float = 1.0,
        kind: Literal["sum", "product"] = "sum",
        span: tuple[int, int] = (0, 1),
        names: list[str] | None = None,
        hook: Callable[[str], float] | None = None,
        place: str | Path | None = None,
        tensor: Tensor | None = None,
        wrong: len | None = None,
        untyped=None,
        quoted: "int" = 0,  # noqa: UP037 - users write such annotations
        endless: ITSELF = "",
    ) -> None: ...


class Placed:
    """Class with a required option whose annotation msgspec cannot check."""

    def __init__(self, place: str | Path) -> None: ...


class Bare:
    """Class without options."""


class Open:
    """Class that takes any option."""

    def __init__(self, size: int = 1, **more: Any) -> None: ...


class Struct(msgspec.Struct):
    """Struct whose fields are options."""

    count: Annotated[int, Meta(gt=0)]
    items: list[int] = []


class Wide(msgspec.Struct, frozen=True):
    """Struct of options that refuses some combinations of values."""

    width: int = 2
    height: int = 1

    def __post_init__(self) -> None:
        if self.width < self.height:
            raise ConfigError(f"width must be at least height, but is {self.width}")
        if self.width == 1000:
            sys.exit("too wide")


class TakesStruct:
    """Class that gets all options in one struct."""

    def __init__(self, options: Wide) -> None: ...


class TakesQuotedStruct:
    """Class that gets all options in one struct, whose annotation is in quotes."""

    def __init__(self, options: "Wide") -> None: ...  # noqa: UP037 - users write such annotations


class TakesStructAndMore:
    """Class with the option `options` beside another one, so that its struct is a value like any other."""

    def __init__(self, options: Wide, scale: float = 1.0) -> None: ...


@pytest.fixture
def here(tmp_path, imports, monkeypatch):
    """Return an empty current directory. The state of imports is restored after the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_import_path_gives_the_object():
    assert load_object("flash.errors:ConfigError") is ConfigError


def test_dots_reach_into_classes():
    assert load_object("flash.errors:ConfigError.__init__") is ConfigError.__init__


@pytest.mark.parametrize(
    "path", ["", "flash.errors", "flash.errors:", ":x", "a b:c", "flash/errors.py:X", "a:b:c", "a..b:c"]
)
def test_another_form_is_refused(path):
    with pytest.raises(ConfigError, match=r"^expected `module:attribute`, got "):
        load_object(path)


def test_a_missing_attribute_names_the_nearest():
    with pytest.raises(ConfigError, match=r"^`flash.errors` has no `ConfigErr`; did you mean `ConfigError`\?$"):
        load_object("flash.errors:ConfigErr")


LAZY_MODULE = """
def __getattr__(name):
    if name == "Lazy":
        return dict
    if name == "Broken":
        raise OSError("no such library")
    raise AttributeError(name)
"""


def test_an_attribute_that_a_module_makes_on_demand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_of_test_objects.py").write_text(LAZY_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_object("lazy_of_test_objects:Lazy") is dict
    with pytest.raises(ConfigError, match=r"^`lazy_of_test_objects` has no `Other`"):
        load_object("lazy_of_test_objects:Other")
    with pytest.raises(ConfigError, match=r"^importing `lazy_of_test_objects` failed: OSError: no such library"):
        load_object("lazy_of_test_objects:Broken")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("flash.error:X", r"there is no module `flash\.error`; did you mean `flash\.errors`\?"),
        ("algorithm:X", r"there is no module `algorithm`; did you mean `algorithms`\?"),
        ("zzz_nothing.like.this:X", r"there is no module `zzz_nothing` \(looked in "),
        ("flash.errors.deeper:X", r"there is no module `flash\.errors\.deeper`$"),
        ("env.arithmetic:X", r"there is no module `env`; did you mean `envs`\?"),
    ],
)
def test_a_missing_module_names_the_nearest(path, message):
    with pytest.raises(ConfigError, match=message):
        load_object(path)


def test_a_missing_module_is_not_taken_for_one_of_pythons_own(here):
    (here / "my_envs.py").touch()
    with pytest.raises(ConfigError, match=rf"`my_env`; did you mean `my_envs`\? \(looked in .*{here}\)$"):
        load_object("my_env:X")
    with pytest.raises(ConfigError, match=r"there is no module `tomlib` \(looked in what is installed"):
        load_object("tomlib:X")


def test_a_syntax_error_names_its_own_line(here):
    (here / "failing_module.py").write_text("x = 1\ndef f(:")
    with pytest.raises(ConfigError, match=r"SyntaxError: [^(]*\([^()]*failing_module\.py, line 2\)$"):
        load_object("failing_module:X")


def test_an_objective_without_a_formula_is_refused(here):
    source = "from algorithms.base import Objective\nclass Mine(Objective, frozen=True):\n    cap: float = 1.0"
    (here / "own_objective.py").write_text(source)
    with pytest.raises(ConfigError, match=r"^`own_objective:Mine` does not define `__call__\(self, tokens\)`"):
        load_objective("own_objective:Mine")


def test_a_module_of_the_current_directory_is_found(here):
    (here / "beside_the_config.py").write_text("class Mine: ...")
    assert load_object("beside_the_config:Mine").__name__ == "Mine"


def test_a_process_imports_from_the_folders_of_the_process_that_started_it(here, monkeypatch):
    monkeypatch.setenv(IMPORT_PATH, "[]")
    folder = here / "at_12:30"
    folder.mkdir()
    (folder / "in_a_folder.py").write_text("class Mine: ...")
    import_from([str(folder)])
    share_import_path()
    sys.path.remove(str(folder))
    take_import_path()
    assert load_object("in_a_folder:Mine").__name__ == "Mine"
    assert "PYTHONPATH" not in os.environ or str(here) not in os.environ["PYTHONPATH"]


def test_the_current_directory_does_not_shadow_what_is_installed(here):
    (here / "msgspec_shadow").mkdir()
    (here / "tomllib.py").write_text("raise RuntimeError('shadowed')")
    sys.modules.pop("tomllib", None)
    assert callable(load_object("tomllib:loads"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_thing_at_all", "ModuleNotFoundError: No module named 'no_such_thing_at_all'"),
        ("x = 1\n1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: "),
    ],
)
def test_a_module_that_fails_to_import_says_why(here, source, message):
    (here / "failing_module.py").write_text(source)
    with pytest.raises(ConfigError, match=f"^importing `failing_module` failed: {message}"):
        load_object("failing_module:X")


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", "def __getattr__(name): raise KeyboardInterrupt"])
def test_an_interrupt_during_an_import_is_no_fault_of_the_module(here, source):
    (here / "slow_module.py").write_text(source)
    with pytest.raises(KeyboardInterrupt):
        load_object("slow_module:X")


def test_a_failing_import_names_the_line(here):
    (here / "failing_module.py").write_text("x = 1\n1 / 0")
    with pytest.raises(ConfigError, match=r"failing_module\.py, line 2\)$"):
        load_object("failing_module:X")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_named_objective_loads(name):
    assert issubclass(load_objective(name), Objective)
    assert load_objective(OBJECTIVES[name]) is load_objective(name)


def test_an_unknown_objective_names_the_nearest():
    with pytest.raises(ConfigError, match="got `decoupled_pop`; did you mean `decoupled_ppo`"):
        load_objective("decoupled_pop")


@pytest.mark.parametrize("path", ["flash.errors:ConfigError", "math:pi"])
def test_something_else_is_no_objective(path):
    with pytest.raises(ConfigError, match="is not a subclass of"):
        load_objective(path)


def test_options_become_keyword_arguments_of_the_annotated_types():
    options = {"digits": 2, "scale": 3, "kind": "product", "span": [1, 2], "names": ["a"], "untyped": {"x": 1}}
    kwargs = check_options(Options, options, "env.options")
    assert kwargs == {**options, "scale": 3.0, "span": (1, 2)}
    assert type(kwargs["scale"]) is float


@pytest.mark.parametrize("key", ["place", "tensor", "wrong", "endless"])
def test_a_value_whose_annotation_cannot_be_checked_is_returned_unchanged(key):
    assert check_options(Options, {"digits": 1, key: "x"}, "o")[key] == "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"digit": 2, "digits": 2},
            "`o.digit`: Options has no such option; did you mean `digits`? (its options: `digits`, ",
        ),
        ({"digits": "2"}, '`o.digits`: expected an integer, got "2"'),
        ({"digits": 1, "quoted": "2"}, '`o.quoted`: expected an integer, got "2"'),
        ({"digits": True}, "`o.digits`: expected an integer, got true"),
        ({"digits": 1, "scale": float("inf")}, "`o.scale`: expected a number, got Infinity"),
        ({"digits": 1, "kind": "x"}, '`o.kind`: expected "product" or "sum", got "x"'),
        ({"digits": 1, "span": [1]}, "`o.span`: expected a list of 2: [an integer, an integer], got [1]"),
        ({"digits": 1, "hook": "f"}, '`o.hook`: expected a Callable, got "f"'),
        ({"digits": 1, "names": [1]}, "`o.names`: expected a list, each item text, got [1]"),
        ({}, "`o.digits`: is missing; expected an integer"),
        ({"foo": 1}, "2 problems:\n  - `o.foo`: Options has no such option (its options: "),
    ],
)
def test_a_wrong_option_names_its_path_and_what_was_expected(options, message):
    with pytest.raises(ConfigError) as error:
        check_options(Options, options, "o")
    assert str(error.value).startswith(message)


def test_a_missing_option_whose_annotation_cannot_be_checked_is_named():
    with pytest.raises(ConfigError, match=r"`o\.place`: is missing; expected "):
        check_options(Placed, {}, "o")


def test_a_class_without_options_takes_none():
    assert check_options(Bare, {}, "o") == {}
    with pytest.raises(ConfigError, match=r"Bare has no such option \(its options: none\)"):
        check_options(Bare, {"x": 1}, "o")


def test_a_class_that_takes_any_keyword_takes_any_option():
    assert check_options(Open, {"size": 2, "other": "x"}, "o") == {"size": 2, "other": "x"}
    with pytest.raises(ConfigError, match=r"`o\.size`: expected an integer"):
        check_options(Open, {"size": "x"}, "o")


def test_the_fields_of_a_struct_are_its_options():
    assert check_options(Struct, {"count": 1}, "o") == {"count": 1}
    with pytest.raises(ConfigError, match=r"`o\.count`: expected an integer above 0, got 0"):
        check_options(Struct, {"count": 0}, "o")
    with pytest.raises(ConfigError, match=r"`o\.count`: is missing"):
        check_options(Struct, {"items": []}, "o")


def test_a_struct_may_be_named_in_quotes():
    assert check_options(TakesQuotedStruct, {"width": 3}, "o") == {"options": Wide(width=3)}


def test_a_class_may_take_all_options_in_one_struct_whose_construction_checks_them():
    assert check_options(TakesStruct, {"width": 3}, "o") == {"options": Wide(width=3)}
    with pytest.raises(ConfigError, match=r"^`o.width`: expected an integer, got \"3\"$"):
        check_options(TakesStruct, {"width": "3"}, "o")
    with pytest.raises(ConfigError, match=r"TakesStruct has no such option; did you mean `width`"):
        check_options(TakesStruct, {"widht": 3}, "o")
    with pytest.raises(ConfigError, match=r"^`o`: TakesStruct refuses them: width must be at least height, but is 0$"):
        check_options(TakesStruct, {"width": 0}, "o")
    with pytest.raises(ConfigError, match=r"^`o`: TakesStruct refuses them: SystemExit: too wide$"):
        check_options(TakesStruct, {"width": 1000}, "o")


def test_a_struct_beside_other_arguments_is_an_option_like_any_other():
    assert check_options(TakesStructAndMore, {"options": {"width": 3}}, "o") == {"options": Wide(width=3)}
    with pytest.raises(ConfigError, match=r"`o.width`: TakesStructAndMore has no such option"):
        check_options(TakesStructAndMore, {"width": 3}, "o")


def test_a_config_error_that_a_module_raises_on_import_is_not_wrapped(here):
    (here / "needs_more.py").write_text("from flash.errors import ConfigError\nraise ConfigError('needs a package')")
    with pytest.raises(ConfigError, match=r"^needs a package$"):
        load_object("needs_more:X")


class KeepsRows:
    """Class that `track.to` may name: it is called with the two arguments of a function that makes a sink."""

    def __init__(self, config: dict[str, Any], resumed_at: int | None) -> None: ...


def takes_one(config: dict[str, Any]) -> None:
    """Take too few arguments for a function that makes a sink."""


def test_a_sink_is_made_from_the_configuration_and_the_step_of_a_resume() -> None:
    assert load_sink(f"{__name__}:KeepsRows") is KeepsRows
    for name in ("takes_one", "TYPE_CHECKING"):
        with pytest.raises(ConfigError, match=r"makes no sink: expected a function that is called as"):
            load_sink(f"{__name__}:{name}")


OWN_FOLDERS = """
import sys
sys.path[:0] = [{folder!r}]
from flash.config.objects import own_folders
print(*own_folders(), sep="\\n")
"""


def test_a_project_folder_that_holds_the_virtual_environment_is_the_users(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    needed = os.pathsep.join(path for path in sys.path if path and not path.startswith(str(tmp_path)))
    command = [tmp_path / "bin" / "python", "-c", OWN_FOLDERS.format(folder=str(tmp_path))]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": needed}, capture_output=True, text=True, check=True)
    own = done.stdout.splitlines()
    assert own[0] == str(tmp_path)
    assert not [folder for folder in own if "python3" in folder]


@pytest.mark.parametrize("packages", ["lib/python3/dist-packages", ".local/lib/python3.11/site-packages"])
def test_folders_of_installed_packages_outside_the_environment_are_not_the_users(
    packages: str, tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / packages).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / packages)
    monkeypatch.syspath_prepend(tmp_path)
    assert own_folders()[0] == str(tmp_path)
    assert str(tmp_path / packages) not in own_folders()


def test_a_folder_of_the_user_that_a_package_of_flash_hides_is_reported(
    tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "mine.py").write_text("class Mine: ...\n")
    monkeypatch.chdir(tmp_path)
    hidden = f"which hides {tmp_path / 'envs'}; give your own package another name"
    with pytest.raises(
        ConfigError, match=f"there is no module `envs.mine`: `envs` is the package in .*/envs, {hidden}"
    ):
        load_object("envs.mine:Mine")
    with pytest.raises(ConfigError, match=r"there is no module `envs.arithmetik`; did you mean `envs.arithmetic`\?"):
        load_object("envs.arithmetik:Arithmetic")
