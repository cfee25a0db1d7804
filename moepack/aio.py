"""The door for asyncio programs: `import moepack.aio`, then `moepack.aio.Reader`."""

from moepack.pack.reading.aio import AsyncReader as Reader
from moepack.storage import probe  # now, since a reader that needs it is made while the loop runs

__all__ = ["Reader"]

del probe
