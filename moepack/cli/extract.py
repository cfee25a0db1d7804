"""The command `extract`."""

import click

from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    expert_options,
    force_option,
    opened_argument,
    output_option,
    summary_options,
)
from moepack.cli.shared.terminal import sum_up
from moepack.common.errors import RequestError
from moepack.storage.atomic import write_whole


@click.command()
@opened_argument
@expert_options
@click.option("--part", help="Name of a single part: ffn_up_exps.weight, or up for short.")
@output_option()
@force_option
@summary_options
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
    from moepack.inspection import describe
    from moepack.inspection.facts import ExtractFacts
    from moepack.pack.opening.open_model import open_model
    from moepack.report import text

    with output_file(output, force=force) as target:
        with open_model(pack_path) as opened, opened.reader() as reader:
            if part is None:
                facts = describe.describe_blob(opened, layer, expert, family=family)
                if facts.path is None:
                    problem = "no blob here: its parts lie apart in the shards"
                    hint = f"name a part with --part, such as {facts.parts[0].name}"
                    place = f"layer {layer} expert {expert}"
                    raise RequestError(problem, path=pack_path, place=place, hint=hint)
            view = reader.read(layer, expert, part, family=family)
        write_whole(target, view)
    sum_up(ExtractFacts(layer, expert, part, output, len(view)), text.extracted)
