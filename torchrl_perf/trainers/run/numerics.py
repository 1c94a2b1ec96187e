"""Numbers that are not finite: found on the device, named on the host, and kept away from the learner."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchrl.envs import EnvBase

from torchrl_perf.collectors.env_state import chain
from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.functional.rows.nonfinite import KINDS, count_nonfinite, finite_rows, first_nonfinite, repaired_rows
from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.parallel import Ranks
from torchrl_perf.trainers.run.fault import Fault, OnNan, Verdict, remedy_of, unpack

# metrics that carry a place in one number, only where there is one; that of OWN is among the losses of one rank alone
ROW, UPDATE, OWN = "fault/row", "fault/update", "fault/own"
OF_ENV = "env/"  # begins the metrics of what an env counts itself
logger = logging.getLogger("torchrl_perf")
_NOT_DATA = ("collector", "index", "index_generation", "priority_weight")


class NumericalGuard:
    """Watches batches, losses and gradients for NaN and infinities, without a host read.

    Call :meth:`check` on each collected batch, :meth:`note` after each update, :meth:`report` at the end of each
    iteration: all on the device, static shapes, to be compiled and captured. The findings travel with the metrics:
    ``nonfinite/<key>`` counts the values that were not finite in each floating-point entry of the batch,
    ``nonfinite/loss`` and ``nonfinite/gradient`` the updates. :meth:`verdict` reads a flushed row and names the first.

    The trainers have one; your own loop calls it like this::

        guard = NumericalGuard(metrics, iteration, parameters=[name for name, _ in loss.named_parameters()])
        batch = collector.collect()
        guard.check(batch)
        total.backward(); norm = optimizer.grad_norm(); optimizer.step()  # a GuardedAdam: no step if norm is not finite
        guard.note(total.view(1), optimizer.grad_norms, optimizer.is_fault(total, norm))
        guard.report()
        verdict = guard.verdict(metrics.flush(steps))  # on the host, once an interval

    ``on_nan`` says what happens then. Under each policy, a loss or gradient that is not finite skips its update.

    * ``"stop"``: the run ends at the next row.
    * ``"skip"``: rows of a batch or sample that are not finite are replaced by the good row before them
      (:meth:`repair`), so that they reach no loss; a :class:`DeviceEnv` whose state is not finite is truncated and
      reset. If no update of an interval could be made, the run ends.
    * ``"rollback"``: as ``"skip"``, and networks, targets and optimisers go back to the last snapshot whose interval
      was good, in place; random numbers continue, so that the next attempt differs. The contents of envs and replay
      buffer are true experience and stay. After ``max_rollbacks`` in a row the run ends. Two copies of networks and
      moments are kept on the device.

    Args:
        metrics: where the findings go.
        iteration: number of the present iteration, 0-d on the device, from 1.
        on_nan: the policy.
        losses: names of the losses that :meth:`note` gets.
        parameters: names of the parameters whose gradients it gets.
        compile: makes a function faster, such as ``runtime.compiled``; by default it is not changed.
        parts: gives what a rollback restores, by name: objects with ``state_dict`` and ``load_state_dict`` in place.
        max_rollbacks: rollbacks in a row, without a good interval in between.
        ranks: the processes of the run; by default this one alone. Of several each notes which losses are its own.

    Raises:
        ValueError: for an unknown policy, or an iteration that is no 0-d tensor on the device of the metrics.

    Attributes:
        first_bad: first iteration with anything that was not finite, or -1: float32 0-d on the device.
        rollbacks: rollbacks since the last good interval.
        keys: entries of the batch that are watched, in the order in which a step makes them; set by the first check.
    """

    def __init__(
        self,
        metrics: DeviceMetrics,
        iteration: Tensor,
        *,
        on_nan: OnNan = "stop",
        losses: Sequence[str] = ("loss",),
        parameters: Sequence[str] = (),
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        parts: Callable[[], Mapping[str, Any]] = dict,
        max_rollbacks: int = 3,
        ranks: Ranks | None = None,
    ) -> None:
        if on_nan not in get_args(OnNan):
            raise ValueError(f"on_nan: expected one of {get_args(OnNan)}, received {on_nan!r}. Remedy: one of these.")
        if not isinstance(iteration, Tensor) or iteration.ndim or iteration.device != metrics.device:
            raise ValueError(
                f"iteration: expected a 0-d tensor on {metrics.device}, received {_describe(iteration)}. Remedy: "
                "torch.zeros((), device=...), raised by 1 in place before each iteration."
            )
        self.metrics, self.on_nan, self.max_rollbacks = metrics, on_nan, max_rollbacks
        self.losses, self.parameters = list(losses), list(parameters)
        device = metrics.device
        self._iteration = iteration
        self._compile = compile or (lambda fn: fn)
        self._parts = parts
        self.first_bad = torch.full((), -1.0, device=device)
        self.rollbacks = 0
        self.keys: list[NestedKey] = []
        self._widths: list[int] = []
        self._shape = (0, 0)  # N, T
        self._batch_shape = torch.Size([])
        self._updates = 0  # of an iteration that learns; it never changes
        self._none = torch.zeros(2, dtype=torch.int64, device=device)
        self._good: dict[str, Any] | None = None
        self._candidates: deque[dict[str, Any]] = deque()
        self._noted: list[tuple[Tensor, Tensor, Tensor]] = []
        self._watched: AutoResetEnv | None = None  # an env that counts its own faults
        self._told: set[str] = set()
        self._ranks = Ranks.alone(device) if ranks is None else ranks
        if self._ranks.several:
            self._ranks.own = []
        self._scan_fn = self._compile(self._scan)
        self._own_fn = self._compile(self._own_place)
        self._digest_fn = self._compile(self._digest)

    @property
    def repairs(self) -> bool:
        """Whether rows that are not finite are kept from the learner, so that the run can go on."""
        return self.on_nan != "stop"

    # -- on the device ------------------------------------------------------------------------------------------------

    def watch(self, env: EnvBase | None) -> None:
        """Lets a :class:`DeviceEnv`, also below transforms, reset rows whose state is not finite, if the run may go on.

        Any other env that can do so has an attribute ``resets_nonfinite``. Faults that an env counts itself join the
        rows as ``env/<name>``, and are said once.
        """
        base: Any = None if env is None else chain(env)[-1]
        if hasattr(type(base), "resets_nonfinite"):
            base.resets_nonfinite = self.repairs
        self._watched = base if isinstance(base, AutoResetEnv) and base.fault_counts() else None

    def check(self, batch: TensorDictBase) -> None:
        """Counts the non-finite values of a batch and finds the first; call it before anything is added to the batch.

        Args:
            batch: ``[N, T]``, ``[T]`` of one env, or ``[N, T, *]``; always of the same entries. Those of floating
                point are looked at.

        Raises:
            ValueError: for a batch without dims, of another shape, or without an entry of the first one.
        """
        if not self.keys:
            self._prepare(batch)
        values = [batch.get(key, None) for key in self.keys]
        if batch.shape != self._batch_shape or any(value is None for value in values):
            absent = [name_of(key) for key, value in zip(self.keys, values, strict=True) if value is None]
            raise ValueError(
                f"NumericalGuard.check: expected batches like the first, {list(self._batch_shape)} with "
                f"{[name_of(key) for key in self.keys]}, received {list(batch.shape)} without {absent}. Remedy: a "
                "guard for each kind of batch."
            )
        self._noted.clear()  # from an iteration that broke off
        self._take_own()
        if not self.keys:
            return
        if batch.ndim == 1:
            values = [value.unsqueeze(0) for value in values]
        with torch.no_grad():
            self._counts, self._row = self._scan_fn(values)

    def note(self, losses: Tensor, gradients: Tensor, fault: Tensor) -> None:
        """Keeps the losses and gradients of an update until :meth:`report`; costs the device nothing.

        Args:
            losses: one value for each of ``losses``, float ``[L]``; must not be overwritten in this iteration.
            gradients: one number for each of ``parameters`` that is finite where its gradient is, float ``[P]``; as
                above.
            fault: bool 0-d, whether loss or gradient were not finite and should have been.

        Raises:
            ValueError: for other numbers of losses or gradients than names.
        """
        expected = ((len(self.losses),), (len(self.parameters),))
        if (losses.shape, gradients.shape) != expected:
            raise ValueError(
                f"NumericalGuard.note: expected losses and gradients of shapes {expected[0]} and {expected[1]}, one "
                f"for each of losses={self.losses} and of the parameters, received {tuple(losses.shape)} and "
                f"{tuple(gradients.shape)}. Remedy: the names at construction, or loss.view(1)."
            )
        self._noted.append((losses.detach(), gradients.detach(), fault))

    def report(self) -> None:
        """Hands the findings of this iteration to the metrics."""
        noted, self._noted = self._noted, []
        found, update = self._none, None
        if noted:
            self._updates = len(noted)
            losses, gradients, faults = (torch.stack(parts) for parts in zip(*noted, strict=True))
            found, update = self._digest_fn(losses, gradients, faults)
        counts = [*self._counts.unbind(), *found.unbind()] if self.keys else [*found.unbind()]
        names = [*(f"nonfinite/{name_of(key)}" for key in self.keys), "nonfinite/loss", "nonfinite/gradient"]
        self.metrics.add_all(dict(zip(names, counts, strict=True)), "sum")
        if self.keys:
            self.metrics.add(ROW, self._row, reduce="max", mask=self._row <= 0)
        if update is not None:
            self.metrics.add(UPDATE, update, reduce="max", mask=update <= 0)
        if own := self._take_own():
            place = self._own_fn(torch.cat([loss.reshape(-1) for loss in own]))
            self.metrics.add(OWN, place, reduce="max", mask=place <= 0)
        if self._watched is not None:
            counts_of_env = self._watched.fault_counts()
            self.metrics.add_all({f"{OF_ENV}{name}": count for name, count in counts_of_env.items()}, "last")

    def repair(self, rows: TensorDictBase, keys: Sequence[NestedKey] | None = None) -> tuple[Tensor, Tensor]:
        """Which rows are finite, and for each the row to read in its place.

        Args:
            rows: ``[R]``.
            keys: entries that are looked at; by default all of floating point.

        Returns:
            bool ``[R]``, and int64 ``[R]``: the identity where all are finite.
        """
        names = float_keys(rows) if keys is None else [key for key in keys if rows.get(key).is_floating_point()]
        good = finite_rows([rows.get(key) for key in names])
        return good, repaired_rows(good)

    def finite(self, values: Tensor) -> Tensor:
        """The values, with 0 in place of non-finite ones if the run may go on, for statistics that they would spoil."""
        return torch.where(values.isfinite(), values, 0.0) if self.repairs else values

    def _prepare(self, batch: TensorDictBase) -> None:
        """Fixes keys and shapes: host work, at the first batch."""
        if not batch.ndim or not batch.shape.numel():
            raise ValueError(
                f"NumericalGuard.check: expected a batch [N, T] or [T], received one of shape {list(batch.shape)}. "
                "Remedy: the batch that a collector yields."
            )
        self.keys = float_keys(batch)
        self._batch_shape = batch.shape
        self._shape = (1, batch.shape[0]) if batch.ndim == 1 else (batch.shape[0], batch.shape[1])
        self._widths = [batch.get(key).shape[min(batch.ndim, 2) :].numel() for key in self.keys]
        owner = [number for number, width in enumerate(self._widths) for _ in range(width)]
        device = self.metrics.device
        self._owner = torch.tensor(owner, device=device).unsqueeze(-1) == torch.arange(len(self.keys), device=device)

    def _scan(self, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Counts ``[K]`` and first place of entries ``[N, T, *]``."""
        # [T * N, F]: in the order of time, then env, then entry
        rows = torch.cat([value.transpose(0, 1).flatten(2) if value.ndim > 2 else value.t().unsqueeze(-1)
                          for value in values], -1).flatten(0, 1)  # fmt: skip
        counts = count_nonfinite(rows)
        code = first_nonfinite(rows)
        self.mark_bad(code >= 0)
        return (self._owner * counts.unsqueeze(-1)).sum(0), self._place(code, rows.numel())

    def _digest(self, losses: Tensor, gradients: Tensor, faults: Tensor) -> tuple[Tensor, Tensor]:
        """Counts of bad losses and gradients ``[2]``, and the first place, from all updates ``[U, *]``."""
        bad_loss = faults & ~losses.isfinite().all(1)
        values = torch.cat([losses, gradients], 1)
        code = first_nonfinite(torch.where(faults.unsqueeze(-1), values, 0.0))
        self.mark_bad(faults.any())
        return torch.stack([bad_loss.sum(), (faults & ~bad_loss).sum()]), self._place(code, values.numel())

    def _take_own(self) -> list[Tensor]:
        """This rank's part of each loss since the last call."""
        found = self._ranks.own or []
        if found:
            self._ranks.own = []
        return found

    def _own_place(self, losses: Tensor) -> Tensor:
        """The first place among this rank's part of the losses, ``[K]``."""
        return self._place(first_nonfinite(losses.unsqueeze(-1)), losses.numel())

    def _place(self, code: Tensor, size: int) -> Tensor:
        """Iteration and code in one number that is largest, and at most 0, for the first place; 1 for none."""
        # float64 holds it exactly up to 2 ** 53, which is 1e13 values
        place = self._iteration.to(torch.int64) * (size * len(KINDS)) + code
        return torch.where(code >= 0, -place, 1).to(torch.float64)

    def mark_bad(self, bad: Tensor) -> None:
        """Keeps the present iteration as the first bad one, if ``bad`` (bool 0-d) and none was before."""
        first = (self.first_bad < 0) & bad
        self.first_bad.copy_(torch.where(first, self._iteration, self.first_bad))

    # -- on the host --------------------------------------------------------------------------------------------------

    def verdict(self, row: Mapping[str, float]) -> Verdict | None:
        """What to do after an interval; None if all of it was finite.

        Args:
            row: the flushed metrics of the interval.
        """
        self._tell_of_env(row)
        counts = {name.removeprefix("nonfinite/"): value for name, value in row.items() if name in self._count_names}
        bad = {name: value for name, value in counts.items() if value > 0}
        if not bad:
            candidate = self._candidates.popleft() if self._candidates else None
            if counts and candidate is not None:  # an interval emptied by a rollback proves nothing
                self._good, self.rollbacks = candidate, 0
            return None
        fault = self._first_fault(row)
        action, outcome = self._decide(row, bad)
        iteration = int(row.get("train/first_bad_iteration", -1)) if fault is None else fault.iteration
        frames = self._shape[0] * self._shape[1] * self._ranks.size
        place = f"an overflow in iteration {iteration}" if fault is None else str(fault)
        place += f" (env step {iteration * frames})" if frames else ""
        listed = ", ".join(f"{name} {value:,.0f}" for name, value in bad.items())
        message = (
            f"Expected finite numbers, received {place}; counts of the interval: {listed}. {outcome} "
            f"Remedy: {remedy_of(fault)}"
        )
        return Verdict(action, message, fault)

    def _tell_of_env(self, row: Mapping[str, float]) -> None:
        """Say once of each kind that the env has counted faults of its own."""
        found = {name.removeprefix(OF_ENV) for name, value in row.items() if name.startswith(OF_ENV) and value > 0}
        if self._watched is None or found <= self._told:
            return
        for name, sentence in self._watched.faults().items():
            if name not in self._told:
                logger.warning("%s", sentence)
                self._told.add(name)

    @property
    def _count_names(self) -> set[str]:
        return {f"nonfinite/{name}" for name in (*map(name_of, self.keys), "loss", "gradient")}

    def _decide(self, row: Mapping[str, float], bad: Mapping[str, float]) -> tuple[OnNan, str]:
        if self.on_nan == "stop":
            return "stop", "Its updates were skipped."
        if self.on_nan == "rollback":
            if self._good is None or self.rollbacks >= self.max_rollbacks:
                return "stop", f"Rolled back {self.rollbacks} times without a good interval since."
            return "rollback", "Networks and optimisers go back to the last good interval."
        if row.get("train/updates_applied", 1.0) == 0 and {"loss", "gradient"} & bad.keys():
            return "stop", "No update of the interval could be made."
        return "skip", "Bad rows and updates were left out."

    def _first_fault(self, row: Mapping[str, float]) -> Fault | None:
        faults = [self._batch_fault(row[ROW])] if ROW in row else []
        faults += [self._update_fault(row[UPDATE])] if UPDATE in row and self._updates else []
        # the sort is stable: within an iteration the batch comes before the updates
        return min(faults, key=lambda fault: fault.iteration, default=None)

    def _batch_fault(self, place: float) -> Fault:
        envs, steps = self._shape
        width = sum(self._widths)
        iteration, index, kind = unpack(place, envs * steps * width)
        row, column = divmod(index, width)
        ends = [sum(self._widths[: number + 1]) for number in range(len(self.keys))]
        key = next(key for key, end in zip(self.keys, ends, strict=True) if column < end)
        return Fault(name_of(key), kind, iteration, "batch", step=row // envs, env=row % envs)

    def _update_fault(self, place: float) -> Fault:
        names = [*self.losses, *self.parameters]
        iteration, index, kind = unpack(place, self._updates * len(names))
        update, column = divmod(index, len(names))
        if column < len(self.losses):
            return Fault(names[column], kind, iteration, "loss", update=update)
        return Fault(names[column], "not finite", iteration, "gradient", update=update)

    # -- rollback -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> None:
        """Keeps a state for a rollback, valid once the verdict on its interval is good; the first one at once.

        Call it before the first iteration and at each interval's end. Does nothing under the other policies.
        """
        if self.on_nan != "rollback":
            return
        state = {name: tree_map_only(Tensor, Tensor.clone, dict(p.state_dict())) for name, p in self._parts().items()}
        if self._good is None:
            self._good = state
        else:
            self._candidates.append(state)

    def rollback(self) -> None:
        """Goes back to the last good snapshot, in place: captured graphs stay valid. The interval so far is dropped.

        Raises:
            RuntimeError: without a snapshot.
        """
        if self._good is None:
            raise RuntimeError(
                "NumericalGuard.rollback: expected a snapshot, received none. Remedy: on_nan='rollback', and "
                "snapshot() before the first iteration."
            )
        for name, part in self._parts().items():
            part.load_state_dict(tree_map_only(Tensor, Tensor.clone, self._good[name]))
        self._candidates.clear()
        self.metrics.reset()
        self.first_bad.fill_(-1.0)
        self.rollbacks += 1

    def may_save(self) -> bool:
        """Whether the present state is worth a checkpoint; reads the device, as a save does anyway."""
        return self.on_nan == "skip" or float(self.first_bad) < 0


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def name_of(key: NestedKey) -> str:
    """A key as the metrics have it: nested ones with slashes."""
    return key if isinstance(key, str) else "/".join(cast("tuple[str, ...]", key))


def float_keys(td: TensorDictBase) -> list[NestedKey]:
    """Keys of floating-point data, in the order in which a step makes it: observation, action, result, reward."""

    def rank(key: NestedKey) -> tuple[bool, bool, bool]:
        parts = (key,) if isinstance(key, str) else key
        return parts[0] == "next", parts[-1] == "reward", "action" in str(parts[-1])

    keys = [key for key in td.keys(True, True) if td.get(key).is_floating_point() and td.get(key).numel()]
    return sorted((key for key in keys if (key if isinstance(key, str) else key[0]) not in _NOT_DATA), key=rank)
