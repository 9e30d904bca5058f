"""Google APIs: clients, classified errors, listings, executions, Kubernetes, TPU VMs, disks. Imports `base`."""
