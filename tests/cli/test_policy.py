"""`dropforge policy`, and the policy in the other commands; docs/policy.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from dropforge.base.settings import Settings
from dropforge.spec.policy import MAX_POLICY_BYTES, Ceiling, Policy, policy_of
from dropforge_cli.policy import read_policy
from dropforge_cli.problems import CliError
from dropforge_local.stack.config import StackConfig

from .conftest import EXAMPLE, ROOT, Run, toml, write_toml

PAGE = (ROOT / "docs" / "policy.md").read_text()
STRICT = '{"api_version": "dropforge/v1", "max_cost_usd": 5}'


def test_the_documented_policy_is_valid_and_fits_the_schema(dropforge: Run) -> None:
    block = re.search(r"```yaml\n(.*?)```", PAGE, re.S)
    assert block is not None
    Path("policy.yaml").write_text(block[1])
    assert dropforge("policy", "check", "--file", "policy.yaml").output == "policy.yaml: ok\n"
    schema = json.loads((ROOT / "schemas" / "policy.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(block[1]))


def test_the_table_lists_every_rule_with_its_default(dropforge: Run) -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .* \| (.*) \|$", PAGE, re.M)
    listed: dict[str, str] = {}
    for names, defaults in rows:
        rules = re.findall(r"`(\w+)`", names)
        values = defaults.split(", ")
        listed |= dict(zip(rules, values * (len(rules) if len(values) == 1 else 1), strict=True))
    default = policy_of("").model_dump(include=set(Ceiling.model_fields))
    expected = {
        name: "all" if value is None else f"{value:g}" if type(value) is float else str(value)
        for name, value in default.items()
    }
    expected |= {"require_budget": "no", "require_price": "no", "trust_remote_code": "false", "required_labels": "none"}
    assert listed == expected


def test_every_error_has_its_line(dropforge: Run) -> None:
    Path("policy.yaml").write_text(
        "api_version: dropforge/v1\n"
        "max_cost_usd: 50\n"
        "max_cost_usd: 60\n"
        "max_duraton: 3d\n"
        "max_ttl: 9\n"
        "by_label:\n"
        "  - labels: {team: a}\n"
        "    max_nodes: 0\n"
        "  - max_nodes: 1\n"
    )
    result = dropforge("policy", "check", "--file", "policy.yaml")
    assert result.exit_code == 1
    places = re.findall(r"^policy\.yaml:(\d+): ([\w\[\].]+)", result.stderr, re.M)
    assert sorted(places) == [
        ("3", "the"),  # the key 'max_cost_usd' appears twice
        ("4", "max_duraton"),
        ("5", "max_ttl"),
        ("8", "by_label[0].max_nodes"),
        ("9", "by_label[1].labels"),
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", "a: [", "5", "\tx: 1", "api_version: 2026-01-01", "? [1]\n: 2", "a: &a [*a]"]
)
def test_what_is_no_policy_is_refused_in_a_line(dropforge: Run, text: str) -> None:
    Path("policy.yaml").write_text(text)
    result = dropforge("policy", "check", "--file", "policy.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_policy_that_no_function_can_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    models = [f"owner/{'x' * 200}-{number}" for number in range(80)]
    path.write_text(yaml.safe_dump({"api_version": "dropforge/v1", "models": models}))
    with pytest.raises(CliError, match=f"a function's setting holds {MAX_POLICY_BYTES}"):
        read_policy(path)


def test_check_says_which_specs_are_refused_by_which_rule(dropforge: Run) -> None:
    Path("policy.yaml").write_text(STRICT)
    Path("small.json").write_text(json.dumps({**json.loads(EXAMPLE.read_text()), "limits": {"max_cost_usd": 4}}))
    result = dropforge("policy", "check", "--file", "policy.yaml", "small.json", EXAMPLE)
    assert result.exit_code == 1
    first, second, third = result.stdout.splitlines()
    assert (first, second) == ("policy.yaml: ok", "small.json: allowed")
    assert third.startswith(f"{EXAMPLE}: /limits/max_cost_usd: more than `max_cost_usd` of the deployment's policy; ")
    assert "expected at most 5" in third
    told = dropforge("policy", "check", "--json", "--file", "policy.yaml", "small.json", EXAMPLE)
    assert told.exit_code == 1
    allowed, refused = json.loads(told.stdout)["specs"]
    assert allowed == {"spec": "small.json", "ok": True, "problems": []}
    assert (refused["ok"], refused["problems"][0]["pointer"]) == (False, "/limits/max_cost_usd")


@pytest.mark.parametrize("command", [("validate",), ("plan",), ("policy", "check")])
def test_commands_know_the_policy_of_the_deployment(dropforge: Run, command: tuple[str, ...]) -> None:
    assert dropforge(*command, EXAMPLE).exit_code == 0
    write_toml({**toml(), "policy": STRICT})
    result = dropforge(*command, EXAMPLE)
    assert result.exit_code == 1
    assert "`max_cost_usd` of the deployment's policy" in result.output


def test_plan_shows_the_defaults_of_the_policy(dropforge: Run) -> None:
    document = json.loads(EXAMPLE.read_text())
    del document["limits"]["max_cost_usd"]
    Path("spec.json").write_text(json.dumps(document))
    write_toml({**toml(), "policy": '{"api_version": "dropforge/v1", "defaults": {"max_cost_usd": 6}}'})
    assert json.loads(dropforge("plan", "--json", "spec.json").stdout)["spec"]["limits"]["max_cost_usd"] == 6


def test_a_broken_policy_of_the_deployment_is_an_error(dropforge: Run) -> None:
    write_toml({**toml(), "policy": "{}"})
    result = dropforge("validate", EXAMPLE)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the policy in DROPFORGE_POLICY cannot be read: api_version: Field required")


def test_show_prints_a_policy_that_can_be_read_again(dropforge: Run) -> None:
    Path("policy.yaml").write_text(dropforge("policy", "show").stdout)
    policy = policy_of(read_policy(Path("policy.yaml")))
    assert policy == Policy(api_version="dropforge/v1")
    assert json.loads(dropforge("policy", "show", "--json").stdout) == policy.model_dump(mode="json")


def test_up_keeps_the_policy_for_the_stack(dropforge: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is what the stack gives to its functions; starting a stack here would add nothing."""
    from dropforge_local.stack import control

    def no_stack(*_: object, **__: object) -> None:
        raise CliError("no stack is started here")

    monkeypatch.setattr(control, "up", no_stack)
    Path("policy.yaml").write_text(STRICT)
    assert "no stack is started here" in dropforge("up", "--state", "stack", "--policy", "policy.yaml").stderr
    settings = StackConfig.of(Path("stack")).settings
    required = {f"DROPFORGE_{name.upper()}": value for name, value in toml().items()}
    assert policy_of(Settings.from_environment({**required, **settings}).policy).max_cost_usd == 5
