"""Recurrent modules against torch.nn on each episode alone, TorchRL's modules, and themselves step by step."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import TensorDictPrimer, TransformedEnv, check_env_specs
from torchrl.modules import GRUModule, LSTMModule, QValueModule, ValueOperator, set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module
from torchrl.objectives import DQNLoss

from torchrl_perf.envs import CartPole
from torchrl_perf.modules import LRU, DeviceGRU, DeviceLSTM, MinGRU
from torchrl_perf.modules.memory.linear import LRUCore, MinGRUCore
from torchrl_perf.objectives import DeviceDQNLoss, DeviceTD3Loss
from torchrl_perf.runtime import no_host_sync

IN, H = 3, 5
KINDS = {"gru": DeviceGRU, "lstm": DeviceLSTM, "min_gru": MinGRU, "lru": LRU}
TORCHRL = {"gru": GRUModule, "lstm": LSTMModule}
RNNS = {"gru": nn.GRU, "lstm": nn.LSTM}
KEYS = {"in_key": "x", "out_key": "y"}


def make(kind, layers=1, dtype=torch.float64, **options):
    return KINDS[kind](IN, H, layers, dtype=dtype, **KEYS, **options)


def batch(n, t, *, share=0.3, dtype=torch.float64, seed=0, module=None):
    """A batch with time, with random resets, and with a random start state of each stream where a module is given."""
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(n, t, 1, generator=generator) < share
    x = torch.randn(n, t, IN, dtype=torch.float64, generator=generator).to(dtype)
    td = TensorDict({"x": x, "is_init": flags}, [n, t], names=[None, "time"])
    for key, size in zip(module.state_keys, module.core.state_sizes, strict=True) if module is not None else ():
        start = torch.randn(n, 1, module.core.num_layers, size, dtype=torch.float64, generator=generator).to(dtype)
        td.set(key, torch.cat([start, torch.full((n, t - 1, *start.shape[2:]), 7.0, dtype=dtype)], 1))
    return td


def episodes(td):
    """Row, first step and end of each episode or part of one."""
    flags = td["is_init"].squeeze(-1)
    for row in range(len(flags)):
        cuts = sorted({0, *(t for t in range(flags.shape[1]) if flags[row, t]), flags.shape[1]})
        yield from ((row, a, b) for a, b in itertools.pairwise(cuts))


def by_torch(rnn, td, module):
    """Outputs of torch's module, called on each episode alone."""
    out = td["x"].new_zeros(*td.shape, H)
    for row, a, b in episodes(td):
        starts = [td[key][row, a] for key in module.state_keys]
        zero = bool(td["is_init"][row, a]) or a > 0
        states = [torch.zeros_like(s) if zero else s for s in starts]
        states = tuple(states) if len(states) > 1 else states[0]
        out[row, a:b] = rnn(td["x"][row, a:b], states)[0]
    return out


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 4), t=st.integers(1, 9), layers=st.integers(1, 3), share=st.floats(0, 1), bias=st.booleans())
def test_equals_torch_on_each_episode_alone(kind, n, t, layers, share, bias):
    torch.manual_seed(n + 10 * t)
    rnn = RNNS[kind](IN, H, layers, bias=bias, batch_first=True, dtype=torch.float64)
    module = make(kind, layers, bias=bias)
    module.load_rnn(rnn)
    td = batch(n, t, share=share, module=module)
    expected = by_torch(rnn, td, module)
    found = module(td.clone())["y"]
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in rnn.named_parameters():
        torch.testing.assert_close(module.core.get_parameter(name).grad, parameter.grad)


def after_a_way(core, steps, *lengths):
    """What is left at the end of two signs after a way of equal inputs, ``[2, H]``, for each length of the way."""
    signs, way, end = torch.randn(2, 1, 32), torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    found = []
    for length in (steps, *lengths):
        x = torch.cat((signs, way.expand(2, length - 1, -1), end.expand(2, -1, -1)), 1)
        states = tuple(torch.zeros(2, 1, size) for size in core.state_sizes)
        with torch.no_grad():
            out = core.sequence(x, states, torch.zeros(x.shape[:2], dtype=torch.bool))[0]
        found.append(out[:, -1])
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("core", [MinGRUCore, LRUCore])
def test_linear_cells_have_a_sign_a_thousand_steps_later(core, seed):
    """What PPO has to read at the junction of a long maze is there before it has learnt anything."""
    torch.manual_seed(seed)
    made = core(32, 64, 1, **({"bias": True} if core is MinGRUCore else {}), dropout=0.0)
    (left, right), (later, _) = after_a_way(made, 1000, 1003)
    assert (left - right).norm() > 3e-3 * left.norm()
    if core is MinGRUCore:
        assert (left - right).norm() > 10 * (left - later).norm()  # three steps more or less say far less
        for layer in made.inputs:
            layer.reset_parameters()  # gates that are all alike
        ((left, right),) = after_a_way(made, 1000)
        assert (left - right).norm() < 1e-6 * left.norm()


