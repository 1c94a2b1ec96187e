"""DeviceCollector: modes, what is refused at construction, resume, TorchRL's transforms and trainers."""

import pytest
import torch
from counting_env import TIME_LIMIT, CountingEnv, ReusingEnv, counting_policy, episode_length, expected_rows
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
from torchrl.envs.transforms import Compose, InitTracker, ObservationNorm, RewardSum, StepCounter

from torchrl_perf.collectors import DeviceCollector, device_collector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.modules import GumbelCategorical
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import PPOConfig, make_actor


def net_policy(keys=("observation",), actions=3, inputs=3, **options):
    net = torch.nn.Linear(inputs, actions, **options)
    return TensorDictModule(lambda obs: net(obs).argmax(-1), list(keys), ["action"]), net


class TestRefusals:
    """Errors at construction say what was expected, what was received, and the remedy."""

    @pytest.mark.parametrize("frames", [0, 5, 7, -4])
    def test_frames_that_the_envs_do_not_divide(self, frames):
        with pytest.raises(ValueError, match=rf"multiple of the number of envs \(4\), received {frames}. Remedy: 4"):
            DeviceCollector(CountingEnv(4), None, frames_per_batch=frames)

    def test_unknown_mode(self):
        with pytest.raises(ValueError, match=r"mode: expected one of .*'graph'.*, received 'fast'"):
            DeviceCollector(CountingEnv(4), None, frames_per_batch=4, mode="fast")

    def test_graph_without_cuda(self):
        with pytest.raises(ValueError, match=r"expected an env on CUDA, received one on cpu. Remedy"):
            DeviceCollector(CountingEnv(4, device="cpu"), None, frames_per_batch=4, mode="graph")

    def test_env_of_changing_shapes(self, monkeypatch):
        env = CountingEnv(4)
        monkeypatch.setattr(CountingEnv, "_has_dynamic_specs", True, raising=False)
        with pytest.raises(ValueError, match=r"expected static shapes, received CountingEnv.*dims of -1. Remedy"):
            DeviceCollector(env, None, frames_per_batch=4)

    def test_policy_reads_an_unknown_key(self):
        policy, _ = net_policy(["pixels"])
        with pytest.raises(ValueError, match=r"received \['pixels'\]") as error:
            DeviceCollector(CountingEnv(4), policy, frames_per_batch=4)
        assert "observation" in str(error.value)

    def test_policy_writes_no_action(self):
        policy = TensorDictModule(lambda obs: obs, ["observation"], ["act"])
        with pytest.raises(ValueError, match=r"expected it to write \['action'\], received .*'act'"):
            DeviceCollector(CountingEnv(4), policy, frames_per_batch=4)

    @pytest.mark.parametrize(
        ("action", "words"),
        [
            (lambda obs: obs[:, :1].long(), r"received \[4, 1\] and torch.int64"),
            (lambda obs: obs[:, 0], r"received \[4\] and torch.float32"),
        ],
    )
    def test_policy_writes_an_action_of_another_kind(self, action, words):
        for policy in (
            TensorDictModule(action, ["observation"], ["action"]),
            lambda td: td.set("action", action(td["observation"])),
        ):
            with pytest.raises(ValueError, match=words):
                DeviceCollector(CountingEnv(4), policy, frames_per_batch=4)

    @pytest.mark.parametrize("options", [{"inputs": 5}, {"dtype": torch.float64}])
    def test_policy_for_another_observation(self, options):
        policy, _ = net_policy(**options)
        with pytest.raises(ValueError, match=r"act on .*'observation' \[4, 3\] torch.float32.*received RuntimeError"):
            DeviceCollector(CountingEnv(4), policy, frames_per_batch=4)

    def test_policy_elsewhere(self):
        policy, net = net_policy(device="meta")
        policy.net = net
        with pytest.raises(ValueError, match=r"expected parameters on cpu.*received \['meta'\]"):
            DeviceCollector(CountingEnv(4), policy, frames_per_batch=4)

    def test_policy_that_waits_under_compile(self):
        policy = TensorDictModule(lambda obs: obs[:, 0].long() * 0 + int(obs.sum().item()), ["observation"], ["action"])
        with pytest.raises(ValueError, match=r"expected no host wait.*test_collector_modes.py:\d+"):
            DeviceCollector(CountingEnv(4), policy, frames_per_batch=4, mode="compile")
        DeviceCollector(CountingEnv(4), policy, frames_per_batch=4, mode="eager").collect()

    def test_env_that_waits_under_compile(self):
        env = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True, device="cpu"))
        with pytest.raises(ValueError, match=r"step and reset without host wait under mode 'compile'"):
            DeviceCollector(env, None, frames_per_batch=4, mode="compile")
        env.close(raise_if_closed=False)

    def test_done_has_to_be_stored(self):
        with pytest.raises(ValueError, match=r"exclude_keys: expected no \('next', 'done'\)"):
            DeviceCollector(CountingEnv(4), None, frames_per_batch=4, exclude_keys=[("next", "done")])

    def test_state_of_another_collector(self):
        state = DeviceCollector(CountingEnv(4), None, frames_per_batch=8).state_dict()
        with pytest.raises(ValueError, match=r"expected root entries .*\(3, 3\).*received shapes .*\(4, 3\)"):
            DeviceCollector(CountingEnv(3), None, frames_per_batch=6).load_state_dict(state)


