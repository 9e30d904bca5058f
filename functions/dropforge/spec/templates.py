"""The templates of `dataset.columns`: text with the names of columns in braces, as in `"Question: {question}"`."""

from __future__ import annotations

import string

from dropforge.base.errors import SpecProblem

from .job import Dataset, JobSpec
from .parts import shown


def columns_in(template: str) -> list[str]:
    """The columns that a template names, in order. Raises ValueError, which says what is no plain name in braces."""
    found = []
    for _, column, form, conversion in string.Formatter().parse(template):
        if column is None:
            continue
        if form or conversion or not column.isidentifier():
            raise ValueError(f"{{{column}}} is not a column's name in braces")
        found.append(column)
    return found


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
