"""Reading traces: each text format, and the working-set table against the script it is after."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import MOEPACK, Side, against, fresh, limit_row, ratio_row
from benchmarks.table import Row

LAYERS, EXPERTS, USED = 48, 128, 8
PEER = "MOEPACK_ANALYZE_EXPERTS"
"""Names the path of analyze_experts.py (rentry, April 2026), which is not ours to copy."""

_READ = """
import sys, time
from moepack.traces.formats import registry
from moepack.traces.validation import Checks
start = time.perf_counter()
for item in registry.read(sys.argv[1], Checks(sys.argv[1])):
    pass
print([time.perf_counter() - start])
"""

Token = list[list[int]]


def working_set(folder: Path, length: int, rounds: int) -> Iterator[Row]:
    """Make the table of one log by both, each as a command of its own."""
    log = folder / "single_response_0.txt"
    write_log(log, length)
    ours = Side((*MOEPACK, "trace", "stats", log))
    script = os.environ.get(PEER)
    name = f"working set of {length / 1e6:.0f} MB"
    if script is None:
        yield Row(f"{name}: analyze_experts.py", f"set {PEER}")
        runs, _ = against(ours, ours, rounds)
    else:
        # It takes the logs of the folder that it is run in.
        in_folder = ("sh", "-c", 'cd "$0" && exec "$1" "$2"')
        theirs = Side((*in_folder, folder, sys.executable, os.path.abspath(script)))
        runs, others = against(ours, theirs, rounds)
        yield ratio_row(f"{name}: analyze_experts.py", runs, others, length, 1 / 20)
    yield limit_row(f"{name}: memory", [run.peak / (1 << 20) for run in runs], "MiB", 150)
    log.unlink()


def formats(folder: Path, length: int, rounds: int) -> Iterator[Row]:
    """Read a file of each text format, in a process of its own."""
    draw = random.Random(0)
    tokens = [[sorted(draw.sample(range(EXPERTS), USED)) for _ in range(LAYERS)] for _ in range(40)]
    for name, write in WRITERS.items():
        path = folder / "trace.txt"
        heading, body = write(tokens)
        with open(path, "w") as file:
            file.write(heading)
            for _ in range(length // len(body) + 1):
                file.write(body)
        size = path.stat().st_size
        times = [fresh(_READ, path)[0] for _ in range(rounds)]
        ours = [second / (size / 1e8) for second in times]
        yield limit_row(f"read 100 MB of {name}", ours, "s", 1)
        path.unlink()


def write_log(path: Path, length: int) -> None:
    """Write a log of about `length` bytes whose experts are uneven, as those of real models are."""
    draw = random.Random(0)
    rates = [[draw.paretovariate(1.5) for _ in range(EXPERTS)] for _ in range(LAYERS)]
    with open(path, "w") as file:
        while file.tell() < length:
            body = []
            for _ in range(200):
                body.append("---token\n")
                for layer in range(LAYERS):
                    # The first to be drawn of all, each at its rate: none is drawn twice.
                    times = [draw.expovariate(rate) for rate in rates[layer]]
                    for expert in sorted(range(EXPERTS), key=times.__getitem__)[:USED]:
                        body.append(f"layer {layer} expert {expert}\n")
            file.write("".join(body) * 16)


def _rows(tokens: list[Token], row: Callable[[int, int, list[int]], str]) -> str:
    return "".join(
        row(number, layer, experts)
        for number, token in enumerate(tokens)
        for layer, experts in enumerate(token)
    )


def _list(experts: list[int], separator: str = ",") -> str:
    return separator.join(map(str, experts))


WRITERS: dict[str, Callable[[list[Token]], tuple[str, str]]] = {
    "expert-log": lambda t: ("", _rows(t, lambda n, y, e: "".join(
        ["---token\n" if not y else "", *(f"layer {y} expert {one}\n" for one in e)]))),
    "route-csv": lambda t: (
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n",
        _rows(t, lambda n, y, e: "".join(
            f"0,1,{n},{y},{slot},{one},0.2213,0,3059712\n" for slot, one in enumerate(e)))),
    "call-csv": lambda t: (
        "decode_call,token_in_call,layer,occurrence,experts\n",
        _rows(t, lambda n, y, e: f"{n},0,{y},0,{_list(e, ' ')}\n")),
    "counts": lambda t: ("layer,expert,count\n", _rows(t, lambda n, y, e: "".join(
        f"{y},{one},{n + 1}\n" for one in e))),
}  # fmt: skip
