"""A trunk below actor and critic, and the scale of a Gaussian policy: learnt, loaded, exported, resumed, refused."""

import pytest
import torch
from config_runs import KINDS, make
from states import run
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded, Composite

from torchrl_perf.envs import CartPole
from torchrl_perf.systems.durotaxis.config import DurotaxisConfig
from torchrl_perf.trainers import PPOTrainer, load_policy, make_actor, make_critic
from torchrl_perf.trainers.actor_critic import trunk_of
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.export import export_policy
from torchrl_perf.trainers.policies import GreedyPolicy
from torchrl_perf.trainers.run.saved_specs import SavedSpecs, plain_specs

RUNS = {
    "trunk": ("ppo", {"shared_trunk": True}),
    "trunk, normalised": ("ppo", {"shared_trunk": True, "normalize_observations": True, "layer_norm": True}),
    "trunk, one layer, continuous": ("ppo", {"shared_trunk": True, "hidden_sizes": (16,), "env": "Pendulum"}),
    "trunk, bf16": ("ppo", {"shared_trunk": True, "precision": "bf16"}),
    "trunk, TorchRL's loss": ("ppo", {"shared_trunk": True, "loss": "torchrl"}),
    "trunk of an action of parts": ("hybrid-ppo", {"shared_trunk": True}),
    "scale by state": ("ppo", {"policy_scale": "state_dependent", "env": "Pendulum"}),
    "scale by state on a trunk": ("ppo", {"policy_scale": "state_dependent", "env": "Pendulum", "shared_trunk": True}),
    "scales of parts": ("hybrid-ppo", {"policy_scale": "state_independent"}),
}
runs = pytest.mark.parametrize(("name", "options"), RUNS.values(), ids=RUNS.keys())


def stepped(name, options, iterations=3):
    """A trainer after some iterations."""
    return run(make(name, options), iterations)


@runs
def test_a_loaded_policy_acts_as_the_trainers(name, options, tmp_path):
    trainer = stepped(name, options)
    policy = load_policy(trainer.save(tmp_path / "checkpoint.pt"))
    root = trainer.env.reset()
    expected, acted = GreedyPolicy(trainer.policy)(root.clone()), policy(root.clone())
    for key in trainer.env.action_keys:
        assert torch.equal(acted.get(key), expected.get(key))
    trainer.close()


@runs
def test_a_resumed_run_learns_the_same(name, options, tmp_path):
    whole = stepped(name, options, iterations=6)
    half = stepped(name, options)
    path = half.save(tmp_path / "checkpoint.pt")
    half.close()
    resumed = make(name, options)
    resumed.load(path)
    for _ in range(3):
        resumed.step()
        resumed.iterations_done += 1
    for one, other in zip(whole.loss.parameters(), resumed.loss.parameters(), strict=True):
        assert torch.equal(one, other)
    for trainer in (whole, resumed):
        trainer.close()


@pytest.mark.parametrize("run", ["trunk, normalised", "scale by state on a trunk", "scales of parts"])
def test_an_exported_policy_acts_the_same(run, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    trainer = stepped(*RUNS[run])
    made = export_policy(load_policy(trainer.save(tmp_path / "checkpoint.pt")), tmp_path)
    trainer.close()
    assert (made.rows, (tmp_path / "policy.onnx").is_file()) == (1000, True)
    assert made.difference <= 1e-5


class TestTrunk:
    def test_both_losses_train_it_and_it_is_stepped_once(self):
        trainer = make("ppo", {"shared_trunk": True})
        trunk = trunk_of(trainer.actor).trunk
        assert trunk is trunk_of(trainer.critic).trunk
        held = [id(value) for group in trainer.optimizer.param_groups for value in group["params"]]
        assert len(held) == len(set(held))
        assert {id(value) for value in trunk.parameters()} < set(held)
        batch = trainer.advantage(trainer.collect())
        losses = trainer.loss(batch.reshape(-1))
        for loss in ("loss_objective", "loss_critic"):
            gradients = torch.autograd.grad(losses[loss], list(trunk.parameters()), retain_graph=True)
            assert all(bool((gradient != 0).any()) for gradient in gradients)
        trainer.close()

    def test_heads_are_one_layer_each(self):
        trainer = make("ppo", {"shared_trunk": True, "hidden_sizes": (24, 12)})
        for network, size in ((trainer.actor, 2), (trainer.critic, 1)):
            linear = [layer for layer in trunk_of(network).head.modules() if isinstance(layer, nn.Linear)]
            assert [(layer.in_features, layer.out_features) for layer in linear] == [(12, size)]
        apart = make("ppo", {"hidden_sizes": (24, 12)})
        count = [sum(value.numel() for value in one.loss.parameters()) for one in (trainer, apart)]
        assert count[1] - count[0] == 4 * 24 + 24 + 24 * 12 + 12
        for one in (trainer, apart):
            one.close()

    def test_convolutions_are_shared(self):
        specs = Composite(pixels=Bounded(0, 255, (4, 3, 12, 12), dtype=torch.uint8), shape=(4,))
        action = Composite(action=CartPole(1).action_spec.expand(4), shape=(4,))
        env = SavedSpecs(plain_specs(_Specs(specs, action)), torch.device("cpu"))
        config = KINDS["ppo"].without_task(shared_trunk=True, hidden_size=16, device="cpu")
        actor = make_actor(env, config)
        critic = make_critic(env, config, trunk_of(actor))
        shared = {id(value) for value in actor.parameters()} & {id(value) for value in critic.parameters()}
        convolutions = [module for module in actor.modules() if isinstance(module, nn.Conv2d)]
        assert len(convolutions) == 3
        assert {id(layer.weight) for layer in convolutions} < shared
        rows = TensorDict({"pixels": torch.zeros(5, 3, 12, 12, dtype=torch.uint8)}, [5])
        assert critic(rows)["state_value"].shape == (5, 1)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"critic_hidden_sizes": (16,)}, r"critic_hidden_sizes: expected None with shared_trunk.*received \(16,\)"),
            ({"hidden_sizes": ()}, r"hidden_sizes: expected one width at least with shared_trunk.*Remedy"),
        ],
    )
    def test_settings_that_do_not_fit_it(self, options, words):
        with pytest.raises(ConfigError, match=words):
            KINDS["ppo"](shared_trunk=True, **options)

    def test_networks_from_python(self):
        env = CartPole(4)
        config = KINDS["ppo"].without_task(shared_trunk=True, num_envs=4, num_steps=8, minibatches=2, device="cpu")
        with pytest.raises(ValueError, match=r"shared_trunk: expected the default actor and critic, received critic"):
            PPOTrainer(config, env=env, critic=make_critic(env, config))


