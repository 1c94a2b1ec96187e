"""Draws docs/pictures/robots.png, a picture of each of MuJoCo's tasks: `python docs/pictures/robots.py`."""

import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw

import torchrl_perf.envs.mujoco as robots
from torchrl_perf.registry import ROBOTS

HEIGHT, WIDTH, COLUMNS, COLOURS = 180, 240, 4, 64
STEPS = 8  # of small random actions, so that joints are not straight


def tile(name: str) -> Image.Image:
    """One world of a task after a few steps, with its name."""
    torch.manual_seed(1)
    env = getattr(robots, name)(1, device="cpu", seed=1)
    root = env.reset()
    for _ in range(STEPS):
        root["action"] = env.action_spec.rand() / 2
        root = env.step_and_maybe_reset(root)[1]
    picture = Image.fromarray(env.render(height=HEIGHT, width=WIDTH)[0].numpy())
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, WIDTH, 13), fill=(40, 40, 40))
    draw.text((4, 1), name, fill=(255, 255, 255))
    return picture


def main() -> int:
    """Writes the picture beside this file."""
    rows = -(-len(ROBOTS) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * WIDTH, rows * HEIGHT), (255, 255, 255))
    for number, name in enumerate(ROBOTS):
        sheet.paste(tile(name), (number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT))
    sheet.quantize(COLOURS).save(Path(__file__).with_suffix(".png"), optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
