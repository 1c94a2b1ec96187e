"""GAETransform called exactly as TorchRL's GAE, and final observations that are missing."""

import copy

import pytest
import torch
from tensordict import TensorDict, from_module
from tensordict.nn import TensorDictModule, TensorDictSequential, set_skip_existing
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import LazyTensorStorage
from torchrl.modules import LSTMModule, set_recurrent_mode
from torchrl.objectives.value import GAE

from torchrl_perf.functional import generalized_advantage_estimate
from torchrl_perf.functional.rows.missing import stand_in, stand_in_rows, steps_without_successor
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import GAETransform, NStepTransform

N, T, OBS = 4, 7, 3
NUMBERS = {"gamma": 0.9, "lmbda": 0.8}


def critic(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(OBS, 5), nn.Tanh(), nn.Linear(5, 1))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"], **options)


def batch(share=0.3):
    torch.manual_seed(1)
    done = torch.rand(N, T, 1) < share
    terminated = done & (torch.rand(N, T, 1) < 0.5)
    after = {"observation": torch.randn(N, T, OBS), "reward": torch.randn(N, T, 1)}
    after |= {"done": done, "terminated": terminated, "truncated": done & ~terminated}
    return TensorDict({"observation": torch.randn(N, T, OBS), "next": after}, [N, T], names=[None, "time"])


def without_final(data):
    """TorchRL's convention: NaN in the next observation of each step that ends an episode."""
    data = data.clone()
    data["next", "observation"] = torch.where(data["next", "done"], torch.nan, data["next", "observation"])
    return data


def both(data, call=lambda estimator, td: estimator(td), network=None, **options):
    network = critic() if network is None else network
    return [call(kind(value_network=network, **NUMBERS, **options), data.clone()) for kind in (GAETransform, GAE)]


def assert_same(one, other, keys=("advantage", "value_target")):
    for key in keys:
        torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-5, msg=str(key))