def test_layers_of_a_min_gru_are_called_where_a_call_does_more():
    """Hooks, a forward of its own, and another module in a layer's place."""
    module = make("min_gru", 2)
    td, calls = batch(2, 3, module=module), []
    expected = module(td.clone())["y"]
    module.core.inputs[0].register_forward_hook(lambda *_: calls.append("hook"))
    own = module.core.inputs[1].forward
    module.core.inputs[1].forward = lambda x: (calls.append("own"), own(x))[1]
    torch.testing.assert_close(module(td.clone())["y"], expected)
    assert calls == ["hook", "own"]
    module(td[:, 0])
    assert calls == ["hook", "own"] * 2
    module.core.inputs[0] = nn.Sequential(module.core.inputs[0], nn.Identity())
    torch.testing.assert_close(module(td.clone())["y"], expected)


def test_gates_of_a_min_gru_last_from_two_to_ten_thousand_steps_at_first():
    torch.manual_seed(0)
    core = MinGRUCore(50, 4000, 1, True, 0.0)
    layer = core.inputs[0].requires_grad_(False)
    weight, bias = layer.weight[:4000], layer.bias[:4000].double()
    lasting = 1 / torch.sigmoid(bias)
    assert lasting.min() >= 2 - 1e-5 and lasting.max() <= 10_001
    # each octave as likely: half of the units last less than the geometric mean
    assert float((lasting < (2 * 10_000) ** 0.5).double().mean()) == pytest.approx(0.5, abs=0.03)
    assert float(weight.std()) == pytest.approx(8 / 50**0.5, rel=0.02)
    assert all(layer.bias is None for layer in MinGRUCore(3, 4, 2, False, 0.0).inputs)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", list(KINDS))
