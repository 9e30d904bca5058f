"""Seeded chaos: the real functions and the real workflow, against a simulated cloud, under one virtual clock.

`simulation.run(seed)` gives a `History` of what could be seen from outside; `checker.check(history)` reads nothing else
and says which promises were broken. The same seed always gives the same history. See docs/chaos.md.
"""
