"""The machine of a node: its metadata server, script, containers and disks; reboots, crashes and its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from dropforge_local.base.ports import free_port
from dropforge_local.base.server import BackgroundServer

from .conftest import IMAGE, PARENT, Cloud, State, build, wait_for

IDLE = "#!/bin/sh\necho booted\n"
DISK = """
    #!/bin/sh
    set -eu
    device=$DROPFORGE_ROOT/dev/disk/by-id/google-persistent-disk-1
    mkdir -p "$DROPFORGE_ROOT/mnt/data"
    mountpoint -q "$DROPFORGE_ROOT/mnt/data" && echo still mounted
    blkid --probe "$device" || mkfs.ext4 -q "$device"
    mount -o discard "$device" "$DROPFORGE_ROOT/mnt/data"
    echo boot >>"$DROPFORGE_ROOT/mnt/data/boots"
    echo "boots: $(wc -l <"$DROPFORGE_ROOT/mnt/data/boots")"
"""
# Without the trap, SIGTERM would end the script and the machine before the container writes its last line.
CONTAINER = f"""
    #!/bin/sh
    trap : TERM
    mkdir -p "$DROPFORGE_ROOT/work"
    printf token | docker login --username oauth2accesstoken --password-stdin https://us-west1-docker.pkg.dev
    export GREETING=good-day
    docker run --rm --name one --privileged --network host --env GREETING --env WORK=/work \\
        --volume "$DROPFORGE_ROOT/work:/work" {IMAGE} "$(curl -s -H 'Metadata-Flavor: Google' \\
        "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/seconds")" 3
    echo "ended with $?; trace $(cat "$DROPFORGE_ROOT/work/trace")"
"""
METADATA = """
    #!/bin/sh
    get() { curl --silent -H "Metadata-Flavor: Google" "http://$GCE_METADATA_HOST/computeMetadata/v1/$1"; echo; }
    for path in instance/name instance/zone instance/attributes/ instance/service-accounts/default/token \\
        project/project-id "instance/attributes/?recursive=true" instance/preempted; do
        printf '%s: %s\\n' "$path" "$(get "$path")"
    done
    curl --silent "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/name" --write-out ' %{http_code}\\n'
    curl --silent --fail -H "Metadata-Flavor: Google" "http://$GCE_METADATA_HOST/computeMetadata/v1/nothing"
    echo "nothing: $?"
