"""The command line: commands by name, and the exit status for each kind of exception."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

import distill
from distill.cli.check import check, doctor, recipes
from distill.cli.generate import chat, generate, serve
from distill.cli.measure import evaluate, record, serve_check, speedup
from distill.cli.models import cut, export_gguf, export_lookup, import_gguf, transplant
from distill.cli.plan import plan, profile
from distill.cli.runs import list_runs, report, train
from distill.devices import end_process, memory_explained
from distill.errors import DistillError, RecipeError, RunError, disk_fault
from distill.files import is_utf8
from distill.progress import farewell, handled, is_verbose, set_console, signalled
from distill.recipe import Recipe
from distill.recipe.measuring import SHORT
from distill.recipe.target import shown, worded

app = typer.Typer(
    help="Make draft models for speculative decoding: cut a draft from a donor, train it on the target, measure it.",
    epilog="Commands that take a RUN use the newest run by default. Exit status: 0 success, 2 user error, 3 lower "
    "acceptance, or none to compare (serve-check --fail-if-worse), 130 or 143 interrupted, 1 bug. "
    "README.md lists the documents. docs/troubleshooting.md lists symptoms.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
NAMED = {"evaluate": "eval", "list_runs": "runs"}  # functions that are not called as their commands
COMMANDS: dict[str, Callable[..., None]] = {
    NAMED.get(one.__name__, one.__name__.replace("_", "-")): one
    for one in (
        *(doctor, recipes, check, plan, train, generate, chat, serve, evaluate, speedup, profile, export_gguf),
        *(export_lookup, import_gguf, transplant, cut, serve_check, record, report, list_runs),
    )
}


def _print_version(value: bool) -> None:
    if value:
        print(f"distill {distill.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only results, warnings and errors. Progress goes to log.txt.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also print all progress, the libraries' log lines, and the traceback of a bug."
        ),
    ] = False,
) -> None:
    """Make draft models for speculative decoding: cut a draft from a donor, train it on the target, measure it."""
    if quiet and verbose:
        raise RecipeError("--quiet and --verbose were given together", "choose one of them")
    set_console(quiet, verbose)


# Paths of this package's files begin with this folder. A name is not enough, because a checkout is also called distill.
PACKAGE = f"{Path(distill.__file__).parent}{os.sep}"

for name, command in COMMANDS.items():
    app.command(name)(command)

# Recent versions of typer raise the exceptions of a click of their own, older ones those of the package click.
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def smaller_models() -> tuple[str, str]:
    """Return the parts of a message about memory: the place where it ran out, and the remedy."""
    name = next((word for word in sys.argv[1:] if word in COMMANDS), None)
    smaller = name is not None and "dtype" in signature(COMMANDS[name]).parameters
    return "in this command", "free memory that other programs hold" + ", or give --dtype bfloat16" * smaller


INTERRUPTED = 128 + signal.SIGINT  # the exit status; recent versions of typer return it for Ctrl-C


ESCAPED = "distill.escaped"


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return JSON escapes for characters that the stream cannot encode, so that `-o json` stays valid."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)), error.end


codecs.register_error(ESCAPED, _escaped)


def main() -> None:
    """Run a command and exit.

    The status is 0 on success, 2 after a user error (one message), 1 after a bug (one line that names the file with
    the traceback), and 130 or 143 after Ctrl-C or SIGTERM (one line that says how to go on).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)
    if sys.getfilesystemencoding() != "utf-8":  # in a POSIX locale Python reads arguments as ASCII
        sys.argv[1:] = [os.fsencode(one).decode("utf-8", "surrogateescape") for one in sys.argv[1:]]
    with handled():
        try:
            code = _run()
        except KeyboardInterrupt:  # while its message was printed
            code = _interrupted()
    sys.exit(code)


