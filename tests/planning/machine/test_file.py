"""machine.toml: reading, writing, and refusals."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import RequestError
from moepack.planning.machine.file import (
    MAX_FILE_LENGTH,
    decode,
    read_machine,
    speed_text,
    toml_text,
)
from moepack.planning.machine.model import (
    Drive,
    Figure,
    Gpu,
    Machine,
    ReadSpeed,
    measured,
)

GIB, GB = 1 << 30, 10**9
SOUND = """
name = "the big one"

[memory]
length = "23.5 GiB"
bandwidth = { value = "31.5 GB/s", is = "measured", lowest = "30.1 GB/s", highest = "31.6GB/s" }

[[gpus]]
name = "RTX 3090"
length = "24 GiB"
bandwidth = "936 GB/s"

[[gpus]]
length = { value = "24576 MiB", is = "read" }

[drive]
path = "/models"
bandwidth = "7 GB/s"

[[drive.reads]]
length = "2 MiB"
depth = 1
bandwidth = { value = "1.5 GiB/s", is = "measured" }

[[drive.reads]]
length = "2 MiB"
depth = 4
bandwidth = "3000 MB/s"
"""
MACHINE = Machine(
    "the big one",
    Figure(23.5 * GIB, "typed"),
    Figure(31.5 * GB, "measured", 30.1 * GB, 31.6 * GB),
    (
        Gpu("RTX 3090", Figure(24 * GIB, "typed"), Figure(936 * GB, "typed")),
        Gpu(None, Figure(24 * GIB, "read"), None),
    ),
    Drive(
        "/models",
        Figure(7 * GB, "typed"),
        (
            ReadSpeed(2 << 20, 1, Figure(1.5 * GIB, "measured")),
            ReadSpeed(2 << 20, 4, Figure(3 * GB, "typed")),
        ),
    ),
)


def test_a_file_says_what_a_machine_is(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(SOUND)
    assert read_machine(path) == MACHINE


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("25769803776 B", 24 * GIB),
        ("0.5 TiB", 512 * GIB),
        ("24 GB", 24 * GIB),
        ("0.5 tb", 512 * GIB),
    ],
)
def test_a_gb_of_memory_is_a_gib_as_makers_mean_it(text: str, length: int) -> None:
    assert decode(f'[memory]\nlength = "{text}"'.encode(), "-").memory.value == length


BASIS = 'is = "measured", lowest'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[memory]", "[memory", "m.toml: not TOML (Expected ']' at the end of a table"),
        ("[memory]", "colour = 1\n[memory]", "m.toml: colour: unknown key, expected name, memory"),
        (BASIS, 'by = "me", lowest', "memory.bandwidth.by: unknown key, expected value, is, low"),
        ("depth = 4", "deep = 4", "drive.reads[1].deep: unknown key, expected length, depth, ban"),
        ('length = "23.5 GiB"', "", 'memory.length: missing, expected such as "24 GiB"'),
        ('bandwidth = "3000 MB/s"', "", 'drive.reads[1].bandwidth: missing, expected such as "7'),
        ('value = "1.5 GiB/s", ', "", "drive.reads[0].bandwidth.value: missing"),
        ("depth = 4", "", "drive.reads[1].depth: missing, or not a depth, expected a number of re"),
        ("depth = 4", "depth = 4097", "expected a number of reads in flight, 1 to 4,096, found 4,"),
        ("depth = 4", "depth = 1", "drive.reads[1]: a second time, expected each length and depth"),
        ('"936 GB/s"', "936", 'gpus[0].bandwidth: a number without a unit, expected such as "31.5'),
        ('"936 GB/s"', '"fast"', "gpus[0].bandwidth: not a bandwidth, expected such as"),
        ('"936 GB/s"', '"٩ GB/s"', "gpus[0].bandwidth: not a bandwidth"),
        ('"936 GB/s"', '"936 Gb/s"', "unknown unit, expected MB/s, GB/s, MiB/s, GiB/s …, found 93"),
        ('"24 GiB"', '"24 GiB/s"', "gpus[0].length: unknown unit, expected MB, GB, MiB, GiB …"),
        ('"936 GB/s"', '"0.9 MB/s"', "expected 1 MB/s to 1000 TB/s, found 0.9 MB/s"),
        ('"24 GiB"', '"0.9 MiB"', "possible length, expected 1 MiB to 1048576 TiB, found 0.9 MiB"),
        ('length = "2 MiB"\ndepth = 4', 'length = "8 B"\ndepth = 4', "expected 512 B to 1 TiB"),
        ('is = "measured", l', 'is = "guessed", l', "expected measured or read or typed, found gu"),
        ('lowest = "30.1', 'lowest = "31.55', "lowest: above the value, expected up to 31.5 GB/s"),
        ('"the big one"', '"a\\nb"', "m.toml: name: not a line of text"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_its_place(old: str, new: str, message: str) -> None:
    assert SOUND.count(old) == 1
    with pytest.raises(RequestError) as refused:
        decode(SOUND.replace(old, new).encode(), "m.toml")
    assert message in str(refused.value)
    assert str(refused.value).startswith("m.toml: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "memory: missing, expected [memory] with a length"),
        ("memory = 24", "memory: not a table, expected length, bandwidth, found 24"),
        ("gpus = {}", "gpus: not a list of tables, expected [[gpus]]"),
        (
            "gpus = [7]",
            "gpus[0]: not a table, expected name, unified, length, bandwidth, link, compute, found",
        ),
        ("drive.reads = 7", "drive.reads: not a list of tables, expected [[drive.reads]]"),
        ("[drive]", "drive: it says nothing about speed, expected a bandwidth, or [[drive.reads]]"),
    ],
)
def test_sections_have_to_be_what_they_are(text: str, message: str) -> None:
    sound = "" if text.startswith("memory") or not text else "\n[memory]\nlength = '8 GiB'\n"
    with pytest.raises(RequestError) as refused:
        decode(f"{text}\n{sound}".encode(), "m.toml")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ('"936 GB/s"', '"6400 MT/s"', "two channels of 6400 MT/s are 102.4 GB/s"),
        ('"936 GB/s"', '"0 GB/s"', "leave out unknown figures"),
    ],
)
def test_a_hint_says_what_to_write_instead(old: str, new: str, hint: str) -> None:
    with pytest.raises(RequestError) as refused:
        decode(SOUND.replace(old, new).encode(), "m.toml")
    assert hint in (refused.value.hint or "")


def test_a_file_that_is_too_long_or_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="too long, expected up to 262,144 bytes"):
        decode(SOUND.encode().ljust(MAX_FILE_LENGTH + 1, b"\n"), "m.toml")
    assert decode(SOUND.encode().ljust(MAX_FILE_LENGTH, b"\n"), "m.toml") == MACHINE
    with pytest.raises(RequestError, match="not TOML .'utf-8' codec"):
        decode(b"\xff", "m.toml")
    with pytest.raises(RequestError, match="cannot read: No such file"):
        read_machine(tmp_path / "none.toml")
    with pytest.raises(RequestError, match="cannot read: Is a directory"):
        read_machine(tmp_path)


UNIFIED = """
[memory]
length = "128 GiB"
bandwidth = "256 GB/s"

