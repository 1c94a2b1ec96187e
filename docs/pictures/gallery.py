"""Draws the pictures of docs/gallery.md: `python docs/pictures/gallery.py [NAME ...]`, in two minutes on a CPU core."""

import sys
from pathlib import Path

import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape, betweenness_breaks, column_breaks
from torchrl_perf.envs.marine import record
from torchrl_perf.systems.durotaxis import draw_colony, record_colony
from torchrl_perf.systems.fuel_breaks import draw_fire_maps, fire_maps
from torchrl_perf.systems.marine.evaluation import Scenarios, scripted, start
from torchrl_perf.systems.marine.picture import draw_trajectories
from torchrl_perf.trainers import load_policy
from torchrl_perf.trainers.blueprints import blueprint_of

FOLDER = Path(__file__).parent


def vessels() -> Path:
    """Five vessels among four obstacles and four vortices, steered by the scripted controller."""
    scenarios = Scenarios(count=2, seed=7, robots=5, obstacles=4, cores=4, distance=30.0)
    env = scenarios.env("continuous")
    start(scenarios, env)
    recording = record(env, scripted(env), steps=120)
    return draw_trajectories(
        recording, FOLDER / "gallery_vessels.png", title="five vessels, four vortices: the scripted controller"
    )


def colony() -> Path:
    """A colony that the policy of the zoo leads to its goal."""
    policy = load_policy("zoo:durotaxis-Durotaxis")
    env = blueprint_of(policy.config).env(policy.config.for_rows(8), torch.device("cpu"))
    torch.manual_seed(3)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        return draw_colony(record_colony(env, policy), FOLDER / "gallery_colony.png")


def fires() -> Path:
    """Breaks by rule and by search on a landscape with hills, patches, wind and a river, and what they change."""
    env = FuelBreaks(1, landscape=Landscape.varied(80, 20, base=0.4), budget=20, observation="compact")
    fuel = env.burnable()
    found = {
        "none": torch.zeros_like(fuel),
        "column": column_breaks(fuel, env.budget),
        "betweenness": betweenness_breaks(fuel, env.budget),
        "search": env.search(rounds=60),
    }
    maps = fire_maps(env, found, fires=2_048)
    return draw_fire_maps(maps, FOLDER / "gallery_fires.png", title="the same 2,048 fires with 20 breaks")


PICTURES = {"vessels": vessels, "colony": colony, "fires": fires}


def main(names: list[str]) -> int:
    """Draws those that are named, all by default; 2 for an unknown name."""
    if wrong := [name for name in names if name not in PICTURES]:
        print(f"expected names among {', '.join(PICTURES)}, received {', '.join(wrong)}", file=sys.stderr)
        return 2
    for name in names or PICTURES:
        print(PICTURES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