def transformed(num_envs=5, *, limit=None, base_limit=TIME_LIMIT, norm=True):
    transforms = [RewardSum(), StepCounter(max_steps=limit), InitTracker()]
    if norm:
        transforms.insert(0, ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]))
    return TransformedEnv(CountingEnv(num_envs, max_episode_steps=base_limit), Compose(*transforms))


def zero_policy():
    return TensorDictModule(lambda obs: obs[..., 0].long() * 0, ["observation"], ["action"])


class TestTransforms:
    @pytest.mark.parametrize("limit", [None, 2, 3])
    @pytest.mark.parametrize("mode", ["eager", "auto"])
    def test_equal_to_torchrl_rollout_and_collector(self, limit, mode):
        steps = 17
        rollout = transformed(limit=limit).rollout(steps, zero_policy(), break_when_any_done=False)
        stock = Collector(
            transformed(limit=limit),
            zero_policy(),
            frames_per_batch=5 * steps,
            total_frames=5 * steps,
            auto_register_policy_transforms=False,
        )
        (stock_batch,) = stock
        stock.shutdown()
        batch = DeviceCollector(
            transformed(limit=limit), zero_policy(), frames_per_batch=5 * steps, mode=mode
        ).collect()
        assert rollout["next", "done"].sum() > 10
        keys = [key for key in rollout.keys(True, True) if key != ("next", "is_init")]
        assert {"is_init", "step_count", "episode_reward"} <= set(keys)
        for key in keys:
            torch.testing.assert_close(batch[key], rollout[key], rtol=0, atol=0, msg=str(key))
            torch.testing.assert_close(batch[key], stock_batch[key], rtol=0, atol=0, msg=str(key))

    def test_a_time_limit_of_the_transform_resets_the_env_below(self):
        batch = DeviceCollector(transformed(limit=2, norm=False), zero_policy(), frames_per_batch=5 * 6).collect()
        assert batch["observation"][:, :, 1].tolist() == [[0, 1] * 3] * 5
        assert batch["observation"][0, :, 2].tolist() == [1, 1, 2, 2, 3, 3]
        assert batch["next", "truncated"].squeeze(-1).tolist() == [[False, True] * 3] * 5
        assert batch["collector", "traj_ids"][0].tolist() == [0, 0, 5, 5, 10, 10]

    def test_no_host_read(self):
        collector = DeviceCollector(transformed(limit=3), zero_policy(), frames_per_batch=20)
        collector.collect()
        with no_host_sync():
            batch = collector.collect()
        assert batch["next", "done"].any()

    def test_resume_restores_the_env_below_the_transforms(self):
        one, other = (DeviceCollector(transformed(limit=3), zero_policy(), frames_per_batch=20) for _ in range(2))
        for _ in range(3):
            one.collect()
        state = one.state_dict()
        expected = one.collect().clone()
        other.load_state_dict(state)
        assert (other.collect() == expected).all()


