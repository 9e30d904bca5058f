"""The actions of a viewer: drop a spec into the specs bucket, and publish a request. Every user may do the same."""

from __future__ import annotations

import json
import secrets

from dropforge.base import names
from dropforge.base.errors import DropforgeError, InvalidSpec, SpecProblem
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.context import Context
from dropforge.spec import JobSpec, parse_spec
from dropforge.spec.policy import policy_of
from dropforge.stages.admission import rule_problems, shape_of
from dropforge.stages.ceiling import with_defaults

MAX_SPEC_BYTES = 1 << 20
PREFIX = f"{names.SPECS_PREFIX}console/"


def problems_of(text: str, context: Context) -> list[SpecProblem]:
    """Return what is wrong with a spec, by the rules of `dropforge submit`. Empty if nothing is wrong."""
    try:
        policy = policy_of(context.settings.policy)
        spec = with_defaults(parse_spec(text.encode()), policy)
        return rule_problems(spec, policy, shape_of(context.cloud, spec))
    except UnicodeEncodeError:
        return [SpecProblem("", "the text has half of a surrogate pair", "", "Unicode text")]
    except InvalidSpec as error:
        return error.problems


def submit(text: str, context: Context) -> str:
    """Drop a spec into the specs bucket; return the run's id. The caller has checked the spec."""
    spec: JobSpec = parse_spec(text.encode())
    name = f"{PREFIX}{spec.name}-{secrets.token_hex(4)}.json"
    blob = context.cloud.clients.storage().bucket(context.settings.specs_bucket).blob(name)
    blob.upload_from_string(
        text.encode(), content_type="application/json", if_generation_match=0, timeout=TIMEOUT_SECONDS
    )
    return names.run_id_of_object(context.settings.specs_bucket, name, blob.generation)


def request(content: dict[str, str], context: Context) -> None:
    """Publish a request of an operator, such as {"cancel": RUN} or {"rollback": ENDPOINT}. Raises DropforgeError."""
    if not context.settings.operations_topic:
        raise DropforgeError("this deployment has no operations_topic, so nobody can request a change here")
    topic = context.settings.topic(context.settings.operations_topic)
    data = json.dumps(content).encode()
    context.cloud.clients.publisher().publish(topic, data, timeout=TIMEOUT_SECONDS).result(TIMEOUT_SECONDS)
