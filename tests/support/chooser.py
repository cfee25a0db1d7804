"""A program in which routers choose as they are told: `python -m tests.support.chooser MODEL`.

LIBRARY has as much of ggml as that needs. Each line of standard input is JSON: graphs to compute in
turn, each the number of a scheduler, the layer, the experts of each row, and how many words rows
are apart. It gets a line with the status of each, 0 where its experts were brought. Lists of lists
of graphs are computed by a thread for each list. Of the scheduler -1 a graph's "layer" is how many
requests wait, as a server says it.
"""

import ctypes
import json
import os
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.mapped_reader import map_file


def _compute(library: Any, graphs: list[tuple[int, int, list[list[int]], int]]) -> list[int]:
    statuses = []
    for scheduler, layer, rows, width in graphs:
        if scheduler == -1:
            ctypes.CDLL(None).moepack_set_request_count(layer)
            continue
        columns = len(rows[0])
        words = array("i", (word for row in rows for word in (*row, *[-1] * (width - columns))))
        place, _ = words.buffer_info()
        statuses.append(library.choose(scheduler, layer, len(rows), columns, width, place))
    return statuses


def main() -> None:
    """Map the model, and do what is asked."""
    model, library_path, length = sys.argv[1:]
    library = ctypes.CDLL(library_path)
    size, count = ctypes.c_size_t, ctypes.c_int64
    library.choose.argtypes = size, ctypes.c_int, count, count, size, ctypes.c_void_p
    map_file(model, int(length))
    print("ready", flush=True)
    for line in sys.stdin:
        lists = json.loads(line)
        with ThreadPoolExecutor(len(lists)) as pool:
            results = list(pool.map(lambda graphs: _compute(library, graphs), lists))
        print(json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
