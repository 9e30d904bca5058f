"""Write the tables that are made from data: `--check` fails when a page differs.

docs/security.md: permissions, from terraform/permissions.yaml. docs/data-formats.md: forms of rows, from their readers.
docs/messages.md: every kind of message and run event, from the functions that write them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import messages, row_forms

ROOT = Path(__file__).resolve().parent.parent
TABLE = r"(<!-- {name}: made by `make tables` -->\n).*?(<!-- end -->)"


def main(argv: list[str]) -> int:
    made = {
        ("security.md", "permissions"): table(),
        ("data-formats.md", "forms"): row_forms.table(),
        ("messages.md", "messages"): messages.text(),
    }
    different = [page for (page, name), text in made.items() if not write(page, name, text, check="--check" in argv)]
    for page in different:
        print(f"docs/{page} has an old table; run `make tables`", file=sys.stderr)
    return 1 if different else 0


def write(page: str, name: str, text: str, *, check: bool) -> bool:
    """Put the table into its page, or only compare; returns whether the page has the table."""
    path = ROOT / "docs" / page
    old = path.read_text()
    new = re.sub(TABLE.format(name=name), lambda match: match[1] + text + match[2], old, flags=re.S)
    if not check:
        path.write_text(new)
    return new == old or not check


def table() -> str:
    """Return a table with a row for each account and place."""
    permissions = yaml.safe_load((ROOT / "terraform" / "permissions.yaml").read_text())
    rows = ["| account | called by | on | may |", "|---|---|---|---|"]
    for name, account in permissions["accounts"].items():
        may = {
            permissions["scopes"][scope]: [f"`{name}`" for name in sorted(held)]
            for scope, held in account["grants"].items()
        }
        if "kubernetes" in account:
            verbs = account["kubernetes"].items()
            may["the namespace of each cluster"] = [f"`{resource}` ({', '.join(held)})" for resource, held in verbs]
        first = f"`{name}` | {account.get('called_by', '')}"
        for where, held in may.items():
            rows.append(f"| {first} | {where} | {', '.join(held)} |")
            first = " | "
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
