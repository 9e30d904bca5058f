"""What people write in place of a job spec: each mistake has an answer that names the remedy."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any, get_args

import pytest

from dropforge.base import names
from dropforge.base.errors import InvalidSpec
from dropforge.spec import parse_spec
from dropforge.spec.guess import likeliest
from dropforge.spec.metrics import METRICS, MetricName
from dropforge.spec.policy import policy_of
from dropforge.stages.admission import rule_problems

BASE = {
    "api_version": "dropforge/v1",
    "name": "tiny",
    "model": {"source": "google/gemma-2b"},
    "dataset": {"source": "b-mc2/sql-create-context"},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
    "serve": None,
}
TEXT = json.dumps(BASE, indent=1)
TOKEN = "hf_" + "THISISNOTAREALTOKEN"


def answer(document: bytes | str | dict[str, Any]) -> str:
    """Return all problems of a document as people read them; "" for a valid spec."""
    if isinstance(document, dict):
        document = json.dumps({**BASE, **document})
    try:
        parse_spec(document if isinstance(document, bytes) else document.encode())
    except InvalidSpec as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("document", "what", "remedy"),
    [
        ("", "it is empty", "`dropforge init` writes one"),
        ("\ufeff \n", "it is empty", "`dropforge init` writes one"),
        ("# mine\napi_version: dropforge/v1\nname: x\n", "it is YAML", "names in double quotes, inside {}"),
        ("---\nname: x\n", "it is YAML", "names in double quotes"),
        ("[model]\nsource = 'x'\n", "it is TOML", "names in double quotes"),
        ("name = 'x'\n", "it is TOML", "names in double quotes"),
        (f"// mine\n{TEXT}", "it has a comment", "no comment"),
        (f"# mine\n{TEXT}", "it has a comment", "no comment"),
        (TEXT.replace('"tiny",', '"tiny", /* mine */'), "it has a comment", "no comment"),
        (f"```json\n{TEXT}\n```\n", "it is inside a Markdown fence", "the lines between the fences alone"),
        (f"The spec:\n```\n{TEXT}\n```\n", "it is inside a Markdown fence", "the lines between the fences alone"),
        (f"{TEXT[:-2]},\n}}", "it has a comma after the last entry", "no comma before }"),
        ('{"a": [1, 2,]}', "it has a comma after the last entry", "no comma before ]"),
        (str(BASE), "it has single quotes, as in Python or JavaScript", "json.dumps writes them"),
        ('{"serve": None}', "it has a word of Python", "null, true or false"),
        ("{\u201cname\u201d: \u201ctiny\u201d}", "it has the quotes of a word processor", 'straight double quotes: "'),
        ('{name: "tiny"}', "it has a name or a text without quotes, as in JSON5 or YAML", "double quotes"),
        ('{"a": 0x10}', "it has a number that JSON does not know", "a number such as 16"),
        ('{"a": .5}', "it has a number that JSON does not know", "a number such as 16, 0.5"),
        ('{"a": "C:\\data"}', "a text has a backslash that means nothing", "/ or \\\\ in place of \\"),
        ('{"a": "x\ny"}', "a text has a line break or a tab", "\\n or \\t"),
        ('{"a": "x}', "a text lacks its closing quote", 'a " at the end'),
        ('{"a": 1\n"b": 2}', "a comma is missing", "a comma between two entries"),
        ('{"a": "say "hi""}', "a text has a double quote inside", 'the quote as \\"'),
        ('{"a": [1, 2}', "a bracket of the other kind is open", "] after ["),
        ('{"a": ${RATE}}', "it has a placeholder that nothing has filled in", "the value"),
        ('{"a": {{ rate }}}', "a placeholder that nothing has filled in", "the value"),
        ('{"a": 1,\n<<<<<<< HEAD\n"b": 2}', "it has a conflict of Git", "one of the two versions"),
        ('{\u00a0"a": 1}', "it has a space that is not plain", "plain spaces"),
        ('{"a"\uff1a 1}', "it has punctuation of another script", "of ASCII"),
        (TEXT[:-1], "it ends too early", "a copy of it may have been cut off"),
        (f"{TEXT}\n{TEXT}", "it has several documents", "one job spec in each file"),
        (f"{TEXT};", "there is text after the end of the object", "nothing after the last }"),
        ('"name": "tiny"', "the braces are missing", "{ before the first name"),
        ("<!DOCTYPE html>", "it is HTML or XML", "a JSON object"),
        (base64.b64encode(TEXT.encode()), "it is encoded as base64", "the JSON itself"),
    ],
)
def test_a_document_that_is_not_json_is_told_what_it_is(document: str | bytes, what: str, remedy: str) -> None:
    told = answer(document)
    assert told.startswith("/: the spec is not JSON: ")
    assert what in told
    assert remedy in told.partition("; expected ")[2]


@pytest.mark.parametrize(
    ("document", "what", "remedy"),
    [
        (TEXT.encode("utf-16"), "it is UTF-16", "`Set-Content -Encoding utf8`"),
        (TEXT.encode("utf-16-le"), "it is UTF-16", "JSON encoded as UTF-8"),
        (TEXT.encode("utf-16-be"), "it is UTF-16", "JSON encoded as UTF-8"),
        (TEXT.encode("utf-32"), "it is UTF-32", "JSON encoded as UTF-8"),
        (gzip.compress(TEXT.encode()), "it is compressed by gzip", "`gunzip` unpacks it"),
        (b"PK\x03\x04\x14\0\0\0", "it is a zip archive", "the JSON file inside"),
        (b"%PDF-1.7", "it is a PDF", "a JSON file"),
        (TEXT.replace("tiny", "tin\xe9").encode("latin-1"), "in line 3 ('é' in Latin-1", "JSON encoded as UTF-8"),
    ],
)
def test_a_document_that_is_not_utf_8_is_told_what_it_is(document: bytes, what: str, remedy: str) -> None:
    told = answer(document)
    assert told.startswith("/: the spec is not UTF-8 text")
    assert what in told
    assert remedy in told


def test_a_spec_in_a_text_or_in_a_list_is_told_to_stand_alone() -> None:
    assert "it was encoded twice" in answer(json.dumps(TEXT))
    assert "a list holds it" in answer(f"[{TEXT}]")


def test_the_line_in_error_is_shown_but_never_beside_a_credential() -> None:
    assert 'line 2, column 8: "b": 2 3' in answer('{"a": 1,\n"b": 2 3}')
    assert "THISIS" not in answer(f'{{"a": 1,\n"b": 2 3, "token": "{TOKEN}"}}')
    assert "line 2, column 8; " in answer(f'{{"a": 1,\n"b": 2 3, "token": "{TOKEN}"}}')


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("google/gemma-2b@main", "did you mean 'google/gemma-2b', with 'main' in the field `revision` beside it?"),
        ("google/gemma-2b:v1", "did you mean 'google/gemma-2b', with 'v1' in the field `revision` beside it?"),
        ("https://huggingface.co/google/gemma-2b", "did you mean 'google/gemma-2b'?"),
        ("https://huggingface.co/google/gemma-2b/tree/v2", "'google/gemma-2b', with 'v2' as its `revision`?"),
        ("https://huggingface.co/datasets/b-mc2/sql?row=1", "did you mean 'b-mc2/sql'?"),
        ("huggingface.co/google/gemma-2b/", "did you mean 'google/gemma-2b'?"),
        ("hf://google/gemma-2b", "did you mean 'google/gemma-2b'?"),
        ("hf://datasets/a/b@x/rows.csv", "did you mean 'a/b', with 'x' as its `revision`?"),
        ("models--google--gemma-2b", "did you mean 'google/gemma-2b'?"),
        ("google/gemma-2b.git", "did you mean 'google/gemma-2b'?"),
        (" google/gemma-2b", "did you mean 'google/gemma-2b'?"),
        ("https://storage.googleapis.com/bucket/a/b.jsonl", "did you mean 'gs://bucket/a/b.jsonl'?"),
        ("https://storage.cloud.google.com/bucket/a%20b", "did you mean 'gs://bucket/a b'?"),
        ("https://bucket.storage.googleapis.com/a", "did you mean 'gs://bucket/a'?"),
        (
            "https://console.cloud.google.com/storage/browser/_details/bucket/a;tab=live",
            "did you mean 'gs://bucket/a'?",
        ),
        ("https://www.googleapis.com/storage/v1/b/bucket/o/a%2Fb", "did you mean 'gs://bucket/a/b'?"),
        ("GS://bucket/a", "did you mean 'gs://bucket/a'?"),
        ("gs:/bucket/a", "did you mean 'gs://bucket/a'?"),
        ("/gcs/bucket/a", "did you mean 'gs://bucket/a'?"),
        ("https://storage.googleapis.com/b/x", "did you mean 'gs://b/x'?"),
        ("gs://b/x", "expected gs://bucket/path, with 3 to 222 lower-case letters"),
        ("s3://bucket/a", "a bucket of another cloud"),
        ("https://github.com/a/b", "a repository of Git"),
        ("https://example.com/rows", "a URL, which the training does not read"),
        ("llama3:8b", "a name with a tag, as in Ollama"),
        ("./x.csv", "the URI that `dropforge put ./x.csv gs://BUCKET/x.csv` prints"),
        ("../x", "the URI that `dropforge put ../x gs://BUCKET/x` prints"),
        ("/home/me/x.csv", "the URI that `dropforge put /home/me/x.csv gs://BUCKET/x.csv` prints"),
        ("C:\\data\\x.csv", "the URI that `dropforge put 'C:\\data\\x.csv' gs://BUCKET/x.csv` prints"),
        ("C:/data/x.csv", "the URI that `dropforge put C:/data/x.csv gs://BUCKET/x.csv` prints"),
        ("file:///home/me/x", "the URI that `dropforge put /home/me/x gs://BUCKET/x` prints"),
    ],
)
def test_a_source_in_another_form_is_told_the_right_one(source: str, told: str) -> None:
    for part in ("model", "dataset"):
        assert f"/{part}/source: " in answer({part: {"source": source}})
        assert told in answer({part: {"source": source}})


@pytest.mark.parametrize("source", ["gpt2", "b-mc2/sql-create-context", "org/model.v1.5", "gs://bucket/rows.jsonl"])
def test_a_source_is_accepted(source: str) -> None:
    assert answer({"dataset": {"source": source}}) == ""


def target(**fields: Any) -> dict[str, Any]:
    return {"target": {"type": "cloud_run", "placements": [{"region": "us-central1"}], **fields}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"training": {"adapter": "lora"}}, 'adapter: wrong type; found "lora"; did you mean {"type": "lora"}'),
        ({"training": {"adapter": "LoRA"}}, 'did you mean {"type": "lora"}?'),
        ({"training": {"adapter": False}}, 'did you mean {"type": "none"}?'),
        ({"training": {"adapter": {"type": "LORA"}}}, "did you mean 'lora'? One of none, lora, qlora"),
        ({"serve": False}, "/serve: wrong type; found false; expected null: without quotes"),
        ({"serve": "none"}, "expected null: without quotes"),
        ({"serve": "cloud_run"}, 'did you mean {"type": "cloud_run"}?'),
        ({"serve": True}, "expected an object with a type: one of cloud_run, gke, tpu_vm, training_vm"),
        ({"evaluation": False}, "expected null: without quotes"),
        ({"model": "google/gemma-2b"}, 'did you mean {"source": "google/gemma-2b"}?'),
        ({"target": "gke"}, 'did you mean {"type": "gke"}?'),
        (target(type="Cloud Run"), "/target/type: unknown value; found \"Cloud Run\"; did you mean 'cloud_run'?"),
        (target(placements="us-central1"), 'expected a list: ["us-central1"]'),
        (target(placements=["us-central1"]), 'did you mean {"region": "us-central1"}?'),
        (target(region="us-central1"), "'target.placements[].region', its place in a job spec"),
        (target(accelerator="H100"), "target.type 'gke' has nvidia-h100-80gb and nvidia-h100-mega-80gb"),
        (target(accelerator="nvidia-b200"), "target.type 'gke' has nvidia-b200"),
        (target(accelerator="L4"), "did you mean 'nvidia-l4'?"),
        (target(accelerator="v6e-4"), "target.type 'tpu_vm' has v6e-4"),
        (target(type="gke", accelerator="NVIDIA_L4"), "did you mean 'nvidia-l4'?"),
        ({"training": {"batch_size": 4}}, "'training.per_device_train_batch_size', which is its name in a job spec"),
        ({"training": {"lr": 1}}, "'training.learning_rate', which is its name in a job spec"),
        ({"num_train_epochs": 1}, "'training.epochs', which is its name in a job spec"),
        ({"training": {"numTrainEpochs": 1}}, "'training.epochs', which is its name in a job spec"),
        ({"training": {"learningRate": 1}}, "did you mean 'learning_rate'?"),
        ({"training": {"Max-Steps": 1}}, "did you mean 'max_steps'?"),
        ({"training": {"max_steps": "3"}}, "expected a whole number, without quotes"),
        ({"training": {"optim": "adamw_torch"}}, "did you mean 'adamw_torch_fused'?"),
        ({"training": {"warmup_ratio": 3}}, "did you mean 0.03? It must be less than 1"),
        ({"evaluation": {"holdout_fraction": 10}}, "did you mean 0.1? It must be less than or equal to 0.5"),
        ({"api_version": "v1"}, "did you mean 'dropforge/v1'?"),
        ({"name": "My Job"}, "did you mean 'my-job'? Lower-case letters"),
        ({"limits": {"max_duration": "2 hours"}}, "did you mean '2h'?"),
        ({"labels": {f"k{number}": "v" for number in range(33)}}, "/labels: too many entries; found 33 entries"),
        ({"labels": {"managed-by": "me"}}, "/labels/managed-by: a label that dropforge sets itself"),
        ({"labels": {"dropforge-run": "me"}}, "/labels/dropforge-run: a label that dropforge sets itself"),
        ({"labels": {"goog-x": "me"}}, "/labels/goog-x: a label that only Google sets"),
        ({"evaluation": {"gate": {"min": 80}}}, "/evaluation/gate/min: no model has this value: exact_match"),
        ({"evaluation": {"gate": {"min": 80}}}, "; did you mean 0.8? 0 to 1"),
        ({"evaluation": {"gate": {"min": -0.1}}}, "expected 0 to 1"),
        ({"evaluation": {"gate": {"max": 0.9}}}, "/evaluation/gate/max: exact_match is better the higher it is"),
        ({"evaluation": {"gate": {"metric": "loss", "min": 1}}}, "gate/min: loss is better the lower it is"),
        ({"evaluation": {"gate": {"metric": "loss", "max": 0}}}, "expected more than 0"),
        ({"evaluation": {"gate": {"metric": "exact-match", "min": 0.5}}}, "did you mean 'exact_match'?"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_value_in_another_form_is_told_the_right_one(change: dict[str, Any], told: str) -> None:
    assert told in answer(change)


@pytest.mark.parametrize("kind", ["cloud_run", "gke", "ray"])
@pytest.mark.parametrize(
    "region", ["us-central1-a", "US-Central1", "us_central1", "us-centrall1", "us-cental1", "Iowa"]
)
def test_a_region_in_another_form_is_told_the_right_one_on_every_target(kind: str, region: str) -> None:
    told = answer({"target": {"type": kind, "placements": [{"region": region}]}})
    assert "/target/placements/0/region: " in told
    assert ("did you mean 'us-central1'?" in told) is (region != "Iowa")
    assert "a region of Google Cloud, such as us-central1" in told.lower().replace("google cloud", "Google Cloud")


@pytest.mark.parametrize(
    ("zone", "told"),
    [
        ("us-central1", "did you mean 'us-central1-a' or 'us-central1-b'? A zone of Google Cloud"),
        ("US-West4-A", "did you mean 'us-west4-a'? A zone of Google Cloud"),
        ("us-west4a", "did you mean 'us-west4-a'? A zone of Google Cloud"),
        ("us-westt4-a", "Cloud TPU does not offer v5litepod-8 there"),
        ("us-westt4-a", "did you mean 'us-west4-a'? One of "),
        ("us-central1-f", "Cloud TPU does not offer v5litepod-8 there"),
    ],
)
@pytest.mark.parametrize("part", ["target", "serve"])
def test_a_zone_in_another_form_is_told_the_right_one(part: str, zone: str, told: str) -> None:
    fields = {"placements": [{"zone": zone}]} if part == "target" else {"zone": zone}
    training = {"training": {"adapter": {"type": "none"}}}
    assert told in answer({part: {"type": "tpu_vm", **fields}, **training})


@pytest.mark.parametrize("region", ["europe-west12", "asia-south3", "us-west9", "us-central2", "mars-north1"])
def test_a_region_that_may_be_new_is_accepted(region: str) -> None:
    """Google opens some each year, and asks before it lets a project use others."""
    assert answer({"target": {"type": "gke", "placements": [{"region": region}]}}) == ""


def test_a_number_of_thousands_of_digits_is_out_of_range_where_it_stands() -> None:
    text = TEXT.replace('"name": "tiny"', f'"name": "tiny", "training": {{"max_steps": {"9" * 5000}}}')
    told = answer(text)
    assert told.startswith("/training/max_steps: wrong value; found 999")
    assert told.endswith("expected less than or equal to 1000000000")


@pytest.mark.parametrize("gate", [{"min": 0}, {"min": 1}, {"metric": "loss", "max": 1.2}])
def test_a_gate_within_the_range_of_its_metric_is_accepted(gate: dict[str, Any]) -> None:
    assert answer({"evaluation": {"gate": gate}}) == ""


def test_every_metric_of_a_gate_has_a_range() -> None:
    assert set(METRICS) == set(get_args(MetricName))


def test_every_label_that_dropforge_sets_is_reserved() -> None:
    own = [value for name, value in vars(names).items() if name.endswith("_LABEL")]
    own += names.labels("run", {})
    assert len(own) > 5
    assert [key for key in own if not names.is_own_label(key)] == []


def test_a_guess_takes_no_other_number_for_a_slip() -> None:
    assert likeliest("us-west9", ["us-west1", "us-west8"]) == []
    assert likeliest("us-centrall1", ["us-central1", "us-central2"]) == ["us-central1"]
    assert likeliest(7, ["7"]) == []
    assert likeliest(" ", ["a"]) == []


@pytest.mark.parametrize("source", ["rows.jsonl", "data/rows.PARQUET", "weights.gguf", "rows.csv.gz"])
def test_the_name_of_a_file_is_no_hub_id(source: str) -> None:
    """Admission and every command refuse it; `dropforge data check` reads the file."""
    spec = parse_spec(json.dumps({**BASE, "dataset": {"source": source}}).encode())
    [problem] = rule_problems(spec, policy_of(""), None)
    assert problem.pointer == "/dataset/source"
    name = source.rpartition("/")[2]
    assert f"the URI that `dropforge put {source} gs://BUCKET/{name}` prints" in str(problem)
