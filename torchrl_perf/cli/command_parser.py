"""Parser of the commands for runs and machines: its errors read as those of ``train`` do."""

import argparse
import re
from typing import Any, NoReturn

from torchrl_perf.near_names import nearest_word

__all__ = ["CommandParser"]

KINDS = {"int": "an integer", "float": "a number"}
"""Names of types in argparse's messages."""


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that takes no abbreviations, and says "expected ..., received .... Remedy: ...".

    An error ends the process with exit code 2, after one sentence on standard error and the way to all options.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._known: list[str] = []
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """An argument as of any parser; its names are those that an unknown option may have meant."""
        self._known += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and end the process.

        Args:
            message: argparse's, or a sentence that needs no change.
        """
        self.exit(2, f"{self.prog}: {self._in_words(message)}\nEvery option: {self.prog} --help\n")

    def _in_words(self, message: str) -> str:
        """One of argparse's messages as a sentence of ours; any other as it is."""
        if found := re.fullmatch(r"the following arguments are required: (.+)", message):
            return f"expected {found[1]}, received nothing. Remedy: {self.prog} {found[1]}"
        if found := re.fullmatch(r"unrecognized arguments: (.+)", message):
            return self._unknown(found[1].split())
        if found := re.fullmatch(r"argument ([^:]+): (.+)", message):
            return f"{found[1]}: {self._of_value(found[1], found[2])}"
        return message

    def _unknown(self, words: list[str]) -> str:
        near = nearest_word(words[0].partition("=")[0], self._known) if words[0].startswith("-") else None
        remedy = f"{near}, the nearest" if near else "leave it out"
        return f"{words[0]}: expected an option of the command, received an unknown word. Remedy: {remedy}."

    def _of_value(self, option: str, problem: str) -> str:
        name = option.rpartition("/")[2]
        if found := re.fullmatch(r"invalid (\w+) value: (.+)", problem):
            return f"expected {KINDS.get(found[1], found[1])}, received {found[2]}. Remedy: {name} followed by one."
        if found := re.fullmatch(r"invalid choice: (.+) \(choose from (.+)\)", problem):
            return f"expected one of {found[2]}, received {found[1]}. Remedy: one of these."
        if found := re.fullmatch(r"expected (?:one|at least one) argument", problem):
            return f"expected a value, received none. Remedy: {name} followed by one."
        return problem
