"""OptionSegments and OptionState: transitions against a loop on collected steps, carry-over, replay, bad input."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.modules import OptionController, OptionSet
from torchrl_perf.replay import OptionReplay
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import OptionSegments, OptionState

N, GAMMA = 3, 0.9


class Policy(TensorDictModuleBase):
    """A controller of three options, the action of CartPole being whether the option is the first."""

    def __init__(self, env):
        super().__init__()
        options = OptionSet(("a", "b", "c"), termination=self.ends, min_duration=(1, 2, 3))
        self.controller = OptionController(nn.Linear(4, 3, device=env.device), options, example=env.fake_tensordict())
        self.in_keys = self.controller.in_keys
        self.out_keys = [*self.controller.out_keys, "action"]

    @staticmethod
    def ends(td):
        share = torch.linspace(0.5, 0.1, 3, device=td.device)  # a tensor made from numbers would be a copy each time
        return share.expand(*td.shape, 3)

    def forward(self, td):
        td = self.controller(td)
        return td.set("action", (td["active_option"] == 0).long())


def make(device="cpu", steps=12, max_episode_steps=17, mode="eager"):
    env = TransformedEnv(CartPole(N, device=device, max_episode_steps=max_episode_steps), OptionState(3))
    return DeviceCollector(env, Policy(env), frames_per_batch=N * steps, mode=mode)


def numbered(batch, begin):
    """A batch whose observations and rewards tell env and absolute time."""
    batch = batch.clone()
    time = begin + torch.arange(batch.shape[1], device=batch.device, dtype=torch.float32)
    stream = torch.arange(N, device=batch.device, dtype=torch.float32).unsqueeze(-1)
    place = torch.stack(torch.broadcast_tensors(stream, time), -1)
    batch["observation"] = place
    batch["next", "observation"] = place + torch.tensor([0.0, 0.5], device=batch.device)
    batch["next", "reward"] = torch.randn(N, batch.shape[1], 1, device=batch.device)
    return batch


def by_loop(batch):
    """Transitions of one long batch, step by step: (env, boundary) -> what the option's transition holds."""
    found = {}
    for n in range(N):
        first = None
        for t in range(batch.shape[1]):
            if batch["option_start"][n, t]:
                if first is not None:
                    found[n, t] = transition(batch, n, first, t)
                first = t
            if first is not None and batch["next", "done"][n, t]:
                found[n, t + 1] = transition(batch, n, first, t + 1)
                first = None
    return found


def transition(batch, n, first, end):
    last = end - 1
    return {
        "observation": batch["observation"][n, first],
        "active_option": batch["active_option"][n, first],
        "option_log_prob": batch["option_log_prob"][n, first],
        "option_available": batch["option_available"][n, first],
        ("next", "observation"): batch["next", "observation"][n, last],
        ("next", "reward"): sum(GAMMA**i * batch["next", "reward"][n, first + i] for i in range(end - first)),
        ("next", "terminated"): batch["next", "terminated"][n, last],
        ("next", "done"): batch["next", "done"][n, last],
        ("next", "option"): batch["next", "option"][n, last],
        ("next", "option_age"): batch["next", "option_age"][n, last],
        "steps_to_next_obs": torch.tensor([end - first], device=batch.device),
        "gamma": torch.tensor([GAMMA ** (end - first)], device=batch.device),
    }


