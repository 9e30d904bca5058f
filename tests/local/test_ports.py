import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dropforge_local.base import ports
from dropforge_local.base.ports import HOST, free_port, is_anothers
from dropforge_local.stack import control

# Ports of no stack and no outgoing connection; another suite on this machine has most likely other ports.
FIRST = 32100 + 40 * (os.getpid() % 16)
AMONG = range(FIRST, FIRST + 40)
# A process that takes `count` ports, says which, and lives until its input ends.
OTHER = """
import sys
from dropforge_local.base.ports import free_port
taken = set()
first, count = map(int, sys.argv[1:])
for _ in range(count):
    taken.add(free_port(range(first, first + 40), taken))
print(*taken, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_lent", {})


def other(count: int) -> tuple[subprocess.Popen[str], set[int]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", OTHER, str(FIRST), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, {int(word) for word in process.stdout.readline().split()}


def test_two_stacks_never_give_the_same_port_before_their_containers_listen() -> None:
    (first, its), (second, theirs) = other(13), other(13)
    with first, second:
        own: set[int] = set()
        for _ in range(14):
            own.add(free_port(AMONG, own))
        assert (len(its), len(theirs), len(own)) == (13, 13, 14)
        assert its | theirs | own == set(AMONG)
        with pytest.raises(OSError, match=f"no free port in {FIRST} to {FIRST + 40}"):
            free_port(AMONG, own)
        first.communicate()  # its end gives its ports back
        assert free_port(AMONG, own) in its
        second.communicate()


def test_a_process_that_has_its_share_gives_its_oldest_free_port_again() -> None:
    first, *_ = [free_port(AMONG, set()) for _ in range(len(AMONG) // 4)]
    assert free_port(AMONG, set()) == first
    with socket.socket() as server:
        oldest = next(iter(ports._lent))
        server.bind((HOST, oldest))
        server.listen()
        assert free_port(AMONG, set()) not in (oldest, first)


def test_a_port_is_anothers_while_another_stack_has_it() -> None:
    own = free_port(AMONG, set())
    process, (port,) = other(1)
    with process:
        assert is_anothers(port)
        assert not is_anothers(own)
        process.communicate()
    assert not is_anothers(port)


def test_a_port_that_another_stack_has_taken_is_no_leftover(tmp_path: Path) -> None:
    process, (port,) = other(1)
    (tmp_path / "ports.json").write_text(json.dumps([port]))
    with process, socket.socket() as server:
        server.bind((HOST, port))
        server.listen()
        assert control.leftovers(tmp_path).ports == []
        process.communicate()
        assert control.leftovers(tmp_path).ports == [port]
