"""The verdicts of the C reader and the Python reader on a pack, in the same words."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import moepack
from moepack.common import digest
from moepack.common.errors import PackError
from moepack.pack.format.records import BlobRecord
from moepack.pack.reading.reader import Reader
from tests.support.children import run_command
from tests.support.pack_draft import Draft, Rule


class Verdict(NamedTuple):
    """A line for each thing in a pack, or the error, with its code, of a reader that refuses it.

    `place` is that of Python's error.
    """

    lines: list[str]
    refusal: str
    place: str = ""

    def agrees(self, other: "Verdict") -> bool:
        """Return whether both refuse, or both have the same lines."""
        return bool(self.refusal and other.refusal) or self == other


class Case(NamedTuple):
    """One change of a pack, and words of the C reader's refusal; empty if it must read it."""

    name: str
    breaks: Callable[[Draft], object]
    words: str = ""


def c_says(program: Path, mode: str, packs: list[Path]) -> list[Verdict]:
    """Run the C program on packs; a sanitizer's report, or any other words, are a failure."""
    verdicts = []
    for start in range(0, len(packs), 4000):
        batch = packs[start : start + 4000]
        run = run_command(program, mode, *batch)
        assert run.stderr == ""
        outputs = run.stdout.split("pack ")[1:]
        assert len(outputs) == len(batch)
        verdicts += [verdict_of(output) for output in outputs]
        assert run.returncode == any(verdict.refusal for verdict in verdicts[start:])
    return verdicts


def output_of(program: Path, *arguments: str | Path) -> str:
    """Return what the C program prints; any other words are a failure."""
    run = run_command(program, *arguments)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def verdict_of(output: str) -> Verdict:
    _, *lines, last = output.splitlines()
    assert last == "sound" or last.startswith("refused "), last
    assert last.isprintable()
    assert len(last) < 256 + 20
    return Verdict(lines, last.removeprefix("refused ").removeprefix("sound"))


def python_says(path: Path, *, reads: bool = False) -> Verdict:
    """Look up all that a pack holds, and read it; of a refused one nothing is found."""
    try:
        with moepack.open(path) as pack:
            if not reads:
                return Verdict(everything(pack, None), "")
            with pack.reader(backend="buffered") as reader:
                return Verdict(everything(pack, reader), "")
    except PackError as error:
        return Verdict([], str(error), error.place or "")


def everything(pack: moepack.Pack, reader: Reader | None) -> list[str]:
    return [*experts(pack, reader), *ranks(pack), *hottest(pack), *tensors(pack, reader)]


def experts(pack: moepack.Pack, reader: Reader | None) -> Iterator[str]:
    for family in pack.index.families:
        for expert in range(family.expert_count):
            whose = f"{family.layer} {family.name} {expert}"
            hotness = pack.hotness(family.layer, expert, family=family.name)
            blob = BlobRecord(*pack.index.blob(family.first_blob + expert))
            where = f"{blob.file} {blob.offset}" if blob.length else "None None"
            length = blob.length or sum(kind.length for kind in family.part_kinds)
            yield f"blob {whose} {where} {length} {hotness.rank} {hotness.hotness}"
            for kind in family.part_kinds:
                part = pack.locate(family.layer, expert, kind.name, family=family.name)
                inside = part.offset - blob.offset if blob.length else None
                where = f"{file_of(pack, part.path)} {part.offset} {inside}"
                yield (
                    f"part {whose} {kind.name} {kind.type_name} {kind.type_id} {where} "
                    f"{part.length} {digest_text(part.digest)} "
                    f"{' '.join(map(str, pack.index.origin(family, kind, expert)))}"
                )
                if reader is not None:
                    key = (family.layer, expert, kind.name)
                    part_digest = digest.xxh3(reader.read(*key, family=family.name))
                    yield f"bytes {part_digest:016x}"


def file_of(pack: moepack.Pack, path: Path) -> int:
    """Return the number of a file."""
    return pack.file_paths.index(path)


def digest_text(value: int | None) -> str:
    return "None" if value is None else f"{value:016x}"


def ranks(pack: moepack.Pack) -> Iterator[str]:
    blobs = [
        f"{family.layer} {family.name} {expert}"
        for family in pack.index.families
        for expert in range(family.expert_count)
    ]
    for rank in range(pack.index.blob_count):
        yield f"rank {rank} {blobs[pack.index.blob_at_rank(rank)]}"


def hottest(pack: moepack.Pack) -> Iterator[str]:
    """List the hottest experts within the budgets of the C program."""
    main = {family.layer: family.name for family in reversed(pack.index.families)}
    for name, budget in ((None, 40000), ("ffn_chexps", 40000), (None, 1 << 62)):
        for layer, expert in pack.hottest(budget, family=name):
            rank, hotness, length = pack.hotness(layer, expert, family=name)
            yield f"hot {layer} {name or main[layer]} {expert} {rank} {length} {hotness}"


def tensors(pack: moepack.Pack, reader: Reader | None) -> Iterator[str]:
    for tensor in pack.index.tensors():
        axes = (*tensor.shape, 0, 0, 0, 0)[:4]
        tensor_digest = pack.index.files[tensor.file].known(tensor.digest)
        fields = (
            *(tensor.name.encode().hex(), tensor.type_name, tensor.type_id, int(tensor.inferred)),
            *(len(tensor.shape), *axes, tensor.file, tensor.offset, tensor.length),
            *(digest_text(tensor_digest), tensor.shard, tensor.shard_offset),
        )
        yield f"tensor {' '.join(map(str, fields))}"
        if reader is not None:
            yield f"bytes {digest.xxh3(reader.read_dense(tensor.name)):016x}"


def drafts(small: Path, folder: Path, rules: Sequence[Rule | Case]) -> list[Path]:
    """Make a pack for each rule, with all digests right."""
    paths = []
    for number, rule in enumerate(rules):
        path = Path(shutil.copytree(small, folder / str(number)))
        draft = Draft(path)
        rule.breaks(draft)
        draft.save()
        paths.append(path)
    return paths
