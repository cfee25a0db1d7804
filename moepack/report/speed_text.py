"""How fast a model runs, for people."""

from moepack.bench.engine_speed import EngineSpeed, SideFacts
from moepack.report.values import UNKNOWN, length_text, share_text
from moepack.sizes import size_text


def text(speed: EngineSpeed) -> str:
    """Write the table, and what it is about."""
    limit = f"within {size_text(speed.memory_limit)}, page cache included"
    if not speed.is_limited:
        limit = "with no limit on memory: control groups cannot be made here"
    lines = [
        f"{speed.pack}: a model of {size_text(speed.model_length)}, {limit}",
        f"{size_text(speed.expert_memory)} of it for experts under moepack",
        f"{speed.token_count} tokens, {speed.round_count} rounds in turns: median (least to most)",
        "",
        f"{'':19}  {'tok/s':22}  {'hits':>7}  {'read a token':>12}  {'waiting':>7}",
        *map(_line, speed.sides),
    ]
    if speed.same_text is not None:
        same = "All gave the same text." if speed.same_text else "They gave different texts."
        lines += ["", same]
    return "\n".join(lines)


def _line(side: SideFacts) -> str:
    speed = "killed: out of memory"
    if side.tokens_per_second is not None:
        low, high = side.tokens_per_second_lowest, side.tokens_per_second_highest
        speed = f"{side.tokens_per_second:.3g} ({low:.3g} to {high:.3g})"
    hits, read = share_text(side.hit_rate), length_text(side.read_length_per_token)
    share = UNKNOWN if side.read_share is None else f"{side.read_share:.0%}"
    return f"{side.name:19}  {speed:22}  {hits:>7}  {read:>12}  {share:>7}"
