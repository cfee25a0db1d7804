"""The run whose receipt would narrow a forecast most, as a command to paste."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.escaping import shell_word
from moepack.forecasting.receipts import Receipt
from moepack.forecasting.ways import Model, Way
from moepack.machine.model import Machine
from moepack.reading.directory import named_pack

_ENOUGH = 2


def next_receipt(
    model: Model, machine: Machine, ways: Sequence[Way], receipts: Sequence[Receipt]
) -> str | None:
    """Return the command; None where there are receipts at both ends already, or none would help.

    `receipts` are those that calibrate. llama-bench runs no pack: then the model has no name. Of
    engines that stream with a GPU, none says what it read.
    """
    kinds = {way.kind for way in ways}
    if model.reads(ways[0], 0, 0) is None or "gpu-stream" in kinds:
        return None
    path = shell_word(model.path)
    if "stream" in kinds:
        runs = [receipt for receipt in receipts if receipt.kind == "stream"]
        count = len(runs)
        if count >= _ENOUGH:
            return None
        memory = "" if any(run.is_near_floor for run in runs) else " --memory floor"
        options = f"-n 100{memory} --json"
        return f'moepack run {path} -p "…" {options} > receipt-{count + 1}.json'
    gguf = "MODEL.gguf" if named_pack(model.path) else path
    bench = f"llama-bench -m {gguf} -p 512 -n 128 -o json"
    if kinds == {"cpu"}:
        return None if any(one.kind == "cpu" for one in receipts) else f"{bench} -ngl 0"
    if kinds == {"gpu"}:
        is_whole = any(one.kind == "gpu" for one in receipts)
        fits = any(model.needs(way).fit(machine) is not False for way in ways)
        return f"{bench} -ngl 99 -ncmoe 0" if fits and not is_whole else None
    fitting = [way for way in model.offloads() if model.needs(way).fit(machine) is not False]
    ends = {way.cpu_layer_count: model.reads(way, 0, 0) for way in (*fitting[:1], *fitting[-1:])}
    seen = {reads.memory for one in receipts if (reads := model.read_by(one)) and one.kind != "cpu"}
    for end, reads in reversed(ends.items()):
        if len(seen) < _ENOUGH and reads is not None and reads.memory not in seen:
            return f"{bench} -ngl 99 -ncmoe {end}"
    return None
