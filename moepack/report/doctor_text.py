"""Findings of a doctor, written for people."""

from collections.abc import Iterator

from moepack.bench.diagnosis.doctor import DoctorFacts
from moepack.bench.diagnosis.prognosis import ANSWER_TOKENS, Prognosis
from moepack.common.sizes import count_text, size_text
from moepack.report.forecast_text import prompt_words, speed_words
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, rate_text, seconds_text

_VERDICTS = {"fine": "fine", "limit": "LIMIT", "problem": "PROBLEM", "unknown": UNKNOWN}
_MOST_CHANGES = 3
_FINDINGS = (Column("", "l"), Column("", "l"), Column("", "l"))


def text(facts: DoctorFacts) -> str:
    """Write a line for each check, its remedy below it, and the forecast of a model."""
    lines = []
    rows = [
        [finding.name, _VERDICTS[finding.verdict], finding.measured or UNKNOWN]
        for finding in facts.findings
    ]
    for line, finding in zip(Table(_FINDINGS, rows).lines(), facts.findings, strict=True):
        lines.append(line)
        if finding.hint is not None:
            lines.append(f"    {finding.hint}")
    if facts.prognosis is not None:
        lines += ["", *_prognosis(facts.model or "", facts.prognosis)]
    else:
        lines += ["", "a model says more: `moepack doctor MODEL`"]
    return "\n".join(lines)


def _prognosis(model: str, prognosis: Prognosis) -> Iterator[str]:
    facts = prognosis.forecast
    if facts is None:
        yield f"{model} does not run here: {prognosis.refusal}"
        if prognosis.refusal_hint is not None:
            yield f"    {prognosis.refusal_hint}"
        return
    (speed,) = facts.forecasts
    budget = speed.budget_length
    where = "all in memory" if budget is None else f"{size_text(budget)} of them in memory"
    yield f"{model}: {size_text(facts.expert_length)} of experts, {where}"
    yield f"  decode: {speed_words(speed)}; the limit: {prognosis.decode_limit or UNKNOWN}"
    yield f"  prompt: {prompt_words(speed.prompt)}; the limit: {prognosis.prompt_limit or UNKNOWN}"
    yield (
        f"  `run` would have {size_text(budget or facts.expert_length)} of memory for experts, and "
        f"compute prompts in micro-batches of up to {speed.prompt.micro_batch:,} tokens"
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
