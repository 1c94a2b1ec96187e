"""Credentials are recognised and replaced, and nothing else is."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_perf.runtime.machine import machine_card
from torchrl_perf.runtime.redact import REDACTED, is_secret_name, redact, redact_command

SECRET_NAMES = ["api_key", "apiKey", "--api-key", "WANDB_API_KEY", "token", "hf_token", "accessToken", "password"]
SECRET_NAMES += ["DB_PASSWD", "client_secret", "credentials", "AWS_SECRET_ACCESS_KEY", "private_key", "Authorization"]
PLAIN_NAMES = ["learning_rate", "max_tokens", "token_dim", "tokenizer", "key", "keys", "in_keys", "author", "env", ""]
PLAIN_NAMES += ["monkey", "num_envs", "secretary", "PATH", "keep_checkpoints", "best_metric"]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names(name):
    assert is_secret_name(name)
    assert redact({name: "value"}) == {name: REDACTED}
    assert redact({name: None}) == {name: None}
    assert redact({name: False}) == {name: False}


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_plain_names(name):
    assert not is_secret_name(name)
    assert redact({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/x", f"https://{REDACTED}@host/x"),
        ("https://ghtoken@github.com/x.git", f"https://{REDACTED}@github.com/x.git"),
        ("ssh://git@github.com/x.git", "ssh://git@github.com/x.git"),
        ("https://host/x?token=abc&n=1", f"https://host/x?token={REDACTED}&n=1"),
        ("Authorization: Bearer abc.def", f"Authorization: {REDACTED}"),
        ("lr=0.1 password=hunter2, n=3", f"lr=0.1 password={REDACTED}, n=3"),
        ("use hf_AbCdEfGhIjKlMnOpQrSt now", f"use {REDACTED} now"),
        ("commit 0123456789abcdef0123456789abcdef01234567", "commit 0123456789abcdef0123456789abcdef01234567"),
        ("runs/ppo-CartPole-0", "runs/ppo-CartPole-0"),
    ],
)
def test_text(text, expected):
    assert redact(text) == expected
    assert redact([{"note": (text,)}]) == [{"note": (expected,)}]
    assert redact(Path(text)) == (Path(text) if redact(str(Path(text))) == str(Path(text)) else redact(str(Path(text))))


def test_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "xyzzy-private")
    monkeypatch.setenv("SHORT_TOKEN", "1")
    monkeypatch.setenv("PLAIN_VARIABLE", "plain-value")
    config = {"a": "it is xyzzy-private.", "b": "plain-value", "c": 1, "d": b"xyzzy-private", "xyzzy-private": 2}
    assert redact(config) == {"a": f"it is {REDACTED}.", "b": "plain-value", "c": 1, "d": REDACTED, REDACTED: 2}


def test_command_lines():
    argv = ["train", "--api-key", "v", "--lr", "0.1", "--token=zz", "WANDB_API_KEY=q", "--password", "--seed", "3"]
    expected = ["train", "--api-key", REDACTED, "--lr", "0.1", f"--token={REDACTED}", f"WANDB_API_KEY={REDACTED}"]
    assert redact_command(argv) == [*expected, "--password", "--seed", "3"]


def test_machine_card_has_no_credentials(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "--token", "abc", "--seed", "3"])
    card = machine_card()
    assert card["command"] == f"train --token {REDACTED} --seed 3"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc xyz/._-0", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(PLAIN_NAMES), inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_configurations_stay_as_they_are_and_twice_is_once(value):
    assert redact(value) == value
    json.dumps(redact({"token": "x", "value": value}))
    assert redact(redact({"token": "x", "value": value})) == redact({"token": "x", "value": value})


def test_the_working_folder_is_no_password(monkeypatch):
    monkeypatch.setenv("PWD", "/some/folder")
    monkeypatch.setenv("OLDPWD", "/some/other")
    assert redact_command(["/some/folder/train.py", "/some/other"]) == ["/some/folder/train.py", "/some/other"]
