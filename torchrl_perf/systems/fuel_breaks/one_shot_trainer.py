"""All breaks at once as a whole run: rows of metrics, checkpoints, several ranks, one CUDA graph an iteration.

Dimension key: ``N`` landscapes of an iteration, ``T`` placements of each, ``K`` breaks, ``C`` planes, ``H``, ``W``
cells.
"""

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn

from torchrl_perf.envs.fuel_breaks import FuelBreaks, first_cells
from torchrl_perf.modules.values.conv_q import ConvQMap
from torchrl_perf.parallel import SharedGradients
from torchrl_perf.runtime.oom import parts_of
from torchrl_perf.systems.fuel_breaks.ground import make_breaks
from torchrl_perf.systems.fuel_breaks.one_shot_config import FuelBreaksOneShotConfig
from torchrl_perf.systems.fuel_breaks.orders import LEAST, draw_orders, order_log_prob
from torchrl_perf.trainers.device import accelerated, as_in_mode
from torchrl_perf.trainers.optim.optimization import adam_of
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.whole_loop import WholeLoop

__all__ = ["FuelBreaksOneShotTrainer", "PlacementPolicy", "make_one_shot_env", "make_placement_policy"]

LOWEST = -1e9
"""Score of a cell that may not become a break."""
LOSSES = ("loss",)
STATISTICS = ("loss", "entropy", "grad_norm")


class PlacementPolicy(TensorDictModuleBase):
    """Scores every cell of a map in one pass, and places all breaks: on the cells of the highest scores.

    If TorchRL's exploration type is RANDOM, cells are drawn one after the other in proportion to ``exp(score)``.

    Keys read: ``"observation"`` float ``[*, C, H, W]``, ``"action_mask"`` bool ``[*, H W]``. Written: ``"action"`` bool
    ``[*, H W]``.

    Args:
        network: planes ``[N, C, H, W]`` -> scores ``[N, H W]``.
        budget: K.
    """

    def __init__(self, network: nn.Module, budget: int) -> None:
        super().__init__()
        self.network, self.budget = network, budget
        self.in_keys = ["observation", "action_mask"]  # pyright: ignore
        self.out_keys = ["action"]  # pyright: ignore

    def scores(self, observation: Tensor, allowed: Tensor) -> Tensor:
        """``[*, H W]`` float32, very low where no break may be."""
        planes = observation.reshape(-1, *observation.shape[-3:]).to(torch.float32)
        return self.network(planes).view(allowed.shape).masked_fill(~allowed, LOWEST)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the breaks; explore or not as TorchRL's exploration type says."""
        allowed = tensordict.get("action_mask")
        scores = self.scores(tensordict.get("observation"), allowed)
        if interaction_type() is InteractionType.RANDOM:
            order = draw_orders(scores, self.budget)
        else:
            order = scores.topk(self.budget, -1).indices
        breaks = torch.zeros_like(allowed).scatter(-1, order, torch.ones_like(order, dtype=torch.bool))
        return tensordict.set("action", breaks & allowed)


def make_one_shot_env(config: FuelBreaksOneShotConfig, device: torch.device | str, **options: Any) -> FuelBreaks:
    """The task of a run: an episode is one placement, and its return minus the cells that burned, over all fires.

    Args:
        config: landscapes, budget and fires.
        device: where all of it stands.
        **options: of :class:`~torchrl_perf.envs.fuel_breaks.FuelBreaks`, in place of the settings'.

    Raises:
        ValueError: for a budget above the burnable cells.
    """
    return make_breaks(config, device, **{"mode": "one_shot", **options})


def make_placement_policy(env: Any, config: FuelBreaksOneShotConfig) -> PlacementPolicy:
    """The policy of a config for what has the specs of an env, whose scores are all alike at first."""
    planes = env.observation_spec["observation"].shape[-3]
    network = ConvQMap(
        planes,
        hidden_size=config.hidden_size,
        blocks=config.blocks,
        precision=config.precision,
        device=env.device,
    )
    nn.init.zeros_(network.head.weight)
    return PlacementPolicy(network.float(), config.cells)  # as the planes are, whatever torch's default is


