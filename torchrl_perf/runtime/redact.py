"""Removes credentials from what is stored with a run: configurations, command lines, messages."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["REDACTED", "is_secret_name", "redact", "redact_command"]

REDACTED = "[redacted]"
"""The text that replaces a credential."""

_SHORTEST_ENV_SECRET = 6  # a shorter value, such as "1", would be found everywhere

_WORKING_FOLDERS = ("PWD", "OLDPWD")  # of the shell: here PWD does not mean password

_SECRET_WORDS = {"password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"} | {
    "authorization",
    "bearer",
    "apikey",
    "accesskey",
    "privatekey",
    "secretkey",
}
_SECRET_PAIRS = frozenset((("api", "key"), ("access", "key"), ("private", "key"), ("auth", "key"), ("account", "key")))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.-]*)([\"']?\s*[=:]\s*)((?:bearer\s+|basic\s+)?[^\s,;&]+)", re.IGNORECASE)
# Prefixes by which issuers mark their keys, so that they can be recognised in text.
_KNOWN_KEYS = re.compile(
    r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|xox[abp]-|sk-|wandb_v\d_)[A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b"
)


def is_secret_name(name: str) -> bool:
    """Whether a key, option or variable of this name holds a credential.

    Args:
        name: in any style: ``api_key``, ``apiKey``, ``--hf-token``, ``WANDB_API_KEY``.

    Returns:
        True for names with a word such as password, secret or credential, with api, access or private before key, and
        for those that end in token, but not for ``max_tokens`` and ``token_dim``.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    return (
        words[-1] == "token"
        or not _SECRET_WORDS.isdisjoint(words)
        or any(pair in _SECRET_PAIRS for pair in pairwise(words))
    )


def redact(value: Any) -> Any:
    """A copy of a configuration without credentials.

    Replaced by ``REDACTED`` are values under a secret name (:func:`is_secret_name`) and, inside any text, the values of
    environment variables with a secret name, the login of a URL, ``name=value`` with a secret name, and keys of
    well-known form. True, False, None and numbers under other names stay as they are.

    Args:
        value: nested mappings and sequences of plain values; other objects whose text holds a credential become text.

    Returns:
        The same structure in new containers; tuples stay tuples, other sequences and sets become lists.
    """
    return _redact(value, _env_secrets())


def redact_command(argv: Sequence[str]) -> list[str]:
    """The arguments of a command without credentials, ``--api-key VALUE`` in two arguments included.

    Args:
        argv: the arguments as in ``sys.argv``.

    Returns:
        As many arguments.
    """
    secrets, result, hide = _env_secrets(), [], False
    for argument in argv:
        result.append(REDACTED if hide and not argument.startswith("--") else _redact_text(argument, secrets))
        hide = argument.startswith("-") and "=" not in argument and is_secret_name(argument)
    return result


def _env_secrets() -> list[str]:
    """Values of the environment variables whose name says that they hold a credential, the longest first."""
    values = {
        value
        for name, value in os.environ.items()
        if is_secret_name(name) and name not in _WORKING_FOLDERS and len(value) >= _SHORTEST_ENV_SECRET
    }
    return sorted(values, key=len, reverse=True)


def _redact(value: Any, secrets: list[str]) -> Any:
    if value is None or isinstance(value, bool | Number | Tensor | np.ndarray):
        return value
    if isinstance(value, str):
        return _redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            _redact(key, secrets): _hidden(item) if is_secret_name(str(key)) else _redact(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, tuple):
        return tuple(_redact(item, secrets) for item in value)
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [_redact(item, secrets) for item in value]
    text = value.decode(errors="replace") if isinstance(value, bytes | bytearray) else str(value)
    clean = _redact_text(text, secrets)
    return value if clean == text else clean


def _hidden(value: Any) -> Any:
    """The replacement of a value under a secret name; only None, True and False are shown."""
    return value if value is None or isinstance(value, bool) or value == "" else REDACTED


def _redact_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _KNOWN_KEYS.sub(REDACTED, _URL_LOGIN.sub(_login, text))
    return _ASSIGNMENT.sub(_assignment, text)


def _login(match: re.Match[str]) -> str:
    # `git@host` is a name that everybody has; a token may stand alone, without a colon.
    return match[0] if match[0] in ("git", REDACTED) else REDACTED


def _assignment(match: re.Match[str]) -> str:
    if is_secret_name(match[1]):
        return f"{match[1]}{match[2]}{REDACTED}"
    # "https:" and "query=" stand before what may be an assignment itself
    return f"{match[1]}{match[2]}{_ASSIGNMENT.sub(_assignment, match[3])}"
