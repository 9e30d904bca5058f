"""The actions of a person: drop a spec into the specs bucket, and publish a request. Every user may do the same.

A console with the identity of a person writes it into the spec's metadata, and into the attributes of the request. The
functions believe it there, because nobody but the console's account may write in these places.
"""

from __future__ import annotations

import json
import secrets
from typing import NamedTuple

from dropforge.base import names
from dropforge.base.errors import DropforgeError, InvalidSpec, SpecProblem
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.objects import write_once
from dropforge.context import Context
from dropforge.money.plan import Plan, make_plan
from dropforge.run.events import REQUESTED_BY, REQUESTED_WITH
from dropforge.spec import JobSpec, parse_spec
from dropforge.spec.policy import policy_of
from dropforge.stages.admission import rule_problems, shape_of
from dropforge.stages.ceiling import with_defaults

from .people import Person
from .preflight import Preflight

MAX_SPEC_BYTES = 1 << 20


class Verdict(NamedTuple):
    """The problems of a spec, by the rules of `dropforge submit`; the plan of its run if it has none.

    `preflight` are the answers of the deployment, if it was asked.
    """

    problems: list[SpecProblem]
    plan: Plan | None = None
    preflight: Preflight | None = None


def check(text: str, context: Context, *, is_typed: bool = False) -> Verdict:
    """Check a spec. While it `is_typed`, nobody asks for the model's configuration: its name may be half a name."""
    try:
        policy = policy_of(context.settings.policy)
        spec = with_defaults(parse_spec(text.encode()), policy)
    except UnicodeEncodeError:
        return Verdict([SpecProblem("", "the text has half of a surrogate pair", "", "Unicode text")])
    except InvalidSpec as error:
        return Verdict(error.problems)
    shape = None if is_typed else shape_of(context.cloud, spec)
    if problems := rule_problems(spec, policy, shape):
        return Verdict(problems)
    unknown = "Check reads the model's configuration" if is_typed else "the model's configuration cannot be read now"
    return Verdict([], make_plan(spec, context.settings, f"{spec.name}.json", context.now(), shape or unknown))


def submit(text: str, context: Context, person: Person) -> str:
    """Drop a spec into the specs bucket; return the run's id. The caller has checked the spec."""
    spec: JobSpec = parse_spec(text.encode())
    prefix = names.CONSOLE_SPECS_PREFIX if person.email else names.SPECS_PREFIX
    name = f"{prefix}{spec.name}-{secrets.token_hex(4)}.json"
    blob = context.cloud.clients.storage().bucket(context.settings.specs_bucket).blob(name)
    if person.email:
        blob.metadata = {names.SUBMITTER: person.email}
    write_once(blob, text.encode(), 0)
    return names.run_id_of_object(context.settings.specs_bucket, name, blob.generation)


def request(content: dict[str, str], context: Context, person: Person) -> None:
    """Publish a request, such as {"cancel": RUN} or {"rollback": ENDPOINT}. Raises DropforgeError.

    Without an identity, the console has the rights of an operator, and uses the topic of operators.
    """
    setting = "console_topic" if person.email else "operations_topic"
    name: str = getattr(context.settings, setting)
    if not name:
        raise DropforgeError(f"this deployment has no {setting}, so nobody can request a change here")
    attributes = {REQUESTED_BY: person.email} if person.email else {REQUESTED_WITH: "the console"}
    sent = context.cloud.clients.publisher().publish(
        context.settings.topic(name), json.dumps(content).encode(), timeout=TIMEOUT_SECONDS, **attributes
    )
    sent.result(TIMEOUT_SECONDS)
