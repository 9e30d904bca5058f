"""Run pytest, and run each test that failed once more, alone: `python tools/suite.py [pytest's arguments]`.

A test that passes alone is FLAKY, and the run counts as passed. The last section, which build/ci/flaky.txt keeps, has
its first failure. The next piece of work begins with the cause. Otherwise the exit code is pytest's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path("build") / "ci" / "flaky.txt"  # in the working directory, as the tests
MOST_RERUNS = 10  # with more failures, the code is wrong, not the machine


class Failures:
    """A plugin that keeps the text of each failed test (also of its fixtures, or of a crashed worker), by node id."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = [f"{title}\n{text}" for title, text in report.sections]
            text = "\n".join([f"{report.when}: {report.longreprtext}", *sections])
            self.texts[report.nodeid] = "\n".join(filter(None, [self.texts.get(report.nodeid), text]))


def main(arguments: list[str]) -> int:
    FILE.unlink(missing_ok=True)
    failures = Failures()
    code = pytest.main(arguments, plugins=[failures])
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.texts) <= MOST_RERUNS:
        return int(code)
    passed = [test for test in failures.texts if passes_alone(test)]
    if passed:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text("".join(f"FLAKY {test}\n{failures.texts[test]}\n\n" for test in passed))
        print(f"\n{' FLAKY: failed once, passed alone ':=^120}\n{FILE.read_text()}", flush=True)
    failed = [test for test in failures.texts if test not in passed]
    for test in failed:
        print(f"FAILED twice {test}", flush=True)
    return int(pytest.ExitCode.TESTS_FAILED) if failed else 0


def passes_alone(test: str) -> bool:
    """Whether a test passes in a process of its own."""
    print(f"\nonce more, alone: {test}", flush=True)
    return subprocess.run([sys.executable, "-P", "-m", "pytest", "--no-header", test]).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
