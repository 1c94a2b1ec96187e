"""Arguments of the factory and the constructors: each has its effect, or is refused by name with a reason."""

import inspect
import pydoc

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.envs.transforms import RewardScaling

from torchrl_perf import replay
from torchrl_perf.replay import (
    DevicePrioritizedSampler,
    DeviceRandomSampler,
    DeviceReplayBuffer,
    DeviceSamplerWithoutReplacement,
    DeviceSliceSampler,
    DeviceStorage,
    DeviceWriter,
    make_replay_buffer,
)


def batch(N=2, T=8):
    number = torch.arange(N * T).view(N, T, 1)
    no = torch.zeros(N, T, 1, dtype=torch.bool)
    following = {"observation": number + 1.0, "reward": torch.ones(N, T, 1), "done": no, "terminated": no.clone()}
    return TensorDict({"observation": number + 0.0, "next": {**following, "truncated": no.clone()}}, [N, T])


class TestFactory:
    def test_slices_with_alpha_are_drawn_by_priority(self):
        rb = make_replay_buffer(16, batch_size=8, sampler="slice", slice_len=2, alpha=1.0, beta=1.0)
        rb.extend(batch())
        rb.update_priority(torch.arange(14).view(-1, 1), (torch.arange(14) == 5).float())
        sample = rb.sample()
        assert (sample["index"].view(-1, 2)[:, 0] == 5).all()
        assert sample["priority_weight"].eq(1).all()

    @pytest.mark.parametrize(
        ("sampler", "option", "takers"),
        [
            ("random", {"alpha": 0.6}, "'prioritized' or 'slice'"),
            ("random", {"beta": 0.6}, "'prioritized' or 'slice'"),
            ("epoch", {"alpha": 0.6}, "'prioritized' or 'slice'"),
            ("random", {"slice_len": 4}, "'slice'"),
            ("epoch", {"within_episode": False}, "'slice'"),
            ("prioritized", {"slice_len": 4}, "'slice'"),
            ("random", {"drop_last": True}, "'epoch'"),
            ("slice", {"shuffle": False}, "'epoch'"),
            ("epoch", {"mask_key": "mask"}, "'random' or 'prioritized' or 'slice'"),
            ("slice", {"beta_end": 1.0}, "'prioritized'"),
            ("slice", {"beta": 0.5}, "alpha"),
            ("slice", {"eps": 0.5}, "alpha"),
            ("random", {"priority": 1}, "mask_key"),
        ],
    )
    def test_options_of_another_sampler(self, sampler, option, takers):
        with pytest.raises(ValueError, match=rf"expected .*received .*Remedy: .*{takers}"):
            make_replay_buffer(16, sampler=sampler, **option)

    def test_a_sampler_object(self):
        rb = make_replay_buffer(16, batch_size=4, sampler=RandomSampler())
        rb.extend(batch())
        assert rb.sample().shape == (4,)
        with pytest.raises(ValueError, match="no options for the sampler"):
            make_replay_buffer(16, sampler=DeviceRandomSampler(), mask_key="mask")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("dim_extend", 1),
            ("shared", True),
            ("checkpointer", object()),
            ("compilable", False),
            ("service_backend", "ray"),
            ("transport", "ray"),
            ("final_fraction", 0.5),
        ],
    )
    @pytest.mark.parametrize(
        "make", [make_replay_buffer, lambda n, **o: DeviceReplayBuffer(storage=DeviceStorage(n), **o)]
    )
    def test_options_without_a_meaning(self, make, option, value):
        if option in ("final_fraction", "service_backend", "transport") and make is not make_replay_buffer:
            pytest.skip("an option of the storage, or one that TorchRL's metaclass takes first")
        with pytest.raises(ValueError, match=rf"expected .*{option}.*received .*: .*Remedy"):
            make(16, **{option: value})

    def test_a_generator_draws_the_same_again(self):
        drawn = []
        for _ in range(2):
            rb = make_replay_buffer(16, batch_size=9, generator=torch.Generator().manual_seed(3))
            rb.extend(batch())
            torch.rand(len(drawn) + 1)  # the default generator has no part in it
            drawn.append(rb.sample()["index"])
        assert drawn[0].equal(drawn[1])
        with pytest.raises(ValueError, match=r"expected a generator on cpu.*received one on meta"):
            make_replay_buffer(16, generator=_Elsewhere())

    @pytest.mark.parametrize("sampler", ["random", "prioritized", "slice", "epoch"])
    def test_neighbouring_seeds_share_no_draw(self, sampler):
        draws = []
        for seed in (7, 8):
            options = {"slice_len": 1} if sampler == "slice" else {}
            generator = torch.Generator().manual_seed(seed)
            rb = make_replay_buffer(4096, batch_size=512, sampler=sampler, generator=generator, **options)
            rb.extend(batch(1, 4096))
            draws.append(torch.cat([rb.sample()["index"] for _ in range(4)]))
        equal = (draws[0] == draws[1]).sum()
        assert equal < 8  # two of 4096 in 2048 draws: 0.5 by chance
        shifted = max(int((draws[0][lag:] == draws[1][:-lag]).sum()) for lag in range(1, 64))
        assert shifted < 10


