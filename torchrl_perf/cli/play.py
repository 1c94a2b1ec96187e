"""``torchrl-perf play``: watch the policy of a run."""

import argparse
import sys
from pathlib import Path

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.finished_run import add_run_arguments, output_folder, said, seed_of, variant

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Show a run; the options are those that ``torchrl-perf play --help`` lists.

    Args:
        argv: the arguments behind ``play``.

    Returns:
        Exit code: 0; 1 for what cannot be shown.
    """
    options = parser().parse_args(argv)
    return said("play", lambda: play(options))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf play",
        description="Watch the policy of a run, which does not explore: a film in the run's folder, or a window. Envs "
        "of the package draw themselves, those of Gymnasium are asked for their picture.",
    )
    add_run_arguments(made)
    made.add_argument(
        "--out",
        type=Path,
        help="film to write, .gif or .mp4 (default: play.gif in the run's folder; in ./NAME of zoo:NAME)",
    )
    made.add_argument("--window", action="store_true", help="show it in a window instead")
    made.add_argument("--episodes", type=int, default=1, help="how many (default: 1)")
    made.add_argument("--max-steps", type=int, default=500, help="greatest number of pictures (default: 500)")
    made.add_argument("--fps", type=int, default=30, help="pictures a second (default: 30)")
    made.add_argument("--height", type=int, default=288, help="pixels, of envs of the package (default: 288)")
    made.add_argument("--variant", type=variant, default={}, metavar="NAME=VALUE[,...]", help="as for evaluate")
    return made


def play(options: argparse.Namespace) -> int:
    """Draw the episodes."""
    from torchrl_perf.cli.film import show, write_film
    from torchrl_perf.streams import say
    from torchrl_perf.trainers.frames import frames
    from torchrl_perf.trainers.policies import policy_of, read_run

    for name in ("episodes", "max_steps", "fps", "height"):
        if getattr(options, name) < 1:
            raise ValueError(
                f"{name}: expected a positive integer, received {getattr(options, name)}. Remedy: {name}=1 or more."
            )
    run = read_run(options.run, options.device, which=options.checkpoint)
    pictures = frames(
        run,
        policy_of(run),
        seed=seed_of(options, run.config),
        episodes=options.episodes,
        max_steps=options.max_steps,
        size=(options.height, options.height * 3 // 2),
        changes=options.variant,
    )
    title = f"{run.config.algorithm} on {run.env}"
    if options.window:
        show(pictures, title, fps=options.fps)
        return 0
    out = options.out or output_folder(options.run) / "play.gif"
    count = write_film(pictures, out, fps=options.fps)
    say(f"{title}: {count} pictures in {out}", sys.stdout)
    return 0
