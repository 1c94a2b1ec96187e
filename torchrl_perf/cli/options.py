"""Options of a command line, checked before anything is made: all problems at once, each in one sentence.

The parser used afterwards stops at the first problem, does not know the settings, and silently drops the first of an
option that is given twice.
"""

import dataclasses
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torchrl_perf.streams import say
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import settings_from, unknown_setting

__all__ = ["OPTIONS", "joined", "refuse_bad_options"]

OPTIONS: dict[str, bool] = {
    **{"config": False, "resume": False, "keep_schedules": True, "progress": True},
    **{"ranks": False, "gpus": False, "per_rank": True, "by_host": True, "rank_timeout": False, "backend": False},
}
"""Options beside the settings, and whether each is a switch."""
HELP = ("-h", "--help")


def refuse_bad_options(program: str, kind: type[RunConfig], argv: Sequence[str]) -> None:
    """End the process with exit code 2 and a sentence for each option that cannot be understood.

    Refused are names that do not exist (with the nearest that does), options without a value, values of another type
    than the setting's, and words that belong to no option. Values out of range are left to the config. Of an option
    that is given twice the last counts, which is said on standard error.

    Args:
        program: what was called, for the last line.
        kind: the config whose fields are options.
        argv: the arguments.

    Raises:
        SystemExit: with 2, after the sentences on standard error.
    """
    if any(word in HELP for word in argv):
        return
    problems = list(_problems(kind, argv))
    if problems:
        head = problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n  " + "\n  ".join(problems)
        say(f"torchrl-perf: {head}\nEvery option: {program} --help")
        raise SystemExit(2)
    given = Counter(word[2:].partition("=")[0].replace("_", "-") for word in argv if word.startswith("--"))
    if repeated := [f"--{name}" for name, count in given.items() if count > 1]:
        say(f"torchrl-perf: the last value counts of {', '.join(repeated)}, given more than once")


def _problems(kind: type[RunConfig], argv: Sequence[str]) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    switches = {field.name: hints[field.name] is bool for field in dataclasses.fields(kind)} | OPTIONS
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            yield f"{word}: expected an option, which begins with --, received a word that belongs to none. " + (
                "Remedy: leave it out; a switch takes no value (--no-... turns it off)."
            )
            continue
        given, has_value, text = word[2:].partition("=")
        name = given.replace("-", "_")
        is_off = name.startswith("no_") and switches.get(name.removeprefix("no_"), False)
        name = name.removeprefix("no_") if is_off else name
        option = f"--{name.replace('_', '-')}"
        if switches.get(name, name not in switches):  # a switch, or an unknown name, whose value goes with it
            if name not in switches:
                values = [text] if has_value else []
                while not has_value and words and not _is_option(words[0]):
                    values.append(words.pop(0))  # of a setting that takes several, perhaps
                value = " ".join(values)
                yield _as_option(unknown_setting(name, value, list(switches)))
            elif has_value:
                yield f"{option}: expected no value, received {text!r}. Remedy: {option} or --no-{option[2:]}."
            continue
        if not has_value:
            if not words or _is_option(words[0]):
                yield f"{option}: expected a value, received none. Remedy: {option} followed by one."
                continue
            text = words.pop(0)
        values = [text]
        while name not in OPTIONS and _element(hints[name]) is not None and words and not _is_option(words[0]):
            values.append(words.pop(0))
        if name not in OPTIONS and (problem := _type_problem(kind, name, values, hints[name])):
            yield problem


def joined(kind: type[RunConfig], argv: Sequence[str]) -> list[str]:
    """The arguments; a value that begins with a dash, as in ``--best-metric -loss``, is joined to its option.

    Args:
        kind: the config whose fields are options.
        argv: arguments without problems.
    """
    hints = typing.get_type_hints(kind)
    valued = {field.name for field in dataclasses.fields(kind) if hints[field.name] is not bool}
    words, found = list(argv), []
    while words:
        word = words.pop(0)
        if word.startswith("--") and word[2:].replace("-", "_") in valued and words and words[0].startswith("-"):
            word = f"{word}={words.pop(0)}"
        found.append(word)
    return found


def _is_option(word: str) -> bool:
    return word.startswith("--") and not word[2:3].isdigit()


def _as_option(problem: str) -> str:
    """A sentence about a setting as one about an option."""
    start, nearest, names = problem.partition("; the nearest is ")
    name, _, rest = start.partition(":")
    near = " or ".join(f"--{each.replace('_', '-')}" for each in names.removesuffix(".").split(" or ") if each)
    return f"--{name.replace('_', '-')}:{rest}{nearest}{near}{'.' if near else ''}"


def _element(hint: Any) -> Any:
    """The type of each word of an option that takes several; None for one that takes one."""
    kinds = [option for option in (hint, *typing.get_args(hint)) if typing.get_origin(option) is tuple]
    return typing.get_args(kinds[0])[0] if kinds else None


def _type_problem(kind: type[RunConfig], name: str, words: Sequence[str], hint: Any) -> str:
    """What is wrong with the words of one option, or an empty text."""
    text = words[0]
    if text == "None" and type(None) in typing.get_args(hint):
        return ""
    several = _element(hint)
    value = _number(text, hint) if several is None else tuple(_number(word, several) for word in words)
    _, problems = settings_from(kind, {name: value})
    if not problems:
        return ""
    option, problem = f"--{name.replace('_', '-')}", problems[name].partition(": ")[2]
    return f"{option}: {problem.replace(f'Remedy: {name}=', f'Remedy: {option} ')}"


def _number(text: str, hint: Any) -> Any:
    """A text as the number that an option takes, or as it is."""
    for convert in (int, float):
        if convert is hint or convert in typing.get_args(hint):
            try:
                return convert(text)
            except ValueError:
                continue
    return text
