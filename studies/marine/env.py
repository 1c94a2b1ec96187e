"""The env of marine: robots one by one in NumPy, and all at once in tensors."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from studies.originals.navigation import NavigationLoop, Robot
from studies.originals.navigation_loop import DISTANCE, OBSTACLES, ROBOTS, fresh_env
from studies.sitting import Sitting, Variant, judge
from torchrl_perf.envs.marine import Curriculum, MarineNavigation, scenario_set

LOOP, EAGER, GRAPH, COMPILED = "one robot after the other", "batched", "batched, in a graph", "batched, compiled"
COMPILED_GRAPH = "compiled, in a graph"
FINAL_STAGE = Curriculum.fixed(ROBOTS, OBSTACLES, 0, DISTANCE)
ROLLOUT = 4
"""Steps of a captured or compiled function."""
COMPILED_SIZES = (64, 4096)
"""Envs at which the step is compiled."""


def environment(sitting: Sitting) -> None:
    """Env steps of NumPy robots one by one and of all at once."""
    checked = same_steps(sitting.device)
    sizes = sitting.pick((1, 64), (1, 4, 16, 64, 256, 1024), (1, 16, 64, 256, 1024, 4096, 8192))
    for size in sizes:
        _environment_case(sitting, size, checked)
    after = GRAPH if sitting.cuda else EAGER
    curve = {size: sitting.ratio_of("environment", LOOP, after, [f"E={size}"]) for size in sizes}
    text = ", ".join(f"{size:,}: {values[0]:,.3g}x" for size, values in curve.items() if values)
    last = curve[sizes[-1]]
    sitting.verdict("environment", "the env on the GPU removes the bottleneck", text, judge(last, 10.0, 2.0))
    if sitting.cuda:
        most = sitting.best("environment", "E=4096", "steps_per_second")
        text = "" if most is None else f"{most:,.0f}"
        sitting.verdict("environment", "4 M env steps/s of 4,096 envs alone", text, judge(most, 4e6, 1e6))


def _environment_case(sitting: Sitting, size: int, checked: tuple[list[Tensor], list[Tensor]]) -> None:
    env = MarineNavigation(size, curriculum=FINAL_STAGE, device=sitting.device, seed=0)
    action = torch.rand(size, ROBOTS, 2, device=sitting.device) * 2 - 1
    state = {"td": env.reset()}

    def step() -> Tensor:
        stepped, state["td"] = env.step_and_maybe_reset(state["td"].set(("agents", "action"), action))
        return stepped["next", "agents", "reward"]

    np.random.seed(0)
    python = {"env": fresh_env()}

    def one() -> None:
        _, _, done, _ = python["env"].step(np.random.uniform(-1.0, 1.0, (ROBOTS, 2)))
        if all(done):
            python["env"] = fresh_env()

    variants = [
        Variant(LOOP, one, lambda: checked[0], scale=float(size)),
        Variant(EAGER, step, lambda: checked[1]),
    ]
    graphs, calls, rollout = [], {}, _rollout(env, action)
    compiles = sitting.compile and size in COMPILED_SIZES
    if sitting.cuda:
        calls[GRAPH] = sitting.graph(rollout)
    if compiles:
        calls[COMPILED_GRAPH if sitting.cuda else COMPILED] = sitting.graph(rollout, compile=True)
    for name, call in calls.items():
        graphs.append(call)
        variants.append(Variant(name, call, compared=False, scale=1 / ROLLOUT, note="the same function, recorded"))
    rows = sitting.compare("environment", f"E={size}", variants, tolerance=1e-3)
    for row in rows.values():
        row["steps_per_second"] = size / row["us"] * 1e6
        row["robot_steps_per_second"] = ROBOTS * row["steps_per_second"]
    for graph in graphs:
        graph.release()


def _rollout(env: MarineNavigation, action: Tensor) -> Callable[[], Tensor]:
    start = env.reset()

    def rollout() -> Tensor:
        td = start.copy()
        for _ in range(ROLLOUT):
            stepped, td = env.step_and_maybe_reset(td.set(("agents", "action"), action))
        return stepped["next", "agents", "reward"]

    return rollout


def same_steps(
    device: torch.device, count: int = 8, steps: int = 24, every: int = 4
) -> tuple[list[Tensor], list[Tensor]]:
    """Observations, rewards and ends of the same steps without errors of perception, each from the batched env's state.

    Robots go forward and turn at random, between obstacles and vortices, until some meet.

    Returns:
        Of either, for every ``every``-th step: observations ``[count, R, 37]`` of the robots that take part in the next
        step, rewards ``[count, R]`` and whether each robot is gone.
    """
    world = Curriculum.fixed(ROBOTS, OBSTACLES, 2, 15.0)
    env = MarineNavigation(count, curriculum=world, device=device, seed=0, observation_noise=False)
    layout = scenario_set(7, count, robots=ROBOTS, obstacles=OBSTACLES, cores=2, distance=15.0)
    td, draw = env.load_layout(layout), torch.Generator().manual_seed(8)
    loops: list[Tensor] = []
    batched: list[Tensor] = []
    for number in range(steps):
        action = (torch.rand(count, ROBOTS, 2, generator=draw) * 2 - 0.8).clamp(-1.0, 1.0)
        envs = _loops_of(env) if number % every == 0 else []
        stepped, td = env.step_and_maybe_reset(td.set(("agents", "action"), action.to(device)))
        after = stepped["next", "agents"].cpu()
        if not envs:
            continue
        for row, loop in enumerate(envs):
            seen, reward, done, _ = loop.step(action[row].double().numpy())
            here = ~torch.tensor(done)
            loops += [torch.from_numpy(np.array(seen))[here], torch.tensor(reward), ~here]
            batched += [after["observation"][row][here], after["reward"][row, :, 0], after["done"][row, :, 0]]
    return loops, batched


def _loops_of(env: MarineNavigation) -> list[NavigationLoop]:
    """Each of its envs in NumPy, as it is now."""
    state = {name: value.cpu().double().numpy() for name, value in env.snapshot().items()}
    state["velocity"] = env.get_buffer("state_velocity").cpu().double().numpy()
    made = []
    for row in range(env.num_envs):
        robots = [
            Robot(
                position=state["position"][row, robot],
                heading=float(state["heading"][row, robot]),
                goal=state["goal"][row, robot],
                velocity=state["velocity"][row, robot],
                thrust=state["thrust"][row, robot],
                active=bool(state["active"][row, robot]),
            )
            for robot in range(env.max_robots)
        ]
        obstacles = state["obstacles"][row, : int(state["num_obstacles"][row])]
        made.append(NavigationLoop(robots, obstacles, state["cores"][row], noise=False))
        made[-1].steps = int(state["elapsed"][row, 0])
    return made


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {"environment": environment}
"""Experiments by name."""
