"""Redaction by form: prefixes that issuers use, styles of a token's name, values that begin with a dash."""

import pytest

from torchrl_perf.runtime.redact import REDACTED, is_secret_name, redact, redact_command

BODY = "Ab3" * 8
PREFIXES = [
    "hf_",
    "gho_",
    "ghp_",
    "ghs_",
    "ghu_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "xoxa-",
    "xoxb-",
    "xoxp-",
    "sk-",
    "wandb_v1_",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_each_known_prefix_is_found_in_text(prefix):
    assert redact(f"seen {prefix}{BODY} there") == f"seen {REDACTED} there"
    assert redact(f"seen {prefix}short there") == f"seen {prefix}short there"


def test_an_access_key_id_is_found_in_text():
    assert redact("seen AKIA" + "Q7" * 8 + " there") == f"seen {REDACTED} there"


@pytest.mark.parametrize(
    "name", ["token", "TOKEN", "hfToken", "HF_TOKEN", "--hf-token", "access.token", "x-auth-token", "Token"]
)
def test_each_form_of_a_tokens_name_is_secret(name):
    assert is_secret_name(name)
    assert redact({name: "plain"}) == {name: REDACTED}


@pytest.mark.parametrize("name", ["max_tokens", "token_dim", "tokens", "tokenizer", "tokenizer_name"])
def test_names_about_tokens_are_not_secret(name):
    assert not is_secret_name(name)
    assert redact({name: "plain"}) == {name: "plain"}


def test_a_secret_value_that_begins_with_a_dash_is_hidden():
    assert redact_command(["run", "--api-key", "-abc", "--seed", "3"]) == ["run", "--api-key", REDACTED, "--seed", "3"]


def test_an_option_after_a_secret_switch_stays():
    assert redact_command(["run", "--api-key", "--seed", "-3"]) == ["run", "--api-key", "--seed", "-3"]
