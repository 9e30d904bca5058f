"""Rules about money and time. They compute from the machines' own times and from the prices in the spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from .lives import CHECK_SECONDS, SLACK_SECONDS, SWEEP_SECONDS, Life, Machine, Sweep, duration_of, seconds_of

Rule = Callable[[Life], Iterator[tuple[float, str]]]

WARN_AT = (50, 80)  # percent of the budget
WARN_OF_TIME_AT = 80  # percent of max_duration
CLUSTER_USD = 0.10 / 3600  # a GKE cluster's fee for a second
GRACE_SECONDS = 120.0  # at most, for the end of a pod
LAST_WORDS = frozenset({"preempted", "failed", "succeeded"})


class Use(NamedTuple):
    """A period for which a machine is paid (seconds since the epoch), and its price."""

    machine: Machine
    since: float
    until: float
    usd_per_second: float

    @property
    def usd(self) -> float:
        return max(0.0, self.until - self.since) * self.usd_per_second


def within_budget(life: Life) -> Iterator[tuple[float, str]]:
    """Training and endpoint cost at most the limit plus one check interval, plus the endpoint until the next sweep."""
    limit = _budget(life)
    if limit is None:
        return
    training = [*training_uses(life), *cluster_uses(life)]
    price = _prices(life)[0] * life.dearest
    unknown = CHECK_SECONDS + sum(use.until - use.since for use in training if life.is_stray(use.machine))
    unknown += sum(_patience(life, use) for use in training if not use.machine.ends_by_itself)
    spent, allowed = sum(use.usd for use in training), limit + unknown * price
    if spent > allowed:
        yield life.end.time, f"the training cost {spent:.3f} USD; the limit is {limit}"
    for use in serving_uses(life):
        paid_until = use.since + max(0.0, allowed - spent) / use.usd_per_second
        spent += use.usd
        sweep = life.swept_after(use.machine.created.index, paid_until + SLACK_SECONDS)
        late = use.until - max(paid_until, life.calm) > SWEEP_SECONDS + 2 * SLACK_SECONDS
        if use.until > paid_until and (late or (sweep is not None and outlives(use.machine, sweep))):
            yield use.until, f"training and endpoint cost {spent:.3f} USD; the limit is {limit}"


def within_duration(life: Life) -> Iterator[tuple[float, str]]:
    """Nothing trains after max_duration and one check interval."""
    if not life.records or not life.valid:
        return
    deadline = _deadline(life)
    for use in training_uses(life):
        over = use.until - deadline
        # A container that starts after its deadline stops by itself; the sweep deletes a machine that does not.
        stops = use.since > deadline - SLACK_SECONDS and use.until - use.since <= SLACK_SECONDS
        if stops or (life.is_stray(use.machine) and not use.machine.ends_by_itself):
            continue
        allowed = CHECK_SECONDS + (_rest(life, use) if use.machine.ends_by_itself else _patience(life, use))
        if over > allowed:
            yield use.until, f"{use.machine.name} ran {over:.0f} s after max_duration"


def people_are_warned(life: Life) -> Iterator[tuple[float, str]]:
    """A warning that is due while a machine trains is sent at once and always has the same id.

    The control plane may learn one check interval later when a machine began to run; until then it does not know
    the cost. The next sweep sends a warning that is due while the model is served.
    """
    for message in life.published:
        if (key := message.value["event"].get("notice")) and message.value["id"] != f"{life.run}/notice/{key}":
            yield message.time, f"notice {key} was sent with the id {message.value['id']}"
    if not life.records or not life.valid:
        return
    limit = _budget(life)
    for percent in WARN_AT if limit is not None else ():
        assert limit is not None, "checked only with a budget"
        keys = [f"budget-{other}" for other in WARN_AT if other >= percent]
        training = [use for use in training_uses(life) if not life.is_stray(use.machine)]
        if (due := _reached(training, limit * percent / 100)) is not None:
            patience = 0.0 if due[1] - due[0].since > 2 * CHECK_SECONDS else CHECK_SECONDS
            yield from _not_sent(life, keys, *due, patience)
            continue
        serving = [use for use in serving_uses(life) if not life.is_stray(use.machine)]
        if (due := _reached([*training, *serving], limit * percent / 100)) is not None:
            yield from _not_sent_by_sweep(life, keys, *due)
    created, allowed = _bounds(life)
    time = created + allowed * WARN_OF_TIME_AT / 100
    for message in life.published:
        if message.value["event"].get("notice") == f"time-{WARN_OF_TIME_AT}" and message.time < time - SLACK_SECONDS:
            yield message.time, f"{time - message.time:.0f} s too early, notice time-{WARN_OF_TIME_AT} was sent"
    use = next((use for use in training_uses(life) if use.since <= time < use.until), None)
    if use is not None:
        yield from _not_sent(life, [f"time-{WARN_OF_TIME_AT}"], use, time, 0.0)


def limits_end_in_order(life: Life) -> Iterator[tuple[float, str]]:
    """A run that a limit ends is torn down before it is over. An attempt that it ends can first save a checkpoint."""
    if life.over is None or not _is_limit(life.last["error"]):
        return
    if "TEARING_DOWN" not in [entry["state"] for entry in life.last["history"]]:
        yield life.over.time, "a limit ended the run, but no resource was torn down"
    if not life.last["attempts"] or not _is_limit(life.last["attempts"][-1]["error"]):
        return  # the last attempt ended for another reason, and nothing was left for the next one
    last = life.last["attempts"][-1]
    stops, number = seconds_of(last["deadline"]) - SLACK_SECONDS, last["number"]
    events = [event for event in life.job_events if event.value["attempt"] == number]
    began = next((event.time for event in events if event.value["type"] == "started"), None)
    uses = [use for use in training_uses(life) if use.machine.attempt == number]
    was_lost = number in life.silenced or any(use.machine.by_hand or use.until < stops for use in uses)
    if began is None or began > stops - SLACK_SECONDS or was_lost:
        return
    stopped = min(
        (request.index for use in uses if (request := use.machine.deletion_request())), default=life.end.index
    )
    if not any(event.index < stopped and event.value["type"] in LAST_WORDS for event in events):
        yield life.over.time, f"attempt {number} was ended by a limit before it could save a checkpoint"


def endpoint_lives(life: Life) -> Iterator[tuple[float, str]]:
    """A ready endpoint is not deleted before its ttl, unless a user cancels it or its budget is spent."""
    endpoint = life.last.get("endpoint")
    if not endpoint or not life.valid or life.over is None or life.over.value["state"] != "SUCCEEDED":
        return
    ready, serve, deployed = seconds_of(endpoint["ready"]), life.spec["serve"], _deploying(life)
    assert deployed is not None, "the run has an endpoint"
    # An endpoint that is ready only after its startup time lives less: its expiry label is set at its creation.
    promised = min(ready, deployed + duration_of(serve.get("startup_timeout", "20m"))) + duration_of(serve["ttl"])
    if serve.get("type") == "training_vm":  # the label was set before the attempt began
        whole = duration_of(serve.get("startup_timeout", "30m")) + duration_of(serve["ttl"])
        promised = min(promised, seconds_of(life.last["attempts"][-1]["deadline"]) + whole)
    if seconds_of(endpoint["expires"]) > promised + SLACK_SECONDS:
        yield life.over.time, "the endpoint expires after its ttl"
    for machine in life.machines:
        request = machine.deletion_request()
        if (
            not life.serves(machine)
            or request is None
            or request.time < ready
            or request.time > promised - SLACK_SECONDS
        ):
            continue
        was_cancelled = (life.record_at(request.index) or {})["cancel_requested"] is not None
        parts = [other for other in life.machines if life.serves(other) and not other.is_disk]
        was_lost = any(other.by_hand or (other.ended or request.time) < request.time - 1 for other in parts)
        if not was_cancelled and not was_lost and not _may_be_spent(life, request.time + SLACK_SECONDS):
            yield request.time, f"{machine.name} was deleted {promised - request.time:.0f} s before its ttl"


def endpoint_ends(life: Life) -> Iterator[tuple[float, str]]:
    """The first clean sweep after an endpoint's ttl deletes it, and so does a sweep soon after the last fault."""
    endpoint = life.last.get("endpoint")
    if not endpoint or not life.valid:
        return
    expires = seconds_of(endpoint["expires"])
    for machine in life.machines:
        request = machine.deletion_request()
        if not life.serves(machine) or machine.is_disk or request is None:
            continue
        since = max(expires, machine.created.time)
        sweep = life.swept_after(machine.created.index, since + SLACK_SECONDS)
        if sweep is not None and outlives(machine, sweep):
            yield sweep.ended.time, f"a clean sweep did not delete {machine.name}, although it had expired"
        late = request.time - max(since, life.calm)
        if late > SWEEP_SECONDS + 2 * SLACK_SECONDS:
            yield request.time, f"{machine.name} was deleted {late:.0f} s after its ttl"


