"""The directory of sections: what is placed is found again, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.format import records, sections

OTHERS = [name for name in records.RECORD_LENGTHS if name not in records.FIRST_SECTIONS]


def with_as_many_as_parts(counts: dict[str, int]) -> dict[str, int]:
    """Give those sections that have a record for each part, or for all there is, as many."""
    each = {"stored_digests": counts["parts"], "second_places": counts["parts"]}
    each["strong_digests"] = counts["parts"] + counts["tensors"] + counts["shard_bytes"]
    return {name: counts[name] for name in records.FIRST_SECTIONS} | counts | each


COUNTS = (
    st.permutations(OTHERS)
    .flatmap(
        lambda names: st.fixed_dictionaries(
            {name: st.integers(1, 60) for name in (*records.FIRST_SECTIONS, *names)}
        )
    )
    .map(with_as_many_as_parts)
)


def bytes_of(directory: sections.Directory) -> tuple[bytes, records.Header]:
    """Return an index of zeros with this directory, and its header."""
    header = records.Header(
        magic=records.MAGIC,
        format_version=1,
        header_length=records.Header.LAYOUT.size,
        index_length=directory.index_length,
        section_count=len(directory.sections),
        section_record_length=records.SectionRecord.LAYOUT.size,
        blob_alignment=1,
        part_alignment=1,
        tensor_alignment=1,
    )
    start = header.pack() + sections.encode(directory)
    return start + bytes(directory.index_length - len(start)), header


@given(COUNTS)
def test_what_is_placed_is_found_again(counts: dict[str, int]) -> None:
    placed = sections.place(counts)
    data, header = bytes_of(placed)
    found = sections.decode(data, header, "index.bin")
    assert found.sections == placed.sections
    assert found.index_length == placed.index_length == len(data)


@given(COUNTS)
def test_sections_start_at_multiples_of_64_one_after_the_other(counts: dict[str, int]) -> None:
    placed = sections.place(counts)
    end = 56 + 48 * len(counts)
    for name, section in placed.sections.items():
        assert section.offset % 64 == 0
        assert 0 <= section.offset - end < 64
        assert section.is_required == (name in records.REQUIRED_SECTIONS)
        end = section.end
    assert 8 <= placed.index_length - end < 64 + 8


def test_a_section_that_is_not_there_is_empty() -> None:
    directory = sections.place(dict.fromkeys(records.NEEDED_SECTIONS, 1))
    assert directory["tensors"].record_count == 0
    assert directory["tensors"].record_length == records.TensorRecord.LAYOUT.size


@pytest.mark.parametrize("name", records.RECORD_LENGTHS)
def test_records_are_whole_words_so_that_c_can_map_them(name: str) -> None:
    assert records.RECORD_LENGTHS[name] % (4 if name == "ranks" else 8) == 0
