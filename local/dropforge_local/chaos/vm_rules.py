"""The rules of named endpoints on TPU VMs, beside those of endpoint_rules.py: to which machine a name points."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise

from dropforge.endpoints.record import EndpointRecord

from .endpoint_history import EndpointLife
from .endpoint_lives import SWEEP_SECONDS, USD_PER_HOUR

DRAIN_SECONDS = 305.0  # DROPFORGE_ENDPOINT_DRAIN_SECONDS: the ttl of a record and the longest answer
SKEW_SECONDS = 4.0
LATE_SECONDS = 1900.0  # the longest stall, and then the longest delay of a call
# Two sweeps, an hour between two tries, and the rollout of the second.
COMES_BACK_WITHIN = 2 * SWEEP_SECONDS + 3600.0 + 900.0
LOOK_SECONDS = 1.0  # from the look at a machine to the change, without a fault
YOUNG_SECONDS = 60.0  # the sweep leaves what is newer alone


def a_name_gets_the_address_of_a_checked_machine(life: EndpointLife) -> Iterator[str]:
    """A name gets only the address of a machine that runs and has answered a completion.

    A machine may be lost between the last look at it and the change, which a fault may have delayed.
    """
    for time, address in life.pointed:
        vm = life.vm_at(address)
        if not address or _is_strange(life, time):
            continue
        if vm is None or vm.answered > time:
            yield f"at {time:.0f} the name got {address}, where no machine has answered a completion"
        elif vm.ended < time and not _is_delayed(life, vm.lost, time):
            yield f"at {time:.0f} the name got the address of {vm.revision}, which had ended at {vm.ended:.0f}"


def no_machine_ends_before_its_name(life: EndpointLife) -> Iterator[str]:
    """dropforge deletes no machine to which the name points."""
    for vm in life.vms:
        if vm.address and vm.deleting < min(vm.lost, vm.gone) and life.address_at(vm.deleting) == vm.address:
            yield f"at {vm.deleting:.0f} {vm.revision} was deleted while the name pointed to it"


def the_machine_before_finishes_its_answers(life: EndpointLife) -> Iterator[str]:
    """After a name has moved, the machine before stays for as long as clients use its address and its answers take."""
    for (_, before), (time, after) in pairwise(life.pointed):
        vm = life.vm_at(before)
        if vm is None or not after or _is_strange(life, time) or vm.ended < time:
            continue
        is_stopped = any(not address and time < when <= vm.deleting for when, address in life.pointed)
        if vm.deleting < min(vm.lost, vm.gone, time + DRAIN_SECONDS - SKEW_SECONDS) and not is_stopped:
            yield f"{vm.revision} was deleted {vm.deleting - time:.0f} s after its name had moved"


def a_name_always_answers(life: EndpointLife) -> Iterator[str]:
    """A name that serves points to a machine that has answered and lives, until it is suspended or retired.

    But for a machine that was lost, or a record that somebody changed: then until the next rollout, or the next sweep.
    """
    moments = sorted({*(time for time, _ in life.pointed), *(vm.deleting for vm in life.vms), *life.times()})
    for time in moments:
        record = life.record_at(time)
        if time >= life.end or record is None or not record.stable or record.suspended or _stops(record):
            continue
        vm = life.vm_at(life.address_at(time))
        if (vm is None or vm.deleting <= time or vm.answered > time) and not life.is_harmed(time):
            yield f"at {time:.0f} the name points to {life.address_at(time) or 'nothing'}, where nothing answers"
            return


def a_lost_name_comes_back(life: EndpointLife) -> Iterator[str]:
    """Once faults have ended, a name whose machine was lost answers again after the next tries of the sweep."""
    lost_since: float | None = None
    since = life.calm + LATE_SECONDS
    for minute in range(int((life.end - since) // 60)):
        time = since + 60.0 * minute
        record, vm = life.record_at(time), life.vm_at(life.address_at(time))
        answers = vm is not None and vm.answered <= time < vm.ended
        if record is None or not record.stable or record.suspended or _stops(record) or answers:
            lost_since = None
        elif lost_since is None:
            lost_since = time
        elif time - lost_since > COMES_BACK_WITHIN:
            yield f"at {time:.0f} the name has not answered for {time - lost_since:.0f} s"
            return


def a_machine_that_nobody_needs_ends(life: EndpointLife) -> Iterator[str]:
    """The next sweep that meets no fault deletes each machine that no rollout moves and no record names."""
    for look in life.looks:
        record = life.record_at(look.began)
        changed = any(look.began - YOUNG_SECONDS < time <= look.ended for time, _ in life.records)
        if record is None or record.current is not None or changed:
            continue
        for vm in life.vms:
            is_old = vm.created < look.began - YOUNG_SECONDS and min(vm.deleting, vm.gone) > look.ended + 1
            if is_old and not _needs(record, vm.number):
                yield f"{vm.name} still exists at {look.ended:.0f}, and {record.stable} serves"


def nothing_is_left_of_a_name(life: EndpointLife) -> Iterator[str]:
    """In the end a name that serves points to the machine of its revision; another one has no record and no machine."""
    record, found = life.last, life.service
    if record.state == "SERVING":
        wanted = record.revision(record.stable).revision
        if found is None or found["serves"] != wanted:
            yield f"the cloud has {found}, and {wanted} serves"
        others = [name for name in found["resources"] if name.rpartition("/")[2] != wanted] if found else []
        if others:
            yield f"{others} exist, and {wanted} serves"
    elif found is not None:
        yield f"the endpoint is {record.state}, and {found} exists"


def the_record_has_the_most_that_its_machines_cost(life: EndpointLife) -> Iterator[str]:
    """The record charges machines for as long as a rollout or the endpoint needs them.

    A skewed clock moves that by seconds, and a fault that delays the write of a record by as long.
    """
    recorded = life.last.cost(_time(life.end))
    spans = [*life.records, (life.end, life.last)]
    real = sum(
        life.cost(began, ended, vm)
        for (began, record), (ended, _) in pairwise(spans)
        for vm in life.vms
        if _needs(record, vm.number)
    )
    if recorded is None or real > recorded + 0.02 + life.delay / 3600 * USD_PER_HOUR:
        yield f"its machines have cost {real:.2f} USD, and the record says {recorded}"


RULES = (
    a_name_gets_the_address_of_a_checked_machine,
    no_machine_ends_before_its_name,
    the_machine_before_finishes_its_answers,
    a_name_always_answers,
    a_lost_name_comes_back,
    a_machine_that_nobody_needs_ends,
    nothing_is_left_of_a_name,
    the_record_has_the_most_that_its_machines_cost,
)


def _needs(record: EndpointRecord, number: int) -> bool:
    """Whether a revision serves or is being rolled out."""
    is_served = number == record.stable and not record.suspended
    return is_served or (record.current is not None and number == record.current.revision)


def _stops(record: EndpointRecord) -> bool:
    """Whether the endpoint is being suspended, resumed or retired."""
    return record.current is not None and record.current.kind in ("suspend", "resume", "retire")


def _is_delayed(life: EndpointLife, lost: float, time: float) -> bool:
    """Whether the call that changed the record may have looked at a machine before that was lost."""
    delays = [each for each in (*life.delays, *life.late) if each <= time]
    return lost < time and (time - lost < LOOK_SECONDS or any(lost - LATE_SECONDS < each for each in delays))


def _is_strange(life: EndpointLife, time: float) -> bool:
    """Whether somebody changed the record at that moment."""
    return time in life.strayed


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
