"""Hotness files: files of counts, as `formats.counts` reads them."""

import json
import os

import numpy as np

from moepack.common.errors import TraceError
from moepack.storage.atomic import write_whole
from moepack.traces.compressed import TraceStream
from moepack.traces.formats.counts import COLUMNS, EXAMPLE, CountsFile, origin_of
from moepack.traces.hotness.counter import by_expert
from moepack.traces.hotness.model import HeldOut, Hotness
from moepack.traces.model import Counts, Items, Phase
from moepack.traces.validation import Checks


def decode(data: bytes, path: str) -> Hotness:
    """Read the bytes of a hotness file; `path` is for messages. Raises TraceError for faults."""
    with TraceStream(path, data) as stream:
        return read(stream, Checks(path))


def read(stream: TraceStream, checks: Checks) -> Hotness:
    """Read an open hotness file. Raises as `decode`."""
    file = CountsFile(stream, checks)
    if not file.counts.any():
        expected = f"lines of {EXAMPLE}"
        raise TraceError("no counts in it", path=stream.path, expected=expected)
    held_out = None
    if file.held_out is not None:
        held_out_counts = by_expert(file.places, file.held_out)
        held_out = HeldOut(file.held_out_by, file.number("held_out_tokens"), held_out_counts)
    return Hotness(
        path=stream.path,
        counts=by_expert(file.places, file.counts),
        token_count=file.number("tokens"),
        digest=stream.digest,
        request_count=file.number("requests"),
        held_out=held_out,
        origins=tuple(file.origins),
    )


def save(hotness: Hotness, path: str | os.PathLike[str]) -> None:
    """Write a hotness file, which appears when it is whole. Raises MachineError."""
    write_whole(path, encode(hotness))


def items_of(hotness: Hotness) -> Items:
    """Yield hotness as a trace of counts, as its file is read."""
    yield origin_of(hotness.path, hotness.token_count, hotness.origins)
    layers, experts = np.array(list(hotness.counts), np.uint16).reshape(-1, 2).T
    numbers = np.fromiter(hotness.counts.values(), np.int64)
    yield Counts(Phase.UNKNOWN, layers, experts, numbers)


def encode(hotness: Hotness) -> bytes:
    """Write a hotness file; the same counts from the same traces give the same bytes."""
    facts = {"tokens": hotness.token_count, "requests": hotness.request_count}
    lines = [f"# {name}={value}" for name, value in facts.items() if value is not None]
    held_out = hotness.held_out
    if held_out is not None:
        lines.append(f"# held_out={held_out.by}")
        if held_out.token_count is not None:
            lines.append(f"# held_out_tokens={held_out.token_count}")
    lines += [f"# origin={json.dumps(origin, sort_keys=True)}" for origin in hotness.origins]
    lines.append(",".join(COLUMNS if held_out is not None else COLUMNS[:3]))
    for key, count in sorted(hotness.counts.items()):
        row = f"{key.layer},{key.expert},{count}"
        lines.append(row if held_out is None else f"{row},{held_out.counts.get(key, 0)}")
    return "\n".join([*lines, ""]).encode()
