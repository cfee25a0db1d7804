"""The command `mount`."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import click

import moepack
from moepack.cli.shared.options import json_option, pack_argument
from moepack.cli.shared.parameters import OutputFolder
from moepack.cli.shared.terminal import complain, is_json, say, show
from moepack.common.escaping import one_line, shell_words

if TYPE_CHECKING:
    from moepack.pack.mounting.mount import MountFacts


@click.command()
@pack_argument
@click.argument("target", type=OutputFolder(), metavar="DIR")
@json_option
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
