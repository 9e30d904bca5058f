"""Imports the modules of containers in the process that forks them (forked.py)."""

import gc
import importlib

from containers.train_trl.train import quiet_libraries

from .forked import MODULES

quiet_libraries()  # as a training container: otherwise bitsandbytes imports a compiler
for name in MODULES:
    importlib.import_module(name)
# A training collects garbage before and after each model. No collection visits the objects of these modules.
gc.collect()
gc.freeze()
