"""Checks of all rows of a data set, before anything starts. They read the rows one by one, and keep none.

`flash.train`, `flash.evaluate` and `flash.sft` call them for the argument `data`. The processes of a run read the rows
again. But they would find a faulty row only after a model was fetched and the folder of an earlier run was moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flash.data.shapes import ANSWERS, PROMPTS, answer_of, example_of, find_column, prompt_of, template_of
from flash.data.tables import Row, column_names, read_rows, refuse_rows
from flash.errors import ConfigError


def check_examples(path: str) -> None:
    """Refuse rows that `flash sft` cannot learn. `path` is a file, a folder or a pattern.

    Raises:
        ConfigError: a file or some rows cannot be used. The message names the files and the rows.
    """
    column_names(path)  # refuses a data set without rows
    _check_rows(path, example_of)


def check_prompts(path: str, options: Mapping[str, Any], table: str) -> None:
    """Refuse rows without a prompt, and rows without an answer if no reward scores the whole row.

    Args:
        path: file, folder or pattern of the rows.
        options: options of `envs.dataset:DatasetEnv`, which may name the columns.
        table: the dotted path of these options, for advice in error messages.

    Raises:
        ConfigError: a file, a column or some rows cannot be used. The message names the files and the rows.
    """
    names = column_names(path)

    def column(option: str, usual: Sequence[str], otherwise: str = "") -> str:
        """Return the column that an option names, or the one with a usual name. `otherwise`: advice in place of it."""
        given = options.get(option)
        given = given if isinstance(given, str) else None  # a value of another type is reported with all settings
        setting = f"{table}.{option} in `settings`"
        return find_column(names, given, usual, setting if given else f"{setting}{otherwise}", path)

    prompt, answer = column("prompt_column", PROMPTS), None
    if "reward" not in options:
        answer = column("answer_column", ANSWERS, ", or give a `reward`")

    def convert(row: Row) -> None:
        """Take the prompt, the arguments of the chat template, and the answer."""
        prompt_of(row, prompt)
        template_of(row.values, row.place)
        if answer is not None:
            answer_of(row, answer)

    _check_rows(path, convert)


def _check_rows(path: str, convert: Callable[[Row], object]) -> None:
    """Read all rows, and raise one ConfigError for all rows that `convert` refuses with a ConfigError."""
    faults: list[str] = []
    try:
        for row in read_rows(path):
            try:
                convert(row)
            except ConfigError as error:
                faults.append(str(error))
    except ConfigError as error:  # the row cannot be read, and no row after it is read
        faults.append(str(error))
    refuse_rows(faults)
