"""``torchrl-perf syncs``: runs a script as it is and lists the lines that make the host wait for the device."""

import argparse
import builtins
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_perf.cli.command_parser import CommandParser

__all__ = ["main"]

DESCRIPTION = """Run a TorchRL or PyTorch script unchanged and list what made the host wait for the device: per line of
the script and of the library beneath it, the operation, how often, how long (CUDA), and what to write instead. Without
CUDA it counts on CPU tensors as a stand-in. The report goes to standard error, after the script's own output."""
EPILOG = """exit code: the script's own; 1 if --max-per-step is exceeded; 2 for arguments that cannot be used. A
script that a signal ends (SIGTERM, a time limit) still gets its report; the code is 128 + the signal's number."""

END_SIGNALS = ("SIGTERM", "SIGHUP", "SIGXCPU", "SIGALRM", "SIGUSR1", "SIGUSR2")
"""Signals that end a process by default, sent by schedulers, ``timeout`` and closing terminals."""


def main(argv: list[str]) -> int:
    """Run the command; see ``torchrl-perf syncs --help``.

    Args:
        argv: the arguments behind ``syncs``.

    Returns:
        Exit code: that of the script, or 1 if it waited more often than ``--max-per-step`` allows; 130 after Ctrl-C.

    Raises:
        SystemExit: by the parser, with 0 after its help and 2 for arguments that cannot be used.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    program = make_program(parser, options)
    with python_of(program):
        return audited(parser, options, program)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's own options; the first argument that is none ends them."""
    parser = CommandParser(
        "torchrl-perf syncs",
        usage="torchrl-perf syncs [options] SCRIPT [args]\n       torchrl-perf syncs [options] -m MODULE [args]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("--json", metavar="FILE", help='write the report as JSON too; "-" is standard output')
    parser.add_argument("--top", type=_count, default=20, metavar="N", help="rows to print (default: %(default)s)")
    parser.add_argument("--max-steps", type=_count, metavar="N", help="end the script after N steps")
    parser.add_argument("--max-iterations", type=_count, metavar="N", help="end the script after N iterations")
    parser.add_argument(
        "--max-per-step", type=float, metavar="X", help="exit with 1 if a step of the loop waits more than X times"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="whose tensors count (default: cuda where there is)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [args]", help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, received {text}. Remedy: 1 or more")
    return number


class Program(NamedTuple):
    """The program to run.

    Attributes:
        name: as on the command line, which becomes its ``sys.argv[0]``.
        file: path of its source.
        module: name of the module; "" for a script.
        arguments: its own arguments.
        folder: first entry of its ``sys.path``.
    """

    name: str
    file: str
    module: str
    arguments: list[str]
    folder: str

    def run(self) -> None:
        """Run it as ``__main__``."""
        if self.module:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            return
        # Not runpy.run_path: its module is gone when it returns, while threads of the script may still use it.
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=self.file, __builtins__=builtins)
        sys.modules["__main__"] = main
        exec(compile(Path(self.file).read_bytes(), self.file, "exec", dont_inherit=True), main.__dict__)


def make_program(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Program:
    """The program of a command line; ends the process with 2 if there is none."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("expected a SCRIPT or -m MODULE, received neither. Remedy: name one")
    name, *arguments = command
    if not options.module:
        path = Path(name)
        if not path.is_file():
            parser.error(f"expected a Python script, received {name}, which is no file. Remedy: check the path")
        return Program(name, os.path.abspath(path), "", arguments, str(path.resolve().parent))
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError as error:
        parser.error(
            f"-m {name}: expected a module that can be run, received {error}. Remedy: check the name and PYTHONPATH"
        )
    finally:
        sys.path.remove(folder)
    if spec is None or spec.origin is None:
        parser.error(f"expected a module that can be run, received {name}. Remedy: check the name and PYTHONPATH")
    return Program(spec.origin, spec.origin, name, arguments, folder)


@contextmanager
def python_of(program: Program) -> Iterator[None]:
    """Arguments, search path and main module as Python itself gives them to the program."""
    before, main = (sys.argv, sys.path), sys.modules["__main__"]
    sys.argv, sys.path = [program.name, *program.arguments], [program.folder, *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
        sys.modules["__main__"] = main


def audited(parser: argparse.ArgumentParser, options: argparse.Namespace, program: Program) -> int:
    """Run a program under audit, print the report, and return the exit code."""
    import torch

    from torchrl_perf.runtime.timing import Stopwatch
    from torchrl_perf.runtime.waits.audit_report import to_json, to_text
    from torchrl_perf.runtime.waits.script_audit import ScriptAudit

    cuda = torch.cuda.is_available() if options.device is None else options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error(
            "--device cuda: expected a CUDA device, received none. Remedy: leave it out to count on CPU tensors"
        )
    audit = ScriptAudit(program.file, cuda=cuda, max_steps=options.max_steps, max_iterations=options.max_iterations)
    with Stopwatch("cpu") as watch, audit, ended_from_outside() as ends:
        code = exit_code(program)
    if ends.signum is not None:
        print(f"\ntorchrl-perf syncs: the script was ended by {signal.Signals(ends.signum).name}", file=sys.stderr)
        code = 128 + ends.signum
    report = audit.report(watch.seconds)
    sys.stdout.flush()
    print(f"\ntorchrl-perf syncs: {program.module or program.file}\n{to_text(report, options.top)}", file=sys.stderr)
    if options.json:
        command = {"script": program.module or program.file, "arguments": program.arguments, "exit_code": code}
        text = json.dumps({**command, **to_json(report)}, indent=2) + "\n"
        if options.json == "-":
            print(text, end="")
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    if code == 0 and options.max_per_step is not None and report.per_step > options.max_per_step:
        allowed = f"expected at most {options.max_per_step:g} host waits per {report.step_unit}"
        print(f"torchrl-perf syncs: {allowed}, received {report.per_step:.3f}", file=sys.stderr)
        return 1
    return code


class EndedFromOutside(BaseException):
    """Raised inside the script where a signal ends it, so that the report is still printed."""

    signum: int | None = None


@contextmanager
def ended_from_outside() -> Iterator[EndedFromOutside]:
    """Turns signals that would end the process at once into an exception of the script.

    A script's own handlers replace these. A second signal ends the process at once. Outside the main thread, where
    Python delivers no signals, nothing is done.

    Yields:
        The exception, whose ``signum`` is the number of the signal that came, or None.
    """
    ends = EndedFromOutside()

    def end(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        ends.signum = signum
        raise ends

    numbers = []
    if threading.current_thread() is threading.main_thread():
        numbers = [n for n in map(_number, END_SIGNALS) if n is not None and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield ends
    finally:
        for number in numbers:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def _number(name: str) -> int | None:
    return getattr(signal, name, None)  # Windows has only a few of them


def exit_code(program: Program) -> int:
    """Run a program to its end, or to the limit on its steps, and return the exit code that Python would give it."""
    from torchrl_perf.runtime.waits.loop_marks import StepLimit

    limit = False
    try:
        program.run()
    except StepLimit:
        limit = True
    except EndedFromOutside as error:
        return 128 + (error.signum or 0)
    except SystemExit as error:
        return _code_of(error)
    except KeyboardInterrupt as error:
        limit = isinstance(error.__context__, StepLimit)
        return 0 if limit else 130
    except BaseException as error:  # as Python ends a program: with its traceback, less the frames of this file
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    if not limit:
        join_threads()
    return 0


def join_threads() -> None:
    """Wait for the threads that Python itself would wait for before it ends."""
    from torchrl_perf.runtime.upstream.threads import pool_threads

    pools = pool_threads()  # told to end later, by the interpreter
    for thread in threading.enumerate():
        if not (thread.daemon or thread in pools or thread in (threading.main_thread(), threading.current_thread())):
            thread.join()


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
