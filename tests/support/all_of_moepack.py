"""Loads all of moepack that this machine can load, for the forks of the process that imports it."""

import importlib
import pkgutil
from contextlib import suppress

import moepack
from tests.support import measurements

_MODULES = [
    *(module.name for module in pkgutil.walk_packages(moepack.__path__, "moepack.")),
    "matplotlib.pyplot",  # which moepack loads when it draws, and which takes as long as all else
]

for _name in _MODULES:
    if not _name.endswith("__main__"):
        # A command that needs what is not there says so itself, as libraries do in many ways:
        # mfusepy by an OSError.
        with suppress(Exception):
            importlib.import_module(_name)

measurements.shorten()
