"""The documentation's site: MkDocs builds it without a warning, and its links lead to pages and files of the site."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools import docs_site, spec_reference

from dropforge.spec import job_spec_schema

ROOT = Path(__file__).resolve().parents[2]


def build(environment: Path, repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    python = environment / "bin" / "python"
    command: list[str | Path] = [python, "-P", "-m", "mkdocs", "build", "--site-dir", site]
    return subprocess.run(
        command, cwd=repository, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def site(docs_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(docs_environment, ROOT, directory)
    assert done.returncode == 0, done.stderr
    return directory


def test_every_link_of_the_site_leads_to_a_page_or_a_file_of_the_site(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        links = re.findall(r'href="([^"#:?]+)(?:[#?][^"]*)?"', page.read_text())
        missing = {link for link in links if not link.startswith("/") and not (site / link).exists()}
        assert missing == set(), page.name


def test_the_site_has_the_specs_that_pages_link_to(site: Path) -> None:
    copy = site / "files" / "examples" / "cloud-run-gemma-2b-qlora.json"
    assert copy.read_bytes() == (ROOT / "examples" / copy.name).read_bytes()


def test_a_page_with_a_broken_link_is_refused(docs_environment: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name in ["docs", "examples", "schemas"]:
        shutil.copytree(ROOT / name, repository / name)
    for name in ["mkdocs.yml", "tools/docs_site.py", *docs_site.PAGES]:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, repository / name)
    with (repository / "docs" / "cli.md").open("a") as page:
        page.write("\n[broken](nowhere.md)\n")
    done = build(docs_environment, repository, tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("docs/cli.md", "[a](limits.md#attempts)", "[a](limits.md#attempts)"),
        ("docs/cli.md", "[a](../README.md)", "[a](overview.md)"),
        ("README.md", "[a](docs/cli.md)", "[a](cli.md)"),
        ("local/workflows_engine/README.md", "[a](../../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("docs/cli.md", "[a](../LICENSE)", "[a](files/LICENSE)"),
        ("docs/security.md", "[a](../.checkov.yaml)", "[a](files/checkov.yaml)"),
        ("docs/cli.md", "[`a`](../containers/serve_vllm)", "`a`"),
        ("docs/cli.md", "[a](https://example.com/x.md)", "[a](https://example.com/x.md)"),
        ("docs/cli.md", "[a](#attempts)", "[a](#attempts)"),
    ],
)
def test_links_arerewritten_for_the_site(source: str, link: str, expected: str) -> None:
    assert docs_site.LINK.sub(lambda match: docs_site.rewritten(match, source), link) == expected


def test_every_field_of_a_spec_is_described() -> None:
    schema = job_spec_schema()
    classes = {"JobSpec": schema, **schema["$defs"]}
    bare = [
        f"{name}.{field}"
        for name, definition in classes.items()
        for field, value in definition["properties"].items()
        if not value.get("description")
    ]
    assert bare == []
    assert [name for name, definition in classes.items() if not definition.get("description")] == []


def test_the_reference_has_every_class_with_its_fields() -> None:
    page, schema = spec_reference.page(), job_spec_schema()
    for definition in [schema, *schema["$defs"].values()]:
        assert spec_reference.table(definition, schema) in page
