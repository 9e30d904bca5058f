"""Platform `tpu_vm`: one Cloud TPU VM trains; another one, or the same one, serves."""

from __future__ import annotations

from dropforge.platforms.platform import Permission, Platform, Serving, Training, Usual

from .spec import TpuVmServe, TpuVmTarget, TrainingVmServe

PLATFORM = Platform(
    name="tpu_vm",
    training=Training(
        spec=TpuVmTarget,
        adapter="dropforge.platforms.tpu_vm.train:TpuVms",
        kinds=("tpu.googleapis.com/QueuedResource", "tpu.googleapis.com/Node", "compute.googleapis.com/Disk"),
        needs=("train_maxtext_image",),
        permissions=(Permission("provision", "tpus", "tpu.nodes.create"),),
        smoke_shows=(("tpu-rights", "run-states"), ("tpu-all-zones", "training-labels")),
        usual={
            "tpu.googleapis.com/QueuedResource": Usual(deletion=120),
            "tpu.googleapis.com/Node": Usual(deletion=120),
        },
    ),
    serving=(
        Serving(
            spec=TpuVmServe,
            adapter="dropforge.platforms.tpu_vm.serve:TpuVmServer",
            named="dropforge.platforms.tpu_vm.named:NamedTpuVms",
            kinds=("dns.googleapis.com/ResourceRecordSet",),
            permissions=(
                Permission("deploy", "server_account", "iam.serviceAccounts.actAs"),
                Permission("deploy", "tpus", "tpu.nodes.create"),
            ),
            start_seconds=480,  # for a machine, the image, the weights and the compilation
        ),
        Serving(spec=TrainingVmServe, adapter="dropforge.platforms.tpu_vm.training_vm:TrainingVm", start_seconds=240),
    ),
    services=("compute", "dns", "tpu"),
)
