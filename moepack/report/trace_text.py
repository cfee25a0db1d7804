"""How what was found in traces is printed for people."""

from typing import Any

from moepack.sizes import size_text


def imported(facts: dict[str, Any]) -> str:
    """Write what `moepack trace import` came to."""
    tokens = f"{facts['token_count']:,} tokens in {facts['request_count']:,} requests"
    lines = [f"{facts['path']}: {tokens}, {facts['selection_count']:,} selections"]
    if facts["counted_selection_count"]:
        lines.append(f"  {facts['counted_selection_count']:,} more are counts without tokens")
    lines += _unknown(facts["unknown"]) + _warnings(facts["warnings"])
    return "\n".join(lines)


def hotness(facts: dict[str, Any]) -> str:
    """Write what `moepack hotness` came to."""
    over = "an unknown number of" if facts["token_count"] is None else f"{facts['token_count']:,}"
    lines = [
        f"{facts['path']}: {facts['selection_count']:,} selections of {facts['expert_count']:,} "
        f"experts over {over} tokens"
    ]
    held = facts["held_out"]
    if held is None:
        lines.append("  nothing is held out to judge by: only counts were given")
    else:
        lines.append(f"  a half is held out to judge by, divided by {held['by']}")
    return "\n".join([*lines, *_warnings(facts["warnings"])])


def stats(facts: dict[str, Any]) -> str:
    """Write the working-set table and the reuse of `moepack trace stats`."""
    lines = [
        f"{facts['window_count']} windows of {facts['window']} tokens "
        f"in {facts['request_count']} requests",
        f"{'share':<8} {'experts (U)':>12} {'new (D)':>12}"
        + (f" {'bytes':>10} {'new bytes':>10}" if facts["has_lengths"] else ""),
    ]
    for row in facts["working_set"]:
        line = f"{row['share']:<8.1%} {row['expert_count']:>12.2f} {row['new_count']:>12.2f}"
        if facts["has_lengths"]:
            line += (
                f" {size_text(round(row['length'])):>10} {size_text(round(row['new_length'])):>10}"
            )
        lines.append(line)
    if not facts["window_count"]:
        lines.append("no request has a whole window of tokens that are known one by one")
    return "\n".join([*lines, *_reuse(facts), *_warnings(facts["warnings"])])


def _reuse(facts: dict[str, Any]) -> list[str]:
    if not facts["reuse"]["token_count"]:
        return []
    reuse = facts["reuse"]
    lines = [
        f"of {reuse['token_count']:,} tokens:",
        f"  chosen by the token before too   {_percent(reuse['repeat_share'])}",
        f"  half of all reuses within        {reuse['median_distance']} tokens",
        "layer   repeated   half within",
    ]
    for layer in reuse["layers"]:
        lines.append(
            f"{layer['layer']:>5} {_percent(layer['repeat_share']):>10} "
            f"{layer['median_distance']:>13}"
        )
    return lines


def concentration(facts: dict[str, Any]) -> str:
    """Write the concentration gate."""
    total = facts["total"]
    lines = [
        "layer   entropy    Gini   never   top 5 %   top 10 %   top 25 %   top 50 %   "
        "(learned on one half, measured on the other)"
    ]
    for skew in [*facts["layers"], total]:
        name = "all" if skew["layer"] is None else str(skew["layer"])
        covered = "".join(f"{_percent(one['share']):>11}" for one in skew["coverage"])
        lines.append(
            f"{name:>5} {skew['entropy']:>9.3f} {skew['gini']:>7.3f} {skew['never_count']:>7}"
            f"{covered[1:]}"
        )
    for title, name in (("even router", "even_share"), ("latest as many", "latest_share")):
        covered = "".join(f"{_percent(one[name]):>11}" for one in total["coverage"])
        lines.append(f"{title:<31}{covered[1:]}")
    return "\n".join([*lines, facts["reason"], *_warnings(facts["warnings"])])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _unknown(words: list[str]) -> list[str]:
    return [f"  not known: {', '.join(words)}"] if words else []


def _warnings(warnings: dict[str, int]) -> list[str]:
    return [f"  left out: {count} x {problem}" for problem, count in sorted(warnings.items())]