class TestOtherEnvs:
    def make(self):
        env = SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True, device="cpu"))
        env.set_seed(0)
        return env

    def test_gym_envs_in_eager_mode_equal_torchrl(self):
        torch.manual_seed(0)
        policy, _ = net_policy(actions=2, inputs=4)
        stock = Collector(
            self.make(), policy, frames_per_batch=180, total_frames=180, auto_register_policy_transforms=False
        )
        (expected,) = stock
        collector = DeviceCollector(self.make(), policy, frames_per_batch=180, mode="eager")
        batch = collector.collect()
        assert expected["next", "done"].any()
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
            torch.testing.assert_close(batch[key], expected[key], rtol=0, atol=0, msg=str(key))
        stock.shutdown()
        collector.shutdown()

    def test_auto_mode_names_what_waits_and_keeps_the_same_data(self):
        policy, _ = net_policy(actions=2, inputs=4)
        eager, auto = (
            DeviceCollector(self.make(), policy, frames_per_batch=60, mode=mode) for mode in ("eager", "auto")
        )
        expected = eager.collect()
        with pytest.warns(UserWarning, match="SerialEnv is collected in eager mode: a step waits for the host"):
            batch = auto.collect()
        torch.testing.assert_close(batch["next", "observation"], expected["next", "observation"], rtol=0, atol=0)
        eager.shutdown()
        auto.shutdown()

    def test_episodes_begin_anew_after_loading_where_the_env_saves_no_state(self):
        one, other = (DeviceCollector(ReusingEnv(2), None, frames_per_batch=6, mode="eager") for _ in range(2))
        one.collect()
        other.load_state_dict(one.state_dict())
        batch = other.collect()
        assert batch["obs"][0].flatten().tolist() == [0, 1, 2]
        assert batch["collector", "traj_ids"].tolist() == [[2] * 3, [3] * 3]


def sampling_collector(mode="eager", steps=6, **options):
    torch.manual_seed(3)
    env = CartPole(8, max_episode_steps=5)
    actor = make_actor(env, PPOConfig(num_envs=8, hidden_size=32))
    return DeviceCollector(env, actor, frames_per_batch=8 * steps, mode=mode, **options)


class TestState:
    @pytest.mark.parametrize("random_frames", [0, 100])
    def test_resume_is_bitwise_through_a_file(self, tmp_path, random_frames):
        one = sampling_collector(init_random_frames=random_frames)
        for _ in range(2):
            one.collect()
        state, generator = one.state_dict(), torch.get_rng_state()
        torch.save(state, tmp_path / "collector.pt")
        expected = [one.collect().clone() for _ in range(3)]

        other = sampling_collector(init_random_frames=random_frames)
        other.policy.load_state_dict(one.policy.state_dict())
        other.load_state_dict(torch.load(tmp_path / "collector.pt", weights_only=True))
        torch.set_rng_state(generator)
        for batch in expected:
            got = other.collect()
            for key in batch.keys(True, True):
                assert torch.equal(got[key], batch[key]), key
        assert other._frames == one._frames == int(other.frames)
        assert other._iter == one._iter

    def test_a_snapshot_is_a_copy(self):
        collector = sampling_collector()
        collector.collect()
        state = collector.state_dict()
        before = torch.cat([state["env"][0]["state"].flatten(), state["root"][0].flatten().float()])
        collector.collect()
        after = torch.cat([state["env"][0]["state"].flatten(), state["root"][0].flatten().float()])
        assert torch.equal(before, after)

    def test_log_probabilities_of_random_frames_are_zero(self):
        collector = sampling_collector(init_random_frames=16)
        log_prob = collector.collect()["action_log_prob"]
        assert (log_prob[:, :2] == 0).all()
        assert (log_prob[:, 2:] < 0).all()


class TestCompile:
    @pytest.mark.parametrize("backend", ["traced", pytest.param("fresh_dynamo", marks=pytest.mark.slow)])
    def test_compiled_equals_eager(self, backend, request):
        request.getfixturevalue(backend)
        with torch._inductor.config.patch(fallback_random=True):
            torch.manual_seed(7)
            eager = [batch.clone() for batch, _ in zip(sampling_collector("eager").iterator(), range(3), strict=False)]
            collector = sampling_collector("compile")
            for expected in eager:
                batch = collector.collect()
                for key in expected.keys(True, True):
                    torch.testing.assert_close(batch[key], expected[key], rtol=1e-5, atol=1e-6, msg=str(key))

    @pytest.mark.parametrize(("norm", "compiles_any_step"), [(True, True), (False, True), (True, False)])
    @pytest.mark.slow
    def test_compiled_counting_with_transforms(self, norm, compiles_any_step, fresh_dynamo, monkeypatch):
        if compiles_any_step and not device_collector.COMPILES_ANY_STEP:
            pytest.skip("the compiler of this torch does not trace TorchRL's own step")
        monkeypatch.setattr(device_collector, "COMPILES_ANY_STEP", compiles_any_step)
        collector = DeviceCollector(transformed(norm=norm), zero_policy(), frames_per_batch=50, mode="compile")
        base = collector.env.base_env
        assert list(collector._base_fns) == ([] if compiles_any_step else list(base.tensor_parts))
        batch = collector.collect()
        assert not vars(base).keys() & set(base.tensor_parts)
        scale, shift = (2.0, 0.5) if norm else (1.0, 0.0)
        index, step, episode = ((batch["observation"] - shift) / scale).unbind(-1)
        ends = torch.minimum(episode_length(index, episode), torch.tensor(TIME_LIMIT))
        assert torch.equal(batch["is_init"].squeeze(-1), step == 0)
        assert torch.equal(batch["next", "done"].squeeze(-1), step + 1 == ends)
        assert torch.equal(batch["step_count"].squeeze(-1), step.long())
        assert torch.equal(
            batch["next", "observation"][..., 1] - batch["observation"][..., 1], torch.full((5, 10), scale)
        )

    def test_an_env_that_disregards_its_mask_resets_on_the_host(self, traced):
        collector = DeviceCollector(ReusingEnv(2, masked=False, length=3), None, frames_per_batch=14, mode="compile")
        assert collector.collect()["obs"][1].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.filterwarnings("ignore:PPOTrainer is an experimental", "ignore:The '(optimizer|post_loss)' hook stage")
