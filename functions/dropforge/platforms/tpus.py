"""The prices of TPU chips. Each platform names its generations in its own way; the prices are the same."""

from __future__ import annotations

from datetime import date

from .prices import HourlyPrice, Price

# Of one chip with its share of the host. The prices of 31 August are from a copy of the Cloud Billing catalog of that
# day (SkyPilot's, schema 8). Its Spot prices are left out, because they have risen since.
_CATALOG = date(2026, 8, 31)
_PAGE = "https://cloud.google.com/tpu/pricing"
_SPOT = "https://cloud.google.com/spot-vms/pricing"
_V6E_US = ("us-central1", "us-east1", "us-east4", "us-east5", "us-south1", "us-west1")
_V5E_US = ("us-central1", "us-east1", "us-east4", "us-east5", "us-west1", "us-west4")
TPU_PRICES = {
    ("v5e", "on_demand"): (
        Price(1.20, _V5E_US, date(2026, 9, 27), _PAGE),
        Price(1.416, ("us-south1",), _CATALOG, _PAGE),
        Price(1.56, ("asia-southeast1", "europe-west4"), _CATALOG, _PAGE),
        Price(1.32132, ("europe-west1",), _CATALOG, _PAGE),
    ),
    ("v5p", "on_demand"): (Price(4.20, ("us-central1", "us-east1", "us-east5"), _CATALOG, _PAGE),),
    ("v6e", "on_demand"): (
        Price(2.70, _V6E_US, _CATALOG, _PAGE),
        Price(2.97, ("asia-southeast1", "europe-west4"), _CATALOG, _PAGE),
        Price(3.24, ("asia-northeast1", "asia-south1"), _CATALOG, _PAGE),
    ),
    ("v6e", "flex_start"): (Price(1.35, ("us-east5",), date(2026, 8, 1), _PAGE),),
}


def tpu_price(generation: str, chips: int, region: str, capacity: str, field: str) -> HourlyPrice:
    """The hourly price of `chips` chips, bought as `capacity` says; `field` of the spec is the mend if it is unknown.

    Spot is counted at the price on demand, which is its upper limit: Google changes Spot prices every day.
    Reservations and guaranteed capacity cost the list price.
    """
    kind = capacity if capacity == "flex_start" else "on_demand"
    for price in TPU_PRICES.get((generation, kind), ()):
        if region in price.regions:
            note = f"; Spot costs at most this price on demand ({_SPOT})" if capacity == "spot" else ""
            return HourlyPrice(round(price.usd_per_hour * chips, 4), price.as_of, price.source + note)
    where = f"TPU {generation} in {region} as {capacity}"
    return HourlyPrice(None, None, f"no price for {where} in the catalog; set {field}")
