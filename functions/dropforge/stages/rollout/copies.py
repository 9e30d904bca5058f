"""The copies of models of other deployments: a rollout makes its own copy, and deletes the copies that nobody needs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.classify import classify, client_errors
from dropforge.context import Context
from dropforge.endpoints.record import Rollout
from dropforge.run.artifacts import write_manifest
from dropforge.run.origin import Copied, copy_files, copy_of, delete_copy, read_origin

from .elsewhere import rights

SHARE = timedelta(seconds=120)  # of a call, before its last request; a function may take 540 s


def advance(context: Context, mine: Rollout) -> Copied | None:
    """Copy the model of a rollout for some time; None once it is committed here.

    Raises NotFound and Malformed if the other deployment does not have the model any more that was requested,
    CloudError.
    """
    client, bucket, run = context.cloud.clients.storage(), context.settings.runs_bucket, mine.run
    origin, until = read_origin(context.store, run), context.now() + SHARE
    try:
        copied = copy_files(client, bucket, run, origin, mine.copied, lambda: context.now() >= until)
        if copied is None:
            write_manifest(client, bucket, copy_of(client, bucket, run, origin), context.store.key(run))
            size = sum(file.size for file in origin.manifest.files)
            context.log("copied a model", stage="rollout", run=run, origin=origin.uri, bytes=size)
    except client_errors() as error:
        found = classify(error)
        if found.error_class is ErrorClass.PERMISSION:
            raise CloudError(found.error_class, found.message, rights(origin.bucket)) from error
        raise found from error
    return copied


def drop(context: Context, runs: Iterable[str]) -> None:
    """Delete the copied models of these runs. Raises CloudError."""
    client, bucket = context.cloud.clients.storage(), context.settings.runs_bucket
    for run in runs:
        try:
            delete_copy(client, bucket, run)
        except client_errors() as error:
            raise classify(error) from error
