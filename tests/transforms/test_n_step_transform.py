"""NStepTransform: keys, episode ends, agreement with TorchRL where that is right."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, MultiStepTransform, TransformedEnv

from torchrl_perf.envs import CartPole
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import NStepTransform


def make_batch(N, T, done, device="cpu", **extra):
    """Observation t at step t, next t + 1, reward 1; done steps are terminated."""
    time = torch.arange(T, device=device).view(1, T, 1).expand(N, T, 1).float()
    done = done.to(device)
    following = {"observation": time + 1, "reward": torch.ones(N, T, 1, device=device), "done": done, **extra}
    following |= {"terminated": done.clone(), "truncated": torch.zeros_like(done)}
    return TensorDict({"observation": time, "next": following}, [N, T], device=device, names=[None, "time"])


def ends_at(N, T, *steps):
    done = torch.zeros(N, T, 1, dtype=torch.bool)
    done[:, list(steps)] = True
    return done


def test_textbook_numbers(device):
    out = NStepTransform(3, 0.5)(make_batch(1, 8, ends_at(1, 8, 2), device))
    assert out["next", "reward"].flatten().tolist() == [1.75, 1.5, 1.0, 1.75, 1.75, 1.75, 1.5, 1.0]
    assert out["next", "observation"].flatten().tolist() == [3, 3, 3, 6, 7, 8, 8, 8]
    assert out["next", "terminated"].flatten().tolist() == [True] * 3 + [False] * 5
    assert out["steps_to_next_obs"].flatten().tolist() == [3, 2, 1, 3, 3, 3, 2, 1]
    assert out["gamma"].flatten().tolist() == [0.125, 0.25, 0.5, 0.125, 0.125, 0.125, 0.25, 0.5]
    value = out["next", "observation"]
    target = out["next", "reward"] + out["gamma"] * torch.where(out["next", "terminated"], 0.0, value)
    assert target.flatten()[:4].tolist() == [1.75, 1.5, 1.0, 2.5]


def test_the_callers_batch_is_untouched():
    batch = make_batch(2, 5, ends_at(2, 5, 1))
    before = batch.clone()
    NStepTransform(3, 0.9)(batch.lock_())
    assert (batch == before).all()
    assert set(batch.keys(True, True)) == set(before.keys(True, True))


def test_agrees_with_torchrl_away_from_episode_ends():
    """TorchRL's rewards, next observations and steps are right; its flags are not, where a window ends early."""
    batch = make_batch(3, 12, torch.rand(3, 12, 1) < 0.25)
    batch["next", "reward"] = torch.randn(3, 12, 1)
    theirs = MultiStepTransform(3, 0.9).inv(batch.clone())  # holds the last three steps back
    ours = NStepTransform(3, 0.9)(batch)[:, :9]
    torch.testing.assert_close(ours["next", "reward"], theirs["next", "reward"])
    torch.testing.assert_close(ours["next", "observation"], theirs["next", "observation"])
    assert ours["steps_to_next_obs"].squeeze(-1).equal(theirs["steps_to_next_obs"])
    torch.testing.assert_close(ours["gamma"].squeeze(-1), theirs["gamma"])


def test_one_step_changes_nothing_but_adds_the_keys():
    batch = make_batch(2, 4, ends_at(2, 4, 1))
    out = NStepTransform(1, 0.9)(batch)
    assert (out.select(*batch.keys()) == batch).all()
    assert (out["steps_to_next_obs"] == 1).all()


@pytest.mark.parametrize("done", [torch.zeros(1, 1, 1, dtype=torch.bool), torch.ones(2, 3, 1, dtype=torch.bool)])
def test_degenerate_batches(done):
    """One step, and every step done: single steps in both."""
    out = NStepTransform(5, 0.9)(make_batch(*done.shape[:2], done))
    assert (out["next", "reward"] == 1).all()
    assert (out["steps_to_next_obs"] == 1).all()


