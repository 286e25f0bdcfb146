"""Choose the program to grade among the blocks of an answer. This script runs in the sandbox, before any program does.

It reads one JSON object (`asked`). `blocks`: the blocks, the most likely first; each is a list of texts that it may be.
`calls`: the functions that the tests call. `prints` and `reads`: true if a test expects output or gives input.
`provided`: names that need no import. The script writes the chosen text as JSON. For Python, it uses Python's own
parser. For other languages, its arguments are a command that reads a program and exits with 0 if it parses.

The image's Python may be as old as 3.6, so the script uses only the standard library and old syntax.
"""

import ast
import builtins
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
import warnings
from typing import Any

PARSE_SECONDS = 5
"""Seconds that the parser of another language has for one text."""
MOST_STARTS = 40
"""Number of lines of an unfenced text that are tried as the first line of a program."""
MOST_CUTS = 20
"""Number of lines that are tried as the end of an unfenced program."""

CODE_START = re.compile(
    r"(?:import|from|def|class|async def|for|while|if|try|with|print|@|#|[A-Za-z_]\w*(?:\s*,\s*\w+)*\s*[=(.])"
)
"""Pattern of a line that may be the first of a program in running text."""

LOOKALIKES = str.maketrans(
    "\u201c\u201d\u201e\u2018\u2019\u201a\u00a0\u2003\u3000", "\"\"\"'''   ", "\u200b\u200c\u200d\u2060\ufeff"
)
"""Replacements of typographic quotes and blanks. Invisible characters are deleted."""

OUTPUT_NAMES = {"print", "write", "writelines", "pprint"}
"""Functions and methods that write output."""

INPUT_NAMES = {"input", "stdin", "open", "fileinput", "read"}
"""Functions, methods and modules that read input."""

BEST = 5
"""Highest rank: the program has everything that its tests need."""


def compiled(text: str) -> "ast.AST | None":
    """Return the syntax tree of a Python program; None if the text is not a program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # `compile` finds more errors than the parser, such as a `return` outside of a function.
            compile(text, "main.py", "exec", dont_inherit=True)
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def repairs(text: str) -> "list[str]":
    """Return a text, and its likely originals before it was indented, typeset or copied from a console.

    `choose_python` ranks all of them if no text of the block is a program as it is.
    """
    # Lines after the prompts of Python's console, and lines without the magic commands of notebooks.
    prompts = [line.lstrip()[4:] for line in text.split("\n") if line.lstrip()[:4] in (">>> ", "... ", "...", ">>>")]
    no_magics = [line for line in text.split("\n") if line.lstrip()[:1] not in ("%", "!")]
    variants = [text, textwrap.dedent(text), textwrap.dedent(text.translate(LOOKALIKES))]
    return variants + [textwrap.dedent("\n".join(no_magics))] + (["\n".join(prompts)] if prompts else [])


def rank(tree: ast.AST, asked: "dict[str, Any]") -> int:
    """Return the rank of a program for these tests, from 0 to `BEST`.

    0: it calls and defines nothing. 1: it lacks a called function. 2: it uses an unknown name, or a module that is not
    installed. 3: it can run. One more each if it writes output and reads input, or the tests do not need it to.
    """
    nodes = list(ast.walk(tree))
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if not any(isinstance(node, (ast.Call, *definitions)) for node in nodes):
        return 0
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, definitions)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    # Names in `except … as` and in patterns are plain strings in the tree.
    named = [getattr(node, field, None) for node in nodes for field in ("name", "rest")]
    bound |= {name for name in named if isinstance(name, str)}
    modules = []
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    if any(call.rpartition(".")[2] not in bound for call in asked["calls"]):
        return 1
    known = {"__file__", "__doc__", *dir(builtins), *asked["provided"]}
    free = set() if "*" in bound else loaded - bound - known
    if free or not all(found(module) for module in modules):
        return 2
    named_there = loaded | {node.attr for node in nodes if isinstance(node, ast.Attribute)} | set(modules)
    # An example call after the solution also prints, but does not read the tests' input.
    return (
        3
        + bool(not asked["prints"] or OUTPUT_NAMES & named_there)
        + bool(not asked["reads"] or INPUT_NAMES & named_there)
    )


def found(module: str) -> bool:
    """Return True if a module can be imported in the sandbox."""
    top = module.partition(".")[0]
    try:
        return top in sys.modules or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def region(text: str, asked: "dict[str, Any]") -> "str | None":
    """Return the first program in an unfenced text of code and prose; None if there is none.

    Each line that looks like code is tried as the start. The end moves up to the line before each syntax error.
    """
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if CODE_START.match(line)][:MOST_STARTS]
    for start in starts:
        part = lines[start:]
        for _ in range(MOST_CUTS):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = compile("\n".join(part), "main.py", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
            except SyntaxError as error:
                part = part[: min(error.lineno or 1, len(part)) - 1]
            except (ValueError, RecursionError, MemoryError, OverflowError):
                break
            else:
                # With rank 0 it defines and calls nothing, as a word of prose that happens to parse.
                if rank(tree, asked):
                    return "\n".join(part)
                break
            if not part:
                break
    return None


def choose_python(asked: "dict[str, Any]") -> str:
    """Return the program with the highest rank; of equal ones, the first.

    Each block counts with its text of the highest rank. The search ends at a block with the rank `BEST`.
    """
    blocks = asked["blocks"]
    best, chosen = -1, blocks[0][0]
    for texts in blocks:
        # Repaired texts count only if no text of the block is a program as it is.
        for variants in [texts, *map(repairs, texts)]:
            # `for tree in [...]` only names a value: Python 3.6 has no `:=`.
            ranked = [(rank(tree, asked), text) for text in variants for tree in [compiled(text)] if tree is not None]
            if ranked:
                value, text = max(ranked, key=lambda pair: pair[0])
                if value > best:
                    best, chosen = value, text
                break
        if best == BEST:
            return chosen
    # A program below rank 3 cannot run.
    if best < 3:
        # The best program may be surrounded by prose, in a text without a fence or in a block that was never closed.
        for part in (region(text, asked) for texts in blocks for text in texts):
            value = -1 if part is None else rank(ast.parse(part), asked)
            if part is not None and value > best:
                best, chosen = value, part
    return chosen


def choose_parsed(blocks: "list[list[str]]", command: "list[str]") -> str:
    """Return the first text that a command accepts as a program; if it accepts none, the first text."""
    for texts in blocks:
        for text in texts:
            source, null = text.encode("utf-8", "replace"), subprocess.DEVNULL
            try:
                ended = subprocess.run(command, input=source, stdout=null, stderr=null, timeout=PARSE_SECONDS)
                if ended.returncode == 0:
                    return text
            except (OSError, subprocess.TimeoutExpired):
                pass
    return blocks[0][0]


def main() -> None:
    """Read the question from standard input, and write the chosen text to standard output."""
    asked = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    chosen = choose_parsed(asked["blocks"], sys.argv[1:]) if sys.argv[1:] else choose_python(asked)
    sys.stdout.write(json.dumps(chosen))


if __name__ == "__main__":
    main()
