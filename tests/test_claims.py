"""README.md and docs/numbers.md claim what benchmarks/records/ says, to the last digit."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import claims, record, rendering
from benchmarks.claims import DOCUMENTS, is_measured, is_set_up, numbers, problems, record_problems
from benchmarks.record import FOLDER, Machine, Record
from benchmarks.rendering import BLOCK, render
from benchmarks.table import Row

Check = Callable[[str], list[str]]

ROWS = (
    Row("disk", "", note="2.2 GB in 4 shards"),
    Row("pack", "cp", "s", [3, 2, 4], [4, 4, 4], limit=1),
    Row("restore", "cp", "s", [1.234, 9, 2], [4, 4, 4], excluded={2: "another program ran"}),
    Row("pack", "memory", "MiB", [31, 32, 34]),
    Row("verify", "dd", "s", [1], [2]),
)
TABLE = "<!-- record one.json | what | s of a run = cp.ours.median | against `cp` = cp -->\n"
TEXT = f"# Numbers\n\nPacking 2.2 GB takes 0.75 of copying.\n\n{TABLE}<!-- end -->\n"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Write a record; return what checks a document beside it."""
    write(tmp_path)
    monkeypatch.setattr(rendering, "FOLDER", tmp_path)
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    return lambda text: list(problems(tmp_path / "numbers.md", text))


def write(
    folder: Path, command: str = "python -m benchmarks --parts packing", thrown_away: str = ""
) -> None:
    """Write a record into a folder."""
    machine = Machine("a processor, 2 CPUs", "Linux", "ext4", "madvise", "3.11", "nothing else ran")
    facts = (command, "0123456789abcdef", False, "2026-11-27T03:00:00Z", 60.0, machine)
    record.write(Record(*facts, (0.1, 1.9), 0.01, ROWS, thrown_away), folder / "one.json")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_says_what_the_records_say(document: Path) -> None:
    assert list(problems(document, document.read_text())) == []


def test_all_records_are_whole_and_named_and_their_commands_are_there() -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    assert list(record_problems(FOLDER, texts)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_digit_of_a_measured_number_can_change_unnoticed(document: Path) -> None:
    for _, section in claims.sections(document, document.read_text()):
        names = [name for kind, name, *_ in BLOCK.findall(section) if kind == "record"]
        records = [record.read(FOLDER / name) for name in names]
        for number in numbers(BLOCK.sub("", section)):
            if is_measured(number, records):
                for digits in changes(number.digits):
                    changed = number._replace(digits=digits)
                    is_unnoticed = is_measured(changed, records) or is_set_up(changed, records)
                    assert not is_unnoticed, f"{number} could be {digits}: say it in a table"


def changes(digits: str) -> list[str]:
    """Return a number with each of its digits replaced by each other one."""
    return [
        digits[:at] + other + digits[at + 1 :]
        for at, digit in enumerate(digits)
        for other in "0123456789"
        if digit.isdigit() and other != digit
    ]


def test_a_table_is_written_from_the_record(check: Check, tmp_path: Path) -> None:
    written = render(tmp_path / "numbers.md", TEXT)
    assert "| pack | 3 | 0.75 (0.50 to 1.00) |\n| restore | 1.62 | 0.40 (0.31 to 0.50) |" in written
    assert "with reasons in the record: 1" in written.replace("\n", " ")
    assert (
        "a processor, 2 CPUs; load 0.1 before and 1.9 after; other processes took 1%"
        in written.replace("\n", " ")
    )
    assert check(written) == []
    for found in re.finditer(r"\d", written):
        digit = str((int(found[0]) + 1) % 10)
        changed = written[: found.start()] + digit + written[found.end() :]
        assert check(changed), changed


def test_another_table_of_a_record_does_not_repeat_where_it_is_from(
    check: Check, tmp_path: Path
) -> None:
    block = "<!-- record one.json | what | of the time of `dd` = dd -->\n<!-- end -->\n"
    text = render(tmp_path / "numbers.md", f"{TEXT}{block}")
    assert "| verify | 0.50 |\n\n[one.json](one.json), as above.\n" in text, "of a single round"
    assert check(text) == []


@pytest.mark.parametrize(
    ("sentence", "is_claimed"),
    [
        ("It takes 3 s.", True),
        ("It takes 3 ms.", False),
        ("It takes 9 s, which was thrown away.", False),
        ("It takes 0.5 to 1.0 times as long.", True),
        ("It takes 31 to 34 MiB.", True),
        ("It takes 31 to 35 MiB.", False),
        ("It takes 34 MiB (31 to 34).", True),
        ("The 4 shards have 2.2 GB.", True),
        ("The 5 shards have 2.2 GB.", False),
        ("Copying takes 0.75 GiB.", False),
        ("With Python 3.11 and `-n 5`, of Qwen3-30B.", True),
        ("## The 17th\n\nOf another section it is 3 s.", False),
    ],
)
def test_a_number_of_the_text_is_in_the_record_of_its_section(
    check: Check, tmp_path: Path, sentence: str, is_claimed: bool
) -> None:
    text = render(tmp_path / "numbers.md", TEXT)
    assert (check(f"{text}\n{sentence}\n") == []) is is_claimed


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ("<!-- record one.json | what | time = cp.ours -->", "does not name s"),
        ("<!-- record one.json | what | s = mv -->", "no row has 'mv'"),
        ("<!-- record two.json -->", "two.json"),
        ("<!-- record one.json ->", "a block does not begin or end"),
    ],
)
def test_a_block_that_is_wrong_is_named(check: Check, marker: str, problem: str) -> None:
    (found,) = check(f"{marker}\n<!-- end -->\n")
    assert problem in found


