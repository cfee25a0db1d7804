"""Measurements as text for people: of drives, machines and packs, and of running models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from moepack.common.sizes import count_text, size_text
from moepack.report.page import Block, Column, Page, Table, Verbatim
from moepack.report.values import (
    UNKNOWN,
    length_text,
    number_text,
    rate_text,
    share_text,
    speed_text,
)

if TYPE_CHECKING:
    from moepack.bench.comparison import Gain
    from moepack.bench.engine_speed import EngineSpeed, PhaseSpeed, SideFacts
    from moepack.bench.machine import MeasuredMachine
    from moepack.bench.measuring import Spread
    from moepack.bench.run import BenchReport, MeasuredReads
    from moepack.bench.tuning import TuningFacts
    from moepack.planning.machine.described import Presets
    from moepack.planning.machine.model import Figure
    from moepack.running.serving.run_facts import RunFacts, RunPhase
    from moepack.running.streaming.control import ExpertUsage, Prefetches
    from moepack.running.streaming.supervisor import Supervisor


def machine(measured: MeasuredMachine) -> Page:
    """Write memory, GPUs and the drive."""
    from moepack.planning.machine.file import compute_text

    machine = measured.machine
    lines = [f"memory  {size_text(int(machine.memory.value))}, {_figure(machine.memory_bandwidth)}"]
    if machine.compute is not None:
        lines.append(f"CPUs    {compute_text(machine.compute.value)} in products of matrices")
    for gpu in machine.gpus:
        length = size_text(int(gpu.memory.value))
        lines.append(f"GPU     {gpu.name or UNKNOWN}: {length}, {_figure(gpu.bandwidth)}")
    drive = machine.drive
    if drive is None:
        return Page(*lines, f"drive   {UNKNOWN}")
    how = f"random reads with {measured.backend}, MiB/s by size and reads in flight"
    points = [(read.length, read.depth, read.bandwidth.value) for read in drive.reads]
    return Page(*lines, f"drive   {drive.path or UNKNOWN}, {how}", surface(points, indent=8))


def tuning(facts: TuningFacts) -> Page:
    """Write the seconds of each value, what is kept, and the command line."""
    rows = []
    for one in facts.tried:
        for trial in one.trials:
            seconds = UNKNOWN if trial.seconds is None else f"{trial.seconds.median:.3g} s"
            note = trial.refusal or ("" if trial.same_text else "another text")
            kept = "kept" if trial.value == one.kept else ""
            rows.append([one.option, trial.value, seconds, kept, note])
    texts = count_text(facts.text_count, "text") + (" at once" if facts.text_count > 1 else "")
    result = "nothing that was tried is faster than the defaults:"
    if facts.gain is not None:
        result = f"{facts.gain:.2f} times as fast as the defaults, with the same text:"
    columns = [Column("", "l"), Column("", "l"), Column("time"), Column("", "l"), Column("", "l")]
    return Page(
        f"{facts.model}: {texts}, a prompt of {count_text(facts.prompt_count, 'token')} and "
        f"{count_text(facts.token_count, 'token')} more; two rounds in turns",
        "",
        Table(columns, rows),
        "",
        result,
        Verbatim(f"  {facts.command}"),
    )


def presets(facts: Presets) -> Page:
    """Write a row for each machine that is sold."""
    rows = []
    for name, machine in facts.presets:
        gpu, drive = next(iter(machine.gpus), None), machine.drive
        unified = "unified" if gpu is not None and gpu.is_unified else ""
        rows.append(
            [
                *(name, size_text(int(machine.memory.value)), _speed(machine.memory_bandwidth)),
                "" if gpu is None else size_text(int(gpu.memory.value)),
                unified or ("" if gpu is None else _speed(gpu.bandwidth)),
                _speed(drive and drive.bandwidth),
            ]
        )
    columns = [Column("preset", "l"), Column("memory"), Column("", rank=1), Column("VRAM")]
    columns += [Column("", rank=1), Column("drive", rank=2)]
    note = "with --machine preset:NAME; other figures: --ram, --vram, --drive-speed …"
    return Page(Table(columns, rows), note)


def _speed(figure: Figure | None) -> str:
    """Write a bandwidth as makers have it."""
    return UNKNOWN if figure is None else f"{figure.value / 1e9:.4g} GB/s"


def _figure(figure: Figure | None) -> str:
    """Write `18.8 GiB/s (17.1 to 20.3 GiB/s)`."""
    if figure is None:
        return f"{UNKNOWN} GiB/s"
    ends = ""
    if figure.lowest is not None and figure.highest is not None:
        ends = f" ({speed_text(figure.lowest)} to {speed_text(figure.highest)})"
    return f"{speed_text(figure.value)}{ends}"


def surface(points: Iterable[tuple[int, int, float]], indent: int) -> Table:
    """Return a table of MiB/s by length in bytes and depth; the deepest are left out first.

    A point is a length, a depth, and bytes a second.
    """
    speeds = {(length, depth): _mib(speed) for length, depth, speed in points}
    depths = sorted({depth for _, depth in speeds})
    columns = [Column(""), *(Column(str(depth), rank=rank) for rank, depth in enumerate(depths))]
    rows = [
        [size_text(length), *(speeds.get((length, depth), "") for depth in depths)]
        for length in sorted({length for length, _ in speeds})
    ]
    return Table(columns, rows, indent)


def _mib(speed: float) -> str:
    """Write bytes a second as MiB/s, without the unit."""
    return f"{speed / (1 << 20):,.0f}"


_LAYOUTS = {"blobs": "pack", "slices": "shards"}
_OUTCOMES = {"gain": "pack faster", "loss": "shards faster", "none": "no difference shown"}
_READINGS = (
    *(Column("", "l"), Column("depth"), Column("MiB/s"), Column("spread", rank=2)),
    *(Column("CPU s/GiB", rank=4), Column("reads/token", rank=3), Column("ms/token", rank=1)),
)
_GAINS = (Column("depth"), Column("", "l"), Column("", "l", rank=1))


def bench(report: BenchReport) -> Page:
    """Write the whole report: tables, notes, and the verdict last."""
    blocks: list[Block] = [
        f"{report.pack}, {size_text(report.pack_length)}, read with {report.backend}"
    ]
    for order in dict.fromkeys(point.order for point in report.surface):
        blocks += ["", f"{order} reads, MiB/s by size and reads in flight"]
        points = [point for point in report.surface if point.order == order]
        blocks.append(surface(((p.length, p.depth, p.bytes_per_second) for p in points), indent=2))
    return Page(*blocks, "", *comparison(report), "", report.verdict)


def comparison(report: BenchReport) -> list[Block]:
    """Write the routed reads, the gain of the pack, and notes."""
    routing = report.routing
    tokens = f"{routing.token_count:,.1f} tokens"  # the last of which may be a part
    if routing.token_count == int(routing.token_count):
        tokens = count_text(int(routing.token_count), "token")
    blocks: list[Block] = [
        f"routed reads: {tokens}, {count_text(routing.routed_layer_count, 'layer')}, "
        f"{size_text(routing.useful_length)} of experts ({routing.origin})",
        f"{count_text(report.round_count, 'round')}, with moepack's reader",
        Table(_READINGS, list(map(_reading, report.readings))),
        "blobs are read whole, the slices of shards one by one; ms/token: reading all experts that "
        "a token uses, with which a model has to compute as well",
    ]
    if report.gains:
        blocks += ["", "blobs of the pack, times as fast as slices of the shards (quartiles)"]
        blocks.append(Table(_GAINS, list(map(_gain, report.gains)), indent=2))
    return [*blocks, *(f"note: {note}" for note in report.notes)]


def _reading(reads: MeasuredReads) -> list[str]:
    return [
        _LAYOUTS[reads.layout],
        str(reads.depth),
        _mib(reads.bytes_per_second),
        f"{_mib(reads.bytes_per_second_lowest)} to {_mib(reads.bytes_per_second_highest)}",
        f"{reads.cpu_seconds_per_gib:.3f}",
        f"{reads.reads_per_token:,.0f}",
        rate_text(reads.seconds_per_token * 1e3),
    ]


def _gain(gain: Gain) -> list[str]:
    if gain.ratio is None:
        return [str(gain.depth), UNKNOWN, "too few rounds to tell"]
    return [str(gain.depth), str(gain), _OUTCOMES[gain.word]]


_SPEEDS = (
    *(Column("", "l", least=12), Column("first token, s", "l", rank=1)),
    *(Column("prompt, tok/s", "l", rank=2), Column("tok/s", "l")),
)
_READS = (
    *(Column("", "l", least=12), Column("prompt: read", rank=2), Column("misses", rank=4)),
    *(Column("waiting", rank=5), Column("a token: read"), Column("hits", rank=1)),
    Column("waiting", rank=3),
)


def speed(speed: EngineSpeed) -> Page:
    """Write the conditions of the runs of a model, and tables of speeds and reads."""
    limits = "with no limit on memory: control groups cannot be made here"
    if speed.is_limited:
        limits = f"within {size_text(speed.memory_limit)}, page cache included"
        if speed.read_limit is not None:
            limits += f", reads limited to {size_text(speed.read_limit)}/s"
    prompt = f"{UNKNOWN} tokens"
    if speed.prompt_count is not None:
        prompt = count_text(speed.prompt_count, "token")
    blocks: list[Block] = [
        f"{speed.pack}: a model of {size_text(speed.model_length)}, {limits}",
        f"{size_text(speed.expert_memory)} of it for experts under moepack",
        f"a prompt of {prompt}, {speed.micro_batch} at once, then "
        f"{count_text(speed.token_count, 'token')}; "
        f"{count_text(speed.round_count, 'round')} in turns: median (least to most)",
        "",
        Table(_SPEEDS, list(map(_speeds, speed.sides))),
        "",
        Table(_READS, list(map(_reads, speed.sides))),
    ]
    if speed.same_text is not None:
        same = "All gave the same text." if speed.same_text else "They gave different texts."
        blocks += ["", same]
    return Page(*blocks)


def _speeds(side: SideFacts) -> tuple[str, ...]:
    if side.first_token_seconds is None:
        return side.name, "killed: out of memory", "", ""
    speeds = side.prompt.tokens_per_second, side.decode.tokens_per_second
    return side.name, *map(_spread, (side.first_token_seconds, *speeds))


def _spread(value: Spread | None) -> str:
    if value is None:
        return UNKNOWN
    median, lowest, highest = map(rate_text, value)
    return f"{median} ({lowest} to {highest})"


def _reads(side: SideFacts) -> tuple[str, ...]:
    prompt, decode = side.prompt, side.decode
    return (
        side.name,
        length_text(prompt.read_length),
        number_text(prompt.misses),
        _waiting(prompt),
        length_text(decode.read_length_per_token),
        share_text(decode.hit_rate),
        _waiting(decode),
    )


def _waiting(phase: PhaseSpeed) -> str:
    return UNKNOWN if phase.read_share is None else f"{phase.read_share:.0%}"


_ENDS = {"context": "; the context is full", "left": "; interrupted"}


def generated(facts: RunFacts) -> str:
    """Return two lines of statistics: of a prompt, and of its answer."""
    kept = f", {facts.kept_count:,} of them kept" if facts.kept_count else ""
    first = facts.first_token_seconds
    after = UNKNOWN if first is None else f"{first:.2f} s" if first < 9.995 else f"{first:,.0f} s"
    end = _ENDS.get(facts.end, "")
    if facts.draft_count:
        end = (
            f"; {facts.accepted_count:,} of {count_text(facts.draft_count, 'draft')} accepted{end}"
        )
    return (
        f"prompt: {count_text(facts.prompt_count, 'token')}{kept}, "
        f"{rate_text(facts.prompt.tokens_per_second)} tok/s, first token after {after}\n"
        f"answer: {count_text(facts.token_count, 'token')}, {so_far(facts)}, "
        f"{size_text(facts.held_length)} of experts in memory, all together up to "
        f"{length_text(facts.memory.total)}; seed {facts.seed}{end}"
    )


def so_far(facts: RunPhase) -> str:
    """Return the speed of decoding, and the reads for it."""
    speed = f"{rate_text(facts.tokens_per_second)} tok/s, {share_text(facts.hit_rate)} hits"
    if not facts.read_length:
        return f"{speed}, nothing read"
    return (
        f"{speed}, {length_text(facts.length_per_token)} read a token, "
        f"{share_text(facts.read_share)} of the time waiting for the drive "
        f"({speed_text(facts.length_per_second)})"
    )


def expert_memory(supervisor: Supervisor) -> str:
    """Return a line about the memory of a model: for experts, beside them, and all together."""
    whole, budget = supervisor.whole_length, supervisor.budget
    clauses = [f"memory for experts: {size_text(min(budget, whole))}"]
    if budget >= whole:
        clauses[0] += ", room for all of them"
    else:
        clauses[0] += f" of {size_text(whole)}"
        clauses.append(f"a step needs {size_text(supervisor.floor)}")
    parts = supervisor.parts
    count = "" if parts.token_count is None else f" of {count_text(parts.token_count, 'token')}"
    clauses.append(
        f"dense weights {length_text(parts.dense)}, context{count} {length_text(parts.context)}, "
        f"computing {length_text(parts.computing)}, earlier texts {length_text(parts.texts)}, "
        f"the programs {length_text(parts.program)}; all together {length_text(parts.total)}"
    )
    if supervisor.has_warm_up:
        clauses.append("those that earlier runs used most are read first")
    return "; ".join(clauses)


def program_usage(supervisor: Supervisor) -> str:
    """Return a line about a program that runs: its experts, and the memory of all."""
    total = length_text(supervisor.parts.total)
    return f"{expert_usage(supervisor.usage)}, all together up to {total}"


def expert_usage(usage: ExpertUsage) -> str:
    """Return a line about a program's experts: lookups, reads and memory."""
    speed = usage.read_length / usage.read_seconds if usage.read_seconds else None
    faults = f", {count_text(usage.fault_count, 'page fault')}" if usage.fault_count else ""
    if usage.rechecked_count:
        faults += f", {count_text(usage.rechecked_count, 'later read')} checked again"
    lookups = _lookups(usage.hit_count, usage.miss_count)
    has_drafts = usage.draft_hit_count or usage.draft_miss_count
    drafts = f"; of drafts {_lookups(usage.draft_hit_count, usage.draft_miss_count)}"
    return (
        f"experts: {lookups}{drafts if has_drafts else ''}, "
        f"{size_text(usage.read_length)} read in {usage.read_seconds:.1f} s "
        f"({length_text(speed)}/s), {size_text(usage.resident_length)} of "
        f"{size_text(usage.budget)} in memory{faults}{prefetches_text(usage.prefetches)}"
    )


def prefetches_text(prefetches: Prefetches) -> str:
    """Return a clause about what was prefetched for decoding; an empty one if nothing was tried."""
    if prefetches.is_off:
        return ", nothing prefetched: the routers of this model are not understood"
    if not prefetches.guessed_count:
        return ""
    right = share_text(prefetches.right_count / prefetches.guessed_count)
    read = count_text(prefetches.read_count, "expert")
    share = prefetches.used_count / prefetches.read_count if prefetches.read_count else None
    return (
        f", next layer's experts guessed {right} right, {read} prefetched, {share_text(share)} used"
    )


def _lookups(hit_count: int, miss_count: int) -> str:
    lookups = hit_count + miss_count
    share = hit_count / lookups if lookups else None
    return f"{share_text(share)} of {count_text(lookups, 'lookup')} hit"
