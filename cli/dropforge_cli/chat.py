"""`dropforge chat`: talk to a run's endpoint by the OpenAI API, with the prompt that the model was trained on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import click
import requests

from dropforge.run.record import Endpoint
from dropforge.spec import JobSpec
from dropforge_console.asking import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    MESSAGE,
    PLAIN,
    Answer,
    Prompt,
    Unanswered,
    prompt_of,
    refused,
    unreachable,
)

from .callee import callee_of
from .deployment import Deployment, connect
from .display import awaited, stdout, table, working
from .endpoints import token_of
from .options import complete_run, run_argument, state_option
from .plain import echo, plain
from .problems import FAILED, CliError

WAITS = "waiting for the answer"  # minutes, if the endpoint has scaled to zero


@click.command()
@run_argument
@click.argument("message", required=False)
@click.option("--field", "fields", metavar="NAME=TEXT", multiple=True, help="A field of the prompt's template.")
@click.option("--raw", is_flag=True, help="Send messages as they are, without the template of the training.")
@click.option("--system", metavar="TEXT", help="A system prompt. Default: the system prompt of the training.")
@click.option("--compare", metavar="RUN2", shell_complete=complete_run, help="Ask a second run the same.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="The length of the longest answer. Default: the endpoint's value.",
)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), metavar="T", help="0: greedy. Default: the endpoint's value."
)
@state_option
def chat(
    run: str,
    message: str | None,
    fields: tuple[str, ...],
    raw: bool,
    system: str | None,
    compare: str | None,
    max_tokens: int | None,
    temperature: float | None,
    state: str | None,
) -> None:
    """Talk to the model of a run: once with MESSAGE or a pipe, else until an empty line.

    RUN is a run, or the name of an endpoint.
    """
    deployment, given = connect(state), _given(fields)
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    extra = {name: value for name, value in sampling.items() if value is not None}
    sides = [_side(deployment, name, raw, system, extra) for name in filter(None, (run, compare))]
    names = _fields_of(sides)
    if unknown := [name for name in given if name not in names]:
        raise CliError(f"the prompt has no field {unknown[0]!r}", f"its fields are {', '.join(names)}")
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.buffer.read().decode(errors="replace").strip()
        if not message and set(names) - set(given):
            raise CliError("the message is empty", f"`dropforge chat {run} MESSAGE`, or a text in the pipe")
    if message or not set(names) - set(given):
        answered = _answer(sides, _values(message or "", names, given))
        raise SystemExit(0 if answered else FAILED)
    _converse(sides, names, given)


@dataclass
class Side:
    """A run's, or a named endpoint's, side of a conversation. `run` names it on the command line.

    Rows of templates are single questions, so each question to such a model is a new conversation. Other models get
    the whole conversation.
    """

    run: str
    spec: JobSpec
    endpoint: Endpoint
    token: str
    prompt: Prompt
    is_trained_prompt: bool
    extra: dict[str, Any]
    history: list[dict[str, str]] = field(default_factory=list)

    def ask(self, values: Mapping[str, str]) -> Iterator[str]:
        """Yield the parts of the answer as they arrive. Raises CliError."""
        asked = self.prompt.messages(values)
        messages = [*self.history, *(asked[-1:] if self.history else asked)]
        answer = ""
        for part in self._parts(messages):
            answer += part
            yield part
        if not self.is_trained_prompt:
            self.history = [*messages, {"role": "assistant", "content": answer}]

    def _parts(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        url = f"{self.endpoint.base_url}/chat/completions"
        body = {"model": self.endpoint.model, "messages": messages, "stream": True, **self.extra}
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with requests.post(
                url, json=body, headers=headers, stream=True, timeout=(CONNECT_SECONDS, ANSWER_SECONDS)
            ) as reply:
                if not reply.ok:
                    raise refused(self.run, self.spec, reply.status_code, reply.text or reply.reason)
                yield from self._streamed(reply)
        except Unanswered as error:
            raise CliError(str(error), error.hint) from None
        except requests.Timeout as error:
            raise self._unreachable(f"did not answer in time: {error}") from None
        except requests.RequestException as error:
            raise self._unreachable(f"cannot be reached: {error}") from None

    def _streamed(self, reply: requests.Response) -> Iterator[str]:
        answer = Answer(self.run)
        for line in reply.iter_lines():
            if text := answer.part(line):
                yield text
        answer.check_end()
        if answer.ended == "length":
            echo("\nnote: the answer was cut at the largest number of tokens (--max-tokens)", err=True)

    def _unreachable(self, why: str) -> CliError:
        error = unreachable(self.run, self.spec, self.endpoint, why)
        return CliError(str(error), error.hint)


def _side(deployment: Deployment, text: str, raw: bool, system: str | None, extra: dict[str, Any]) -> Side:
    name, endpoint, _, spec = callee_of(deployment, text)
    trained = None if raw else prompt_of(spec)
    prompt = trained or PLAIN
    if system is not None:
        prompt = prompt.with_system(system)
    with working("getting a token"):
        token = token_of(deployment, spec)
    return Side(name, spec, endpoint, token, prompt, trained is not None, extra)


def _fields_of(sides: Sequence[Side]) -> list[str]:
    return list(dict.fromkeys(name for side in sides for name in side.prompt.fields))


def _given(fields: Sequence[str]) -> dict[str, str]:
    """Return the values of --field by name."""
    for text in fields:
        if "=" not in text:
            raise click.BadParameter(f"{text!r}; expected NAME=TEXT", param_hint="--field")
    return {name: value for name, _, value in (text.partition("=") for text in fields)}


def _values(message: str, names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the value of every field: of --field, of a JSON object, or the message itself. Raises CliError."""
    missing = [name for name in names if name not in given]
    if not missing:
        return dict(given)
    row = _row(message)
    if all(name in row for name in missing):
        return {**{name: str(row[name]) for name in missing}, **given}
    if len(missing) == 1:
        return {**given, missing[0]: message}
    hint = "give the others by --field NAME=TEXT, or all in a JSON object; --raw sends the message as it is"
    raise CliError(f"the prompt of the training has the fields {', '.join(missing)}; a message fills one", hint)