class TestSegments:
    @pytest.mark.parametrize("cuts", [(36,), (12, 12, 12), (1,) * 36, (5, 1, 30)])
    def test_against_the_loop_however_the_stream_is_cut(self, cuts, device):
        batch = numbered(make(device, steps=36).collect(), 0)
        expected = {place: entry for place, entry in by_loop(batch).items() if place[1] < 36}
        assert any(int(entry["steps_to_next_obs"]) > 4 for entry in expected.values())
        assert any(bool(entry["next", "done"]) for entry in expected.values())
        segments = OptionSegments(batch[:, :1], gamma=GAMMA)
        before = batch.clone()
        parts = [segments(part) for part in batch.split(cuts, 1)]
        assert (before == batch).all()
        found = torch.cat(parts, 1)
        assert {(n, t) for n, t in found["mask"].nonzero().tolist()} == set(expected)
        for (n, t), entry in expected.items():
            for key, value in entry.items():
                torch.testing.assert_close(found.get(key)[n, t], value, rtol=1e-5, atol=1e-6)

    def test_random_steps_belong_to_no_option(self):
        env = TransformedEnv(CartPole(N, device="cpu"), OptionState(3))
        collector = DeviceCollector(env, Policy(env), frames_per_batch=N * 6, init_random_frames=N * 8, mode="eager")
        segments = OptionSegments(collector.batch, gamma=GAMMA)
        assert not segments(collector.collect())["mask"].any()
        batch = collector.collect()
        assert batch["option_start"][:, 2].all()
        assert not batch["option_start"][:, :2].any()
        found = segments(batch)
        assert not found["mask"][:, :3].any()
        assert (found["steps_to_next_obs"][found["mask"]] <= 4).all()

    def test_state_dict_and_restart(self):
        collector = make(steps=5)
        first, second = collector.collect().clone(), collector.collect().clone()
        one, other = (OptionSegments(first, gamma=GAMMA) for _ in range(2))
        one(first)
        other.load_state_dict(one.state_dict())
        assert (one(second) == other(second)).all()
        other.restart()
        assert not other(second)["mask"][:, 0].any()

    def test_no_host_read_and_fixed_shapes(self, device):
        collector = make(device)
        collector.collect()
        segments = OptionSegments(collector.batch, gamma=GAMMA)
        choices = OptionReplay(segments(collector.batch), capacity=100, batch_size=8)
        with no_host_sync(device):
            batch = collector.collect()
            found = segments(batch)
            choices.extend(found)
            sample = choices.sample()
        assert found.shape == batch.shape
        assert sample.shape == (8,)

    @pytest.mark.slow_compiled
    def test_variants_agree(self, variant):
        collector = make(variant.device)
        batches = [collector.collect().clone() for _ in range(3)]
        one, other = (OptionSegments(batches[0], gamma=GAMMA) for _ in range(2))
        static = batches[0].clone()
        fn = variant(lambda: other(static))
        if variant.name == "graph":
            fn()  # the warm-up runs it more than once
            other.restart()
        for batch in batches:
            static.copy_(batch)
            expected, found = one(batch), fn()
            for key in expected.keys(True, True):
                # what an entry outside of the mask holds has no meaning
                torch.testing.assert_close(
                    found.get(key)[expected["mask"]], expected.get(key)[expected["mask"]], rtol=1e-5, atol=1e-6
                )

    def test_in_a_replay_buffer(self):
        collector = make()
        batch = collector.collect()
        buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), transform=OptionSegments(batch, gamma=GAMMA))
        buffer.extend(batch)
        expected = OptionSegments(batch, gamma=GAMMA)(batch)
        assert (buffer[:]["mask"] == expected["mask"]).all()
        assert "option_start" not in buffer[:].keys()


class TestReplay:
    def rows(self, mask, first=0):
        mask = torch.tensor(mask)
        number = first + torch.arange(mask.numel(), dtype=torch.float32).view(mask.shape)
        return TensorDict({"mask": mask, "number": number, "next": {"twice": 2 * number}}, mask.shape)

    def test_keeps_what_the_mask_says_and_the_newest(self):
        example = self.rows([True] * 6)
        replay = OptionReplay(example, capacity=6, batch_size=200)
        replay.extend(self.rows([True, False, True, False, False, True]))
        assert len(replay) == 3
        assert set(replay.sample()["number"].tolist()) == {0, 2, 5}
        replay.extend(self.rows([False] * 6, 10))
        replay.extend(self.rows([True] * 5, 20))
        assert len(replay) == 6
        sample = replay.sample()
        assert set(sample["number"].tolist()) == {5, 20, 21, 22, 23, 24}
        assert torch.equal(sample["next", "twice"], 2 * sample["number"])
        assert sample["mask"].all()
        other = OptionReplay(example, capacity=6)
        other.load_state_dict(replay.state_dict())
        assert set(other.sample(200)["number"].tolist()) == {5, 20, 21, 22, 23, 24}

    def test_time_comes_first_in_a_batch(self):
        replay = OptionReplay(self.rows([[True]]), capacity=6)
        replay.extend(self.rows([[True, True], [True, True]]))
        replay.extend(self.rows([[True, False, True], [False, True, True]], 10))
        # of 0, 2, 1, 3 the first two are the oldest
        assert set(replay.sample(300)["number"].tolist()) == {1, 3, 10, 12, 14, 15}

    def test_each_row_is_as_likely(self):
        replay = OptionReplay(self.rows([True] * 10), capacity=10)
        replay.extend(self.rows([True] * 10))
        replay.extend(self.rows([True] * 3, 10))  # the ring begins anew in its midst
        counts = torch.bincount(replay.sample(20_000)["number"].long(), minlength=13)
        assert counts[:3].sum() == 0
        assert (counts[3:] - 2_000).abs().max() < 5 * (20_000 * 0.1 * 0.9) ** 0.5

    def test_empty(self):
        replay = OptionReplay(self.rows([True]), capacity=3)
        sample = replay.sample(2)
        assert not sample["mask"].any()
        assert sample["number"].tolist() == [0, 0]

    def test_refusals(self):
        with pytest.raises(ValueError, match="capacity, batch_size: expected at least 1"):
            OptionReplay(self.rows([True]), capacity=0)
        with pytest.raises(
            ValueError, match=r"OptionReplay: 1000\d+ rows: expected .*bytes\) free on .*received .*Remedy: a smaller"
        ):
            OptionReplay(self.rows([True]), capacity=10**13)
        replay = OptionReplay(self.rows([True]), capacity=2)
        with pytest.raises(ValueError, match=r"rows: expected at most 2.*received 3.*Remedy"):
            replay.extend(self.rows([True] * 3))
        with pytest.raises(KeyError, match=r"expected .*mask"):
            replay.extend(self.rows([True]).exclude("mask"))
        with pytest.raises(KeyError, match="twice"):
            replay.extend(self.rows([True]).exclude(("next", "twice")))
        with pytest.raises(KeyError, match=r"expected .*mask"):
            OptionReplay(self.rows([True]).exclude("mask"), capacity=2)
        with pytest.raises(ValueError, match=r"expected columns .*Remedy"):
            replay.load_state_dict(OptionReplay(self.rows([True]), capacity=5).state_dict())