class TestArguments:
    @pytest.mark.parametrize(
        "options",
        [
            {"average_gae": True},
            {"vectorized": True},
            {"vectorized": False},
            {"deactivate_vmap": True},
            {"auto_reset_env": True},
            {"device": "cpu"},
            {"time_dim": 1},
            {"time_dim": -1},
            {"value_chunk_size": 2},
            {"value_chunk_size": 3, "value_chunk_dim": 1},
            {"num_chunks": 3},
            {"num_chunk": 2},
            {"skip_existing": True},
            {"differentiable": True},
            {"shifted": False, "shifted_budget": 1, "group_key": None},
        ],
        ids=str,
    )
    def test_used_as_torchrl_uses_them(self, options):
        assert_same(*both(batch(), **options))

    @pytest.mark.parametrize(
        "options",
        [{"shifted": True}, {"shifted_budget": 2}, {"group_key": "task"}, {"chunk_size": 2, "num_chunks": 2}],
        ids=str,
    )
    def test_the_rest_is_refused(self, options):
        with pytest.raises(ValueError, match=r"expected .*Remedy"):
            GAETransform(value_network=None, **NUMBERS, **options)
        for name in ("advantage_key", "value_target_key", "value_key"):
            with pytest.raises(RuntimeError, match=name):
                GAETransform(value_network=None, **NUMBERS, **{name: "a"})
        with pytest.raises(ValueError, match="value_chunk_size and num_chunks"):
            GAETransform(value_network=None, **NUMBERS, value_chunk_size=1, num_chunks=1)

    def test_chunks_are_calls(self):
        net, rows = critic(), []
        net.register_forward_hook(lambda module, args, out: rows.append(args[0].shape.numel()))
        for options, size in (({"value_chunk_size": 1}, T), ({"num_chunks": 2}, 2 * T), ({"chunk_size": 5}, 5)):
            rows.clear()
            GAETransform(value_network=net, **NUMBERS, **options)(batch())
            assert max(rows) == size, options

    @pytest.mark.parametrize("targets", [False, True])
    @pytest.mark.parametrize("lost", [False, True])
    def test_parameters_are_given(self, targets, lost):
        net = critic()
        params = from_module(copy.deepcopy(net)).data.apply(lambda x: x + 0.5)
        options = {"params": params}
        if targets:
            options["target_params"] = params.apply(lambda x: x - 0.3)
        data = without_final(batch()) if lost else batch()
        assert_same(*both(data, lambda estimator, td: estimator(td, **options), net))
        ours, theirs = both(data, lambda estimator, td: estimator.value_estimate(td, **options), net)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="params beside target_params"):
            GAETransform(value_network=net, **NUMBERS)(data, target_params=params)

    def test_time_is_given(self):
        data = TensorDict(batch().transpose(0, 1).to_dict(), [T, N])
        assert_same(*both(data, lambda estimator, td: estimator(td, time_dim=0)))

    def test_values_that_exist(self):
        data = batch()
        data["state_value"], data["next", "state_value"] = torch.randn(2, N, T, 1).unbind(0)
        net = TensorDictModule(nn.Linear(OBS, 1), ["observation"], ["state_value"])
        for call in (
            GAETransform(value_network=net, skip_existing=True, **NUMBERS),
            GAETransform(value_network=None, **NUMBERS),
        ):
            want = GAE(value_network=None, **NUMBERS)(data.clone())
            assert_same(call(data.clone()), want)
        with set_skip_existing(True):
            assert_same(GAETransform(value_network=net, **NUMBERS)(data.clone()), want)
        fresh = GAETransform(value_network=net, **NUMBERS)(data.clone())
        assert not torch.equal(fresh["state_value"], data["state_value"])

    def test_a_value_of_ones_own(self):
        value = torch.randn(N, T, 1)
        gae = GAETransform(value_network=critic(), **NUMBERS)
        data = batch()
        want = generalized_advantage_estimate(
            0.9, 0.8, critic()(data.clone())["state_value"], value,
            *(data["next", key] for key in ("reward", "done", "terminated")),
        )[1]  # fmt: skip
        torch.testing.assert_close(gae.value_estimate(data, next_value=value), want)
        assert "advantage" not in data.keys()

    def test_tensors_by_keyword(self):
        td = batch()
        names = {f"next_{key}": td["next", key] for key in ("observation", "reward", "done", "terminated")}
        ours, theirs = (kind(value_network=critic(), **NUMBERS) for kind in (GAETransform, GAE))
        assert ours.in_keys == theirs.in_keys
        assert ours.out_keys == theirs.out_keys
        for one, other in zip(
            ours(observation=td["observation"], **names), theirs(observation=td["observation"], **names), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    def test_gradients_pass_if_asked(self):
        def call(estimator, td):
            td["observation"].requires_grad_()
            td["next", "reward"].requires_grad_()
            estimator(td)["value_target"].sum().backward()
            return td["observation"].grad, td["next", "reward"].grad

        net = critic()
        for data in (batch(), without_final(batch())):
            ours, theirs = both(data, call, net, differentiable=True)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert all(parameter.grad is None for parameter in net.parameters())

    def test_a_critic_without_a_next_observation_is_refused(self):
        with pytest.raises(KeyError, match=r"expected one of \[\('next', 'observation'\)\]"):
            GAETransform(value_network=critic(), **NUMBERS)(batch().exclude(("next", "observation")))


class TestAverage:
    def test_of_the_rows_that_count(self):
        data, valid = batch(), torch.rand(N, T) < 0.6
        plain = GAETransform(value_network=critic(), **NUMBERS)(data.clone())["advantage"]
        want = (plain - plain[valid].mean()) / plain[valid].std()
        for key, flag in ((("collector", "mask"), valid), ("present", valid), ("present", valid.unsqueeze(-1))):
            options = {} if key != "present" else {"valid_key": key}
            gae = GAETransform(value_network=critic(), average_gae=True, **NUMBERS, **options)
            got = gae(data.clone().set(key, flag))["advantage"]
            torch.testing.assert_close(got[valid], want[valid])
            assert not got[~valid].any()

    def test_agents_count_for_themselves(self):
        data = batch()
        data["observation"], data["next", "observation"] = torch.randn(2, N, T, 2, OBS).unbind(0)
        data["present"] = torch.rand(N, T, 2) < 0.6
        plain = GAETransform(value_network=critic(), **NUMBERS)(data.clone())["advantage"]
        got = GAETransform(value_network=critic(), average_gae=True, valid_key="present", **NUMBERS)(data.clone())
        counted = plain[data["present"]]
        want = (counted - counted.mean()) / counted.std()
        torch.testing.assert_close(got["advantage"][data["present"]], want)


class TestMissingFinalObservations:
    def test_hand_computed(self):
        net = TensorDictModule(nn.Identity(), ["observation"], ["state_value"])
        ones, ends = torch.ones(1, 3, 1), torch.tensor([[[False], [True], [False]]])
        after = {"observation": torch.tensor([[[1.0], [torch.nan], [1.0]]]), "reward": ones, "done": ends}
        after |= {"truncated": ends, "terminated": torch.zeros_like(ends)}
        data = TensorDict({"observation": ones, "next": after}, [1, 3])
        for kind in (GAETransform, GAE):
            got = kind(gamma=0.9, lmbda=0.9, value_network=net)(data.clone())["advantage"].flatten()
            torch.testing.assert_close(got, torch.tensor([1.629, 0.9, 0.9]))
        values = data.clone().set("state_value", ones).set(("next", "state_value"), after["observation"])
        got = GAETransform(gamma=0.9, lmbda=0.9, value_network=None)(values)["advantage"].flatten()
        torch.testing.assert_close(got, torch.tensor([1.629, 0.9, 0.9]))

    @pytest.mark.parametrize(
        "options", [{}, {"num_chunks": 2}, {"average_gae": True}, {"differentiable": True}, {"auto_reset_env": True}]
    )
    def test_equals_torchrl(self, options):
        data = without_final(batch())
        ours, theirs = both(data, **options)
        assert_same(ours, theirs)
        assert ours["advantage"].isfinite().all()
        assert ours["next", "observation"].isnan().any()  # the batch says still what the env said

    def test_the_last_step_of_a_batch_has_none_either(self):
        data = batch(0.0)
        data["next", "observation"][:, -1] = torch.nan  # NextStateReconstructor
        assert_same(*both(data))

    def test_a_nan_elsewhere_is_seen(self):
        data = batch(0.0)
        data["next", "observation"][1, 3] = torch.nan
        got = GAETransform(value_network=critic(), **NUMBERS)(data)["advantage"]
        assert got[1, :4].isnan().all()
        assert got[[0, 2, 3]].isfinite().all()
        assert got[1, 4:].isfinite().all()

    def test_recurrent_critics(self):
        lstm = LSTMModule(OBS, 5, in_key="observation", out_key="embedding")
        head = TensorDictModule(nn.Linear(5, 1), ["embedding"], ["state_value"])
        net, data = TensorDictSequential(lstm, head), without_final(batch())
        done = data["next", "done"]
        data["is_init"] = torch.cat([torch.ones_like(done[:, :1]), done[:, :-1]], 1)
        data["next", "is_init"] = torch.zeros_like(done)
        for key in ("recurrent_state_h", "recurrent_state_c"):
            data[key] = data["next", key] = torch.zeros(N, T, 1, 5)
        with set_recurrent_mode(True):
            assert_same(*both(data, network=net, deactivate_vmap=True))

    def test_an_agents_own_end(self):
        data = batch()
        data["observation"], data["next", "observation"] = torch.randn(2, N, T, 2, OBS).unbind(0)
        done = torch.rand(N, T, 2, 1) < 0.4
        data["next", "done"], data["next", "terminated"] = done, done & (torch.rand(N, T, 2, 1) < 0.5)
        data["next", "reward"] = torch.randn(N, T, 2, 1)
        lost = data.clone()
        lost["next", "observation"] = torch.where(done, torch.nan, data["next", "observation"])
        kept = data.clone()
        kept["next", "observation"] = torch.where(done, data["observation"], data["next", "observation"])
        gae = GAETransform(value_network=critic(), **NUMBERS)
        torch.testing.assert_close(gae(lost)["advantage"], gae(kept)["advantage"])

    def test_no_host_read(self):
        gae = GAETransform(value_network=critic(), average_gae=True, **NUMBERS)
        with no_host_sync():
            gae(without_final(batch()))

    @pytest.mark.parametrize("fill", [stand_in, stand_in_rows])
    def test_other_dtypes_and_shapes_stay(self, fill):
        ended = steps_without_successor(torch.zeros(2, 3, 1, dtype=torch.bool), 1)
        assert ended[:, -1].all() and not ended[:, :-1].any()
        pixels = torch.zeros(2, 3, 4, dtype=torch.uint8)
        assert fill(pixels, pixels + 1, ended, 2) is pixels
        wide = torch.zeros(2, 3, 4)
        assert fill(wide, torch.zeros(2, 3, 5), ended, 2) is wide
        picture = torch.full((2, 3, 2, 2), torch.nan, dtype=torch.bfloat16)
        filled = fill(picture, torch.ones_like(picture), ended, 2)
        assert (filled[:, -1] == 1).all() and filled[:, :-1].isnan().all()


class TestNStep:
    def test_windows_go_on_from_what_is_known(self):
        data = without_final(batch())
        kept = data.clone()
        kept["next", "observation"] = torch.where(
            data["next", "done"], data["observation"], data["next", "observation"]
        )
        ours, want = (NStepTransform(3, 0.9)(td) for td in (data, kept))
        torch.testing.assert_close(ours["next", "observation"], want["next", "observation"])
        assert ours["next", "observation"].isfinite().all()
        data["next", "observation"][0, :3] = torch.nan
        data["next", "done"][0, :3] = False
        assert NStepTransform(1, 0.9)(data)["next", "observation"][0, :3].isnan().all()

    @pytest.mark.parametrize("options", [{"done_keys": ["done"]}, {"mask_key": "mask"}])
    def test_arguments_of_torchrl_that_it_has_not(self, options):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}: expected None.*Remedy"):
            NStepTransform(3, 0.9, **options)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_precisions(self, dtype):
        data = batch()
        data["next", "reward"] = data["next", "reward"].to(dtype)
        gamma = torch.tensor(0.97, dtype=dtype)
        exact = data.clone()
        exact["next", "reward"] = data["next", "reward"].double()
        want = NStepTransform(3, float(gamma))(exact)["next", "reward"]
        got = NStepTransform(3, gamma)(data)["next", "reward"]
        assert got.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_numbers_and_rewards(self, dtype):
        steps = 200
        numbers = {"gamma": torch.tensor(0.97, dtype=dtype), "lmbda": torch.tensor(0.95, dtype=dtype)}
        zeros = torch.zeros(1, steps, 1)
        flags = torch.zeros(1, steps, 1, dtype=torch.bool)
        after = {
            "state_value": zeros,
            "reward": torch.ones(1, steps, 1, dtype=dtype),
            "done": flags,
            "terminated": flags,
        }
        data = TensorDict({"state_value": zeros, "next": after}, [1, steps])
        got = GAETransform(value_network=None, **numbers)(data)
        product = float(numbers["gamma"]) * float(numbers["lmbda"])
        want = (1 - product**steps) / (1 - product)
        assert got["advantage"].dtype in (torch.float32, torch.float64)
        assert got["advantage"][0, 0, 0].item() == pytest.approx(want, rel=1e-5)

    def test_under_autocast(self):
        data = batch()
        want = GAETransform(value_network=critic(), **NUMBERS)(data.clone())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = GAETransform(value_network=critic(), average_gae=False, **NUMBERS)(data.clone())
        assert got["advantage"].dtype == torch.float32
        torch.testing.assert_close(got["advantage"], want["advantage"], rtol=0.05, atol=0.05)


def test_it_is_a_transform_and_an_estimator_when_copied():
    gae = GAETransform(value_network=critic(), keys={"advantage": "a"}, **NUMBERS)
    twin = copy.deepcopy(gae)
    assert twin.tensor_keys.advantage == "a"
    assert set(twin.state_dict()) == {"gamma", "lmbda"}
    buffer = ReplayBuffer(storage=LazyTensorStorage(N * T, ndim=2), transform=twin, batch_size=4)
    buffer.extend(batch())
    assert "a" in buffer.sample().keys()
    twin.set_keys(sample_log_prob=[("action", "one"), "two"])