def test_agents_rewards_and_images_follow():
    image = torch.arange(5, dtype=torch.uint8).view(1, 5, 1, 1, 1).expand(2, 5, 3, 2, 2)
    batch = make_batch(2, 5, ends_at(2, 5, 3), pixels=image)
    batch["next", "agents"] = TensorDict({"reward": torch.ones(2, 5, 4, 1)}, [2, 5])
    out = NStepTransform(2, 0.5, reward_keys=[("agents", "reward")])(batch)
    assert out["next", "agents", "reward"].shape == (2, 5, 4, 1)
    assert out["next", "agents", "reward"][0, :, 0, 0].tolist() == [1.5, 1.5, 1.5, 1.0, 1.0]
    assert out["next", "pixels"].dtype == torch.uint8
    assert out["next", "pixels"][0, :, 0, 0, 0].tolist() == [1, 2, 3, 3, 4]
    assert (out["next", "reward"].flatten(0, 1).squeeze(-1) == 1).all()


def test_in_a_replay_buffer_extends_transform_and_samples_pass():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(16, ndim=2), transform=Compose(NStepTransform(3, 0.5)), batch_size=8
    )
    buffer.extend(make_batch(2, 8, ends_at(2, 8, 2)))
    sample = buffer.sample()
    steps = sample["steps_to_next_obs"].squeeze(-1)
    torch.testing.assert_close(sample["next", "reward"].squeeze(-1), 2 - 2.0 ** (1 - steps))


def test_a_stream_without_environments():
    """A [T] batch whose dimension is named "time"."""
    batch = make_batch(1, 5, ends_at(1, 5, 1))[0]
    assert batch.names == ["time"]
    assert NStepTransform(2, 0.5)(batch)["next", "reward"].flatten().tolist() == [1.5, 1.0, 1.5, 1.5, 1.0]


def test_no_host_wait(device):
    batch = make_batch(4, 6, torch.rand(4, 6, 1) < 0.3, device)
    transform = NStepTransform(3, 0.9)
    transform(batch)
    with no_host_sync():
        transform(batch)


class TestErrors:
    def test_flat_rows(self):
        with pytest.raises(ValueError, match="no time order"):
            NStepTransform(2, 0.9)(make_batch(2, 3, ends_at(2, 3, 1)).reshape(-1))

    @pytest.mark.parametrize(("n_steps", "gamma"), [(0, 0.9), (2, 1.5), (2, -0.1)])
    def test_numbers_out_of_range(self, n_steps, gamma):
        with pytest.raises(ValueError, match="expected"):
            NStepTransform(n_steps, gamma)

    def test_missing_keys_are_named(self):
        batch = make_batch(2, 3, ends_at(2, 3, 1))
        with pytest.raises(KeyError, match=r"'cost'.*reward"):
            NStepTransform(2, 0.9, reward_keys=["cost"])(batch)
        with pytest.raises(KeyError, match="'next'"):
            NStepTransform(2, 0.9)(batch.exclude("next"))

    def test_a_flag_for_each_agent(self):
        batch = make_batch(2, 3, ends_at(2, 3, 1), ended=torch.zeros(2, 3, 4, 1, dtype=torch.bool))
        with pytest.raises(ValueError, match="one flag a step"):
            NStepTransform(2, 0.9, done_key="ended")(batch)

    def test_in_an_environment(self):
        env = TransformedEnv(CartPole(2), NStepTransform(2, 0.9))
        with pytest.raises(RuntimeError, match="replay buffer"):
            env.rollout(2)


def test_only_a_replay_buffers_samples_pass_untouched():
    batch = make_batch(2, 5, ends_at(2, 5, 1))
    expected = NStepTransform(3, 0.5)(batch)
    assert (NStepTransform(3, 0.5).eval()(batch) == expected).all()  # by itself, in eval mode
    assert (Compose(NStepTransform(3, 0.5))(batch) == expected).all()  # in the chain of a script


def test_a_stream_of_another_name_is_refused():
    stream = make_batch(1, 5, ends_at(1, 5, 1))[0]
    stream.names = ["row"]
    with pytest.raises(ValueError, match="no time order"):
        NStepTransform(2, 0.5)(stream)
