"""The speed of a model, for people."""

from moepack.bench.engine_speed import EngineSpeed, PhaseSpeed, SideFacts
from moepack.bench.measuring import Spread
from moepack.common.sizes import count_text, size_text
from moepack.report.page import Block, Page
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, length_text, number_text, rate_text, share_text

_SPEEDS = (
    *(Column("", "l", least=12), Column("first token, s", "l", rank=1)),
    *(Column("prompt, tok/s", "l", rank=2), Column("tok/s", "l")),
)
_READS = (
    *(Column("", "l", least=12), Column("prompt: read", rank=2), Column("misses", rank=4)),
    *(Column("waiting", rank=5), Column("a token: read"), Column("hits", rank=1)),
    Column("waiting", rank=3),
)


def text(speed: EngineSpeed) -> Page:
    """Write the conditions of the runs, and tables of speeds and reads."""
    blocks: list[Block] = [
        f"{speed.pack}: a model of {size_text(speed.model_length)}, {_limits(speed)}",
        f"{size_text(speed.expert_memory)} of it for experts under moepack",
        f"a prompt of {_prompt(speed)}, then {count_text(speed.token_count, 'token')}; "
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


def _limits(speed: EngineSpeed) -> str:
    if not speed.is_limited:
        return "with no limit on memory: control groups cannot be made here"
    memory = f"within {size_text(speed.memory_limit)}, page cache included"
    if speed.read_limit is None:
        return memory
    return f"{memory}, reads limited to {size_text(speed.read_limit)}/s"


def _prompt(speed: EngineSpeed) -> str:
    count = speed.prompt_count
    tokens = f"{UNKNOWN} tokens" if count is None else count_text(count, "token")
    return f"{tokens}, {speed.micro_batch} at once"


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
