"""A policy from a checkpoint: equal to the trainer's, any number of rows, no env; what is refused."""

import dataclasses
import json
import shutil

import pytest
import torch
from config_runs import KINDS, make
from states import run
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded
from torchrl.modules import ProbabilisticActor, ValueOperator

from torchrl_perf.envs import CartPole
from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.modules import EpsilonGreedy, GumbelCategorical
from torchrl_perf.runtime.files import CheckpointError
from torchrl_perf.trainers import PPOTrainer, load_policy, save_policy, train
from torchrl_perf.trainers.policies import GreedyPolicy, read_run
from torchrl_perf.trainers.run.saved_specs import SavedSpecs, plain_specs

VARIANTS = {name: (name, {}) for name in KINDS} | {
    "dqn, duelling": ("dqn", {"dueling": True}),
    "ddpg, OU noise": ("ddpg", {"noise": "ou"}),
    "iqn, cvar": ("iqn", {"risk": "cvar", "risk_eta": 0.5}),
    "rainbow, noise for each row": ("rainbow", {"noisy": "per_row"}),
    "ppo, continuous": ("ppo", {"env": "Pendulum"}),
    "ppo, bf16": ("ppo", {"precision": "bf16"}),
    "hybrid-ppo, one part": ("hybrid-ppo", {"env": "CartPole"}),
}
variants = pytest.mark.parametrize(("name", "options"), VARIANTS.values(), ids=VARIANTS.keys())


def learnt(name, options, iterations=6):
    """A trainer after some iterations."""
    return run(make(name, options), iterations)


@variants
def test_equals_the_trainers_policy_bit_for_bit(name, options, tmp_path):
    trainer = learnt(name, options)
    policy = load_policy(trainer.save(tmp_path / "checkpoint.pt"))
    root = trainer.env.reset()
    expected, acted = GreedyPolicy(trainer.policy)(root.clone()), policy(root.clone())
    for key in trainer.env.action_keys:
        assert torch.equal(acted.get(key), expected.get(key))
    assert policy.steps == 6 * trainer.config.batch_size
    trainer.close()


@variants
def test_acts_greedily_for_any_rows_without_an_env(name, options, tmp_path, monkeypatch):
    path = learnt(name, options, iterations=3).save(tmp_path / "checkpoint.pt")
    monkeypatch.setattr(AutoResetEnv, "__init__", None)
    policy = load_policy(path)
    zeros = policy.specs.observation_spec.zero().select(*policy.in_keys)[0]
    rows = zeros.expand(7, 3).clone()
    acted = policy(rows.clone())
    for key in policy.specs.action_keys:
        action = acted.get(key)
        assert action.shape[:2] == (7, 3)
        assert torch.equal(action, policy(rows.clone()).get(key))  # nothing is drawn
        assert not action.requires_grad
        torch.testing.assert_close(action, action[:1, :1].expand_as(action))  # the same for each row
    assert not [name for name, value in policy.named_parameters() if value.requires_grad]


@variants
def test_a_policy_is_saved_alone(name, options, tmp_path):
    trainer = learnt(name, options, iterations=3)
    whole = trainer.save(tmp_path / "checkpoint.pt")
    alone = save_policy(whole, tmp_path / "policy.pt")
    assert alone.stat().st_size < whole.stat().st_size / 2
    first, second = load_policy(whole), load_policy(alone)
    assert second.steps == first.steps
    root = trainer.env.reset()
    acted = [policy(root.clone()) for policy in (first, second)]
    assert all(torch.equal(acted[0].get(key), acted[1].get(key)) for key in trainer.env.action_keys)
    with pytest.raises(ValueError, match=r"checkpoint: expected"):
        trainer.load(alone)
    trainer.close()


