"""Stages of a colony's task as settings: text such as "0, 2e5", one number for each stage."""

from typing import Any

from torchrl_perf.envs.durotaxis import ColonyCurriculum

__all__ = ["curriculum_of", "last_stage", "stage_problems"]

SETTINGS = ("stage_frames", "stage_goals", "stage_nodes")
USUAL_GOAL = "0.95"
LONGEST = 60  # characters of a text that a message repeats


def curriculum_of(config: Any) -> ColonyCurriculum:
    """The stages of ``stage_frames``, ``stage_goals`` and ``stage_nodes``, with that of ``stage_one_frames``.

    Args:
        config: with these settings and ``critical_nodes``.

    Raises:
        ValueError: for text that is not numbers with commas, another number of them than of ``stage_frames``, and
            stages that the curriculum refuses.
    """
    frames = [int(number) for number in _numbers("stage_frames", config.stage_frames)]
    goals = _of_each(frames, "stage_goals", config.stage_goals)
    nodes = _of_each(frames, "stage_nodes", config.stage_nodes or str(config.critical_nodes))
    if max(nodes) > config.critical_nodes:
        raise ValueError(
            f"expected stage_nodes of at most critical_nodes = {config.critical_nodes}, received {max(nodes):g}. "
            "Remedy: a larger critical_nodes, or fewer."
        )
    alone = config.stage_one_frames
    starts = sorted({*frames, alone}) if alone else frames
    at = [max(number for number, frame in enumerate(frames) if frame <= start) for start in starts if frames[0] == 0]
    return ColonyCurriculum(
        frames=tuple(starts),
        delete_only=tuple(start < alone for start in starts) if alone else (),
        # what is the env's own in each stage is left to it
        goal=tuple(goals[number] for number in at) if config.stage_goals != USUAL_GOAL else (),
        critical_nodes=tuple(int(nodes[number]) for number in at) if config.stage_nodes else (),
    )


def last_stage(config: Any) -> ColonyCurriculum:
    """The last stage alone, by which a policy is judged."""
    stages = curriculum_of(config)
    return ColonyCurriculum(goal=stages.goal[-1:], critical_nodes=stages.critical_nodes[-1:])


def stage_problems(config: Any) -> list[str]:
    """What is wrong with the stages, or nothing."""
    for name in SETTINGS:
        try:
            if getattr(config, name) or name != "stage_nodes":
                _numbers(name, getattr(config, name))
        except ValueError as error:
            return [f"{name}: {error}"]
    try:
        curriculum_of(config)
    except ValueError as error:
        return [f"stage_frames: {error}"]
    return []


def _numbers(name: str, text: str) -> list[float]:
    """The numbers of a text with commas."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    whole = name != "stage_goals"
    if not 1 <= len(numbers) <= LONGEST or any(not 0 <= n < 1e15 or (whole and n != int(n)) for n in numbers):
        words = "whole numbers" if whole else "numbers"
        raise ValueError(
            f"expected {words} of at least 0 with commas, {LONGEST} at most, received {text[:LONGEST]!r}. Remedy: such "
            f"as {name}={'0.5, 0.95' if name == 'stage_goals' else '0, 200000' if name == 'stage_frames' else '100'!r}."
        )
    return numbers


def _of_each(frames: list[int], name: str, text: str) -> list[float]:
    """A number for each stage."""
    numbers = _numbers(name, text)
    if len(numbers) not in (1, len(frames)):
        raise ValueError(
            f"expected one of {name} for each of {len(frames)} stages, or one for all, received {len(numbers)}. "
            f"Remedy: one number for all stages, or {len(frames)} with commas."
        )
    return numbers * len(frames) if len(numbers) == 1 else numbers