def endpoint_end_is_told(life: Life) -> Iterator[tuple[float, str]]:
    """The next sweep after an endpoint's end reports that end, and nothing reports it earlier."""
    endpoint = life.last.get("endpoint")
    sent = [message.time for message in life.published if message.value["event"].get("notice") == "endpoint-ended"]
    ended = seconds_of(endpoint["ended"]) if endpoint and endpoint["ended"] else None
    if sent and (ended is None or sent[0] < ended - SLACK_SECONDS):
        yield sent[0], "notice endpoint-ended was sent before the endpoint ended"
    if ended is None or life.over is None or life.over.value["state"] != "SUCCEEDED":
        return
    sweep = _sweep_after(life, max(ended, life.over.time) + SLACK_SECONDS)
    if sweep is None:
        return
    for where in _places_without(life, ["endpoint-ended", "endpoint-lost"], sweep.ended.time):
        yield sweep.ended.time, f"a clean sweep did not send endpoint-ended by {where}"


RULES: tuple[Rule, ...] = (
    within_budget,
    within_duration,
    people_are_warned,
    limits_end_in_order,
    endpoint_lives,
    endpoint_ends,
    endpoint_end_is_told,
)


def outlives(machine: Machine, sweep: Sweep) -> bool:
    """Whether a machine's deletion was possible and nothing had requested it when a sweep ended.

    A disk can be deleted only after its machine, and a cluster only after its creation.
    """
    request = machine.deletion_request()
    if machine.is_disk or (machine.is_cluster and (machine.made is None or machine.made.index > sweep.began.index)):
        return False
    return request is None or request.index > sweep.ended.index


