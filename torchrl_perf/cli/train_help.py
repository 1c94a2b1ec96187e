"""``torchrl-perf train NAME --help``, within a second: the settings are read, not imported."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torchrl_perf.cli.read_settings import Source
from torchrl_perf.registry import MARINE, MARINE_AGENTS, entry_of

__all__ = ["read_for_help", "show"]


def read_for_help(name: str, argv: Sequence[str]) -> str | None:
    """The algorithm whose settings a command line asks to be listed, or None where it asks for more than that.

    With an env, a file or a run beside ``--help`` the defaults depend on them, so that they have to be loaded.

    Args:
        name: an algorithm, a system, or ``marine``, whose agent may be given.
        argv: the arguments behind it.
    """
    match [*argv]:
        case [("-h" | "--help")]:
            return f"{MARINE}-{next(iter(MARINE_AGENTS))}" if name == MARINE else name
        case ["--agent", agent, ("-h" | "--help")] if name == MARINE and agent in MARINE_AGENTS:
            return f"{MARINE}-{agent}"
    return None


def show(name: str, algorithm: str) -> None:
    """Print every option, with the settings of the algorithm's first task as defaults.

    Args:
        name: what was asked for, such as ``marine``.
        algorithm: whose settings they are, such as ``marine-iqn``.

    Raises:
        SystemExit: with 0, after the text.
    """
    import tyro

    kind, arguments = _named(entry_of(algorithm).config), Source("cli.train")["Arguments"]
    first = next(iter(_named(kind.presets_in).values()))
    tyro.cli(
        arguments[kind],
        prog=f"torchrl-perf train {name}",
        args=["--help"],
        default=arguments(settings=kind(**dataclasses.asdict(first))),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _named(place: str) -> Any:
    """The object at ``module:name`` below the package."""
    module, _, name = place.partition(":")
    return Source(module)[name]
