"""What every part of the local stack shares: the clock, the database, errors, identity, ports, and the server."""
