"""The examples with envs on the CPU: a short run of each, with values where they can be checked."""

import pytest
import torch
from test_examples import load

pytestmark = pytest.mark.filterwarnings("ignore:.*settotalmass.*")  # a retired attribute in gymnasium's models


def test_sac_on_mujoco_runs(capsys):
    pytest.importorskip("mujoco")
    example = load("sac_mujoco")
    options = {"num_envs": 4, "groups": 2, "minibatch_size": 32, "updates_per_iteration": 1, "log_interval": 20}
    config = example.Config(total_steps=240, learning_starts=80, capacity=1000, device="cpu", **options)
    trainer = example.make_trainer(config)
    before = [p.clone() for p in trainer.policy.parameters()]
    for _ in range(30):
        trainer.step()
    assert trainer.updates == 10
    assert trainer.rows == 120
    assert any(not torch.equal(p, old) for p, old in zip(trainer.policy.parameters(), before, strict=True))
    trainer.close()
    example.main(config)
    assert capsys.readouterr().out.splitlines()[-1].startswith("mean return of the last 100 episodes: ")


def test_atari_stacks_are_those_of_the_env(monkeypatch):
    """Stacks made of single stored frames equal the ones that the env gave, across ends and the ring's wrap."""
    pytest.importorskip("ale_py")
    example = load("dqn_atari")
    options = {"minibatch_size": 40, "updates_per_iteration": 1, "log_interval": 50, "learning_starts": 40}
    config = example.Config(num_envs=2, total_steps=400, capacity=60, device="cpu", **options)
    envs = example.AtariVectorEnv(
        "pong", 2, stack_num=4, max_num_frames_per_episode=48, noop_max=9, autoreset_mode="SameStep"
    )
    monkeypatch.setattr(example, "make_envs", lambda config: envs)
    monkeypatch.setattr(example.DQNTrainer, "update", lambda self, sample: samples.append(sample))
    samples, checked = [], 0
    collector = example.HostCollector(
        envs, example.make_policy(example.host_specs(envs).action_spec, config), frames_per_batch=2, seed=0
    )
    trainer = example.StackedDQN(config.dqn, collector=collector)
    stored = []
    store = trainer.store
    monkeypatch.setattr(trainer, "store", lambda batch: (stored.append(batch.clone()), store(batch)))
    for _ in range(100):
        trainer.step()
        for row in samples[-1].unbind(0) if len(stored) % 10 == 0 and samples else ():
            slot, stream = divmod(int(row["index"]), 2)
            age = (len(stored) - 1 - slot) % 30
            if age < 27:  # behind the oldest rows there is nothing to stack
                original = stored[-1 - age][stream, 0]
                assert torch.equal(row["observation"], original["observation"])
                assert torch.equal(row["next", "observation"], original["next", "observation"])
                checked += 1
    assert checked > 200
    assert sum(int(batch["next", "done"].sum()) for batch in stored) > 4
    trainer.close()
