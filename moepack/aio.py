"""The door for asyncio programs: `import moepack.aio`, then `moepack.aio.Reader`."""

from moepack.reading.aio import AsyncReader as Reader

__all__ = ["Reader"]
