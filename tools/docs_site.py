"""MkDocs hooks (mkdocs.yml): links that leave docs/ work on the site, too.

The pages are written for GitHub, where `../schemas/x.json` leads to a file of the repository. The site gets a copy of
each linked file. Linked pages outside docs/ become pages. A link to a folder becomes its text: a site lists no folder.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Pages outside docs/, by their path in the repository.
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "local/workflows_engine/README.md": "workflows-engine-package.md",
}
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
SOURCES = {site: source for source, site in PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/ and the files that pages link to."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]  # it is in build/docs alone

    for source, site in PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / source).read_text()))
    for linked in sorted(linked_files([file.src_uri for file in files.documentation_pages()])):
        files.append(File.generated(config, copied(linked), content=(ROOT / linked).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page for the site."""
    source = source_of(page.file.src_uri)
    return LINK.sub(lambda match: rewritten(match, source), markdown)


def linked_files(pages: list[str]) -> set[str]:
    """Return the files of the repository, other than pages, to which the site's pages link."""
    targets = {
        target(link[2], source_of(page))
        for page in pages
        for link in LINK.finditer((ROOT / source_of(page)).read_text())
    }
    return {path for path in targets if site_page(path) is None and (ROOT / path).is_file()}


def source_of(site: str) -> str:
    """Return a page's path in the repository."""
    return SOURCES.get(site, f"docs/{site}")


def site_page(path: str) -> str | None:
    """Return the site's page of a file of the repository; None if the file is no page."""
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return PAGES.get(path)


def target(link: str, source: str) -> str:
    """Return the path in the repository to which a link of a page leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def copied(path: str) -> str:
    """Return where the site has the copy of a file, without leading dots: MkDocs leaves hidden files out."""
    return "/".join(["files", *(part.lstrip(".") for part in path.split("/"))])


def rewritten(match: re.Match[str], source: str) -> str:
    text, link, anchor = match[1], match[2], match[3] or ""
    path = target(link, source)
    if (page := site_page(path)) is not None:
        return f"[{text}]({page}{anchor})"
    if (ROOT / path).is_file():
        return f"[{text}]({copied(path)})"
    return text if (ROOT / path).is_dir() else match[0]  # MkDocs refuses a link that leads nowhere
