"""The loop of active_dynamics before its rewrite: points in NumPy, a window that is rolled and encoded again.

Dimension key: ``N`` points, ``O`` channels, ``D`` numbers of an input, ``L`` steps of the window.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from studies.originals.latent_loss import LoopLoss
from studies.originals.rollout_window import RollWindow, copy_always, copy_by_need
from studies.originals.transfers import Cleanup, to_device, to_device_later
from torchrl_perf.envs.latent_field import LatentField
from torchrl_perf.functional.losses.elbo import beta_at
from torchrl_perf.modules.icem import ICEMPlanner, ICEMSettings
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.information_reward import InformationReward
from torchrl_perf.systems.active_dynamics.networks import make_field_env, make_seq_vae
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE


class PointLoop:
    """One point on the limit cycle, seen through counts, in NumPy; the equations of :class:`LatentField`.

    Args:
        world: gives the channels, and the numbers of the task.
    """

    def __init__(self, world: LatentField) -> None:
        channels = world.observation_map
        self.weight, self.bias = (part.double().cpu().numpy() for part in (channels.weight, channels.bias))
        self.dt, self.action_max, self.spread = world.dt, world.action_max, world.initial_range
        self.noise = np.sqrt(world.process_noise * world.dt)
        self.point = np.zeros(2)

    def reset(self) -> np.ndarray:
        """A point of the square around the origin; what is observed of it, ``[O]``."""
        self.point = np.random.uniform(-self.spread, self.spread, 2)
        return self.observe()

    def mean(self) -> np.ndarray:
        """Expected counts ``[O]``."""
        return np.exp(self.weight @ self.point + self.bias) * self.dt

    def observe(self) -> np.ndarray:
        """Counts ``[O]``, float32."""
        return np.random.poisson(self.mean()).astype(np.float32)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Moves by a time dt; what is observed then."""
        x, y = self.point
        pull = 1.0 - (x * x + y * y)
        velocity = np.array([x * pull - y, y * pull + x]) + np.clip(action, -self.action_max, self.action_max)
        self.point = self.point + velocity * self.dt + self.noise * np.random.randn(2)
        return self.observe()


def encoded_again(model: SeqVAE, window: dict[str, Tensor]) -> Tensor:
    """The belief after a window ``[1, L]`` of "observation" and "previous" input, from the beginning: ``[1, S]``."""
    observation, previous = window["observation"], window["previous"]
    action = torch.cat((previous[:, 1:], torch.zeros_like(previous[:, :1])), 1)
    starts = torch.zeros(observation.shape[:2], dtype=torch.bool, device=observation.device)
    return model.encode(observation, action, starts, None, previous[:, 0]).loc[:, -1]


