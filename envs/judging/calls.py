"""Tests that call a function of the program: the runner in the sandbox, and the comparison outside of it.

`envs.judging.tests` uses this module; the comparison of printed outputs is here too. The program runs in its own
process in the sandbox, and returns only text. The expected value never enters the sandbox, and no code in the sandbox
decides about a test, so that a program cannot find the expected value or pretend to have passed.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast

PROVIDED = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Mapping "
    "NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle dropwhile groupby islice "
    "pairwise permutations product repeat starmap takewhile tee zip_longest",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "math": "ceil comb cos dist e exp factorial floor fmod gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod sin "
    "sqrt",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "operator": "add and_ itemgetter attrgetter mul or_ sub xor",
    "dataclasses": "dataclass field",
    "copy": "deepcopy",
    "random": "choice randint randrange shuffle",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "enum": "Enum",
    "abc": "ABC abstractmethod",
}
"""Modules and names in them that a called program need not import. Sites that ask for functions provide them."""

# Modules that a called program need not import, including the keys of PROVIDED.
PROVIDED_MODULES = ("sys", "re", "json", "datetime", "statistics", "time", *PROVIDED)

CALL_PYTHON = """
import builtins, importlib, importlib.util, json, os, sys
answer = os.dup(1)
os.dup2(2, 1)  # The output of the program is not the answer.
asked = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("main", "main.py")
found = sys.modules["main"] = importlib.util.module_from_spec(spec)
code = spec.loader.get_code("main")
used, codes = set(), [code]
while codes:
    one = codes.pop()
    used.update(one.co_names)
    codes += [part for part in one.co_consts if hasattr(part, "co_names")]
known = dict(vars(builtins))
for module, names in asked["provided"].items():
    for name in used.intersection([module, *names]) - set(known):
        try:
            home = importlib.import_module(module)
            known[name] = home if name == module else getattr(home, name)
        except (ImportError, AttributeError):
            pass  # This Python is too old for it.
found.__dict__["__builtins__"] = known
sys.setrecursionlimit(50000)
exec(code, found.__dict__)
*parts, name = asked["call"].split(".")
if not hasattr(found, (parts or [name])[0]) and hasattr(found, "Solution"):
    parts = ["Solution"]
for part in parts:
    found = getattr(found, part)
    found = found() if isinstance(found, type) else found
returned = getattr(found, name)(*asked["args"])
try:
    text = json.dumps(returned)
except (TypeError, ValueError):
    sys.exit(f"{asked['call']} returned a {type(returned).__name__}, which has no form in JSON")
with open(answer, "w") as file:
    file.write("\\n" + text + "\\n")
"""
"""Python source of the runner. It reads `{"call", "args", "provided"}`, calls the function of `main.py`, and writes the
returned value as JSON on the last line. Provided names become builtins, so that they never hide names or modules of the
program."""

TOLERANCE = 1e-5
"""Largest absolute or relative difference between a number and an expected number with a fraction. Integers must be
equal. Sites that ask for functions allow as much, and show expected numbers with five decimals."""

FRACTION = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]\d+")
"""Pattern of a number with a fraction or an exponent, as programs print it."""
WHOLE = re.compile(r"[-+]?\d+")
"""Pattern of an integer."""


def question(call: str, args: list[Any]) -> bytes:
    """Return the input of a runner (`CALL_PYTHON`) that calls the function `call` with `args`, as JSON."""
    provided = {module: PROVIDED.get(module, "").split() for module in PROVIDED_MODULES}
    return json.dumps({"call": call, "args": args, "provided": provided}).encode()


def provided_names() -> list[str]:
    """Return the names that a called program need not import."""
    return [*PROVIDED_MODULES, *" ".join(PROVIDED.values()).split()]


def returned_this(output: bytes, expected: Any) -> bool:
    """Return True if the last line of a runner's output is the expected value, as JSON."""
    try:
        found = json.loads(output.rstrip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        return False
    return _same(found, expected)


def _same(found: Any, expected: Any) -> bool:
    """Return True if two JSON values are equal, with `TOLERANCE` for expected numbers with a fraction."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(expected, float):
        return isinstance(found, int | float) and close(found, expected)
    if isinstance(expected, int):
        # Integers are compared exactly. A found 12.0 counts as 12.
        return isinstance(found, int | float) and found == expected
    if isinstance(found, list) and isinstance(expected, list):
        ours, theirs = cast("list[Any]", found), cast("list[Any]", expected)
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(found, dict) and isinstance(expected, dict):
        table, wanted = cast("dict[str, Any]", found), cast("dict[str, Any]", expected)
        return table.keys() == wanted.keys() and all(_same(table[key], wanted[key]) for key in table)
    return type(found) is type(expected) and found == expected


def close(found: float, expected: float) -> bool:
    """Return True if two numbers differ by at most `TOLERANCE`."""
    try:
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer is too large for a float
        return False


def printed_this(output: bytes, expected: str) -> bool:
    """Return True if the output of a program has the expected lines.

    White space at the ends of lines and blank lines at both ends do not count. If an expected line has a number with a
    fraction or consists only of numbers, it is compared word by word, and its numbers as numbers.
    """
    # A lone surrogate in a test becomes `?`, as it does in the input that the program gets and may print again.
    text = expected.encode("utf-8", "replace").decode()
    found, wanted = _lines(output.decode("utf-8", "replace")), _lines(text)
    return len(found) == len(wanted) and all(map(_same_line, found, wanted))


def _lines(text: str) -> list[str]:
    """Return the lines of a text without white space at their ends, and without blank lines at the text's both ends.

    White space at the beginning of a line is kept, also of the first one.
    """
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    first = next((place for place, line in enumerate(lines) if line), 0)
    return lines[first:]


def _same_line(found: str, expected: str) -> bool:
    """Return True if two lines of `_lines` are equal, as text or word by word: see `printed_this`."""
    if found == expected:
        return True
    ours, theirs = found.split(), expected.split()
    kinds = [FRACTION.fullmatch(word) is not None for word in theirs]
    if not any(kinds) and not all(map(WHOLE.fullmatch, theirs)):
        return False
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs, kinds))


def _same_word(found: str, expected: str, fraction: bool) -> bool:
    """Return True if two words are equal as texts or as numbers. `fraction`: the expected number has a fraction."""
    if found == expected:
        return True
    if fraction:
        number = FRACTION.fullmatch(found) or WHOLE.fullmatch(found)
        return number is not None and close(float(found), float(expected))
    # A found 12.0 counts as 12, as in calls. But 012 may be a text, so it does not.
    whole, _, zeros = found.partition(".")
    return whole == expected and zeros.strip("0") == "" and WHOLE.fullmatch(whole) is not None
