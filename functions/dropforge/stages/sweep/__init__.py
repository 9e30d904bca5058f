"""Stage `sweep`: orphans in the cloud, and work that was lost."""
