"""``--backend``: what steps the physics of a MuJoCo task, as a change of the name behind ``--env``."""

import argparse
from collections.abc import Sequence

from torchrl_perf.near_names import nearest_word
from torchrl_perf.registry import ROBOTS

__all__ = ["BACKENDS", "named_by_backend"]

BACKENDS = ("warp", "gym")
VERSION = "-v5"


def named_by_backend(argv: Sequence[str]) -> list[str]:
    """A command line without ``--backend``, whose ``--env`` names the env that it asks for.

    ``warp`` is MuJoCo Warp on the device, whose tasks have plain names, and ``gym`` Gymnasium's env on the CPU, whose
    name has a version.

    Args:
        argv: the arguments behind the algorithm.

    Raises:
        ValueError: for an unknown backend, and an env that is no task of MuJoCo.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--backend")
    first.add_argument("--env")
    given, rest = first.parse_known_args(list(argv))
    if given.backend is None:
        return list(argv)
    if given.backend not in BACKENDS:
        raise ValueError(
            f"backend: expected one of {', '.join(BACKENDS)}, received {given.backend!r}. Remedy: warp for MuJoCo Warp "
            "on the device, gym for Gymnasium's env on the CPU."
        )
    name = str(given.env).removesuffix(VERSION)
    if name not in ROBOTS:
        near = nearest_word(name, ROBOTS)
        remedy = f"--env {near}, the nearest" if near else "leave --backend out"
        raise ValueError(
            f"backend: expected a task of MuJoCo, one of {', '.join(ROBOTS)}, received --env {given.env}. Remedy: "
            f"{remedy}."
        )
    return [*rest, "--env", name + (VERSION if given.backend == "gym" else "")]
