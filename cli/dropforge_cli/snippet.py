"""`dropforge snippet`: a runnable text that asks a run's endpoint, in Python, curl or JavaScript."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import click

from dropforge.run.record import Endpoint, Record
from dropforge.spec import JobSpec

from .callee import callee_of
from .chat import prompt_of
from .deployment import Deployment, connect
from .options import run_argument, state_option
from .plain import echo
from .report import held_out_sample

VARIABLE = "DROPFORGE_TOKEN"
Messages = list[dict[str, str]]


@click.command()
@run_argument
@click.option(
    "--lang", type=click.Choice(("python", "curl", "js")), default="python", show_default=True, help="The language."
)
@state_option
def snippet(run: str, lang: str, state: str | None) -> None:
    """Print a program that asks an endpoint, with a held-out question if there is one.

    RUN is a run, or the name of an endpoint.
    """
    deployment = connect(state)
    name, endpoint, record, spec = callee_of(deployment, run)
    assert spec.serve is not None, "the run has an endpoint"
    write = _WRITERS[lang]
    has_token = spec.serve.credential != "none"
    export = f'export {VARIABLE}="$(dropforge token {name}{_state_of(state)})"' if has_token else ""
    echo(write(endpoint, example(deployment, record, spec), export))


def example(deployment: Deployment, record: Record, spec: JobSpec) -> Messages:
    """Return messages that the model understands: a held-out question, else the unfilled template of the training."""
    if sample := held_out_sample(deployment, record):
        return [{"role": message["role"], "content": message["content"]} for message in sample["prompt"]]
    prompt = prompt_of(spec)
    if prompt is None:
        return [{"role": "user", "content": "Hello"}]
    return prompt.messages({name: f"{{{name}}}" for name in prompt.fields})


def _state_of(state: str | None) -> str:
    return f" --state {shlex.quote(state)}" if state else ""


def _python(endpoint: Endpoint, messages: Messages, export: str) -> str:
    setup = f"# pip install openai\n# {export}\nimport os\n\n" if export else "# pip install openai\n"
    key = f'os.environ["{VARIABLE}"]' if export else '"none"'
    return f"""{setup}from openai import OpenAI

client = OpenAI(base_url={endpoint.base_url!r}, api_key={key})
answer = client.chat.completions.create(
    model={endpoint.model!r},
    messages={_indented(messages)},
    stream=True,
)
for part in answer:
    if part.choices:
        print(part.choices[0].delta.content or "", end="", flush=True)
print()"""


def _curl(endpoint: Endpoint, messages: Messages, export: str) -> str:
    header = f' \\\n  -H "Authorization: Bearer ${VARIABLE}"' if export else ""
    body = json.dumps({"model": endpoint.model, "messages": messages}, indent=2)
    return f"""{export}
curl --fail-with-body -sS {shlex.quote(f"{endpoint.base_url}/chat/completions")}{header} \\
  -H "Content-Type: application/json" --data-binary @- <<'END_OF_REQUEST'
{body}
END_OF_REQUEST""".lstrip()


def _js(endpoint: Endpoint, messages: Messages, export: str) -> str:
    setup = f"// {export}\n" if export else ""
    token = f"\n    Authorization: `Bearer ${{process.env.{VARIABLE}}}`," if export else ""
    return f"""// Node 18 or newer; save as ask.mjs
{setup}const reply = await fetch({json.dumps(f"{endpoint.base_url}/chat/completions")}, {{
  method: "POST",
  headers: {{
    "Content-Type": "application/json",{token}
  }},
  body: JSON.stringify({{
    model: {json.dumps(endpoint.model)},
    messages: {_indented(messages)},
  }}),
}});
if (!reply.ok) throw new Error(`HTTP ${{reply.status}}: ${{await reply.text()}}`);
console.log((await reply.json()).choices[0].message.content);"""


def _indented(messages: Messages) -> str:
    """Return messages as a literal of Python and JavaScript, in an argument list."""
    return json.dumps(messages, indent=4, ensure_ascii=False).replace("\n", "\n    ")


_WRITERS: dict[str, Callable[[Endpoint, Messages, str], str]] = {"python": _python, "curl": _curl, "js": _js}
