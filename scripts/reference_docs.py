"""Write the parts of docs/ that are generated from the code: `make docs`.

The page of the configuration is made from its tree, and the page of the commands from the parsers. The tables in the
page of the metrics are made from the table of columns, and Grafana's dashboard from the charts.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from flash.cli.main import parsers
from flash.cli.prepare import encoded_schema
from flash.config.decode import describe, section_in, show, tables_in
from flash.config.resuming import CONDITIONS, PARTIAL, REFUSED
from flash.config.schema import field_docs
from flash.config.tree import Config
from flash.observe.columns.column import Column, ColumnGroup, capital
from flash.observe.columns.table import GROUPS, columns
from flash.view.prometheus import dashboard

DOCS = Path(__file__).resolve().parent.parent / "docs"
"""Folder of the documents."""

# -- docs/configuration.md ---------------------------------------------------------------------------------------------

CONFIGURATION = """\
# Configuration

<!-- Made by scripts/reference_docs.py from flash/config/tree.py: change it there and run `make docs`. -->

The configuration of a run is one or more TOML files, followed by settings: `flash train base.toml mine.toml
train.async_ratio=0`. Later files take precedence over earlier ones, key by key, also in nested tables, and settings
take precedence over files. The value of a setting is read as TOML; a value that is not TOML, or is a date, is text.
`{}` as the value of a table removes what earlier files set in it. All keys of the table then have their defaults, and
an optional table is on: `lora={}` trains adapters. `none` unsets a key, or removes an optional table. Some tables have
several kinds, of which the key `kind` chooses one: `algorithm.corrections=[{kind="token_tis", cap=3}]`.

`flash train --dry-run` tries everything except engines and training.

With the [JSON Schema](configuration.schema.json) of the configuration, which `flash schema` prints, an editor
completes keys, shows what they mean and marks mistakes. taplo and VS Code's Even Better TOML find the schema by the
first line of a file, as in the examples: `#:schema ../docs/configuration.schema.json`. The path is relative to the
file.
"""
"""Beginning of the page of the configuration."""


def configuration_page() -> str:
    """Return the page of the configuration, with one table for each section."""
    return "\n".join([CONFIGURATION, *_sections(), *_resuming()])


def _sections() -> Iterator[str]:
    """Yield the lines of the section of each table of the configuration.

    A table is a field of `Config`, and its *section* is the struct with its keys.
    """
    for table in msgspec.structs.fields(Config):
        section = section_in(table.type)
        assert section is not None, "the tree is two levels deep"
        yield f"## `[{table.name}]`\n"
        yield f"{inspect.getdoc(section)}\n"
        if section is not table.type:  # the type is `Section | None`
            yield "Optional.\n"
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        yield from _field_rows(section)
        yield ""
        keys_by_type: dict[Any, list[str]] = {}  # keys with the same kinds of tables are described once
        for field in msgspec.structs.fields(section):
            keys_by_type.setdefault(field.type, []).append(f"`{table.name}.{field.name}`")
        for annotation, keys in keys_by_type.items():
            yield from _kinds(keys, annotation)


def _kinds(keys: Sequence[str], annotation: Any) -> Iterator[str]:
    """Yield the lines about keys that hold the same tables or lists of tables: one part for each kind of table.

    Args:
        keys: the keys, as Markdown.
        annotation: their type. Nothing is yielded if it contains no table.
    """
    in_list = get_origin(annotation) is list
    # A dict from the value of the key `kind` to the struct of the table; the value is empty for a table without kinds.
    kinds = tables_in(get_args(annotation)[0] if in_list else annotation)
    if not kinds:
        return
    yield f"### {', '.join(keys)}\n"
    if "" not in kinds:
        yield f"{'Tables' if in_list else 'A table'} of these kinds.\n"
    for kind, struct in kinds.items():
        yield f"**`kind = {show(kind)}`**: {inspect.getdoc(struct)}\n" if kind else f"{inspect.getdoc(struct)}\n"
        if msgspec.structs.fields(struct):
            yield "| option | value | default | meaning |\n|---|---|---|---|"
            yield from _field_rows(struct)
            yield ""


def _field_rows(section: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the rows of the table of a section's keys: name, value, default and meaning."""
    meanings = field_docs(section)
    for field in msgspec.structs.fields(section):
        if field.required:
            default = "required"
        elif field.default is None:
            default = "none"
        elif field.default is msgspec.NODEFAULT:  # not required, so a factory makes the default: an empty list or table
            default = "empty"
        else:
            default = f"`{show(field.default)}`"
        yield _row(f"`{field.name}`", _value(field.type), default, meanings[field.name])


