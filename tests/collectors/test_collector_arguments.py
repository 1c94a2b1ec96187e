"""DeviceCollector: every argument of TorchRL's Collector has its effect, or is refused by name."""

import inspect
import time

import pytest
import torch
from counting_env import CountingEnv, counting_policy
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule, TensorDictSequential, set_composite_lp_aggregate
from torch.distributions import Categorical, Independent, Normal
from torchrl.collectors import Collector
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.data import LazyTensorStorage, ListStorage, OneHot, ReplayBuffer
from torchrl.envs import EnvCreator, GymEnv, SerialEnv, TransformedEnv
from torchrl.envs.transforms import ActionMask, StepCounter
from torchrl.envs.utils import ExplorationType, RandomPolicy, set_exploration_type
from torchrl.modules import MaskedCategorical, OneHotCategorical, ProbabilisticActor

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.arguments import REFUSED, CastPolicy
from torchrl_perf.envs import CartPole, FuelBreaks, HybridTarget
from torchrl_perf.modules import GumbelCategorical

N, T = 3, 4


def collector(policy=None, env=None, **options):
    return DeviceCollector(env or CountingEnv(N, max_episode_steps=4), policy, frames_per_batch=N * T, **options)


def test_has_every_argument_of_torchrls_collector():
    theirs = inspect.signature(Collector.__init__).parameters
    ours = inspect.signature(DeviceCollector.__init__).parameters
    assert {name for name in theirs if name not in ("self", "kwargs")} <= set(ours)
    assert list(ours)[:3] == ["self", "create_env_fn", "policy"]


class TestRefused:
    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_by_name_with_reason_and_remedy(self, name):
        other = False if name == "reset_when_done" else "distributed"
        with pytest.raises(ValueError, match=rf"{name}: expected .*, received .*: .*Remedy: "):
            collector(**{name: other})

    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_values_that_ask_for_nothing_are_taken(self, name):
        for value in REFUSED[name].accepted:
            collector(**{name: value})

    @pytest.mark.parametrize(
        ("name", "nearest"), [("frames_per_bach", "frames_per_batch"), ("storage_device", "storing_device")]
    )
    def test_unknown_names_get_the_nearest(self, name, nearest):
        with pytest.raises(TypeError, match=rf"received '{name}'. Remedy: {nearest}"):
            collector(**{name: 1})

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"split_trajs": True, "track_traj_ids": False}, ValueError, "track_traj_ids=True"),
            ({"extend_buffer": False}, ValueError, "expected a replay_buffer"),
            ({"traj_format": "cat"}, ValueError, "traj_format: expected trajs_per_batch too"),
            ({"trajs_per_batch": 0}, ValueError, "int from 1 on"),
            ({"traj_format": "ragged", "trajs_per_batch": 1}, ValueError, "'padded' or 'cat'"),
            ({"create_env_kwargs": {"num_envs": 3}}, ValueError, r"create_env_kwargs.*\['num_envs'\]"),
            ({"policy_factory": RandomPolicy, "policy": counting_policy()}, TypeError, "received both"),
            ({"cudagraph_policy": True}, ValueError, "cudagraph_policy: expected an env on CUDA"),
            ({"compile_policy": {"speed": 9}, "mode": "eager"}, ValueError, r"received \['speed'\]"),
            ({"compile_policy": {"mode": "default"}, "mode": "compile"}, ValueError, "compile_mode"),
            ({"track_policy_version": True, "mode": "compile"}, ValueError, "mode 'eager' or 'auto'"),
            ({"device": "nowhere"}, ValueError, "torch device"),
        ],
    )
    def test_contradictions(self, options, error, words):
        with pytest.raises(error, match=words):
            collector(**options)

    def test_a_second_limit(self):
        with pytest.raises(ValueError, match="'step_count'"):
            collector(env=TransformedEnv(CountingEnv(N), StepCounter()), max_frames_per_traj=2)

    def test_no_env(self):
        with pytest.raises(TypeError, match="received neither"):
            DeviceCollector(frames_per_batch=4)
        with pytest.raises(TypeError, match="received both"):
            DeviceCollector(CountingEnv(2), env=CountingEnv(2), frames_per_batch=4)
        with pytest.raises(ValueError, match="empty sequence"):
            DeviceCollector([], frames_per_batch=4)
        with pytest.raises(TypeError, match="make a TorchRL env, received int"):
            DeviceCollector(lambda: 3, frames_per_batch=4)


