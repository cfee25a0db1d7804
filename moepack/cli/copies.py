"""The commands `index`, `mount`, `pull`, `mirror`, `repair`, `export`: packs at a second place."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.shared import options
from moepack.cli.shared.options import file_option, flag_option, number_option, size_option
from moepack.cli.shared.parameters import OUTPUT_FOLDER, RESUMABLE_FILE, ModelName, PathName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import announce, complain, is_json, next_line, say, show, sum_up
from moepack.cli.words.front import Commands, with_help
from moepack.common.errors import RequestError
from moepack.common.escaping import one_line, shell_words
from moepack.common.path_hints import missing_model_hint
from moepack.common.paths import is_remote
from moepack.common.sizes import Size, size_text

if TYPE_CHECKING:
    from moepack.pack.engines.contract import Engine, ExportOption
    from moepack.pack.mounting.mount import MountFacts


@click.command()
@click.argument("source", nargs=-1, required=True, type=ModelName(), metavar="SOURCE...")
@options.folder_option("Folder of the new index.")
@options.hotness_option
@flag_option("--digests", help="Read the shards for digests, so that reads are checked.")
@options.threads_option
@options.progress_options
def index(source: tuple[str, ...], target: str, **options: Any) -> None:
    """Index the experts in the shards of SOURCE, without a copy.

    Readers, bench and engines use DIR like a pack; it has links to the shards.

    Example: moepack index model-00001-of-00004.gguf -o model.index
    """
    from moepack.report import pack_text

    with progress("indexing") as advance:
        summary = moepack.index_model(source, target, progress=advance, **options)
    sum_up(summary, pack_text.indexed, next_line("run", target))


@click.command()
@options.pack_argument
@click.argument("target", type=OUTPUT_FOLDER, metavar="DIR")
@options.json_option
def mount(pack_path: str, target: str) -> None:
    """Serve the shards of a whole pack as files in the empty folder DIR.

    Nothing is stored. It ends with Ctrl-C, or when DIR is unmounted.

    Example: moepack mount model.moepack shards
    """
    from moepack.report import pack_text

    context = click.get_current_context()

    def started(facts: MountFacts) -> None:
        shard = os.path.join(facts.path, facts.files[0].name)
        # Nobody may read it, but the files are there; and click knows no other thread.
        with contextlib.suppress(OSError), context.scope(cleanup=False):
            show(facts, pack_text.mounted, shell_words(("llama-server", "-m", shard)))
            sys.stdout.flush()

    moepack.mount(
        pack_path, target, started=started, failed=lambda error: complain("error", str(error))
    )
    if not is_json():
        say(f"{one_line(target)}: unmounted")


@click.command()
@click.argument("pack", required=False, type=PathName(), metavar="PACK")
@options.folder_option("Folder of the pack on this machine.", required=False)
@options.layers_option
@options.hottest_option("experts")
@options.resume_option
@number_option("--threads", least=1, most=256, default=16, help="Number of ranges in flight.")
@options.progress_options
def pull(pack: str | None, target: str | None, resume: bool, **options: Any) -> None:
    """Bring PACK from a store or a web server into DIR: all of it, some layers, or the hottest.

    A part of a pack is used like the pack: experts that are not in DIR are read from where it came.
    The same command goes on after an interruption, and adds to DIR; with --resume, leave PACK out.

    Example: moepack pull s3://models/q.moepack -o q.moepack --hottest 40GiB
    """
    from moepack.report import pack_text

    if pack is not None and not is_remote(pack) and not os.path.lexists(pack):
        raise RequestError("not the address of a pack", path=pack, hint=missing_model_hint(pack))
    if target is None or (pack is None and not resume):
        raise click.UsageError(f"{'-o DIR' if target is None else 'PACK'} is missing")

    options |= {"resume": resume, "planned": partial(announce, render=pack_text.pull_plan)}
    with progress("pulling") as advance:
        summary = moepack.pull(pack, target, progress=advance, **options)
    sum_up(summary, pack_text.pulled, next_line("run", summary.path))


@click.command()
@options.pack_argument
@options.model_option(
    "--from",
    "source",
    metavar="SOURCE_OR_PACK",
    help="Shards that the pack was made from, or a copy of the pack.  [default: its mirror]",
)
@options.threads_option
@options.progress_options
def repair(pack_path: str, source: str | None, threads: int) -> None:
    """Find what is damaged in PACK, and write back those parts alone, from SOURCE_OR_PACK.

    All of PACK is read and compared with its digests, and what was written is read once more.

    Example: moepack repair model.moepack --from model-00001-of-00004.gguf
    """
    from moepack.report import pack_text

    with progress("repairing") as advance:
        summary = moepack.repair(pack_path, source, threads=threads, progress=advance)
    sum_up(summary, pack_text.repaired, next_line("run", pack_path))


@click.command()
@options.pack_argument
@click.argument("target", required=False, type=OUTPUT_FOLDER, metavar="[TARGET]")
@options.hottest_option("experts")
@flag_option("--remove", help="Remove the mirror of PACK.")
@options.progress_options
def mirror(pack_path: str, target: str | None, hottest: Size | None, remove: bool) -> None:
    """Copy experts of PACK into the folder TARGET on another drive, to read from both.

    Each copy is read back and compared. An interrupted command continues if it is run again.

    Example: moepack mirror model.moepack /mnt/second --hottest 64GiB
    """
    from moepack.report import pack_text

    if remove == (target is not None):
        raise click.UsageError("TARGET is missing, or --remove without one.")
    if target is None:
        sum_up(moepack.remove_mirror(pack_path), pack_text.mirror_removed)
        return
    with progress("mirroring") as advance:
        summary = moepack.mirror_pack(pack_path, target, hottest=hottest, progress=advance)
    sum_up(summary, pack_text.mirrored, next_line("run", pack_path))


class Formats(Commands):
    """The commands of all formats that the library lists; its help shows what each is."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        del self.commands  # until they are asked for: most commands do without the formats

    @cached_property
    def commands(self) -> dict[str, click.Command]:  # type: ignore[override]
        """The commands by name."""
        return {engine.name: with_help(_command(engine)) for engine in moepack.export_formats()}

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each format is, and the options."""
        from moepack.report import pack_text

        for engine in moepack.export_formats():
            with formatter.section(f"{engine.name}, for {engine.title}"):
                formatter.write_dl(pack_text.format_facts(engine), col_max=10, col_spacing=2)
        click.Command.format_options(self, context, formatter)


@click.group(cls=Formats)
def export() -> None:
    """Write a pack in the format of another engine."""


def _command(engine: Engine) -> click.Command:
    """Return the command that exports to a format, with its options."""
    what, kind, metavar, name = "File", RESUMABLE_FILE, "FILE", f"model.{engine.name}"
    if engine.is_folder:
        what, kind, metavar, name = "Folder", OUTPUT_FOLDER, "DIR", "experts"
    is_required, default, example = True, "", f" -o {name}"
    if engine.default_name:
        is_required, default, example = False, "  [default: in the pack]", ""
    text = f"{engine.summary}\n\nExample: moepack export {engine.name} model.moepack{example}"
    target_option = click.option(
        "-o",
        "--output",
        "target",
        required=is_required,
        type=kind,
        metavar=metavar,
        help=f"{what} to write.{default}",
    )

    @click.command(engine.name, help=text)
    @options.pack_argument
    @target_option
    @options.options(*map(_option, engine.options))
    @options.dry_run_option
    @options.resume_option
    @options.force_option
    @options.threads_option
    @options.progress_options
    def run(pack_path: str, target: str | None, **options: Any) -> None:
        from moepack.report import pack_text

        with progress("exporting") as advance:
            summary = moepack.export(engine.name, pack_path, target, progress=advance, **options)
        if summary.dry_run:
            show(summary, pack_text.export_plan)
        else:
            sum_up(summary, pack_text.exported, summary.command)

    return run


def _option(option: ExportOption) -> Any:
    name = f"--{option.name}"
    if option.kind == "size":
        text = f"{option.help}  [default: {size_text(option.default)}]"
        return size_option(name, least=0, default=option.default, show_default=False, help=text)
    if option.kind == "file":
        return file_option(name, help=option.help)
    choices = click.Choice(option.choices)
    return click.option(name, type=choices, default=option.default, help=option.help)