class TestStepsAndSequences:
    def test_a_sequence_is_its_steps(self, kind, layers):
        module = make(kind, layers)
        td = batch(4, 8, module=module)
        whole = module(td.clone())
        states = {key: td[key][:, 0] for key in module.state_keys}
        for t in range(8):
            row = td[:, t].exclude(*module.state_keys).update(states)
            row = module(row)
            torch.testing.assert_close(row["y"], whole["y"][:, t])
            states = {key: row["next", key] for key in module.state_keys}
            for key, state in states.items():
                torch.testing.assert_close(state, whole["next", key][:, t])

    def test_two_halves_are_the_whole(self, kind, layers):
        module = make(kind, layers)
        td = batch(4, 8, module=module)
        whole = module(td.clone())
        first = module(td[:, :3].clone())
        rest = td[:, 3:].clone()
        for key in module.state_keys:
            rest[key][:, 0] = first["next", key][:, -1]
        torch.testing.assert_close(module(rest)["y"], whole["y"][:, 3:])

    def test_nothing_of_an_episode_reaches_the_next(self, kind, layers):
        module = make(kind, layers)
        td = batch(4, 8, share=0, module=module)
        td["is_init"][:, 5] = True
        other = td.clone()
        other["x"][:, :5] = 9.0
        for key in module.state_keys:
            other[key][:] = -3.0
        one, two = module(td), module(other)
        assert torch.equal(one["y"][:, 5:], two["y"][:, 5:])
        assert not torch.isclose(one["y"][:, 4], two["y"][:, 4]).all()

    def test_a_missing_state_is_zero(self, kind, layers):
        module = make(kind, layers)
        td = batch(2, 4, module=module)
        zero = td.clone()
        for key in module.state_keys:
            zero[key].zero_()
        bare = td.exclude(*module.state_keys)
        assert torch.equal(module(bare)["y"], module(zero)["y"])
        step = bare[:, 0].exclude("y", "next")
        assert torch.equal(module(step)["y"], module(zero[:, 0].exclude("y", "next"))["y"])

    def test_shapes_of_any_batch(self, kind, layers):
        module = make(kind, layers)
        sizes = module.core.state_sizes
        for shape in ([], [1], [2, 3], [2, 3, 2]):
            td = TensorDict({"x": torch.ones(*shape, IN, dtype=torch.float64)}, shape)
            td["is_init"] = torch.zeros(*shape, 1, dtype=torch.bool)
            for mode in (False, True) if shape else (False,):
                with set_recurrent_mode(mode):
                    out = module(td.clone())
                assert out["y"].shape == (*shape, H)
                for key, size in zip(module.state_keys, sizes, strict=True):
                    assert out["next", key].shape == (*shape, layers, size)

    def test_no_envs_at_all(self, kind, layers):
        module = make(kind, layers)
        td = module(batch(0, 4, module=module))
        assert td["y"].shape == (0, 4, H)
        td["y"].sum().backward()
        assert all((p.grad == 0).all() for p in module.parameters() if p.grad is not None)

    def test_no_steps_at_all(self, kind, layers):
        module = make(kind, layers)
        assert module(batch(2, 3, module=module)[:, :0])["y"].shape == (2, 0, H)

    def test_host_is_never_asked(self, kind, layers):
        module = make(kind, layers)
        td = batch(2, 4, module=module)
        with no_host_sync():
            module(td.clone())["y"].sum().backward()
            module(td[:, 0].clone())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lower_precision(self, kind, layers, dtype):
        torch.manual_seed(0)
        exact = make(kind, layers)
        module = make(kind, layers, dtype=dtype)
        module.load_state_dict(exact.state_dict())
        td = batch(3, 6, module=exact, share=0.2)
        found = module(batch(3, 6, module=exact, share=0.2, dtype=dtype))
        assert found["y"].dtype == dtype
        assert {found["next", key].dtype for key in module.state_keys} == {dtype}
        tolerance = 1e-5 if dtype == torch.float32 else 8e-2
        torch.testing.assert_close(found["y"].double(), exact(td)["y"], rtol=tolerance, atol=tolerance)


class TestWhichForm:
    def test_the_name_of_the_last_dim_decides(self):
        module = make("gru")
        td = batch(2, 4, share=0)
        rows = td.clone()
        rows.names = [None, None]
        sequence, steps = module(td)["y"], module(rows)["y"]
        torch.testing.assert_close(sequence[:, 0], steps[:, 0])
        assert not torch.isclose(sequence[:, 1:], steps[:, 1:]).all()

    def test_torchrls_mode_comes_first(self):
        module = make("gru")
        td = batch(2, 4, share=0)
        with set_recurrent_mode(False):
            steps = module(td.clone())["y"]
        rows = td.clone()
        rows.names = [None, None]
        assert torch.equal(module(rows)["y"], steps)
        with set_recurrent_mode(True):
            assert torch.equal(module(rows)["y"], module(td)["y"])

    def test_default_stands_for_the_name(self):
        torch.manual_seed(0)
        module = make("gru", default_recurrent_mode=True)
        td = batch(2, 4, share=0)
        named = module(td.clone())["y"]
        td.names = [None, None]
        assert torch.equal(module(td)["y"], named)

    def test_a_compiled_call_is_told_by_the_mode(self, traced):
        module = make("gru")
        td = batch(2, 4, share=0.3, module=module)

        def call(td, mode):
            with set_recurrent_mode(mode) if mode is not None else contextlib.nullcontext():
                return module(td.copy())["y"]  # of which no name is left there

        for mode in (True, False):
            assert torch.equal(torch.compile(call)(td, mode), call(td, mode))
        torch._dynamo.reset()
        with pytest.raises(ValueError, match="DeviceGRU: expected set_recurrent_mode around a compiled call"):
            torch.compile(call)(td, None)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="memory expected set_recurrent_mode"):
            torch.compile(call, fullgraph=True)(td, None)

    def test_tensors_by_name(self):
        module = make("gru")
        y, state = module(x=torch.ones(2, IN, dtype=torch.float64), is_init=torch.ones(2, 1, dtype=torch.bool))
        assert y.shape == (2, H)
        assert state.shape == (2, 1, H)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
