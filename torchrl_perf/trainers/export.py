"""A policy as a file that needs neither TorchRL nor this package: ONNX, and a program of ``torch.export``."""

import contextlib
import importlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, MultiCategorical, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules.options import OptionController
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.policies import LoadedPolicy

__all__ = ["ActingNetwork", "ExportError", "Exported", "export_policy", "random_rows"]

Format = Literal["both", "onnx", "torch"]
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FILES = {"onnx": "policy.onnx", "torch": "policy.pt2"}
README = "policy.md"
ROWS = 1_000
"""Random inputs on which a file is compared with the policy."""
TOLERANCE = 1e-5
"""Greatest difference of a number, relative to 1 and to the number itself."""
TIES = 1e-3
"""Share of the rows in which a choice may differ, since two are equally good to rounding."""
EXAMPLE_ROWS = 4
LARGEST = 255  # of random integers


class ExportError(ValueError):
    """A policy that cannot be exported, or whose file does something else than the policy."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: list[Path]
    """The exports and their README."""
    difference: float
    """Greatest difference of a number from the policy's, over all exports."""
    rows: int
    """Random inputs that were compared."""


class ActingNetwork(nn.Module):
    """A policy as a function of tensors: what it reads in, the action and the state that it carries out.

    Args:
        policy: a loaded one.

    Attributes:
        in_keys: what the policy reads; the names are those of the inputs.
        out_keys: parts of the action, and what has to be passed in again at the next step.

    Raises:
        ExportError: for a policy that reads what the env of its run does not observe.
    """

    def __init__(self, policy: LoadedPolicy) -> None:
        super().__init__()
        self.policy = policy.policy
        known = policy.specs.observation_spec.keys(True, True)
        self.in_keys: list[NestedKey] = list(policy.in_keys)  # pyright: ignore
        if absent := [key for key in self.in_keys if key not in known]:
            raise ExportError(
                f"export: expected a policy of {sorted(map(str, known))}, which its env observes, received one that "
                f"reads {absent}, the state of a memory, filter or planner. Remedy: load_policy, which keeps it as it "
                "is."
            )
        carried = [key for key in policy.out_keys if isinstance(key, tuple) and key[0] == "next"]  # pyright: ignore
        self.out_keys: list[NestedKey] = [*policy.specs.action_keys, *carried]  # pyright: ignore

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of inputs and of outputs, nested keys joined by underscores."""
        return [_name(key) for key in self.in_keys], [_name(key) for key in self.out_keys]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Inputs ``[B, *]`` in the order of ``in_keys`` -> outputs ``[B, *]`` in that of ``out_keys``."""
        td = TensorDict({}, batch_size=[inputs[0].shape[0]])
        for key, value in zip(self.in_keys, inputs, strict=True):
            td.set(key, value)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            td = self.policy(td)
        return tuple(td.get(key) for key in self.out_keys)


def _name(key: NestedKey) -> str:
    return key if isinstance(key, str) else "_".join(key)


