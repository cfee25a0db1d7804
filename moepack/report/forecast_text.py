"""Forecasts, written for people."""

from collections.abc import Iterator, Sequence

from moepack.common.sizes import count_text, size_text
from moepack.planning.forecasting.facts import (
    ForecastFacts,
    PromptFacts,
    ReceiptFacts,
    SpeedFacts,
    TermFacts,
)
from moepack.planning.forecasting.published import PublishedFacts
from moepack.planning.forecasting.reads import KIND_WORDS
from moepack.report.page import Block, Page
from moepack.report.table import Column, Table
from moepack.report.values import (
    UNKNOWN,
    length_text,
    rate_text,
    seconds_text,
    share_text,
    speed_text,
)

_NAMES = {"vram": "VRAM", "link": "GPU's link"}


def text(facts: ForecastFacts) -> Page:
    """Write the reads of a token, the forecasts, and their evidence."""
    machine = f" on {facts.machine}" if facts.machine else ""
    blocks: list[Block] = [
        f"{facts.model}{machine}: {size_text(facts.expert_length)} of experts, "
        f"{length_text(facts.dense_length)} dense; a token reads "
        f"{length_text(facts.read_expert_length)} of experts, and "
        f"{length_text(facts.read_dense_length)} besides",
    ]
    if facts.table_length:
        blocks.append(table_words(facts.table_length))
    blocks.append("")
    if len(facts.forecasts) == 1:
        blocks += _single(facts.forecasts[0])
    else:
        blocks += [speeds(facts.forecasts), ""]
    blocks += [f"note: {line}" for line in _notes(facts.forecasts)]
    blocks += list(map(_receipt, facts.receipts))
    if facts.next_receipt is not None:
        blocks.append("a measured run of this model here makes it more certain")
    return Page(*blocks)


def _single(one: SpeedFacts) -> Iterator[Block]:
    """Write one forecast with its terms."""
    yield f"{mode_words(one)}: {speed_words(one)}"
    yield _terms(one)
    if one.misses_from is not None:
        yield (
            f"{share_text(one.hit_rate)} of lookups hit, and a token reads "
            f"{length_text(one.missed_length)} of the drive (from: {one.misses_from})"
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


def _terms(one: SpeedFacts) -> Table:
    """Write the time of a token by its terms."""
    return Table(_TERM_COLUMNS, [list(_term(term, one.binding)) for term in one.terms], indent=2)


_TERM_COLUMNS = (
    *(Column("", "l"), Column("", rank=1), Column("", rank=2), Column(""), Column("", "l", rank=3)),
)


def _notes(forecasts: tuple[SpeedFacts, ...]) -> Iterator[str]:
    """Yield the warnings that all forecasts share, and the reasons for unknown speeds."""
    yield from (
        line for line in forecasts[0].warnings if all(line in one.warnings for one in forecasts)
    )
    if len(forecasts) > 1:
        reasons = (one.reason for one in forecasts if one.reason is not None)
        yield from (f"no speeds where {reason}" for reason in dict.fromkeys(reasons))


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


def table_words(length: int) -> str:
    """Write the length of row tables, which stay on the drive."""
    return f"row tables of {size_text(length)} stay on the drive: a token reads few of their rows"


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


_LIMITS = {"drive": "the drive", "link": "the GPU's link", "computing": "computing"}


def speed_words(one: SpeedFacts) -> str:
    """Write the speed of decoding with its range, or the reason why it is unknown."""
    if one.tokens_per_second is None:
        return f"{UNKNOWN} tok/s: {one.reason}"
    words = f"{rate_text(one.tokens_per_second)} tok/s, {rate_text(one.lowest)} to "
    if one.ceiling is None:
        return words + rate_text(one.highest)
    most = f"at most {rate_text(one.ceiling)}, if every bandwidth were reached"
    return f"{words}{rate_text(one.highest)}; {most}"


def _term(term: TermFacts, binding: str | None) -> Iterator[str]:
    """Yield the cells of a term: name, amount, speed, time, and whether it takes longest."""
    seconds = term.seconds
    yield _NAMES.get(term.name, term.name)
    if term.count is not None:
        each = UNKNOWN if seconds is None else f"{seconds / term.count * 1e6:.0f} µs each"
        yield from (str(term.count), each)
    else:
        nominal = "" if term.bandwidth is None else f" of {speed_text(term.bandwidth)} {term.basis}"
        yield from (length_text(term.length), f"{speed_text(term.reached)}{nominal}")
    yield UNKNOWN if seconds is None else f"{seconds * 1e3:.2f} ms"
    yield "takes longest" if term.name == binding else ""


def speeds(forecasts: Sequence[SpeedFacts]) -> Table:
    """Write a row for each forecast."""
    streams = forecasts[0].budget_length is not None
    columns = [Column("--n-cpu-moe")]
    if streams:
        columns = [Column("budget"), Column("hits", rank=5), Column("read a token", rank=6)]
    count = f"{forecasts[0].prompt.token_count:,} tokens"
    columns += [
        *(Column("VRAM", rank=3), Column("memory", rank=7)),
        *(Column("tok/s"), Column("from", rank=2), Column("to", rank=2), Column("at most", rank=8)),
        *(Column("longest", rank=4), Column(count, rank=1), Column("from", rank=9)),
        *(Column("to", rank=9), Column("", "l")),
    ]
    has_vram = any(one.vram_length != 0 for one in forecasts)
    rows = []
    for one in forecasts:
        if streams:
            budget, read = length_text(one.budget_length), length_text(one.missed_length)
            cells = [budget, share_text(one.hit_rate), read]
        else:
            cells = [str(one.cpu_layer_count)]
        vram = length_text(one.vram_length) if has_vram else ""
        rates = (one.tokens_per_second, one.lowest, one.highest, one.ceiling)
        rows.append(
            [
                *(*cells, vram, length_text(one.memory_length), *map(rate_text, rates)),
                _NAMES.get(one.binding or UNKNOWN, one.binding or UNKNOWN),
                *map(seconds_text, (one.prompt.seconds, one.prompt.shortest, one.prompt.longest)),
                "does not fit" if one.fits is False else "",
            ]
        )
    return Table(columns, rows)


def _receipt(receipt: ReceiptFacts) -> str:
    where = f"{receipt.path}, {receipt.place}: {rate_text(receipt.tokens_per_second)} tok/s"
    if receipt.refusal is not None:
        return f"receipt {where}, not used: {receipt.refusal}"
    return f"receipt {where} ({', '.join(receipt.fields)})"


def published(facts: PublishedFacts) -> str:
    """Write the result of the published formula."""
    terms = {"dense": facts.dense_seconds, "memory": facts.memory_seconds}
    parts = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in terms.items()]
    return (
        f"{facts.tokens_per_second:.4f} tok/s by the formula of estimate_speed.py: "
        f"{', '.join(parts)}, drive {facts.drive_seconds * 1e3:.1f} ms"
    )