class TestTorchRL:
    @pytest.mark.parametrize("layers", [1, 2])
    def test_same_results(self, kind, layers):
        theirs = TORCHRL[kind](IN, H, layers, **KEYS).double()
        ours = make(kind, layers)
        ours.load_state_dict(theirs.state_dict())
        assert ours.in_keys == theirs.in_keys
        assert ours.out_keys == theirs.out_keys
        td = batch(3, 7, module=ours)
        td.update({key: td[key] * ~td["is_init"].unsqueeze(-1) for key in ours.state_keys})
        # TorchRL's begins each episode of a sequence from the state that is stored there: 0, as an env resets it
        td.update({key: torch.cat([td[key][:, :1], 0 * td[key][:, 1:]], 1) for key in ours.state_keys})
        with set_recurrent_mode(True):
            expected = theirs(td.clone())
            torch.testing.assert_close(ours(td.clone())["y"], expected["y"])
        steps = theirs(td[:, 0].clone())
        found = ours(td[:, 0].clone())
        for key in ours.out_keys:
            torch.testing.assert_close(found[key], steps[key])

    def test_weights_by_name_and_by_module(self, kind):
        theirs = TORCHRL[kind](IN, H, 2, **KEYS)
        ours = KINDS[kind](IN, H, 2, **KEYS)
        ours.load_rnn(theirs)
        for one, other in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
            assert one[0] == other[0]
            assert torch.equal(one[1], other[1])

    def test_one_seed_gives_one_set_of_weights(self, kind):
        torch.manual_seed(3)
        theirs = TORCHRL[kind](IN, H, 2, **KEYS)
        torch.manual_seed(3)
        ours = KINDS[kind](IN, H, 2, **KEYS)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_a_given_module_shares_its_parameters(self, kind):
        rnn = RNNS[kind](IN, H, 2, batch_first=True)
        ours = KINDS[kind](**{kind: rnn}, **KEYS)
        assert {id(p) for p in ours.parameters()} == {id(p) for p in rnn.parameters()}

    def test_names_of_backends_are_taken(self, kind):
        KINDS[kind](IN, H, recurrent_backend="scan", python_based=True, **KEYS)
        with pytest.raises(TypeError, match=r"expected arguments of TorchRL's module, received .*'backend'.*Remedy"):
            KINDS[kind](IN, H, backend="scan", **KEYS)


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("kind", list(KINDS))
def test_torchrls_dqn_loss_takes_a_memory(kind):
    """Its delayed parameters are buffers. Of last steps, whose next values do not count, it is that of TorchRL's."""

    def loss_of(module):
        torch.manual_seed(0)
        head = TensorDictModule(nn.Linear(H, 2), ["y"], ["action_value"])
        values = TensorDictSequential(module, head, QValueModule(action_space="categorical"))
        loss = DQNLoss(values, action_space="categorical", delay_value=True)
        loss.make_value_estimator(gamma=0.9)
        return loss(td.clone())["loss"]

    td = batch(3, 6, share=0, dtype=torch.float32, seed=4)
    td["action"], flags = torch.ones(3, 6, dtype=torch.long), torch.zeros(3, 6, 1, dtype=torch.bool)
    td["next"] = {"x": td["x"].flip(1), "is_init": flags, "done": ~flags, "terminated": ~flags, "reward": flags.float()}
    module = make(kind, dtype=torch.float32)
    found = loss_of(module)
    found.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    if kind in TORCHRL:
        theirs = TORCHRL[kind](IN, H, **KEYS)
        theirs.load_state_dict(module.state_dict())
        torch.testing.assert_close(found, loss_of(theirs))


