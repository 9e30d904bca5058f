"""The rules about what training containers do: they read which objects a container wrote, and what it told.

Only lives with real containers (real_trainer.py) have such objects.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from .history import Fact, History
from .lives import TERMINAL

Problem = tuple[float, str]
_STEP = re.compile(r"checkpoints/([^/]+)/step-(\d+)/(.+)")
_BY = re.compile(r"train-(.+)-(\d+)-(?:main|checkpoint|series|job-events)-\d+")  # the name of a container's process
_DEFECTS = ("AttributeError", "TypeError", "NameError", "KeyError", "AssertionError", "IndexError")


def checkpoints_are_kept(history: History) -> Iterator[Problem]:
    """A marker comes after the files that it lists. Until its run is over, a run keeps a complete checkpoint.

    Every attempt resumes from the newest checkpoint that was complete when its container started.
    """
    files: set[str] = set()
    complete: dict[str, set[int]] = defaultdict(set)
    known: dict[tuple[str, int], int] = {}  # the newest complete step at the start of each container
    over: set[str] = set()
    for fact in history.of("write", "delete", "call", "told"):
        if fact.kind == "call" and (match := _BY.fullmatch(fact.data["instance"])):
            run, attempt = match[1], int(match[2])
            known.setdefault((run, attempt), max(complete[run], default=0))
        elif fact.kind == "told" and "resumed" in fact.data:
            run, attempt = fact.data["run"], fact.data["attempt"]
            if fact.data["resumed"] < known[run, attempt]:
                text = f"attempt {attempt} of {run} resumed at step {fact.data['resumed']}"
                yield fact.time, f"{text}; the checkpoint of step {known[run, attempt]} was complete"
        elif fact.kind == "write" and fact.data["name"].endswith("/record.json"):
            over |= {fact.data["name"].split("/")[1]} if fact.data["content"]["state"] in TERMINAL else set()
        elif fact.kind in ("write", "delete"):
            yield from _checkpoint_changed(fact, files, complete, over)


def _checkpoint_changed(
    fact: Fact, files: set[str], complete: dict[str, set[int]], over: set[str]
) -> Iterator[Problem]:
    name = fact.data["name"]
    (files.add if fact.kind == "write" else files.discard)(name)
    match = _STEP.fullmatch(name)
    if match is None or match[3] != "_COMPLETE":
        return
    run, step = match[1], int(match[2])
    if fact.kind == "delete":
        had = bool(complete[run])
        complete[run].discard(step)
        if had and not complete[run] and run not in over:
            yield fact.time, f"{run} has no complete checkpoint any more: that of step {step} was deleted"
    elif _BY.fullmatch(fact.data.get("by", "")):
        complete[run].add(step)
        prefix = name.removesuffix("_COMPLETE")
        for file in fact.data["content"]["files"]:
            if prefix + file["path"] not in files:
                yield fact.time, f"{name} was written, but {file['path']} was not uploaded"


def containers_fail_for_a_reason(history: History) -> Iterator[Problem]:
    """No fault that passes ends a run: only training that breaks fails for good. A token allows all that is asked."""
    broken = {
        (fact.data["run"], fact.data["attempt"]) for fact in history.of("fault") if fact.data["what"] == "code_error"
    }
    for fact in history.of("told", "forbidden", "container_log"):
        if fact.kind == "forbidden":
            yield fact.time, f"a container's token does not allow {fact.data['permission']} on {fact.data['resource']}"
        elif fact.kind == "container_log":
            message, is_server = fact.data["message"], fact.data["stage"] == "serve"
            if (is_server and not message.startswith("RetryError")) or any(name in message for name in _DEFECTS):
                yield fact.time, f"a container logged {message}"
        elif fact.data.get("error_class") in ("code", "permission", "config", "data"):
            run, attempt = fact.data["run"], fact.data["attempt"]
            if fact.data["error_class"] != "code" or (run, attempt) not in broken:
                yield (
                    fact.time,
                    f"attempt {attempt} of {run} failed as {fact.data['error_class']}; its training is good",
                )


def models_are_whole(history: History) -> Iterator[Problem]:
    """A manifest is written after its files, and they stay as they are."""
    files: dict[str, int] = {}
    committed: dict[str, list[str]] = {}
    for fact in history.of("write", "delete"):
        name = fact.data["name"]
        if not name.startswith("models/"):
            continue
        run = name.split("/")[1]
        if fact.kind == "write" and name.endswith("/MANIFEST.json") and _BY.fullmatch(fact.data.get("by", "")):
            committed[run] = [f"models/{run}/{file['path']}" for file in fact.data["content"]["files"]]
            missing = [file for file in committed[run] if file not in files]
            if missing:
                yield fact.time, f"{name} was written before {', '.join(missing)}"
        elif fact.kind == "write":
            files[name] = fact.data["generation"]
        else:
            files.pop(name, None)
            if name in committed.get(run, ()):
                yield fact.time, f"{name} is a file of the committed model, and was deleted"


RULES = (checkpoints_are_kept, containers_fail_for_a_reason, models_are_whole)
