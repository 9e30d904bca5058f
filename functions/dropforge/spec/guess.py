"""Which of several names a value probably means: one guess for fields, values, places and accelerators."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from dropforge.base.redact import cut

_MOST = 3  # names that a part of a name, such as "us", may stand for


def likeliest(found: object, names: Iterable[str]) -> list[str]:
    """The names that a value may stand for; [] if none is near. Numbers are no slips: "us-west9" is not "us-west1"."""
    listed = [*names]
    if exact := named(found, listed):
        return exact
    wanted, known = _wanted(found), {plain(name): name for name in listed}
    near = get_close_matches(wanted, known, n=5)
    return [known[each] for each in near if not _digits(wanted) or _digits(wanted) == _digits(each)][:1]


def named(found: object, names: Iterable[str]) -> list[str]:
    """The names that a value has, without regard to case and dashes, or has a part of: "H100" of "nvidia-h100-80gb"."""
    wanted, known = _wanted(found), {plain(name): name for name in names}
    if not wanted or wanted in known:
        return [known[wanted]] if wanted else []
    parts = set(wanted.split("-"))
    whole = [name for each, name in known.items() if parts <= set(each.split("-"))]
    return whole if len(whole) <= _MOST else []


def _wanted(found: object) -> str:
    return plain(cut(found, 64)) if isinstance(found, str) else ""


def _digits(text: str) -> str:
    return re.sub(r"[^0-9]", "", text)


def one_of(found: object, names: Iterable[str]) -> str:
    """What a value must be: the likeliest name as a question, and all names."""
    listed = [*names]
    listing = ", ".join(listed)
    meant = " or ".join(map(repr, likeliest(found, listed)))
    return f"did you mean {meant}? One of {listing}" if meant else f"one of {listing}"


def plain(text: str) -> str:
    """A name in lower case, with a dash between its words: "learningRate" and "LEARNING_RATE" are "learning-rate"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", text)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
