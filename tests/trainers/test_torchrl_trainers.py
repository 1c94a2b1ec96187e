"""TorchRL's own PPOTrainer, SACTrainer and DQNTrainer on the device's parts: host reads, and what they learn from."""

import gymnasium
import pytest
import torch
from device_trainers import make_adam, make_dqn, make_ppo, make_sac, weights
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_perf.collectors import HostCollector
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime import host_syncs
from torchrl_perf.trainers import GuardedStepper, use_device_parts
from torchrl_perf.trainers.torchrl.install import _move_buffers

pytestmark = pytest.mark.filterwarnings("ignore:.*Trainer is an experimental")

HOOKS = ("replay_buffer", "optimization_stepper", "device_log")
OFF_POLICY = pytest.mark.parametrize("make", [make_sac, make_dqn], ids=["sac", "dqn"])


def train_strictly(trainer, start):
    """Trains; from the batch number ``start`` on a wait for CUDA is an error."""
    batches = []

    def count(batch):
        batches.append(batch.numel())
        if len(batches) == start:
            torch.cuda.set_sync_debug_mode("error")

    trainer.register_op("pre_steps_log", count)
    trainer.train()
    torch.cuda.set_sync_debug_mode("default")
    assert len(batches) > start + 3


class TestPPO:
    def test_reads_nothing_between_two_rows_of_metrics(self):
        trainer = make_ppo()
        parts = use_device_parts(trainer, make_adam(trainer), minibatch_size=16, log_interval=10_000)
        before = weights(trainer)
        with host_syncs("cpu") as report:
            for batch in trainer.collector:  # one batch by hand, as `train` goes about it
                trainer.collected_frames += batch.numel()
                trainer.optim_steps(batch)
                trainer._post_steps_hook()
                trainer._post_steps_log_hook(batch)
        assert report.total == 0, str(report)
        assert not any(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
        assert parts.log.row == {}

    def test_whole_run_reads_nothing_but_its_rows(self):
        trainer = make_ppo()
        parts = use_device_parts(trainer, make_adam(trainer), minibatch_size=16, log_interval=128)
        with host_syncs("cpu") as report:
            trainer.train()
        assert report.total == 0, str(report)  # the packed copy of a row is waited for, and planned
        assert trainer.collected_frames == 384
        assert parts.log.row["train/steps_skipped"] == 0
        assert parts.log.row["train/grad_norm"] > 0
        assert dict(trainer._log_dict) == {}

    def test_every_epoch_uses_every_row_once(self):
        trainer = make_ppo(total_frames=64)
        seen = []
        trainer.register_op("process_optim_batch", lambda batch: None)  # hooks of others go on working
        use_device_parts(trainer, make_adam(trainer), minibatch_size=16)
        trainer.register_op("post_optim_log", lambda batch: seen.append(batch["action_log_prob"].clone()))
        trainer.train()
        first, second = torch.cat(seen[:4]).sort().values, torch.cat(seen[4:]).sort().values
        assert len(seen) == 8
        assert torch.equal(first, second)
        assert not torch.equal(torch.cat(seen[:4]), torch.cat(seen[4:]))

    def test_scheduler_of_torch_lowers_the_learning_rate_without_a_read(self):
        trainer = make_ppo()
        adam = make_adam(trainer)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam.adam, lambda batches: 1 - batches / 6)
        trainer = make_ppo(lr_scheduler=schedule, loss_module=trainer.loss_module)
        use_device_parts(trainer, adam, minibatch_size=16)
        with host_syncs("cpu") as report:
            trainer.train()
        assert {row.op for row in report.rows} <= {"tolist"}
        assert adam.learning_rate.item() == pytest.approx(0.0, abs=1e-9)

    def test_buffer_of_torchrl_serves_as_well(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=16)
        trainer = make_ppo(total_frames=128)
        parts = use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer)
        trainer.train()
        assert parts.replay.on_policy
        assert trainer._optim_count == 2 * 2 * (4 + 1)  # `train` counts the step that ends an epoch too
        assert len(buffer) == 64

    @pytest.mark.gpu
    @pytest.mark.parametrize("mode", ["eager", "graph"])
    def test_cuda_refuses_no_wait_after_the_start(self, mode):
        trainer = make_ppo("cuda", total_frames=1024)
        parts = use_device_parts(trainer, make_adam(trainer), minibatch_size=16, log_interval=256, mode=mode)
        train_strictly(trainer, start=5)
        assert parts.log.row["train/steps_skipped"] == 0
        assert all(p.isfinite().all() for p in trainer.loss_module.parameters())