class _Specs:
    """An env's specs alone."""

    def __init__(self, observation, action):
        self.observation_spec, self.full_action_spec = observation, action
        self.batch_size, self.action_keys, self.device = observation.shape, ["action"], torch.device("cpu")


class TestScale:
    def test_of_a_continuous_action(self):
        found = {}
        for scale in ("auto", "state_independent", "state_dependent"):
            trainer = stepped("ppo", {"env": "Pendulum", "policy_scale": scale})
            scales = trainer.actor(trainer.env.reset())["scale"]
            found[scale] = bool((scales == scales[:1]).all())
            trainer.close()
        assert found == {"auto": True, "state_independent": True, "state_dependent": False}

    def test_of_an_action_of_parts(self):
        found = {}
        for scale in ("auto", "state_independent", "state_dependent"):
            trainer = stepped("hybrid-ppo", {"policy_scale": scale})
            written = trainer.actor(trainer.env.reset())
            (scales,) = [value for key, value in written.items(True, True) if key[-1] == "scale"]
            found[scale] = bool((scales == scales[:1]).all())
            trainer.close()
        assert found == {"auto": False, "state_independent": True, "state_dependent": False}

    def test_it_is_learnt(self):
        trainer = stepped("hybrid-ppo", {"policy_scale": "state_independent"})
        (scale,) = [value for name, value in trainer.actor.named_parameters() if name.endswith("log_scale")]
        bounded = [leaf for leaf in trainer.env.full_action_spec.values(True, True) if isinstance(leaf, Bounded)]
        assert scale.shape == (sum(leaf.shape[-1] for leaf in bounded),)
        assert bool((scale != 0).all())
        trainer.close()

    def test_it_begins_where_it_is_said_to(self):
        trainer = make("ppo", {"env": "Pendulum", "initial_scale": 0.25})
        scales = trainer.actor(trainer.env.reset())["scale"]
        torch.testing.assert_close(scales, torch.full_like(scales, 0.25))
        trainer.close()

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("ppo", {"env": "CartPole"}),
            ("ppo", {"env": "Pendulum", "policy_scale": "state_dependent"}),
            ("hybrid-ppo", {}),
        ],
        ids=["choices", "by state", "parts"],
    )
    def test_no_start_of_a_scale_that_is_not_learnt_numbers(self, name, settings):
        with pytest.raises(ValueError, match=r"initial_scale: expected 1.0.*received 0.25. Remedy"):
            make(name, {**settings, "initial_scale": 0.25})

    @pytest.mark.parametrize("scale", ["state_independent", "state_dependent"])
    @pytest.mark.parametrize("name", ["ppo", "hybrid-ppo"])
    def test_of_choices(self, name, scale):
        with pytest.raises(ValueError, match=rf"policy_scale: expected 'auto' for an action of choices.*'{scale}'"):
            make(name, {"env": "CartPole", "policy_scale": scale})

    def test_of_a_system_with_networks_of_its_own(self):
        words = r"policy_scale: expected 'auto', since durotaxis has settings of its own"
        with pytest.raises(ConfigError, match=words):
            DurotaxisConfig(policy_scale="state_dependent")


@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "pqn"])
@pytest.mark.parametrize("field", ["shared_trunk", "policy_scale", "initial_scale"])
def test_algorithms_without_them_say_so(name, field):
    with pytest.raises(ConfigError, match=f"{field}: unknown setting"):
        KINDS[name](**{field: True})
