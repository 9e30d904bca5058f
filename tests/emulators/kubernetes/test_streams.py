"""Programs that clients start in containers, and connections to the ports of pods, by kubectl and the Python client."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import websocket
from kubernetes.stream import portforward, stream
from tests.patience import PATIENCE_SECONDS

from dropforge_local.emulators.kubernetes.paths import parse_path
from dropforge_local.emulators.kubernetes.permissions import iam_permission
from dropforge_local.emulators.kubernetes.spdy import DICTIONARY

from .conftest import TOKEN, Kube, make_deployment, make_pod
from .test_kubectl import Kubectl

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@pytest.fixture(autouse=True)
def authority(kube: Kube, tmp_path: Path) -> str:
    """The file from which clients of WebSockets read the authority."""
    path = tmp_path / "authority.pem"
    path.write_text(kube.authority)
    kube.api.configuration.ssl_ca_cert = str(path)
    return str(path)


@pytest.fixture
def pod(kube: Kube) -> str:
    """A pod whose container sleeps."""
    environment = [{"name": "WHO", "value": "me"}]
    kube.create_pod("p", "sleep", "600", container={"env": environment})
    kube.wait_pod("p", "Running")
    return "p"


@pytest.fixture
def server(kube: Kube) -> str:
    """A pod that serves HTTP at the port 8000."""
    container = make_deployment("s")["spec"]["template"]["spec"]["containers"][0]
    manifest = {**make_pod("s"), "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}
    kube.core.create_namespaced_pod(kube.namespace, manifest)
    kube.until(lambda: kube.pod("s").status.container_statuses, lambda states: states and states[0].ready)
    return "s"


def executed(kube: Kube, *command: str, **options: Any) -> Any:
    """The client's stream of a command in the pod `p`."""
    given = {"stdin": False, "stdout": True, "stderr": True, "tty": False, "_preload_content": False, **options}
    return stream(kube.core.connect_get_namespaced_pod_exec, "p", kube.namespace, command=list(command), **given)


def end(client: Any) -> None:
    """Close a stream. After the server's goodbye, the client itself leaves its socket open."""
    client.close()
    client.sock.shutdown()


@pytest.fixture
def run(kube: Kube, pod: str) -> Callable[..., tuple[int, str, str]]:
    """A function that runs a command to its end; it returns the exit code and what it printed to both outputs."""

    def run(*command: str) -> tuple[int, str, str]:
        client = executed(kube, *command)
        client.run_forever(timeout=PATIENCE_SECONDS)
        end(client)
        return client.returncode, client.read_stdout(), client.read_stderr()

    return run


