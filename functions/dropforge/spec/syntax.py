"""What a document that is not JSON is instead, and what its author can do: one row for each kind."""

from __future__ import annotations

import re
from json import JSONDecodeError

from dropforge.base.errors import SpecProblem
from dropforge.base.redact import cut, redact

_JSON = "a JSON object"
_UTF_8 = "JSON encoded as UTF-8; in PowerShell, `Set-Content -Encoding utf8` writes it"
_QUOTES = 'double quotes: "; in Python, json.dumps writes them'
# The first bytes of files that hold no text.
_BINARY = (
    (b"\xff\xfe\0\0", "UTF-32", _UTF_8),
    (b"\0\0\xfe\xff", "UTF-32", _UTF_8),
    (b"\xff\xfe", "UTF-16", _UTF_8),
    (b"\xfe\xff", "UTF-16", _UTF_8),
    (b"PK\x03\x04", "a zip archive (or a document of an office program)", "the JSON file inside, as plain text"),
    (b"\x1f\x8b", "compressed by gzip", "the JSON itself; `gunzip` unpacks it"),
    (b"BZh", "compressed by bzip2", "the JSON itself; `bunzip2` unpacks it"),
    (b"\xfd7zXZ\0", "compressed by xz", "the JSON itself; `unxz` unpacks it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "the JSON itself; `unzstd` unpacks it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "the JSON file inside"),
    (b"%PDF-", "a PDF", "a JSON file, as plain text"),
    (b"{\\rtf", "formatted text (RTF)", "a JSON file, as plain text"),
)
_COMMENTED = r"\s*(?:#[^\n]*\n\s*)*"  # spaces and comments before the first word
# What the whole document is, by its beginning.
_WHOLE = (
    (r"\s*\Z", "it is empty", "a job spec; `dropforge init` writes one"),
    (r"[^{]*(?:```|~~~)", "it is inside a Markdown fence", "the lines between the fences alone"),
    (r"\s*<(?!<)", "it is HTML or XML, such as a page in place of the file behind it", _JSON),
    (r"\s*[A-Za-z0-9+/]{40,}[A-Za-z0-9+/=\s]*\Z", "it is encoded as base64", "the JSON itself, as plain text"),
    (
        rf"{_COMMENTED}(?:---|%YAML|- |[\w$.-]+[ \t]*:(?:\s|\Z))",
        "it is YAML",
        "JSON: names in double quotes, inside {}",
    ),
    (rf"{_COMMENTED}(?:\[+[A-Za-z_][\w.-]*\]+\s*\n|[\w.-]+[ \t]*=)", "it is TOML", "JSON: names in double quotes"),
    (r"\s*\"[^\"\n]*\"\s*:", "the braces are missing", "{ before the first name and } after the last value"),
)
# What stands where the parser stopped: the beginning of its message, the text there, what that is, and the remedy.
_HERE = (
    ("", r"//|/\*|#", "it has a comment", "no comment: JSON has none"),
    ("", r"```|~~~", "it has a Markdown fence", "the lines between the fences alone"),
    ("", r"<{7} |={7}\s|>{7} |\|{7} ", "it has a conflict of Git", "one of the two versions"),
    ("", "[\u201c\u201d\u201e\u201f\u00ab\u00bb\u2018\u2019\u201a\u2039\u203a\uff02\uff07`\u00b4]",
     "it has the quotes of a word processor", 'straight double quotes: "'),
    ("", "[\uff0c\uff1a\uff1b\uff5b\uff5d\uff3b\uff3d\u3001]",
     "it has punctuation of another script", "the , : { } [ ] of ASCII"),
    ("", "[\u00a0\u1680\u2000-\u200f\u2028-\u202f\u205f-\u2060\u3000\ufeff]", "it has a space that is not plain",
     "plain spaces; the text may be copied from a page"),
    ("", r"'", "it has single quotes, as in Python or JavaScript", _QUOTES),
    ("", r"\$\{|\{\{|\{%|\$\(|<[A-Za-z]", "it has a placeholder that nothing has filled in", "the value"),
    ("", r"(?:None|True|False)\b", "it has a word of Python", "null, true or false"),
    ("", r"undefined\b", "it has a word of JavaScript", "null"),
    ("Illegal trailing comma", r"", "it has a comma after the last entry", "no comma before } or ]"),
    ("Expecting property name", r"\{", "it has a brace too many, or a placeholder that nothing has filled in",
     "one { for an object, or the value"),
    ("Expecting property name", r"\}", "it has a comma after the last entry", "no comma before }"),
    ("Expecting value", r"[\]}]", "it has a comma after the last entry, or lacks a value", "no comma before ] or }"),
    ("Expecting value", r",", "it has a comma without a value before it", "one comma between two values"),
    ("Expecting value", r"[+.\d-]", "it has a number that JSON does not know", "a number such as 16, 0.5 or 2e-4"),
    ("Expecting ',' delimiter", r"[xXbBoO_.\d]\w*", "it has a number that JSON does not know",
     "a number such as 16, 0.5 or 2e-4"),
    ("Expecting ',' delimiter", r"\"", "a comma is missing", "a comma between two entries"),
    ("Expecting ',' delimiter", r"[\]}]", "a bracket of the other kind is open", "] after [, and } after {"),
    ("Expecting ',' delimiter", r"\S", "a text has a double quote inside, or a comma is missing",
     'the quote as \\", or a comma before it'),
    ("Expecting ':' delimiter", r"=", "it has = after a name", ": after a name"),
    ("Extra data", r"\{", "it has several documents", "one job spec in each file"),
    ("Extra data", r"", "there is text after the end of the object", "nothing after the last }"),
    ("Invalid control character", r"", "a text has a line break or a tab, or lacks its closing quote",
     "\\n or \\t inside a text, and a closing quote"),
    ("Invalid \\", r"", "a text has a backslash that means nothing", "/ or \\\\ in place of \\"),
    ("Unterminated string", r"", "a text lacks its closing quote", 'a " at the end of the text'),
    ("", r"\Z", "it ends too early", "the whole document: a copy of it may have been cut off"),
    ("", r"[A-Za-z_$]", "it has a name or a text without quotes, as in JSON5 or YAML", _QUOTES),
)  # fmt: skip
_WHOLE_KINDS = [(re.compile(pattern), what, remedy) for pattern, what, remedy in _WHOLE]
_HERE_KINDS = [(message, re.compile(pattern), what, remedy) for message, pattern, what, remedy in _HERE]
_SNIPPET = 60  # characters of the line in error


