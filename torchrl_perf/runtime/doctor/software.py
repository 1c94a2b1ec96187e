"""Checks of what is installed: versions that fit each other, TorchRL's C++ extension, compilers."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchrl_perf.runtime.doctor.checks import Finding, short_error

__all__ = ["software_probes"]

PACKAGE = "torchrl_perf"
LOWEST_PYTHON = (3, 11)
# Ranges where the package's own metadata cannot be read: a checkout on PYTHONPATH.
RANGES = {"torch": ">=2.11,<2.15", "torchrl": ">=0.14,<0.15", "tensordict": ">=0.14,<0.15"}
OTHERS = ("gymnasium", "numpy", "wandb", "tyro", "matplotlib", "nvidia-ml-py", "rich")


def software_probes() -> dict[str, Callable[[], Finding]]:
    """The checks of this module, by name."""
    return {
        "python": _python,
        "torch": partial(_package, "torch"),
        "torchrl": partial(_package, "torchrl"),
        "tensordict": partial(_package, "tensordict"),
        "torchrl/tensordict": _pair,
        "other packages": _others,
        "C++ extension": _extension,
        "compiler": _compiler,
    }


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}."
    if sys.version_info[:2] < LOWEST_PYTHON:
        return Finding("fail", found, "Python 3.11 or later.")
    return Finding("ok", found)


def version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def required_range(name: str, by: str = PACKAGE) -> str | None:
    """Range of ``name`` that the distribution ``by`` asks for, such as ``">=0.14,<0.15"``; None if it asks for none."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(by) or []
    except importlib.metadata.PackageNotFoundError:
        lines = [f"{package}{bounds}" for package, bounds in RANGES.items()] if by == PACKAGE else []
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == name and not (requirement.marker and "extra" in str(requirement.marker)):
            return str(requirement.specifier)
    return None


def is_within(found: str, bounds: str | None) -> bool:
    """Whether a version lies in a range; a pre-release or a local build counts as its number."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return SpecifierSet(bounds or "").contains(Version(found).base_version, prereleases=True)


def _package(name: str) -> Finding:
    """Check that a package is there, in range, and can be imported."""
    found, bounds = version(name), required_range(name)
    wanted = f'pip install "{name}{bounds or ""}"'
    if found is None:
        return Finding("fail", "not installed.", wanted)
    if not is_within(found, bounds):
        return Finding("fail", f"{found}, outside of {bounds}.", wanted)
    try:
        importlib.import_module(name)
    except Exception as error:
        return Finding("fail", f"{found} cannot be imported ({short_error(error)}).", f"install it again: {wanted}")
    return Finding("ok", f"{found}, in {bounds}." if bounds else f"{found}.")


def _pair() -> Finding:
    """Check that tensordict is one that torchrl asks for: each minor of torchrl uses internals of its tensordict."""
    torchrl, tensordict = version("torchrl"), version("tensordict")
    if torchrl is None or tensordict is None:
        return Finding("n/a", "one of them is not installed.")
    bounds = required_range("tensordict", by="torchrl")
    if not is_within(tensordict, bounds):
        remedy = f'pip install "tensordict{bounds}"'
        return Finding("fail", f"torchrl {torchrl} asks for tensordict {bounds}, {tensordict} is there.", remedy)
    return Finding("ok", f"{torchrl} and {tensordict} fit each other.")


def _others() -> Finding:
    found = {name: version(name) for name in OTHERS}
    bounds = {name: required_range(name) for name in OTHERS}
    missing = [name for name, number in found.items() if number is None]
    present = {name: number for name, number in found.items() if number is not None}
    off = {name: number for name, number in present.items() if not is_within(number, bounds[name])}
    if not missing and not off:
        return Finding("ok", ", ".join(f"{name} {number}" for name, number in present.items()) + ".")
    problems = [f"{name} {number} (expected {bounds[name]})" for name, number in off.items()]
    problems += [f"{name} is not installed" for name in missing]
    wanted = " ".join(f'"{name}{bounds[name] or ""}"' for name in (*off, *missing))
    is_needed = not {"gymnasium", "numpy"}.isdisjoint((*off, *missing))
    return Finding("fail" if is_needed else "warn", f"{', '.join(problems)}.", f"pip install {wanted}")


def _extension() -> Finding:
    """Whether torchrl's compiled part loads, which a wheel built for another torch release does not."""
    if version("torchrl") is None:
        return Finding("n/a", "torchrl is not installed.")
    importlib.import_module("torch")
    try:
        extension = importlib.import_module("torchrl._torchrl")
    except Exception as error:
        cost = "TorchRL's PrioritizedSampler and PrioritizedSliceSampler raise, all else works"
        return Finding(
            "warn",
            f"does not load ({_symbol(error)}): {cost}.",
            "DevicePrioritizedSampler and DeviceSliceSampler of torchrl_perf.replay need no extension; or the torch "
            "release that this torchrl wheel was built with.",
        )
    on_cuda = any(name.startswith("Cuda") for name in dir(extension))
    return Finding("ok", f"loads; priority trees on the CPU{' and on CUDA' if on_cuda else ' only'}.")


def _symbol(error: Exception) -> str:
    """The essential part of a linker's error, whose mangled names fill half a screen."""
    return "undefined symbol, built for another torch" if "undefined symbol" in str(error) else short_error(error)


def _first_program(*names: str | None) -> str | None:
    """Path of the first of some programs that is installed."""
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def _compiler() -> Finding:
    """Check what torch.compile needs: a C++ compiler; on CUDA Triton, which builds its launchers with a C compiler."""
    import torch

    cpp = _first_program(os.environ.get("CXX"), "g++", "clang++", "cl")
    triton = version("triton") or version("pytorch-triton")
    found = f"C++ {cpp or 'none'}, Triton {triton or 'none'}"
    if torch.version.cuda is not None and torch.cuda.is_available():
        if triton is None:
            return Finding("fail", f"{found}.", "pip install triton, or mode='eager'; compiled updates need it.")
        if _first_program(os.environ.get("CC"), "gcc", "clang", "cc") is None:
            return Finding("fail", f"{found}, no C compiler.", "install gcc: Triton builds its launchers with it.")
        headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if not headers.is_file():
            return Finding("fail", f"{found}, no Python.h.", "install Python's headers, such as python3-dev.")
        return Finding("ok", f"{found}.")
    if cpp is None:
        return Finding("warn", f"{found}.", "install g++, or keep mode='eager', which a CPU run has by default.")
    return Finding("ok", f"{found}.")
