"""The emulated cloud's project, buckets and topic, and the key of the runs, in all tests of containers."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "test-project"
TOPIC = f"projects/{PROJECT}/topics/job-events"
RUNS, DATA = "runs-bucket", "data-bucket"
RUN_KEY = "5" * 64
