"""Messages between the pager and the preloaded library: the same structs as in preload.c."""

import struct
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
MAX_CONTEXTS = 64
RING_WORDS = 1 << 18
RING_LENGTH = 4096 + 4 * RING_WORDS
"""The bytes of one context's ring: a page with `head` and, 64 bytes behind it, `tail`; words."""
MAX_OPERATIONS = 2000

WELCOME = struct.Struct("<IIIIQQ")
FILE_NAME = struct.Struct("<QQ")
_OPERATION = struct.Struct("<IIIIQQQ")
_MESSAGE = struct.Struct("<IIQQQQ")
MESSAGE_LENGTH = _MESSAGE.size + 4 * MAX_OPERATIONS


class Op(IntEnum):
    """Operations of the library."""

    MAP = 0
    RESIDENT = 1
    EVICT = 2
    RESTORE = 3
    DENSE = 4
    WANTED = 5
    WATCH = 6
    ANSWER = 7
    DONE = 8
    """The message is to be acknowledged."""


class MessageKind(IntEnum):
    """Kinds of messages from the library."""

    REGION = 0
    CHOSEN = 1
    HALF_FULL = 2
    DONE = 3
    CONTEXT = 4
    NO_FAULTS = 5
    """The system refuses userfaultfd to the process: `number` is its errno."""
    REQUESTS = 6
    """`number` requests are open; only servers that know send it."""


class Message(NamedTuple):
    """A message of the library: `number` is a file's, a context's or, with DONE, a count.

    `refused` are numbers of operations that could not be done, as an expert is in use.
    """

    kind: MessageKind
    number: int
    sequence: int
    address: int
    length: int
    offset: int
    refused: tuple[int, ...] = ()


def encode(
    op: Op,
    *,
    layer: int = 0,
    expert: int = 0,
    file: int = 0,
    offset: int = 0,
    length: int = 0,
    source: int = 0,
) -> bytes:
    """Encode one operation; offsets count from the start of a file that programs map.

    `source` is an offset in the pool or in the pack's file, or the sequence of a request.
    """
    return _OPERATION.pack(op, layer, expert, file, offset, length, source)


def decode(data: bytes) -> Message:
    """Decode a message of the library. Raises struct.error or ValueError for a malformed one."""
    kind, number, sequence, address, length, offset = _MESSAGE.unpack_from(data)
    rest = data[_MESSAGE.size :]
    refused = struct.unpack(f"<{len(rest) // 4}I", rest)
    return Message(MessageKind(kind), number, sequence, address, length, offset, refused)
