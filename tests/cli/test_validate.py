"""`dropforge validate`: every problem of every file with its pointer; and the command as a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import EXAMPLE, ROOT, Deployed, Run

INVALID = ROOT / "schemas" / "examples" / "invalid"


def test_valid_specs_are_named_and_exit_0(dropforge: Run) -> None:
    result = dropforge("validate", *sorted((ROOT / "schemas" / "examples" / "valid").glob("*.json")), EXAMPLE)
    assert result.exit_code == 0, result.output
    assert all(": ok, " in line for line in result.stdout.splitlines())


def test_every_problem_has_its_pointer_and_one_bad_file_does_not_hide_another(dropforge: Run) -> None:
    documents = [json.loads((INVALID / f"{name}.json").read_text()) for name in ("unknown-field", "label-malformed")]
    for index, document in enumerate(documents):
        Path(f"{index}.json").write_text(json.dumps(document["spec"]))
    result = dropforge("validate", "0.json", EXAMPLE, "1.json")
    assert result.exit_code == 1
    assert [line.split(": ")[:2] for line in result.output.splitlines()] == [
        ["0.json", "/evalution"],
        [str(EXAMPLE), "ok, gemma-2b-text-to-sql"],
        ["1.json", "/labels/Team"],
        ["1.json", "/labels/team"],
    ]
    assert "'evaluation'?" in result.output


def test_programs_get_every_problem_and_every_note(dropforge: Run) -> None:
    invalid = json.loads((INVALID / "unknown-field.json").read_text())["spec"]
    Path("bad.json").write_text(json.dumps(invalid))
    high = {**json.loads(EXAMPLE.read_text()), "training": {"adapter": {"type": "qlora"}, "learning_rate": 0.05}}
    Path("high.json").write_text(json.dumps(high))
    result = dropforge("validate", "--json", "bad.json", "high.json", EXAMPLE)
    assert result.exit_code == 1
    bad, noted, good = json.loads(result.stdout)
    [problem] = bad["problems"]
    assert (bad["spec"], bad["ok"], problem["pointer"]) == ("bad.json", False, "/evalution")
    assert "'evaluation'?" in problem["expected"]
    assert (noted["ok"], noted["problems"]) == (True, [])
    assert any("learning rate" in note or "learning_rate" in note for note in noted["notes"])
    assert good == {"spec": str(EXAMPLE), "ok": True, "problems": [], "notes": []}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": {"source": "google/gemma-3-27b-it"}, "training": {"adapter": {"type": "lora"}}}, "/model/source"),
        ({"limits": {"max_cost_usd": 0.01}}, "/limits/max_cost_usd: the budget is too small"),
        (
            {"target": {"type": "cloud_run", "placements": [{"region": "asia-south1"}]}},
            "/limits/max_cost_usd: the budget cannot be enforced",
        ),
    ],
)
def test_a_model_that_does_not_fit_or_a_small_budget_is_refused(
    dropforge: Run, change: dict[str, object], expected: str
) -> None:
    Path("spec.json").write_text(json.dumps({**json.loads(EXAMPLE.read_text()), **change}))
    result = dropforge("validate", "spec.json")
    assert result.exit_code == 1
    assert f"spec.json: {expected}" in result.output


@pytest.mark.parametrize(
    ("name", "template", "problem"),
    [
        ("prompt", "{question", "not a template: expected '}' before end of string; found \"{question\""),
        ("completion", "{a[0]}", "not a template: {a[0]} is not a column's name in braces"),
        ("system", "{}", "not a template: {} is not a column's name in braces"),
        ("prompt", "question", 'the same text for every row; found "question"; expected the name of a column'),
    ],
)
def test_a_template_from_which_no_row_is_made_is_refused(
    dropforge: Run, name: str, template: str, problem: str
) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["dataset"]["columns"] = {"prompt": "{q}", "completion": "{{{a}}}", "system": "Answer.", name: template}
    Path("spec.json").write_text(json.dumps(document))
    result = dropforge("validate", "spec.json")
    assert result.exit_code == 1
    assert f"spec.json: /dataset/columns/{name}: {problem}" in result.output


@pytest.mark.parametrize("command", ["validate", "plan", "submit", "preflight"])
def test_a_flash_attention_that_the_image_lacks_is_refused_by_every_command(
    dropforge: Run, deployed: Deployed, command: str
) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["model"]["attn_implementation"] = "flash_attention_2"
    Path("spec.json").write_text(json.dumps(document))
    result = dropforge(command, "spec.json")
    assert result.exit_code == 1
    assert "/model/attn_implementation: image train_trl does not have it" in result.output + result.stderr
    assert "'auto', 'sdpa' or 'eager'" in result.output + result.stderr


def test_several_nodes_without_rdma_are_refused_with_the_mend(dropforge: Run) -> None:
    document = json.loads((ROOT / "examples" / "gke-gemma-3-12b-fsdp.json").read_text())
    document["target"]["nodes"] = 2
    Path("spec.json").write_text(json.dumps(document))
    result = dropforge("validate", "spec.json")
    assert result.exit_code == 1
    assert "/target/nodes: dropforge sets up no RDMA network" in result.output
    assert "node_network 'tcp'" in result.output


def test_a_budget_that_may_end_the_endpoint_early_is_a_note(dropforge: Run) -> None:
    document = json.loads(EXAMPLE.read_text())
    assert dropforge("validate", EXAMPLE).stderr == ""
    Path("spec.json").write_text(json.dumps({**document, "serve": {**document["serve"], "ttl": "24h"}}))
    result = dropforge("validate", "spec.json")
    assert result.exit_code == 0
    assert result.stdout == "spec.json: ok, gemma-2b-text-to-sql\n"
    assert result.stderr.startswith("spec.json: note: the budget of 10 USD may end the endpoint before its ttl of 24h")
    assert "7.0 h" in result.stderr
    planned = dropforge("plan", "spec.json")
    assert "warning: the budget of 10 USD may end the endpoint" in planned.output.replace("\n", " ")


def test_a_credential_is_not_repeated(dropforge: Run) -> None:
    Path("spec.json").write_text(json.dumps(json.loads((INVALID / "literal-token.json").read_text())["spec"]))
    result = dropforge("validate", "spec.json")
    assert "/secrets/HF_TOKEN" in result.output
    assert "NOTAREALTOKEN" not in result.output


def test_wrong_usage_is_exit_2(dropforge: Run) -> None:
    for arguments in (["validate"], ["validate", "absent.json"], ["validate", "."], ["plan"], ["forge"], ["up", "-x"]):
        assert dropforge(*arguments).exit_code == 2, arguments


def test_the_installed_command_says_why_and_exits_1(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_bytes(b"\xff")
    command = [str(Path(sys.executable).with_name("dropforge")), "validate", str(spec)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == (
        f"{spec}: /: the spec is not UTF-8 text; found byte 0xff at offset 0, in line 1 ('ÿ' in Latin-1 and "
        "Windows-1252); expected JSON encoded as UTF-8; in PowerShell, `Set-Content -Encoding utf8` writes it\n"
    )
    assert done.stderr == ""
