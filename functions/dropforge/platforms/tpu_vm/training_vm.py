"""Serving `training_vm`: vLLM's TPU build on the TPU VM that trained the model.

This module creates nothing. The machine's metadata say from the start that the machine will serve (train.py). Its
startup script reports the end of training, waits until the run's record says DEPLOYING, and starts the server.

XLA's programs stay on the data disk and are not kept in the bucket: the endpoint never has a second machine, and the
server runs as the trainer, whose access reaches no compiled code (stages/access.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import tpu
from dropforge.cloud.classify import classify, client_errors
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed
from dropforge.cloud.resource import Resource
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Launch, Phase
from dropforge.spec import JobSpec

from . import train as tpu_vm
from .serve import TpuVmServer


class TrainingVm(TpuVmServer):
    """See `Server` for the contract of each verb."""

    def region(self, deployment: Deployment) -> str:
        return tpu_vm.TpuVms().regions(deployment.spec)[_trained(deployment).placement]

    def price(self, spec: JobSpec, placement: int | None = None) -> HourlyPrice:
        target = tpu_vm.TpuVms()
        if placement is not None:
            return target.price(spec, placement)
        prices = [target.price(spec, index) for index in range(len(target.regions(spec)))]
        return max(prices, key=lambda price: math.inf if price.usd_per_hour is None else price.usd_per_hour)

    def resources(self, deployment: Deployment) -> list[Resource]:
        """The resources of the training, the disk last: the first resource stands for the endpoint."""
        disk, *machine = tpu_vm.TpuVms().resources(_trained(deployment))
        return [*machine, disk]

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """Nothing: `tpu_vm` lists all machines."""
        yield from ()

    def machine(self, deployment: Deployment) -> tpu.Machine:
        return tpu_vm.machine(_trained(deployment))

    def ensure(self, cloud: Cloud, wanted: tpu.Machine) -> bool:
        try:
            status = tpu_vm.status_of(*tpu.find_machine(cloud, wanted), wanted)
        except client_errors() as error:
            raise classify(error) from error
        if status.phase is Phase.GONE:
            message = f"{status.message}: the machine that trained should serve"
            raise CloudError(
                ErrorClass.INFRASTRUCTURE, message, "drop the spec again, or serve on a machine of its own"
            )
        return True


def _trained(deployment: Deployment) -> Launch:
    assert deployment.trained is not None, "a run is deployed only after it has trained"
    return deployment.trained
