"""The command `list`."""

from itertools import chain

import click

import moepack
from moepack.cli.shared.options import hottest_option, json_option, layers_option, opened_argument
from moepack.cli.shared.terminal import columns, complain, is_json, next_line, pass_on, suggest
from moepack.common.errors import RequestError
from moepack.common.sizes import Size, size_text


@click.command("list")
@opened_argument
@hottest_option("blobs")
@layers_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def list_experts(pack_path: str, hottest: Size | None, layers: str | None, as_csv: bool) -> None:
    """List every blob and dense tensor: its kind, offset, length and hotness.

    Example: moepack list model.moepack --hottest 8GiB --csv
    """
    from moepack.inspection.listing import BlobRow
    from moepack.report import listing_text

    if as_csv and is_json():
        raise RequestError("CSV and JSON at once", hint="give --csv or --json, not both")
    rows = moepack.list_pack(pack_path, hottest=hottest, layers=layers)
    first_row = next(rows, None)
    rows = rows if first_row is None else chain([first_row], rows)
    if as_csv:
        lines = listing_text.csv_text(rows)
    elif is_json():
        lines = listing_text.json_text(rows)
    else:
        lines = listing_text.table(rows, columns())
    first = next(lines, "")
    pass_on([first])
    pass_on(lines)
    if not first and hottest is not None:
        limit = hottest if isinstance(hottest, str) else size_text(hottest)
        complain("note", f"no blob fits into {limit}")
    is_table = not as_csv and columns() is not None
    if isinstance(first_row, BlobRow) and first_row.path is None and is_table:
        at = ("--layer", str(first_row.layer), "--expert", str(first_row.expert))
        suggest(next_line("locate", pack_path, *at))
