"""Verdicts on paired rounds of which the truth is known."""

import pytest

from moepack.bench.comparison import MIN_ROUNDS, Round, judge, notes, verdict
from moepack.bench.drive import Usage

GAIN, LOSS, NONE = "Pack faster", "Shards faster", "No difference shown"


def rounds_of(*ratios: float) -> list[Round]:
    """Make rounds in which the slices took so many times as long as the blobs, at depth 4."""
    return [
        Round(
            {4: slice(1)},
            {("blobs", 4): Usage(1, 0, 1, 1), ("slices", 4): Usage(ratio, 0, 3, 1)},
        )
        for ratio in ratios
    ]


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([1.5] * 9 + [1.06, 0.5, 0.5], "gain"),
        ([1.5] * 8 + [1.04, 1.04, 0.5, 0.5], "none"),
        ([0.7] * 9 + [0.94, 2.0, 2.0], "loss"),
        ([0.7] * 8 + [0.96, 0.96, 2.0, 2.0], "none"),
        ([1.0] * 12, "none"),
        ([9.0] * 11, "none"),
    ],
)
def test_a_side_is_faster_if_it_is_in_three_quarters_of_enough_rounds(
    ratios: list[float], word: str
) -> None:
    (gain,) = judge(rounds_of(*ratios), [4])
    assert (gain.word, gain.round_count) == (word, len(ratios))
    assert (gain.ratio is None) is (len(ratios) < MIN_ROUNDS)
    outcome, text = verdict([gain], rounds_of(*ratios), "direct", True)
    assert outcome == word
    assert text.startswith({"gain": GAIN, "loss": LOSS, "none": NONE}[word])


def test_the_verdict_is_about_the_depth_at_which_shards_are_read_fastest() -> None:
    """A gain at a smaller depth alone comes with a deeper queue, without a pack."""
    usages = {
        ("blobs", 1): Usage(2, 0, 1, 1),
        ("slices", 1): Usage(4, 0, 3, 1),
        ("blobs", 4): Usage(1, 0, 1, 1),
        ("slices", 4): Usage(1, 0, 3, 1),
    }
    rounds = [Round({1: slice(1), 4: slice(1, 2)}, usages)] * MIN_ROUNDS
    assert verdict(judge(rounds, [1, 4]), rounds, "direct", True) == (
        "none",
        "No difference shown: at depth 4, where moepack reads the shards fastest, it reads the "
        "pack 1.00 (1.00 to 1.00) times as fast as them. At other depths: 2.00 (2.00 to 2.00) at "
        "depth 1. In brackets: the middle half of the rounds.",
    )


def test_too_few_rounds_say_what_to_do() -> None:
    few = rounds_of(9.0, 9.0)
    assert verdict(judge(few, [4]), few, "direct", True)[1] == (
        f"{NONE}: there was time for 2 rounds, and it takes 12; measure for more `seconds`."
    )


@pytest.mark.parametrize("was_cold", [False, None])
def test_what_may_be_memory_is_no_gain_of_a_drive(was_cold: bool | None) -> None:
    rounds = rounds_of(*[2.0] * 12)
    gains = judge(rounds, [4])
    expected = (None, "No verdict: the reads may have come from the page cache.")
    assert verdict(gains, rounds, "buffered", was_cold) == expected
    assert verdict(gains, rounds, "direct", was_cold)[0] == "gain"
    assert verdict(gains, rounds, "buffered", True)[0] == "gain"


def test_of_a_pack_that_a_drive_may_hold_in_its_memory_a_note_says_so() -> None:
    assert not notes("direct", True, 1 << 30)
    (note,) = notes("direct", True, (1 << 30) - 1)
    assert note.startswith("a small pack")