def _row(*cells: str) -> str:
    """Return a row of a Markdown table. A bar inside a cell is escaped, because it would end the cell."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _value(annotation: Any) -> str:
    """Return the description of a type in few words."""
    # A pattern is marked as code, because Markdown would read its brackets as a link.
    words = re.sub(r"(?<=text matching )\S+", r"`\g<0>`", describe(annotation))
    for long, short in SHORT.items():
        words = re.sub(long, short, words)
    return words


SHORT = {
    r"\ban? (?=integer|number|list|table)": "",
    r"\babove (?=\d)": "> ",
    r"\bat least (?=\d)": "≥ ",
    r"\bbelow (?=\d)": "< ",
    r"\bat most (?=\d)": "≤ ",
    r"\bfrom (?=-?\d)": "",
    r"list, each item": "list of",
    r"true or false": "boolean",
    r"number 0\.1 to 1e\+08": "seconds",
    r'number, list of number or table with kind = "lognormal".*': "distribution",
}
"""Abbreviations, by regular expression, of the descriptions that error messages have in whole words."""


def _resuming() -> Iterator[str]:
    """Yield the lines about the keys that `--resume` may change only in part or not at all."""
    yield "## What a resume may change\n"
    yield (
        "A changed key takes effect in all work that is still to be done. Schedules count from the run's first step. "
        "Steps since the newest checkpoint are made again if the change affects them. A change of these keys is "
        "refused, or has a limited effect:\n"
    )
    for table, how in ((REFUSED, "the change is refused. "), (CONDITIONS, ""), (PARTIAL, "")):
        together: dict[str, list[str]] = {}
        for keys, why in table.items():
            together.setdefault(why, []).extend(f"`{key}`" for key in keys.split(", "))
        yield from (f"- {', '.join(keys)}: {how}{why}" for why, keys in together.items())
    yield ""


# -- docs/commands.md: it reads the parsers, because the text of --help differs between versions of Python -------------

COMMANDS = """\
# Commands

<!-- Made by scripts/reference_docs.py from the parsers in flash/cli: change them there and run `make docs`. -->

`flash` is `.venv/bin/flash` of this repository. `flash COMMAND --help` shows the same texts. `CONFIG` and `KEY=VALUE`
are the files and settings of a [configuration](configuration.md). The exit code is 0 for success, 1 for a finding
that the command reports, 2 for an error that it names, 130 after an interrupt, and 141 if nobody reads the output.
"""
"""Beginning of the page of the commands."""


SEVERAL = 3
"""Number of arguments that a command must share with an earlier command so that they are listed by name only."""


def commands_page(parser: argparse.ArgumentParser) -> str:
    """Return the page of the commands, with one section for each command."""
    return "\n".join([COMMANDS, *_commands(parser)])


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of the section of each subcommand of `parser`, and of their subcommands.

    Several commands have the same arguments. Only the first of these commands describes them; the others name it.
    """
    for choices in parser._actions:
        if not isinstance(choices, argparse._SubParsersAction):
            continue
        helps = {action.dest: action.help for action in choices._choices_actions}
        before: dict[str, list[str]] = {}  # rows of the commands so far, by the name of the command
        for name, command in choices.choices.items():
            yield f"## `{command.prog}`\n"
            yield f"{_sentence(helps[name])}\n"
            rows = before[command.prog] = list(_argument_rows(command))
            # The first command with many of the same arguments, or this one. Only the first one describes them.
            alike = next((prog for prog, theirs in before.items() if len({*rows} & {*theirs}) >= SEVERAL), command.prog)
            own = rows if alike == command.prog else [row for row in rows if row not in before[alike]]
            if own:
                yield "| argument | meaning |\n|---|---|"
                yield from own
                yield ""
            if len(own) < len(rows):
                names = (row.split("`")[1].split(" ")[0].replace("\\|", "|") for row in rows if row not in own)
                yield f"As for `{alike}`: {', '.join(f'`{name}`' for name in names)}.\n"
            yield from _commands(command)