def training_uses(life: Life) -> Iterator[Use]:
    """The periods for which training machines were paid, in order. A machine that is kept counts until it serves."""
    price, deployed = _prices(life)[0], _deploying(life)
    for machine in life.training:
        if machine.running is not None and not machine.is_cluster:
            until = life.end.time if machine.ended is None else machine.ended
            kept = life.serves(machine) and deployed is not None
            until = min(until, deployed or until) if kept else until
            yield Use(machine, machine.running, until, price * machine.share * life.dearness(machine))


def cluster_uses(life: Life) -> Iterator[Use]:
    """The periods for which the fee of attempts' own clusters was paid."""
    for machine in life.training:
        if machine.is_cluster and machine.running is not None:
            fee = CLUSTER_USD * life.dearness(machine)
            yield Use(machine, machine.running, machine.ended or life.end.time, fee)


def serving_uses(life: Life) -> Iterator[Use]:
    """The periods for which endpoints were paid. A service counts from its creation, as if it never scaled to zero."""
    (training, serving), deployed = _prices(life), _deploying(life)
    for machine in life.machines:
        request = machine.deletion_request()
        if "/services/" in machine.name and "/k8s/" not in machine.name:
            until = life.end.time if request is None else request.time
            yield Use(machine, machine.created.time, until, serving)
        elif machine.running is not None and life.serves(machine) and deployed is not None:
            until = life.end.time if machine.ended is None else machine.ended
            price = serving if machine.is_endpoint else training
            yield Use(machine, max(deployed, machine.running), until, price)


def _reached(uses: list[Use], usd: float) -> tuple[Use, float] | None:
    """The time at which the uses had cost that much, and a machine that ran then; None if they never did."""
    times = sorted({time for use in uses for time in (use.since, use.until)})
    for since, until in pairwise(times):
        running = [use for use in uses if use.since <= since and until <= use.until]
        rate = sum(use.usd_per_second for use in running)
        if running and usd <= rate * (until - since):
            return running[0], since + usd / rate
        usd -= rate * (until - since)
    return None


def _not_sent(life: Life, keys: list[str], use: Use, due: float, patience: float) -> Iterator[tuple[float, str]]:
    """A violation if none of the notices was sent in time while the machine ran and no user cancelled."""
    until = due + patience + SLACK_SECONDS
    until += life.delay(use.machine.created.time, until)
    record = life.record_when(until)
    if until > use.until or record is None or record["state"] not in ("PROVISIONING", "TRAINING"):
        return
    attempt = record["attempts"][-1]
    if record["cancel_requested"] or attempt["number"] != use.machine.attempt or attempt["ended"]:
        return
    for where in _places_without(life, keys, until):
        yield until, f"{keys[0]} was due for {until - due:.0f} s, but was not sent by {where}"


