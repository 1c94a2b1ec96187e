"""One copy of each observation: bit patterns, other keys, the side ring, n-step windows by hand."""

import pytest
import torch
from ring_oracle import ListRing, Stream
from tensordict import TensorDict

from torchrl_perf.replay import DeviceStorage

NAN = float("nan")


def rows(observation, following, **more):
    """One stream: ``[1, T]`` rows of scalar observations."""
    observation, following = torch.tensor([observation]), torch.tensor([following])
    zero = torch.zeros(1, observation.shape[1], 1)
    td = {"observation": observation, "next": {"observation": following, "reward": zero, "done": zero > 0}, **more}
    return TensorDict(td, observation.shape)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


class TestBitPatterns:
    """Observations are compared as bytes: what differs in a bit is kept apart, what does not is shared, NaN too."""

    def test_nan_and_signed_zero(self):
        td = rows([NAN, NAN, 0.0, 1.0], [NAN, -0.0, 1.0, NAN])
        storage = DeviceStorage(8, compact=True, final_fraction=1.0)
        index = storage.write(td)
        assert same_bits(storage.get(index)["next", "observation"], td["next", "observation"])
        assert int(storage.frames.final_count) == 1  # -0.0 before 0.0

    def test_continuing_batches_share(self):
        storage = DeviceStorage(8, compact=True)
        for t in range(0, 20, 2):
            storage.write(rows([t + 0.0, t + 1.0], [t + 1.0, t + 2.0]))
        assert int(storage.frames.final_count) == 0
        newest = storage.get(storage.ring.valid_slots())
        assert torch.equal(newest["next", "observation"], newest["observation"] + 1)

    @pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 6, 8, 24])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
    def test_one_bit_in_any_place(self, width, dtype):
        for place in range(width):
            x = torch.zeros(1, 5, width, dtype=dtype)
            following = x.clone()
            following[0, 1, place] = 1
            td = TensorDict({"x": x, "next": {"x": following}}, [1, 5])
            storage = DeviceStorage(6, compact=True)
            assert (storage.get(storage.write(td)) == td).all()
            assert int(storage.frames.final_count) == 1
        storage = DeviceStorage(6, compact=True)
        x = torch.zeros(1, 5, width, dtype=dtype)
        storage.write(TensorDict({"x": x, "next": {"x": x}}, [1, 5]))
        assert int(storage.frames.final_count) == 0

    def test_padding_is_not_compared(self):
        shape = (1, 6, 3)  # 3 bytes of a row of 16
        image = torch.randint(0, 256, shape, dtype=torch.uint8)
        td = TensorDict({"pixels": image, "next": {"pixels": image.roll(-1, 1)}}, [1, 6])
        storage = DeviceStorage(6, compact=True)
        storage.get(storage.write(td))
        assert int(storage.frames.final_count) == 0


class TestKeys:
    """Which entries are stored once."""

    def test_nested_observations_of_several_dtypes(self):
        generator = torch.Generator().manual_seed(0)

        def observation():
            pixels = torch.randint(0, 3, (2, 9, 2, 2), dtype=torch.uint8, generator=generator)
            return {"pixels": pixels, "state": {"x": torch.randn(2, 9, 5, generator=generator, dtype=torch.float64)}}

        root, following = TensorDict(observation(), [2, 9]), TensorDict(observation(), [2, 9])
        following[:, :-1] = torch.where(torch.rand(2, 8) < 0.5, following[:, :-1], root[:, 1:])
        td = TensorDict({"agent": root, "next": {"agent": following, "reward": torch.randn(2, 9, 1)}}, [2, 9])
        storage = DeviceStorage(20, compact=True, final_fraction=1.0)
        assert (storage.get(storage.write(td)) == td).all()

    def test_flags_and_rewards_stay_in_the_row(self):
        flags = {"done": torch.zeros(1, 4, 1).bool(), "terminated": torch.zeros(1, 4, 1).bool()}
        td = rows([0.0, 1, 2, 3], [1.0, 2, 3, 4], **flags, reward=torch.ones(1, 4, 1))
        storage = DeviceStorage(4, compact=True)
        storage.write(td)
        assert storage.frames.keys == [("observation",)]

    def test_a_next_entry_of_another_shape_is_no_copy(self):
        td = rows([0.0, 1], [1.0, 2], goal=torch.zeros(1, 2, 3)).set(("next", "goal"), torch.zeros(1, 2, 2))
        storage = DeviceStorage(4, compact=True)
        assert (storage.get(storage.write(td)) == td).all()