def _argument_rows(command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the rows of the table of a command's arguments."""
    for action in command._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        yield _row(_shown(action), (action.help or "") % {"default": action.default})


def _shown(action: argparse.Action) -> str:
    """Return the form in which a user writes an argument, such as `--port PORT` or `RUN_DIR…`."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        name = ", ".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{name}{'…' if action.nargs in ('*', '+') else ''}`"
    value = "" if action.nargs == 0 else f" {name}{'…' if action.nargs in ('*', '+') else ''}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _sentence(text: str | None) -> str:
    """Return a text with a capital at its beginning and a full stop at its end."""
    assert text, "a command says what it is for"
    return text[0].upper() + text[1:] + ("" if text.endswith(("…", ".")) else ".")


# -- docs/metrics.md ---------------------------------------------------------------------------------------------------

MARKED = re.compile(r"(?s)(<!-- made: (\w+) -->\n).*?(<!-- end -->)")
"""Generated part of the page, between its marks."""


def metrics_page(text: str) -> str:
    """Return docs/metrics.md, whose old text is `text`, with its tables (`TABLES`) generated again."""
    return MARKED.sub(lambda found: "\n".join([found[1], *TABLES[found[2]](), found[3]]), text)


def _described(groups: Sequence[ColumnGroup]) -> Iterator[str]:
    """Yield a table for each group of columns. Neighbouring columns with the same meaning share a row."""
    for group in groups:
        if group.about:
            yield f"{group.about}\n"
        yield "| name | meaning |\n|---|---|"
        for meaning, columns_of in groupby(group.columns, lambda column: column.meaning):
            yield f"| {', '.join(f'`{column.name}`' for column in columns_of)} | {capital(meaning)}. |"
        yield ""


def _worries() -> Iterator[str]:
    """Yield a table of the columns that have a *worry*, a text about the values at which a user should act.

    Columns with the same texts share a row.
    """
    together: dict[tuple[str, str], list[str]] = {}
    for column in (*columns("step"), *columns("evaluation")):
        if column.worry:
            together.setdefault((column.worry, column.helps), []).append(f"`{column.name}`")
    yield "| watch | worry when | what helps |\n|---|---|---|"
    yield from (f"| {', '.join(names)} | {worry} | {helps} |" for (worry, helps), names in together.items())
    yield ""


def _alarms() -> Iterator[str]:
    """Yield the table of alarms of docs/metrics.md. Advice that is in the table of worries is not repeated."""
    yield "| alarm | looks at | limit | what helps, if not as above |\n|---|---|---|---|"
    for column in columns("step"):
        if (alarm := column.alarm) is not None:
            looks_at, helps = alarm.looks_at or f"`{column.name}`", "" if column.worry else column.helps
            yield f"| `{alarm.name}` | {looks_at} | {_limit(column)} | {helps} |"
    yield ""


def _limit(column: Column) -> str:
    """Return the limit of a column's alarm, with its direction, as text."""
    assert column.alarm is not None
    limit = column.alarm.limit
    shown = f"{100 * limit:g} %" if column.alarm.is_share(column) else f"{limit:g} {column.unit}".rstrip()
    return f"{'below' if column.alarm.below else 'above'} {shown}"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "watch": _worries,
    "alarms": _alarms,
    "steps": lambda: _described(GROUPS["step"]),
    "evaluations": lambda: _described(GROUPS["evaluation"]),
    "engines": lambda: _described(GROUPS["engine"]),
}
"""Functions that generate the tables of the metrics' page, by the name in the table's mark."""


def main() -> None:
    """Write all generated files."""
    (DOCS / "configuration.md").write_text(configuration_page(), encoding="utf-8")
    (DOCS / "configuration.schema.json").write_text(encoded_schema() + "\n", encoding="utf-8")
    (DOCS / "commands.md").write_text(commands_page(parsers()[0]), encoding="utf-8")
    metrics = DOCS / "metrics.md"
    metrics.write_text(metrics_page(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "grafana.json").write_bytes(msgspec.json.format(msgspec.json.encode(dashboard())) + b"\n")


if __name__ == "__main__":
    main()
