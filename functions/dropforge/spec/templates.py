"""Columns of data sets, and the templates of `dataset.columns`: text with their names in braces, `"Q: {question}"`."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from itertools import islice

from dropforge.base.errors import SpecProblem
from dropforge.base.redact import cut

from .job_spec import JobSpec
from .parts import shown
from .sections import Dataset

MAX_CSV_FIELD = 2**24  # characters; longer than any row that a training keeps. Python's default is 2**17

_NAME = re.compile(r"[^\s{}\[\]!:]([^{}\[\]!:]*[^\s{}\[\]!:])?")  # also "Customer name" and "answers.text"
MAX_NAMES, MAX_NAME = 20, 60  # columns in a message, and characters of each


def shown_columns(columns: Iterable[str]) -> str:
    """The names of columns, within limits: in a CSV file without names, the first row is in their place."""
    first = [str(name) for name in islice(columns, MAX_NAMES + 1)]
    names = [cut(name, MAX_NAME) for name in first[:MAX_NAMES]]
    return ", ".join([*names, "..."] if len(first) > MAX_NAMES else names) or "(none)"


def is_column(name: str) -> bool:
    """Whether a template can name the column."""
    return _NAME.fullmatch(name) is not None


def columns_in(template: str) -> list[str]:
    """The columns that a template names, in order. Raises ValueError, which says what is no plain name in braces."""
    found = []
    for _, column, form, conversion in string.Formatter().parse(template):
        if column is None:
            continue
        if form or conversion or not is_column(column):
            raise ValueError(f"{{{column}}} is not a column's name in braces")
        found.append(column)
    return found


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """The template with the values of its columns. (str.format reads a dot in a name as an attribute.)"""
    parts = string.Formatter().parse(template)
    return "".join(text + (values[column] if column is not None else "") for text, column, _, _ in parts)


def template_problems(spec: JobSpec) -> list[SpecProblem]:
    """The templates of a spec from which no row can become a prompt and a completion."""
    if not isinstance(spec.dataset, Dataset) or spec.dataset.columns is None:
        return []
    problems = []
    for name, template in spec.dataset.columns:
        try:
            columns = columns_in(template or "")
        except ValueError as error:
            message, expected = f"not a template: {error}", "columns as {name}, and {{ for a brace"
        else:
            if columns or name == "system":
                continue
            message, expected = "the same text for every row", "the name of a column in braces, such as {question}"
        problems.append(SpecProblem(f"/dataset/columns/{name}", message, shown(template), expected))
    return problems
