"""The command line. It parses, calls the library, prints, and turns errors into exit codes."""

import io
import os
import signal
import sys
from enum import IntEnum
from typing import NoReturn

import click

import moepack
from moepack import installed
from moepack.cli import packing, packs
from moepack.cli.bench import bench
from moepack.cli.terminal import (
    json_option,
    progress,
    show,
    source_option,
    threads_option,
    write_file,
)
from moepack.cli.trace import hotness as hotness_command
from moepack.cli.trace import trace
from moepack.errors import (
    MachineError,
    MoepackError,
    PackError,
    RequestError,
    SourceError,
    TraceError,
)


class ExitCode(IntEnum):
    """The exit codes, as docs/commands.md lists them."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    SOURCE_FAULT = 3
    PACK_FAULT = 4
    DIFFERENCES = 5
    MACHINE_FAULT = 6
    INTERRUPTED = 130


_EXIT_CODES: tuple[tuple[type[MoepackError], ExitCode], ...] = (
    (RequestError, ExitCode.USAGE),
    (SourceError, ExitCode.SOURCE_FAULT),
    (TraceError, ExitCode.SOURCE_FAULT),
    (PackError, ExitCode.PACK_FAULT),
    (MachineError, ExitCode.MACHINE_FAULT),
    (MoepackError, ExitCode.FAILED),
)

_layer_option = click.option("--layer", type=click.IntRange(0), required=True, help="The layer.")
_expert_option = click.option("--expert", type=click.IntRange(0), required=True, help="The expert.")
_family_option = click.option(
    "--family", help="Another family of experts: ffn_chexps or attn_v_exps."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(moepack.__version__, prog_name="moepack")
def cli() -> None:
    """Repack the experts of a Mixture-of-Experts GGUF into aligned blobs, and prove every byte.

    SOURCE is any one shard of a model, a folder with its shards, or all of its files.
    """


@cli.command()
@click.argument("source_or_pack", nargs=-1, required=True, metavar="SOURCE_OR_PACK")
@json_option
def inspect(source_or_pack: tuple[str, ...], as_json: bool) -> None:
    """Say what a model or a pack consists of.

    Example: moepack inspect model-00001-of-00004.gguf
    """
    from moepack.report import text

    show(moepack.inspect(source_or_pack), as_json, text.inspected)


@cli.command("verify")
@click.argument("pack_path", metavar="PACK")
@source_option
@click.option("--junit", "junit_path", metavar="FILE", help="Write JUnit XML as well.")
@threads_option
@json_option
def verify_command(
    pack_path: str,
    source_paths: tuple[str, ...],
    junit_path: str | None,
    threads: int,
    as_json: bool,
) -> None:
    """Prove that a pack is whole: structure, padding, digests, and every byte of the source.

    Example: moepack verify model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.report import junit, text
    from moepack.verifying.verifier import verify

    with progress(None, "verifying") as advanced:
        report = verify(pack_path, source_paths or None, threads=threads, progress=advanced)
    if junit_path:
        write_file(junit_path, junit.encode(report))
    show(report, as_json, text.report)
    if not report.passed:
        raise SystemExit(ExitCode.DIFFERENCES)


@cli.command()
@click.argument("pack_path", metavar="PACK")
@_layer_option
@_expert_option
@_family_option
@json_option
def locate(pack_path: str, layer: int, expert: int, family: str | None, as_json: bool) -> None:
    """Say where an expert's blob and each of its parts lie.

    Example: moepack locate model.moepack --layer 3 --expert 17
    """
    from moepack.report import inspection, text

    with moepack.open(pack_path) as opened:
        facts = inspection.describe_blob(opened, layer, expert, family=family)
    show(facts, as_json, text.blob)


@cli.command()
@click.argument("pack_path", metavar="PACK")
@_layer_option
@_expert_option
@click.option("--part", help="A part: ffn_up_exps.weight, or up for short.")
@_family_option
@click.option(
    "-o", "--output", "target", required=True, metavar="FILE", help="- is standard output."
)
@json_option
def extract(
    pack_path: str,
    layer: int,
    expert: int,
    part: str | None,
    family: str | None,
    target: str,
    as_json: bool,
) -> None:
    """Write the raw bytes of an expert's blob, or of one part, to a file.

    Example: moepack extract model.moepack --layer 3 --expert 17 --part up -o up.bin
    """
    from moepack.report import text
    from moepack.report.facts import ExtractFacts

    with moepack.open(pack_path) as opened, opened.reader(backend="buffered") as reader:
        if part is None:
            opened.locate(layer, expert, family=family)  # what has no blob has parts alone
        view = reader.read(layer, expert, part, family=family)
    if target == "-":
        sys.stdout.buffer.write(view)
        return
    write_file(target, view)
    show(ExtractFacts(layer, expert, part, target, len(view)), as_json, text.extracted)


@cli.command("include-dir")
def include_dir() -> None:
    """Print the folder that holds moepack.h, the reader for C and C++.

    Example: moepack include-dir
    """
    click.echo(installed.folder("include"))


cli.add_command(packing.pack)
cli.add_command(packing.index)
cli.add_command(packing.restore)
cli.add_command(packing.export)
cli.add_command(packs.list_)
cli.add_command(packs.mount)
cli.add_command(bench)
cli.add_command(trace)
cli.add_command(hotness_command)


def _terminated(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal has no letters for is escaped, not an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. MOEPACK_TRACEBACK=1 lets errors through."""
    try:
        result = cli.main(arguments, prog_name="moepack", standalone_mode=False)
    except MoepackError as error:
        if os.environ.get("MOEPACK_TRACEBACK"):
            raise
        return _report_error(error)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        return _report_usage(error)
    except (KeyboardInterrupt, click.Abort) as stop:
        click.echo("error: interrupted", err=True)
        for note in getattr(stop.__cause__ or stop, "__notes__", ()):
            click.echo(f"hint: {note}", err=True)
        return ExitCode.INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except OSError as error:
        return _report_error(MachineError(error.strerror or str(error), path=error.filename))
    except Exception as error:
        if os.environ.get("MOEPACK_TRACEBACK"):
            raise
        hint = "this is a mistake in moepack: set MOEPACK_TRACEBACK=1 and report what it says"
        return _report_error(MoepackError(f"{type(error).__name__}: {error}", hint=hint))
    return result if isinstance(result, int) else 0


def _report_usage(error: click.UsageError) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    click.echo(f"error: {error.format_message()}", err=True)
    command = error.ctx.command_path if error.ctx else "moepack"
    click.echo(f"hint: {command} --help", err=True)
    return ExitCode.USAGE


def _report_error(error: MoepackError) -> int:
    click.echo(f"error: {error}", err=True)
    for hint in ([error.hint] if error.hint else []) + getattr(error, "__notes__", []):
        click.echo(f"hint: {hint}", err=True)
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
