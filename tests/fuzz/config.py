"""Fuzzes the configuration: valid files and overrides with something wrong in them.

Oracles: either it loads, and what it loaded to says what it holds (it is written and read back to an equal one, its
numbers are finite and fit into 64 bits), or there is one ConfigError that names a file or a key. Nothing else comes.
"""

from __future__ import annotations

import copy
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import tomli_w

from flash.config.load import dump, key_paths, load
from flash.config.tree import Config
from flash.errors import ConfigError
from tests.fuzz.mutate import CHANGES

EXAMPLES = Path(__file__).parents[2] / "examples"
VALUES: tuple[Any, ...] = (
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    100,
    65536,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
    -(10**40),
    10**400,
    0.0,
    -0.0,
    1e-300,
    1e-9,
    0.5,
    1.5,
    1e9,
    1e18,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    ".",
    "..",
    "/dev/null",
    "none",
    "auto",
    "nan",
    "x\u0000y",
    "\u202egpj",
    "😀" * 50,
    "x" * 5000,
    "a:b",
    "os:path",
    "constant(1e999)",
    "normal(" + "(" * 300,
    "constant(" + "-" * 5000 + "1)",
    [],
    [0, 0],
    [0.5, 0.1],
    [-1],
    [10**30],
    [[[]]],
    [{}],
    {},
    {"kind": "x"},
    {"kind": "normal", "mean": 1e308, "deviation": 5e-324, "high": "none"},
    {"kind": "lognormal", "mean": 1e-300, "deviation": 1e300},
    {"type": "x", "": 1},
    {"a": {"b": {"c": 1}}},
)
"""What a key may be given."""
TEXTS = (
    "{name}={value}",
    "{name} = {value}",
    "{name}",
    "={value}",
    "{name}.={value}",
    ".{name}={value}",
    "{name}.x={value}",
    "{name}\u0000={value}",
    "run={value}",
    "\ud83d={value}",
)
"""Forms of overrides, most of them wrong."""
NAMED = re.compile(r"`[^`]+`|\.toml|\[[a-z_]+\]")


def bases() -> dict[str, dict[str, Any]]:
    """Valid configurations, by name: those of the examples that load on any machine."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(EXAMPLES.glob("*.toml")):
        try:
            load(path)
        except ConfigError:
            continue
        found[path.stem] = tomllib.loads(path.read_text())
    assert found, "no example loads"
    return found


def corrupt(table: dict[str, Any], keys: list[str], rng: Random) -> dict[str, Any]:
    """A copy with other values, keys or tables."""
    table = copy.deepcopy(table)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        *sections, name = rng.choice(keys).split(".")
        inner: Any = table
        for section in sections:
            inner = inner.setdefault(section, {}) if isinstance(inner, dict) else {}
        roll = rng.random()
        if not isinstance(inner, dict):
            continue
        if roll < 0.75:
            inner[name] = rng.choice(VALUES)
        elif roll < 0.85:
            inner.pop(name, None)
        elif roll < 0.95:
            inner[rng.choice((name + "x", name[:-1], "", "\u0000", name.upper()))] = rng.choice(VALUES)
        else:
            table[rng.choice(list(table))] = rng.choice(VALUES)
    return table


def written(table: dict[str, Any], rng: Random) -> bytes:
    """As a file, whose bytes are damaged now and then."""
    data = tomli_w.dumps(table).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        data = rng.choice(CHANGES)(data, rng)
    elif rng.random() < 0.02:
        data += b"\nx = " + rng.choice((b"[" * 5000, b"{a=" * 5000, b"9" * 5000, b"\xff", b"'''"))
    return data


def override(keys: list[str], rng: Random) -> str:
    value = rng.choice(VALUES)
    if not isinstance(value, str) or rng.random() < 0.5:
        value = tomli_w.dumps({"v": value})[4:].strip() if not isinstance(value, dict) else "{a = 1}"
    return rng.choice((*TEXTS[:1] * 20, *TEXTS)).format(name=rng.choice(keys), value=value)


def numbers(value: Any) -> Iterator[float]:
    """All numbers in plain data."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, (int, float)):
        yield value


def look(config: Config) -> None:
    """What holds of every configuration that loads."""
    for number in numbers(msgspec.to_builtins(config)):
        assert math.isfinite(number), f"{number} was taken"
        assert abs(number) < 2**63 or isinstance(number, float), f"{number} was taken"
    assert config.run_dir.name == config.run.name
    assert config.groups_per_batch >= 1
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(dump(config), encoding="utf-8")
        assert load(file) == config, "it is not what it is written as"


def try_one(base: dict[str, Any], keys: list[str], folder: Path, rng: Random) -> str:
    """Load one corrupt configuration: `loaded` or `refused`."""
    file = folder / "fuzz.toml"
    overrides: list[str] = []
    if rng.random() < 0.3:
        file.write_bytes(written(base, Random(1)))
        overrides = [override(keys, rng) for _ in range(rng.choice((1, 1, 2)))]
    else:
        file.write_bytes(written(corrupt(base, keys, rng), rng))
    try:
        config = load(file, overrides)
    except ConfigError as error:
        said = str(error)
    else:
        look(config)
        return "loaded"
    assert NAMED.search(said), f"names neither a key nor a file: {said}"
    assert len(said) < 20_000, f"{len(said)} characters"
    return "refused"


def fuzz(count: int, seed: int) -> dict[str, int]:
    """Try so many; raises AssertionError, naming the case's seed, where an oracle does not hold."""
    known, keys = list(bases().values()), list(key_paths())
    counts = {"loaded": 0, "refused": 0}
    with TemporaryDirectory() as folder:
        for case in range(count):
            rng = Random(f"{seed}/{case}")
            try:
                counts[try_one(rng.choice(known), keys, Path(folder), rng)] += 1
            except Exception as error:
                raise AssertionError(f"config: seed {seed}, case {case}: {error!r}") from error
    return counts
