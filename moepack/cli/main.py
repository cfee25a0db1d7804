"""The command line. It parses, calls the library, prints, and turns errors into exit codes."""

import contextlib
import io
import os
import signal
import sys
import warnings
from functools import partial
from typing import Any, NoReturn

import click

import moepack
from moepack import installed
from moepack.cli import next_steps, packing, packs
from moepack.cli.argument_names import as_typed
from moepack.cli.bench import bench
from moepack.cli.doctor import doctor
from moepack.cli.exit_codes import ExitCode, TerminatedError, report
from moepack.cli.files import force_option, output_file, output_option
from moepack.cli.forecast import forecast
from moepack.cli.front import Commands
from moepack.cli.machine import machine
from moepack.cli.parameters import OutputFile, PathName
from moepack.cli.place import place
from moepack.cli.progress import progress
from moepack.cli.running import run as run_command
from moepack.cli.serving import serve
from moepack.cli.simulation import simulate
from moepack.cli.terminal import (
    complain,
    is_quiet,
    is_verbose,
    json_option,
    pass_on,
    quiet_option,
    show,
    source_option,
    source_or_pack_argument,
    sum_up,
    threads_option,
    verbose_option,
)
from moepack.cli.trace import hotness as hotness_command
from moepack.cli.trace import trace
from moepack.cli.typed_words import HELP_OPTIONS, typed
from moepack.errors import MachineError, MoepackError, RequestError, shortage_behind
from moepack.storage.atomic import write_whole

_layer_option = click.option("--layer", type=click.IntRange(0), required=True, help="The layer.")
_expert_option = click.option("--expert", type=click.IntRange(0), required=True, help="The expert.")
_family_option = click.option(
    "--family", help="Another family of experts: ffn_chexps or attn_v_exps."
)


@click.group(cls=Commands, context_settings={"help_option_names": list(HELP_OPTIONS)})
@click.version_option(moepack.__version__, prog_name="moepack")
def cli() -> None:
    """Run Mixture-of-Experts models that are bigger than your memory.

    A model is any one of its GGUF files, or their folder. For more: moepack help COMMAND.
    """


@cli.command()
@source_or_pack_argument
@json_option
def inspect(source_or_pack: tuple[str, ...], as_json: bool) -> None:
    """Say what a model or a pack consists of.

    Example: moepack inspect model-00001-of-00004.gguf
    """
    from moepack.report import text

    facts = moepack.inspect(source_or_pack)
    show(facts, as_json, text.inspected, next_steps.after_inspect(facts, source_or_pack))


