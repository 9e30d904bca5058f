"""Every format of a credential is found in every place of a text, and no text makes the search slow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge.base.redact import FORMATS, MARKS, cut, redact

WORD = "Canary7f3a"
LONG = WORD * 5
BODY = "\n".join(["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQ" + WORD] * 20)
# None of them is real. Each contains WORD, except those whose format has other characters.
EXAMPLES = {
    "private key": [
        f"-----BEGIN PRIVATE KEY-----\n{BODY}\n-----END PRIVATE KEY-----",
        f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n{BODY}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BODY}",  # cut by a limit
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{BODY}\n=aB3d\n-----END PGP PRIVATE KEY BLOCK-----",
    ],
    "JSON web token": [f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{WORD}.{LONG}", f"eyJhbGciOiJub25lIn0.eyJ{LONG}"],
    "password of a URL": [f"//user:{WORD}", f"//:{WORD}", f"//user:p@{WORD}"],  # what stands between : and @
    "signature of a URL": [f"X-Goog-Signature={LONG}", f"X-Amz-Security-Token={LONG}%2F", f"&sig={LONG}%3D"],
    "bearer token": [f"Bearer {LONG}"],
    "Hugging Face": [f"hf_{LONG}", f"api_org_{LONG}"],
    "GitHub": [f"{kind}_{LONG}" for kind in ("ghp", "gho", "ghu", "ghs", "ghr", "github_pat")],
    "GitLab": [f"glpat-{LONG}", f"glrt-t1_{LONG}.01.1b"],
    "Slack": [f"xoxb-1234-5678-{WORD}", f"xoxe.xoxp-1-{LONG}", f"xapp-1-A0-{LONG}"],
    "Slack webhook": [f"hooks.slack.com/{kind}/T0/B0/{WORD}" for kind in ("services", "triggers", "workflows")]
    + [rf"hooks.slack.com\/services\/T0\/{WORD}", f"hooks.slack-gov.com/services/T0/{WORD}"],
    "Discord webhook": [f"discord.com/api/webhooks/1234/{LONG}", f"discordapp.com/api/v10/webhooks/1/{LONG}"],
    "Teams webhook": [f".webhook.office.com/webhookb2/1-2@3-4/IncomingWebhook/{WORD}/5"],
    "AWS": ["AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", f"aws_secret_access_key = {WORD * 4}"],
    "Google": [f"AIza{LONG}", f"ya29.c.b0{LONG}", f"GOCSPX-{LONG}", f"1//0{LONG}"],
    "OpenAI, Anthropic": [f"sk-{LONG}", f"sk-proj-{WORD}_{LONG}", f"sk-ant-api03-{LONG}"],
    "Stripe": [f"sk_live_{LONG}", f"rk_test_{LONG}"],
    "package registries": [f"npm_{(LONG * 2)[:36]}", f"pypi-AgEIcHlwaS5vcmc{LONG}", f"dckr_pat_{LONG}"],
    "NVIDIA, Weights & Biases": [f"nvapi-{LONG}", f"wandb_v1_{LONG}"],
}
CASES = [(name, example) for name, examples in EXAMPLES.items() for example in examples]


def placed(name: str, example: str) -> str:
    """The example as it stands in a text: a URL has its scheme, and a host after the password."""
    return f"postgres:{example}@db.example/x" if name == "password of a URL" else example


def left(text: str) -> list[str]:
    return re.findall(rf"{WORD}|IOSFODNN7", redact(text))


def test_every_format_has_examples() -> None:
    assert set(EXAMPLES) == set(FORMATS)


@pytest.mark.parametrize(("name", "example"), CASES)
def test_a_credential_is_removed_wherever_it_stands(name: str, example: str) -> None:
    text = placed(name, example)
    assert re.search(FORMATS[name], text)
    around = [text, f"failed: {text}, so it ended", f'{{"token": "{text}"}}', f"a\n{text}\nb", f"<{text}>", f"x={text}"]
    for place in around:
        assert "[redacted]" in redact(place)
        for form in (place, json.dumps(place), repr(place)):
            assert left(form) == []
    assert redact(f"failed: {text}") == redact(redact(f"failed: {text}"))


def test_the_text_around_a_credential_stays() -> None:
    key = EXAMPLES["private key"][0]
    assert redact(f"before {key} after") == "before [redacted] after"
    assert redact(json.dumps({"a": key, "b": 1})) == '{"a": "[redacted]", "b": 1}'
    assert redact("git clone https://me:secret@host.example/x") == "git clone https://[redacted]@host.example/x"


@pytest.mark.parametrize(
    "text",
    [
        "the run risk-assessment-of-the-model-2026 and the disk-of-a-very-long-name-0123456789",
        "gs://b-runs/models/demo-0123456789ab/attempt-1/model at generation 1732368965123456",
        "us-docker.pkg.dev/p/dropforge/train@sha256:" + "0" * 64,
        "http://127.0.0.1:8080/v1 and http://[::1]:8080/ and ssh://git@host:22/x and mail to a@b.example",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "2026-11-23T13:00:00+00:00 eyJ is how a token begins; the bearer of bad news",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(("name", "example"), CASES)
def test_a_limit_never_leaves_half_a_credential(name: str, example: str) -> None:
    text = "the request failed: " + placed(name, example)
    for limit in range(10, len(text) + 5, 7):
        shown = cut(text, limit)
        assert len(shown) <= limit
        assert text[: limit - 3].startswith(shown.removesuffix("...")) or "[" in shown
        assert WORD[:6] not in shown


def test_percent_encoded_private_keys_are_removed() -> None:
    assert left(quote(EXAMPLES["private key"][0])) == []


def test_every_credential_of_a_format_has_a_mark() -> None:
    """`redact` does not search a text without a mark."""
    assert set(MARKS) == set(FORMATS)
    for name, pattern in FORMATS.items():
        ways = list(texts(list(re._parser.parse(pattern))))
        assert ways
        for text in ways:
            assert any(mark in text.casefold() for mark in MARKS[name]), (name, text)
        for _, example in filter(lambda case: case[0] == name, CASES):
            assert any(mark in placed(name, example).casefold() for mark in MARKS[name])


def test_a_key_in_unusual_letters_is_removed() -> None:
    assert redact(f"AWS_\u017fecret_acce\u017f\u017f_\u212aey={WORD * 4}") == "[redacted]"


def texts(items: list[Any]) -> Iterator[str]:
    """The shortest text of each way to match a pattern, and of each alternative in it.

    What stands before a match is missing, what must follow it is there. A place for many characters has one of them.
    """
    if not items:
        yield ""
        return
    (kind, value), rest = (str(items[0][0]), items[0][1]), items[1:]
    if kind == "BRANCH":
        firsts = [text for part in value[1] for text in texts(list(part))]
    elif kind in ("SUBPATTERN", "ATOMIC_GROUP"):
        firsts = list(texts(list(value[-1] if kind == "SUBPATTERN" else value)))
    elif kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        firsts = [text * value[0] for text in texts(list(value[2]))] if value[0] else [""]
    elif kind == "ASSERT":
        firsts = list(texts(list(value[1]))) if value[0] > 0 else [""]
    elif kind == "LITERAL":
        firsts = [chr(value)]
    elif kind == "IN":
        firsts = [chr(member) for kind, member in value if str(kind) == "LITERAL"] or ["?"]
    else:
        assert kind in ("ASSERT_NOT", "NOT_LITERAL"), f"{kind} is new here"
        firsts = ["" if kind == "ASSERT_NOT" else "?"]
    for following in texts(rest):
        yield from (first + following for first in dict.fromkeys(firsts))


MOST_STEPS = 5_000  # at one place of a text


def test_no_format_can_backtrack_without_bound() -> None:
    """A repeat without an upper bound is possessive, and only what may be missing follows it: it cannot fail late.

    So a failed match costs at most MOST_STEPS at each place of a text.
    """
    for name, pattern in FORMATS.items():
        for branch in branches(re._parser.parse(pattern)):
            assert cost(list(branch)) <= MOST_STEPS, name


def branches(parsed: Any) -> list[Any]:
    """The alternatives of a pattern, one by one."""
    items = list(parsed)
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [branch for part in items[0][1][1] for branch in branches(part)]
    return [items]


def cost(items: list[Any]) -> int:
    """The steps of a match that fails, at most. Fails for a pattern whose steps have no bound."""
    if not items:
        return 1
    (kind, value), rest = items[0], items[1:]
    if str(kind) == "ATOMIC_GROUP":
        [(kind, value)] = value
        assert str(kind) == "MAX_REPEAT", "only (?>x*) is as x*+"
        kind = "POSSESSIVE_REPEAT"
    if str(kind) == "SUBPATTERN":
        return max(cost([*branch, *rest]) for branch in branches(value[-1]))
    if str(kind) not in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return 1 + cost(rest)
    _, most, inner = value
    if most == re._constants.MAXREPEAT:
        assert str(kind) == "POSSESSIVE_REPEAT", f"the repeat of {inner} gives back what it has read"
        assert not any(may_fail(item) for item in rest), f"{rest} may fail after a repeat without a bound"
        return cost(rest)
    inside = max(cost(branch) for branch in branches(inner))
    if str(kind) == "POSSESSIVE_REPEAT":
        return int(most) * inside + cost(rest)
    return max(1, int(most)) * (inside + cost(rest))  # the rest is tried after each number of repeats


def may_fail(item: Any) -> bool:
    kind, value = str(item[0]), item[1]
    return not (kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and value[0] == 0)


@pytest.mark.parametrize("pattern", [r"a+b", r"(?:a+)+", r"a++b", r"(?:x[a-z]*y){1,50}", r"a{0,999}a{0,999}b"])
def test_the_check_of_formats_finds_slow_patterns(pattern: str) -> None:
    with pytest.raises(AssertionError):
        assert cost(branches(re._parser.parse(pattern))[0]) <= MOST_STEPS


@pytest.mark.timeout(PATIENCE_SECONDS)
@pytest.mark.parametrize(
    "part",
    [
        *["eyJ", "eyJaaaaaaaa.", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "://", "://a:", "://:", "sk-", "hf_"],
        *["gh", "discord.com/api/", "%2F", "\\n", "aws_secret_access_key ", "bearer ", "A", "&sig=", "-"],
    ],
)
def test_a_long_hostile_text_is_searched_to_its_end(part: str) -> None:
    text = part * (300_000 // len(part))
    assert redact(f"{text} hf_{LONG}").endswith(" [redacted]") or part.startswith("-----BEGIN PRIVATE")
