"""A run in the runs bucket: record, ledger, events and artifacts. Imports `spec`, `cloud` and `base`."""