@OFF_POLICY
class TestOffPolicy:
    @pytest.mark.parametrize("sampler", ["random", "prioritized"])
    def test_whole_run_reads_nothing_but_its_rows(self, make, sampler):
        trainer = make()
        before = weights(trainer)
        buffer = make_replay_buffer(256, batch_size=32, device="cpu", sampler=sampler)
        parts = use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer, log_interval=192)
        with host_syncs("cpu") as report:
            trainer.train()
        assert report.total == 0, str(report)
        assert parts.log.row["train/steps_skipped"] == 0
        assert trainer._optim_count == 6 * 3
        assert not any(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
        assert dict(trainer._log_dict) == {}

    def test_keeps_random_frames_and_learns_after_them(self, make):
        trainer = make(init_random_frames=128)
        buffer = make_replay_buffer(1024, batch_size=32, device="cpu")
        use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer)
        trainer.train()
        assert len(buffer) == 384
        assert trainer._optim_count == 5 * 3  # the first batch alone is before the 128th frame

    def test_collector_acts_with_the_trained_weights(self, make):
        trainer = make()
        buffer = make_replay_buffer(256, batch_size=32, device="cpu", n_step=2, compact=True)
        use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer)
        trainer.train()
        trained = {p.data_ptr() for p in trainer.loss_module.parameters()}
        assert {p.data_ptr() for p in trainer.collector.policy.parameters()} <= trained

    def test_priorities_are_those_of_the_last_sample(self, make):
        trainer = make(total_frames=64)
        buffer = make_replay_buffer(64, batch_size=32, device="cpu", sampler="prioritized", alpha=1.0)
        samples = []
        use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer)
        trainer.register_op("post_optim_log", samples.append)
        trainer.train()
        last = samples[-1]
        expected = torch.ones(64)
        for sample in samples:
            for slot, priority in zip(sample["index"], sample["td_error"].reshape(32), strict=True):
                expected[slot] = priority
        torch.testing.assert_close(buffer.sampler.tree.weight_of(last["index"]), expected[last["index"]])

    def test_state_goes_on(self, make, tmp_path):
        """What the hooks hold comes back through the trainer's own state, with ``weights_only=True``."""
        trainer = make(total_frames=128)
        buffer = make_replay_buffer(256, batch_size=32, device="cpu", sampler="prioritized")
        parts = use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer, log_interval=1000)
        trainer.train()
        torch.save({name: trainer.state_dict()[name] for name in HOOKS}, tmp_path / "hooks.pt")
        loaded = torch.load(tmp_path / "hooks.pt", weights_only=True)
        other = make(total_frames=128)
        again = use_device_parts(
            other,
            make_adam(other),
            replay_buffer=make_replay_buffer(256, batch_size=32, device="cpu", sampler="prioritized"),
        )
        for name, module in other._modules.items():
            module.load_state_dict(loaded[name])
        assert torch.equal(again.replay.replay_buffer[:]["observation"], buffer[:]["observation"])
        assert torch.equal(again.stepper.skipped, parts.stepper.skipped)
        assert again.log.state_dict()["logged_at"] == 128

    @pytest.mark.gpu
    @pytest.mark.parametrize("sampler", ["random", "prioritized"])
    @pytest.mark.parametrize("mode", ["eager", "graph"])
    def test_cuda_refuses_no_wait_after_the_start(self, make, sampler, mode):
        trainer = make("cuda", total_frames=1024)
        buffer = make_replay_buffer(512, batch_size=32, device="cuda", sampler=sampler)
        parts = use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer, log_interval=256, mode=mode)
        train_strictly(trainer, start=6)
        assert parts.log.row["train/steps_skipped"] == 0
        assert all(p.isfinite().all() for p in trainer.loss_module.parameters())


def test_epsilon_falls_by_frames_in_closed_form():
    trainer = make_dqn(total_frames=256)
    buffer = make_replay_buffer(256, batch_size=32, device="cpu")
    use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer)
    trainer.train()
    assert trainer.greedy_module.frames.item() == 256
    assert trainer.greedy_module.epsilon.item() == pytest.approx(0.75)  # half the way from 1 to 0.5 in 512 frames