class TestPrimers:
    @pytest.mark.parametrize("kind", list(KINDS))
    def test_specs_fill_themselves(self, kind):
        module = make(kind, 2, dtype=torch.float32)
        primer = get_primers_from_module(nn.Sequential(module))
        assert isinstance(primer, TensorDictPrimer)
        env = TransformedEnv(CartPole(3, device="cpu"), primer)
        for key, size in zip(module.state_keys, module.core.state_sizes, strict=True):
            assert env.observation_spec[key].shape == (3, 2, size)
        check_env_specs(env)

    def test_dtype_is_the_modules(self):
        env = TransformedEnv(CartPole(3, device="cpu"), make("gru").make_tensordict_primer())
        assert env.reset()["recurrent_state"].dtype == torch.float64

    def test_two_modules_keep_two_states(self):
        parts = [
            DeviceGRU(4, H, in_keys=["observation", name], out_keys=[f"y_{name}", ("next", name)])
            for name in ("of_actor", "of_critic")
        ]
        env = TransformedEnv(CartPole(3, device="cpu"), get_primers_from_module(nn.ModuleList(parts)))
        head = TensorDictModule(lambda y: y[..., 0].gt(0).long(), ["y_of_actor"], ["action"])
        rollout = env.rollout(6, TensorDictSequential(*parts, head), break_when_any_done=False)
        assert not torch.equal(rollout["next", "of_actor"], rollout["next", "of_critic"])
        for name, part in zip(("of_actor", "of_critic"), parts, strict=True):
            again = part(rollout.exclude("next", f"y_{name}"))
            torch.testing.assert_close(again["y_" + name], rollout["y_" + name])

    def test_states_of_other_names_are_refused(self):
        module = DeviceGRU(IN, H, in_keys=["x", "h"], out_keys=["y", ("next", "g")])
        with pytest.raises(ValueError, match=r"expected states in \[\('next', 'h'\)\] .*received .*'g'.*Remedy"):
            module.make_tensordict_primer()


