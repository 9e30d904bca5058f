"""What every package uses: names, settings, errors, clock, threads, log and redaction. Imports no other package."""