@dataclass
class LoopAgent:
    """One point with its window, its belief and its plan.

    Attributes:
        env: the point.
        window: the last steps.
        belief: ``[1, S]``, None before the first step.
        plan: the planner's state, with "is_init".
        seen: observations and inputs so far, each ``[1, *]``.
    """

    env: PointLoop
    window: RollWindow
    plan: TensorDict
    belief: Tensor | None = None
    observation: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class LoopTraining:
    """Active learning of latent dynamics with the settings of a config, one point after the other.

    Args:
        config: as of :class:`~torchrl_perf.systems.active_dynamics.ActiveDynamicsTrainer`; its episodes do not end.
        device: of model and windows.
        optimised: after: copies by need, ``non_blocking``, kept weights and mask, a flag for the device, and the
            model's prediction as the belief, in the place of the encoder's.
    """

    def __init__(self, config: ActiveDynamicsConfig, device: torch.device, *, optimised: bool) -> None:
        self.config, self.device, self.optimised = config, device, optimised
        torch.manual_seed(config.seed)
        np.random.seed(config.seed)
        random.seed(config.seed)
        world = make_field_env(config, device)
        self.model = make_seq_vae(config, world)
        self.reward = InformationReward(self.model.dynamics, "fisher_d", discount=config.gamma)
        self.planner = ICEMPlanner(
            self.model.dynamics,
            self.reward,
            spec=world.action_spec,
            settings=ICEMSettings(
                horizon=config.plan_horizon,
                candidates=config.candidates,
                iterations=config.plan_rounds,
                elites=config.elites,
                discount=config.gamma,
            ),
            state_key="belief",
        )
        self.loss = LoopLoss(
            self.model,
            steps_ahead=config.kl_horizon,
            decay=config.kl_decay,
            samples=config.samples,
            mask_rate=config.mask_rate,
            cached=optimised,
        )
        self.adam = torch.optim.Adam(self.model.parameters(), lr=config.learning_rate, eps=1e-5)
        self.copy = copy_by_need if optimised else copy_always
        self.move: Callable[..., dict[str, Tensor]] = to_device_later if optimised else to_device
        self.clean_up = Cleanup(device, flag=optimised)
        self.agents = [self._agent(world) for _ in range(config.num_envs)]
        self.steps = self.updates = 0
        self.losses: list[float] = []

    def _agent(self, world: LatentField) -> LoopAgent:
        env, config = PointLoop(world), self.config
        example = {"observation": torch.zeros(1, config.observation_size), "previous": torch.zeros(1, 2)}
        window = RollWindow(config.window, self.move(example, self.device))
        size = (1, config.plan_horizon, 2)
        kept = self.planner.settings.kept
        plan = TensorDict(
            {"plan": torch.zeros(size), "plan_elites": torch.zeros(1, kept, *size[1:]), "is_init": torch.ones(1) > 0},
            [1],
        ).to(self.device)
        agent = LoopAgent(env, window, plan)
        agent.observation = env.reset()
        return agent

    @torch.no_grad()
    def act(self, agent: LoopAgent) -> Tensor:
        """One step of one point; its belief ``[1, S]``."""
        previous = agent.seen[-1][1] if agent.seen else torch.zeros(1, 2)
        step = {"observation": torch.from_numpy(agent.observation).unsqueeze(0), "previous": previous}
        agent.window.add(self.move(step, self.device))
        if self.optimised and agent.belief is not None:
            agent.belief = self.model.dynamics(agent.belief, previous.to(self.device))
        else:
            agent.belief = encoded_again(self.model, self.copy(agent.window.recent()))
        if self.steps < self.config.random_steps:
            action = (2.0 * torch.rand(1, 2) - 1.0) * self.config.action_max
        else:
            decided = self.planner(agent.plan.set("belief", agent.belief))
            action = cast("Tensor", decided["action"]).cpu()
            for key in self.planner.state_keys:
                agent.plan[key] = decided["next", key]
            agent.plan["is_init"] = torch.zeros_like(agent.plan["is_init"])
        agent.seen.append((step["observation"], action))
        agent.seen = agent.seen[-self.config.history :]
        agent.observation = agent.env.step(action[0].double().numpy())
        return agent.belief

    def iteration(self) -> None:
        """Some steps of all points, then the updates that belong to them."""
        beliefs = []
        for _ in range(self.config.num_steps):
            beliefs += [self.act(agent) for agent in self.agents]
        self.steps += self.config.batch_size
        self.reward.observe(torch.cat(beliefs))
        for _ in range(self.config.updates):
            self.update()
            self.clean_up()

    def update(self) -> None:
        """One step of Adam on windows from the lists."""
        length, rows = self.config.window, []
        for _ in range(self.config.minibatch_size):
            seen = random.choice(self.agents).seen
            begin = random.randrange(len(seen) - length + 1)
            rows.append(seen[begin : begin + length])
        observation, action = (torch.stack([torch.cat([step[i] for step in row]) for row in rows]) for i in (0, 1))
        batch = self.move({"observation": observation, "action": action}, self.device)
        config = self.config
        schedule = {"beta": config.beta, "warmup": config.beta_warmup, "anneal": config.beta_anneal}
        self.loss.beta = float(beta_at(torch.tensor(float(self.updates)), config.beta_schedule, **schedule))
        self.adam.zero_grad()
        recon, kl = self.loss(batch["observation"], batch["action"])
        total = recon + kl
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.adam.step()
        self.losses.append(total.item())
        self.updates += 1
