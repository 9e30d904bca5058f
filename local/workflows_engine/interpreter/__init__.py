"""Runs compiled programs: one `Machine` per execution, without clock, network or database."""
