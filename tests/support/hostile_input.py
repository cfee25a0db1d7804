"""What the tests with hostile input share: damage, the shape of messages, time and memory."""

import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from moepack.common.errors import MoepackError
from tests.support import warm_command

Refusal = TypeVar("Refusal", bound=MoepackError)

MAX_MESSAGE_LENGTH = 1000
MAX_SECONDS = 5.0
"""Of a processor, on a machine that may be busy and slow: what is not bounded takes minutes."""
MAX_MEMORY = 80 << 20
"""Beyond what a process begins with: with an interpreter it is 100 MB."""
_CLEAR = Path("/proc/self/clear_refs")

_HEALTH = list(HealthCheck)
# The default run is the same each time; `make fuzz` looks further, and elsewhere each time.
QUICK = settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=_HEALTH)
DEEP = settings(max_examples=20_000, deadline=None, suppress_health_check=_HEALTH)

EFFORTS = [QUICK, pytest.param(DEEP, marks=pytest.mark.slow)]
"""Parameters of a test that tries hostile input."""

SIZES = (0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 31, 32, 33, 63, 64, 255, 256, 4096)
POWERS = tuple((1 << power) + more for power in (15, 16, 24, 31, 32, 62, 63) for more in (-1, 0, 1))
NUMBERS = (*SIZES, *POWERS, (1 << 64) - 32, (1 << 64) - 8, (1 << 64) - 1)
KINDS = ("flip", "u8", "u32", "u64", "cut", "drop", "repeat", "move")


class Edit(NamedTuple):
    """One piece of damage; positions wrap around."""

    kind: str
    position: int
    number: int
    length: int


def mutate(data: bytes, edits: list[Edit]) -> bytes:
    """Damage data: change bits and numbers, cut off, leave out, repeat and move pieces."""
    out = bytearray(data)
    for kind, position, number, length in edits:
        at = position % (len(out) + 1)
        piece = out[at : at + length]
        if kind == "flip":
            out[at : at + 1] = bytes(byte ^ 1 << number % 8 for byte in out[at : at + 1])
        elif kind in ("u8", "u32", "u64"):
            width = int(kind[1:]) // 8
            out[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == "cut":
            del out[at:]
        elif kind == "repeat":
            out[at:at] = piece
        else:
            del out[at : at + length]
            if kind == "move":
                target = number % (len(out) + 1)
                out[target:target] = piece
    return bytes(out)


def random_edits(seed: int, length: int) -> list[Edit]:
    rng = random.Random(seed)
    return [
        Edit(rng.choice(KINDS), rng.randrange(length), rng.choice(NUMBERS), rng.randrange(40))
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]


def edits(length: int, header_length: int | None = None) -> st.SearchStrategy[list[Edit]]:
    """Draw one to four edits of `length` bytes, most of them in the header."""
    header = st.integers(0, length if header_length is None else header_length)
    numbers = st.sampled_from(NUMBERS) | st.integers(0, (1 << 64) - 1)
    positions = header | header | st.integers(0, length)
    edit = st.builds(Edit, st.sampled_from(KINDS), positions, numbers, st.integers(0, 40))
    return st.lists(edit, min_size=1, max_size=4)


def mutants(data: bytes, header_length: int | None = None) -> st.SearchStrategy[bytes]:
    return edits(len(data), header_length).map(lambda drawn: mutate(data, drawn))


def filled(piece: bytes, length: int) -> bytes:
    return piece * (length // len(piece))


def assert_clear(error: MoepackError, path: str | Path) -> None:
    """Check what holds for every message: it names the file, and is one line that ends."""
    assert error.path == str(path)
    text = str(error).removeprefix(str(path))
    assert text.isprintable(), text
    assert len(text) <= MAX_MESSAGE_LENGTH, len(text)


def assert_tidy(error: MoepackError) -> None:
    """Check what holds for every message about a pack, whatever file of it is at fault."""
    assert error.path is not None
    assert_clear(error, error.path)


def refused_by(kind: type[Refusal], path: Path, call: Callable[[], object]) -> Refusal:
    """Make a call that must be refused; return the error, which says clearly what is wrong."""
    with pytest.raises(kind) as caught:
        call()
    assert_clear(caught.value, path)
    return caught.value


class Measured(NamedTuple):
    """What a call came to: its error, processor seconds, most bytes beyond those at its start."""

    text: str
    seconds: float
    memory: int


def measured(call: tuple[str, str], path: Path) -> Measured:
    """Run a call on a file in a process of its own, after imports that are not measured."""
    if not _CLEAR.exists():
        pytest.skip("the peak of a process's memory is read from /proc")
    return warm_command.call(_measure, call, str(path))


def _measure(call: tuple[str, str], path: str) -> Measured:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # no harm to the machine
    names = {"path": path}
    exec(call[0], names)
    _CLEAR.write_text("5")  # from now on the peak is that of the call
    before = _peak()
    start = time.process_time()  # other programs' work does not count
    try:
        exec(call[1], names)
        text = ""
    except MoepackError as error:
        text = f"{type(error).__name__}: {error}"
    return Measured(text, time.process_time() - start, _peak() - before)


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def assert_cheap(call: tuple[str, str], path: Path, max_memory: int = MAX_MEMORY) -> Measured:
    """Run a call on a hostile file: an error within seconds and `max_memory` bytes."""
    outcome = measured(call, path)
    assert outcome.text
    assert "\n" not in outcome.text
    assert outcome.seconds < MAX_SECONDS
    assert outcome.memory < max_memory
    return outcome
