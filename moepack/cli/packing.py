"""The commands that make a pack, and that make other files of one: pack, index, restore, export."""

import click

from moepack.cli.terminal import json_option, progress, show, threads_option
from moepack.errors import RequestError
from moepack.sizes import parse_size

_resume_option = click.option("--resume", is_flag=True, help="Continue an interrupted run.")
_force_option = click.option("--force", is_flag=True, help="Replace files that are there already.")
_hotness_option = click.option(
    "--hotness", "hotness_path", metavar="FILE", help="Counts, a trace, or an imatrix."
)


@click.command()
@click.argument("source", nargs=-1, required=True)
@click.option("-o", "--output", "target", required=True, metavar="DIR", help="The pack to make.")
@click.option(
    "--layout",
    "layout_name",
    default="layers",
    show_default=True,
    metavar="NAME|FILE.toml",
    help="How blobs are grouped and ordered: layers, hot-first, natural, or a file.",
)
@click.option("--alignment", metavar="SIZE", help="Of blobs, weights and tensors: 16KiB.")
@_hotness_option
@click.option("--experts-only", is_flag=True, help="Leave out the dense part.")
@click.option("--layers", "layer_text", metavar="LIST", help="Only experts of these layers: 0-3,7.")
@click.option("--no-mtp", is_flag=True, help="Leave out multi-token-prediction layers.")
@click.option("--sha256", is_flag=True, help="Note the SHA-256 of each shard, to restore by.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@_resume_option
@threads_option
@json_option
def pack(
    source: tuple[str, ...],
    target: str,
    layout_name: str,
    alignment: str | None,
    hotness_path: str | None,
    experts_only: bool,
    layer_text: str | None,
    no_mtp: bool,
    sha256: bool,
    dry_run: bool,
    resume: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Turn SOURCE into the new pack DIR: all of the model, one aligned blob an expert.

    Example: moepack pack model-00001-of-00004.gguf --hotness hot.csv -o model.moepack
    """
    from moepack.packing.pack_model import PackSummary, pack_model
    from moepack.report import pack_text

    def planned(summary: PackSummary) -> None:
        if not as_json:
            click.echo(pack_text.plan(summary))

    with progress(None, "packing") as advanced:
        summary = pack_model(
            source,
            target,
            layout=layout_name,
            alignment=None if alignment is None else _size(alignment, "--alignment"),
            hotness=hotness_path,
            layers=layer_text,
            mtp=not no_mtp,
            experts_only=experts_only,
            sha256=sha256,
            dry_run=dry_run,
            resume=resume,
            threads=threads,
            planned=planned,
            progress=advanced,
        )
    show(summary, as_json, pack_text.packed)


@click.command()
@click.argument("source", nargs=-1, required=True)
@click.option("-o", "--output", "target", required=True, metavar="DIR", help="The index to make.")
@_hotness_option
@click.option("--digests", is_flag=True, help="Read the shards, so that reads can be checked.")
@threads_option
@json_option
def index(
    source: tuple[str, ...],
    target: str,
    hotness_path: str | None,
    digests: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Lay an index over the shards of SOURCE as they lie; nothing is copied.

    Readers, bench and engines take DIR as a pack; it has links to the shards.

    Example: moepack index model-00001-of-00004.gguf -o model.index
    """
    from moepack.packing.shard_index import index_model
    from moepack.report import pack_text

    with progress(None, "indexing") as advanced:
        summary = index_model(
            source,
            target,
            hotness=hotness_path,
            digests=digests,
            threads=threads,
            progress=advanced,
        )
    show(summary, as_json, pack_text.indexed)


@click.command()
@click.argument("pack_path", metavar="PACK")
@click.option("-o", "--output", "target", required=True, metavar="DIR", help="Where they go.")
@_resume_option
@_force_option
@threads_option
@json_option
def restore(
    pack_path: str, target: str, resume: bool, force: bool, threads: int, as_json: bool
) -> None:
    """Write the shards that a whole pack was made from, bit for bit.

    Example: moepack restore model.moepack -o shards
    """
    from moepack.packing.restore import restore as restore_shards
    from moepack.report import pack_text

    with progress(None, "restoring") as advanced:
        summary = restore_shards(
            pack_path, target, resume=resume, force=force, threads=threads, progress=advanced
        )
    show(summary, as_json, pack_text.restored)


@click.group()
def export() -> None:
    """Write a pack as what other engines read."""


@export.command()
@click.argument("pack_path", metavar="PACK")
@click.option("-o", "--output", "target", required=True, metavar="FILE", help="The GGUF to make.")
@click.option(
    "--alignment", default="4KiB", show_default=True, metavar="SIZE", help="Of all tensors."
)
@_resume_option
@_force_option
@threads_option
@json_option
def gguf(
    pack_path: str,
    target: str,
    alignment: str,
    resume: bool,
    force: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Write a whole pack as one stock GGUF: dense tensors first, experts last by layer.

    Example: moepack export gguf model.moepack -o model.gguf
    """
    from moepack.engines.stock_gguf import export_gguf
    from moepack.report import pack_text

    with progress(None, "exporting") as advanced:
        summary = export_gguf(
            pack_path,
            target,
            alignment=_size(alignment, "--alignment"),
            resume=resume,
            force=force,
            threads=threads,
            progress=advanced,
        )
    show(summary, as_json, pack_text.exported)


def _size(text: str, option: str) -> int:
    """Read the length that an option was given; raise RequestError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise RequestError(f"not a length: {error}", place=option) from None