class TestOptionState:
    def test_specs_and_resets(self, device):
        env = TransformedEnv(CartPole(N, device=device, max_episode_steps=4), OptionState(3))
        check_env_specs(env)
        policy = Policy(env)
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            batch = env.rollout(12, policy, break_when_any_done=False)
        assert (batch["option_age"][batch["is_init"].squeeze(-1)] == 0).all()
        kept = ~batch["next", "done"][:, :-1].squeeze(-1)
        assert torch.equal(batch["option_age"][:, 1:][kept], batch["next", "option_age"][:, :-1][kept])
        assert torch.equal(batch["option"][:, 1:][kept], batch["next", "option"][:, :-1][kept])

    def test_collected_as_rolled_out(self):
        batch = make(max_episode_steps=4).collect()
        assert (batch["option_age"][batch["is_init"].squeeze(-1)] == 0).all()
        assert batch["option_start"][batch["is_init"].squeeze(-1)].all()

    @pytest.mark.parametrize(
        ("mode", "device"), [("compile", "cpu"), pytest.param("graph", "cuda", marks=pytest.mark.gpu)]
    )
    @pytest.mark.slow_compiled
    def test_the_state_goes_in_and_out_of_a_compiled_or_captured_rollout(self, mode, device, fresh_dynamo):
        torch.manual_seed(0)
        collector = make(device, steps=5, max_episode_steps=7, mode=mode)
        batches = torch.cat([collector.collect().clone() for _ in range(4)], 1)
        kept = ~batches["next", "done"][:, :-1].squeeze(-1)
        for key in ("option", "option_age"):
            expected = torch.where(kept, batches["next", key][:, :-1], 0)
            assert torch.equal(batches[key][:, 1:], expected)
        assert (batches["option_age"] > 0).any()
        ages = torch.where(batches["option_start"], 0, batches["option_age"]) + 1
        assert torch.equal(batches["next", "option_age"], ages)
        starts = batches["option_start"].view(N, 4, 5)
        assert not torch.equal(starts[:, 1], starts[:, 2])

    def test_refusal(self):
        with pytest.raises(ValueError, match="num_options: expected at least 2"):
            OptionState(1)


class TestBadInput:
    def test_gamma_shapes_and_keys(self):
        batch = make().collect()
        with pytest.raises(ValueError, match="gamma: expected a discount in"):
            OptionSegments(batch, gamma=1.1)
        with pytest.raises(ValueError, match=r"expected a batch \[N, T\].*received \[36\].*Remedy"):
            OptionSegments(batch.reshape(-1), gamma=GAMMA)
        with pytest.raises(ValueError, match=r"expected a batch \[3, T\].*received \[2, 12\]"):
            OptionSegments(batch, gamma=GAMMA)(batch[:2])
        with pytest.raises(KeyError, match=r"expected .*option_log_prob.* in the batch, received .*Remedy"):
            OptionSegments(batch.exclude("option_log_prob"), gamma=GAMMA)
        with pytest.raises(KeyError, match=r"expected .*option_start"):
            OptionSegments(batch, gamma=GAMMA)(batch.exclude("option_start"))

    def test_inside_an_env(self):
        batch = make().collect()
        env = TransformedEnv(CartPole(N, device="cpu"), OptionSegments(batch, gamma=GAMMA))
        with pytest.raises(RuntimeError, match="received one step from an environment"):
            env.rollout(2)


def test_two_options_are_enough():
    assert OptionState(2).num_options == 2
