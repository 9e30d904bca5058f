"""Who looks at the console, and what this person may do."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from dropforge.run.record import Record


class Role(IntEnum):
    """What a person may do. Each role includes the role before it."""

    VIEWER = 0  # looks
    SUBMITTER = 1  # also drops specs, cancels the runs of such specs, and asks models: an answer may start a machine
    ADMIN = 2  # also cancels every run, and changes named endpoints: as an operator of the deployment

    @property
    def word(self) -> str:
        return self.name.lower()

    @property
    def submits(self) -> bool:
        return self >= Role.SUBMITTER

    @property
    def asks(self) -> bool:
        return self >= Role.SUBMITTER

    @property
    def changes_endpoints(self) -> bool:
        return self >= Role.ADMIN

    def cancels(self, record: Record) -> bool:
        """Whether this role may end a run. The runs of a requests topic belong to its publishers."""
        return self >= (Role.ADMIN if record.topic else Role.SUBMITTER)


class Person(NamedTuple):
    """A person whose requests are allowed. `email` is the verified identity; "" for whoever runs a console alone."""

    email: str
    role: Role


OWNER = Person("", Role.ADMIN)  # of a console on this machine, which acts by its owner's credentials


class Members(NamedTuple):
    """People, as IAM writes them: user:ann@example.com, serviceAccount:ci@project.iam.gserviceaccount.com,
    domain:example.com. Google tells the console no groups."""

    emails: frozenset[str]
    domains: frozenset[str]

    @classmethod
    def of(cls, members: Collection[str]) -> Members:
        """Raises ValueError for a member of another kind."""
        emails, domains = set[str](), set[str]()
        for member in members:
            kind, _, name = member.partition(":")
            if kind not in ("user", "serviceAccount", "domain") or not name:
                raise ValueError(f"{member!r} is none of user:EMAIL, serviceAccount:EMAIL, domain:DOMAIN")
            (domains if kind == "domain" else emails).add(name.lower())
        return cls(frozenset(emails), frozenset(domains))

    def has(self, email: str, domain: str) -> bool:
        """Whether a person is among them. `domain` is the Workspace domain of the account, "" without one."""
        return email.lower() in self.emails or (bool(domain) and domain.lower() in self.domains)
