"""Platform `cloud_run`: Cloud Run jobs train, Cloud Run services serve."""

from __future__ import annotations

from dropforge.platforms.platform import Permission, Platform, Serving, Training

from .spec import CloudRunServe, CloudRunTarget

PLATFORM = Platform(
    name="cloud_run",
    training=Training(
        spec=CloudRunTarget,
        adapter="dropforge.platforms.cloud_run.train:CloudRunJobs",
        kinds=("run.googleapis.com/Job",),
        needs=("train_trl_image",),
        permissions=(Permission("provision", "project", "run.jobs.create"),),
        smoke_shows=(
            ("startup-probe", "endpoint-answers"),
            ("cuda-training", "accelerator-seen"),
            ("cuda-serving", "endpoint-answers"),
            ("streamed-weights", "endpoint-answers"),
            ("deleted-job", "cancel-ends"),
        ),
    ),
    serving=(
        Serving(
            spec=CloudRunServe,
            adapter="dropforge.platforms.cloud_run.serve:CloudRunService",
            named="dropforge.platforms.cloud_run.named:NamedService",
            kinds=("run.googleapis.com/Service",),
            permissions=(
                Permission("deploy", "server_account", "iam.serviceAccounts.actAs"),
                Permission("deploy", "project", "run.services.create"),
            ),
        ),
    ),
)