class _Elsewhere:
    device = torch.device("meta")


class TestBufferOptions:
    """Everything that TorchRL's buffer takes, in the factory and in the constructor."""

    def make(self, **options):
        rb = make_replay_buffer(16, **options)
        rb.extend(batch())
        return rb

    def test_transform(self):
        rb = self.make(batch_size=4, transform=RewardScaling(0.0, 3.0, in_keys=[("next", "reward")]))
        assert rb.sample()["next", "reward"].eq(3).all()
        assert len(rb) == 16
        rb.append_transform(lambda td: td.set("two", td["observation"] * 2))
        sample = rb.sample()
        assert (sample["two"] == sample["observation"] * 2).all()

    def test_transform_factory(self):
        rb = make_replay_buffer(
            16, batch_size=4, transform_factory=lambda: lambda td: td.set("one", td["observation"] + 1)
        )
        rb.extend(batch())
        sample = rb.sample()
        assert (sample["one"] == sample["observation"] + 1).all()

    def test_collate_fn(self):
        rb = self.make(batch_size=4, collate_fn=lambda td: td.select("observation"))
        assert ("next", "reward") not in rb.sample().keys(True)
        plain = DeviceReplayBuffer(
            storage=DeviceStorage(16), batch_size=4, collate_fn=lambda td: td.select("observation")
        )
        plain.extend(batch())
        assert ("next", "reward") not in plain.sample().keys(True)

    def test_prefetch(self):
        rb = self.make(batch_size=4, prefetch=2)
        for _ in range(4):
            sample = rb.sample()
            assert (sample["next", "observation"] == sample["observation"] + 1).all()
        assert len(rb._prefetch_queue) > 0
        rb.shutdown()
        with pytest.raises(ValueError, match="batch-size must be specified"):
            make_replay_buffer(16, prefetch=2)

    def test_priority_key(self):
        rb = make_replay_buffer(16, batch_size=8, sampler="prioritized", alpha=1.0, priority_key="error")
        td = batch()
        td["error"] = torch.zeros(2, 8, 1)
        td["error"][1, 3] = 1.0
        rb.extend(td)
        assert (rb.sample()["observation"] == 11).all()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs no CUDA")
    def test_pin_memory_reaches_torchrl(self):
        rb = self.make(batch_size=4, pin_memory=True)
        assert rb._pin_memory

    def test_delayed_init(self):
        rb = make_replay_buffer(16, batch_size=4, delayed_init=True)
        assert not rb.initialized
        rb.extend(batch())
        assert rb.sample().shape == (4,)

    @pytest.mark.parametrize("sampler", ["epoch", "prioritized", "slice"])
    def test_only_uniform_draws_consume(self, sampler):
        with pytest.raises(ValueError, match=r"consume_after_n_samples.*Remedy: sampler='random'"):
            make_replay_buffer(16, sampler=sampler, consume_after_n_samples=1)

    def test_consumed_rows(self):
        rb = self.make_flat(consume_after_n_samples=1)
        seen = torch.cat([rb.sample()["observation"].flatten() for _ in range(4)])
        assert sorted(seen.tolist()) == list(range(16))
        rb.extend(batch()[0])
        assert len(rb) == 8

    def make_flat(self, **options):
        rb = make_replay_buffer(16, batch_size=4, **options)
        td = batch().reshape(-1)
        rb.extend(td)
        assert "index" not in td.keys()  # the caller's batch is left alone
        return rb

    @pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, DeviceReplayBuffer])
    def test_iteration_info_and_generations(self, kind):
        writer = DeviceWriter(track_generations=True)
        sampler = DeviceSamplerWithoutReplacement(drop_last=True)
        rb = kind(storage=DeviceStorage(16), sampler=sampler, writer=writer, batch_size=6)
        rb.extend(batch())
        seen = torch.cat([td["observation"].flatten() for td in rb])
        assert seen.shape == (12,)
        assert seen.unique().numel() == 12
        rb.extend(batch())
        sample, info = rb.sample(return_info=True)
        assert info["index"].shape == sample.batch_size
        assert info["index_generation"].eq(1).all()

    @pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
    def test_dim_extend_in_torchrls_buffers(self, kind):
        with pytest.raises(ValueError, match=r"dim_extend=None, received 1"):
            kind(storage=DeviceStorage(16), dim_extend=1)

    @pytest.mark.parametrize("reduction", ["max", "min", "mean", "median"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_the_reduction_of_priorities(self, reduction, dtype):
        rb = DeviceReplayBuffer(
            storage=DeviceStorage(16),
            sampler=DevicePrioritizedSampler(alpha=1.0, beta=1.0, reduction=reduction),
            batch_size=4,
        )
        rb.extend(batch())
        sample = rb.sample()
        errors = torch.tensor([1.0, 2.0, 6.0]).to(dtype).expand(4, 3)
        rb.update_tensordict_priority(sample.set("td_error", errors))
        expected = {"max": 6.0, "min": 1.0, "mean": 3.0, "median": 2.0}[reduction]
        assert rb.sampler.tree.weights[sample["index"]].eq(expected).all()

    def test_trajectories_as_rows(self):
        """TorchRL's writer takes the first batch dim as rows, whatever follows."""
        rb = TensorDictReplayBuffer(storage=DeviceStorage(4), batch_size=3)
        stock = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
        for buffer in (rb, stock):
            for first in (0, 3):
                buffer.extend(batch(3, 5).apply(lambda x, first=first: x + first if x.is_floating_point() else x))
        assert len(rb) == len(stock) == 4
        assert rb.sample().shape == stock.sample().shape == (3, 5)
        assert (rb[:] == stock[:].exclude("index")).all()
        state = rb.state_dict()
        again = TensorDictReplayBuffer(storage=DeviceStorage(4), batch_size=3)
        again.load_state_dict(state)
        assert (again[:] == rb[:]).all()
        with pytest.raises(ValueError, match=r"rows of batch_size \[5\] as in the first extend, received \[\]"):
            rb.extend(TensorDict(dict(batch(3, 5).items()), [3]))


class TestTorchRLsCalls:
    """Our classes called as their counterparts are."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: DevicePrioritizedSampler(16, 0.7, 0.5),
            lambda: DevicePrioritizedSampler(16, alpha=0.7, beta=0.5),
            lambda: DevicePrioritizedSampler(max_capacity=16, alpha=0.7, beta=0.5, reduction="max"),
            lambda: DevicePrioritizedSampler(16, 0.7, 0.5, 0.0, torch.float32, "max"),
            lambda: DevicePrioritizedSampler(1e6, 0.7, 0.5),
            lambda: DevicePrioritizedSampler(0.7, 0.5),
            lambda: DevicePrioritizedSampler(torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.5)),
        ],
    )
    def test_prioritized(self, make):
        sampler = make()
        assert (sampler.alpha, sampler.beta) == (0.7, 0.5)
        rb = DeviceReplayBuffer(storage=DeviceStorage(16), sampler=sampler, batch_size=4)
        rb.extend(batch())
        assert rb.sample().shape == (4,)

    def test_a_capacity_that_is_none(self):
        with pytest.raises(ValueError, match="max_capacity as a whole number"):
            DevicePrioritizedSampler(0.5, 0.7, 0.5)
        rb = DeviceReplayBuffer(storage=DeviceStorage(16), sampler=DevicePrioritizedSampler(2, 0.5), batch_size=4)
        with pytest.raises(ValueError, match="at most max_capacity=2 slots"):
            rb.extend(batch())

    @pytest.mark.parametrize("option", [{"dtype": torch.float64}, {"max_priority_within_buffer": True}])
    def test_prioritized_refuses(self, option):
        with pytest.raises(ValueError, match="leave them out"):
            DevicePrioritizedSampler(16, 0.7, 0.5, **option)

    @pytest.mark.parametrize(
        "option",
        [
            {"traj_key": "episode"},
            {"end_keys": [("next", "done")]},
            {"strict_length": False},
            {"span": True},
            {"pad_output": True},
            {"ends": torch.ones(3)},
            {"fragmented": True},
            {"init_key": None, "step_key": "t"},
            {"slice_len": None, "num_slices": 4},
            {"beta": 0.4},
            {"eps": 0.1},
        ],
    )
    def test_slices_refuse(self, option):
        with pytest.raises(ValueError, match=r"expected .*received .*Remedy"):
            DeviceSliceSampler(**{"slice_len": 4, **option})

    def test_slices_take_what_has_nothing_to_do(self):
        assert DeviceSliceSampler(slice_len=4, cache_values=True, compile=True, strict_length=True).slice_len == 4
        with pytest.raises(TypeError, match="slice_length"):
            DeviceSliceSampler(4, slice_length=3)

    @pytest.mark.parametrize("option", [{"ndim": 2}, {"shared_init": True}, {"consolidated": True}])
    def test_the_storage_refuses(self, option):
        with pytest.raises(ValueError, match=r"expected .*received .*Remedy"):
            DeviceStorage(16, **option)
        assert DeviceStorage(16, ndim=1, compilable=True).max_size == 16


PUBLIC = [getattr(replay, name) for name in replay.__all__ if inspect.isclass(getattr(replay, name))]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_help_shows_the_arguments(cls):
    shown, true = inspect.signature(cls), inspect.signature(cls.__init__)
    assert list(shown.parameters.values()) == list(true.parameters.values())[1:]
    first = next(iter(shown.parameters))
    assert f"{cls.__name__}({first}" in pydoc.plain(pydoc.render_doc(cls)).replace("(*, ", "(")


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (DevicePrioritizedSampler, PrioritizedSampler),
        (DeviceSamplerWithoutReplacement, SamplerWithoutReplacement),
        (DeviceSliceSampler, SliceSampler),
        (DeviceWriter, TensorDictRoundRobinWriter),
    ],
)
def test_arguments_of_the_counterpart_are_known(ours, stock):
    """Every argument of TorchRL's class is one of ours, or among the options that are checked one by one."""
    named = set(inspect.signature(ours).parameters)
    if "options" in named:
        from torchrl_perf.replay.slices import SLICE_SAMPLER

        named |= set(SLICE_SAMPLER)
    assert set(inspect.signature(stock.__init__).parameters) - {"self"} <= named
