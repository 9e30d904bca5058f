"""Write the permissions table of docs/security.md from terraform/permissions.yaml; `--check` fails when it differs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "security.md"
TABLE = re.compile(r"(<!-- permissions: made by `make tables` -->\n).*?(<!-- end -->)", re.S)


def main(argv: list[str]) -> int:
    text = PAGE.read_text()
    new = TABLE.sub(lambda match: match[1] + table() + match[2], text)
    if "--check" not in argv:
        PAGE.write_text(new)
        return 0
    if new == text:
        return 0
    print("docs/security.md differs from terraform/permissions.yaml; run `make tables`", file=sys.stderr)
    return 1


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
