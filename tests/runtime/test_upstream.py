"""What ``runtime/upstream`` reads of other packages: the installed versions have it, and it does what is said there."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
from torchrl.envs.transforms import FrameSkipTransform, StepCounter
from torchrl.modules import LSTMModule, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss

from torchrl_perf.envs import CartPole
from torchrl_perf.modules import GumbelCategorical
from torchrl_perf.runtime.upstream import (
    audit,
    buffers,
    envs,
    loggers,
    memory,
    modules,
    policies,
    tensordicts,
    threads,
    transforms,
    wandb_service,
)


class TestMemory:
    def test_tensors_views_and_autograd_nodes_hold_memory(self):
        tensor, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        storage = tensor.untyped_storage()
        alone = memory.holders(storage)
        alias = tensor.detach()
        view = alias[1:]
        assert memory.holders(storage) == alone + 2
        del alias
        assert memory.holders(storage) > alone  # the view, and what it is a view of
        del view
        assert memory.holders(storage) == alone
        product = tensor.detach() * weight  # saved for its backward pass
        assert memory.holders(storage) == alone + 1
        product.sum().backward()
        del product
        assert memory.holders(storage) == alone


class TestEnvs:
    def test_inner_reset_passes_the_transforms_and_honours_the_mask(self):
        env = TransformedEnv(CartPole(3), StepCounter())
        td = env.step(env.rand_action(env.reset()))["next"]
        root = td.empty().set("_reset", torch.tensor([[True], [False], [False]]))
        root["step_count"] = td["step_count"]
        fresh = envs.inner_reset(env, root)
        assert fresh["step_count"].flatten().tolist() == [0, 1, 1]
        assert torch.equal(fresh["observation"][1:], td["observation"][1:])
        assert not torch.equal(fresh["observation"][:1], td["observation"][:1])

    def test_inner_reset_without_a_mask_is_reset(self):
        one, other = CartPole(2), CartPole(2)
        torch.manual_seed(0)
        want = one.reset()
        torch.manual_seed(0)
        assert torch.equal(envs.inner_reset(other)["observation"], want["observation"])

    def test_inner_step_is_what_comes_under_next(self):
        env = GymEnv("CartPole-v1")
        td = env.rand_action(env.reset(seed=0))
        got = envs.inner_step_of(env)(td)
        env.reset(seed=0)
        assert torch.equal(got["observation"], env.step(td)["next", "observation"])

    def test_complete_done_adds_the_flags_that_a_step_left_out(self):
        env = GymEnv("CartPole-v1")
        following = TensorDict({"terminated": torch.tensor([True])}, [])
        envs.complete_done(env, following)
        assert following["done"].item() and not following["truncated"].item()

    def test_observations_of_ends_are_hidden_and_returned(self):
        env = CartPole(2)
        stepped = env.step(env.rand_action(env.reset()))
        seen = stepped["next", "observation"].clone()
        stepped["next", "done"] = torch.tensor([[True], [False]])
        kept = envs.hide_observations_of_ends(env, stepped)
        assert torch.equal(kept["observation"], seen)
        assert stepped["next", "observation"].isnan().all(-1).tolist() == [True, False]

    @pytest.mark.parametrize("allowed", [False, True])
    def test_done_after_reset(self, allowed):
        env = GymEnv("CartPole-v1", allow_done_after_reset=allowed)
        assert envs.may_be_done_after_reset(TransformedEnv(env)) is allowed

    def test_dynamic_specs(self):
        env = CartPole(2)
        assert not envs.has_dynamic_specs(TransformedEnv(env))
        batch = SerialEnv(2, lambda: GymEnv("CartPole-v1"), use_buffers=False)
        assert envs.has_dynamic_specs(batch)

    def test_members_of_a_batch(self):
        batch = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        batch.reset()
        assert [type(each) for each in envs.members_of(batch)] == [GymEnv, GymEnv]
        assert envs.members_of(CartPole(2)) == []

    def test_the_code_of_a_frame_skip_runs_in_its_second_step(self):
        codes = []

        class Watched(CartPole):
            def _step(self, tensordict):
                codes.append(_codes())
                return super()._step(tensordict)

        env = TransformedEnv(Watched(2), FrameSkipTransform(2))
        env.step(env.rand_action(env.reset()))
        assert [envs.FRAME_SKIP_CODE in each for each in codes] == [False, True]

    def test_a_replaced_method_is_called_by_torchrl_and_comes_back(self):
        env, called = TransformedEnv(CartPole(2)), []
        below, inner = env.base_env, envs.inner_step_of(env.base_env)

        def step(tensordict):
            called.append(True)
            return inner(tensordict)

        td = env.rand_action(env.reset())
        with pytest.raises(KeyError, match="stop"), envs.replaced(below, {"_step": step}):
            env.step(td)
            raise KeyError("stop")
        env.step(td)
        assert called == [True]
        assert "_step" not in vars(below)


def _codes():
    frame, codes = inspect.currentframe(), []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes


class TestTensordicts:
    def test_unchecked_takes_the_tensors_themselves(self):
        leaf = torch.zeros(2, 3)
        td = tensordicts.unchecked({"a": {"b": leaf}}, batch_size=torch.Size([2]), device=torch.device("cpu"))
        assert td["a", "b"] is leaf
        assert td.batch_size == td["a"].batch_size == torch.Size([2])

    def test_entries_are_those_of_the_tensordict(self):
        td, leaf = TensorDict({"a": {"b": torch.zeros(2)}}, [2]), torch.ones(2)
        entries = tensordicts.entries_of(td)
        entries["c"] = leaf
        assert td["c"] is leaf
        assert type(entries["a"]) is TensorDict

    def test_modules_take_tensordicts(self):
        net, td = TensorDictModule(nn.Identity(), ["a"], ["b"]), TensorDict({"a": torch.ones(2)}, [2])
        with tensordicts.modules_take_tensordicts(True):
            assert net(td)["b"] is td["a"]
        with tensordicts.modules_take_tensordicts(False):
            assert net(td)["b"] is td["a"]


class TestBuffers:
    def test_parts_of_a_buffer(self):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), dim_extend=0)
        assert buffers.sampler_of(buffer) is buffer.sampler
        assert buffers.writer_of(buffer) is buffer.writer
        assert buffers.dim_extend_of(buffer) == 0
        assert buffers.sample_unit_of(buffer) is None

    def test_the_sample_unit_of_a_buffer(self):
        assert "sample_unit" in inspect.signature(ReplayBuffer.__init__).parameters
        assert "_sample_unit" in vars(TensorDictReplayBuffer(storage=LazyTensorStorage(4)))

    def test_a_buffer_that_attaches_itself_has_no_sampler_yet_or_its_own(self):
        seen = []

        class Storage(LazyTensorStorage):
            def attach(self, buffer):
                seen.append((buffers.sampler_of(buffer), buffers.writer_of(buffer), buffers.dim_extend_of(buffer)))
                super().attach(buffer)

        buffer = TensorDictReplayBuffer(storage=Storage(4))
        buffer.extend(TensorDict({"a": torch.zeros(2)}, [2]))
        assert seen
        assert {sampler for sampler, _, _ in seen} <= {None, buffer.sampler}

    def test_rows_that_are_taken_back_were_never_counted(self):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
        assert isinstance(buffer.writer, RoundRobinWriter)
        buffer.extend(TensorDict({"a": torch.zeros(3)}, [3]))
        assert (buffers.next_slot_of(buffer.writer), buffer.write_count) == (3, 3)
        buffers.take_back(buffer.writer, 2, 1)
        assert (buffers.next_slot_of(buffer.writer), buffer.write_count) == (1, 1)
        buffer.extend(TensorDict({"a": torch.ones(1)}, [1]))
        assert buffer.storage[:]["a"].tolist()[:3] == [0.0, 1.0, 0.0]


def test_leaves_by_key():
    lazy = lazy_stack([TensorDict({"d": torch.zeros(1)}, [1]), TensorDict({"d": torch.ones(1)}, [1])], 0)
    td = TensorDict(
        {"a": torch.zeros(2), "next": {"b": torch.ones(2), "deep": {"c": torch.ones(2)}}, "lazy": lazy}, [2]
    )
    expected = dict(td.items(True, True))
    found = tensordicts.leaves_of(td)
    assert set(found) == set(expected) == {"a", ("next", "b"), ("next", "deep", "c"), ("lazy", "d")}
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert found["next", "b"] is td["next", "b"]


class TestModules:
    @pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
    def test_hooks(self, kind):
        net = nn.Linear(1, 1)
        assert not modules.has_hooks(net) and not modules.is_changed(net)
        handle = getattr(net, f"register_{kind}_hook")(lambda *_: None)
        assert modules.has_hooks(net) and modules.is_changed(net)
        handle.remove()
        assert not modules.has_hooks(net) and not modules.is_changed(net)

    @pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
    def test_hooks_of_all_modules(self, kind):
        net = nn.Linear(1, 1)
        held = modules.hook_dicts(net)
        handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None)
        try:
            assert modules.has_hooks(net) and modules.is_changed(net) and any(held) and any(modules.hook_dicts())
        finally:
            handle.remove()
        assert not modules.has_hooks(net) and not any(held)

    def test_a_forward_of_one_module(self):
        net = nn.Linear(1, 1)
        net.forward = torch.sigmoid
        assert modules.is_changed(net) and not modules.has_hooks(net)

    def test_parameters_lie_by_name(self):
        net = nn.Linear(1, 1)
        held = modules.param_dict(net)
        assert held["weight"] is net.weight
        del net.weight
        assert held.keys() == {"bias"}
        net.weight = nn.Parameter(torch.zeros(1, 1))
        assert held["weight"] is net.weight
        net.bias = None
        assert held["bias"] is None

    @pytest.mark.parametrize("kind", ["forward", "full_backward", "full_backward_pre"])
    def test_dicts_of_hooks(self, kind):
        net = nn.Linear(1, 1)
        assert not any(modules.hook_dicts(net))
        getattr(net, f"register_{kind}_hook")(lambda *_: None)
        assert any(modules.hook_dicts(net))

    def test_slots_show_a_tensor_that_was_replaced(self):
        net = nn.BatchNorm1d(2)
        slots = list(modules.tensor_slots(net))
        held = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        assert {name: id(tensor) for _, name, tensor in slots} == {name: id(tensor) for name, tensor in held.items()}
        net.weight = nn.Parameter(torch.zeros(2))
        assert [name for holder, name, tensor in slots if holder[name] is not tensor] == ["weight"]
        params = TensorDictParams(TensorDict.from_module(nn.Sequential(nn.Linear(1, 2))))
        assert {id(tensor) for _, _, tensor in modules.tensor_slots(params)} == {
            id(leaf) for leaf in params.values(True, True)
        }

    def test_a_replica_has_other_parameters_and_leaves_the_module_alone(self):
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        net.append(net[0])
        alias = net[0].weight.detach().clone()
        copy = modules.replica(net, {id(net[0].weight): alias})
        assert copy[0].weight is alias
        assert copy[2] is copy[0]
        assert isinstance(net[0].weight, nn.Parameter)
        assert copy[0].bias is net[0].bias
        assert copy[1].running_mean is net[1].running_mean

    def test_the_function_sees_parameters_and_buffers(self):
        net = nn.BatchNorm1d(2)
        modules.apply_to_tensors(net, lambda value: value.double() if value.is_floating_point() else value)
        assert {net.weight.dtype, net.running_mean.dtype} == {torch.float64}


class TestTransforms:
    def test_what_holds_a_transform(self):
        one, other, alone = StepCounter(), StepCounter(), StepCounter()
        env = TransformedEnv(CartPole(2), one)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=other)
        assert transforms.holder_of(one) is env
        assert transforms.holder_of(other) is buffer.transform
        assert transforms.holder_of(alone) is None

    def test_a_recurrent_policy_brings_its_state(self):
        env = GymEnv("CartPole-v1")
        lstm = LSTMModule(4, 3, in_key="observation", out_key="features")
        assert "recurrent_state_h" in policies.with_transforms_of(env, lstm).reset().keys()


class TestRows:
    def test_tensors_become_numbers(self):
        assert loggers.without_tensors({"a": torch.tensor(1.5), "b": 2}) == {"a": 1.5, "b": 2}
        td = TensorDict({"a": {"b": torch.tensor(1.5)}}, [])
        assert loggers.without_tensors(td, keys_sep="/") == {"a/b": 1.5}


class TestThreads:
    def test_those_of_pools(self):
        with ThreadPoolExecutor(1) as pool:
            own = pool.submit(threading.current_thread).result()
            assert own in threads.pool_threads()
        assert threading.current_thread() not in threads.pool_threads()


class TestAudit:
    def test_views_share_their_memory(self):
        one = torch.zeros(4)
        assert audit.memory_of(one) == audit.memory_of(one[1:]) != audit.memory_of(torch.zeros(4))
        assert audit.memory_of(torch.zeros(0)) != audit.memory_of(torch.zeros(0, 1))
        assert audit.memory_of(torch.eye(2).to_sparse()) is None

    def test_kernels_are_taken_back(self):
        library = torch.library.Library("torchrl_perf_test", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        assert torch.ops.torchrl_perf_test.twice(torch.ones(1)).item() == 2
        audit.take_kernels_back(library)
        library = torch.library.Library("torchrl_perf_test", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError):
            torch.ops.torchrl_perf_test.twice(torch.ones(1))
        audit.take_kernels_back(library)

    def test_the_call_waits_for_a_context(self, monkeypatch):
        called, queue = [], []
        monkeypatch.setattr(torch.cuda, "_initialized", False)
        monkeypatch.setattr(torch.cuda, "_queued_calls", queue)
        audit.once_cuda_is_initialized(lambda: called.append(True))
        assert len(queue) == 1
        assert called == []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        audit.once_cuda_is_initialized(lambda: called.append(True))
        assert called == [True]


class TestWandb:
    def test_names_of_the_installed_version(self):
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib.service import service_connection, service_process
        from wandb.sdk.wandb_run import Run

        assert callable(Run._unregister_telemetry_import_hooks)
        assert hasattr(wandb_setup, "_singleton")
        assert "self._connection" in inspect.getsource(wandb_setup)
        assert "self._cleanup = " in inspect.getsource(service_connection)
        assert "self._proc = " in inspect.getsource(service_connection)
        assert "self._process = " in inspect.getsource(service_process)

    def test_hooks_of_a_run_are_forgotten(self, monkeypatch):
        from wandb.sdk.lib import import_hooks

        hooks = {"xgboost": {"mine": print, "another": print}}
        monkeypatch.setattr(import_hooks, "_post_import_hooks", hooks)
        wandb_service.forget_import_hooks("mine")
        assert hooks == {"xgboost": {"another": print}}

    def test_no_service_is_not_ended(self, monkeypatch):
        import wandb.sdk.wandb_setup as setup

        monkeypatch.setattr(setup, "_singleton", None)
        assert not wandb_service.forget_service(kill=True)


class TestVmas:
    def test_parts_of_a_step(self):
        pytest.importorskip("vmas")
        from torchrl.envs import VmasEnv

        from torchrl_perf.runtime.upstream import vmas

        env = vmas.simulation_of(VmasEnv("balance", num_envs=2, continuous_actions=False, n_agents=2))
        agent = env.agents[0]
        before = agent.action.u_noise, agent.c_noise
        still, words = vmas.decoded_action(env, agent, torch.zeros(2, 1, dtype=torch.int64))
        assert still.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert words is None
        assert (agent.action.u_noise, agent.c_noise) == before
        assert vmas.has_gravity(env.world)
        pulled = []
        vmas.replace_gravity(env.world, lambda world, entity: pulled.append((world, entity)))
        env.world.step()
        assert {entity for _, entity in pulled} == set(env.world.entities)
        assert {world for world, _ in pulled} == {env.world}
        assert vmas.shapes_collide(env.world, agent, env.agents[1])


@pytest.mark.parametrize("kind", [ClipPPOLoss, KLPENPPOLoss])
def test_what_our_ppo_losses_inherit(kind):
    """They are TorchRL's own losses, and read what those keep for ``forward``."""
    net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=GumbelCategorical)
    loss = kind(actor, ValueOperator(nn.Linear(4, 1), in_keys=["observation"]))
    assert loss._has_critic is True
    assert loss._entropy_coeff_map is None
    assert set(loss._cached_critic_network_params_detached.keys()) == set(loss.critic_network_params.keys())
    assert all(isinstance(key, str | tuple) for key in loss._loss_mask_keys())