class FuelBreaksOneShotTrainer(WholeLoop):
    """REINFORCE on placements of all breaks at once, each judged beside others of its landscape.

    In an iteration T placements are drawn for each of N landscapes, and burn under the same fires. A placement is
    reinforced by how much less burned than in the mean of those of its landscape, in units of the root mean square of
    that over all. Nothing is learnt of values, and an iteration is one CUDA graph.

    Metrics: ``fire/burned``, mean burned fraction of the placements, ``episode/mean_return``, minus that,
    ``train/loss``, ``train/entropy`` of the first cell, ``train/grad_norm``, ``train/learning_rate``.

    Args:
        config: every choice of the run; after ``parallel.join()`` of the whole run, of which each rank does its part.
        env: a :class:`FuelBreaks` in one-shot mode that writes its planes; by default :func:`make_one_shot_env`.
        policy: a :class:`PlacementPolicy` of your own; by default :func:`make_placement_policy`.

    Attributes:
        iterations_done: iterations run so far (host integer).
        updates: updates applied so far, float32 0-d on the device.

    Raises:
        ValueError: at construction, for CUDA where there is none, and an env of another kind.
    """

    metric_names = (
        *("fire/burned", "train/learning_rate"),
        *(f"train/{name}" for name in STATISTICS),
    )

    def __init__(
        self,
        config: FuelBreaksOneShotConfig,
        *,
        env: FuelBreaks | None = None,
        policy: PlacementPolicy | None = None,
    ) -> None:
        config = self._begin(config, env)
        self.env = make_one_shot_env(config, self.device) if env is None else _checked(env)
        self.policy = make_placement_policy(self.env, config) if policy is None else policy
        self.acceleration.policy(self.policy)
        self._named = dict(self.policy.named_parameters())
        self.shared = SharedGradients(self._named.values(), ranks=self.ranks)
        self.optimizer = adam_of(config, self._named.values(), self.acceleration)
        self._make_loop(LOSSES, self._named)
        self._finish(self.env)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One more iteration of the run; in a loop of your own count it, ``trainer.iterations_done += 1``."""
        with as_in_mode(self.mode):
            self.micro.call(self._iterate)

    def iteration(self) -> None:
        """Draw placements, burn them, reinforce the better ones: no host read, static shapes."""
        self._iteration += 1
        done = (self._iteration - 1.0) / self.config.schedule_iterations
        left = (1.0 - done).clamp_min(0.0)
        if self.config.anneal_learning_rate:
            self.optimizer.learning_rate.copy_(self.config.learning_rate * left)
        with self.phases.phase("collect"):
            batch, burned = self.draw()
        with self.phases.phase("learn"):
            statistics = self.update(batch, left)
        self.guard.report()
        mean = burned.mean()
        self.metrics.add_all({"fire/burned": mean, "episode/mean_return": -mean})
        self.metrics.add_all({f"train/{name}": value for name, value in statistics.items()})
        state = {"learning_rate": self.optimizer.learning_rate, "micro_batches": self.micro.count}
        for name, value in {**state, "first_bad_iteration": self._first_bad}.items():
            self.metrics.add(f"train/{name}", value, reduce="last")

    @torch.no_grad()
    @accelerated
    def draw(self) -> tuple[TensorDictBase, Tensor]:
        """Placements of landscapes ``[N]``: number, order ``[T, K]``, advantage ``[T]``; burned ``[N, T]``."""
        config, env = self.config, self.env
        rows, samples = config.num_envs, config.num_steps
        number = torch.randint(len(env.burnable()), (rows,), device=self.device)
        scores = self._scores(number).unsqueeze(1).expand(-1, samples, -1)
        order = draw_orders(scores, env.budget)
        breaks = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
        seed = torch.randint(1 << 62, (rows,), device=self.device)
        burned = env.light(
            breaks.view(-1, env.height, env.width),
            landscape_id=number.repeat_interleave(samples),
            seed=seed.repeat_interleave(samples),
            fires=config.fires,
        ).view(rows, samples)
        saved = burned.mean(1, keepdim=True) - burned
        advantage = saved / saved.square().mean().sqrt().clamp_min(LEAST)
        drawn = {"number": number, "order": order, "advantage": advantage}
        return TensorDict(drawn, [rows], device=self.device), burned

    @accelerated
    def update(self, batch: TensorDictBase, left: Tensor) -> dict[str, Tensor]:
        """One update from placements of landscapes ``[N]``; statistics by name.

        Args:
            batch: as :meth:`draw` gives it.
            left: share of the run that is left, 0-d.
        """
        attempt = partial(self._gradients, batch, left)
        total, statistics = self.micro.run(attempt, len(batch), undo=self.optimizer.zero_grad)
        total, statistics = self.shared.mean_(total, statistics)
        norm = self.optimizer.grad_norm()
        fault = self.optimizer.is_fault(total, norm)
        finite = total.isfinite() & norm.isfinite()
        self.optimizer.step((norm / self.config.max_grad_norm).clamp_min(1.0), (~finite).float())
        self.updates += finite
        self.guard.mark_bad(fault)
        self.guard.note(statistics[:1], self.optimizer.grad_norms, fault)
        return dict(zip(STATISTICS, (*statistics.unbind(), norm), strict=True))

    def _scores(self, number: Tensor) -> Tensor:
        """``[N, H W]`` of the landscapes ``number`` [N], without breaks."""
        env = self.env
        burnable = env.burnable(number)
        burnable = burnable.expand(len(number), -1, -1)
        whole = torch.ones(len(number), 1, dtype=env.dtype, device=self.device)
        planes = env.planes(torch.zeros_like(burnable), whole, number.unsqueeze(-1))
        return self.policy.scores(planes, burnable.flatten(1))

    def _gradients(self, batch: TensorDictBase, left: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        """Gradients of the landscapes ``[N]``, in micro-batches; the loss 0-d and the statistics, detached."""
        self.optimizer.zero_grad()
        sums: list[tuple[Tensor, Tensor]] = []
        for part in parts_of(batch, parts):
            rows = part.batch
            scores = self._scores(rows.get("number"))
            order, advantage = rows.get("order"), rows.get("advantage")
            several = scores.unsqueeze(1).expand(-1, order.shape[1], -1)
            log_prob = scores.log_softmax(-1)
            entropy = -(log_prob.exp() * log_prob).sum(-1).mean()
            gain = (advantage * order_log_prob(several, order)).mean()
            loss = -gain - self.config.entropy_weight * left * entropy
            self.optimizer.scaled(loss * part.share).backward()
            sums.append((loss.detach() * part.share, torch.stack((loss, entropy)).detach() * part.share))
        totals, statistics = zip(*sums, strict=True)
        return torch.stack(totals).sum(), torch.stack(statistics).sum(0)

    # -- what was learnt ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def place(self, env: FuelBreaks | None = None) -> Tensor:
        """The breaks in each landscape of an env, bool ``[L, H, W]``; that of training by default.

        Args:
            env: of any landscapes of the same planes, and any budget.

        Raises:
            ValueError: for an env with other planes.
        """
        env = self.env if env is None else env
        if env.plane_names != self.env.plane_names:
            raise ValueError(
                f"env: expected the planes {list(self.env.plane_names)} as in training, received "
                f"{list(env.plane_names)}. Remedy: the same extra planes."
            )
        burnable = env.burnable()
        number = torch.arange(len(burnable), device=env.device).unsqueeze(-1)
        whole = torch.ones(len(burnable), 1, dtype=env.dtype, device=env.device)
        planes = env.planes(torch.zeros_like(burnable), whole, number)
        scores = self.policy.scores(planes, burnable.flatten(1))
        return first_cells(scores.view(burnable.shape), burnable, env.budget)

    # -- state --------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Stateful]:
        """The parts that a rollback restores, by name."""
        return {"policy": self.policy, "optimizer": self.optimizer}

    def experience(self) -> dict[str, Stateful]:
        """Further parts of a checkpoint, by name."""
        return {"metrics": self.metrics, "micro_batches": self.micro}

    def close(self) -> None:
        """Releases the graph and the env."""
        self._release()
        self.env.close()


def _checked(env: FuelBreaks) -> FuelBreaks:
    """Refuses an env that does not place all breaks at once, or hides its planes."""
    if not isinstance(env, FuelBreaks) or env.mode != "one_shot" or env.compact:
        kind = type(env).__name__
        more = f" in mode {env.mode!r} with compact={env.compact}" if isinstance(env, FuelBreaks) else ""
        raise ValueError(
            f"env: expected a FuelBreaks in mode 'one_shot' with its planes, received {kind}{more}. Remedy: "
            "make_one_shot_env(config, device)."
        )
    if env.budget >= env.height * env.width:
        raise ValueError(
            f"env: expected fewer breaks than cells, received {env.budget} breaks. Remedy: a smaller budget."
        )
    return env
