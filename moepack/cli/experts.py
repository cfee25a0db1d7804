"""The commands `inspect`, `list`, `locate`, `extract`, `rank` and `include-dir`."""

import click

import moepack
from moepack.cli.shared import options
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import flag_option
from moepack.cli.shared.terminal import (
    complain,
    is_csv,
    is_json,
    next_line,
    pass_on,
    show,
    sum_up,
)
from moepack.common import extras
from moepack.common.sizes import Size, size_text
from moepack.storage.atomic import write_whole


@click.command()
@options.source_or_pack_argument
@options.json_option
def inspect(source_or_pack: tuple[str, ...]) -> None:
    """Describe a model or a pack: its layers, experts, tensors and lengths.

    Example: moepack inspect model-00001-of-00004.gguf
    """
    from moepack.inspection.describe import PackFacts
    from moepack.report import model_text

    facts = moepack.inspect(source_or_pack)
    can_run = facts.is_whole if isinstance(facts, PackFacts) else bool(facts.families)
    show(facts, model_text.inspected, next_line("run", *source_or_pack) if can_run else None)


@click.command("list")
@options.opened_argument
@options.hottest_option("blobs")
@options.layers_option
@options.csv_option()
@options.json_option
def list_experts(pack_path: str, hottest: Size | None, layers: str | None) -> None:
    """List every blob and dense tensor: its kind, offset, length and hotness.

    Example: moepack list model.moepack --hottest 8GiB --csv
    """
    from moepack.inspection.listing import BlobRow
    from moepack.report import model_text

    rows = list(moepack.list_pack(pack_path, hottest=hottest, layers=layers))
    blobs = [row for row in rows if isinstance(row, BlobRow)]
    if is_csv():
        pass_on(model_text.listing_csv(rows))
    elif rows or is_json():
        next_step = None
        if blobs and blobs[0].path is None:
            at = ("--layer", str(blobs[0].layer), "--expert", str(blobs[0].expert))
            next_step = next_line("locate", pack_path, *at)
        show({"blobs": blobs, "tensors": rows[len(blobs) :]}, model_text.listing, next_step)
    elif hottest is not None:
        limit = hottest if isinstance(hottest, str) else size_text(hottest)
        complain("note", f"no blob fits into {limit}")


@click.command()
@options.opened_argument
@options.expert_options
@options.csv_option("parts")
@options.json_option
def locate(pack_path: str, layer: int, expert: int, family: str | None) -> None:
    """Show the file and the offset of an expert's blob and of each of its parts.

    Example: moepack locate model.moepack --layer 3 --expert 17
    """
    from moepack.inspection import describe
    from moepack.pack.opening.open_model import open_model
    from moepack.report import model_text

    with open_model(pack_path) as opened:
        facts = describe.describe_blob(opened, layer, expert, family=family)
    show(facts, model_text.blob)


@click.command()
@options.opened_argument
@options.expert_options
@click.option("--part", help="Name of a single part: ffn_up_exps.weight, or up for short.")
@options.output_option()
@options.force_option
@options.summary_options
def extract(
    pack_path: str,
    layer: int,
    expert: int,
    part: str | None,
    family: str | None,
    output: str,
    force: bool,
) -> None:
    """Write the raw bytes of an expert's blob, or of one part, to a file.

    Example: moepack extract m.moepack --layer 3 --expert 17 --part up -o up.bin
    """
    from moepack.inspection.describe import ExtractFacts
    from moepack.pack.opening.open_model import open_model
    from moepack.report import model_text

    with output_file(output, force=force) as target:
        with open_model(pack_path) as opened, opened.reader() as reader:
            opened.locate(layer, expert, part, family=family)  # refuses a blob that is none
            view = reader.read(layer, expert, part, family=family)
        write_whole(target, view)
    sum_up(ExtractFacts(layer, expert, part, output, len(view)), model_text.extracted)


@click.command()
@options.pack_argument
@options.hotness_option
@flag_option("--learned", help="Counts from recent runs of the pack.")
@options.json_option
def rank(pack_path: str, hotness: str | None, learned: bool) -> None:
    """Rank the experts of PACK by other counts; blobs do not move.

    The hottest are pinned, loaded and listed first.

    Example: moepack rank model.moepack --hotness new.csv
    """
    from moepack.report import pack_text

    if (hotness is None) != learned:
        raise click.UsageError("Give --hotness FILE, or --learned.")
    counts = moepack.learned_hotness(pack_path) if hotness is None else hotness
    show(moepack.rank_pack(pack_path, counts), pack_text.ranked)


@click.command("include-dir")
def include_dir() -> None:
    """Print the folder that holds moepack.h, the reader for C and C++.

    Example: moepack include-dir
    """
    pass_on(f"{extras.folder('include')}\n")