class TestWhichCheckpoint:
    @pytest.fixture
    def run_dir(self, tmp_path):
        trainer = make("ppo", {"run_dir": str(tmp_path), "checkpoint_interval": 2, "log_interval": 1})
        run_dir = train(trainer, progress=False).run_dir
        trainer.close()
        return run_dir

    def test_the_newest_that_can_be_read_or_the_best(self, run_dir):
        files = sorted((run_dir / "checkpoints").glob("0*.pt"))
        assert load_policy(run_dir).path == files[-1]
        assert load_policy(str(files[0])).path == files[0]
        assert load_policy(run_dir, which="best").path.name == "best.pt"
        files[-1].write_bytes(b"cut off")
        assert load_policy(run_dir).path == files[-2]

    def test_a_file_alone_is_enough(self, run_dir, tmp_path):
        file = shutil.copy(load_policy(run_dir).path, tmp_path / "policy.pt")
        assert load_policy(file).config == load_policy(run_dir).config

    def test_settings_that_were_changed_in_the_folder_do_not_count(self, run_dir):
        settings = json.loads((run_dir / "config.json").read_text())
        (run_dir / "config.json").write_text(json.dumps({**settings, "hidden_size": 99}))
        assert load_policy(run_dir).config.hidden_size == 32

    def test_a_folder_without_checkpoints(self, run_dir):
        shutil.rmtree(run_dir / "checkpoints")
        with pytest.raises(FileNotFoundError, match=r"expected files <iteration>\.pt in .*, received .*Remedy: "):
            load_policy(run_dir)
        with pytest.raises(FileNotFoundError, match=r"marked as the best in .*, received none\. Remedy: "):
            load_policy(run_dir, which="best")

    def test_what_is_no_run(self, tmp_path):
        (tmp_path / "other").mkdir()
        with pytest.raises(ValueError, match=r"expected the folder of a run, with its config\.json, received"):
            load_policy(tmp_path / "other")
        with pytest.raises(FileNotFoundError, match=r"expected the folder of a run or one of its check"):
            load_policy(tmp_path / "nothing")
        with pytest.raises(ValueError, match=r"which: expected 'newest' or 'best', received 'last'"):
            load_policy(tmp_path, which="last")

    def test_another_kind_of_file(self, tmp_path):
        torch.save({"weights": torch.ones(2)}, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match=r"expected one that torchrl_perf has saved, received \['weights'\]"):
            load_policy(tmp_path / "w.pt")

    def test_one_of_an_earlier_release(self, run_dir, tmp_path):
        state = torch.load(load_policy(run_dir).path, weights_only=True)
        del state["settings"]
        torch.save(state, tmp_path / "old.pt")
        with pytest.raises(CheckpointError, match=r"with the settings and specs of its run, received"):
            load_policy(tmp_path / "old.pt")

    def test_an_algorithm_that_is_unknown(self, run_dir, tmp_path):
        state = torch.load(load_policy(run_dir).path, weights_only=True)
        state["settings"]["algorithm"] = "a3c"
        torch.save(state, tmp_path / "a3c.pt")
        with pytest.raises(CheckpointError, match=r"expected a checkpoint of one of ppo, .*, received one of 'a3c'"):
            load_policy(tmp_path / "a3c.pt")


class TestNetworksFromPython:
    def given(self):
        network = nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 2))
        head = TensorDictModule(network, ["observation"], ["logits"])
        actor = ProbabilisticActor(head, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
        return {"actor": actor, "critic": ValueOperator(nn.Linear(4, 1), in_keys=["observation"])}

    def test_are_refused_by_name_or_given_again(self, tmp_path):
        config = dataclasses.replace(make("ppo", {}).config, device="cpu")
        trainer = PPOTrainer(config, env=CartPole(4, device="cpu"), **self.given())
        path = trainer.save(tmp_path / "own.pt")
        with pytest.raises(CheckpointError, match=r"expected ppo's own network in actor, DeviceActor at its top, rec"):
            load_policy(path)
        policy = load_policy(path, actor=self.given()["actor"])
        root = trainer.env.reset()
        assert torch.equal(policy(root.clone())["action"], GreedyPolicy(trainer.policy)(root.clone())["action"])

    def test_another_network_than_the_one_that_was_given(self, tmp_path):
        trainer = make("dqn", {})
        path = trainer.save(tmp_path / "own.pt")
        other = EpsilonGreedy(nn.Linear(4, 2), spec=trainer.env.action_spec)
        with pytest.raises(CheckpointError, match=r"the network that was given in policy, Linear at"):
            load_policy(path, actor=other)


SPECS = {
    "choice": Categorical(3, shape=(2,), dtype=torch.int64),
    "hot": OneHot(4, shape=(2, 4)),
    "several": MultiCategorical([3, 5], shape=(2, 2), dtype=torch.int64),
    "box": Bounded(torch.tensor([[-1.5, -torch.inf]] * 2), torch.tensor([[0.1, 7.0]] * 2), shape=(2, 2)),
    "free": Unbounded(shape=(2, 3), dtype=torch.float64),
    "flag": Categorical(2, shape=(2, 1), dtype=torch.bool),
}


class TestSpecs:
    def test_come_back_as_they_were(self):
        source = CartPole(2, device="cpu")
        source.observation_spec = Composite(**SPECS, deep=Composite(box=SPECS["box"], shape=(2,)), shape=(2,))
        plain = json.loads(json.dumps(plain_specs(source)))
        made = SavedSpecs(plain)
        assert made.observation_spec == source.observation_spec[:1]
        assert made.action_spec == source.action_spec[:1]
        assert made.action_keys == ["action"]

    def test_of_a_checkpoint_are_those_of_the_env(self, tmp_path):
        trainer = make("sac", {})
        run = read_run(trainer.save(tmp_path / "checkpoint.pt"))
        assert run.specs.observation_spec == trainer.env.observation_spec[:1]
        assert run.specs.full_action_spec == trainer.env.full_action_spec[:1]
        assert set(run.specs.fake_tensordict().keys()) >= {"observation", "action", "done"}

    def test_an_unknown_action_is_refused_by_its_name(self):
        action = [{"key": ["a", "b"], "kind": "Strange", "shape": [1], "dtype": "torch.int64"}]
        with pytest.raises(ValueError, match=r"action_spec: expected one of .*, received Strange at \('a', 'b'\)\."):
            SavedSpecs({"observation": [], "action": action})


def test_greedy_policy_ignores_what_is_set_around_it():
    trainer = make("sac", {})
    greedy, root = GreedyPolicy(trainer.policy), trainer.env.reset()
    with torch.enable_grad():
        actions = [greedy(root.clone())["action"] for _ in range(2)]
    assert torch.equal(*actions)
    assert not actions[0].requires_grad
    assert isinstance(greedy(TensorDict({"observation": torch.zeros(3)}))["action"], torch.Tensor)
