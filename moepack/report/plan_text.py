"""Plans as text for people: forecasts, placements, and the findings of a doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moepack.common.sizes import count_text, size_text
from moepack.planning.forecasting.rates import KIND_WORDS
from moepack.report.page import Block, Column, Page, Table, Verbatim
from moepack.report.values import (
    UNKNOWN,
    length_text,
    parameters_text,
    rate_text,
    seconds_text,
    share_text,
    speed_text,
)

if TYPE_CHECKING:
    from moepack.bench.diagnosis.doctor import DoctorFacts, Prognosis
    from moepack.planning.forecasting.comparison import ComparisonFacts
    from moepack.planning.forecasting.facts import (
        ForecastFacts,
        PromptFacts,
        ReceiptFacts,
        SpeedFacts,
        TermFacts,
    )
    from moepack.planning.placing.facts import OptionFacts, PlacementFacts

TERM_NAMES = {"vram": "VRAM", "link": "GPU's link"}
"""The names of terms that are others than in JSON."""
_LIMITS = {"drive": "the drive", "link": "the GPU's link", "computing": "computing"}


def forecast(facts: ForecastFacts) -> Page:
    """Write the reads of a token, the forecasts, and their evidence."""
    machine = f" on {facts.machine}" if facts.machine else ""
    blocks: list[Block] = [
        f"{facts.model}{machine}: {size_text(facts.expert_length)} of experts, "
        f"{length_text(facts.dense_length)} dense; a token reads "
        f"{length_text(facts.read_expert_length)} of experts, and "
        f"{length_text(facts.read_dense_length)} besides",
        *_row_tables(facts.table_length),
        "",
    ]
    every = facts.forecasts
    blocks += _single(every[0]) if len(every) == 1 else [speeds(every), ""]
    warnings = every[0].warnings
    notes = [line for line in warnings if all(line in one.warnings for one in every)]
    if len(every) > 1:
        reasons = dict.fromkeys(one.reason for one in every if one.reason is not None)
        notes += [f"no speeds where {reason}" for reason in reasons]
    blocks += [f"note: {line}" for line in notes]
    blocks += map(_receipt, facts.receipts)
    if facts.next_receipt is not None:
        blocks.append("a measured run of this model here makes it more certain")
    return Page(*blocks)


def _row_tables(length: int) -> list[str]:
    """Write the length of row tables, which stay on the drive."""
    text = f"row tables of {size_text(length)} stay on the drive: a token reads few of their rows"
    return [text] if length else []


def _single(one: SpeedFacts) -> Iterator[Block]:
    """Write one forecast with its terms."""
    yield f"{mode_words(one)}: {speed_words(one)}"
    yield Table(_TERMS, [list(_term(term, one.binding)) for term in one.terms], indent=2)
    if one.misses_from is not None:
        yield (
            f"{share_text(one.hit_rate)} of lookups hit, and a token reads "
            f"{length_text(one.missed_length)} of the drive (from: {misses_words(one)})"
        )
    if one.vram_cache_length is not None:
        yield (
            f"{share_text(one.vram_hit_rate)} of lookups hit in VRAM; a token uploads "
            f"{length_text(one.uploaded_length)} to it"
        )
    yield f"prompt of {prompt_words(one.prompt)}"
    fits = {True: ", which fits", False: ", which does not fit", None: ""}[one.fits]
    vram = f"{length_text(one.vram_length)} of VRAM and " if one.vram_length != 0 else ""
    yield f"takes {vram}{length_text(one.memory_length)} of memory{fits}"
    if one.tokens_per_second is not None:
        evidence = "published runs of other machines"
        if one.receipt_count:
            evidence = count_text(one.receipt_count, "receipt")
        yield f"nine of ten runs are in the range; evidence: {evidence}"


_TERMS = (
    *(Column("", "l"), Column("", rank=1), Column("", rank=2), Column(""), Column("", "l", rank=3)),
)


def _term(term: TermFacts, binding: str | None) -> Iterator[str]:
    """Yield the cells of a term: name, amount, speed, time, and whether it takes longest."""
    seconds = term.seconds
    yield TERM_NAMES.get(term.name, term.name)
    if term.count is not None:
        each = UNKNOWN if seconds is None else f"{seconds / term.count * 1e6:.0f} µs each"
        yield from (f"{term.count:.3g}", each)
    else:
        nominal = "" if term.bandwidth is None else f" of {speed_text(term.bandwidth)} {term.basis}"
        yield from (length_text(term.length), f"{speed_text(term.reached)}{nominal}")
    yield UNKNOWN if seconds is None else f"{seconds * 1e3:.2f} ms"
    yield "takes longest" if term.name == binding else ""


def mode_words(one: SpeedFacts) -> str:
    """Write the execution mode, with its number of layers and the bytes of its caches."""
    words = KIND_WORDS[one.kind]
    if one.cpu_layer_count is not None:
        words = f"--n-cpu-moe {one.cpu_layer_count} ({words})"
    if one.budget_length is not None:
        words += f"; a cache of {size_text(one.budget_length)}"
    if one.vram_cache_length is not None:
        words += f"; one of {size_text(one.vram_cache_length)} in VRAM"
    return words


def misses_words(one: SpeedFacts) -> str:
    """Write the origin of misses."""
    if one.misses_curve is not None:
        return f"curve of {one.misses_curve}"
    return one.misses_from or UNKNOWN


def prompt_words(one: PromptFacts) -> str:
    """Write the time of a prompt, and its limit."""
    start = f"{one.token_count:,} tokens: {seconds_text(one.seconds)} to the first token"
    if one.seconds is None:
        return f"{start}: {one.reason}"
    words = (
        f"{start}, {seconds_text(one.shortest)} to {seconds_text(one.longest)}; "
        f"{count_text(one.pass_count, 'sweep')} of up to {one.micro_batch:,} tokens"
    )
    if one.pass_length:
        words += (
            f", which reads {size_text(one.pass_length)} of the drive "
            f"({share_text(one.touched_share)} of the experts, from: {one.touched_from})"
        )
    return f"{words}; {_LIMITS[one.binding or '']} limits it to {rate_text(one.limit)} tok/s"


def speed_words(one: SpeedFacts) -> str:
    """Write the speed of decoding with its range, or the reason why it is unknown."""
    if one.tokens_per_second is None:
        return f"{UNKNOWN} tok/s: {one.reason}"
    speed, lowest = rate_text(one.tokens_per_second), rate_text(one.lowest)
    words = f"{speed} tok/s, {lowest} to {rate_text(one.highest)}"
    if one.ceiling is None:
        return words
    return f"{words}; at most {rate_text(one.ceiling)}, if every bandwidth were reached"


def speeds(forecasts: Sequence[SpeedFacts]) -> Table:
    """Write a row for each forecast."""
    count = f"{forecasts[0].prompt.token_count:,} tokens"
    columns = [
        *(Column("--n-cpu-moe"), Column("budget"), Column("hits", rank=5)),
        *(Column("read a token", rank=6), Column("VRAM", rank=3), Column("memory", rank=7)),
        *(Column("tok/s"), Column("from", rank=2), Column("to", rank=2), Column("at most", rank=8)),
        *(Column("longest", rank=4), Column(count, rank=1), Column("from", rank=9)),
        *(Column("to", rank=9), Column("", "l")),
    ]
    has_vram = any(one.vram_length != 0 for one in forecasts)
    rows = []
    for one in forecasts:
        layers, budget, hits, read = str(one.cpu_layer_count), "", "", ""
        if one.budget_length is not None:
            layers, budget = "", size_text(one.budget_length)
            hits, read = share_text(one.hit_rate), length_text(one.missed_length)
        vram = length_text(one.vram_length) if has_vram else ""
        rates = (one.tokens_per_second, one.lowest, one.highest, one.ceiling)
        times = (one.prompt.seconds, one.prompt.shortest, one.prompt.longest)
        longest = TERM_NAMES.get(one.binding or UNKNOWN, one.binding or UNKNOWN)
        misfit = "does not fit" if one.fits is False else ""
        places = (layers, budget, hits, read, vram, length_text(one.memory_length))
        rows.append([*places, *map(rate_text, rates), longest, *map(seconds_text, times), misfit])
    return Table(columns, rows)


def comparison(facts: ComparisonFacts) -> Page:
    """Write a row for each machine."""
    rows, notes = [], []
    for one in facts.machines:
        if one.forecast is None:
            rows.append([one.machine, "does not run", *[UNKNOWN] * 7])
            notes.append(f"{one.machine}: {one.refusal}")
            continue
        (speed,) = one.forecast.forecasts
        reasons = [] if speed.reason is None else [f"no speed: {speed.reason}"]
        notes += [f"{one.machine}: {line}" for line in (*speed.warnings, *reasons)]
        rates = (speed.tokens_per_second, speed.lowest, speed.highest)
        times = (speed.prompt.seconds, speed.prompt.shortest, speed.prompt.longest)
        longest = TERM_NAMES.get(speed.binding or UNKNOWN, speed.binding or UNKNOWN)
        cells = [one.machine, ", ".join(expert_places(speed)), *map(rate_text, rates)]
        rows.append([*cells, *map(seconds_text, times), longest])
    columns = [Column("", "l"), Column("experts", "l", rank=3), Column("tok/s")]
    columns += [Column("from", rank=1), Column("to", rank=1), Column("first token")]
    columns += [Column("from", rank=2), Column("to", rank=2), Column("longest", "l", rank=4)]
    return Page(facts.model, "", Table(columns, rows), "", *_alike(notes))


def _alike(notes: Sequence[str]) -> list[str]:
    """Write notes, those that are alike once for all of their machines."""
    machines: dict[str, list[str]] = {}
    for machine, _, text in (note.partition(": ") for note in notes):
        machines.setdefault(text, []).append(machine)
    return [f"note: {'; '.join(names)}: {text}" for text, names in machines.items()]


def _receipt(receipt: ReceiptFacts) -> str:
    where = f"{receipt.path}, {receipt.place}: {rate_text(receipt.tokens_per_second)} tok/s"
    if receipt.refusal is not None:
        return f"receipt {where}, not used: {receipt.refusal}"
    return f"receipt {where} ({', '.join(receipt.fields)})"


def placement(facts: PlacementFacts) -> Page:
    """Write the memories with their contents, and the command lines."""
    counts = facts.parameters
    numbers = (counts.total, counts.expert, counts.dense, counts.embedding, counts.active)
    total, expert, dense, embedding, active = map(parameters_text, numbers)
    rows = []
    for device in facts.devices:
        contents = (device.dense_length, device.context_length, device.expert_length)
        lengths = (device.length, *contents, device.compute_length, abs(device.left_length))
        *cells, left = map(size_text, lengths)
        rows.append([device.name, *cells, left if device.left_length >= 0 else f"-{left}"])
    blocks: list[Block] = [
        f"{facts.model}: {total} parameters: {expert} in experts, {dense} dense, {embedding} in "
        f"embeddings; {active} are active in a token, but all take memory",
        *_row_tables(facts.table_length),
        "",
        Table(_MEMORIES, rows),
        "",
        *_option(facts.option),
    ]
    for one in facts.alternatives:
        blocks += ["or:", *_option(one)]
    blocks += [f"note: {line}" for line in facts.notes]
    if (pins := facts.pins) is not None:
        static, lrfu = share_text(pins.static_hit_rate), share_text(pins.lrfu_hit_rate)
        blocks.append(f"hits at this budget: the hottest that fit {static}, LRFU {lrfu}")
        pinned = f"pinned: {size_text(pins.pin_length)}" if pins.pin_length else "none is pinned"
        blocks.append(f"{pinned}; {pins.reason}")
    forecasts = [one.forecast for one in (facts.option, *facts.alternatives)]
    warnings = [line for one in forecasts if one is not None for line in one.warnings]
    return Page(*blocks, *(f"note: {line}" for line in dict.fromkeys(warnings)))


_MEMORIES = (
    *(Column("", "l", least=12), Column("size", rank=1), Column("dense", rank=4)),
    *(Column("context", rank=3), Column("experts"), Column("computing", rank=5), Column("left")),
)


def _option(option: OptionFacts) -> Iterator[Block]:
    """Write a command line, and where it puts experts."""
    yield Verbatim(f"  {option.command}")
    experts = expert_places(option)
    if option.vram_cache_length is not None:
        experts[0] += ", a cache"
    yield f"  experts: {', '.join(experts)}"
    if option.forecast is not None:
        yield f"  decode: {speed_words(option.forecast)}"
        yield f"  prompt: {prompt_words(option.forecast.prompt)}"


def expert_places(option: OptionFacts | SpeedFacts) -> list[str]:
    """Write how many bytes of experts are in each kind of memory."""
    parts = [(option.vram_expert_length, "in VRAM"), (option.memory_expert_length, "in memory")]
    parts.append((option.streamed_length, "on the drive"))
    return [f"{size_text(length)} {where}" for length, where in parts if length]


_VERDICTS = {"fine": "fine", "limit": "LIMIT", "problem": "PROBLEM", "unknown": UNKNOWN}
_MOST_CHANGES = 3


def doctor(facts: DoctorFacts) -> str:
    """Write a line for each check, its remedy below it, and the forecast of a model."""
    rows = [(one.name, _VERDICTS[one.verdict], one.measured or UNKNOWN) for one in facts.findings]
    table = Table([Column("", "l")] * 3, rows)
    lines = []
    for line, finding in zip(table.lines(), facts.findings, strict=True):
        lines.append(line)
        if finding.hint is not None:
            lines.append(f"    {finding.hint}")
    if facts.prognosis is not None:
        lines += ["", *_prognosis(facts.model or "", facts.prognosis)]
    else:
        lines += ["", "a model says more: `moepack doctor MODEL`"]
    return "\n".join(lines)


def _prognosis(model: str, prognosis: Prognosis) -> Iterator[str]:
    from moepack.bench.diagnosis.doctor import ANSWER_TOKENS

    facts = prognosis.forecast
    if facts is None:
        yield f"{model} does not run here: {prognosis.refusal}"
        if prognosis.refusal_hint is not None:
            yield f"    {prognosis.refusal_hint}"
        return
    (speed,) = facts.forecasts
    budget, machine = speed.budget_length, f" on {facts.machine}" if facts.machine else ""
    places = ", ".join(expert_places(speed))
    yield f"{model}{machine}: {size_text(facts.expert_length)} of experts: {places}"
    yield f"  decode: {speed_words(speed)}; the limit: {prognosis.decode_limit or UNKNOWN}"
    yield f"  prompt: {prompt_words(speed.prompt)}; the limit: {prognosis.prompt_limit or UNKNOWN}"
    if speed.kind in ("cpu", "stream"):
        yield (
            f"  `run` would have {size_text(budget or facts.expert_length)} of memory for experts, "
            f"and compute prompts in micro-batches of up to {speed.prompt.micro_batch:,} tokens"
        )
    if prognosis.seconds is None:
        return
    tokens = f"{speed.prompt.token_count:,} tokens and {count_text(ANSWER_TOKENS, 'token')}"
    takes = f"{tokens} of an answer take {seconds_text(prognosis.seconds)}"
    if not prognosis.changes:
        yield f"  {takes}; no single change of the machine would make it much faster"
        return
    yield f"  {takes}; changes that would help most:"
    for change in prognosis.changes[:_MOST_CHANGES]:
        yield (
            f"    {change.what}: {seconds_text(change.seconds)} "
            f"({rate_text(change.tokens_per_second)} tok/s, "
            f"{seconds_text(change.prompt_seconds)} to the first token)"
        )
