"""PPO with a memory: streams and their start states, every memory and kind of env, resume, policies, refusals."""

import dataclasses

import pytest
import torch
from states import assert_same_state, run
from tensordict import TensorDict
from torch import nn

from torchrl_perf.envs import StatelessCartPole
from torchrl_perf.modules import DeviceActor, GumbelCategorical
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.durotaxis.config import DurotaxisConfig
from torchrl_perf.trainers import HybridPPOConfig, HybridPPOTrainer, PPOConfig, PPOTrainer, load_policy, train
from torchrl_perf.trainers.config import ConfigError
from torchrl_perf.trainers.evaluation import evaluate_episodes
from torchrl_perf.trainers.export import ExportError, export_policy
from torchrl_perf.trainers.run.made_of import describe_networks

TINY = PPOConfig(
    env="StatelessCartPole",
    memory="gru",
    memory_size=8,
    num_envs=4,
    num_steps=12,
    total_steps=480,
    epochs=2,
    minibatches=2,
    hidden_size=16,
    normalize_observations=False,
    logger="none",
    device="cpu",
    mode="eager",
)
MEMORIES = ["gru", "lstm", "mingru", "lru"]


def make(kind=PPOTrainer, config=TINY, parts=None, **options):
    return kind(dataclasses.replace(config, **options), **(parts or {}))


def collected(trainer, iterations=3):
    """An estimated batch with streams that go on from the batch before, after some updates."""
    run(trainer, iterations)
    return trainer.advantage(trainer.collect())


