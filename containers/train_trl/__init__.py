"""The training image for GPUs and CPUs: TRL and PEFT."""
