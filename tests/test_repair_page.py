"""The page on repair: its commands mend packs that are broken in the way that it names."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import moepack
from tests.support.interruptions import StopHereError
from tests.support.models import FIXTURES, flip
from tests.support.needs import needs_llama, require_disk
from tests.support.pulls import copy_pack, store_of_packs
from tests.support.warm_command import Run

PAGE = (Path(__file__).parent.parent / "docs" / "repair.md").read_text()
SHARD, PACK = "model-00001-of-00002.gguf", "model.moepack"
HOST = "https://HOST/"


class Fault(NamedTuple):
    """Breaks the pack in a folder, and the command that says so, with words of the page."""

    make: Callable[[Path, str], None]
    command: str
    words: str
    code: int = 4


def stop_at(share: float) -> Callable[[int, int], None]:
    """Return a progress callback that interrupts when a share of the work is done."""
    done = 0

    def progress(length: int, total: int) -> None:
        nonlocal done
        done += length
        if done > share * total > 0:
            raise StopHereError

    return progress


def damage_a_part(folder: Path, _address: str) -> None:
    with moepack.Pack(folder / PACK) as pack:
        where = pack.locate(1, 2, "down")
    flip(where.path, where.offset)


def damage_the_index(folder: Path, _address: str) -> None:
    flip(folder / PACK / "index.bin", 99)


def take_another_pack(folder: Path, _address: str) -> None:
    shutil.rmtree(folder / PACK)
    moepack.pack_model(FIXTURES / "granite-swa-Q4_K_M-t7-00001-of-00004.gguf", folder / PACK)


def damage_the_mirror(folder: Path, _address: str) -> None:
    (folder / "second").mkdir()
    moepack.mirror_pack(folder / PACK, folder / "second")
    flip(folder / "second" / f"{PACK}.mirror" / "experts-00000.bin", 0)


def interrupt_in_place(folder: Path, _address: str) -> None:
    shutil.rmtree(folder / PACK)
    with pytest.raises(StopHereError):  # a half of the work is reading
        moepack.pack_in_place(folder / SHARD, folder / PACK, threads=1, progress=stop_at(0.75))


def damage_the_journal(folder: Path, address: str) -> None:
    interrupt_in_place(folder, address)
    flip(folder / PACK / "in-place" / "journal", 9)


def interrupt_a_pull(folder: Path, address: str) -> None:
    shutil.rmtree(folder / PACK)
    with pytest.raises(StopHereError):
        moepack.pull(address, folder / PACK, threads=1, progress=stop_at(0.5))


def pull_a_part(folder: Path, address: str) -> None:
    shutil.rmtree(folder / PACK)
    moepack.pull(address, folder / PACK, layers="1")


def damage_a_pulled_part(folder: Path, address: str) -> None:
    pull_a_part(folder, address)
    damage_a_part(folder, address)


def damage_the_record(folder: Path, address: str) -> None:
    pull_a_part(folder, address)
    flip(folder / PACK / ".pull.json", 30)


def damage_the_shards(folder: Path, _address: str) -> None:
    flip(folder / SHARD, 0)


FAULTS = {
    "A part is damaged": Fault(damage_a_part, f"verify {PACK}", "digest", 5),
    "The index or the manifest is damaged": Fault(damage_the_index, f"verify {PACK}", "index", 5),
    "The pack is of other shards": Fault(
        take_another_pack, f"verify {PACK} --source {SHARD}", "source", 5
    ),
    "The mirror is damaged": Fault(damage_the_mirror, f"verify {PACK}", "mirror", 5),
    "Packing in place was interrupted": Fault(
        interrupt_in_place, f"run {PACK}", "it is made in place: go on"
    ),
    "The journal of packing in place is damaged": Fault(
        damage_the_journal, f"pack --in-place --resume -o {PACK}", "the journal is damaged", 6
    ),
    "A pull was interrupted": Fault(
        interrupt_a_pull, f"restore {PACK} -o out", "a part of the pack is not here", 2
    ),
    "A part of a pack is damaged": Fault(
        damage_a_pulled_part, f"extract {PACK} --layer 1 --expert 2 -o out", "damaged here, and", 0
    ),
    "The record of a pull is damaged": Fault(
        damage_the_record, f"verify {PACK}", ".pull.json is damaged"
    ),
    "The shards are damaged": Fault(damage_the_shards, f"run {SHARD} -p a", "damaged shards", 3),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model that answers, its pack, and a copy of that."""
    folder = tmp_path_factory.mktemp("models")
    for shard in FIXTURES.glob("chat-*-of-00002.gguf"):
        shutil.copy(shard, folder / shard.name.replace("chat", "model"))
    moepack.pack_model(folder / SHARD, folder / PACK)
    shutil.copytree(folder / PACK, folder / "copy.moepack")
    return folder


@pytest.fixture
def host(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    copy_pack(models / PACK, tmp_path / "store", "copy.moepack")
    with store_of_packs(tmp_path / "store", monkeypatch) as server:
        yield f"{server.url}/"


def test_the_page_is_short_and_leads_to_each_of_its_parts() -> None:
    assert PAGE.count("\n") <= 100
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert headings == [*FAULTS]
    links = re.findall(r"\(#([\w-]+)\)", PAGE)
    assert set(links) == {heading.lower().replace(" ", "-") for heading in headings}


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("heading", FAULTS)
def test_the_commands_of_a_part_mend_what_it_names(
    heading: str,
    models: Path,
    host: str,
    tmp_path: Path,
    cli: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_disk(tmp_path)
    folder = Path(shutil.copytree(models, tmp_path / "here"))
    monkeypatch.chdir(folder)
    fault = FAULTS[heading]
    fault.make(folder, f"{host}copy.moepack")
    broken = cli(*shlex.split(fault.command), input="")
    assert broken.returncode == fault.code, broken.stderr
    table = PAGE.partition("\n## ")[0]
    assert fault.words in table
    assert fault.words in broken.stdout + broken.stderr or heading == "The shards are damaged"
    is_hinted = "moepack repair model.moepack --from SOURCE_OR_PACK" in broken.stderr
    assert is_hinted == (heading in [*FAULTS][:2])
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^    (moepack .*)$", text, re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        done = cli(*shlex.split(line.replace(HOST, host))[1:], input="")
        assert done.returncode == 0, f"{line}\n{done.stderr}"