@pytest.mark.parametrize(
    "command",
    [
        "python -m benchmarks.gone",
        "python -m benchmarks --part packing",
        "python -m benchmarks --parts unpacking",
        "python -m benchmarks.models",
    ],
)
def test_a_record_whose_command_is_gone_is_named(tmp_path: Path, command: str) -> None:
    write(tmp_path)
    assert list(record_problems(tmp_path, [TEXT])) == []
    write(tmp_path, command)
    assert list(record_problems(tmp_path, [TEXT])) == [f"one.json: its command is gone: {command}"]


def test_nothing_can_be_claimed_by_a_run_that_was_thrown_away(check: Check, tmp_path: Path) -> None:
    write(tmp_path, thrown_away="another program ran")
    text = render(tmp_path / "numbers.md", "<!-- record one.json -->\n<!-- end -->\n")
    assert "thrown away, since another program ran" in text
    assert check(text) == []
    assert check(f"{text}\nIt takes 0.75 of copying.\n")
    assert "nothing can be claimed" in check(TEXT)[0]


def test_a_record_that_no_claim_names_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    assert list(record_problems(tmp_path, [""])) == ["one.json: no claim names it"]


def test_results_whose_rounds_were_not_kept_are_listed_as_such(
    check: Check, tmp_path: Path
) -> None:
    one = {"topic": "Drafts", "text": "27 % more.", "by": "`python -m benchmarks.gone`"}
    one |= {"commit": "01234567", "date": "2026-08-01"}
    facts = {"published; the rounds were not kept": [one]}
    (tmp_path / "old.json").write_text(json.dumps(facts))
    text = render(tmp_path / "numbers.md", "<!-- published old.json | Drafts -->\n<!-- end -->\n")
    assert "- 27 % more. (`python -m benchmarks.gone`; [2026-08-01, 01234567](old.json))" in text
    assert check(text) == []
    assert check(text.replace("27 %", "28 %"))
    (tmp_path / "one.json").unlink()
    assert "its command is gone" in next(record_problems(tmp_path, [text]))