def _row(message: str) -> dict[str, Any]:
    try:
        row = json.loads(message)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _converse(sides: Sequence[Side], names: Sequence[str], given: Mapping[str, str]) -> None:
    """Ask and answer until an empty line or the end of the input."""
    import readline  # noqa: F401  # editing and history for `input`

    models = " and ".join(f"{side.endpoint.model} ({side.run})" for side in sides)
    echo(f"talking to {models}; an empty line ends", err=True)
    if any(side.is_trained_prompt for side in sides):
        echo(
            "each question gets the prompt of the training, without earlier questions; --raw sends a conversation",
            err=True,
        )
    while values := _read(names, given):
        try:
            _answer(sides, values)
        except CliError as error:
            error.show()  # a question that is too long must not end the conversation


def _read(names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Read the fields that --field did not give; empty at the end."""
    values = dict(given)
    for name in names:
        if name in given:
            continue
        try:
            text = input(plain("> " if names == [MESSAGE] else f"{name}> "))
        except EOFError:
            return {}
        if not text:
            return {}
        values[name] = text
    return values


def _answer(sides: Sequence[Side], values: Mapping[str, str]) -> bool:
    """Print the answers: one side's as it arrives, two sides' next to each other. Returns whether all answered."""
    if len(sides) == 1:
        for part in awaited(sides[0].ask(values), WAITS):
            echo(part, nl=False)
        echo("")
        return True
    with working(WAITS), ThreadPoolExecutor(len(sides)) as pool:
        answers = list(pool.map(lambda side: _whole(side, values), sides))
    rows = table(*(f"{side.endpoint.model} ({side.run})" for side in sides))
    rows.add_row(*(answer for answer, _ in answers))
    stdout().print(rows)
    return all(is_answer for _, is_answer in answers)


def _whole(side: Side, values: Mapping[str, str]) -> tuple[str, bool]:
    """Return an answer, or why there is none: the other side's answer is still worth showing."""
    try:
        return "".join(side.ask(values)), True
    except CliError as error:
        return f"error: {error.message}", False
