"""The answers of the function `preflight` on the page *New run*, and a function that gives none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dropforge.stages.answers import Checked, Finding
from dropforge_console.preflight import Preflight, asked, by_function

from .test_playground import Clients

URL = "https://functions/preflight"
FOUND = Finding("warning", "quota for 1 nvidia-l4 in us-central1", "allows 1, of which 1 are in use", "https://quotas")


def answered(status: int, content: Any) -> Preflight:
    """Return the answers that the console shows if the function answers with this status and content."""
    requests: list[Any] = []

    def post(url: str, **options: Any) -> Any:
        requests.append((url, options["json"], options["headers"]))
        return SimpleNamespace(status_code=status, text=str(content), json=lambda: content)

    with patch("requests.post", post):
        shown = asked(by_function(URL, Clients()), "{}")  # type: ignore[arg-type]
    assert requests == [(URL, {"spec": "{}"}, {"Authorization": f"Bearer an identity for {URL}"})]
    return shown


def test_the_answers_of_the_function_arrive_whole() -> None:
    assert answered(200, Checked(findings=[FOUND]).to_json()) == Preflight([FOUND])


@pytest.mark.parametrize(
    ("status", "content", "expected"),
    [
        (403, "Forbidden", "the function preflight answered 403 for the spec: Forbidden"),
        (200, {"status": "CHECKED"}, "no list of findings: KeyError('findings')"),
        (200, {"findings": [{"status": "ok"}]}, "no list of findings"),
        (200, ["findings"], "no list of findings: TypeError"),
    ],
)
def test_without_an_answer_the_page_says_why(status: int, content: Any, expected: str) -> None:
    shown = answered(status, content)
    assert expected in shown.trouble
    assert shown.findings == []