"""


def test_the_metadata_describe_the_machine(cloud: Cloud) -> None:
    cloud.ready(script=METADATA, metadata={"dropforge-run": "r1"})
    lines = dict(line.split(": ", 1) for line in cloud.wait_for_line("nothing: 22").splitlines() if ": " in line)
    assert lines["instance/name"] == "n1"
    assert lines["instance/zone"].endswith("/zones/us-west1-c")
    assert lines["instance/preempted"] == "FALSE"
    assert lines["project/project-id"] == "p1"
    assert json.loads(lines["instance/service-accounts/default/token"])["access_token"] == "token-of-cloud-platform"
    attributes = json.loads(lines["instance/attributes/?recursive=true"])
    assert (attributes["dropforge-run"], attributes["accelerator-type"]) == ("r1", "v5litepod-8")
    assert "Missing required header: Metadata-Flavor: Google" in cloud.serial()
    assert " 403" in cloud.serial()


def test_googles_library_uses_the_metadata_server(cloud: Cloud) -> None:
    script = """
        #!/bin/sh
        exec "$DROPFORGE_SANDBOX_PYTHON" -c '
        import google.auth, google.auth.transport.requests
        credentials, project = google.auth.default()
        credentials.refresh(google.auth.transport.requests.Request())
        print("found", project, credentials.token, credentials.service_account_email)'
    """
    cloud.ready(
        script=script.replace("\n        ", "\n"), service_account={"email": "trainer@p1.iam.gserviceaccount.com"}
    )
    cloud.wait_for_line("found p1 token-of-cloud-platform trainer@p1.iam.gserviceaccount.com")


def test_a_waiting_request_reports_the_preemption(cloud: Cloud) -> None:
    """The metadata say it, and no signal does: systemd signals only the program that runs the script."""
    waiting = """
        #!/bin/bash
        trap 'echo got SIGTERM' TERM
        url=http://$GCE_METADATA_HOST/computeMetadata/v1/instance/preempted
        get() { curl --silent --max-time 60 -H "Metadata-Flavor: Google" "$@"; }
        tag=$(get --dump-header - "$url" | sed -n 's/^[Ee][Tt]ag: \\([0-9a-f]*\\).*/\\1/p')
        (trap '' TERM; get "$url?wait_for_change=true&last_etag=$tag") &
        echo "ready $tag"; wait; wait; echo
    """
    cloud.ready(script=waiting, scheduling_config={"spot": True})
    cloud.wait_for_line("ready")
    cloud.faults(preempt="n1")
    wait_for(lambda: cloud.node().state == State.PREEMPTED and not cloud.processes())
    assert "got SIGTERM" not in cloud.serial()
    assert "TRUE" in cloud.serial()
    cloud.delete()


def test_a_disk_survives_reboots_and_its_machine(cloud: Cloud) -> None:
    disk = cloud.disk("d1")
    cloud.ready(script=DISK, data_disks=[{"source_disk": disk}])
    cloud.wait_for_line("boots: 1")
    cloud.faults(reboot="n1")
    cloud.wait_for_line("boots: 2")
    cloud.faults(maintenance="n1")
    cloud.wait_for_line("boots: 3")
    wait_for(lambda: cloud.node().state == State.READY)
    cloud.delete()
    cloud.ready("n2", script=DISK, data_disks=[{"source_disk": disk}])
    assert "still mounted" not in cloud.wait_for_line("boots: 4", "n2")


def test_docker_runs_the_repositorys_images(cloud: Cloud) -> None:
    cloud.ready(script=CONTAINER, metadata={"seconds": "0.1"})
    serial = cloud.wait_for_line("ended with 3; trace x")
    assert "Login Succeeded" in serial
    assert "napping with good-day in" in serial


def test_a_container_ends_with_its_machine(cloud: Cloud) -> None:
    cloud.ready(script=CONTAINER, metadata={"seconds": "60"})
    cloud.wait_for_line("napping")
    cloud.delete()
    assert "polite" in cloud.serial()
    assert not cloud.processes()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a loopback address for every machine")
def test_two_machines_serve_at_the_same_port(cloud: Cloud) -> None:
    port = free_port(range(24000, 30000), set())
    script = f"#!/bin/sh\ndocker run --rm --network host --env PORT={port} {IMAGE}\n"
    addresses = {cloud.ready(name, script).network_endpoints[0].ip_address for name in ("n1", "n2")}
    assert len(addresses) == 2
    for address in sorted(addresses):
        wait_for(partial(is_served, f"http://{address}:{port}/"))


def is_served(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60):
            return True
    except OSError:
        return False


def test_docker_refuses_unsupported_options(cloud: Cloud) -> None:
    script = f"""
        #!/bin/sh
        docker pull x/unknown:v1; echo "pull: $?"
        docker run --detach {IMAGE}; echo "detach: $?"
        docker run --rm --volume work:/work {IMAGE}; echo "volume: $?"
        docker pull x/nap@sha256:{"0" * 64}; echo "digest: $?"
        docker rm nothing; echo "rm: $?"
    """
    cloud.ready(script=script)
    serial = cloud.wait_for_line("rm: ")
    for line in ("manifest unknown", "pull: 125", "volume: 125", "digest: 125", "rm: 125", "--detach"):
        assert line in serial


def test_a_machine_continues_without_the_stack(home: Path) -> None:
    with BackgroundServer(lambda: build(home)) as server:
        first = Cloud(server, home)
        first.ready(script=CONTAINER, metadata={"seconds": "1.5"})
        first.wait_for_line("napping")
        pids = first.processes()
        for channel in first.channels:
            channel.close()
    time.sleep(1)  # without a stack, the container naps on
    with BackgroundServer(lambda: build(home)) as server:
        second = Cloud(server, home)
        second.wait_for_line("ended with 3; trace x")
        assert {min(left) for left in second.processes().values()} == {min(left) for left in pids.values()}
        second.rest.delete_node(name=f"{PARENT}/nodes/n1").result(timeout=60)


def test_a_crashed_machine_boots_again(cloud: Cloud) -> None:
    cloud.ready(script=IDLE)
    cloud.wait_for_line("booted")
    for pids in cloud.processes().values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    cloud.wait_for_line("booted", count=2)
    wait_for(lambda: cloud.node().state == State.READY)


def test_stop_and_start(cloud: Cloud) -> None:
    name = cloud.ready(script=IDLE).name
    cloud.wait_for_line("booted")
    assert cloud.tpu.stop_node({"name": name}).result(timeout=60).state == State.STOPPED
    assert not cloud.processes()
    assert cloud.tpu.start_node({"name": name}).result(timeout=60).state == State.READY
    cloud.wait_for_line("booted", count=2)


def test_the_metadata_server_ends_with_its_node(cloud: Cloud) -> None:
    cloud.ready(script='#!/bin/sh\necho "host $GCE_METADATA_HOST"\n')
    host = cloud.wait_for_line("host ").partition("host ")[2].splitlines()[0]
    with urllib.request.urlopen(f"http://{host}/", timeout=60) as answer:
        assert answer.headers["Metadata-Flavor"] == "Google"
    cloud.delete()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"http://{host}/", timeout=60)