class TestBadInput:
    def test_no_flags(self):
        with pytest.raises(ValueError, match=r"DeviceGRU: expected 'is_init', True where an episode .*Remedy: .*Init"):
            make("gru")(batch(2, 3).exclude("is_init"))

    def test_no_input(self):
        with pytest.raises(KeyError, match=r"expected 'x', received .*is_init.*Remedy: set in_key"):
            make("gru")(batch(2, 3).exclude("x"))

    @pytest.mark.parametrize("kind", list(KINDS))
    def test_a_state_of_another_size(self, kind):
        module = make(kind)
        td = batch(2, 3, module=module)
        td[module.state_keys[-1]] = td[module.state_keys[-1]][..., :-1]
        with pytest.raises(ValueError, match=r"expected a state \[\*, 1, \d+\] of 1 layers, received .*Remedy"):
            module(td)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "expected one of in_key and in_keys"),
            ({"in_key": "x", "in_keys": ["x", "h"], "out_key": "y"}, "expected one of in_key and in_keys"),
            ({"in_key": "x"}, "expected one of out_key and out_keys"),
            ({"in_keys": ["x"], "out_key": "y"}, "expected in_keys of an input, 1 states"),
            ({"input_size": 0, **KEYS}, "input_size: expected a whole number of at least 1, received 0"),
            ({"hidden_size": None, **KEYS}, "expected input_size and hidden_size"),
            ({"num_layers": True, **KEYS}, "num_layers: expected a whole number"),
            ({"dropout": 1.0, **KEYS}, "dropout: expected a chance"),
            ({"bidirectional": True, **KEYS}, "expected batch_first=True, bidirectional=False"),
            ({"gru": nn.GRU(IN, H), **KEYS}, "expected sizes or a GRU"),
            ({"dropout": "much", **KEYS}, "dropout: expected a chance"),
            ({"bias": "no", **KEYS}, "bias: expected True or False, received 'no'"),
            ({"default_recurrent_mode": "yes", **KEYS}, "default_recurrent_mode: expected True, False or None"),
            ({"recurrent_backend": "cudnn", **KEYS}, r"recurrent_backend: expected one of .*'scan'.*received 'cudnn'"),
            ({"recurrent_compute_dtype": torch.bfloat16, **KEYS}, "recurrent_compute_dtype: expected one of"),
        ],
    )
    def test_arguments(self, options, message):
        with pytest.raises(ValueError, match=f"{message}.*Remedy"):
            DeviceGRU(**{"input_size": IN, "hidden_size": H, **options})

    @pytest.mark.parametrize(
        "beside", [{"num_layers": 3}, {"bias": False}, {"dropout": 0.5}, {"dtype": torch.float64}, {"device": "meta"}]
    )
    @pytest.mark.parametrize("kind", ["gru", "lstm"])
    def test_arguments_that_a_given_module_contradicts(self, kind, beside):
        rnn = RNNS[kind](IN, H, 2, batch_first=True)
        with pytest.raises(ValueError, match=f"{next(iter(beside))}: expected that of the given module.*Remedy"):
            KINDS[kind](**{kind: rnn}, **KEYS, **beside)
        KINDS[kind](**{kind: rnn}, **KEYS, num_layers=2, dtype=torch.float32, device="cpu")

    @pytest.mark.parametrize("kind", list(KINDS))
    @pytest.mark.parametrize(
        ("key", "change", "message"),
        [
            ("x", lambda x: x[..., :-1], r"expected \[4, 3\], received \[4, 2\]"),
            # one row for each env, in each env: a step would add the states of others
            ("x", lambda x: x.unsqueeze(1).expand(4, 4, IN), r"expected \[4, 3\], received \[4, 4, 3\]"),
            ("x", lambda x: x.float(), r"expected torch.float64.*received torch.float32"),
            ("is_init", lambda flag: flag.float(), r"expected bool \[4, 1\], received torch.float32 \[4, 1\]"),
            ("is_init", lambda flag: flag.expand(4, 2), r"expected bool \[4, 1\], received torch.bool \[4, 2\]"),
        ],
    )
    def test_entries_of_another_shape_or_dtype(self, kind, key, change, message):
        td = batch(4, 2, module=make(kind))[:, 0]
        td[key] = change(td[key])
        with pytest.raises(ValueError, match=f"'{key}': {message}.*Remedy"):
            make(kind)(td)

    def test_another_kind_of_weights(self):
        with pytest.raises(ValueError, match=r"expected a torch\.nn\.GRU, received LSTM.*Remedy"):
            make("gru").load_rnn(nn.LSTM(IN, H))
        with pytest.raises(ValueError, match=r"load_rnn: expected parameters .*received.*Remedy"):
            make("gru").load_rnn(nn.GRU(IN, H + 1))
        with pytest.raises(ValueError, match=r"reads forwards .*received bidirectional=True.*Remedy"):
            make("gru").load_rnn(nn.GRU(IN, H, bidirectional=True))

    @pytest.mark.parametrize("kind", [*KINDS.values(), *TORCHRL.values()])
    def test_off_policy_losses_of_the_package(self, kind):
        """They would read next rows as a sequence of its own, whose state passes over the ends of episodes."""
        network = TensorDictSequential(kind(IN, H, **KEYS), TensorDictModule(nn.Linear(H, 2), ["y"], ["action_value"]))
        critic = TensorDictSequential(kind(IN, H, **KEYS), ValueOperator(nn.Linear(H, 1), in_keys=["y", "action"]))
        actor = TensorDictModule(nn.Linear(IN, 1), ["x"], ["action"])
        for make_loss in (
            lambda: DeviceDQNLoss(network, action_space="categorical"),
            lambda: DeviceTD3Loss(actor, critic, bounds=(-1, 1)),
        ):
            with pytest.raises(ValueError, match=f"network without memory.*recurrent {kind.__name__} at.*Remedy"):
                make_loss()

    def test_a_batch_without_dims_is_no_sequence(self):
        td = TensorDict({"x": torch.ones(IN, dtype=torch.float64), "is_init": torch.zeros(1, dtype=torch.bool)}, [])
        with pytest.raises(ValueError, match="expected a sequence"), set_recurrent_mode(True):
            make("gru")(td)


def test_dropout_lies_between_layers_and_in_training_alone():
    torch.manual_seed(0)
    module = make("gru", 2, dropout=0.5)
    td = batch(2, 4)
    assert not torch.equal(module(td.clone())["y"], module(td.clone())["y"])
    module.eval()
    assert torch.equal(module(td.clone())["y"], module(td.clone())["y"])
    single = make("gru", 1, dropout=0.5)
    assert torch.equal(single(td.clone())["y"], single(td.clone())["y"])


def test_an_lru_holds_what_came_before_a_thousand_equal_steps():
    """Slow states there are, and what does not change is not added up in them until nothing else is seen."""
    torch.manual_seed(0)
    memory = LRU(8, 64, in_key="x", out_key="y")
    x = torch.randn(8).expand(2, 1001, 8).clone()
    x[:, 0] = torch.randn(2, 8)
    begins = torch.zeros(2, 1001, dtype=torch.bool)
    with torch.no_grad():
        _, (states,) = memory.core.sequence(x, (torch.zeros(2, 1, 128),), begins)
    size = states[:, 1:].norm(dim=-1)
    assert size.max() < 15
    assert (states[0, -1] - states[1, -1]).norm() > 5e-3 * size[:, -1].mean()
