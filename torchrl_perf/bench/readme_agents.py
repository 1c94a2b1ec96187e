"""The documentation's tables of agents, tasks and systems, made from the registry, presets and specs of the envs."""

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torchrl.data import Bounded, Categorical, MultiCategorical
from torchrl.envs import EnvBase

from torchrl_perf import envs
from torchrl_perf.registry import ALGORITHMS, MARINE_AGENTS, SYSTEMS, Entry
from torchrl_perf.trainers.tasks import TASKS

PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
FLAG = "is_init"
WORDS_OF_A_RUN = (("Every choice of ", ""), (r"^(a|an) run of ", ""), (r"^(a|an) ", ""), (" run(?=$|[ ,;:])", ""))


def agents_table(algorithms: dict[str, Entry] = ALGORITHMS) -> str:
    """Markdown: what each algorithm learns, its papers, the actions and names of the tasks that it has presets for.

    Args:
        algorithms: the registry's, by name.
    """
    rows = []
    for name, entry in algorithms.items():
        about = first_sentence(entry.load("config"))
        tasks = list(entry.load("presets"))
        rows.append(
            {
                "`torchrl-perf train`": f"`{name}`",
                "learns by": in_plain_words(about),
                "papers": papers_of(about),
                "actions": ", or ".join(dict.fromkeys(actions_of(env_of(task)) for task in tasks)),
                "`--env` with a preset": ", ".join(tasks),
            }
        )
    return compact_table(rows)


def tasks_table(tasks: Sequence[str] = TASKS, algorithms: dict[str, Entry] = ALGORITHMS) -> str:
    """Markdown: what each task asks for, the sizes of its observation and action, and who has settings for it.

    Args:
        tasks: names of classes of ``torchrl_perf.envs``.
        algorithms: the registry's, by name.
    """
    presets = {name: set(entry.load("presets")) for name, entry in algorithms.items()}
    rows = []
    for task in tasks:
        env = env_of(task)
        rows.append(
            {
                "`--env`": f"`{task}`",
                "task": code_of(first_sentence(type(env))),
                "observation": ", ".join(sizes_of(env)),
                "action": actions_of(env, sizes=True),
                "steps": f"{env.max_episode_steps or ''}",
                "presets of": ", ".join(name for name, known in presets.items() if task in known),
            }
        )
    return compact_table(rows)


def systems_table(systems: dict[str, Entry] = SYSTEMS) -> str:
    """Markdown: each whole system, one row for all agents of the marine one.

    Args:
        systems: the registry's, by name.
    """
    rows: dict[str, dict[str, str]] = {}
    for name, entry in systems.items():
        agent = name.removeprefix("marine-")
        is_marine = agent != name and agent in MARINE_AGENTS
        shown = f"`marine --agent` {', '.join(MARINE_AGENTS)}" if is_marine else f"`{name}`"
        env = env_of(entry.load("config").env_class)
        rows[shown] = {
            "`torchrl-perf train`": shown,
            "task": code_of(first_sentence(type(env))),
            "`--env`": ", ".join(entry.load("presets")),
        }
    return compact_table(list(rows.values()))


def env_of(task: str) -> EnvBase:
    """One env of a task of the package, on the CPU.

    Raises:
        ValueError: for a name that ``torchrl_perf.envs`` does not have.
    """
    kind = getattr(envs, task, None)
    if kind is None:
        raise ValueError(
            f"task: expected the name of a class of torchrl_perf.envs, received {task!r}. Remedy: export it in "
            "torchrl_perf/envs/__init__.py, or set env_class in the config."
        )
    return kind(1, device="cpu")


def actions_of(env: EnvBase, *, sizes: bool = False) -> str:
    """The kind of an env's actions in words, such as ``index``, or with sizes: ``index of 2``, ``box of 1``."""
    return " and ".join(_action_in_words(spec, sizes) for spec in leaves(env.full_action_spec).values())


def _action_in_words(spec: Any, sizes: bool) -> str:
    if isinstance(spec, Categorical):
        return f"index of {spec.space.n}" if sizes else "index"
    if isinstance(spec, Bounded):
        return f"box of {spec.shape[-1]}" if sizes else "box"
    if isinstance(spec, MultiCategorical):
        return f"indices of {list(spec.nvec)}" if sizes else "indices"
    raise TypeError(
        f"action: expected Categorical, MultiCategorical or Bounded, received {type(spec).__name__}. Remedy: words for "
        "it in _action_in_words of torchrl_perf/bench/readme_agents.py."
    )


def sizes_of(env: EnvBase) -> list[str]:
    """The shape of each observation behind the dimension of envs, ``is_init`` left out."""
    found = leaves(env.observation_spec)
    return [" x ".join(map(str, spec.shape[1:])) for key, spec in found.items() if key != FLAG]


def leaves(spec: Any) -> dict[Any, Any]:
    """The specs of a composite, by key."""
    return dict(spec.items(True, True))


def first_sentence(kind: type) -> str:
    """The first sentence of a class's docstring, without its full stop.

    Raises:
        ValueError: for a class without docstring.
    """
    text = inspect.getdoc(kind) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    if not first:
        raise ValueError(
            f"{kind.__name__}: expected a docstring, whose first sentence the documentation shows, received none. "
            f"Remedy: write one in {kind.__module__}."
        )
    return re.split(r"\.(?:\s|$)", first, maxsplit=1)[0]


def in_plain_words(sentence: str) -> str:
    """The subject of a config's first sentence ("Every choice of ..."), without the numbers of papers."""
    words = re.sub(r" ?\([^()]*arXiv:[^()]*\)", "", sentence)
    for pattern, instead in WORDS_OF_A_RUN:
        words = re.sub(pattern, instead, words, count=1)
    return words


def papers_of(sentence: str) -> str:
    """Links to the papers that a sentence names by their arXiv numbers."""
    numbers: Iterable[str] = dict.fromkeys(PAPER.findall(sentence))
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in numbers)


def compact_table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown table of rows with the same columns, not padded: cells of some hundred letters leave others short."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *[list(row.values()) for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code_of(sentence: str) -> str:
    """Markdown of a sentence of a docstring: code between single backticks."""
    return sentence.replace("``", "`").replace("|", "\\|")
