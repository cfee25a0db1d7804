"""A model's GGUF in memory that has no name: the dense part, and nothing where experts belong.

A GGUF on disk in which experts are missing must never be: llama.cpp loads it without a word, and
answers nonsense. This one is gone with its process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Self

from moepack.engines.gguf_layout import GgufLayout

if TYPE_CHECKING:
    from moepack.reading.reader import Reader

_NAME = "moepack-model"


class ModelImage:
    """The header and the dense tensors of a model, laid out as `layout` says. A context manager.

    It takes memory for those alone. Until `cut` it is as long as the layout: llama.cpp holds all
    tensors against the length of the file that it opens. Raises what reading dense tensors raises,
    and OSError.
    """

    def __init__(self, layout: GgufLayout, reader: Reader) -> None:
        self._layout = layout
        self.descriptor = _anonymous_file()
        try:
            os.ftruncate(self.descriptor, layout.length)
            self._fill(reader)
        except BaseException:
            self.close()
            raise

    def _fill(self, reader: Reader) -> None:
        layout = self._layout
        mapping = mmap.mmap(self.descriptor, layout.experts_offset)
        with memoryview(mapping) as memory:
            memory[: len(layout.header)] = layout.header
            for tensor in layout.dense:
                if tensor.length:
                    (extent,) = tensor.extents
                    with memory[extent.offset : extent.end] as place:
                        reader.read_dense_into(place, tensor.name)
        mapping.close()  # not after an error: its traceback holds views, and would be lost

    @property
    def path(self) -> str:
        """What this process can open it by."""
        return f"/proc/self/fd/{self.descriptor}"

    def cut(self) -> None:
        """Cut it off where experts begin: what maps it now fills no memory with zeros for them."""
        os.ftruncate(self.descriptor, self._layout.experts_offset)

    def mapped(self) -> tuple[int, int] | None:
        """Return at which address its first byte is mapped, and up to which of its bytes it is.

        None where it is not mapped. The first byte's page may be unmapped again: the address is
        where it was. The source is the table of mappings of proc(5).
        """
        held = os.fstat(self.descriptor)
        address = end = None
        with open("/proc/self/maps", "rb") as maps:  # names in it need not be UTF-8
            for line in maps:
                addresses, _, offset, device, inode, *_ = line.split()
                if int(inode) == held.st_ino and _is_device(device, held.st_dev):
                    first, last = (int(text, 16) for text in addresses.split(b"-"))
                    address = first - int(offset, 16) if address is None else address
                    end = last - address
        return None if address is None or end is None else (address, end)

    def close(self) -> None:
        """Forget it; what is mapped stays until it is unmapped."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _is_device(text: bytes, device: int) -> bool:
    """Compare a device as that table writes it."""
    major, minor = (int(number, 16) for number in text.split(b":"))
    return (major, minor) == (os.major(device), os.minor(device))


def _anonymous_file() -> int:
    """Open a file in memory without a name; where there is none of these, one that is removed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