class TestEnvs:
    @pytest.mark.parametrize(
        ("source", "shape"),
        [
            (lambda: CountingEnv(3), (3, 4)),
            (lambda: [CountingEnv(3)], (3, 4)),
            (lambda: [CountingEnv(3), lambda: CountingEnv(3)], (2, 3, 2)),
            (lambda: [lambda: GymEnv("CartPole-v1", device="cpu")] * 3, (3, 4)),
            (lambda: EnvCreator(lambda: CountingEnv(3)), (3, 4)),
            (lambda: lambda: CountingEnv(3), (3, 4)),
            (lambda: GymEnv("CartPole-v1", device="cpu"), (12,)),
            (lambda: GymEnv("CartPole-v1"), (12,)),
        ],
    )
    def test_forms(self, source, shape):
        made = DeviceCollector(source(), None, frames_per_batch=12, mode="eager")
        batch = made.collect()
        assert batch.shape == shape
        assert batch.names[-1] == "time"
        assert batch.device.type == "cpu"
        assert batch["collector", "traj_ids"].shape == shape
        made.shutdown()

    def test_a_single_env_equals_torchrl(self):
        data = []
        for kind in (Collector, DeviceCollector):
            env = GymEnv("CartPole-v1", categorical_action_encoding=True)
            env.set_seed(0)
            policy = TensorDictModule(lambda obs: (obs[..., 2] > 0).long(), ["observation"], ["action"])
            options = {"auto_register_policy_transforms": False}
            if kind is DeviceCollector:
                options["mode"] = "eager"
            data.append(next(iter(kind(env, policy, frames_per_batch=90, total_frames=90, **options))))
        assert data[0]["next", "done"].any()
        for key in data[0].keys(True, True):
            torch.testing.assert_close(data[1][key], data[0][key], rtol=0, atol=0, msg=str(key))

    def test_kwargs_and_the_other_name(self):
        made = DeviceCollector(CountingEnv, frames_per_batch=8, create_env_kwargs={"num_envs": 4})
        assert made.collect().shape == (4, 2)
        assert DeviceCollector(env=CountingEnv(4), frames_per_batch=8).collect().shape == (4, 2)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
    def test_one_hot_of_any_dtype(self, dtype):
        env = GymEnv("CartPole-v1", device="cpu")
        net = TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["logits"])
        actor = ProbabilisticActor(net, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
        cast = TensorDictModule(lambda action: action.to(dtype), ["action"], ["action"])
        batch = DeviceCollector(env, TensorDictSequential(actor, cast), frames_per_batch=6, mode="eager").collect()
        assert batch["action"].dtype == dtype
        assert (batch["action"].sum(-1) == 1).all()

    def test_a_list_of_members_keeps_their_own_seeds(self):
        made = DeviceCollector([lambda: GymEnv("CartPole-v1", device="cpu")] * 4, frames_per_batch=4, mode="eager")
        made.set_seed(0)
        roots = made.collect()["observation"][:, 0].clone()
        made.set_seed(1)
        others = made.collect()["observation"][:, 0]
        assert len({tuple(row.tolist()) for row in torch.cat([roots, others])}) == 8
        made.shutdown()


class TestPolicies:
    def test_a_module_of_tensors_is_wrapped(self):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 3)

            def forward(self, observation):
                return self.layer(observation).argmax(-1), self.layer(observation)

        batch = collector(Net()).collect()
        assert batch["action"].dtype == torch.int64
        assert batch["output1"].shape == (N, T, 3)

    def test_composite_distribution(self):
        def parameters(observation):
            zeros = observation.new_zeros(4, 2)
            return zeros, zeros, zeros + 1

        keys = [("params", "discrete", "logits"), ("params", "continuous", "loc"), ("params", "continuous", "scale")]
        options = {
            "distribution_map": {
                "discrete": Categorical,
                "continuous": lambda loc, scale: Independent(Normal(loc, scale), 1),
            },
            "name_map": {name: ("action", name) for name in ("discrete", "continuous")},
        }
        with set_composite_lp_aggregate(False):
            actor = ProbabilisticActor(
                TensorDictModule(parameters, ["observation"], keys),
                ["params"],
                distribution_class=CompositeDistribution,
                distribution_kwargs=options,
                return_log_prob=True,
            )
            batch = DeviceCollector(HybridTarget(4), actor, frames_per_batch=16, mode="eager").collect()
        assert batch["action", "discrete"].shape == batch["action", "discrete_log_prob"].shape == (4, 4)
        assert batch["params", "continuous", "loc"].shape == (4, 4, 2)

    def test_random_actions_below_a_mask_are_allowed_ones(self):
        env = TransformedEnv(FuelBreaks(3), ActionMask(mask_key="action_mask"))
        batch = DeviceCollector(env, None, frames_per_batch=15, mode="eager").collect()
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()

    def test_a_policy_under_a_mask_is_first_called_with_an_open_one(self):
        net = TensorDictModule(lambda mask: mask.float(), ["action_mask"], ["logits"])
        inputs = {"logits": "logits", "mask": "action_mask"}
        actor = ProbabilisticActor(TensorDictSequential(net), inputs, distribution_class=MaskedCategorical)
        batch = DeviceCollector(FuelBreaks(3), actor, frames_per_batch=15, mode="eager").collect()
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()

    def test_what_cannot_be_wrapped_names_the_observations(self):
        with pytest.raises(TypeError, match=r"named as observations are, among .*'observation'.*TensorDictModule"):
            collector(torch.nn.Linear(3, 3))

    @pytest.mark.parametrize("factory", [counting_policy, RandomPolicy])
    def test_factory(self, factory):
        assert collector(policy_factory=factory).collect()["action"].shape == (N, T)

    def test_compiled_alone(self, traced):
        plain = collector(counting_policy(), mode="eager").collect()
        assert (collector(counting_policy(), mode="eager", compile_policy=True).collect() == plain).all()

    @pytest.mark.filterwarnings("ignore:Creating Updater which inherits:DeprecationWarning")
    def test_weight_updater_is_called(self):
        class Updater(WeightUpdaterBase):
            calls = 0

            def __call__(self, *args, **kwargs):
                type(self).calls += 1

            def _sync_weights_with_worker(self, *args, **kwargs):
                """Not asked for."""

            _get_server_weights = _maybe_map_weights = all_worker_ids = _sync_weights_with_worker

        collector(weight_updater=Updater).update_policy_weights_()
        assert Updater.calls == 1

    def test_a_copy_on_another_device_is_brought_up_to_date(self):
        net = torch.nn.Linear(3, 3, device="meta")
        policy = TensorDictModule(lambda obs: net(obs).argmax(-1), ["observation"], ["action"])
        policy.net = net
        with pytest.raises((NotImplementedError, ValueError)):
            collector(policy, policy_device="cpu")
        real = TensorDictModule(torch.nn.Linear(3, 3), ["observation"], ["logits"])
        shared = collector(ProbabilisticActor(real, ["logits"], distribution_class=GumbelCategorical), device="cpu")
        assert next(shared.policy.parameters()) is next(real.parameters())


