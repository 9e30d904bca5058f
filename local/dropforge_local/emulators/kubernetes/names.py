"""The API's rules for names and labels (k8s.io/apimachinery/pkg/util/validation); each returns the problem, or ""."""

from __future__ import annotations

import re

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
ENVIRONMENT = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
KEY = re.compile(r"[-._a-zA-Z0-9]+")
PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?")


LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name'"
)
SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com'"
)
SERVICE_RULE = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name'"
)


def label_problem(name: str) -> str:
    """RFC 1123 label: names of containers, volumes, namespaces; hostnames."""
    return _problem(name, 63, LABEL, LABEL_RULE)


def subdomain_problem(name: str) -> str:
    """RFC 1123 subdomain: names of most objects."""
    return _problem(name, 253, SUBDOMAIN, SUBDOMAIN_RULE)


def service_problem(name: str) -> str:
    """RFC 1035 label: names of services."""
    return _problem(name, 63, SERVICE_NAME, SERVICE_RULE)


def label_key_problem(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if slash and (problem := subdomain_problem(prefix)):
        return f"prefix part {problem}"
    if not name or len(name) > 63 or not QUALIFIED.fullmatch(name):
        return (
            f"name part {name!r} must be no more than 63 characters, consist of alphanumeric characters, '-', '_' or "
            f"'.', and must start and end with an alphanumeric character (regex used for validation is "
            f"'{QUALIFIED.pattern}')"
        )
    return ""


def label_value_problem(value: str) -> str:
    if len(value) > 63:
        return "must be no more than 63 characters"
    if value and not QUALIFIED.fullmatch(value):
        return (
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must "
            f"start and end with an alphanumeric character (regex used for validation is '({QUALIFIED.pattern})?')"
        )
    return ""


def _problem(name: str, longest: int, pattern: re.Pattern[str], text: str) -> str:
    if len(name) > longest:
        return f"must be no more than {longest} characters"
    return "" if pattern.fullmatch(name) else f"{text}, regex used for validation is '{pattern.pattern}')"