def test_a_command_has_the_containers_files_and_environment_and_no_other_program(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    assert run("sh", "-c", "cat main.py | head -c 1; echo $WHO; pwd >&2; exit 3") == (3, "\nme\n", run("pwd")[1])
    assert run("pwd")[1].endswith("/rootfs/app\n")
    assert run("cat", "/app/main.py")[1].count("import json") == 1
    code, out, error = run("bash", "-c", "kubectl version")
    assert (code, out) == (127, "")
    assert "kubectl: command not found" in error
    assert run("sh", "-c", "kill -9 $$")[0] == 137


def test_output_arrives_whole_also_if_it_is_long_and_binary(kube: Kube, pod: str) -> None:
    client = executed(
        kube, "python", "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 20000)", binary=True
    )
    client.run_forever(timeout=PATIENCE_SECONDS)
    end(client)
    assert client.read_stdout() == bytes(range(256)) * 20000


def test_a_command_is_killed_when_its_client_leaves(kube: Kube, pod: str) -> None:
    client = executed(kube, "sh", "-c", "sleep 4242 & echo $$ $!; wait")
    own = {int(pid) for pid in kube.until(client.read_stdout, bool).split()}
    assert len(own) == 2
    kube.until(kube.processes, lambda now: own <= set(now))  # `sleep` has the container's mark once it runs
    end(client)
    kube.until(kube.processes, lambda now: not own & set(now))


def test_a_command_ends_with_its_container(kube: Kube, pod: str) -> None:
    client = executed(kube, "sh", "-c", "echo ready; exec sleep 4242")
    kube.until(client.read_stdout, lambda text: "ready" in text)
    kube.core.delete_namespaced_pod(pod, kube.namespace, grace_period_seconds=0)
    client.run_forever(timeout=PATIENCE_SECONDS)
    end(client)
    assert client.returncode == 137
    kube.until(kube.processes, lambda processes: not processes)


@pytest.mark.parametrize(
    ("query", "code", "text"),
    [
        ("exec?stdout=1", 400, "at least 1 command"),
        ("exec?command=ls", 400, "at least 1 of stdin, stdout, stderr"),
        ("exec?command=ls&stdout=1", 400, "Upgrade request required"),
        ("exec?command=ls&stdout=1&container=none", 400, "container none is not valid for pod p"),
        ("portforward?ports=80", 400, "Upgrade request required"),
        ("attach?stdout=1", 501, "pods/attach is not emulated"),
    ],
)
def test_what_is_no_stream_is_refused(kube: Kube, pod: str, query: str, code: int, text: str) -> None:
    status, answer, _ = kube.call("POST", f"/api/v1/namespaces/{kube.namespace}/pods/{pod}/{query}")
    assert (status, answer["kind"]) == (code, "Status")
    assert text in answer["message"]


def test_a_container_that_does_not_run_executes_nothing(kube: Kube) -> None:
    kube.create_pod("over", "succeed")
    kube.wait_pod("over", "Succeeded")
    path = f"/api/v1/namespaces/{kube.namespace}/pods/over/exec?command=ls&stdout=1"
    status, answer, _ = kube.call("GET", path)
    assert (status, 'container not found ("main")' in answer["message"]) == (404, True)


def test_the_python_client_reaches_a_port(kube: Kube, server: str) -> None:
    forward = portforward(kube.core.connect_get_namespaced_pod_portforward, server, kube.namespace, ports="8000,9")
    client = forward.socket(8000)
    client.settimeout(PATIENCE_SECONDS)
    client.sendall(b"GET /hello HTTP/1.0\r\nConnection: close\r\n\r\n")
    answer = b"".join(iter(lambda: client.recv(1000), b""))
    forward.close()
    forward.websocket.shutdown()
    assert answer.endswith(b"s /hello")
    assert forward.error(8000) is None
    assert "the pod declares no such port" in forward.error(9)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02\x00\x01\x01\x00\x00\x0a" + b"\0" * 10,  # SPDY/2
        b"\x80\x03\x00\x01\x01\x00\x00\x0c" + b"\0" * 12,  # headers that are not compressed
        b"\x80\x03\x00\x01\x01\x00\x00\x16" + b"\0" * 10 + b"x\xf9\xe3\xc6\xa7\xc2\xff\xff\xff\xff\xff\xff",
    ],
)
def test_a_client_that_breaks_spdy_is_left_and_harms_no_other(
    kube: Kube, server: str, authority: str, data: bytes
) -> None:
    path = f"/api/v1/namespaces/{kube.namespace}/pods/{server}/portforward"
    client = websocket.create_connection(
        f"wss{kube.url.removeprefix('https')}{path}",
        header={"Authorization": TOKEN},
        subprotocols=["SPDY/3.1+portforward.k8s.io"],
        sslopt={"ca_certs": authority},
        timeout=PATIENCE_SECONDS,
    )
    client.send_binary(data[:3])
    client.send_binary(data[3:])
    opcode, answer = client.recv_data()
    client.shutdown()
    assert (opcode, int.from_bytes(answer[:2])) == (websocket.ABNF.OPCODE_CLOSE, 1002)
    assert kube.pod(server).status.phase == "Running"


@pytest.mark.parametrize(
    ("verb", "permission"), [("exec", "container.pods.exec"), ("portforward", "container.pods.portForward")]
)
def test_a_stream_needs_googles_permission(verb: str, permission: str) -> None:
    """https://cloud.google.com/kubernetes-engine/docs/reference/api-permissions"""
    target = parse_path(f"/api/v1/namespaces/n/pods/p/{verb}")
    assert iam_permission(target, verb) == permission