def sampled(mode="eager", **options):
    net = TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["logits"])
    actor = ProbabilisticActor(net, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
    return DeviceCollector(CartPole(64), actor, frames_per_batch=128, mode=mode, **options)


def is_greedy(batch):
    return torch.equal(batch["action"], batch["logits"].argmax(-1))


class TestExploration:
    @pytest.mark.parametrize("mode", ["eager", "compile"])
    def test_context_around_each_call(self, mode, traced):
        made = sampled(mode)
        assert not is_greedy(made.collect())
        for _ in range(2):
            with set_exploration_type(ExplorationType.DETERMINISTIC):
                assert is_greedy(made.collect())
            assert not is_greedy(made.collect())

    def test_what_is_given_wins(self):
        made = sampled(exploration_type=ExplorationType.DETERMINISTIC)
        assert is_greedy(made.collect())
        made.exploration_type = ExplorationType.RANDOM
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            assert not is_greedy(made.collect())

    @pytest.mark.gpu
    def test_graphs_of_both_kinds(self):
        net = TensorDictModule(torch.nn.Linear(4, 2, device="cuda"), ["observation"], ["logits"])
        actor = ProbabilisticActor(net, ["logits"], distribution_class=GumbelCategorical)
        made = DeviceCollector(CartPole(64, device="cuda"), actor, frames_per_batch=128, mode="graph")
        for _ in range(5):
            assert not is_greedy(made.collect())
            with set_exploration_type(ExplorationType.DETERMINISTIC):
                assert is_greedy(made.collect())
        made.shutdown()


class TestBatches:
    def test_limit_of_episodes(self):
        batch = collector(max_frames_per_traj=2).collect()
        assert batch["next", "truncated"].squeeze(-1).tolist() == [[False, True] * 2] * N
        for none in (None, 0, -1):
            assert "step_count" not in collector(max_frames_per_traj=none).collect().keys()

    def test_reset_at_each_iteration(self):
        batches = list(collector(reset_at_each_iter=True, total_frames=2 * N * T))
        assert all((batch["observation"][:, 0, 1] == 0).all() for batch in batches)
        first, second = (set(batch["collector", "traj_ids"].flatten().tolist()) for batch in batches)
        assert not first & second

    def test_set_truncated_marks_the_last_step_and_the_episode_goes_on(self):
        made = collector(set_truncated=True, env=CountingEnv(N, max_episode_steps=100))
        one, two = made.collect().clone(), made.collect()
        assert one["next", "truncated"][:, -1].all()
        assert one["next", "done"][:, -1].all()
        assert not one["next", "truncated"][:, :-1].any()
        assert not one["next", "terminated"][:, -1].all()
        alive = one["next", "observation"][:, -1, 1] == two["observation"][:, 0, 1]
        assert torch.equal(one["collector", "traj_ids"][:, -1][alive], two["collector", "traj_ids"][:, 0][alive])
        assert alive.any()
        assert made.fake_tensordict()["next", "truncated"][:, -1].all()

    def test_split(self):
        (batch,) = collector(max_frames_per_traj=3, split_trajs=True, total_frames=N * T)
        assert batch["collector", "mask"].sum() == N * T
        assert batch.shape[1] == 3

    def test_same_td(self):
        it = iter(collector(return_same_td=True))
        assert next(it) is next(it)
        it = iter(collector())
        assert next(it) is not next(it)

    def test_without_numbers_of_episodes(self):
        assert "collector" not in collector(track_traj_ids=False).collect().keys()

    def test_compact(self):
        keys = collector(compact_obs=True).collect()["next"].keys()
        assert set(keys) == {"reward", "done", "terminated", "truncated"}

    def test_storing_device(self):
        made = collector(storing_device="meta")
        assert made.collect().device.type == "meta"
        assert made.batch.device.type == "cpu"

    def test_hooks_and_versions(self):
        calls = []
        made = collector(
            total_frames=2 * N * T,
            pre_collect_hook=lambda: calls.append("before"),
            post_collect_hook=lambda batch: calls.append(tuple(batch.shape)),
            track_policy_version=True,
        )
        it = iter(made)
        first = next(it)
        made.increment_version()
        second = next(it)
        assert calls == ["before", (N, T)] * 2
        assert (first["next", "policy_version"] == 0).all()
        assert (second["next", "policy_version"] == 1).all()
        assert made.policy_version == made.state_dict()["policy_version"] == 1

    def test_reset_of_some(self):
        made = collector(env=CountingEnv(N, max_episode_steps=100), mode="eager")
        before = made.collect().clone()
        made.reset(1)
        after = made.collect()
        assert after["observation"][1, 0, 1] == 0
        assert after["collector", "traj_ids"][1, 0] > before["collector", "traj_ids"].max()
        goes_on = after["collector", "traj_ids"][2, 0] == before["collector", "traj_ids"][2, -1]
        assert goes_on or before["next", "done"][2, -1]

    @pytest.mark.parametrize("layout", ["padded", "cat", None])
    def test_whole_episodes(self, layout):
        made = collector(trajs_per_batch=4, traj_format=layout, total_frames=10 * N * T)
        for batch in made:
            if layout == "cat":
                ids = batch["collector", "traj_ids"]
                assert batch["next", "done"].sum() == 4
            else:
                assert batch.shape[0] == 4
                ids = batch["collector", "traj_ids"][batch["collector", "mask"]]
            assert len(ids.unique()) == 4


class TestReplay:
    @pytest.mark.filterwarnings("ignore:Using `add")  # TorchRL's collector adds rows of N too
    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
    def test_rows_go_there_and_none_is_yielded(self, storage, whole):
        buffer = ReplayBuffer(storage=storage(100), batch_size=4)
        made = collector(counting_policy(), replay_buffer=buffer, extend_buffer=whole, total_frames=2 * N * T)
        assert list(made) == [None, None]
        stored = buffer[:]
        stored = stored if isinstance(stored, TensorDict) else torch.stack(list(stored))
        plain = collector(counting_policy(), total_frames=2 * N * T)
        expected = torch.cat(list(plain), 0) if whole else torch.cat([batch.transpose(0, 1) for batch in plain])
        assert stored.shape == expected.shape
        assert torch.equal(stored["next", "reward"], expected["next", "reward"])

    def test_episodes_alone(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
        list(collector(replay_buffer=buffer, trajs_per_batch=2, trajs_per_write=1, total_frames=8 * N * T))
        ids, done = buffer[:]["collector", "traj_ids"], buffer[:]["next", "done"].squeeze(-1)
        assert torch.equal(done[:-1], ids[1:] != ids[:-1])

    def test_postproc_before_the_buffer_leaves_the_batch_alone(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        made = collector(replay_buffer=buffer, postproc=lambda td: td.reshape(-1).set("seen", td["action"].reshape(-1)))
        next(iter(made))
        assert len(buffer) == N * T
        assert "seen" not in made.batch.keys()

    @pytest.mark.parametrize("wrong", [{"return_same_td": True}, {"use_buffers": True}])
    def test_contradictions(self, wrong):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100))
        with pytest.raises(TypeError, match=next(iter(wrong))):
            collector(replay_buffer=buffer, **wrong)

    def test_a_thread_of_its_own(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
        made = collector(replay_buffer=buffer, total_frames=10 * N * T)
        made.start()
        with made.pause():
            held = buffer.write_count
            time.sleep(0.02)
            assert buffer.write_count == held
        end = time.monotonic() + 60
        while made.is_running() and time.monotonic() < end:
            time.sleep(0.01)
        made.async_shutdown()
        assert buffer.write_count == 10 * N

    def test_a_thread_that_fails_is_heard_of(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
        made = collector(replay_buffer=buffer, postproc=lambda td: 1 / 0)
        made.start()
        with pytest.raises(RuntimeError, match="expected the collecting thread to run"):
            made.async_shutdown()
        with pytest.raises(RuntimeError, match="expected a replay_buffer"):
            collector().start()


class TestLifeTime:
    def test_after_shutdown_nothing_is_collected(self):
        made = collector(total_frames=24)
        made.collect()
        made.shutdown()
        made.shutdown()
        with pytest.raises(RuntimeError, match="expected an open collector"):
            next(iter(made))

    @pytest.mark.parametrize("wrong", ["empty", "TorchRL's", "numbers", "dtype", "wrapped"])
    def test_a_malformed_state_leaves_everything_as_it_was(self, wrong):
        made, other = collector(counting_policy()), collector(counting_policy())
        made.collect()
        state = made.state_dict()
        if wrong == "empty":
            state = {}
        elif wrong == "TorchRL's":
            state = {"env_state_dict": {}, "policy_state_dict": {}, "iter": 3, "frames": 9}
        elif wrong == "numbers":
            state["traj_ids"] = {"current": torch.arange(N + 1), "next": torch.tensor(9)}
        elif wrong == "dtype":
            state["root"] = [row.double() for row in state["root"]]
        else:
            state["env"] = [{}, *state["env"]]
        with pytest.raises(ValueError, match="state_dict: expected"):
            other.load_state_dict(state)
        assert torch.equal(other.collect()["observation"], collector(counting_policy()).collect()["observation"])

    def test_says_what_it_is_made_of(self):
        made = collector(storing_device="cpu", max_frames_per_traj=3)
        assert "CountingEnv" in repr(made)
        assert made.storing_device == torch.device("cpu")
        assert (made.policy_device, made.env_device, made.max_frames_per_traj) == (None, None, 3)
        assert (made.return_same_td, made.extend_buffer, made.interruptor) == (False, True, None)


class TestUntraceable:
    """A policy that the compiler does not trace: TorchRL's one-hot distribution."""

    def make(self, mode):
        net = TensorDictModule(torch.nn.Linear(3, 3), ["observation"], ["logits"])
        actor = ProbabilisticActor(net, ["logits"], distribution_class=OneHotCategorical)
        env = CountingEnv(N)
        env.action_spec = OneHot(3, shape=(N, 3))
        env.dynamics = lambda state, action: CountingEnv.dynamics(env, state, action.float().argmax(-1))
        env._check_action = lambda td: td.get("action")
        return DeviceCollector(env, actor, frames_per_batch=N * T, mode=mode)

    def test_is_refused_by_name(self, fresh_dynamo):
        with pytest.raises(ValueError, match=r"compiler traces.*_one_hot_wrapper.*mode='eager'"):
            self.make("compile").collect()

    def test_auto_goes_on_in_eager_mode(self, fresh_dynamo, monkeypatch):
        made = self.make("auto")
        made._audit_pending = True  # as on CUDA, where the first step finds out what an env is
        made._compiles = True  # as after the steps that repay it
        monkeypatch.setattr("torchrl_perf.collectors.validation.fastest_mode", lambda device: "compile")
        with pytest.warns(UserWarning, match="cannot be compiled"):
            batch = made.collect()
        assert made.mode == "eager"
        assert torch.equal(batch["observation"][0, 1:, 1], batch["next", "observation"][0, :-1, 1])


def test_serial_env_of_ours_takes_kwargs():
    env = SerialEnv(2, CountingEnv, create_env_kwargs={"num_envs": 3})
    assert DeviceCollector(env, None, frames_per_batch=12, mode="eager").collect().shape == (2, 3, 2)


class Acts(torch.nn.Module):
    """A policy that writes one entry anew and leaves the others."""

    in_keys, out_keys = ("observation",), ("action",)

    def forward(self, tensordict):
        return tensordict.set("action", 2 * tensordict["observation"])


def test_what_a_policy_elsewhere_writes_is_moved_back():
    here, there = torch.device("cpu"), torch.device("meta")
    td = TensorDict({"observation": torch.ones(3, 2)}, [3])  # without a device: moving it makes another
    out = CastPolicy(Acts(), here, here)(td)
    assert out is td
    assert torch.equal(td["action"], torch.full((3, 2), 2.0))
    td = TensorDict({"observation": torch.ones(3, 2)}, [3])
    CastPolicy(Acts(), there, there)(td)
    assert td["action"].is_meta
    assert not td["observation"].is_meta
