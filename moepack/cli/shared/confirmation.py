"""Confirmation of commands that delete their input."""

import sys

import click

from moepack.cli.shared.terminal import say
from moepack.common.errors import RequestError


def check_confirmation(option: str, is_confirmed: bool, in_place: bool) -> None:
    """Raise RequestError for a confirmation of a command that deletes nothing."""
    if is_confirmed and not in_place:
        hint = "without --in-place nothing is deleted: leave it out"
        raise RequestError("confirms a deletion that does not happen", place=option, hint=hint)


def confirm(deletion: str, option: str) -> None:
    """Ask on the terminal for the word that deletes; raise RequestError for anything else."""
    if not sys.stdin.isatty():
        hint = f"this needs a terminal to confirm it on, or {option}"
        raise RequestError(f"not confirmed: {deletion}", hint=hint)
    say(deletion, err=True)
    if (
        click.prompt("Type delete to continue", default="", show_default=False, err=True)
        != "delete"
    ):
        raise RequestError("not confirmed: nothing was touched")
