"""Seeded chaos: the real functions and the real workflow, against a simulated cloud, under one virtual clock.

`simulation.run(seed)` returns a `History` of everything that is visible from outside. `checker.check(history)` reads
only the history and reports broken promises. The same seed always gives the same history. See docs/chaos.md.
"""
