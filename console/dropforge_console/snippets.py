"""Runnable texts that ask an endpoint, in Python, curl and JavaScript: for `dropforge snippet` and the pages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from dropforge.run.record import Endpoint
from dropforge.spec import JobSpec

from .asking import prompt_of

VARIABLE = "DROPFORGE_TOKEN"
RETRIES = 5  # with growing pauses: a busy service answers 429 (docs/serving.md#a-busy-service)
Messages = list[dict[str, str]]


def snippet(lang: str, endpoint: Endpoint, messages: Messages, export: str) -> str:
    """Return a program in a language of LANGUAGES. `export` sets VARIABLE; "": the endpoint demands no token."""
    return LANGUAGES[lang](endpoint, messages, export)


def export_of(spec: JobSpec, name: str, options: str = "") -> str:
    """Return the command of a shell that sets VARIABLE to the token of an endpoint; "" if it demands none."""
    assert spec.serve is not None, "the spec has an endpoint"
    has_token = spec.serve.credential != "none"
    return f'export {VARIABLE}="$(dropforge token {name}{options})"' if has_token else ""


def template_of(spec: JobSpec) -> Messages:
    """Return the messages of a question with the template of the training, whose fields are not filled in."""
    prompt = prompt_of(spec)
    if prompt is None:
        return [{"role": "user", "content": "Hello"}]
    return prompt.messages({name: f"{{{name}}}" for name in prompt.fields})


def _python(endpoint: Endpoint, messages: Messages, export: str) -> str:
    setup = f"# pip install openai\n# {export}\nimport os\n\n" if export else "# pip install openai\n"
    key = f'os.environ["{VARIABLE}"]' if export else '"none"'
    return f"""{setup}from openai import OpenAI

client = OpenAI(base_url={endpoint.base_url!r}, api_key={key}, max_retries={RETRIES})
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
curl --fail-with-body -sS --retry {RETRIES} {shlex.quote(f"{endpoint.base_url}/chat/completions")}{header} \\
  -H "Content-Type: application/json" --data-binary @- <<'END_OF_REQUEST'
{body}
END_OF_REQUEST""".lstrip()


def _js(endpoint: Endpoint, messages: Messages, export: str) -> str:
    setup = f"// {export}\n" if export else ""
    token = f"\n    Authorization: `Bearer ${{process.env.{VARIABLE}}}`," if export else ""
    return f"""// Node 18 or newer; save as ask.mjs
{setup}const ask = () => fetch({json.dumps(f"{endpoint.base_url}/chat/completions")}, {{
  method: "POST",
  headers: {{
    "Content-Type": "application/json",{token}
  }},
  body: JSON.stringify({{
    model: {json.dumps(endpoint.model)},
    messages: {_indented(messages)},
  }}),
}});
let reply = await ask();
for (let tried = 0; reply.status === 429 && tried < {RETRIES}; tried++) {{  // the service is busy
  await new Promise((wake) => setTimeout(wake, 1000 * 2 ** tried));
  reply = await ask();
}}
if (!reply.ok) throw new Error(`HTTP ${{reply.status}}: ${{await reply.text()}}`);
console.log((await reply.json()).choices[0].message.content);"""


def _indented(messages: Messages) -> str:
    """Return messages as a literal of Python and JavaScript, in an argument list."""
    return json.dumps(messages, indent=4, ensure_ascii=False).replace("\n", "\n    ")


LANGUAGES: dict[str, Callable[[Endpoint, Messages, str], str]] = {"python": _python, "curl": _curl, "js": _js}
