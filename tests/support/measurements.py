"""Measurements that take long on some machines, kept short for tests."""

from pathlib import Path

from moepack.bench import machine


def shorten() -> None:
    """Measure memory with the shortest buffer from now on.

    It is eight times as long as all caches: gigabytes on some machines, walked over in each of
    dozens of tests. A machine that does not say what caches it has is measured as well.
    """
    machine._CPUS = Path("/no/caches")