def test_the_dictionary_of_spdy_is_the_specifications() -> None:
    assert (len(DICTIONARY), zlib.adler32(DICTIONARY)) == (1423, 0xE3C6A7C2)  # as in any header block of a client


@pytest.mark.slow
@needs_kubectl
class TestKubectl:
    """kubectl, which speaks v5 of the protocol, uses terminals, copies files, and tunnels SPDY."""

    @pytest.fixture
    def kubectl(self, kube: Kube, tmp_path: Path) -> Kubectl:
        return Kubectl(kube, tmp_path)

    def test_exec(self, kubectl: Kubectl, pod: str) -> None:
        assert kubectl("exec", pod, "--", "sh", "-c", "echo $WHO") == "me\n"
        assert "exit code 3" in kubectl("exec", pod, "--", "sh", "-c", "exit 3", code=3)
        assert 'exec: "none-such": executable file not found in $PATH' in kubectl(
            "exec", pod, "--", "none-such", code=1
        )
        assert 'pods "none" not found' in kubectl("exec", "none", "--", "ls", code=1)

    def test_input_has_an_end(self, kubectl: Kubectl, pod: str) -> None:
        text = "line\n" * 100_000
        done = subprocess.run(
            ["kubectl", "exec", "-i", pod, "--", "wc", "-l"],
            input=text, env=kubectl.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == "100000"

    def test_a_terminal(self, kubectl: Kubectl, pod: str) -> None:
        """kubectl has a terminal itself, which `script` makes. The pod learns the size while the command runs."""
        size = "until stty size | grep -v '^0 0'; do sleep 0.1; done"
        done = subprocess.run(
            ["script", "-qec", f"stty rows 33 cols 77; kubectl exec -it {pod} -- sh -c \"tty; {size}\"", "/dev/null"],
            env=kubectl.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_SECONDS, check=True,
        )  # fmt: skip
        # `script` types a control character when its own input ends. The terminal of the pod may echo it.
        assert re.search(r"/dev/pts/\d+\s+(\^[@D])?33 77", done.stdout.replace("\b", ""))

    def test_files_are_copied_both_ways(self, kubectl: Kubectl, pod: str, tmp_path: Path) -> None:
        data = bytes(range(256)) * 5000
        (tmp_path / "there").write_bytes(data)
        kubectl("cp", str(tmp_path / "there"), f"{pod}:/app/here")
        kubectl("cp", f"{pod}:/app/here", str(tmp_path / "back"))
        kubectl("cp", f"{pod}:/app", str(tmp_path / "tree"))
        assert (tmp_path / "back").read_bytes() == (tmp_path / "tree" / "here").read_bytes() == data

    def test_port_forward(self, kubectl: Kubectl, server: str) -> None:
        with forwarded(kubectl, f"pod/{server}", 8000) as port:
            for index in range(3):  # kubectl makes a stream for each connection
                assert asked(port, f"/{index}").endswith(f"s /{index}".encode())

    def test_a_port_that_the_pod_does_not_declare(self, kubectl: Kubectl, server: str) -> None:
        with forwarded(kubectl, f"pod/{server}", 9) as port:
            assert asked(port, "/") == b""


@contextmanager
def forwarded(kubectl: Kubectl, target: str, port: int) -> Iterator[int]:
    """The local port at which `kubectl port-forward` listens for a port of a pod or service."""
    process = subprocess.Popen(
        ["kubectl", "port-forward", target, f":{port}"],
        env=kubectl.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(rf"Forwarding from 127\.0\.0\.1:(\d+) -> {port}", line)
        assert match, line + process.stdout.read()
        yield int(match[1])
    finally:
        process.terminate()
        process.communicate()


def asked(port: int, path: str) -> bytes:
    """All bytes of an answer over HTTP/1.0, whose end is the connection's."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(f"GET {path} HTTP/1.0\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: client.recv(1000), b""))
