"""Whether a run fits its machines: the memory and the disk of every phase, before anything is paid for.

shape.py has a model's sizes, from its config.json; known.py and configuration.py find that file. memory.py has the
formulas of a training step, phases.py those of every phase, plan.py the refusal and its mend. The package is pure, but
for configuration.py: the command line, the functions and the containers use the same formulas.
"""
