"""Another user of this machine reaches nothing of the local stack."""

from __future__ import annotations

import http.client
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.pubsub_v1 import types as pubsub

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.peers import LOOKS, TABLES, asked, listed, stranger
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.stack.config import StackConfig, StackError

NOBODY = 65534
as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux can open sockets of another user"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("stack")

    def build() -> list[Any]:
        db, clock = Database(home / "state.db"), SystemClock()
        return [StorageEmulator(db, home / "blobs", clock), PubSubEmulator(db, clock)]

    with BackgroundServer(build) as running:
        yield running


@contextmanager
def user(number: int) -> Iterator[None]:
    """Sockets that this process opens belong to another user."""
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


def get(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/storage/v1/b?project=p")
    answer = connection.getresponse()
    answer.read()
    return answer.status


@as_root
def test_another_user_is_refused_on_every_request_of_a_connection(server: Server) -> None:
    own, foreign = (http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60) for _ in range(2))
    with user(NOBODY):
        foreign.connect()
    own.connect()
    assert [get(foreign), get(own), get(foreign), get(own)] == [403, 200, 403, 200]
    own.close()
    foreign.close()


@as_root
@pytest.mark.parametrize(("number", "code"), [(NOBODY, grpc.StatusCode.PERMISSION_DENIED), (0, grpc.StatusCode.OK)])
def test_another_user_publishes_and_creates_nothing(server: Server, number: int, code: grpc.StatusCode) -> None:
    with user(number), grpc.insecure_channel(server.grpc_address) as channel:
        create = channel.unary_unary(
            "/google.pubsub.v1.Publisher/CreateTopic",
            request_serializer=pubsub.Topic.serialize,
            response_deserializer=pubsub.Topic.deserialize,
        )
        call = create.future(pubsub.Topic(name=f"projects/p/topics/t-{number}"), timeout=60)
        assert call.code() is code


@pytest.fixture(params=[asked, listed], ids=["asked", "listed"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers for one socket only, or lists all sockets only."""
    monkeypatch.setattr("dropforge_local.base.peers.LOOKS", [request.param])


@as_root
@pytest.mark.usefixtures("look")
def test_an_ipv6_socket_with_an_ipv4_address_is_known_too(server: Server) -> None:
    """Java opens such sockets."""
    with user(NOBODY):
        client = socket.socket(socket.AF_INET6)
        client.connect(("::ffff:127.0.0.1", server.http_port))
    ends = ("127.0.0.1", client.getsockname()[1]), ("127.0.0.1", server.http_port)
    assert stranger(*ends, 0) == f"the local stack of user 0 takes no request of user {NOBODY}"
    assert stranger(*ends, NOBODY) is None
    client.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows the users of sockets")
@pytest.mark.usefixtures("look")
def test_a_socket_without_a_process_is_refused(server: Server) -> None:
    """The kernel gives it to root, so another user could send a request and close."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, address = listener.accept()
    assert stranger(address, listener.getsockname(), os.geteuid()) is None
    client.close()
    assert stranger(address, listener.getsockname(), os.geteuid()) == "the client has closed its connection"
    accepted.close()
    listener.close()


def test_an_unknown_connection_is_let_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On another system there is no list."""
    ends = ("127.0.0.1", 1), ("127.0.0.1", 2)
    assert stranger(*ends, 1000) is None
    monkeypatch.setattr("dropforge_local.base.peers.TABLES", [tmp_path / table.name for table in TABLES])
    assert stranger(*ends, 1000) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows the users of sockets")
def test_a_kernel_that_answers_no_question_about_a_socket_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        ends = client.getsockname(), listener.getsockname()
        known = (os.geteuid(), os.fstat(client.fileno()).st_ino)
        assert asked(*ends) == listed(*ends) == known
        monkeypatch.setattr("dropforge_local.base.peers.NETLINK_SOCK_DIAG", 255)  # the kernel has no such protocol
        assert asked(*ends) is None
        assert [look(*ends) for look in LOOKS if look(*ends)] == [known]


@as_root
def test_an_open_stack_takes_every_user(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [StorageEmulator(Database(tmp_path / "state.db"), tmp_path / "blobs", SystemClock())]

    with BackgroundServer(build, is_open=True) as server, user(NOBODY):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        assert get(connection) == 200
        connection.close()


def test_a_configuration_with_unknown_users_is_refused() -> None:
    with pytest.raises(StackError, match=r"users is 'me' in config\.json; expected 'own' or 'all'"):
        StackConfig(users="me")
