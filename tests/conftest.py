"""Fixtures and hooks for the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings

from .gcloud import Gcloud, RunGcloud
from .stack.zygote import Zygote
from .untested import untested_targets

ROOT = Path(__file__).resolve().parent.parent
IMPOSSIBLE = 3  # the exit code of a tool whose environment this machine cannot have
FIRST_PORT, PORTS, WORKERS = 10100, 600, 8  # the ports of each worker's stacks, below those of the emulated machines
GARBAGE_OBJECTS = 10_000  # between two collections of garbage; Python's own 700 cost a tenth of the processor time
# Open files and sockets of this process after a test; `select`, which the Kubernetes client calls, takes 1,023.
MANY_DESCRIPTORS, MOST_DESCRIPTORS = 200, 400
MAKERS = pytest.StashKey[dict[str, "Maker"]]()
COLLECTED = pytest.StashKey[frozenset[str]]()  # the names of the modules that the collection imported
TOOLS = {  # by the fixture
    "maxtext_environment": "maxtext_env.py",
    "vllm_environment": "vllm_env.py",
    "docs_environment": "docs_env.py",
}
ENGINES = {"maxtext_environment", "vllm_environment"}  # a test that needs one belongs to `make test-engines`

# Neither the speed of the machine nor chance decides a test: no time for an example, and the same examples in each run.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# A judge of a mutant asks only whether a test fails: to look for the shortest failing example takes ten times as long.
settings.register_profile("judge", settings.get_profile("suite"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests run: nothing that their collection makes is garbage
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the Hub, which may answer slowly or not at all
    # After a 404, a storage client asks for its bucket in a thread, which may outlast the test and its server.
    os.environ["DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"] = "true"
    # The tiny base models are trained once for all tests.
    os.environ.setdefault("DROPFORGE_CACHE", str(ROOT / "build" / "tiny"))
    # PyTorch's threads spin while one of them waits for a core: on two busy cores a training took ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        from .scheduling import NICENESS

        # A test kills its stack and starts it at the same ports: no stack of another worker may take them meanwhile.
        first = FIRST_PORT + int(worker.removeprefix("gw")) % WORKERS * PORTS
        os.environ["DROPFORGE_STACK_PORTS"] = f"{first}-{first + PORTS - 1}"
        os.nice(NICENESS.get(worker, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the project's scheduler if xdist divides the suite by files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from .scheduling import Scheduling

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINES & set(getattr(item, "fixturenames", ())):
            item.add_marker("engines")


@pytest.hookimpl
def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[COLLECTED] = frozenset(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the installation of the environments that tests need while the first tests run."""
    # The 450,000 objects of modules and tests live as long as the process: no collection of garbage visits them again.
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    gc.enable()
    for fixture in TOOLS:
        if any(fixture in getattr(item, "fixturenames", ()) for item in session.items):
            start_maker(session.config, fixture)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Close what tests have left to the garbage: it is collected too rarely (`GARBAGE_OBJECTS`) for descriptors."""
    yield
    if descriptors() > MANY_DESCRIPTORS:
        gc.collect()
        assert descriptors() <= MOST_DESCRIPTORS, f"{descriptors()} files and sockets are open after {item.nodeid}"


def descriptors() -> int:
    return int(psutil.Process().num_fds())


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own summary: the line comes last
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    skipped = terminalreporter.stats.get("skipped", ())
    if line := untested_targets(str(report.longrepr) for report in skipped):
        terminalreporter.write_line(line, yellow=True)


def start_maker(config: pytest.Config, fixture: str) -> Maker:
    makers = config.stash.setdefault(MAKERS, {})
    if fixture not in makers:
        makers[fixture] = Maker(TOOLS[fixture])
        config.add_cleanup(makers[fixture].stop)
    return makers[fixture]


class Maker:
    """Runs a tool that creates an environment as a process."""

    def __init__(self, tool: str) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe would fill up until wait() reads it)
        command = [sys.executable, "-P", str(ROOT / "tools" / tool)]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._output, start_new_session=True)

    def wait(self) -> tuple[int, str]:
        """Return the exit code and the output."""
        code = self._process.wait()
        self._output.seek(0)
        return code, self._output.read().strip()

    def stop(self) -> None:
        if self._process.poll() is None:  # no test has called wait()
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        self._output.close()


@pytest.fixture(scope="session")
def maxtext_environment(pytestconfig: pytest.Config) -> Path:
    """Return build/maxtext, which has MaxText and Ray in the versions of their lock file.

    Skip the test if the machine has no Python 3.12.
    """
    return made(pytestconfig, "maxtext_environment")


@pytest.fixture(scope="session")
def vllm_environment(pytestconfig: pytest.Config) -> Path:
    """Return build/vllm, which has vLLM's CPU build in the version of its lock file.

    Skip the test if the machine is no Linux on x86-64 with Python 3.11.
    """
    return made(pytestconfig, "vllm_environment")


@pytest.fixture(scope="session")
def docs_environment(pytestconfig: pytest.Config) -> Path:
    """Return build/docs, which has MkDocs in the version of its lock file."""
    return made(pytestconfig, "docs_environment")


@pytest.fixture(scope="session")
def run_gcloud() -> Iterator[RunGcloud]:
    """Yield a function that runs the installed gcloud."""
    with closing(Gcloud()) as gcloud:
        yield gcloud.run


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Yield the process that forks the stacks; its imports take as long as the start of a stack."""
    with closing(Zygote()) as zygote:
        yield zygote


def made(config: pytest.Config, fixture: str) -> Path:
    """Wait for the environment of a fixture. Skip the test if this machine cannot have it."""
    code, output = start_maker(config, fixture).wait()
    if code == IMPOSSIBLE:
        pytest.skip(output)
    assert code == 0, output
    return Path(output.splitlines()[-1]).parent.parent