def _run() -> int:
    """Run the command, print its message, and return the exit status."""
    try:
        _require_text(sys.argv)
        with memory_explained(smaller_models):
            result = app(prog_name="distill", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        if code == 0:
            end_process()
        return _interrupted() if code == INTERRUPTED else code
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if signalled():  # libraries turn Ctrl-C into errors of their own
            return _interrupted()
        return _explain(error)


def _interrupted() -> int:
    sys.stderr.write(farewell())
    return 128 + (signalled() or signal.SIGINT)


def _explain(error: Exception) -> int:
    """Print the message of an error and return the exit status."""
    if isinstance(error, ClickException):
        _reword(error)
        _name_override(error)
        error.show()
        return 2
    found = disk_fault(error) or _missing_package(error) or error
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        found = RunError(f"no file can be called {error.object[:60]!a} in this locale", "set LC_ALL=C.UTF-8")
    if not isinstance(found, DistillError):
        print(_bug(error), file=sys.stderr)
        return 1
    print(f"distill: {found}", file=sys.stderr)
    return 2


def _missing_package(error: Exception) -> DistillError | None:
    """Return the message for a package that is not installed; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "distill").partition(".")[0] == "distill":
        return None
    return RunError(f"the package {error.name} is not installed", "`distill doctor` says how to install it")


def _reword(error: Any) -> None:
    """Shorten an option's fault. Recent versions of typer check options with pydantic and show its whole message."""
    if hasattr(error.__cause__, "errors"):
        fault = error.__cause__.errors()[0]
        own = fault["ctx"]["error"] if fault["type"] == "value_error" else worded(fault["msg"])
        error.message = f"{own} (got {shown(fault['input'])})"


def _name_override(error: Any) -> None:
    """If a command has no such option, name the recipe's key of that name, or the spelling of llama.cpp's option."""
    if type(error).__name__ != "NoSuchOption":
        return
    takes = {one.name for one in error.ctx.command.params}
    if "llama" in takes and (
        key := next((one for word in sys.argv if word.startswith(error.option_name) and (one := llama_key(word))), None)
    ):
        error.possibilities = None
        error.message += f"; llama.cpp's options are --llama {key}=VALUE, of a draft --llama-draft {key}=VALUE"
    if "overrides" not in takes:
        return
    name = error.option_name.lstrip("-").replace("-", "_")
    sections = {key: getattr(field.annotation, "model_fields", {}) for key, field in Recipe.model_fields.items()}
    keys = [name] * (name in sections) + [f"{key}.{name}" for key, names in sections.items() if name in names]
    if keys:
        error.possibilities = None  # options of a similar name
        error.message += f"; a key of the recipe is changed by {' or '.join(f'{key}=VALUE' for key in keys)}"


def llama_key(argument: str) -> str | None:
    """Return the key of the option that an argument names as llama.cpp does; None for any other argument."""
    name = argument.lstrip("-").removesuffix("-draft").replace("-", "_")
    dashes = len(argument) - len(argument.lstrip("-"))
    short = (one for one, spelt in SHORT.items() if argument in (f"-{spelt}", f"-{spelt}d"))
    return (name if dashes == 2 and name in SHORT else None) or next(short, None)


def _require_text(arguments: Sequence[str]) -> None:
    """Raise RecipeError for an argument that is not UTF-8, because arguments go into files and tokenizers as text."""
    for place, argument in enumerate(arguments[1:], 1):
        if not is_utf8(argument):
            raise RecipeError(f"argument {place}, {argument[:60]!a}, is not UTF-8", "write it in UTF-8")


def _bug(error: Exception) -> str:
    """Return one line on an unexpected exception. It names the file that holds the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(PACKAGE)] or frames
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    words = " ".join(str(error).encode("utf-8", "backslashreplace").decode().split())[:300]
    line = f"distill: this is a bug in distill: {type(error).__name__}: {words}{place}; please report it"
    if is_verbose():
        traceback.print_exception(error)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="distill-bug-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return line
    return f"{line} with {file.name}"