class TestSideRing:
    """More true final observations than there is room for: the oldest rows are forgotten, never wrong."""

    def test_forgotten_rows(self):
        # every row ends an episode; room for 2 of 8 rows' final observations
        storage = DeviceStorage(8, compact=True, final_fraction=0.25)
        for t in range(5):
            storage.write(rows([float(t)], [100.0 + t]))
        # the newest row's lies in the extra time row, those of the two before it in the side ring
        assert len(storage) == 3
        assert storage.ring.recorded
        valid = storage.get(storage.ring.valid_slots())
        assert sorted(valid["observation"].tolist()) == [2.0, 3.0, 4.0]
        assert torch.equal(valid["next", "observation"], valid["observation"] + 100)
        drawn = storage.get(storage.ring.random_slots(200))
        assert set(drawn["observation"].tolist()) == {2.0, 3.0, 4.0}
        with pytest.raises(IndexError, match="3 valid rows"):
            storage.get(0)

    def test_the_ring_recovers(self):
        storage = DeviceStorage(8, compact=True, final_fraction=0.25)
        for t in range(5):
            storage.write(rows([float(t)], [100.0 + t]))
        start = torch.arange(20.0)
        for t in range(0, 20, 4):
            storage.write(rows(start[t : t + 4].tolist(), (start[t : t + 4] + 1).tolist()))
        assert len(storage) == 8

    def test_many_streams_end_at_once(self):
        stream = Stream(4, torch.Generator().manual_seed(1), p_done=1.0)
        storage = DeviceStorage(40, compact=True, final_fraction=0.05)
        oracle = ListRing(10, 4, 4)  # at least one row for each stream
        for T in (3, 1, 1, 7):
            batch, td = stream.batch(T)
            storage.write(td)
            oracle.extend(batch)
            assert len(storage) == 4 * oracle.length == 8

    def test_empty_forgets_it(self):
        storage = DeviceStorage(8, compact=True, final_fraction=0.25)
        for _ in range(3):
            for t in range(5):
                storage.write(rows([float(t)], [100.0 + t]))
            storage._empty()
        index = storage.write(rows([0.0, 5.0, 7.0], [1.0, 6.0, 8.0]))
        assert len(storage) == 3
        assert storage.get(index)["next", "observation"].tolist() == [[1.0, 6.0, 8.0]]


class TestNStepByHand:
    """n=3, gamma=.5, obs t = 0..7, next = t + 1, r = 1, episode end at t = 2."""

    @pytest.mark.parametrize("compact", [False, True])
    @pytest.mark.parametrize("terminated", [True, False])
    def test_targets(self, compact, terminated):
        done = torch.zeros(1, 8, 1, dtype=torch.bool)
        done[:, 2] = True
        t = torch.arange(8.0).view(1, 8, 1)
        td = TensorDict(
            {
                "observation": t,
                "next": {
                    "observation": t + 1,
                    "reward": torch.ones(1, 8, 1),
                    "done": done,
                    "terminated": done & terminated,
                },
            },
            [1, 8],
        )
        storage = DeviceStorage(10, compact=compact, n_step=3, gamma=0.5)
        sample = storage.get(storage.write(td)[0])
        following = sample["next"]
        value = following["observation"] * ~following["terminated"]  # V(s) = s
        target = (following["reward"] + 0.5 ** sample["steps_to_next_obs"] * value).squeeze(-1)
        expected = [1.75, 1.5, 1.0, 2.5] if terminated else [2.125, 2.25, 2.5, 2.5]
        assert target[:4].tolist() == expected
        assert sample["steps_to_next_obs"].squeeze(-1).tolist() == [3, 2, 1, 3, 3, 3, 2, 1]
        assert torch.equal(sample["gamma"], 0.5 ** sample["steps_to_next_obs"])

    def test_a_window_grows_with_its_stream_but_not_across_the_cursor(self):
        storage = DeviceStorage(3, n_step=3, gamma=1.0)
        steps = []
        for t in range(5):
            index = storage.write(rows([float(t)], [t + 1.0]))
            steps.append(storage.get(storage.ring.valid_slots())["steps_to_next_obs"].squeeze(-1).tolist())
        assert steps == [[1], [2, 1], [3, 2, 1], [1, 3, 2], [2, 1, 3]]
        assert storage.get(index)["next", "observation"].tolist() == [[5.0]]

    def test_nan_beyond_the_window_stays_there(self):
        td = rows([0.0, 1.0, 2.0], [1.0, 9.0, 3.0])
        td["next", "reward"] = torch.tensor([[[1.0], [1.0], [NAN]]])
        td["next", "done"][:, 1] = True
        storage = DeviceStorage(4, n_step=3, gamma=0.5)
        assert storage.get(storage.write(td)[0])["next", "reward"].squeeze(-1)[:2].tolist() == [1.5, 1.0]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
    def test_rewards_of_agents_and_dtypes(self, dtype):
        reward = torch.arange(8).view(1, 4, 2, 1).to(dtype)
        done = torch.tensor([[[False], [True], [False], [False]]])
        td = TensorDict({"x": torch.zeros(1, 4), "next": {"reward": reward, "done": done}}, [1, 4])
        storage = DeviceStorage(4, n_step=2, gamma=0.5)
        sample = storage.get(storage.write(td))
        assert sample["next", "reward"].shape == (1, 4, 2, 1)
        assert sample["next", "reward"].dtype == (dtype if dtype.is_floating_point else torch.float32)
        assert sample["next", "reward"].flatten().tolist() == [1.0, 2.5, 2.0, 3.0, 7.0, 8.5, 6.0, 7.0]