[[gpus]]
unified = true
"""


def test_a_gpu_of_unified_memory_has_what_the_machine_has() -> None:
    machine = decode(UNIFIED.encode(), "m.toml")
    (gpu,) = machine.gpus
    assert machine.is_unified
    assert (gpu.memory, gpu.bandwidth) == (machine.memory, machine.memory_bandwidth)
    assert machine.link == gpu.bandwidth
    assert decode(toml_text(machine).encode(), "-") == machine
    for added, message in (
        (
            'length = "129 GiB"',
            "gpus[0].length: more than the memory, expected up to 128 GiB, found 129",
        ),
        ('[[gpus]]\nlength = "24 GiB"', "gpus: a GPU beside one of unified memory"),
        ("[drive]", "drive: it says nothing about speed"),
    ):
        with pytest.raises(RequestError) as refused:
            decode(f"{UNIFIED}{added}".encode(), "m.toml")
        assert message in str(refused.value)
    with pytest.raises(RequestError, match="unified: wrong kind of value"):
        decode(UNIFIED.replace("true", '"yes"').encode(), "m.toml")


@given(
    st.floats(1 << 20, 1 << 60) | st.integers(1 << 20, 1 << 53),
    st.floats(10**6, 10**15) | st.integers(10**6, 10**15),
    st.text(st.characters().filter(str.isprintable)),
)
def test_what_was_written_is_read_as_the_same(length: float, speed: float, name: str) -> None:
    memory, bandwidth = Figure(length, "read"), Figure(speed, "measured", speed, speed)
    gpu = Gpu(name, memory, None, bandwidth, Figure(speed, "typed"))
    machine = MACHINE._replace(memory=memory, memory_bandwidth=bandwidth, compute=bandwidth)
    machine = machine._replace(name=name, gpus=(*MACHINE.gpus, gpu))
    assert decode(toml_text(machine).encode(), "-") == machine


def test_figures_are_written_as_people_would() -> None:
    body = tomllib.loads(toml_text(MACHINE))
    assert body["memory"] == {
        "length": "23.5 GiB",
        "bandwidth": {
            **{"value": "31.5 GB/s", "is": "measured"},
            **{"lowest": "30.1 GB/s", "highest": "31.6 GB/s"},
        },
    }
    assert body["gpus"][0]["bandwidth"] == "936 GB/s"
    assert body["gpus"][1] == {"length": {"value": "24 GiB", "is": "read"}}
    assert body["drive"]["reads"][1] == {"length": "2 MiB", "depth": 4, "bandwidth": "3 GB/s"}


def test_what_is_unknown_is_left_out_and_its_form_shown() -> None:
    text = toml_text(Machine(None, Figure(GB, "read"), None))
    assert tomllib.loads(text) == {"memory": {"length": {"value": "976562.5 KiB", "is": "read"}}}
    shown = (
        text.replace("# [", "[").replace("# bandwidth", "bandwidth").replace("# length", "length")
    )
    typed = decode(shown.encode(), "-")
    assert typed.memory_bandwidth == Figure(51.2 * GB, "typed")
    assert typed.gpus == (Gpu(None, Figure(24 * GIB, "typed"), Figure(936 * GB, "typed")),)
    assert typed.drive == Drive(None, Figure(7 * GB, "typed"))


def test_what_was_measured_is_written_with_four_digits() -> None:
    figure = measured([123.456e6, 1.23456e9, 7.6543e9])
    assert figure == Figure(1.235e9, "measured", 123.5e6, 7.654e9)
    assert [speed_text(value) for value in (1.235e9, 123.5e6)] == ["1.235 GB/s", "123.5 MB/s"]


MIB = 1 << 20
STEPS = {count: 50e-6 + count * MIB / 2e9 for count in (1, 2, 4, 8)}
"""Seconds of steps that miss so many experts of a MiB: 50 µs and 2 GB/s."""


def drive_of(seconds: dict[int, float], length: int = MIB) -> Drive:
    speeds = (
        ReadSpeed(length, count, Figure(count * length / spent, "measured"))
        for count, spent in seconds.items()
    )
    return Drive(None, None, tuple(speeds))


def test_steps_that_miss_more_tell_a_wait_from_the_bytes() -> None:
    wait, bandwidth = drive_of(STEPS).step(MIB)
    assert wait == pytest.approx(50e-6)
    assert bandwidth.value == pytest.approx(2e9)
    assert bandwidth.basis == "measured"


@pytest.mark.parametrize(
    "seconds",
    [
        {4: 2e-3},  # one kind of steps alone
        {1: 1e-3, 8: 4e-3, 2: 1.1e-3},
        {1: 1e-3, 2: 2.2e-3, 4: 4.8e-3},  # slower where more are missed: no wait is below 0
        {1: 3e-3, 8: 2e-3},  # a drive that others use
    ],
)
def test_no_step_takes_less_than_nothing(seconds: dict[int, float]) -> None:
    wait, bandwidth = drive_of(seconds).step(MIB)
    assert wait >= 0
    fastest = max(count * MIB / spent for count, spent in seconds.items())
    assert 0 < bandwidth.value <= 1.5 * fastest


def test_of_a_typed_bandwidth_a_wait_is_assumed() -> None:
    figure = Figure(3e9, "typed")
    wait, bandwidth = Drive(None, figure).step(MIB)
    assert 0 < wait < 1e-3
    assert bandwidth == figure