def random_rows(policy: LoadedPolicy, keys: list[NestedKey], rows: int, seed: int = 0) -> list[Tensor]:
    """Random inputs of a policy, within the bounds of its observations; standard normal where there are none.

    Args:
        policy: gives the specs.
        keys: of the inputs.
        rows: how many of each.
        seed: the same gives the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for key in keys:
        spec = policy.specs.observation_spec[key]
        shape = (rows, *spec.shape[1:])
        if spec.dtype == torch.bool:
            drawn = torch.rand(shape, generator=generator) < 0.7
            drawn[..., :1] = True  # a mask that allows nothing says nothing
        elif isinstance(spec, Categorical | OneHot | MultiCategorical):
            size = int(spec.nvec.min()) if isinstance(spec, MultiCategorical) else int(spec.space.n)  # pyright: ignore
            drawn = torch.randint(size, shape, generator=generator)
        elif not spec.dtype.is_floating_point:
            low, high = (int(bound.flatten()[0]) for bound in (spec.space.low, spec.space.high))
            drawn = torch.randint(max(low, -LARGEST), min(high, LARGEST) + 1, shape, generator=generator)
        elif isinstance(spec, Bounded):
            low, high = (bound[0].clamp(-2.0, 2.0) for bound in (spec.space.low, spec.space.high))
            drawn = low + (high - low) * torch.rand(shape, generator=generator, dtype=spec.dtype)
        else:
            drawn = torch.randn(shape, generator=generator)
        found.append(drawn.to(spec.dtype))
    return found


def export_policy(policy: LoadedPolicy, folder: str | Path, *, form: Format = "both", rows: int = ROWS) -> Exported:
    """Writes ``policy.onnx``, ``policy.pt2`` and ``policy.md``, which says what goes in and comes out.

    Each file is compared with the policy on random inputs, in batches of other sizes than the one it was made with.
    What was there before is replaced once all of it is written and right; otherwise it is as it was.

    Args:
        policy: on the CPU.
        folder: where the files go.
        form: ``"onnx"``, ``"torch"`` (a program of ``torch.export``) or both.
        rows: random inputs to compare.

    Raises:
        ImportError: naming the packages that are missing.
        ExportError: a ValueError, for a policy that draws random numbers, an operator that ONNX lacks, and a file that
            does something else than the policy.
        OSError: if the folder cannot be written to.
    """
    forms = ("onnx", "torch") if form == "both" else (form,)
    if "onnx" in forms:
        _check_packages()
    network = ActingNetwork(policy).eval()
    inputs = random_rows(policy, network.in_keys, rows)
    folder, difference = Path(folder), 0.0
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as made, _quiet(), _decided_ends(network):
        expected = _repeated(network, inputs)
        program = _program(network, random_rows(policy, network.in_keys, EXAMPLE_ROWS, seed=1))
        for each in forms:
            path = Path(made) / FILES[each]
            run = _onnx(program, network, path) if each == "onnx" else _torch(program, path)
            difference = max(difference, _compare(run(inputs), expected, network, FILES[each]))
        text = readme(policy, network, [FILES[each] for each in forms], difference, rows)
        (Path(made) / README).write_text(text, encoding="utf-8")
        names = [*(FILES[each] for each in forms), README]
        for name in names:
            (Path(made) / name).replace(folder / name)
    return Exported([folder / name for name in names], difference, rows)


def _check_packages() -> None:
    absent = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            absent.append(name)
    if absent:
        raise ImportError(
            f"export: expected the packages {', '.join(PACKAGES)}, received no {', '.join(absent)}. Remedy: pip "
            "install 'torchrl_perf[export]', or --format torch, which needs none of them."
        )


@torch.no_grad()
def _repeated(network: ActingNetwork, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """What the policy gives, twice the same."""
    found = []
    for seed in (0, 1):
        with seeded(seed):
            found.append(network(*inputs))
    if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
        raise ExportError(
            f"export: expected a policy that gives the same action for the same input, received a "
            f"{type(network.policy).__name__} that draws random numbers, as a planner does. Remedy: load_policy, "
            "which keeps it as it is."
        )
    return found[0]


@contextlib.contextmanager
def _decided_ends(network: nn.Module) -> Iterator[None]:
    """Options end where that is more probable than not: a file has no random numbers."""
    controllers = [module for module in network.modules() if isinstance(module, OptionController)]
    before = [controller.ends_by_chance for controller in controllers]
    try:
        for controller in controllers:
            controller.ends_by_chance = False
        yield
    finally:
        for controller, chance in zip(controllers, before, strict=True):
            controller.ends_by_chance = chance


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say of packages that are not needed."""
    talker = logging.getLogger("torch.onnx")
    level = talker.level
    talker.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        talker.setLevel(level)


