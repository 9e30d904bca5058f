"""The pages name only commands, options, links and files that exist, and use the words of the glossary."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from dropforge.base.errors import ErrorClass
from dropforge.base.settings import Settings
from dropforge.money.control_plane import RUN, usage_of_training
from dropforge.money.plan import OLD_PRICE
from dropforge.rows.split import MIN_TRAIN_ROWS
from dropforge_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GLOSSARY = ROOT / "docs" / "glossary.md"
INDEX = ROOT / "docs" / "README.md"
TERRAFORM = sorted((ROOT / "terraform").glob("*.tf"))
# A new platform, channel or emulator; generated files; a file that operators write.
PLACEHOLDERS = ("/x/", "/x.", "build/", "terraform/policy.yaml")
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def text(request: pytest.FixtureRequest) -> str:
    document: Path = request.param
    return document.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_make_targets_exist(text: str) -> None:
    assert set(re.findall(r"(?:`|\$ )make ([a-z]+)", text)) <= TARGETS


def test_commands_of_the_dropforge_command_are_accepted(text: str) -> None:
    for line in re.findall(r"^ *\$ (?:build/venv/bin/)?dropforge (.*)$", text, re.M):
        name, *arguments = shlex.split(line, comments=True)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        if isinstance(command, click.Group):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        command.make_context(name, [_existing(argument) for argument in arguments])


def _existing(argument: str) -> str:
    """Replace the files of the user by an existing file: click checks that files exist."""
    is_users = argument in ("my-job.json", "my-rows.csv", "tickets.csv")
    return str(ROOT / "examples" / "local" / "cloud_run.json") if is_users else argument


def test_the_page_about_bills_has_the_figures_of_the_code() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "cost.md").read_text())
    assert f"by at most one check interval ({Settings.check_interval_seconds // 60} minutes)" in page
    assert f"`plan` says so after {OLD_PRICE.days} days" in page
    assert f"about {RUN.usd:.4f} USD for a run that ends at once" in page
    assert usage_of_training(2 * 3600, Settings.check_interval_seconds).usd < 0.01
    assert "less than a cent for an attempt of two hours" in page
    kept = re.search(
        r'"soft_delete_days" \{.*?default += (\d+)', (ROOT / "terraform" / "variables.tf").read_text(), re.S
    )
    assert kept is not None
    assert f"for `soft_delete_days` ({kept[1]})" in page


def test_the_questions_name_classes_and_figures_of_the_code() -> None:
    page = (ROOT / "docs" / "faq.md").read_text()
    named = re.findall(r"^\| class `(\w+)` ", page, re.M)
    assert len(named) == len(set(named)) >= 7
    assert set(named) <= set(ErrorClass)
    assert f"At least {MIN_TRAIN_ROWS} to train on" in page


def test_the_index_lists_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {INDEX.name}
    assert pages - set(re.findall(r"\]\(([\w-]+\.md)[#)]", INDEX.read_text())) == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_sections_lead_to_headings(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    headings = {page: _anchors(document.parent / page if page else document) for page, _ in links}
    assert [f"{page}#{anchor}" for page, anchor in links if anchor not in headings[page]] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, *TERRAFORM], ids=lambda path: path.name)
def test_paths_lead_to_files(document: Path) -> None:
    assert [path for path in _paths(document) if not _exists(path, document)] == []


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if page != GLOSSARY], ids=lambda path: path.name)
def test_pages_use_the_words_of_the_glossary(document: Path) -> None:
    listed = re.search(r"<!-- refused -->\n(.*?)\n<!-- end -->", GLOSSARY.read_text(), re.S)
    assert listed is not None
    refused = "|".join(re.escape(word) for word in re.split(r",\s+", listed[1]))
    assert re.findall(rf"\b(?:{refused})s?\b", _prose(document.read_text()), re.I) == []


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=lambda path: path.name)
def test_a_page_starts_with_its_readers(document: Path) -> None:
    assert re.match(r"# .+\n+For [^\n]+", document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    assert [name for name, file, test in _named_tests(document) if not _is_test(file, test)] == []


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _paths(document: Path) -> list[str]:
    """The files that a page names in backquotes, or a Terraform file in its comments."""
    text = document.read_text()
    if document.suffix == ".tf":
        words = " ".join(re.findall(r"#(.*)$", text, re.M)).split()
        named = [word.strip("`.,:;()") for word in words if "/" in word and "://" not in word]
    else:
        named = [name for name in re.findall(r"`([^`\n]+)`", text) if "/" in name]
    return [
        name
        for name in named
        if re.fullmatch(r"\.?[\w.-]+(/[\w.-]+)+", name) and re.search(r"\.(py|tf|md|sh|yaml|toml|json|txt)$", name)
    ]


def _exists(path: str, document: Path) -> bool:
    if any(placeholder in path for placeholder in PLACEHOLDERS) or path.startswith(
        ("runs/", "models/", "jobs/", ".github/")
    ):
        return True
    return any((base / path).exists() for base in (document.parent, ROOT, ROOT / "functions"))


def _named_tests(document: Path) -> list[tuple[str, str, str]]:
    """The tests that a page names: text, file, and function or "". `::test_x` belongs to the file named before."""
    named, file = [], ""
    for name in re.findall(r"`([^`\n]+)`", document.read_text()):
        match = re.fullmatch(r"(?:[\w/]+/)?(test_\w+\.py)?(?:::(test_\w+))?", name)
        if match and (match[1] or match[2]):
            file = match[1] or file
            named.append((name, file, match[2] or ""))
    return named


def _is_test(file: str, test: str) -> bool:
    return any(f"def {test}" in path.read_text() for path in (ROOT / "tests").rglob(file))


def _prose(text: str) -> str:
    """A page without code blocks, code, quotations and the addresses of links."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return re.sub(r"`[^`]*`|\"[^\"]*\"|\]\([^)]*\)", "", text)


def test_every_row_of_the_trust_model_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("## The trust model")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit(" | ", 1)[1])
        assert named, f"no test in {row}"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"
