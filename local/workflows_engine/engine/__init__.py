"""Makes executions durable: commits what machines did, then performs their effects."""
