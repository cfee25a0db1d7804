"""Measurements and pauses that take long, kept short for tests."""

from datetime import timedelta
from pathlib import Path

from moepack.bench import machine
from moepack.storage.remote import stores


def shorten() -> None:
    """Measure memory with the shortest buffer from now on, and ask stores again at once.

    The buffer is eight times as long as all caches: gigabytes on some machines, walked over in each
    of dozens of tests. A machine that does not say what caches it has is measured as well.
    """
    machine._CPUS = Path("/no/caches")
    stores.BACKOFF["init_backoff"] = timedelta(milliseconds=1)
    stores.BACKOFF["max_backoff"] = timedelta(milliseconds=8)