@pytest.mark.parametrize("memory", ["gru", *(pytest.param(m, marks=pytest.mark.slow) for m in MEMORIES[1:])])
def test_compiled_iterations_equal_eager_ones(memory, traced):
    found = []
    for mode in ("eager", "compile"):
        trainer = run(make(memory=memory, mode=mode), 3)
        found.append([p.detach() for p in trainer.loss.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("memory", MEMORIES)
class TestEachMemory:
    def test_every_parameter_learns(self, memory):
        trainer = make(memory=memory)
        before = {name: p.detach().clone() for name, p in trainer.loss.named_parameters()}
        run(trainer, 2)
        same = [name for name, p in trainer.loss.named_parameters() if torch.equal(p, before[name])]
        assert not same
        assert {id(p) for p in trainer.policy.parameters()} < {id(p) for p in trainer.loss.parameters()}

    def test_streams_repeat_what_the_policy_did(self, memory):
        trainer = make(memory=memory)
        batch = collected(trainer)
        assert not batch["is_init"][:, 0].all()  # some streams go on from the batch before
        _, statistics = trainer.algorithm.minibatch_loss(trainer.algorithm.rows(batch))
        assert abs(float(statistics["kl_approx"])) < 1e-6
        assert float(statistics["clip_fraction"]) == 0

    def test_an_update_reads_the_states_that_streams_start_from(self, memory):
        trainer = make(memory=memory)
        rows = trainer.algorithm.rows(collected(trainer))
        for key in trainer.algorithm.streams.state_keys:
            assert rows[key].shape[:2] == (4, 1)
            rows[key].add_(1.0)
        _, statistics = trainer.algorithm.minibatch_loss(rows)
        assert abs(float(statistics["kl_approx"])) > 1e-6

    def test_values_are_those_of_the_step_by_step_critic(self, memory):
        trainer = make(memory=memory)
        batch = collected(trainer)
        states = {key: batch[key][:, 0] for key in trainer.algorithm.streams.state_keys}
        for t in range(TINY.num_steps):
            row = TensorDict(
                {"observation": batch["observation"][:, t], "is_init": batch["is_init"][:, t], **states}, [4]
            )
            with torch.no_grad():
                row = trainer.critic(row)
            torch.testing.assert_close(row["state_value"], batch["state_value"][:, t], rtol=1e-4, atol=1e-5)
            states = {key: row["next", key] for key in states}
            final = TensorDict({"observation": batch["next", "observation"][:, t], **states}, [4])
            final["is_init"] = torch.zeros(4, 1, dtype=torch.bool)
            with torch.no_grad():
                value = trainer.critic(final)["state_value"]
            torch.testing.assert_close(value, batch["next", "state_value"][:, t], rtol=1e-4, atol=1e-5)

    def test_resume_is_bitwise(self, memory, tmp_path):
        trainer = run(make(memory=memory), 3)
        path = trainer.save(tmp_path / "checkpoint.pt")
        expected = run(trainer, 2).state_dict()
        resumed = make(memory=memory)
        resumed.load(path)
        assert_same_state(run(resumed, 2).state_dict(), expected)

    def test_host_is_never_asked(self, memory):
        trainer = run(make(memory=memory), 2)
        with no_host_sync():
            trainer.iteration()

    def test_a_loaded_policy_is_the_trainers(self, memory, tmp_path):
        trainer = make(memory=memory, run_dir=str(tmp_path), logger="csv")
        train(trainer, progress=False)
        policy = load_policy(trainer.save(tmp_path / "checkpoint.pt"))
        td = TensorDict({"observation": torch.randn(3, 2), "is_init": torch.ones(3, 1, dtype=torch.bool)}, [3])
        for _ in range(4):
            acted, expected = policy(td.clone()), trainer.policy(td.clone())
            assert torch.equal(acted["logits"], expected["logits"])
            carried = {key: acted["next", key] for key in trainer.algorithm.streams.state_keys}
            td = TensorDict({"observation": torch.randn(3, 2), "is_init": torch.zeros(3, 1, dtype=torch.bool)}, [3])
            td.update(carried)
        episodes = evaluate_episodes(policy, StatelessCartPole(5, device="cpu"), seed=3)
        assert len(episodes.returns) == 5
        assert episodes.returns == evaluate_episodes(policy, StatelessCartPole(5, device="cpu"), seed=3).returns


@pytest.mark.parametrize(
    "options",
    [
        {"env": "StatelessPendulum"},
        {"env": "TMaze"},
        {"env": "RepeatPrevious"},
        {"env": "CartPole-v1"},
        {"normalize_observations": True, "normalize_rewards": True},
        {"kl_estimate": "closed_form", "target_kl": 1e9},
        {"loss": "torchrl"},
        {"hidden_sizes": (16, 8), "critic_hidden_sizes": (16,), "layer_norm": True},
        {"env": "StatelessPendulum", "policy_scale": "state_dependent"},
        {"eval_interval": 1, "eval_episodes": 3},
        {"on_nan": "skip"},
        {"precision": "bf16"},
        {"precision": "ieee", "memory": "lstm"},
    ],
    ids="-".join,
)
def test_settings_work_together(options, tmp_path):
    trainer = make(**options, total_steps=96, run_dir=str(tmp_path))
    result = train(trainer, progress=False)
    assert result.steps == 96
    assert all(bool(p.isfinite().all()) for p in trainer.loss.parameters())


def test_actions_of_several_parts():
    config = HybridPPOConfig.without_task(
        **{**dataclasses.asdict(TINY), "env": "HybridTarget", "num_steps": 8, "total_steps": 320}
    )
    trainer = run(make(HybridPPOTrainer, config), 2)
    batch = trainer.advantage(trainer.collect())
    _, statistics = trainer.algorithm.minibatch_loss(trainer.algorithm.rows(batch))
    assert abs(float(statistics["kl_approx"])) < 1e-6


@pytest.mark.parametrize("burn_in", [0, 3])
def test_parts_of_a_minibatch_have_its_gradient(burn_in):
    trainer = make(minibatches=1, burn_in=burn_in)
    rows = trainer.algorithm.rows(collected(trainer))
    index, gradients = torch.arange(4), []
    for parts in (1, 2):
        trainer._gradients(rows, index, parts)
        gradients.append([p.grad.clone() for p in trainer.loss.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("burn_in", [0, 4])
@pytest.mark.parametrize("memory", MEMORIES)
def test_an_earlier_episode_changes_nothing_in_a_later_one(memory, burn_in):
    trainer = make(memory=memory, burn_in=burn_in)
    streams = trainer.algorithm.rows(collected(trainer))
    streams["is_init"].zero_()
    streams["is_init"][:, 6] = True
    changed = streams.clone()
    changed["observation"][:, :6] += 1.0
    for key in trainer.algorithm.streams.state_keys:
        changed[key] += 1.0
    found, others = (trainer.algorithm.streams.read(each)["memory_features"] for each in (streams, changed))
    assert torch.equal(found[:, 6 - burn_in :], others[:, 6 - burn_in :])
    assert not torch.isclose(found[:, : 6 - burn_in], others[:, : 6 - burn_in]).any()
    changed["observation"].requires_grad_()
    later = trainer.algorithm.streams.read(changed)["memory_features"][:, 6 - burn_in :]
    (gradient,) = torch.autograd.grad(later.sum(), changed["observation"])
    assert torch.equal(gradient[:, :6], torch.zeros_like(gradient[:, :6]))
    assert gradient[:, 6:].any()


class TestBurnIn:
    def test_its_steps_change_states_and_are_not_learnt_from(self):
        trainer = make(burn_in=3)
        streams = trainer.algorithm.rows(collected(trainer))
        streams["is_init"].zero_()
        observation = streams["observation"].requires_grad_()
        rows = trainer.algorithm.streams.read(streams)
        whole = make().algorithm.streams
        whole.trunk.load_state_dict(trainer.algorithm.streams.trunk.state_dict())
        assert torch.equal(rows["memory_features"], whole.read(streams)["memory_features"][:, 3:])
        assert torch.equal(rows["advantage"], streams["advantage"][:, 3:])
        (gradient,) = torch.autograd.grad(rows["memory_features"].sum(), observation)
        assert torch.equal(gradient[:, :3], torch.zeros_like(gradient[:, :3]))
        assert gradient[:, 3:].any()

    def test_advantages_are_normalised_over_what_is_learnt_from(self):
        trainer = make(burn_in=3, minibatches=1)
        rows, index = trainer.algorithm.rows(collected(trainer)), torch.arange(4)
        whole = trainer.algorithm.whole(rows, index)
        learnt = whole.entries["advantage"][:, 3:]
        torch.testing.assert_close(learnt.mean(), torch.zeros(()), atol=1e-6, rtol=0)
        torch.testing.assert_close(learnt.std(), torch.ones(()))
        assert whole.counts.tolist() == [9.0] * 4

    def test_resume_is_bitwise(self, tmp_path):
        trainer = run(make(burn_in=3), 2)
        path = trainer.save(tmp_path / "checkpoint.pt")
        expected = run(trainer, 1).state_dict()
        resumed = make(burn_in=3)
        resumed.load(path)
        assert_same_state(run(resumed, 1).state_dict(), expected)


@pytest.mark.slow
def test_a_memory_solves_what_no_policy_without_one_can():
    """The sign of a maze of three steps: 4 with a memory, 1.95 at best without."""
    found = {}
    for memory, size in (("gru", 16), ("none", 128)):
        options = {"num_envs": 32, "num_steps": 16, "learning_rate": 5e-3, "epochs": 4, "memory_size": size}
        trainer = make(env="TMaze", env_args=("length=3",), memory=memory, total_steps=40_960, **options, seed=1)
        run(trainer, 40)
        found[memory] = float(trainer.episodes.mean_return)
    assert found["gru"] > 3.5
    assert found["none"] < 2.6


def test_a_checkpoint_says_what_it_said_before_the_encoder_was_one_launch():
    trainer = make()
    assert describe_networks(trainer.algorithm.networks)["actor"]["module.0.module"] == "MixedSequential"


def test_minibatches_that_are_left_out_divide_the_envs():
    assert PPOConfig(env="NoPreset-v0").minibatches == 32
    assert PPOConfig(env="NoPreset-v0", memory="gru").minibatches == 8  # of 8 envs
    assert PPOConfig(env="NoPreset-v0", memory="gru", num_envs=12).minibatches == 4
    assert PPOConfig(env="CartPole", memory="gru") == dataclasses.replace(PPOConfig(), memory="gru")
    with pytest.raises(ConfigError, match=r"^minibatches: expected a divisor of num_envs = 8 .*received 32"):
        PPOConfig(env="NoPreset-v0", memory="gru", minibatches=32)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"minibatches": 3, "num_steps": 12}, r"minibatches: expected a divisor of num_envs = 4 with memory='gru'"),
            ({"shared_trunk": True}, r"shared_trunk: expected False with memory='gru'.*received True"),
            ({"burn_in": 12}, r"burn_in: expected fewer steps than num_steps = 12.*received 12"),
            ({"burn_in": -1}, r"burn_in: expected 0 or a positive integer, received -1"),
            ({"memory_size": 0}, r"memory_size: expected a positive integer, received 0"),
            ({"memory": "rnn"}, r"memory: expected .*received 'rnn'"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ConfigError, match=f"(?s){message}.*Remedy"):
            dataclasses.replace(TINY, **options)

    @pytest.mark.parametrize(("options", "usual"), [({"memory_size": 16}, 64), ({"burn_in": 3}, 0)])
    def test_settings_of_a_memory_that_is_not_there(self, options, usual):
        (name, value), *_ = options.items()
        with pytest.raises(ValueError, match=rf"{name}: expected {usual} without a memory.*received {value}.*Remedy"):
            make(**{"memory": "none", "memory_size": 64, **options})
        make(memory="none", memory_size=64).close()  # as the task's preset has it

    def test_networks_from_python(self):
        actor = DeviceActor(nn.Linear(2, 2), distribution_class=GumbelCategorical, param_keys=["logits"])
        with pytest.raises(ValueError, match=r"memory: expected with 'gru' networks of .*received actor from.*Remedy"):
            make(parts={"actor": actor})

    def test_a_system_with_networks_of_its_own(self):
        with pytest.raises(ConfigError, match=r"memory: expected .*received 'gru'.*Remedy"):
            DurotaxisConfig(memory="gru")

    def test_a_memory_of_another_size(self, tmp_path):
        path = make().save(tmp_path / "checkpoint.pt")
        with pytest.raises(ValueError, match=r"expected in actor .*gru.bias_hh_l0: \[48\], received \[24\].*Remedy"):
            make(memory_size=16).load(path)

    def test_an_export(self, tmp_path):
        policy = load_policy(make().save(tmp_path / "checkpoint.pt"))
        with pytest.raises(ExportError, match=r"received one that reads \['recurrent_state'.*state of a memory"):
            export_policy(policy, tmp_path, form="torch")
