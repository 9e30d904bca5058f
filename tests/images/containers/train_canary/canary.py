"""A trainer that does with its secrets all that it should not, by the real ones' ways in and out: prints them and, if
the label `behave` of its spec is fail-once, fails with them in its message before it succeeds at the second attempt. If
the label is quote-a-row, it fails as a library does that quotes a training row."""

import base64
import json
import logging
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from urllib.parse import quote

from containers.common.job import Job
from containers.common.outcome import Outcome, outcome_of
from containers.common.redactor import Redactor
from containers.common.report import Reporter
from containers.common.stop import StopRequest
from dropforge.cloud.clients import Clients
from dropforge.cloud.container_secrets import load_secrets
from dropforge.run.proof import with_proof
from dropforge.spec import parse_spec

SEEN_SECONDS = 1.5  # so that whoever looks at processes finds this one


def main() -> int:
    job, redact, stop, clients = Job.from_environment(), Redactor(), StopRequest(), Clients()
    reporter = Reporter(job, redact, clients)
    try:
        outcome = outcome_of(lambda: run(job, clients, reporter, redact), job, stop, redact)
        reporter.ended(outcome)
        return outcome.exit_code
    finally:
        reporter.close()


def run(job: Job, clients: Clients, reporter: Reporter, redact: Redactor) -> Outcome:
    load_secrets(clients, os.environ)
    bucket = clients.storage().bucket(job.bucket)
    spec = parse_spec(json.dumps(clients.run_spec()).encode())
    redact.learn(spec.secrets)
    redact.guard_output()
    reporter.started(0, "cpu")
    values = [os.environ[name] for name in spec.secrets]
    for value in values:
        betray(value)
    time.sleep(SEEN_SECONDS)
    if job.attempt == 1 and spec.labels.get("behave") == "fail-once":
        # What passes by itself: the attempt is tried again.
        raise ConnectionError(f"refused: {values!r}, {' '.join(map(quote, values))}")
    if spec.labels.get("behave") == "quote-a-row":
        raise ValueError("could not collate {'prompt': 'RowCanary51c', 'completion': 'RowCanary51c'}")
    manifest = {
        "run": job.run,
        "attempt": job.attempt,
        "created": datetime.now(UTC).isoformat(),
        "base": {"uri": "noop", "revision": "main"},
        "dataset": {"uri": "noop", "revision": "main"},
        "spec_sha256": "0" * 64,
        "serve_path": f"attempt-{job.attempt}/model",
        "metrics": {"loss": 0.1},
        "files": [],
    }
    name = f"models/{job.run}/MANIFEST.json"
    bucket.blob(name).upload_from_string(with_proof(job.key, name, manifest), if_generation_match=0)
    return Outcome.done()


def betray(value: str) -> None:
    print("the token is", value)
    print(f"https://user:{quote(value, safe='')}@example.org/", file=sys.stderr)
    print(json.dumps({"token": value}), repr(value), base64.b64encode(value.encode()).decode(), flush=True)
    logging.warning("logged in with %s", value)
    subprocess.run([sys.executable, "-P", "-S", "-c", "import os; print(dict(os.environ))"], check=True)


if __name__ == "__main__":
    sys.exit(main())
