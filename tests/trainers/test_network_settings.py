"""Depth, widths, activation and layer norm of networks, from Python and from a command line."""

import json
import re

import pytest
import torch
from config_runs import KINDS, make
from torch import nn

from torchrl_perf.cli import main
from torchrl_perf.modules import ConvNet, FusedMLP
from torchrl_perf.modules.ensemble import EnsembleMLP
from torchrl_perf.modules.noisy import NoisyLinear
from torchrl_perf.systems.fuel_breaks.config import FuelBreaksConfig
from torchrl_perf.trainers import load_policy
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.policies import GreedyPolicy

NAMES = [name for name, kind in KINDS.items() if "hidden_sizes" not in kind.not_taken]
NORMED = [name for name in NAMES if "layer_norm" not in KINDS[name].not_taken]


def widths(module):
    """Output sizes of the linear layers."""
    return [layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear | NoisyLinear)]


@pytest.mark.parametrize("name", NAMES)
def test_two_of_hidden_size_are_the_default(name):
    plain, same = make(name, {"hidden_size": 16}), make(name, {"hidden_size": 8, "hidden_sizes": (16, 16)})
    if name in ("iqn", "qr-dqn", "rainbow", "ac-iqn"):
        assert 16 in widths(same.policy)  # the first is that of a trunk
    else:
        shapes = [[value.shape for value in trainer.policy.parameters()] for trainer in (plain, same)]
        assert shapes[0] == shapes[1]
        for one, other in zip(plain.policy.parameters(), same.policy.parameters(), strict=True):
            assert torch.equal(one, other)
    for trainer in (plain, same):
        trainer.close()


@pytest.mark.parametrize("name", NAMES)
def test_three_layers_and_another_activation_learn(name):
    trainer = make(name, {"hidden_sizes": (24, 16, 8), "activation": "elu"})
    assert {24, 16, 8} <= set(widths(trainer.policy))
    assert any(isinstance(module, nn.ELU) for module in trainer.policy.modules())
    before = [value.clone() for value in trainer.policy.parameters()]
    for _ in range(8):
        trainer.step()
    assert not all(torch.equal(one, other) for one, other in zip(before, trainer.policy.parameters(), strict=True))
    trainer.close()


@pytest.mark.parametrize("name", NORMED)
def test_layer_norm(name):
    trainer = make(name, {"layer_norm": True, "hidden_sizes": (16, 8)})
    norms = [module for module in trainer.policy.modules() if isinstance(module, nn.LayerNorm)]
    assert [norm.normalized_shape for norm in norms] == [(16,), (8,)]
    trainer.step()
    trainer.close()


def test_actor_and_critic_apart():
    trainer = make("ppo", {"hidden_sizes": (16,), "critic_hidden_sizes": (24, 12)})
    assert (widths(trainer.actor), widths(trainer.critic)) == ([16, 2], [24, 12, 1])
    trainer.close()
    trainer = make("sac", {"hidden_sizes": (16,), "critic_hidden_sizes": (24, 12)})
    assert [weight.shape[-1] for weight in trainer.loss.critic.module.net.weights] == [24, 12, 1]
    trainer.close()


def test_a_linear_policy():
    trainer = make("ppo", {"hidden_sizes": ()})
    assert widths(trainer.actor) == [2]
    trainer.step()
    trainer.close()
    with pytest.raises(ValueError, match=r"hidden_sizes: expected one width at least for iqn, received none"):
        make("iqn", {"hidden_sizes": ()})


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu", "gelu", "mish", "leaky_relu"])
def test_an_ensemble_with_layer_norm_equals_its_members(activation):
    ensemble = EnsembleMLP(3, 4, 2, hidden_sizes=(8, 6), activation=activation, layer_norm=True)
    with torch.no_grad():
        for gain, shift in zip(ensemble.gains, ensemble.shifts, strict=True):
            gain.uniform_(0.5, 2.0)
            shift.uniform_(-1.0, 1.0)
    x, found = torch.randn(5, 4), []
    for member in range(3):
        plain = FusedMLP(4, 2, hidden_sizes=(8, 6), activation=activation, layer_norm=True)
        linear = [layer for layer in plain if isinstance(layer, nn.Linear)]
        norms = [layer for layer in plain if isinstance(layer, nn.LayerNorm)]
        with torch.no_grad():
            for layer, weight, bias in zip(linear, ensemble.weights, ensemble.biases, strict=True):
                layer.weight.copy_(weight[member].T)
                layer.bias.copy_(bias[member, 0])
            for norm, gain, shift in zip(norms, ensemble.gains, ensemble.shifts, strict=True):
                norm.weight.copy_(gain[member, 0])
                norm.bias.copy_(shift[member, 0])
        found.append(plain(x))
    torch.testing.assert_close(ensemble(x), torch.stack(found))


