"""A durable Google Cloud Workflows engine; knows nothing of dropforge and imports nothing of it."""
