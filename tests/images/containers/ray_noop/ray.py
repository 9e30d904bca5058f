#!/usr/bin/env python
"""A Ray without actors and objects, which starts in a tenth of a second where Ray takes ten: `ray start --block`, the
agent's health, and the part of the Jobs API that KubeRay and `ray job` ask for, with Ray's own
words.

tests/emulators/kubernetes/test_ray.py holds it to what Ray itself does.
"""

import hmac
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STOP_SECONDS = float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3"))
LOG_CHARACTERS = 20_000


class Job:
    """An entrypoint that runs, or ran."""

    def __init__(self, request: dict[str, str]) -> None:
        self.info: dict[str, object] = {name: request[name] for name in ("submission_id", "entrypoint")}
        self.info |= {
            "type": "SUBMISSION",
            "status": "RUNNING",
            "message": "Job is currently running.",
            "start_time": milliseconds(),
        }
        self.stopped = False
        self.process = subprocess.Popen(
            request["entrypoint"],
            shell=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        output = self.process.communicate()[0]
        code = self.process.returncode
        if self.stopped:
            status, message = "STOPPED", "Job was intentionally stopped."
        elif code == 0:
            status, message = "SUCCEEDED", "Job finished successfully."
        else:
            end = f"last available logs (truncated to 20,000 chars):\n{output[-LOG_CHARACTERS:]}"
            tail = f", {end}" if output else ". No logs available."
            status, message = "FAILED", f"Job entrypoint command failed with exit code {code}{tail}"
        self.info |= {"status": status, "message": message, "end_time": milliseconds(), "driver_exit_code": code}

    def stop(self) -> None:
        self.stopped = True
        threading.Thread(target=self.end, daemon=True).start()

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(STOP_SECONDS)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def milliseconds() -> int:
    return int(time.time() * 1000)


jobs: dict[str, Job] = {}
lock = threading.Lock()


class Api(BaseHTTPRequestHandler):
    """The head's dashboard and every node's agent: https://docs.ray.io/en/latest/cluster/running-applications/
    job-submission/api.html"""

    def do_GET(self) -> None:
        if self.path == "/api/healthz":  # the health checks need no token
            self.answer(200, b"raylet: success\ngcs: success")
        elif self.path in ("/api/local_raylet_healthz", "/api/gcs_healthz"):
            self.answer(200, b"success")
        elif not self.may():
            return
        elif self.path == "/api/version":
            self.answer(200, b'{"version": "4", "ray_version": "2.60.0"}')
        elif self.path == "/api/jobs/":
            self.answer(200, json.dumps([job.info for job in jobs.values()]).encode())
        elif self.path.startswith("/api/jobs/"):
            job = jobs.get(self.path.removeprefix("/api/jobs/"))
            self.answer(200, json.dumps(job.info).encode()) if job else self.answer(404, b"does not exist")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.may():
            return
        path = self.path.removeprefix("/api/jobs/")
        with lock:
            if not path and (name := (request := json.loads(body))["submission_id"]) not in jobs:
                jobs[name] = Job(request)
                self.answer(200, json.dumps({"job_id": name, "submission_id": name}).encode())
            elif not path:
                self.answer(500, f"Job with submission_id {name} already exists.".encode())
            elif job := jobs.get(path.removesuffix("/stop")):
                running = job.info["status"] == "RUNNING"
                if running:
                    job.stop()
                self.answer(200, json.dumps({"stopped": running}).encode())
            else:
                self.answer(404, b"does not exist")

    def may(self) -> bool:
        """With a token, every request but the health's bears it."""
        expected = f"Bearer {os.environ.get('RAY_AUTH_TOKEN', '')}"
        allowed = os.environ.get("RAY_AUTH_MODE") != "token" or hmac.compare_digest(
            self.headers.get("Authorization", ""), expected
        )
        if not allowed:
            self.answer(401, b"Unauthorized")
        return allowed

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...


def main() -> None:
    options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[2:])
    ports = ["dashboard-agent-listen-port", *(["dashboard-port"] if "head" in options else [])]
    servers = [ThreadingHTTPServer(("127.0.0.1", int(options[port])), Api) for port in ports]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("Ray runtime started", flush=True)
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()


if __name__ == "__main__":
    main()
