"""A robot of your own on the GPU: a MuJoCo model and three functions, learnt by PPO.

Run it with ``python examples/own_robot.py``; ``--help`` lists the settings. It needs the extra ``mujoco-warp``. On a
GPU take ``--num-envs 4096 --total-steps 40000000``; the defaults are small enough to try it on a CPU, where MuJoCo Warp
is slow, in a few minutes. Last line:

    mean return of the last 100 episodes: ...

The robot is a cart with a pole that hangs down, and has to swing it up. ``--model FILE.xml`` takes a model of your own:
change ``observe``, ``reward`` and ``terminated`` to fit.

Read it from top to bottom: the model, the three functions, Config, make_env, main.
"""

from dataclasses import dataclass

import torch
import tyro
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_perf.envs.mujoco import MuJoCoEnv
from torchrl_perf.trainers import PPOConfig, PPOTrainer

MODEL = """
<mujoco model="swing-up">
  <option timestep="0.01" integrator="implicitfast"/>
  <worldbody>
    <body name="cart">
      <joint name="rail" type="slide" axis="1 0 0" range="-2 2" limited="true" damping="0.5"/>
      <geom type="box" size="0.15 0.1 0.05" mass="1"/>
      <body name="pole">
        <joint name="hinge" type="hinge" axis="0 1 0" damping="0.01"/>
        <geom type="capsule" fromto="0 0 0 0 0 -0.6" size="0.03" mass="0.2"/>
        <site name="tip" pos="0 0 -0.6"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="rail" gear="20" ctrllimited="true" ctrlrange="-1 1"/>
  </actuator>
</mujoco>
"""

State = dict[str, Tensor]


def observe(state: State) -> Tensor:
    """Place of the cart, direction of the pole, both velocities: ``[N, 5]``."""
    place, angle = state["qpos"][:, :1], state["qpos"][:, 1:]
    return torch.cat([place, angle.sin(), angle.cos(), state["qvel"]], -1)


def reward(before: State, action: Tensor, after: State) -> Tensor:
    """Height of the tip, in lengths of the pole, minus a little for effort and for leaving the middle: ``[N]``."""
    height = after["site_xpos"][:, 0, 2] / 0.6
    return height - 0.01 * action.square().sum(-1) - 0.1 * after["qpos"][:, 0].square()


def terminated(state: State) -> Tensor:
    """Whether the cart is at an end of its rail: bool ``[N]``."""
    return state["qpos"][:, 0].abs() > 1.9


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    model: str = MODEL
    """Path of an MJCF file, or its text."""
    num_envs: int = 64
    """Worlds that run at once (N)."""
    total_steps: int = 40_960
    """Env steps of the whole run."""
    mass_noise: float = 0.2
    """Domain randomisation: masses are drawn within this share of the model's, for each world and episode."""
    seed: int = 0
    """Seed of networks, worlds and sampling."""
    device: str = "auto"
    """Device: auto, cpu or cuda."""


def make_env(config: Config, device: torch.device) -> EnvBase:
    """The robot, ``num_envs`` times."""
    return MuJoCoEnv(
        config.model,
        config.num_envs,
        observe=observe,
        reward=reward,
        terminated=terminated,
        observed=("site_xpos",),
        frame_skip=4,
        max_episode_steps=250,
        reset_noise=0.05,
        mass_noise=config.mass_noise,
        device=device,
        seed=config.seed,
    )


def main(config: Config) -> float:
    """Train; the mean return of the last 100 episodes."""
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    env = make_env(config, device)
    settings = PPOConfig.without_task(
        env="own_robot",
        num_envs=config.num_envs,
        num_steps=16,
        total_steps=config.total_steps,
        minibatches=4,
        epochs=4,
        learning_rate=1e-3,
        gamma=0.99,
        entropy_coeff=0.0,
        normalize_observations=True,
        normalize_rewards=True,
        device=str(device),
        seed=config.seed,
        logger="none",
    )
    trainer = PPOTrainer(settings, env=env)
    row: dict[str, float] = {}
    while trainer.iterations_done < settings.iterations:
        trainer.step()  # on a GPU a single CUDA graph: physics, rollout, advantages, updates
        trainer.iterations_done += 1
        if trainer.iterations_done % 10 == 0 or trainer.iterations_done == settings.iterations:
            row = {**row, **trainer.metrics.flush(trainer.iterations_done * settings.batch_size)}
    for sentence in env.faults().values():
        print(sentence)
    trainer.close()
    return row.get("episode/mean_return", float("nan"))


if __name__ == "__main__":
    print(f"mean return of the last 100 episodes: {main(tyro.cli(Config)):.1f}")