class TestConvolutions:
    @pytest.mark.parametrize(
        ("env", "options", "sizes", "features"),
        [
            ("Pixels", {}, [8, 4, 3], 512),
            ("Pixels", {"conv_layers": "small"}, [3, 3, 3], 128),
            ("Pixels", {"conv_layers": "nature", "conv_features": 24}, [8, 4, 3], 24),
            ("Mixed", {}, [3, 3, 3], 128),
            ("Mixed", {"conv_features": 16}, [3, 3, 3], 16),
        ],
    )
    def test_by_size_and_by_settings(self, env, options, sizes, features, tmp_path):
        trainer = make("dqn", {"env": f"named_envs:{env}", **options})
        (network,) = [module for module in trainer.policy.modules() if isinstance(module, ConvNet)]
        kernels = [layer.kernel_size[0] for layer in network.convolutions if isinstance(layer, nn.Conv2d)]
        assert (kernels, network.out_features) == (sizes, features)
        trainer.step()
        trainer.iterations_done += 1
        loaded = load_policy(trainer.save(tmp_path / "checkpoint.pt"))
        root = trainer.collect().select(*loaded.in_keys)[:, -1].contiguous()
        assert torch.equal(loaded(root.clone())["action"], GreedyPolicy(trainer.policy)(root)["action"])
        trainer.close()

    @pytest.mark.parametrize(
        ("name", "options", "words"),
        [
            (
                "dqn",
                {"env": "named_envs:Mixed", "conv_layers": "nature"},
                r"conv_layers: expected images of at least 36 x 36 pixels for 'nature', received \[16, 16, 3\]. Remedy",
            ),
            (
                "ppo",
                {"conv_layers": "small"},
                r"conv_layers: expected 'auto' without an image.*received 'small'.*Remedy",
            ),
            ("sac", {"conv_features": 8}, r"conv_features: expected None without an image.*received 8.*Remedy"),
            ("ac-iqn", {"conv_features": 8}, r"conv_features: expected None, since ac-iqn has settings of its own"),
            ("ppo", {"conv_features": 0}, r"conv_features: expected None or a positive integer, received 0"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, name, options, words):
        with pytest.raises(ValueError, match=words):
            make(name, options)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"hidden_sizes": (64, 0)}, r"hidden_sizes: expected None or positive integers, such as 64 64, received"),
            ({"hidden_sizes": 64}, r"hidden_sizes: expected None or positive integers.*Remedy: hidden_sizes=\(64,\)"),
            ({"hidden_sizes": (64.5,)}, r"hidden_sizes: expected None or positive integers, .* received \(64\.5,\)"),
            ({"activation": "swish"}, r"activation: expected one of .*received 'swish'"),
        ],
    )
    def test_values(self, options, words):
        with pytest.raises(ConfigError, match=words):
            KINDS["ppo"](**options)

    def test_of_a_system_with_networks_of_its_own(self):
        with pytest.raises(
            ConfigError, match=r"hidden_sizes: expected None, since fuel-breaks has settings of its own"
        ):
            FuelBreaksConfig(hidden_sizes=(64,))

    def test_of_networks_without_layer_norm(self):
        with pytest.raises(ConfigError, match=r"layer_norm: expected False, since iqn has settings"):
            KINDS["iqn"](layer_norm=True)

    def test_more_than_memory_holds(self):
        with pytest.raises(ValueError, match=r"expected settings that fit into memory"):
            make("ppo", {"hidden_sizes": (10**9, 10**9)})


class TestCommandLine:
    def run(self, *options):
        small = ("--device", "cpu", "--num-envs", "2", "--num-steps", "8", "--total-steps", "32", "--minibatches", "2")
        return main(["train", "ppo", *small, "--no-progress", *options])

    def test_several_words(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        words = [
            "--hidden-sizes",
            "32",
            "16",
            "8",
            "--critic-hidden-sizes",
            "16",
            "--activation",
            "elu",
            "--layer-norm",
        ]
        assert self.run(*words) == 0
        stored = json.loads((tmp_path / "runs/ppo-CartPole-0/config.json").read_text())
        assert [stored[name] for name in ("hidden_sizes", "critic_hidden_sizes")] == [[32, 16, 8], [16]]
        assert (stored["activation"], stored["layer_norm"]) == ("elu", True)
        auto = ["--resume", "auto", "--total-steps", "64", "--hidden-sizes", "32", "16", "8"]
        assert main(["train", "ppo", *auto, "--no-progress"]) == 0
        assert len(list((tmp_path / "runs").iterdir())) == 1
        again = self.run("--config", "runs/ppo-CartPole-0/config.json", "--seed", "1")
        assert again == 0
        other = json.loads((tmp_path / "runs/ppo-CartPole-1/config.json").read_text())
        assert other["hidden_sizes"] == [32, 16, 8]

    def test_words_that_are_no_widths(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit):
            self.run("--hidden-sizes", "64", "wide")
        error = capsys.readouterr().err
        assert re.search(r"--hidden-sizes: expected None or a tuple of integers, received \(64, 'wide'\)", error)
        assert not list(tmp_path.iterdir())
