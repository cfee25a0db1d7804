"""The options of llama.cpp's own server, read by llama.cpp's own parser out of the wheel.

The wheel brings the server to Python and leaves out its command line; but the parser is compiled
into it, as a C++ function that is exported. So every option, LLAMA_ARG_* variable, default and help
text is llama.cpp's own, and none is listed here.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moepack.common import extras
from moepack.common.errors import MachineError, RequestError

PACKAGE, VERSION = extras.LLAMA_CPP
DEFAULT_PORT = 8080
"""llama-server's; the wheel's own default is 0."""

_CHATML = "chatml"
_PARSER = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
"""`bool common_params_parse(int, char **, common_params &, llama_example, void (*)(int, char **))`,
as GCC and Clang name it on every system."""
_SERVER = 12
"""`LLAMA_EXAMPLE_SERVER`: the options of llama-server."""


def parse_options(
    arguments: Sequence[str], notice: Callable[[str], None] = lambda text: None
) -> Any:
    """Read options as `llama-server` does; return xllamacpp's `CommonParams`.

    `--help`, `--version` and the like print and end the process, as in llama-server. Defaults are
    llama-server's, except those that `_set_defaults` explains. `notice` is called with a sentence
    about a template without tools. Raises MachineError if xllamacpp is missing or has another
    version, RequestError for options that llama.cpp refuses, with its reasons on standard error.
    """
    xllamacpp, library = _load()
    params = xllamacpp.CommonParams()
    address = _address(params)
    _set_defaults(params, xllamacpp)
    parse = getattr(library, _PARSER)
    parse.restype = ctypes.c_bool
    words_type = ctypes.POINTER(ctypes.c_char_p)
    parse.argtypes = (ctypes.c_int, words_type, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    words = [b"llama-server", *map(os.fsencode, arguments)]
    if not parse(len(words), (ctypes.c_char_p * (len(words) + 1))(*words), address, _SERVER, None):
        raise RequestError("llama.cpp's server refuses its options", hint="see --help")
    if params.use_jinja and params.chat_template in template_names():
        _use_named_template(params, "--jinja" in arguments, notice)
    return params


def _use_named_template(params: Any, has_jinja: bool, notice: Callable[[str], None]) -> None:
    """Replace a name by its template: to llama.cpp's Jinja it is the text of all messages.

    llama.cpp has its templates in C++, without tools; ours for ChatML has them. Raises RequestError
    for another one if Jinja is wanted.
    """
    if params.chat_template == _CHATML:
        params.chat_template = Path(__file__).with_name("chatml.jinja").read_text()
        return
    problem = f"llama.cpp's template {params.chat_template} is not Jinja, and has no tools"
    if has_jinja:
        hint = f"leave out --jinja; or --chat-template {_CHATML}, or the model's own Jinja file"
        raise RequestError(problem, hint=hint)
    notice(f"{problem}; --chat-template {_CHATML} has them")
    params.use_jinja = False


def template_names() -> list[str]:
    """Return the names of the chat templates that llama.cpp brings. Raises MachineError."""
    names = _load()[1].llama_chat_builtin_templates
    names.restype = ctypes.c_int32
    names.argtypes = (ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t)
    texts = (ctypes.c_char_p * names(None, 0))()
    names(texts, len(texts))
    return [text.decode() for text in texts]


def _load() -> tuple[Any, ctypes.CDLL]:
    try:
        import xllamacpp
        from xllamacpp import xllamacpp as extension
    except ModuleNotFoundError:
        raise _missing(f"{PACKAGE} is not installed, which brings the server") from None
    if xllamacpp.__version__ != VERSION:
        raise _missing(
            f"another version of {PACKAGE}", expected=VERSION, found=xllamacpp.__version__
        )
    return xllamacpp, ctypes.CDLL(extension.__file__)


def _address(params: Any) -> int:
    """Return the address of the C++ object: in the Python object, behind its header.

    Its first members are compared with those in Python, before anything is written there.
    """
    address = id(params) + object.__basicsize__
    members = (params.n_predict, params.n_ctx, params.n_batch, params.n_ubatch)
    if tuple((ctypes.c_int32 * len(members)).from_address(address)) != members:
        raise _missing(f"{PACKAGE} {VERSION} has another structure than expected")
    return address


def _set_defaults(params: Any, xllamacpp: Any) -> None:
    """Set defaults for experts that are read when they are needed; options and variables win."""
    params.port = DEFAULT_PORT
    # Only what is mapped can be brought later; and repacking copies all experts while loading.
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.no_extra_bufts = True
    # llama.cpp warms up with all experts of every layer: the whole model would be read once.
    params.warmup = False
    # It fits the context and the layers to memory as if the whole model had to be there.
    params.fit_params = False
    # llama-server's `*` lets any web page read the answers.
    params.cors_origins = "localhost"
    params.verbosity = 2
    # Prompts take minutes here, and clients and proxies wait for half a minute, or a whole one.
    params.sse_ping_interval = 10


def _missing(problem: str, **facts: Any) -> MachineError:
    return MachineError(problem, hint=extras.hint("run"), **facts)
