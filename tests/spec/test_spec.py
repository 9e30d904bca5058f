"""The rules of the job spec, tested with examples (schemas/examples, also documentation) and with mutated specs."""

from __future__ import annotations

import base64
import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dropforge.base.errors import DropforgeError, InvalidSpec, SpecProblem
from dropforge.base.redact import redact
from dropforge.spec import MAX_SPEC_BYTES, JobSpec, foreign, job_spec_schema, parse_spec, registry, seconds
from dropforge.spec.job_spec import RESERVED_VARIABLES
from dropforge.spec.parse import field_places
from dropforge.spec.parts import words_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "schemas" / "examples"
VALID = sorted([*(EXAMPLES / "valid").glob("*.json"), *(ROOT / "examples").rglob("*.json")])
INVALID = sorted((EXAMPLES / "invalid").glob("*.json"))
SCHEMA = json.loads((ROOT / "schemas" / "job_spec.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
DOCUMENTS = [json.loads(path.read_text()) for path in VALID]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def bytes_of(case: dict[str, Any]) -> bytes:
    """Return the document of an invalid example as bytes."""
    if "spec" in case:
        return json.dumps(case["spec"]).encode()
    raw = base64.b64decode(case["base64"]) if "base64" in case else case["text"].encode()
    return bytes(raw * case.get("repeat", 1))


def problems_of(data: bytes) -> list[SpecProblem]:
    """Return the problems of a document; none for a valid spec."""
    try:
        parse_spec(data)
    except InvalidSpec as refusal:
        return refusal.problems
    return []


def is_there(pointer: str, document: Any) -> bool:
    """Return whether a JSON pointer names a value of the document, or a missing field of an object in it."""
    *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")]
    for step in steps[1:]:
        try:
            document = document[int(step)] if isinstance(document, list) else document[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return False
    if pointer == "" or isinstance(document, dict):
        return True
    return isinstance(document, list) and last.isdecimal() and int(last) < len(document)


@pytest.mark.parametrize("path", VALID, ids=name_of)
def test_a_valid_example_is_accepted_by_both_validators(path: Path) -> None:
    VALIDATOR.validate(json.loads(path.read_text()))
    assert parse_spec(path.read_bytes()).api_version == "dropforge/v1"


@pytest.mark.parametrize("path", VALID, ids=name_of)
def test_an_accepted_spec_can_be_stored_and_read_again(path: Path) -> None:
    spec = parse_spec(path.read_bytes())
    stored = spec.model_dump_json(by_alias=True)
    assert JobSpec.model_validate_json(stored) == parse_spec(stored.encode()) == spec


@pytest.mark.parametrize("path", INVALID, ids=name_of)
def test_an_invalid_example_is_refused_with_its_documented_problems(path: Path) -> None:
    case = json.loads(path.read_text())
    with pytest.raises(InvalidSpec) as refusal:
        parse_spec(bytes_of(case))
    assert [{"pointer": p.pointer, "message": p.message} for p in refusal.value.problems] == case["problems"]


def test_every_field_has_an_invalid_example() -> None:
    """This applies to fields with a rule beyond their type. An example's pointer ends with the name of its field."""
    pointers = [p["pointer"] for path in INVALID for p in json.loads(path.read_text())["problems"]]
    wrong = {step for pointer in pointers for step in pointer.split("/") if not step.isdecimal()}
    rules = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "enum", "const", "minItems"}
    ruled = set()
    for part in [SCHEMA, *SCHEMA["$defs"].values()]:
        ruled |= {name for name, rule in part.get("properties", {}).items() if rules & set(json.dumps(rule).split('"'))}
    assert not ruled - wrong


def test_the_schema_file_is_up_to_date() -> None:
    assert {key: value for key, value in SCHEMA.items() if key != "$schema"} == job_spec_schema()


@pytest.mark.parametrize(("duration", "expected"), [("90s", 90), ("45m", 2700), ("2h", 7200), ("7d", 604800)])
def test_durations(duration: str, expected: int) -> None:
    assert seconds(duration) == expected


def test_an_error_never_contains_a_credential() -> None:
    token = "hf_" + "THISISNOTAREALTOKEN"
    document = {**DOCUMENTS[0], "name": f"x {token}", "labels": {"a": token, token: "b"}, "secrets": {"A": [token]}}
    with pytest.raises(InvalidSpec) as refusal:
        parse_spec(json.dumps(document).encode())
    assert len(refusal.value.problems) == 4
    assert token not in str(refusal.value)
    assert redact(f"a {token} b") == "a [redacted] b"


@pytest.mark.parametrize("depth", [10, 100, 300, 500, 900, 1000, 100_000])
@pytest.mark.parametrize(("opening", "inside", "closing"), [("[", "", "]"), ('{"a":', "1", "}")])
def test_a_document_of_any_depth_is_refused(opening: str, inside: str, closing: str, depth: int) -> None:
    text = f'{{"labels": {opening * depth}{inside}{closing * depth}}}'
    with pytest.raises(InvalidSpec):
        parse_spec(text.encode())


def test_a_spec_of_the_largest_size_is_accepted_and_a_larger_one_is_refused() -> None:
    small = json.dumps(DOCUMENTS[0]).encode()
    assert parse_spec(small.ljust(MAX_SPEC_BYTES)).name
    with pytest.raises(InvalidSpec, match="too large"):
        parse_spec(small.ljust(MAX_SPEC_BYTES + 1))


def test_a_byte_order_mark_is_ignored() -> None:
    assert parse_spec(b"\xef\xbb\xbf" + json.dumps(DOCUMENTS[0]).encode()).name


# Values that users write by mistake and that fuzzers write on purpose.
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 70) | st.floats(allow_nan=False) | st.text(max_size=20)
    | st.sampled_from(["", "auto", "lora", "cloud_run", "gs://a", "nvidia-l4", "us-central1", "1h", "0s", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELDS = sorted({name for part in [SCHEMA, *SCHEMA["$defs"].values()] for name in part.get("properties", {})})
KEYS = (
    st.sampled_from(FIELDS) | st.sampled_from(["lora", "cloud_run", "a/b", "a~b", "literal['auto']", "0"]) | st.text()
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a document."""
    if isinstance(document, dict):
        return [(document, key) for key in document] + [p for value in document.values() for p in places(value)]
    if isinstance(document, list):
        return [(document, index) for index in range(len(document))] + [p for value in document for p in places(value)]
    return []


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """Return a valid spec with up to three values replaced, added, removed or copied."""
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    for _ in range(draw(st.integers(1, 3))):
        candidates = places(document)
        if not candidates:
            break
        container, key = draw(st.sampled_from(candidates))
        match draw(st.sampled_from(["replace", "replace", "remove", "add", "copy"])):
            case "replace":
                container[key] = draw(VALUES)
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(KEYS)] = draw(VALUES)
            case _:
                source, source_key = draw(st.sampled_from(candidates))
                if source_key in source if isinstance(source, dict) else source_key < len(source):
                    container[key] = copy.deepcopy(source[source_key])
    return document


@settings(max_examples=400, deadline=None)
@given(mutated())
@example({**DOCUMENTS[0], "schema_uri": "x"})
@example({**DOCUMENTS[0], "training": {"adapter": {"type": "lora", "lora": {"r": "x"}, "r": "bad"}}})
def test_a_mutated_spec_is_valid_or_its_problems_point_to_existing_places(document: Any) -> None:
    problems = problems_of(json.dumps(document).encode())
    for problem in problems:
        assert problem.message
        assert is_there(problem.pointer, document), problem
    assert len({(p.pointer, p.message, p.found) for p in problems}) == len(problems)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_accepted_as_a_spec_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec(data)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("toy", "DROPFORGE_PLATFORMS has the entry 'toy'; expected name=module"),
        ("toy=no_such_module", "platform 'toy': the module 'no_such_module' cannot be used: No module named"),
        ("toy=json", "platform 'toy': the module 'json' cannot be used: .*PLATFORM"),
    ],
)
def test_an_unusable_platform_of_the_environment_is_explained(
    value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPFORGE_PLATFORMS", value)
    with pytest.raises(DropforgeError, match=problem):
        registry.platforms.__wrapped__()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"limits": {"max_duration": 15}},
            "text: a whole number from 1 to 999999 and a unit (s, m, h or d), such as 90s",
        ),
        ({"model": {"source": 7}}, "text in quotes"),
        ({"labels": {"team": 7}}, "text in quotes"),
    ],
)
def test_a_number_in_place_of_text_is_refused_with_what_the_text_must_be(change: dict[str, Any], expected: str) -> None:
    [problem] = problems_of(json.dumps({**DOCUMENTS[0], **change}).encode())
    assert problem.message == "wrong type"
    assert (problem.expected or "").startswith(expected)


def test_an_unknown_field_is_told_with_the_fields_of_its_own_type() -> None:
    """The platforms' fields differ: `accelerator` is a field of GKE's targets, and not of TPU VMs'."""
    target = {"type": "tpu_vm", "accelerator": "v5litepod-8", "placements": [{"zone": "us-central1-a"}]}
    found = problems_of(json.dumps({**DOCUMENTS[0], "target": target}).encode())
    (problem,) = (each for each in found if each.pointer == "/target/accelerator")
    expected = problem.expected or ""
    assert expected.startswith("did you mean 'accelerator_type'? One of accelerator_type, data_disk_gib")
    assert "head_cpu" not in expected


def test_a_secret_cannot_replace_a_variable_of_the_startup_script() -> None:
    """The script of a TPU VM exports each secret under the name in the spec."""
    script = (ROOT / "functions" / "dropforge" / "platforms" / "tpu_vm" / "startup.sh").read_text()
    own = set(re.findall(r"^(?:readonly |export )?([A-Z][A-Z_]*)=", script, re.M))
    read = set(re.findall(r"\$\{([A-Z][A-Z_]*)", script))
    assert {"STORAGE", "ROOT", "STOP_SECONDS", "GCE_METADATA_HOST"} <= own | read
    assert sorted(name for name in own | read if not RESERVED_VARIABLES.fullmatch(name)) == []


def patterns_of(node: Any) -> set[str]:
    """Return every pattern in a JSON Schema."""
    if isinstance(node, list):
        return set().union(*map(patterns_of, node))
    if not isinstance(node, dict):
        return set()
    own = {node["pattern"]} if isinstance(node.get("pattern"), str) else set()
    return own.union(*map(patterns_of, node.values()))


@pytest.mark.parametrize("pattern", sorted(patterns_of(SCHEMA)))
def test_every_pattern_of_a_spec_has_words(pattern: str) -> None:
    assert re.search(r"[\[\]{}^$()|]", words_of(pattern).replace("(s, m, h or d)", "")) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "My Job"}, "Lower-case letters, digits and -; a letter first"),
        ({"labels": {"Team": "search"}}, "a letter first; at most 63 characters"),
        ({"secrets": {"HF_TOKEN": "projects/p/secrets/x"}}, "the short name of a Secret Manager secret"),
        ({"limits": {"max_duration": "two hours"}}, "a whole number from 1 to 999999 and a unit"),
        ({"target": {"type": "cloud_run", "placements": [{"region": "Iowa"}]}}, "such as us-central1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_malformed_value_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    minimal = json.loads((EXAMPLES / "valid" / "minimal.json").read_text())
    [problem] = problems_of(json.dumps({**minimal, **change}).encode())
    assert words in (problem.expected or "")


def test_a_name_of_another_tool_gets_the_field_of_a_job_spec_or_a_reason() -> None:
    assert not set(foreign.TAKEN) & set(foreign.REFUSED)
    assert set(foreign.TAKEN.values()) <= set(field_places())
    assert not [name for name in (*foreign.TAKEN, *foreign.REFUSED) if f"training.{name}" in field_places()]
    for part, name, expected in (
        ("training", "num_train_epochs", "'training.epochs', which is its name in a job spec"),
        ("training", "lora_r", "'training.adapter.r', which is its name in a job spec"),
        ("model", "learning_rate", "'training.learning_rate', its place in a job spec"),
        ("training", "use_dora", "training.adapter.use_rslora, or a higher training.adapter.r"),
    ):
        document = copy.deepcopy(DOCUMENTS[0])
        document.setdefault(part, {})[name] = 1
        (problem,) = problems_of(json.dumps(document).encode())
        assert (problem.pointer, problem.expected) == (f"/{part}/{name}", expected)


def test_the_default_of_the_learning_rate_follows_the_adapter() -> None:
    document = copy.deepcopy(DOCUMENTS[0])
    rates = []
    for adapter in ("none", "lora", "qlora"):
        document["training"] = {"adapter": {"type": adapter}}
        rates.append(parse_spec(json.dumps(document).encode()).training.learning_rate)
    assert rates == [2e-5, 2e-4, 2e-4]
    document["training"] = {"adapter": {"type": "qlora", "r": 0}}
    assert [problem.pointer for problem in problems_of(json.dumps(document).encode())] == ["/training/adapter/r"]
