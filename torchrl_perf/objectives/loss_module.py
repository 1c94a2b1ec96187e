"""The base of the off-policy losses as TorchRL loss modules: networks and targets, keys, rows, value estimators."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.objectives import LossModule, ValueEstimators
from torchrl.objectives.utils import build_value_estimator
from torchrl.objectives.value import TD0Estimator, TD1Estimator, TDLambdaEstimator

from torchrl_perf.functional.advantages import td_lambda_targets
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.rows.missing import missing_rows
from torchrl_perf.functional.rows.valid import REDUCTIONS, fitted_rows, kept, reduced, valid_mean
from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.memory.module import refuse_memory_of
from torchrl_perf.objectives.checks import checked_gamma, column, entry
from torchrl_perf.objectives.twins import Twins, members_of
from torchrl_perf.objectives.views import (
    buffers_of,
    from_torchrl_names,
    holder,
    joined,
    params_of,
    randomness_of,
    to_torchrl_names,
    torchrl_name,
)
from torchrl_perf.runtime.upstream.modules import apply_to_tensors

ESTIMATORS = {
    TD0Estimator: ValueEstimators.TD0,
    TD1Estimator: ValueEstimators.TD1,
    TDLambdaEstimator: ValueEstimators.TDLambda,
}
COMMON_OPTIONS = ("reduction", "use_prioritized_weights", "priority_key", "valid_key", "capture")
"""Arguments of :class:`OffPolicyLoss` that a loss passes on, beside the discount factor."""
LAMBDAS = {ValueEstimators.TD0: None, ValueEstimators.TD1: 1.0, ValueEstimators.TDLambda: 0.95}


@dataclass
class OffPolicyKeys:
    """Keys that every off-policy loss reads or writes, to be changed by ``set_keys``.

    Attributes:
        action: the action taken.
        reward: under "next", ``[*, 1]``.
        done: under "next", bool ``[*, 1]``; read where returns of several steps are made of a batch in time.
        terminated: under "next", bool ``[*, 1]``.
        priority: where the priority of each row is written.
        priority_weight: importance weights ``[*]`` or ``[*, 1]``, where present.
        steps_to_next_obs: steps of an n-step target ``[*, 1]``, where present.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that count; None for all.
    """

    action: NestedKey = "action"
    reward: NestedKey = "reward"
    done: NestedKey = "done"
    terminated: NestedKey = "terminated"
    priority: NestedKey = "td_error"
    priority_weight: NestedKey = "priority_weight"
    steps_to_next_obs: NestedKey = "steps_to_next_obs"
    valid: NestedKey | None = None


class OffPolicyLoss(LossModule):
    """A loss module that calls its networks directly, where possible without swapping parameters or ``vmap``.

    Each network ``X`` has, as in TorchRL, the attributes ``X``, ``X_params`` and, if it is delayed,
    ``target_X_params``, which ``SoftUpdate`` and ``HardUpdate`` move; and ``target_X``, the delayed network itself.
    The parameters in ``X_params`` are those of the network, and ``target_X_params`` shares the memory of
    ``target_X``, so that nothing is copied between them. ``parameters()`` and ``named_parameters()`` leave the
    targets out, and names in them and in ``state_dict()`` are TorchRL's. :meth:`update_targets_` moves all targets in
    one call.

    Args:
        gamma: discount factor; :meth:`make_value_estimator` changes it.
        reduction: ``"mean"`` (also None), ``"sum"`` or ``"none"``.
        use_prioritized_weights: ``"auto"`` weights the rows where the batch has weights, True asks for them, False
            leaves them alone.
        priority_key: where priorities are written, as ``set_keys(priority=...)``.
        valid_key: of flags, as ``set_keys(valid=...)``. Rows that are False, and rows that TorchRL's masks
            (``loss_mask_key``) leave out, count in no loss, gradient or statistic.
        capture: on CUDA, calls become CUDA graphs once their shape repeats, see
            :func:`~torchrl_perf.runtime.self_capture.self_capturing`.

    Raises:
        ValueError: for a gamma outside of [0, 1], an unknown reduction or use of weights.
    """

    @dataclass
    class _AcceptedKeys(OffPolicyKeys):
        pass

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: Any
    qvalue_network: Any
    default_value_estimator = ValueEstimators.TD0
    SUPPORTED_VALUE_ESTIMATORS: tuple[ValueEstimators, ...] = tuple(LAMBDAS)
    constants: tuple[str, ...] = ()
    """Buffers in the state of TorchRL's losses that are arguments here: they are not saved, and ignored when loaded."""

    def __init__(
        self,
        *,
        gamma: float | None = None,
        reduction: str | None = None,
        use_prioritized_weights: str | bool = "auto",
        priority_key: NestedKey | None = None,
        valid_key: NestedKey | None = None,
        capture: bool = True,
    ) -> None:
        super().__init__()
        self.capture = capture
        reduction = "mean" if reduction is None else reduction
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction: expected one of {REDUCTIONS}, received {reduction!r}. Remedy: 'mean'.")
        if use_prioritized_weights not in ("auto", True, False):
            raise ValueError(
                f"use_prioritized_weights: expected 'auto', True or False, received {use_prioritized_weights!r}. "
                "Remedy: leave it out."
            )
        self.reduction, self.use_prioritized_weights = reduction, use_prioritized_weights
        self.gamma = checked_gamma(0.99 if gamma is None else gamma)
        self.lmbda: float | None = None
        self._names: list[str] = []
        self._in_keys: list[NestedKey] | None = None
        self._selected: list[NestedKey] | None = None
        self.set_keys(priority=priority_key, valid=valid_key)
        self.register_state_dict_post_hook(to_torchrl_names)
        self.register_load_state_dict_pre_hook(from_torchrl_names)

    # -- networks -----------------------------------------------------------------------------------------------------

    def add_network(self, name: str, network: nn.Module, *, delay: bool) -> None:
        """Registers a network, with a copy for targets where it is delayed.

        Args:
            name: TorchRL's name of it.
            network: the network; its parameters are used, not copied.
            delay: whether targets are made by a copy.

        Raises:
            ValueError: for a recurrent network. Under "next" it would read a sequence without the first observation,
                and carry its state over the ends of episodes.
        """
        refuse_memory_of(name, network, "since it reads the rows under 'next' by themselves")
        setattr(self, name, network)
        if delay:
            setattr(self, f"target_{name}", copy.deepcopy(network).requires_grad_(False))
        self._names.append(name)
        # ``update_targets_`` is an updater, so TorchRL's warning about a missing one does not apply
        self._has_update_associated[name] = True
        self._link(name)

    def add_critics(
        self,
        name: str,
        networks: Any,
        number: int | str | None,
        value_key: NestedKey,
        *,
        delay: bool,
        loop: bool,
        of_choices: bool = False,
    ) -> int | None:
        """Registers a critic, the twins of one, several, or a batched ensemble.

        Args:
            name: TorchRL's name of it.
            networks: a network that writes ``[*, 1]``; a list of them; or an ensemble that writes ``[*, K]``.
            number: ``"auto"`` is the number of an ensemble, or 2 twins of one network; None takes the network as it is,
                whatever K.
            value_key: where it writes.
            delay: whether targets are made by a copy.
            loop: call twins one after the other instead of by ``vmap``.
            of_choices: the networks write ``[*, D]``, the values of all choices, and an ensemble ``[*, K, D]``.

        Returns:
            The number of critics, None where it is not known.

        Raises:
            ValueError: for a number that is not positive, or not that of the ensemble or the list.
        """
        several = isinstance(networks, list | tuple | nn.ModuleList)
        first = networks[0] if several and len(networks) else networks
        members = len(networks) if several else members_of(first)
        if number == "auto":
            number = members if members is not None and (several or members > 1) else 2
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(
                f"num_qvalue_nets: expected a positive integer or None, received {number!r}. Remedy: leave it out for "
                "two."
            )
        fixed = several or (members is not None and members > 1)
        if fixed and number is not None and number != members:
            raise ValueError(
                f"num_qvalue_nets: expected {members}, that of the networks given, received {number}. Remedy: leave it "
                "out, or give one network."
            )
        as_it_is = not several and (number is None or (members is not None and members == number))
        if not as_it_is:
            twins = self._twins(name, list(networks) if several else first, cast("int", number), value_key)
            twins.loop, twins.of_choices = loop, of_choices
            first = twins
        self.add_network(name, first, delay=delay)
        return members if number is None else cast("int", number)

    def _twins(self, name: str, networks: Any, number: int, value_key: NestedKey) -> Twins:
        # TorchRL's own expansion: the twins' parameters are redrawn within the range of those of the one network
        self.convert_to_functional(networks, name, number)
        params = self._modules.pop(f"{name}_params")
        template = self.__dict__.pop(name)
        randomness = randomness_of(self._vmap_randomness, template)
        return Twins(template, cast("TensorDictParams", params), value_key, randomness=randomness)

    def _link(self, name: str) -> None:
        """Makes TorchRL's views of the parameters of a network, and of those of its targets."""
        network = cast("nn.Module", self._modules[name])
        self.__dict__[f"{name}_params"] = params_of(network)
        target = self._modules.get(f"target_{name}")
        if target is not None:
            self.__dict__[f"target_{name}_params"] = params_of(target, as_buffers=True)

    def name_pairs(self) -> list[tuple[str, str]]:
        """How the names of parameters begin, here and in TorchRL's losses: those of all networks and targets."""
        full = [prefix + name for name in self._names for prefix in ("", "target_")]
        inner = [".net." if isinstance(self._modules.get(name), Twins) else "." for name in full]
        return [(name + part, f"{name}_params.") for name, part in zip(full, inner, strict=True)]

    def _views(self) -> Iterator[tuple[nn.Module, TensorDictParams]]:
        for name in self._names:
            for full in (name, f"target_{name}"):
                network = self._modules.get(full)
                if network is not None:
                    yield holder(network), self.__dict__[f"{full}_params"]

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        result = super()._apply(fn)
        for network, view in self._views():
            apply_to_tensors(view, fn)
            named = {**dict(network.named_parameters(remove_duplicate=False)), **buffers_of(network)}
            for key, leaf in view.items(True, True):
                source = named[".".join(key) if isinstance(key, tuple) else key]
                if leaf is not source:
                    leaf.data = source.data
        return result

    def __getstate__(self) -> dict[str, Any]:
        views = [f"{prefix}{name}_params" for name in self._names for prefix in ("", "target_")]
        return {key: value for key, value in self.__dict__.items() if key not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self._names:
            self._link(name)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The networks, and the views of the targets, which TorchRL's updaters look up here."""
        yield from super().named_children()
        for name in self._names:
            if f"target_{name}" in self._modules:
                yield f"target_{name}_params", self.__dict__[f"target_{name}_params"]

    def children(self) -> Iterator[nn.Module]:
        """The networks and other registered modules."""
        return (module for module in self._modules.values() if module is not None)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that learn, under TorchRL's names; those of targets are left out."""
        for name, param in nn.Module.named_parameters(self, "", recurse, remove_duplicate):
            if ".target_" not in f".{name}":
                yield joined(prefix, torchrl_name(self, name)), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers, and the parameters of targets, under TorchRL's names."""
        for name, buffer in nn.Module.named_buffers(self, "", recurse, remove_duplicate):
            yield joined(prefix, torchrl_name(self, name)), buffer
        for name, param in nn.Module.named_parameters(self, "", recurse, remove_duplicate):
            if ".target_" in f".{name}":
                yield joined(prefix, torchrl_name(self, name)), param

    def reset_parameters_recursive(self) -> None:
        """Redraws all parameters, and copies them to the targets."""
        for name in self._names:
            for part in cast("nn.Module", self._modules[name]).modules():
                reset = getattr(part, "reset_parameters", None)
                if callable(reset):
                    reset()
        self.update_targets_(1.0)

    def set_vmap_randomness(self, value: str) -> None:
        """``"error"``, ``"same"`` or ``"different"`` numbers for the twins of a network that draws some."""
        if value not in ("error", "same", "different"):
            raise ValueError(
                f"vmap randomness: expected 'error', 'same' or 'different', received {value!r}. Remedy: one of the "
                "three."
            )
        self._vmap_randomness = value
        for part in self.modules():
            if isinstance(part, Twins):
                part.randomness = value

    def online_and_targets(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters of the delayed networks, and those of their copies, in one order."""
        pairs = [(self._modules[name], self._modules.get(f"target_{name}")) for name in reversed(self._names)]
        online: list[Tensor] = []
        targets: list[Tensor] = []
        for network, target in pairs:
            if network is not None and target is not None:
                online += network.parameters()
                targets += target.parameters()
        return online, targets

    def update_targets_(self, tau: float | Tensor) -> None:
        """Moves all targets towards their networks by ``tau``, in one call; 1 copies. Nothing to do without targets."""
        online, targets = self.online_and_targets()
        if targets:
            polyak_update_(targets, online, tau)

    def target_of(self, name: str) -> nn.Module:
        """The network that makes the targets: the delayed copy, or the network itself."""
        target = self._modules.get(f"target_{name}")
        return cast("nn.Module", self._modules[name] if target is None else target)

    @property
    def actor(self) -> Any:
        """The actor, of losses that have one."""
        return self.actor_network

    @property
    def critic(self) -> Any:
        """The critic, or all K of them as one network that writes ``[*, K]``; of losses that have an actor."""
        return self.qvalue_network

    @property
    def target_critic(self) -> Any:
        """The critic that the targets are made of; no gradient reaches it."""
        return self.target_of("qvalue_network")

    # -- keys ---------------------------------------------------------------------------------------------------------

    @property
    def action_key(self) -> NestedKey:
        """Key of the action."""
        return self.tensor_keys.action

    def read_keys(self) -> list[NestedKey]:
        """Keys of a state that actor and critics read; losses of other networks override it."""
        keys = [*self.actor_network.in_keys, *self.qvalue_network.in_keys]
        return [key for key in dict.fromkeys(keys) if key != self.action_key]

    def action_keys(self) -> list[NestedKey]:
        """The action taken, or its parts."""
        return [self.tensor_keys.action]

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        self._in_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        """What a batch must have: action, states and next states, reward, flags."""
        if self._in_keys is None:
            keys, read = self.tensor_keys, self.read_keys()
            found = [*self.action_keys(), *[("next", key) for key in (keys.reward, keys.done, keys.terminated)]]
            self._in_keys = list(dict.fromkeys(map(unravel_key, [*found, *read, *[("next", key) for key in read]])))
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    def returned_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns, with the reduction that was asked for."""
        raise NotImplementedError

    @property
    def out_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns, or the part of it that ``select_out_keys`` has chosen."""
        return self.returned_keys() if self._selected is None else self._selected

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._selected = None if values == self.returned_keys() else values

    @property
    def _out_keys(self) -> list[NestedKey]:
        # tensordict looks here for the keys that a selection leaves out
        return self.returned_keys()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def weights(self, td: TensorDictBase, rows: Sequence[int]) -> Tensor | None:
        """Importance weights ``[*]`` of rows ``[*]``, None where there are none.

        Raises:
            ValueError: for another number of weights.
            KeyError: where there are none and ``use_prioritized_weights`` is True.
        """
        if self.use_prioritized_weights is False:
            return None
        key = self.tensor_keys.priority_weight
        if self.use_prioritized_weights is True:
            return column(entry(td, key), rows, key)
        weights = td.get(key, None)
        return None if weights is None else column(weights, rows, key)

    def valid(self, td: TensorDictBase, rows: Sequence[int]) -> Tensor | None:
        """Bool ``[*]``, True for the rows ``[*]`` that count; None where all do."""
        own, found = self.tensor_keys.valid, None
        for key in (own, *self._loss_mask_keys()):
            flag = None if key is None else td.get(key, None)
            if flag is None:
                if key is not None and key == own:
                    entry(td, key)  # raises with the keys that the batch has
                continue
            flag = fitted_rows(flag, rows, key)
            found = flag if found is None else found & flag
        return found

    def reduced(self, values: Tensor, td: TensorDictBase) -> Tensor:
        """Losses of rows ``[*]``, reduced as asked for, with the weights of the batch, over the rows that count."""
        return reduced(values, self.valid(td, values.shape), self.reduction, self.weights(td, values.shape))

    def mean(self, values: Tensor, td: TensorDictBase) -> Tensor:
        """A statistic ``[*]``: its mean over the rows that count, 0-d, without weights."""
        return valid_mean(values, self.valid(td, values.shape))

    def priorities(self, values: Tensor, td: TensorDictBase) -> Tensor:
        """Priorities ``[*]``, 0 in rows that do not count."""
        return kept(values, self.valid(td, values.shape))

    def outcome(self, td: TensorDictBase, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Reward and whether the next state is terminal, ``[*]`` each, for rows ``[*]``."""
        keys, following = self.tensor_keys, entry(td, "next")
        flag = following.get(keys.terminated, None)
        # as in TorchRL: without "terminated", "done" marks terminal states
        flag, name = (entry(following, keys.done), keys.done) if flag is None else (flag, keys.terminated)
        reward = column(widened(entry(following, keys.reward)), rows, ("next", keys.reward))
        return reward, column(flag, rows, ("next", name))

    def discount(self, td: TensorDictBase, rows: Sequence[int]) -> Tensor | float:
        """Gamma to the power of the steps to the next state, ``[*]`` or a number."""
        steps = td.get(self.tensor_keys.steps_to_next_obs, None)
        return self.gamma if steps is None else self.gamma ** column(steps, rows, self.tensor_keys.steps_to_next_obs)

    def returns(self, td: TensorDictBase, next_value: Tensor, reward: Tensor, terminated: Tensor) -> Tensor:
        """TD(lambda) targets ``[*, T]`` from values of the next states ``[*, T]``; time is the last batch dim.

        Raises:
            ValueError: for a batch without time, or with targets of several steps.
        """
        if next_value.ndim < 2 or td.get(self.tensor_keys.steps_to_next_obs, None) is not None:
            raise ValueError(
                f"batch: expected steps in time, [*, T], without n-step targets, for {self.value_type}, received "
                f"{list(td.shape)}. Remedy: slices of trajectories, or make_value_estimator(ValueEstimators.TD0)."
            )
        done = column(entry(td, "next").get(self.tensor_keys.done, terminated), reward.shape, "done")
        names = list(td.names) if td.names is not None else []
        dim = names.index("time") if "time" in names else next_value.ndim - 1
        return td_lambda_targets(
            self.gamma, cast("float", self.lmbda), next_value, reward, done | terminated, terminated, time_dim=dim
        )

    def prepared(self, td: TensorDictBase) -> TensorDictBase:
        """A batch in which all states are finite; the given batch is not changed.

        By TorchRL's convention for envs that reset themselves, a final observation that the env did not keep is NaN.
        Such a step counts as terminated, and its next state is set to 0: it does not bootstrap, as in TorchRL's
        ``GAE``. Rows that do not count are set to 0, so that no NaN in them reaches a gradient.
        """
        batch = td.copy()
        following = cast("TensorDictBase", entry(td, "next")).copy()
        batch.set("next", following)
        rows, keys = td.batch_size, self.tensor_keys
        valid = self.valid(td, rows) if len(rows) else None
        missing, end = self.missing(td), following.get(keys.terminated, following.get(keys.done, None))
        # flags of another shape are refused where they are read
        if missing is not None and end.numel() == missing.numel():
            following.set(keys.terminated, end | missing.reshape(end.shape))
            self._blank(following, ~missing, self.read_keys())
        if valid is not None:
            own = [*self.action_keys(), keys.priority_weight]
            self._blank(batch, valid, [*self.read_keys(), *own])
            self._blank(following, valid, [*self.read_keys(), keys.reward])
        return batch

    def missing(self, td: TensorDictBase) -> Tensor | None:
        """Bool ``[*]``, True for the rows that end an episode without a final observation; None if none can."""
        following = cast("TensorDictBase", entry(td, "next"))
        done = following.get(self.tensor_keys.done, None)
        states = [following.get(key, None) for key in self.read_keys()]
        if done is None:
            return None
        return missing_rows([state for state in states if state is not None], done, len(td.batch_size))

    @staticmethod
    def _blank(td: TensorDictBase, keep: Tensor, keys: Sequence[NestedKey]) -> None:
        """Puts 0 in floating point entries of rows that are not kept."""
        for key in keys:
            value = td.get(key, None)
            if value is not None and value.is_floating_point():
                flag = keep.reshape((*keep.shape, *(1,) * (value.ndim - keep.ndim)))
                td.set(key, torch.where(flag, value, 0.0))

    def write_priority(self, td: TensorDictBase, priority: Tensor, batch: TensorDictBase | None = None) -> None:
        """Writes the priorities of the rows, 0 for those that do not count."""
        td.set(self.tensor_keys.priority, self.priorities(priority, td if batch is None else batch))

    # -- value estimators ---------------------------------------------------------------------------------------------

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> "OffPolicyLoss":
        """Sets how targets are made from rewards and next values, and with which discount.

        Args:
            value_type: ``ValueEstimators.TD0`` (the default; n-step targets where the batch says how many steps it
                spans), ``TD1`` or ``TDLambda`` (of batches ``[*, T]`` in time); or TorchRL's estimator of one of these,
                as a class or an object, whose discount is read once.
            **hyperparams: ``gamma``, and ``lmbda`` for TDLambda.

        Returns:
            The loss.

        Raises:
            NotImplementedError: for another estimator.
            ValueError: for numbers outside of [0, 1].
            TypeError: for other hyperparameters.
        """
        value_type = self.default_value_estimator if value_type is None else value_type
        value_type, read = _estimator(value_type)
        hyperparams = read | hyperparams
        if value_type not in self.SUPPORTED_VALUE_ESTIMATORS:
            raise NotImplementedError(
                f"value_type: expected one of {[kind.name for kind in self.SUPPORTED_VALUE_ESTIMATORS]} for "
                f"{type(self).__name__}, received {getattr(value_type, 'name', value_type)}. Remedy: TD0, or TorchRL's "
                "loss."
            )
        lmbda = LAMBDAS[value_type]
        known = {"gamma", "device", "differentiable"} | ({"lmbda"} if value_type is ValueEstimators.TDLambda else set())
        if unknown := {name: value for name, value in hyperparams.items() if name not in known and value}:
            raise TypeError(
                f"make_value_estimator: expected gamma, and lmbda for TDLambda, received {unknown}. Remedy: TorchRL's "
                "loss for the other options."
            )
        gamma = hyperparams.get("gamma", self.gamma)
        self.gamma = checked_gamma(float(gamma))
        self.lmbda = None if lmbda is None else checked_gamma(float(hyperparams.get("lmbda", lmbda)), "lmbda")
        self.value_type = value_type
        return self

    @property
    def value_estimator(self) -> Any:
        """TorchRL's estimator of the same kind and discount, a new one at each call: changing it has no effect."""
        options = {"gamma": self.gamma} | ({"lmbda": self.lmbda} if self.value_type is ValueEstimators.TDLambda else {})
        return build_value_estimator(self, self.value_type, value_network=None, **options)

    @value_estimator.setter
    def value_estimator(self, value: Any) -> None:
        if value is not None:
            self.make_value_estimator(value)


def _estimator(value_type: Any) -> tuple[Any, dict[str, Any]]:
    """The kind of an estimator, and the hyperparameters of an object."""
    if isinstance(value_type, str):
        found = {kind.name.lower(): kind for kind in ValueEstimators}
        return found.get(value_type.lower(), value_type), {}
    if inspect.isclass(value_type):
        return ESTIMATORS.get(value_type, value_type), {}
    kind = ESTIMATORS.get(type(value_type))
    if kind is None:
        return value_type, {}
    names = ("gamma", "lmbda") if kind is ValueEstimators.TDLambda else ("gamma",)
    # of an estimator given at construction: read once, not in the loop
    return kind, {name: float(getattr(value_type, name)) for name in names}