@pytest.mark.parametrize("ours", [False, True], ids=["torchrl's GAE", "GAETransform"])
def test_accepted_by_torchrl_ppo_trainer(ours):
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.trainers.algorithms import PPOTrainer

    env = CartPole(4)
    net = TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["logits"])
    actor = ProbabilisticActor(net, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
    critic = ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic)
    if ours:
        gae_module = pytest.importorskip("torchrl_perf.transforms.gae")
        gae = gae_module.GAETransform(gamma=0.99, lmbda=0.95, value_network=critic)
    else:
        gae = None
    collector = DeviceCollector(env, actor, frames_per_batch=32, total_frames=96, exclude_keys=("logits",))
    trainer = PPOTrainer(
        collector=collector,
        total_frames=96,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        num_epochs=2,
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(32), sampler=SamplerWithoutReplacement(), batch_size=16),
        gae=gae,
        enable_logging=False,
        progress_bar=False,
    )
    before = net.module.weight.detach().clone()
    trainer.train()
    assert trainer.collected_frames == 96
    assert not torch.equal(net.module.weight, before)


@pytest.mark.gpu
class TestGraph:
    def make(self, mode, num_envs=64):
        torch.manual_seed(5)
        env = Pendulum(num_envs, device="cuda", max_episode_steps=7)
        actor = make_actor(env, PPOConfig(env="Pendulum", num_envs=num_envs))
        return DeviceCollector(env, actor, frames_per_batch=num_envs * 8, mode=mode)

    def test_counting_rows(self):
        env = CountingEnv(5, device="cuda", max_episode_steps=TIME_LIMIT)
        collector = DeviceCollector(env, counting_policy(), frames_per_batch=15, mode="graph")
        data = torch.cat([collector.collect().clone() for _ in range(8)], 1).cpu()
        expected = expected_rows(5, 24)
        assert torch.equal(data["observation"], expected["obs"].float())
        assert torch.equal(data["next", "reward"].squeeze(-1), expected["reward"].float())
        assert torch.equal(data["next", "done"].squeeze(-1), expected["done"])
        assert int(collector.frames) == 8 * 15

    def test_auto_is_graph_and_noise_is_fresh(self):
        collector = self.make("auto")
        for _ in range(5):
            collector.collect()
        assert collector.mode == "graph"
        one, two = collector.collect()["action"].clone(), collector.collect()["action"].clone()
        assert not torch.equal(one, two)

    def test_no_synchronisation(self):
        collector = self.make("graph")
        for _ in range(4):
            collector.collect()
        with no_host_sync("cuda", trace=False):
            collector.collect()

    def test_memory_is_flat(self):
        collector = self.make("graph")
        for _ in range(4):
            collector.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(100):
            collector.collect()
        assert torch.cuda.memory_allocated() == before

    def test_eager_and_graph_agree_where_nothing_is_random(self):
        batches = []
        for mode in ("eager", "graph"):
            env = CountingEnv(33, device="cuda", max_episode_steps=TIME_LIMIT)
            collector = DeviceCollector(env, counting_policy(), frames_per_batch=33 * 5, mode=mode)
            batches.append(torch.cat([collector.collect().clone() for _ in range(6)], 1))
        assert (batches[0] == batches[1]).all()


def test_says_whether_each_step_asks_the_host():
    gym = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True, device="cpu"))
    assert DeviceCollector(gym, None, frames_per_batch=4, mode="eager").waits_for_host
    assert not DeviceCollector(CartPole(2), None, frames_per_batch=4, mode="eager").waits_for_host
