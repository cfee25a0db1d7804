"""A model that llama.cpp has loaded without its experts, and the memory in which it looks for them.

llama.cpp maps the image of the model. It takes a file's length when it opens it and maps it later;
in between its log says so, and the image is cut: so it populates no page for experts. Over their
range of the mapping lies memory of ours then.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from typing import Any

from moepack.engines.gguf_layout import GgufLayout
from moepack.errors import MachineError
from moepack.llama_cpp.calls import Calls
from moepack.llama_cpp.log import ErrorLines
from moepack.llama_cpp.structs import ProgressCallback
from moepack.reading.reader import Reader
from moepack.running.expert_memory import ExpertMemory
from moepack.running.model_image import ModelImage

_BEFORE_MAPPING = "loading model tensors"
"""In the line that llama.cpp logs between opening a file and mapping it (b11549)."""
_LOAD_BY_MMAP = 1
"""LLAMA_LOAD_MODE_MMAP."""


class Loading:
    """Watches llama.cpp load an image, and cuts it in time; `stop` ends loading."""

    def __init__(self) -> None:
        self.image: ModelImage | None = None
        self.is_stopped = False

    def heard(self, line: str) -> None:
        """Take a line of the log."""
        if self.image is not None and _BEFORE_MAPPING in line:
            self.image.cut()
            self.image = None

    def stop(self) -> None:
        """End loading soon."""
        self.is_stopped = True


def load_model(
    library: Any,
    layout: GgufLayout,
    reader: Reader,
    stack: ExitStack,
    loading: Loading,
    errors: ErrorLines,
) -> tuple[int, ExpertMemory]:
    """Load a model, which `stack` frees, and lay memory over where its experts belong.

    Raises MachineError, in llama.cpp's own words where it refuses the model, and what reading dense
    tensors raises.
    """
    with ModelImage(layout, reader) as image, Calls(loading.stop) as calls:
        loading.image = image
        going = ProgressCallback(lambda *_: not loading.is_stopped)
        params = library.llama_model_default_params()
        params.progress_callback = ctypes.cast(going, ctypes.c_void_p)
        params.use_extra_bufts = False  # a copy of the experts, as they are when it is loaded
        params.load_mode = _LOAD_BY_MMAP
        name = os.fsencode(image.path)
        errors.clear()
        model = calls.run(lambda: library.llama_model_load_from_file(name, params))
        if model is None:
            raise MachineError(f"llama.cpp cannot load the model: {errors}")
        stack.callback(library.llama_model_free, model)
        mapped = image.mapped()
        if loading.image is not None or mapped is None:
            raise MachineError("llama.cpp did not map the model as it should")
        address, end = mapped
        length = min(end, layout.length) - layout.experts_offset
        return int(model), ExpertMemory(address + layout.experts_offset, length)
