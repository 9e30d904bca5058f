"""Each rule of named endpoints reports histories that break it: each mutation breaks the history of a good life."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from dropforge_local.chaos import endpoint_rules
from dropforge_local.chaos.endpoint_lives import BAD_RUN, BUDGETED, FREE, run
from dropforge_local.chaos.endpoint_rules import check
from dropforge_local.chaos.history import Fact, History

Content = dict[str, Any]
LIKELY = 37  # the first seed to try
SEEDS = 400


@pytest.fixture(scope="module")
def life() -> History:
    """A life without faults in which the endpoint with a budget promotes a canary, is warned, suspended and resumed."""
    for seed in chain(range(LIKELY, SEEDS), range(LIKELY)):
        history = run(seed)
        if not any(history.of("fault", "forgotten")) and _has_everything(history):
            return history
    pytest.fail(f"none of {SEEDS} seeds has such a life")


def copied(history: History) -> History:
    """A copy that a mutation may change. A deep copy of the thousands of facts takes twice as long."""
    copy: History = pickle.loads(pickle.dumps(history))
    return copy


def _has_everything(history: History) -> bool:
    last = _last(history)
    kinds = {each["kind"] for each in last["rollouts"] if each["state"] in ("SUSPENDED", "PROMOTED")}
    is_warned = any("/notice/budget-" in fact.data["event"] for fact in history.of("slack"))
    return bool(last["suspended"] and is_warned and {"suspend", "resume"} <= kinds and list(_canaries(last)))


def _writes(history: History, endpoint: str = BUDGETED) -> list[Fact]:
    name = f"endpoints/{endpoint}/record.json"
    return [fact for fact in history.of("write") if fact.data["name"] == name]


def _records(history: History, endpoint: str = BUDGETED) -> list[Content]:
    return [fact.data["content"] for fact in _writes(history, endpoint)]


def _last(history: History, endpoint: str = BUDGETED) -> Content:
    return _records(history, endpoint)[-1]


def _canaries(record: Content) -> Iterator[Content]:
    """The promoted rollouts whose canary was compared with a revision before."""
    for each in record["rollouts"]:
        if each["state"] == "PROMOTED" and each["canary"] and each["before"]:
            yield each


def _revision(history: History) -> Content:
    """The revision of the first such canary."""
    last = _last(history)
    number = next(_canaries(last))["revision"]
    return next(each for each in last["revisions"] if each["number"] == number)


def _steps(history: History) -> list[Fact]:
    """The moves of requests to that revision, in order: the share of a canary, then all."""
    name = _revision(history)["revision"]
    return [fact for fact in history.of("shares") if fact.data["shares"].get(name)]


def _move(history: History, fact: Fact, time: float) -> None:
    """Move a fact to another time."""
    history.facts.remove(fact)
    place = next(number for number, other in enumerate(history.facts) if other.time > time)
    history.facts.insert(place, fact._replace(time=time))


def _a_rollout_goes_on(history: History) -> None:
    _last(history)["rollouts"][-1]["state"] = "SHIFTING"


def _an_end_is_taken_back(history: History) -> None:
    *_, before, last = _records(history)
    rollout = next(_canaries(before))["id"]
    next(each for each in last["rollouts"] if each["id"] == rollout)["state"] = "ROLLED_BACK"


def _an_unknown_revision_serves(history: History) -> None:
    last = _last(history)
    last["revisions"].append({**_revision(history), "number": 99, "revision": "unknown"})
    last["stable"] = 99


def _a_strange_revision_gets_requests(history: History) -> None:
    _steps(history)[-1].data["shares"] = {"unknown": 100}


def _shares_of_nothing(history: History) -> None:
    shares = _steps(history)[-1].data["shares"]
    shares.update(dict.fromkeys(shares, 99))


def _a_share_beside_what_serves(history: History) -> None:
    name, fact = _revision(history)["revision"], _steps(history)[-1]
    fact.data["shares"] = {name: 50, "another": 50}


def _a_canary_gets_more_than_its_share(history: History) -> None:
    shares = _steps(history)[0].data["shares"]
    shares.update(dict.fromkeys(shares, 50))


def _a_canary_gets_no_share(history: History) -> None:
    history.facts.remove(_steps(history)[0])


def _a_canary_is_promoted_early(history: History) -> None:
    share, full, *_ = _steps(history)
    _move(history, share, full.time - 1700)  # of 1800 seconds


def _a_bad_model_is_promoted(history: History) -> None:
    number = _revision(history)["number"]
    for revision in chain.from_iterable(record["revisions"] for record in _records(history)):
        revision["run"] = BAD_RUN if revision["number"] == number else "good-000000000000"


def _no_completion(history: History) -> None:
    name = _revision(history)["revision"]
    history.facts = [fact for fact in history.facts if fact.kind != "answered" or fact.data["revision"] != name]


def _the_completion_comes_after_the_share(history: History) -> None:
    _no_completion(history)
    share = _steps(history)[0]
    data = {"endpoint": BUDGETED, "revision": _revision(history)["revision"]}
    history.facts.insert(history.facts.index(share) + 1, Fact(share.time + 1, "answered", data))


def _the_completion_is_of_an_earlier_rollout(history: History) -> None:
    """A revision that is resumed has answered before it was suspended, and does not answer now."""
    resumed = next(each for each in _last(history)["rollouts"] if each["kind"] == "resume")
    began = next(
        fact.time
        for fact in _writes(history)
        for each in fact.data["content"]["rollouts"]
        if each["id"] == resumed["id"]
    )
    history.facts = [fact for fact in history.facts if fact.kind != "answered" or fact.time < began]


def _the_service_is_not_suspended(history: History) -> None:
    next(history.of("end")).data["services"][BUDGETED]["suspended"] = False


def _the_service_is_lost(history: History) -> None:
    del next(history.of("end")).data["services"][BUDGETED]


def _the_cost_is_higher(history: History) -> None:
    for fact in history.of("paying"):
        fact.data["revisions"] *= 3


def _a_spent_budget_is_ignored_in_the_end(history: History) -> None:
    _last(history)["suspended"] = None


def _a_spent_budget_is_ignored(history: History) -> None:
    for record in _records(history):
        record["suspended"] = None


def _a_budget_that_is_not_spent_suspends(history: History) -> None:
    for record in _records(history):
        if record["budget"]:
            record["budget"]["usd"] = 1e6


def _a_suspended_endpoint_has_an_instance(history: History) -> None:
    fact = next(fact for fact in _writes(history) if fact.data["content"]["suspended"])
    data = {"endpoint": BUDGETED, "revisions": 1}
    history.facts.insert(history.facts.index(fact) + 1, Fact(fact.time + 1, "paying", data))


def _an_endpoint_without_a_budget_is_suspended(history: History) -> None:
    record = _last(history, FREE)
    record["suspended"] = record["created"]


def _a_suspension_of_another_endpoint_begins(history: History) -> None:
    _last(history, FREE)["rollouts"][-1]["kind"] = "suspend"


def _a_warning_comes_twice(history: History) -> None:
    warning = next(fact for fact in history.of("slack") if "/notice/budget-" in fact.data["event"])
    history.facts.insert(history.facts.index(warning), warning)


MUTATIONS: list[tuple[str, Callable[[History], None]]] = [
    ("rollouts_end", _a_rollout_goes_on),
    ("rollouts_end", _an_end_is_taken_back),
    ("only_a_promotion_changes_what_serves", _an_unknown_revision_serves),
    ("requests_reach_who_may_answer", _a_strange_revision_gets_requests),
    ("requests_reach_who_may_answer", _shares_of_nothing),
    ("requests_reach_who_may_answer", _a_share_beside_what_serves),
    ("a_canary_is_watched_first", _a_canary_gets_more_than_its_share),
    ("a_canary_is_watched_first", _a_canary_gets_no_share),
    ("a_canary_is_watched_first", _a_canary_is_promoted_early),
    ("a_bad_canary_is_never_promoted", _a_bad_model_is_promoted),
    ("a_completion_comes_first", _no_completion),
    ("a_completion_comes_first", _the_completion_comes_after_the_share),
    ("a_completion_comes_first", _the_completion_is_of_an_earlier_rollout),
    ("the_cloud_is_as_the_record_says", _the_service_is_not_suspended),
    ("the_cloud_is_as_the_record_says", _the_service_is_lost),
    ("the_record_has_the_most_that_it_cost", _the_cost_is_higher),
    ("a_budget_holds", _the_cost_is_higher),
    ("a_budget_holds", _a_spent_budget_is_ignored_in_the_end),
    ("suspension_follows_the_budget", _a_spent_budget_is_ignored),
    ("suspension_follows_the_budget", _a_budget_that_is_not_spent_suspends),
    ("a_suspended_endpoint_costs_nothing", _a_suspended_endpoint_has_an_instance),
    ("only_its_own_budget_suspends", _an_endpoint_without_a_budget_is_suspended),
    ("only_its_own_budget_suspends", _a_suspension_of_another_endpoint_begins),
    ("a_warning_comes_once", _a_warning_comes_twice),
]


def test_the_unchanged_life_is_good(life: History) -> None:
    assert check(life) == []


@pytest.mark.parametrize(("rule", "mutate"), MUTATIONS, ids=[f"{rule}-{each.__name__}" for rule, each in MUTATIONS])
def test_a_broken_promise_is_reported(life: History, rule: str, mutate: Callable[[History], None]) -> None:
    mutated = copied(life)
    mutate(mutated)
    assert rule in {problem.partition(":")[0] for problem in check(mutated)}


def test_every_rule_has_a_mutation() -> None:
    assert {rule.__name__ for rule in endpoint_rules.RULES} == {rule for rule, _ in MUTATIONS}


def test_an_execution_that_never_ends_is_reported(life: History) -> None:
    mutated = copied(life)
    next(mutated.of("end")).data["active"].append("e-1")
    assert check(mutated) == ["execution e-1 still runs"]