def _not_sent_by_sweep(life: Life, keys: list[str], use: Use, due: float) -> Iterator[tuple[float, str]]:
    """A violation if the sweep after a served model's notices were due did not send them."""
    over = life.over
    if over is None or over.value["state"] != "SUCCEEDED":
        return
    sweep = _sweep_after(life, max(due, over.time) + SLACK_SECONDS)
    if sweep is None or use.until < sweep.ended.time:
        return
    record = life.record_when(sweep.ended.time)
    assert record is not None, "the run is over"
    if (
        record["cancel_requested"]
        or not record["endpoint"]
        or seconds_of(record["endpoint"]["expires"]) < sweep.ended.time + SLACK_SECONDS
    ):
        return
    for where in _places_without(life, keys, sweep.ended.time):
        yield sweep.ended.time, f"a clean sweep did not send {keys[0]} by {where}, although it was due"


def _is_limit(error: dict[str, Any] | None) -> bool:
    return error is not None and error["error_class"] in ("budget", "deadline")


def _sweep_after(life: Life, time: float) -> Sweep | None:
    """The first clean sweep that began after a time and that no fault delayed."""
    sweeps = (sweep for sweep in life.sweeps if sweep.clean and sweep.began.time > time)
    return next((sweep for sweep in sweeps if not life.delay(sweep.began.time, sweep.ended.time)), None)


def _places_without(life: Life, keys: list[str], until: float) -> Iterator[str]:
    """The places (run event, Slack) where none of the notices was sent."""
    by_event = {message.value["event"].get("notice") for message in life.published if message.time <= until}
    in_slack = {message.value["event"].rsplit("/", 1)[-1] for message in life.slack if message.time <= until}
    for sent, where in ((by_event, "run event"), (in_slack, "Slack message")):
        if not sent & set(keys):
            yield where


def _may_be_spent(life: Life, time: float) -> bool:
    """Whether the budget may be spent by a time, if machines ran from the opening of each attempt to its end."""
    limit, deployed = _budget(life), _deploying(life)
    if limit is None or deployed is None:
        return False
    training, serving = _prices(life)
    seconds = sum(seconds_of(a["ended"]) - seconds_of(a["started"]) for a in life.last["attempts"])
    kept = any(life.serves(machine) for machine in life.training)
    hourly = training if kept else serving * life.spec["serve"].get("max_instances", 1)
    training = (training + CLUSTER_USD) * life.dearest
    return seconds * training + (time - deployed) * hourly >= limit


def _rest(life: Life, use: Use) -> float:
    """Seconds by which a machine may end too late by itself, whatever the control plane does.

    A Job's time-out counts from its creation, which waits for the attempt's own cluster.
    """
    if use.machine.owner is None:
        return SLACK_SECONDS
    began = next(attempt["started"] for attempt in life.last["attempts"] if attempt["number"] == use.machine.attempt)
    return SLACK_SECONDS + GRACE_SECONDS + max(0.0, use.machine.origin.created.time - seconds_of(began))


def _patience(life: Life, use: Use) -> float:
    """Seconds for which a machine that only the control plane ends may be paid after its end is due."""
    return SLACK_SECONDS + life.delay(use.machine.created.time, use.until)


def _budget(life: Life) -> float | None:
    return life.spec.get("limits", {}).get("max_cost_usd") if life.valid else None


def _prices(life: Life) -> tuple[float, float]:
    """US dollars for a second of training and of the endpoint."""
    training, serve = life.spec["target"]["price_usd_per_hour"], life.spec.get("serve") or {}
    return training / 3600, serve.get("price_usd_per_hour", training) / 3600


def _bounds(life: Life) -> tuple[float, float]:
    """The time at which the run was accepted or got its place, and the seconds for which it may train."""
    began = life.last.get("placed") or life.records[0].value["created"]
    return seconds_of(began), duration_of(life.spec["limits"]["max_duration"])


def _deadline(life: Life) -> float:
    return sum(_bounds(life))


def _deploying(life: Life) -> float | None:
    """The time at which the run entered DEPLOYING; None if it did not."""
    entered = (entry for entry in life.last.get("history", ()) if entry["state"] == "DEPLOYING")
    return next((seconds_of(entry["time"]) for entry in entered), None)
