"""Rules about how runs end: what a success proves, how soon a request takes effect, and what people are told.

They read only the history. Where a fault may have delayed the control plane, the bound is longer by that delay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .history import History
from .limits import CLUSTER_USD, Rule, Use, training_uses
from .lives import CHECK_SECONDS, SLACK_SECONDS, SWEEP_SECONDS, TERMINAL, At, Life, duration_of, seconds_of

_GAVE_UP = re.compile(
    r'the workflow failed; {.*"tags":\["(HttpError|ConnectionError|ConnectionFailedError|TimeoutError)"'
)
RETRIES = {"preempted": 10, "infrastructure": 3, "stockout": 10, "quota": 10, "transient": 3, "stuck": 1}
CANCEL_SECONDS = 2 * SLACK_SECONDS  # a stage that waits returns within 30 s, and the workflow waits 30 s at most
EXACT_SECONDS = 5.0  # the end of a pod is seen some seconds before or after the end of its attempt
START_SECONDS = 1200.0  # the default of startup_timeout
FUNCTION_SECONDS = 540.0  # the time-out of a function
LOST_REPLY_SECONDS = 60.0  # a client waits so long at most for a reply that is lost
LOST_SECONDS = 400.0  # the longest time until Kubernetes deletes the pod of a lost node (nodes.py)
UNTOLD_SECONDS = 1200.0  # the longest pauses between two tries to end a run
DELETION_SECONDS = 1800.0  # of a cluster


def success_has_a_model(life: Life) -> Iterator[tuple[float, str]]:
    """A run deploys and succeeds only after its own trainer committed a manifest, whose metrics pass the gate."""
    trained = _first(life, "DEPLOYING") or _first(life, "SUCCEEDED")
    if trained is None:
        return
    committed = [manifest for manifest in life.manifests if manifest.index < trained.index]
    if not any(manifest.value.get("run") == life.run for manifest in committed):
        yield trained.time, f"the run is {trained.value['state']}, but no manifest was committed"
        return
    if trained.value["metrics"] != committed[0].value["metrics"]:
        yield trained.time, f"the run has the metrics {trained.value['metrics']}, which are not its manifest's"
    gate = (life.spec.get("evaluation") or {}).get("gate")
    value = committed[0].value["metrics"].get(gate["metric"]) if gate else None
    if gate and (value is None or value < gate["min"]):
        yield trained.time, f"the run is {trained.value['state']}, but {gate['metric']} is {value}"


def ready_means_answered(life: Life) -> Iterator[tuple[float, str]]:
    """A run has an endpoint in its record only after that endpoint has answered a completion."""
    ready = next((record for record in life.records if record.value["endpoint"]), None)
    deploying = _first(life, "DEPLOYING")
    if ready is None:
        return
    since = deploying.index if deploying else 0
    url = ready.value["endpoint"]["url"]
    answers = [answer for answer in life.completions if answer.value["url"] == url]
    if not any(since < answer.index < ready.index for answer in answers):
        yield ready.time, f"the endpoint {url} was ready before it answered a completion"


def success_serves(life: Life) -> Iterator[tuple[float, str]]:
    """A run whose spec asks for an endpoint succeeds only with an endpoint that has not expired."""
    over = life.over
    if over is None or over.value["state"] != "SUCCEEDED" or not life.spec.get("serve"):
        return
    endpoint = over.value["endpoint"]
    if endpoint is None:
        yield over.time, "the run succeeded without the endpoint that its spec asks for"


def failure_says_why(life: Life) -> Iterator[tuple[float, str]]:
    """A failed run has the error that ended it in its record."""
    if life.over is not None and life.over.value["state"] == "FAILED" and not life.over.value["error"]:
        yield life.over.time, "the run failed, but its record does not say why"


def startup_is_limited(life: Life) -> Iterator[tuple[float, str]]:
    """A deployment ends within startup_timeout, with an endpoint or without."""
    began = _first(life, "DEPLOYING")
    if began is None or not life.spec.get("serve"):
        return
    due = began.time + duration_of(life.spec["serve"].get("startup_timeout", "20m")) + 2 * SLACK_SECONDS
    due += life.delay(began.time, due)
    ended = next((record for record in life.records if _is_past(record, "DEPLOYING")), None)
    if due < (ended.time if ended else life.end.time):
        yield due, f"the endpoint was not ready after {due - began.time:.0f} s, and the deployment continued"


def cancel_is_prompt(life: Life) -> Iterator[tuple[float, str]]:
    """A cancelled run begins its teardown within a minute, or after a deletion that was under way."""
    request = next((record for record in life.records if record.value["cancel_requested"]), None)
    if request is None or request.value["state"] in (*TERMINAL, "TEARING_DOWN"):
        return
    torn = next((r for r in life.records if r.value["state"] in (*TERMINAL, "TEARING_DOWN")), None)
    acted = torn.time if torn else life.end.time
    under_way = [m for m in life.machines if (asked := m.deletion_request()) and asked.time < acted]
    since = max([request.time, *(m.gone.time if m.gone else life.end.time for m in under_way)])
    due = since + CANCEL_SECONDS
    while (later := since + CANCEL_SECONDS + life.delay(request.time - CHECK_SECONDS, due)) > due:
        due = later  # in the time of one fault, another fault may begin
    if acted > due:
        yield (
            due,
            f"the cancel was recorded in {request.value['state']}, but {acted - since:.0f} s passed without effect",
        )


def cancel_prevents_success(life: Life) -> Iterator[tuple[float, str]]:
    """No success is written once the record has a cancel request."""
    success = _first(life, "SUCCEEDED")
    before = life.record_at(success.index) if success else None
    if success is not None and before and before["cancel_requested"]:
        yield success.time, "the run succeeded, although its record had a cancel request"


def retries_are_counted(life: Life) -> Iterator[tuple[float, str]]:
    """A failed attempt is followed by another one exactly as often as limits.retry allows for its class.

    A run whose workflow gave up after many refused calls in a row ends at once: that is no failure of its attempt.
    """
    if not life.valid:
        return
    limits, attempts = life.spec["limits"], life.last.get("attempts", [])
    allowed = RETRIES | limits.get("retry", {})
    if limits.get("on_stuck", "restart") != "restart":
        allowed["stuck"] = 0
    ended: Counter[str] = Counter()
    for attempt in attempts:
        error_class = (attempt["error"] or {}).get("error_class", "")
        ended[error_class] += 1
        is_last = attempt is attempts[-1]
        if not is_last and error_class not in ("budget", "") and ended[error_class] > allowed.get(error_class, 0):
            yield seconds_of(attempt["ended"]), f"attempt {attempt['number']} was followed by one retry too many"
        is_allowed = ended[error_class] <= allowed.get(error_class, 0) and len(attempts) < limits.get(
            "max_attempts", 20
        )
        if is_last and is_allowed and _is_final(life, attempt) and not _gave_up(attempt):
            yield life.end.time, f"attempt {attempt['number']} failed ({error_class}) and was not retried"


def told_once(life: Life) -> Iterator[tuple[float, str]]:
    """A message that Slack has taken is not sent again, unless a fault may have hidden the answer of Slack.

    Two deliveries or two sweeps at the same time may both send. A delivery that repeats a rejection tells it again.
    """
    taken: dict[str, float] = {}
    for message in life.slack:
        id_ = message.value["event"]
        if id_ in taken:
            since = taken[id_] - LOST_REPLY_SECONDS
            is_hidden = message.time - taken[id_] < SLACK_SECONDS or life.delay(since, message.time) > 0
            is_repeated = id_.endswith("/rejected") and message.time < life.calm + SWEEP_SECONDS
            if not is_hidden and not is_repeated and not _was_refused(life, id_, message.time):
                yield message.time, f"Slack got {id_} again after {message.time - taken[id_]:.0f} s"
        if message.value["status"] == 200:
            taken.setdefault(id_, message.time)


def ends_in_time(life: Life) -> Iterator[tuple[float, str]]:
    """Once nothing fails any more, a run is over after the time that its spec allows and the longest deletion."""
    if not life.records or not life.valid or life.last["state"] == "REJECTED":
        return
    serve = life.spec.get("serve") or {}
    since = max(
        life.calm, life.records[0].time, seconds_of(life.last.get("placed") or life.records[0].value["created"])
    )
    allowed = duration_of(life.spec["limits"]["max_duration"]) + CHECK_SECONDS + DELETION_SECONDS + UNTOLD_SECONDS
    allowed += duration_of(serve.get("startup_timeout", "20m")) if serve else 0.0
    due = since + allowed + 2 * SWEEP_SECONDS
    if due < (life.over.time if life.over else life.end.time):
        yield due, f"the run was not over {due - since:.0f} s after the last fault"


def cost_is_true(life: Life) -> Iterator[tuple[float, str]]:
    """The record charges an attempt for the time in which its machines were paid for, within one or two looks.

    A machine that is lost between two looks may stay unseen. The time since an attempt was last seen waiting counts.
    Kubernetes shows a pod as running for some minutes after its node is lost.
    """
    uses = list(training_uses(life)) if life.valid else []
    for attempt in life.last.get("attempts", []):
        every = [use for use in uses if use.machine.attempt == attempt["number"]]
        own = [use for use in every if not life.is_stray(use.machine)]
        if attempt["ended"] is None or any(life.serves(use.machine) for use in own):
            continue
        charged, ended = _charged(attempt), seconds_of(attempt["ended"])
        paid = sum(max(0.0, min(use.until, ended) - use.since) * use.machine.share for use in own)
        # A resource that a call created late may be the one that the attempt then finds.
        whole = max((use.until for use in every), default=0.0) - min((use.since for use in every), default=0.0)
        started = seconds_of(attempt["started"])
        delay = life.delay(started - CHECK_SECONDS, ended)
        unseen = CHECK_SECONDS if charged < SLACK_SECONDS else 0.0
        if charged < paid - SLACK_SECONDS - unseen - delay:
            yield ended, f"attempt {attempt['number']} is charged for {charged:.0f} s, but was paid for {paid:.0f} s"
        shown = LOST_SECONDS if attempt["number"] in life.silenced else 0.0
        if charged > whole + shown + 2 * CHECK_SECONDS + SLACK_SECONDS + delay:
            yield ended, f"attempt {attempt['number']} is charged for {charged:.0f} s, but ran {whole:.0f} s"


def prices_are_of_the_placement(life: Life) -> Iterator[tuple[float, str]]:
    """The record charges each attempt the price of the placement in which its machine is."""
    if not life.valid or not life.dearer:
        return
    target = life.spec["target"]
    first = target["price_usd_per_hour"] + (CLUSTER_USD * 3600 if target.get("cluster", {}).get("create") else 0.0)
    for attempt in life.last.get("attempts", []):
        for machine in life.training:
            if machine.attempt == attempt["number"] and not machine.is_disk:
                due = first * life.dearness(machine)
                if abs(attempt["usd_per_hour"] - due) > 0.001:
                    text = f"attempt {attempt['number']} is charged {attempt['usd_per_hour']} USD an hour"
                    yield life.end.time, f"{text}; {machine.name} costs {due:g}"


def cost_is_exact(life: Life) -> Iterator[tuple[float, str]]:
    """In a life in which nothing fails, an attempt is charged from its request, or its last wait, to its machine's end.

    It is no rule of `check`: where something fails, what the record cannot know counts as paid.
    """
    for attempt in life.last.get("attempts", []):
        own = [use for use in training_uses(life) if use.machine.attempt == attempt["number"]]
        if not own or any(life.serves(use.machine) for use in own):
            continue
        waited = seconds_of(attempt["waiting"]) if attempt.get("waiting") else 0.0
        due = min(use.until for use in own) - max(waited, min(use.machine.origin.created.time for use in own))
        charged = _charged(attempt)
        if abs(charged - due) > EXACT_SECONDS:
            text = f"attempt {attempt['number']} is charged for {charged:.1f} s; expected {due:.1f} s"
            yield seconds_of(attempt["ended"]), text


def nothing_costs_nothing(life: Life) -> Iterator[tuple[float, str]]:
    """An attempt whose every request was refused has nothing, and costs nothing."""
    for attempt in life.last.get("attempts", []):
        if not attempt.get("refused"):
            continue
        own = [machine for machine in life.training if machine.attempt == attempt["number"]]
        if any(machine.running is not None and not life.is_stray(machine) for machine in own):
            yield life.end.time, f"attempt {attempt['number']} is said to have nothing, but its machine ran"
        if attempt["ended"] and _charged(attempt):
            yield life.end.time, f"attempt {attempt['number']} is charged, but is said to have nothing"


def waits_are_true(life: Life) -> Iterator[tuple[float, str]]:
    """No machine that is paid for runs when an attempt is noted as waiting, or when it ends for lack of capacity.

    Machines may run while others are lacking: of Jobs of several nodes, and of Ray clusters.
    """
    uses = [use for use in training_uses(life) if use.machine.share > 0] if life.valid else []
    is_single = life.valid and life.spec["target"].get("nodes", 1) == 1 and life.spec["target"].get("type") != "ray"
    for attempt in life.last.get("attempts", []):
        own = [use for use in uses if use.machine.attempt == attempt["number"] and not life.is_stray(use.machine)]
        waiting, ended = attempt.get("waiting"), attempt["ended"]
        if waiting and _runs_at(own, seconds_of(waiting)):
            yield seconds_of(waiting), f"attempt {attempt['number']} was noted as waiting while its machine ran"
        is_delayed = bool(own) and life.delay(own[0].since, own[0].until) > 0
        if is_single and _is_capacity(attempt) and _runs_at(own, seconds_of(ended)) and not is_delayed:
            yield seconds_of(ended), f"attempt {attempt['number']} ended for lack of capacity while its machine ran"


def touches_its_own(life: Life) -> Iterator[tuple[float, str]]:
    """A stage that is called for a run writes and deletes nothing of another run."""
    for at in life.touched:
        call = life.callers.get(at.value.get("by", ""))
        run = call.value.get("run", "") if call else ""
        if run and run != life.run:
            yield at.time, f"{at.value['by']}, which was called for {run}, touched {at.value['name']}"


def reasons_are_true(life: Life) -> Iterator[tuple[float, str]]:
    """Nothing is said to wait once it runs, and only a cancel is named as the end of an attempt that it ended."""
    for record in life.records:
        value = record.value
        attempts = value["attempts"]
        if value["state"] == "TRAINING" and attempts and attempts[-1].get("wait_reason"):
            yield record.time, f"the run trains, but is said to wait: {attempts[-1]['wait_reason']}"
        if value["endpoint"] and value.get("endpoint_wait_reason"):
            yield record.time, f"the endpoint is ready, but is said to wait: {value['endpoint_wait_reason']}"
        if any(attempt.get("cancelled") for attempt in attempts) and not value["cancel_requested"]:
            yield record.time, "an attempt is said to be cancelled, but no user requested the end of the run"


RULES: tuple[Rule, ...] = (
    success_has_a_model,
    ready_means_answered,
    success_serves,
    failure_says_why,
    startup_is_limited,
    cancel_is_prompt,
    cancel_prevents_success,
    retries_are_counted,
    told_once,
    ends_in_time,
    cost_is_true,
    prices_are_of_the_placement,
    nothing_costs_nothing,
    waits_are_true,
    reasons_are_true,
    touches_its_own,
)


def sweeps_end(history: History) -> Iterator[tuple[float, str]]:
    """A sweep answers within the time-out of a function, whatever it finds, plus the time that faults take from it."""
    began: dict[str, float] = {}
    lost: Counter[str] = Counter()
    for fact in history.of("call", "fault", "answer"):
        instance = fact.data.get("instance", fact.data.get("process", ""))
        if not instance.startswith("sweep-"):
            continue
        if fact.kind == "call":
            began[instance] = fact.time
        elif fact.kind == "fault":
            lost[instance] += round(LOST_REPLY_SECONDS + fact.data.get("seconds", 0.0))
        elif instance in began and fact.time - began[instance] > FUNCTION_SECONDS + lost[instance]:
            yield fact.time, f"{instance} took {fact.time - began[instance]:.0f} s"


def _first(life: Life, state: str) -> At | None:
    """When the record first had this state."""
    return next((record for record in life.records if record.value["state"] == state), None)


def _is_past(record: At, state: str) -> bool:
    """Whether the run has left the state, or has reached its aim."""
    states = [entry["state"] for entry in record.value["history"]]
    return bool(record.value["endpoint"]) or (state in states and states[-1] != state)


def _is_final(life: Life, attempt: dict[str, Any]) -> bool:
    """Whether the run failed with the error of this attempt, not for lack of time or money, nor by a cancel."""
    error, own = life.last.get("error"), attempt["error"]
    is_failed = life.last["state"] == "FAILED" and not life.last["cancel_requested"]
    return bool(is_failed and error and own and error.get("message", "").startswith(own.get("message", "")))


def _gave_up(attempt: dict[str, Any]) -> bool:
    """Whether the workflow ended the attempt because a stage did not answer."""
    return bool(_GAVE_UP.match(attempt["error"].get("message", "")))


def _was_refused(life: Life, id_: str, before: float) -> bool:
    """Whether a channel refused the message before: then every channel gets it again."""
    refused = [m for m in life.slack if m.value["event"] == id_ and m.value["status"] != 200 and m.time < before]
    return bool(refused)


def _charged(attempt: dict[str, Any]) -> float:
    """The seconds for which the record charges an attempt."""
    if attempt.get("running") is None and (attempt.get("refused") or _is_capacity(attempt)):
        return 0.0
    since = attempt.get("running") or attempt.get("waiting") or attempt["started"]
    return max(0.0, seconds_of(attempt["ended"]) - seconds_of(since))


def _is_capacity(attempt: dict[str, Any]) -> bool:
    return (attempt["error"] or {}).get("error_class") in ("stockout", "quota")


def _runs_at(uses: list[Use], time: float) -> bool:
    return any(use.since + SLACK_SECONDS < time < use.until - SLACK_SECONDS for use in uses)
