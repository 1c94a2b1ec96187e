"""Command line of the package. Importing it loads neither torch nor tyro; the commands do."""

import importlib
import sys
from collections.abc import Sequence

from torchrl_perf import __version__
from torchrl_perf.cli.train_help import read_for_help as _read_for_help
from torchrl_perf.cli.train_help import show as _show
from torchrl_perf.registry import ALGORITHMS as _ALGORITHMS
from torchrl_perf.registry import MARINE as _MARINE
from torchrl_perf.registry import SYSTEMS as _SYSTEMS

__all__ = ["main"]

TRAINED = (*_ALGORITHMS, _MARINE, *_SYSTEMS)
WHOLE = tuple(dict.fromkeys(_MARINE if name.startswith(f"{_MARINE}-") else name for name in _SYSTEMS))
BENCHMARKS = (
    "ppo",
    "gae",
    "collector",
    "replay",
    "offpolicy",
    "host",
    "training",
    "ablation",
    "memory",
    "logging",
    "transfer",
    "policies",
    "recurrent",
    "claims",
    "curves",
    "systems",
    "dropin",
    "zoo",
    "scaling",
    "robots",
)
OF_A_RUN = ("evaluate", "play", "export", "compare", "plot")
TOOLS = (*OF_A_RUN, "sweep", "zoo", "envs", "syncs", "doctor", "monitor")

USAGE = f"""usage: torchrl-perf COMMAND ...

commands:
  train NAME          train an agent; `torchrl-perf train ppo --help` lists every setting; NAME is one of
                      {", ".join(_ALGORITHMS)};
                      or a whole system: {", ".join(WHOLE)} (`train marine --agent iqn`)
  sweep NAME          train with many settings and seeds on one machine or a Ray cluster, and stop the bad ones early
  evaluate RUN        whole episodes of a run's policy: returns, their deviation and interval, lengths
  play RUN            watch it: a gif, an mp4 or a window
  export RUN          write it as ONNX and for torch.export, checked against the policy
  compare RUN RUN...  curves and final returns over seeds: one picture, one table
  plot RUN            draw the learning curve again
  zoo                 list the trained policies of the package; each is a RUN by the name zoo:NAME
  envs [WORD]         list the envs that have a name, and what each needs
  syncs SCRIPT        run a script and list the lines that make the host wait for the device
  doctor              check the machine before a run, or a run after it with --after RUN
  monitor [RUN]       watch a run: speed, memory, the GPU
  bench NAME          measure this machine; NAME is one of
                      {", ".join(BENCHMARKS)}

Each command takes --help.

options:
  -h, --help                show this text
  --version                 show the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        Exit code: 0; 1 for settings that cannot be run and for a run that diverged; 2 for a command that does not
        exist; 128 + the number of the signal that stopped a run.

    Raises:
        SystemExit: by the parser of a command, with 0 after its help and 2 for an option that does not exist.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments[:1]:
        print(f"torchrl_perf {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    commands = {"train": (TRAINED, _train), "bench": (BENCHMARKS, _bench)}
    try:
        if command in TOOLS:
            return _tool(command, rest)
        if command not in commands:
            return _unknown("command", command, (*commands, *TOOLS))
        names, run = commands[command]
        if rest[:1] in (["-h"], ["--help"]):
            print(USAGE, end="")
            return 0
        if not rest or rest[0] not in names:
            return _unknown(f"torchrl-perf {command}", rest[0] if rest else "nothing", names)
        return run(rest[0], rest[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _train(name: str, arguments: list[str]) -> int:
    if algorithm := _read_for_help(name, arguments):
        _show(name, algorithm)
    # first of all: each rank imports the algorithm itself, and need not wait until this process has
    if (code := importlib.import_module("torchrl_perf.cli.asked").launched(name, arguments)) is not None:
        return code
    return importlib.import_module("torchrl_perf.cli.train").main(name, arguments)


def _bench(name: str, arguments: list[str]) -> int:
    return importlib.import_module(f"torchrl_perf.bench.{name}").main(arguments)


def _tool(name: str, arguments: list[str]) -> int:
    return importlib.import_module(f"torchrl_perf.cli.{name}").main(arguments)


def _unknown(what: str, received: str, expected: tuple[str, ...]) -> int:
    print(f"{what}: expected one of {', '.join(expected)}, received {received}.\n\n{USAGE}", end="", file=sys.stderr)
    return 2