def not_text(data: bytes) -> SpecProblem | None:
    """The problem of bytes that are no UTF-8 text; None if they are."""
    for start, what, remedy in _BINARY:
        if data.startswith(start):
            return SpecProblem("", f"the spec is not UTF-8 text: it is {what}", f"{len(data)} bytes", remedy)
    if b"\0" in data[:2]:  # JSON begins with a character of ASCII
        return SpecProblem("", "the spec is not UTF-8 text: it is UTF-16", f"{len(data)} bytes", _UTF_8)
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte, line = data[error.start], data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{byte:02x} at offset {error.start}, in line {line}"
        letter = bytes([byte]).decode("cp1252", "replace")
        if letter.isalpha():
            found += f" ({letter!r} in Latin-1 and Windows-1252)"
        return SpecProblem("", "the spec is not UTF-8 text", found, _UTF_8)
    return None


def not_json(text: str, error: JSONDecodeError) -> SpecProblem:
    """The problem of a text that is not JSON."""
    for begins, what, remedy in _WHOLE_KINDS:
        if begins.match(text):
            found = _line(text, 0) if text.strip() else f"{len(text)} characters"
            return SpecProblem("", f"the spec is not JSON: {what}", found, remedy)
    at = error.pos + len(text[error.pos :]) - len(text[error.pos :].lstrip(" \t\r\n"))
    for message, here, what, remedy in _HERE_KINDS:
        if error.msg.startswith(message) and here.match(text, at):
            return SpecProblem("", f"the spec is not JSON: {what}", _line(text, at), remedy)
    return SpecProblem("", "the spec is not JSON", f"{error.msg}, {_line(text, at)}", _JSON)


def _line(text: str, at: int) -> str:
    """The place in a text and what its line has there. A text with a credential is not shown."""
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    place = f"line {text.count(chr(10), 0, at) + 1}, column {at - start + 1}"
    line = text[max(start, at - _SNIPPET // 2) : end if end >= 0 else None].strip()
    return f"{place}: {cut(line, _SNIPPET)}" if line and redact(text) == text else place