def _program(network: ActingNetwork, example: list[Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            return torch.export.export(network, tuple(example), dynamic_shapes=(tuple({0: batch} for _ in example),))
    except Exception as error:  # its many kinds have no base
        raise ExportError(
            f"export: expected a policy that torch.export can trace for any number of rows, received {_first(error)}. "
            "Remedy: a network of tensor operations alone, without branches on values."
        ) from error


def _onnx(program: torch.export.ExportedProgram, network: ActingNetwork, path: Path) -> Any:
    import onnxruntime

    names, out_names = network.names
    try:
        exported = torch.onnx.export(program, dynamo=True, input_names=names, output_names=out_names, verbose=False)
        assert exported is not None
        exported.save(path, external_data=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # the exporter's own, those of onnxscript, and of the runtime
        raise ExportError(
            f"export: expected operators that ONNX and its runtime have, received one that is missing: "
            f"{_first(error)}. Remedy: --format torch, or a network without it."
        ) from error
    kept = {each.name for each in session.get_inputs()}

    def run(inputs: list[Tensor]) -> list[Tensor]:
        # an input that decides nothing is no input of the graph
        fed = {name: value.numpy() for name, value in zip(names, inputs, strict=True) if name in kept}
        return [torch.from_numpy(np.asarray(value)) for value in session.run(out_names, fed)]

    return run


def _torch(program: torch.export.ExportedProgram, path: Path) -> Any:
    torch.export.save(program, path)
    module = torch.export.load(path).module()

    def run(inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(module(*inputs))

    return run


def _first(error: BaseException) -> str:
    """What an error says, in one line: that of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _compare(received: list[Tensor], expected: tuple[Tensor, ...], network: ActingNetwork, file: str) -> float:
    """The greatest difference of a number; choices may differ where two are equally good."""
    greatest = 0.0
    for name, one, other in zip(network.names[1], received, expected, strict=True):
        what = f"{name} of {file}"
        if one.shape != other.shape:
            raise ExportError(
                f"export: expected {what} of shape {list(other.shape)}, received {list(one.shape)}. Remedy: a "
                "network that treats each row alone."
            )
        if not other.dtype.is_floating_point:
            differing = (one != other).reshape(len(one), -1).any(-1).double().mean().item()
            if differing > TIES:
                raise ExportError(
                    f"export: expected {what} to be the policy's, received another one for {differing:.1%} of "
                    f"{len(one)} random inputs. Remedy: a run with precision='ieee' or 'tf32', or --format torch."
                )
            continue
        scale = other.double().abs().clamp_min(1.0)
        difference = ((one.double() - other.double()).abs() / scale).max().item()
        if not difference <= TOLERANCE:
            raise ExportError(
                f"export: expected {what} within {TOLERANCE:g} of the policy's, received a difference of "
                f"{difference:.2g} on {len(one)} random inputs. Remedy: a run with precision='ieee' or 'tf32', "
                "or --format torch."
            )
        greatest = max(greatest, difference)
    return greatest


def readme(policy: LoadedPolicy, network: ActingNetwork, files: list[str], difference: float, rows: int) -> str:
    """What the files are, what goes in and what comes out, in Markdown.

    Args:
        policy: that was exported.
        network: its inputs and outputs.
        files: names of the exports.
        difference: greatest one from the policy.
        rows: random inputs that were compared.
    """
    names, out_names = network.names
    specs = policy.specs
    described = {**dict(specs.observation_spec.items(True, True)), **dict(specs.full_action_spec.items(True, True))}
    lines = [
        f"# Policy of {policy.config.algorithm} on {policy.config.env}",
        "",
        f"From `{policy.path.name}` of this run, after {policy.steps} env steps. It does not explore. What the network "
        "does to its inputs, such as scaling them, is inside.",
        "",
        f"Files: {', '.join(f'`{file}`' for file in files)}. On {rows} random inputs they "
        + (f"differ from the policy by at most {difference:.1e}." if difference else "give the policy's actions."),
        "",
        "| | name | shape | dtype | values |",
        "| --- | --- | --- | --- | --- |",
    ]
    for role, keys, titles in (("in", network.in_keys, names), ("out", network.out_keys, out_names)):
        for key, title in zip(keys, titles, strict=True):
            spec = described.get(_now(key))
            lines.append(f"| {role} | `{title}` | {_shape(spec)} | {_dtype(spec)} | {_values(spec)} |")
    acted = [described[key] for key in network.out_keys if key in described]
    if any(isinstance(spec, Bounded) and spec.dtype.is_floating_point for spec in acted):
        lines += ["", "Clip an action to its values, as the env does: the mean of a Gaussian may lie beyond them."]
    state = ", ".join(f"`{title}`" for key, title in zip(network.out_keys, out_names, strict=True) if _now(key) != key)
    if state:
        lines += [
            "",
            f"State: pass {state} in again, without `next_`, at the next step of the same episode; begin an episode "
            "with zeros. An option ends where that is more probable than not; in training it ended by chance.",
        ]
    lines += ["", "`batch` is any number of rows.", "", *_usage(files, names, out_names)]
    return "\n".join(lines) + "\n"


def _now(key: NestedKey) -> NestedKey:
    """The key of the step itself, of one below "next"."""
    if isinstance(key, str) or key[0] != "next":
        return key
    return key[1] if len(key) == 2 else key[1:]


def _shape(spec: Any) -> str:
    return "[batch]" if spec is None else str(["batch", *spec.shape[1:]]).replace("'", "")


def _dtype(spec: Any) -> str:
    return "" if spec is None else str(spec.dtype).removeprefix("torch.")


def _values(spec: Any) -> str:
    if isinstance(spec, MultiCategorical):
        return ", ".join(f"0 to {int(size) - 1}" for size in spec.nvec.reshape(-1, spec.nvec.shape[-1])[0])
    if isinstance(spec, Categorical) and spec.dtype != torch.bool:
        return f"0 to {int(spec.space.n) - 1}"
    if isinstance(spec, Bounded) and spec.dtype.is_floating_point:
        low, high = (bound[0].flatten().tolist() for bound in (spec.space.low, spec.space.high))
        if len(low) <= 8:
            return ", ".join(f"{a:g} to {b:g}" for a, b in zip(low, high, strict=True))
    return ""


def _usage(files: list[str], names: list[str], out_names: list[str]) -> list[str]:
    """How the files are called, in Python."""
    left = ", ".join(out_names) + ("," if len(out_names) == 1 else "")
    fed, lines = ", ".join(f'"{name}": {name}' for name in names), []
    if FILES["onnx"] in files:
        lines += [
            *("```python", "import onnxruntime", ""),
            f'session = onnxruntime.InferenceSession("{FILES["onnx"]}")',
            f"{left} = session.run(None, {{{fed}}})  # NumPy arrays",
            *("```", ""),
        ]
    if FILES["torch"] in files:
        lines += [
            *("```python", "import torch", ""),
            f'policy = torch.export.load("{FILES["torch"]}").module()',
            f"{left} = policy({', '.join(names)})  # tensors",
            "```",
        ]
    return lines
