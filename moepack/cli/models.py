"""The commands `models list`, `models rm` and `ps`: models on this machine, and servers."""

import click

from moepack.cli.shared import options
from moepack.cli.shared.options import flag_option
from moepack.cli.shared.parameters import ModelName
from moepack.cli.shared.terminal import confirm, show, sum_up
from moepack.cli.words.front import Commands


class Models(Commands):
    """The commands on stored models; without the name of one they are listed."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the group's name."""
        is_named = args[:1] and (args[0] in self.commands or args[0] in ("help", "--help", "-h"))
        return super().parse_args(context, args if is_named else ["list", *args])


@click.group(cls=Models)
def models() -> None:
    """List fetched models and the files that runs keep, or remove them."""


@models.command("list")
@options.csv_option("items")
@options.json_option
def list_models() -> None:
    """List fetched models, and the counts, texts and other files that moepack keeps.

    Example: moepack models list
    """
    from moepack.report import serving_text
    from moepack.running.stored import stored

    show(stored(), serving_text.stored)


@models.command("rm")
@click.argument("names", nargs=-1, type=ModelName(), metavar="[NAME]...")
@click.option("--only", metavar="KIND,…", help="Only these kinds, such as learned,prompts.")
@flag_option("--yes", "is_confirmed", help="Remove without asking.")
@options.summary_options
def rm(names: tuple[str, ...], only: str | None, is_confirmed: bool) -> None:
    """Remove fetched models, and the files that moepack keeps of any; your own files stay.

    NAME is a name that `moepack models` lists, an address, or a path; with --only it may be left
    out, for all models.

    Example: moepack models rm hf://unsloth/Qwen3-30B-A3B-GGUF/Q4_K_M
    """
    from moepack.report import serving_text
    from moepack.report.facts import printable
    from moepack.running.stored import choose, remove_stored, stored, sum_of

    if not names and not only:
        raise click.UsageError("NAME is missing, or --only for all models.")
    facts = stored()
    chosen = sum_of(choose(facts.items, names, only.split(",") if only else ()))
    if not is_confirmed:
        confirm(serving_text.what_is_removed(printable(chosen)), "--yes")
    remove_stored(chosen.items)
    sum_up(chosen, serving_text.removed)


@click.command()
@options.json_option
def ps() -> None:
    """List the servers of `moepack serve` that this user runs.

    Speed is that of the last answer, hits those since the start. --json has all figures.

    Example: moepack ps
    """
    from moepack.report import serving_text
    from moepack.running.serving.running_servers import read_servers

    show({"servers": read_servers()}, lambda facts: serving_text.servers(facts["servers"]))
