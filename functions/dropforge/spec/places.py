"""The regions of Google Cloud."""

from __future__ import annotations

# https://cloud.google.com/compute/docs/regions-zones (2026-11-29). us-central2 has only TPUs:
# https://cloud.google.com/tpu/docs/regions-zones. A region that is newer is accepted, too.
_LIST = """
africa-south1 asia-east1 asia-east2 asia-northeast1 asia-northeast2 asia-northeast3 asia-south1 asia-south2
asia-southeast1 asia-southeast2 asia-southeast3 australia-southeast1 australia-southeast2 europe-central2
europe-north1 europe-north2 europe-southwest1 europe-west1 europe-west10 europe-west12 europe-west2 europe-west3
europe-west4 europe-west6 europe-west8 europe-west9 me-central1 me-central2 me-west1 northamerica-northeast1
northamerica-northeast2 northamerica-south1 southamerica-east1 southamerica-west1 us-central1 us-central2 us-east1
us-east4 us-east5 us-south1 us-west1 us-west2 us-west3 us-west4
"""
REGIONS = tuple(_LIST.split())
