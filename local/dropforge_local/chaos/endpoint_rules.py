"""The rules of named endpoints: whether a history of endpoint_lives.py keeps dropforge's promises about them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise

from dropforge.endpoints.record import EndpointState, RolloutState

from . import vm_rules
from .endpoint_history import EndpointLife, read_lives
from .endpoint_lives import BAD_RUN, FREE, SWEEP_SECONDS, USD_PER_HOUR
from .history import History
from .named import IDLE_SECONDS

# From a spent budget to the end of the instances without faults: a sweep, and the rollout that it begins.
SUSPENDS_WITHIN = SWEEP_SECONDS + 300.0
# From a budget that is spent, or is not any more, to the end of the rollout that follows, without faults: a sweep, and
# the rollout before, whose last steps no suspension stops.
FOLLOWS_WITHIN = SWEEP_SECONDS + 600.0
SKEW_SECONDS = 4.0  # between the clocks of two functions
MAY_BE_CHECKED = (RolloutState.WATCHING, RolloutState.SHIFTING, RolloutState.UNDOING)


def check(history: History) -> list[str]:
    """Every promise about endpoints that the history breaks."""
    lives, active = read_lives(history)
    problems = [f"execution {each} still runs" for each in active]
    for life in lives.values():
        for rule in RULES_OF_VMS if life.last.type == "tpu_vm" else RULES:
            problems += [f"{rule.__name__}: {life.name}: {text}" for text in rule(life)]
    return problems


def rollouts_end(life: EndpointLife) -> Iterator[str]:
    """Every rollout ends, and stays as it ended."""
    yield from (f"rollout {each.id} is {each.state}" for each in life.last.rollouts if not each.state.is_terminal)
    for (_, before), (_, after) in pairwise(life.records):
        for rollout in before.rollouts:
            found = after.find(rollout.id)
            if rollout.state.is_terminal and found is not None and found.state is not rollout.state:
                yield f"rollout {rollout.id} was {rollout.state} and became {found.state}"


def only_a_promotion_changes_what_serves(life: EndpointLife) -> Iterator[str]:
    """Another revision serves only once its rollout was promoted."""
    for (_, before), (_, after) in pairwise(life.records):
        if after.stable not in (before.stable, 0):
            promoted = [each for each in after.rollouts if each.state is RolloutState.PROMOTED]
            if after.stable not in {each.revision for each in promoted}:
                yield f"revision {after.stable} serves without a promotion"


def requests_reach_who_may_answer(life: EndpointLife) -> Iterator[str]:
    """A revision gets requests if it serves, or while its rollout moves them or watches it."""
    for time, shares in life.shares:
        record = life.record_at(time)
        assert record is not None, "a record precedes its service"
        current = record.current
        numbers = {record.stable, record.previous} | ({current.revision, current.before} if current else set())
        allowed = {each.revision for each in record.revisions if each.number in numbers}
        if strange := set(shares) - allowed:
            yield f"at {time:.0f} {sorted(strange)} got requests; allowed were {sorted(allowed)}"
        if sum(shares.values()) != 100:
            yield f"at {time:.0f} the shares were {shares}"
        if len(shares) > 1 and (current is None or current.state not in MAY_BE_CHECKED):
            yield f"at {time:.0f} two revisions got requests, and no rollout watches one"


def a_canary_is_watched_first(life: EndpointLife) -> Iterator[str]:
    """Before its promotion, a canary gets its share, and no other, for all its time."""
    for promoted, record, rollout in life.promotions():
        if rollout.canary is None or not rollout.before:
            continue
        revision = record.revision(rollout.revision).revision
        steps = [(time, shares.get(revision, 0)) for time, shares in life.shares if time <= promoted]
        began = next((time for time, share in steps if share), promoted)
        ended = next((time for time, share in steps if share == 100), promoted)
        if strange := {share for time, share in steps if began <= time < ended} - {rollout.canary.percent}:
            yield f"the canary of rollout {rollout.id} got {sorted(strange)} % of the requests"
        if ended - began < rollout.canary.seconds - SKEW_SECONDS:
            yield f"the canary of rollout {rollout.id} was watched for {ended - began:.0f} s"


def a_bad_canary_is_never_promoted(life: EndpointLife) -> Iterator[str]:
    """A canary whose requests fail is not promoted, unless those of the revision before fail as well."""
    for _, record, rollout in life.promotions():
        if rollout.canary is not None and rollout.before:
            runs = [record.revision(number).run for number in (rollout.revision, rollout.before)]
            if runs[0] == BAD_RUN != runs[1]:
                yield f"rollout {rollout.id} promoted a model that fails half of its requests"


def a_completion_comes_first(life: EndpointLife) -> Iterator[str]:
    """A revision has answered a completion in its rollout before it is promoted, and before a new one gets requests."""
    for promoted, record, rollout in life.promotions():
        revision, checked = record.revision(rollout.revision).revision, life.entered(rollout.id, RolloutState.CHECKING)
        began = promoted if checked is None else checked
        answered = next((time for time, name in life.answered if name == revision and time >= began), life.end)
        shared = [time for time, shares in life.shares if shares.get(revision) and rollout.kind == "deploy"]
        if answered > min([promoted, *shared]):
            yield f"rollout {rollout.id} promoted {revision}, which had not answered a completion"


def the_cloud_is_as_the_record_says(life: EndpointLife) -> Iterator[str]:
    """At the end. Nobody but the next rollout makes a service again that was deleted by hand."""
    record, service = life.last, life.service
    if record.state is EndpointState.RETIRED or not record.stable:
        if service is not None:
            yield f"its service exists, and the endpoint is {record.state}"
    elif service is None:
        if not life.forgotten:
            yield "its service does not exist"
    else:
        serving = record.revision(record.stable).revision
        if service["shares"] != {serving: 100} and not life.forgotten:
            yield f"the shares are {service['shares']}; {serving} serves"
        if service["suspended"] != bool(record.suspended):
            yield f"the service is {service}, and the record says suspended: {record.suspended}"


def the_record_has_the_most_that_it_cost(life: EndpointLife) -> Iterator[str]:
    """The cost in the record is an upper bound. A skewed clock moves it by seconds.

    A function that was suspended may ask a revision after its rollout has ended: an instance starts, and ends idle.
    """
    recorded, real = life.last.cost(_time(life.end)), life.cost(0, life.end)
    late = life.stalls * IDLE_SECONDS / 3600 * USD_PER_HOUR
    if recorded is None or real > recorded + 0.02 + late:
        yield f"its instances have cost {real:.2f} USD, and the record says {recorded}"


def a_budget_holds(life: EndpointLife) -> Iterator[str]:
    """Once faults have ended, a day costs at most its budget and the price until a sweep has suspended the endpoint."""
    last, now = life.last, _time(life.end)
    budget = last.in_period(now).budget
    if budget is not None and not last.retired:
        began = budget.began.timestamp()
        faulty = max(began, life.calm + 2 * SWEEP_SECONDS)  # until then, faults may have delayed what ends the costs
        spent, before = life.cost(began, life.end), life.cost(began, min(faulty, life.end))
        revisions = max((number for when, number in life.paying if when >= began), default=1)
        allowed = max(budget.usd, before) + max(1, revisions) * USD_PER_HOUR * SUSPENDS_WITHIN / 3600
        if spent > allowed:
            yield f"{spent:.2f} USD were spent since {budget.began}, of a budget of {budget}"
    if last.is_spent(now) and not last.suspended and not last.retired:
        yield f"it has spent {last.spent(now)} of {last.budget}, and is not suspended"
    if last.suspended and not last.is_spent(now):
        yield f"it has spent {last.spent(now)} of {last.budget}, and is suspended"


def suspension_follows_the_budget(life: EndpointLife) -> Iterator[str]:
    """Once faults have ended, an endpoint is suspended soon after its budget is spent, and resumed soon after it is not
    spent any more: in another period, or with a higher budget."""
    last, since = life.last, life.calm + 2 * SWEEP_SECONDS
    if life.forgotten or last.retired:
        return
    is_wrong_since: float | None = None
    for minute in range(int((life.end - since) // 60)):
        time = since + 60.0 * minute
        record = life.record_at(time)
        if record is None or not record.stable or record.is_spent(_time(time)) == bool(record.suspended):
            is_wrong_since = None
        elif is_wrong_since is None:
            is_wrong_since = time
        elif time - is_wrong_since > FOLLOWS_WITHIN:
            spent = f"it had spent {record.spent(_time(time))} of {record.budget}"
            yield f"at {time:.0f} {spent}, and was {'suspended' if record.suspended else 'not suspended'}"
            return


def a_suspended_endpoint_costs_nothing(life: EndpointLife) -> Iterator[str]:
    """While the record says that an endpoint is suspended, it has no instance."""
    for (began, record), (ended, _) in pairwise([*life.records, (life.end, life.last)]):
        if record.suspended and (usd := life.cost(began, ended)) > 0:
            yield f"it was suspended from {began:.0f} to {ended:.0f}, and cost {usd:.2f} USD"


def only_its_own_budget_suspends(life: EndpointLife) -> Iterator[str]:
    """An endpoint without a budget is never suspended."""
    if life.name == FREE and any(record.suspended for _, record in life.records):
        yield "it was suspended, and has no budget"
    for time, record in life.records:
        kinds = {each.kind for each in record.rollouts}
        if life.name == FREE and "suspend" in kinds:
            yield f"at {time:.0f} it was to be suspended, and has no budget"
            return


def a_warning_comes_once(life: EndpointLife) -> Iterator[str]:
    """One message for each budget and period, unless a fault had it sent again."""
    if not life.is_repeated:
        yield from (f"{count} messages of {id_}" for id_, count in life.warnings.items() if count > 1)


RULES = (
    rollouts_end,
    only_a_promotion_changes_what_serves,
    requests_reach_who_may_answer,
    a_canary_is_watched_first,
    a_bad_canary_is_never_promoted,
    a_completion_comes_first,
    the_cloud_is_as_the_record_says,
    the_record_has_the_most_that_it_cost,
    a_budget_holds,
    suspension_follows_the_budget,
    a_suspended_endpoint_costs_nothing,
    only_its_own_budget_suspends,
    a_warning_comes_once,
)
OF_SERVICES = (
    the_cloud_is_as_the_record_says,
    the_record_has_the_most_that_it_cost,
    a_suspended_endpoint_costs_nothing,
)  # vm_rules.py says the same of machines
RULES_OF_VMS = (*(rule for rule in RULES if rule not in OF_SERVICES), *vm_rules.RULES)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