def test_envs_on_the_host_serve_as_well():
    parts_of = make_dqn()
    envs = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    trainer = make_dqn(
        collector=HostCollector(envs, parts_of.collector.policy, frames_per_batch=64, total_frames=384),
        loss_module=parts_of.loss_module,
        target_net_updater=parts_of.target_net_updater,
        greedy_module=parts_of.greedy_module,
    )
    buffer = make_replay_buffer(1024, batch_size=32, device="cpu")
    parts = use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer)
    trainer.train()
    assert len(buffer) == 384
    assert trainer._optim_count == 6 * 3
    assert parts.log.row["episode/count"] > 0


@pytest.mark.parametrize("make", [make_ppo, make_sac, make_dqn], ids=["ppo", "sac", "dqn"])
def test_graph_form_of_a_step_equals_the_eager_one(make):
    """On a CPU ``capture`` runs the function itself, once audited: no host wait, no write to its arguments."""
    trainer = make()
    batch = trainer.collector.collect().clone()
    rows = (trainer._pre_epoch_hook(batch) if make is make_ppo else batch).reshape(-1)
    state = {name: value.clone() for name, value in trainer.loss_module.state_dict().items()}
    results = []
    for form in ("_update", "_replay"):
        trainer.loss_module.load_state_dict(state)
        stepper, sample = GuardedStepper(make_adam(trainer)), rows.clone()
        for _ in range(3):
            torch.manual_seed(3)
            values = getattr(stepper, form)(trainer, sample)
        results.append((values, sample.get("td_error", None), weights(trainer)))
    (eager, eager_priority, eager_weights), (graph, graph_priority, graph_weights) = results
    assert eager.keys() == graph.keys()
    assert all(torch.equal(eager[name], graph[name]) for name in eager)
    assert all(torch.equal(a, b) for a, b in zip(eager_weights, graph_weights, strict=True))
    assert (eager_priority is None) == (make is make_ppo)
    assert eager_priority is None or torch.equal(eager_priority, graph_priority)


class TestUseDeviceParts:
    @pytest.mark.filterwarnings("ignore:The 'post_loss' hook stage")
    def test_refuses_parts_that_wait(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=16)
        trainer = make_ppo(replay_buffer=buffer, enable_logging=True)
        with pytest.raises(ValueError, match="received one without replay_buffer=None, enable_logging=False"):
            use_device_parts(trainer, make_adam(trainer), minibatch_size=16)

    def test_refuses_another_clip_norm(self):
        trainer = make_ppo(clip_norm=2.0)
        with pytest.raises(ValueError, match=r"max_grad_norm 0\.5, received 2\.0"):
            use_device_parts(trainer, make_adam(trainer), minibatch_size=16)

    def test_refuses_no_source_and_two_sources_of_minibatches(self):
        trainer = make_ppo()
        buffer = ReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=16)
        with pytest.raises(ValueError, match="exactly one"):
            use_device_parts(trainer, make_adam(trainer))
        with pytest.raises(ValueError, match="exactly one"):
            use_device_parts(trainer, make_adam(trainer), replay_buffer=buffer, minibatch_size=16)

    def test_nothing_is_installed_after_a_refusal(self):
        trainer = make_ppo()
        with pytest.raises(ValueError, match="exactly one"):
            use_device_parts(trainer, make_adam(trainer))
        assert trainer.optimization_stepper is None
        use_device_parts(trainer, make_adam(trainer), minibatch_size=16)
        assert isinstance(trainer.optimization_stepper, GuardedStepper)

    def test_moves_the_buffers_of_the_loss(self):
        """The discount of ``make_value_estimator`` is on the CPU; "meta" stands for another device here."""
        for make in (make_sac, make_dqn):
            loss = make().loss_module
            before = list(loss.parameters())
            _move_buffers(loss, torch.device("meta"))
            assert loss.value_estimator.gamma.device.type == "meta"
            assert all(one is two for one, two in zip(before, loss.parameters(), strict=True))
            assert all(param.device.type == "cpu" for param in before)

    def test_refuses_an_off_policy_trainer_without_a_buffer(self):
        trainer = make_dqn()
        with pytest.raises(ValueError, match="expected a buffer for the off-policy DQNTrainer"):
            use_device_parts(trainer, make_adam(trainer), minibatch_size=16)


def test_what_sac_makes_of_python_data_is_made_before_the_first_step():
    """SACLoss makes its target entropy when it is first asked for, by a copy from the host that a graph refuses."""
    trainer = make_sac()
    assert "_target_entropy" not in trainer.loss_module._buffers
    use_device_parts(trainer, make_adam(trainer), replay_buffer=make_replay_buffer(256, batch_size=32, device="cpu"))
    assert trainer.loss_module._buffers["_target_entropy"].item() == -1.0  # Pendulum has one action dim