@cli.command("verify")
@click.argument("pack_path", type=PathName(), metavar="PACK")
@source_option
@click.option("--layers", "layer_text", metavar="LIST", help="Look at these layers alone: 0-3,7.")
@click.option("--sample", metavar="SHARE", help="Look at this share of blobs and tensors: 10%.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Another number draws another sample."
)
@click.option("--sha256", is_flag=True, help="Compare the SHA-256 of the shards as well.")
@click.option(
    "--with-gguf-py", is_flag=True, help="Compare with what gguf-py reads in the source as well."
)
@click.option(
    "--junit", "junit_path", type=OutputFile(), metavar="FILE", help="Write JUnit XML as well."
)
@force_option
@threads_option
@quiet_option
@verbose_option
@json_option
def verify_command(
    pack_path: str,
    source_paths: tuple[str, ...],
    layer_text: str | None,
    sample: str | None,
    seed: int,
    sha256: bool,
    with_gguf_py: bool,
    junit_path: str | None,
    force: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Prove a pack: its structure, padding and digests, and every byte against the source.

    Example: moepack verify model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.report import verification_text
    from moepack.verifying.verifier import verify

    with contextlib.ExitStack() as outputs:
        if junit_path:
            junit_file = outputs.enter_context(output_file(junit_path, force=force))
        with progress(None, "verifying") as advanced:
            report = verify(
                pack_path,
                source_paths or None,
                layers=layer_text,
                sample=sample,
                seed=seed,
                sha256=sha256,
                with_gguf_py=with_gguf_py,
                threads=threads,
                progress=advanced,
            )
        if junit_path:
            from moepack.report import junit

            write_whole(junit_file, junit.encode(report))
    if as_json or report.findings or not is_quiet():
        shown = None if is_verbose() else verification_text.SHOWN_FINDINGS
        next_step = next_steps.after_verify(report)
        show(report, as_json, partial(verification_text.report, shown=shown), next_step)
    if report.findings:
        raise SystemExit(ExitCode.DIFFERENCES)


@cli.command()
@click.argument("pack_path", type=PathName(), metavar="SOURCE_OR_PACK")
@_layer_option
@_expert_option
@_family_option
@json_option
def locate(pack_path: str, layer: int, expert: int, family: str | None, as_json: bool) -> None:
    """Say where an expert's blob and each of its parts lie.

    Example: moepack locate model.moepack --layer 3 --expert 17
    """
    from moepack.packing.opening import open_model
    from moepack.report import inspection, text

    with open_model(pack_path) as opened:
        facts = inspection.describe_blob(opened, layer, expert, family=family)
    show(facts, as_json, text.blob)


@cli.command()
@click.argument("pack_path", type=PathName(), metavar="SOURCE_OR_PACK")
@_layer_option
@_expert_option
@click.option("--part", help="A part: ffn_up_exps.weight, or up for short.")
@_family_option
@output_option
@force_option
@quiet_option
@json_option
def extract(
    pack_path: str,
    layer: int,
    expert: int,
    part: str | None,
    family: str | None,
    output: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write the raw bytes of an expert's blob, or of one part, to a file.

    Example: moepack extract m.moepack --layer 3 --expert 17 --part up -o up.bin
    """
    from moepack.packing.opening import open_model
    from moepack.report import inspection, text
    from moepack.report.facts import ExtractFacts

    with output_file(output, force=force) as target:
        with open_model(pack_path) as opened, opened.reader(backend="buffered") as reader:
            if part is None:
                facts = inspection.describe_blob(opened, layer, expert, family=family)
                problem = None
                if facts.path is None:
                    problem = "no blob here: its parts lie apart in the shards"
                elif any(held.codec for held in facts.parts):
                    problem = "the blob is not raw bytes: parts of it are stored by a codec"
                if problem:
                    hint = f"name a part with --part, such as {facts.parts[0].name}"
                    place = f"layer {layer} expert {expert}"
                    raise RequestError(problem, path=pack_path, place=place, hint=hint)
            view = reader.read(layer, expert, part, family=family)
        write_whole(target, view)
    sum_up(ExtractFacts(layer, expert, part, output, len(view)), as_json, text.extracted)


@cli.command("include-dir")
def include_dir() -> None:
    """Print the folder that holds moepack.h, the reader for C and C++.

    Example: moepack include-dir
    """
    pass_on([f"{installed.folder('include')}\n"])


cli.add_command(packing.pack)
cli.add_command(packing.index)
cli.add_command(packing.restore)
cli.add_command(packing.export)
cli.add_command(packs.list_)
cli.add_command(packs.rank)
cli.add_command(packs.mirror)
cli.add_command(packs.mount)
cli.add_command(run_command)
cli.add_command(serve)
cli.add_command(bench)
cli.add_command(trace)
cli.add_command(hotness_command)
cli.add_command(simulate)
cli.add_command(forecast)
cli.add_command(place)
cli.add_command(machine)
cli.add_command(doctor)


def _terminated(_signal: int, _frame: object) -> NoReturn:
    raise TerminatedError


def _replace_closed_streams() -> None:
    """Open closed streams (`>&-`) on nothing, else the next file opened takes their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for the whole run


def _warn(message: Warning | str, *_where: Any, **_options: Any) -> None:
    """Print a warning of the library's as the commands print everything."""
    complain("note", str(message))


def main() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _terminated)
    _replace_closed_streams()
    warnings.showwarning = _warn
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
        return _report_error(error, arguments)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        return _report_usage(error, arguments)
    except (KeyboardInterrupt, click.Abort) as stop:
        return _report_interrupted(stop, arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILED
    except Exception as error:
        if os.environ.get("MOEPACK_TRACEBACK"):
            raise
        return _report_error(_translated(error), arguments)
    return result if isinstance(result, int) else 0


def _translated(error: Exception) -> MoepackError:
    """Return an unexpected error as one by whose fault it is."""
    if (shortage := shortage_behind(error)) is not None:
        return shortage
    if isinstance(error, OSError):
        return MachineError(error.strerror or str(error), path=error.filename)
    if isinstance(error, ImportError):
        hint = "install moepack again, with what it needs"
        return MachineError(f"cannot import {error.name or 'a module'}: {error}", hint=hint)
    hint = "this is a mistake in moepack: set MOEPACK_TRACEBACK=1 and report what it says"
    return MoepackError(f"{type(error).__name__}: {error}", hint=hint)


def _report_interrupted(stop: BaseException, arguments: list[str]) -> int:
    complain("error", "interrupted")
    for note in getattr(stop.__cause__ or stop, "__notes__", ()):
        complain("hint", as_typed(note, typed(cli, arguments).command))
    return ExitCode.INTERRUPTED


def _report_error(error: MoepackError, arguments: list[str]) -> int:
    line = typed(cli, arguments)
    if isinstance(error, MachineError):  # which may lack what it takes to import anything
        return report(error, line.command)
    from moepack.cli.usage import hints_for

    return report(error, line.command, hints_for(error, line))


def _report_usage(error: click.UsageError, arguments: list[str]) -> int:
    from moepack.cli.usage import explain

    problem, hints = explain(error, typed(cli, arguments))
    complain("error", problem)
    for hint in hints:
        complain("hint", hint)
    return ExitCode.USAGE
