"""Any MuJoCo model as an env on MuJoCo Warp: episodes, masks, faults, randomisation, tasks of users, errors."""

import math
from contextlib import nullcontext

import mujoco
import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.mujoco import HalfCheetah, Hopper, MuJoCoEnv
from torchrl_perf.envs.mujoco.models import PhysicsSettings, needed
from torchrl_perf.runtime import no_host_sync

mujoco_warp = pytest.importorskip("mujoco_warp", reason="the extra mujoco-warp is not installed")

CART = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body name="cart" pos="0 0 0.2">
      <joint name="slide" type="slide" axis="1 0 0" damping="0.1"/>
      <geom type="box" size="0.1 0.1 0.05" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="slide" gear="10" ctrllimited="true" ctrlrange="-1 1"/></actuator>
  <sensor><jointvel joint="slide"/></sensor>
</mujoco>
"""


def cart(count=4, **settings):
    torch.manual_seed(0)
    options = {
        "observe": lambda state: torch.cat([state["qpos"], state["sensordata"]], -1),
        "reward": lambda before, action, after: after["qpos"][:, 0] - before["qpos"][:, 0],
        "terminated": lambda state: state["qpos"][:, 0] > 0.5,
        "observed": ("sensordata", "xpos"),
        "frame_skip": 2,
        "device": "cpu",
        **settings,
    }
    return MuJoCoEnv(CART, count, **options)


def push(env, root, force):
    root["action"] = torch.full((env.num_envs, 1), force)
    return env.step_and_maybe_reset(root)


def test_a_task_of_a_user_is_three_functions():
    env = cart(max_episode_steps=400)
    check_env_specs(env)
    root = env.reset()
    assert root["observation"].shape == (4, 2)
    assert torch.equal(root["observation"][:, 1], torch.zeros(4)), "quantities of forces and sensors are zero at first"
    ended = torch.zeros(4, dtype=torch.bool)
    for _ in range(60):
        before = env.state_qpos[:, 0].clone()
        stepped, root = push(env, root, 1.0)
        following = stepped["next"]
        torch.testing.assert_close(following["reward"][:, 0], following["observation"][:, 0] - before)
        assert torch.equal(following["terminated"][:, 0], following["observation"][:, 0] > 0.5)
        ended |= following["terminated"][:, 0]
    assert ended.all()


def test_a_model_and_a_path_are_taken_as_well(tmp_path):
    file = tmp_path / "cart.xml"
    file.write_text(CART)
    model = mujoco.MjModel.from_xml_string(CART)
    roots = []
    for source in (CART, file, str(file), model):
        torch.manual_seed(0)
        env = MuJoCoEnv(
            source, 2, reward=lambda before, action, after: after["qvel"][:, 0], device="cpu", timestep=0.02
        )
        roots.append(push(env, env.reset(), 1.0)[0]["next", "reward"])
        assert env.dt == pytest.approx(0.1)
    assert all(torch.equal(roots[0], each) for each in roots)
    assert model.opt.timestep == 0.01, "a model that was given stays as it was"


def test_the_end_of_an_episode_keeps_the_final_observation():
    env = cart(max_episode_steps=3)
    root = env.reset()
    for step in range(1, 7):
        stepped, root = push(env, root, 0.5)
        following = stepped["next"]
        assert following["truncated"].all() == (step % 3 == 0)
        assert not following["terminated"].any()
        changed = (root["observation"] != following["observation"]).any(-1)
        assert changed.all() == (step % 3 == 0), "the root is of a new episode, the final observation of the old one"
        assert torch.equal(root["is_init"], following["done"])
        assert torch.equal(env.state_qpos[:, 0], root["observation"][:, 0])


def test_a_masked_reset_leaves_other_rows_bit_for_bit():
    env = cart()
    root = push(env, env.reset(), 0.5)[1]
    before = {name: value.clone() for name, value in env.state_dict().items()}
    mask = torch.tensor([[True], [False], [True], [False]])
    fresh = env.reset(root.clone().set("_reset", mask))
    for name, value in env.state_dict().items():
        if name.startswith("state_"):
            assert torch.equal(value[1::2], before[name][1::2]), name
    assert (env.state_qpos[::2] != before["state_qpos"][::2]).all()
    assert (env.state_qvel[::2] != before["state_qvel"][::2]).all()
    assert torch.equal(fresh["observation"][1::2], root["observation"][1::2])


def test_fresh_rows_have_the_places_of_their_positions():
    env = cart(3)
    root = env.reset()
    for _ in range(3):
        root = push(env, root, 1.0)[1]
    env.reset(root.set("_reset", torch.tensor([[True], [False], [False]])))
    assert torch.allclose(env.state_xpos[0, 1, 0], env.state_qpos[0, 0])
    assert not torch.allclose(env.state_xpos[1, 1, 0], env.state_qpos[1, 0]), "as MuJoCo's, of the last physics step"


def test_a_resumed_env_goes_on_bit_for_bit():
    one = Hopper(3, seed=0, device="cpu")
    root = one.reset()
    for _ in range(4):
        root["action"] = one.action_spec.rand()
        root = one.step_and_maybe_reset(root)[1]
    other = Hopper(3, seed=9, device="cpu")
    other.load_state_dict(one.state_dict())
    twin = root.clone()
    for _ in range(4):
        root["action"] = twin["action"] = one.action_spec.rand()
        state = torch.get_rng_state()
        stepped, root = one.step_and_maybe_reset(root)
        torch.set_rng_state(state)
        again, twin = other.step_and_maybe_reset(twin)
        for key in ("observation", "reward", "done"):
            assert torch.equal(stepped["next", key], again["next", key]), key


@pytest.mark.slow_compiled
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_collector_steps_it_without_a_wait(mode):
    def batches(mode):
        collector = DeviceCollector(cart(max_episode_steps=5), None, frames_per_batch=32, mode=mode)
        torch.manual_seed(3)
        return [collector.collect().clone() for _ in range(2)]

    expected = batches("eager")
    for batch, other in zip(batches(mode), expected, strict=True):
        torch.testing.assert_close(batch["next", "observation"], other["next", "observation"])
        assert torch.equal(batch["next", "done"], other["next", "done"])


def test_no_step_waits_for_the_host():
    env = cart()
    root = push(env, env.reset(), 1.0)[1]
    with no_host_sync("cpu"):
        for _ in range(2):
            root = push(env, root, 1.0)[1]


def test_contacts_and_constraints_without_room_are_counted_and_named():
    env = Hopper(2, device="cpu", seed=0, nconmax=1, njmax=2, reset_noise=0.0)
    root = env.reset()
    for _ in range(40):
        root["action"] = env.action_spec.rand()
        root = env.step_and_maybe_reset(root)[1]
    contacts, constraints = env.faults().values()
    assert "larger nconmax=" in contacts
    assert "larger njmax=" in constraints
    assert (env.overflows > 0).all()


def test_steps_whose_solver_had_too_few_iterations_are_counted_and_are_no_fault():
    counts = []
    for iterations in (1, 50):
        env = Hopper(8, device="cpu", seed=0, iterations=iterations)
        torch.manual_seed(0)
        env.rollout(30, break_when_any_done=False)
        counts.append(int(env.fault_counts()["unsolved_steps"]))
        assert env.faults() == {}
    assert counts[0] > 0
    assert counts[1] == 0


def test_a_broken_world_is_cut_counted_and_drawn_again():
    env = cart()
    root = push(env, env.reset(), 1.0)[1]
    env.state_qpos[1], env.state_qvel[1] = 9.99e9, 9e9  # below the limit, and beyond it after a step
    last = env.state_qpos.clone()
    stepped, root = push(env, root, 1.0)
    following = stepped["next"]
    broken = torch.tensor([[False], [True], [False], [False]])
    assert torch.equal(following["truncated"], broken)
    assert not following["terminated"].any()
    assert following["reward"][1] == 0
    assert following["observation"][1, 0] == last[1, 0], "its last good state"
    assert root["observation"].isfinite().all()
    assert int(env.broken_worlds) == 1
    (fault,) = env.faults().values()
    assert "1 worlds" in fault
    assert "smaller timestep=" in fault
    assert push(env, root, 1.0)[0]["next", "observation"].isfinite().all()


@pytest.mark.parametrize("make", [cart, lambda: Hopper(4, device="cpu", seed=0)], ids=["cart", "Hopper"])
def test_a_nan_action_is_counted_and_its_world_reset(make):
    env = make()
    root = env.reset()
    action = torch.zeros(env.action_spec.shape)
    action[2, -1] = torch.nan
    following = env.step_and_maybe_reset(root.set("action", action))[0]["next"]
    assert following["truncated"].flatten().tolist() == [False, False, True, False]
    assert following["reward"][2] == 0
    assert following["observation"].isfinite().all()
    assert int(env.broken_worlds) == 1


def test_each_world_has_factors_of_its_own_that_change_with_the_episode():
    env = HalfCheetah(3, device="cpu", seed=0, mass_noise=0.3, friction_noise=0.4, gain_noise=0.2, max_episode_steps=2)
    usual = {name: torch.as_tensor(getattr(env.model, name), dtype=torch.float32) for name in env.randomization.names}
    drawn = {name: getattr(env, f"state_{name}").clone() for name in usual}
    for name, noise in (("body_mass", 0.3), ("geom_friction", 0.4), ("actuator_gainprm", 0.2)):
        factor = (drawn[name] / usual[name])[:, usual[name] > 0]
        assert ((factor - 1).abs() <= noise + 1e-6).all(), name
        assert factor.std() > 0.1 * noise, name
    torch.testing.assert_close(drawn["body_subtreemass"][:, 0], drawn["body_mass"].sum(-1))
    root = env.reset()
    drawn = {name: getattr(env, f"state_{name}").clone() for name in usual}
    for step in (1, 2):
        root["action"] = env.action_spec.rand()
        root = env.step_and_maybe_reset(root)[1]
        for name, value in env.simulation.fields().items():
            assert torch.equal(value, drawn[name]), "what physics used"
        assert torch.equal(env.state_body_mass, drawn["body_mass"]) == (step == 1)


def test_a_heavier_cart_is_slower():
    speeds = []
    for seed in range(2):
        env = cart(2, seed=seed, mass_noise=0.9, reset_noise=0.0)
        mass = env.state_body_mass[:, 1].clone()
        push(env, env.reset(), 1.0)
        mass = env.state_body_mass[:, 1].clone()
        torch.testing.assert_close(env.state_qvel[:, 0] * mass, torch.full((2,), 0.2), rtol=1e-2, atol=1e-3)
        speeds.append(env.state_qvel[:, 0])
    assert torch.cat(speeds).std() > 0


PAIR = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 1"/>
    <body pos="0 0 0.05">
      <joint type="slide" axis="1 0 0"/>
      <joint type="slide" axis="0 0 1"/>
      <geom name="box" type="box" size="0.1 0.1 0.05"/>
    </body>
  </worldbody>
  <contact><pair geom1="floor" geom2="box" friction="0.5 0.5 0.005 0.0001 0.0001"/></contact>
</mujoco>
"""


def test_pairs_of_geoms_have_the_friction_of_their_world():
    def speeds(**noise):
        model = mujoco.MjModel.from_xml_string(PAIR)
        still = {"reward": lambda before, action, after: after["qpos"][:, 0], "reset_noise": 0.0, "frame_skip": 20}
        env = MuJoCoEnv(model, 6, **still, **noise, seed=0, device="cpu")
        root = env.reset()
        env.state_qvel[:, 0] = 3.0
        root["action"] = torch.zeros(6, 0)
        env.step(root)
        return env, env.state_qvel[:, 0]

    env, usual = speeds()
    assert usual.std() < 1e-4 and 0.5 < usual.mean() < 2.8
    env, varied = speeds(friction_noise=0.9)
    factor = env.state_geom_friction[:, 0, 0] / float(env.model.geom_friction[0, 0])
    torch.testing.assert_close(env.state_pair_friction[:, 0, 0], 0.5 * factor)
    assert torch.equal(varied.argsort(descending=True), factor.argsort()), "less friction, more speed"


@pytest.mark.parametrize("where", ["actuator", "sensor"])
def test_delays_are_refused(where):
    old = '<jointvel joint="slide"' if where == "sensor" else '<motor joint="slide"'
    delayed = CART.replace(old, f'{old} delay="0.05" nsample="8"')
    with pytest.raises(NotImplementedError, match=r"model: expected actuators and sensors without a delay.* Remedy: "):
        MuJoCoEnv(delayed, 1, device="cpu")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"timestep": math.nan}, ValueError, "timestep: expected a positive number, received nan"),
        ({"timestep": math.inf}, ValueError, "timestep: expected a positive number, received inf"),
        ({"reset_noise": math.nan}, ValueError, "reset_noise: expected a number of at least 0, received nan"),
        ({"gain_noise": math.nan}, ValueError, r"gain_noise: expected a share in \[0, 1\), received nan"),
        ({"integrator": "verlet"}, ValueError, "expected one of euler, rk4, implicitfast, received 'verlet'"),
        ({"solver": "pgs"}, ValueError, "expected one of newton, cg, received 'pgs'"),
        ({"nconmax": 0}, ValueError, "nconmax: expected a positive integer, received 0"),
        ({"njmax": 3.5}, ValueError, "njmax: expected a positive integer, received 3.5"),
        ({"timestep": "0.01"}, ValueError, "timestep: expected a positive number, received '0.01'"),
        ({"reset_noise": -1.0}, ValueError, "reset_noise: expected a number of at least 0, received -1.0"),
        ({"integrater": "euler"}, TypeError, r"received \['integrater'\]"),
        ({"observed": ("speed",)}, ValueError, r"observed: expected .* names among .*received \['speed'\]"),
        ({"observed": "xpos"}, ValueError, r"observed: expected a sequence of names .*received 'xpos'"),
        ({"mass_noise": 1.0}, ValueError, r"mass_noise: expected a share in \[0, 1\), received 1.0"),
        ({"frame_skip": 0}, ValueError, "frame_skip >= 1"),
        ({"reward": None}, TypeError, "expected a reward, received none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_settings_are_refused_with_a_remedy(settings, error, words):
    with pytest.raises(error, match=words) as caught:
        env = cart(1, **settings)
        push(env, env.reset(), 0.0)
    assert "Remedy: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("observe", lambda state: state["qpos"][:, 0], r"observe: expected float32 \[N, O\].*float32 \[4\]"),
        ("observe", lambda state: state["qpos"][:1], r"received torch.float32 \[1, 1\]"),
        ("observe", lambda state: state["qpos"].long(), r"received torch.int64 \[4, 1\]"),
        ("reward", lambda before, action, after: after["qvel"], r"reward: expected float32 \[N\].*float32 \[4, 1\]"),
        ("reward", lambda before, action, after: 1.0, r"received float. Remedy: one number for each world"),
        ("reward", lambda before, action, after: action.double()[:, 0], r"received torch.float64 \[4\]"),
        ("terminated", lambda state: state["qpos"] > 1, r"terminated: expected bool \[N\] with N = 4, .*bool \[4, 1\]"),
        ("terminated", lambda state: state["qpos"][:, 0], r"received torch.float32 \[4\]"),
    ],
)
def test_functions_that_return_other_than_rows_are_refused_at_once(name, function, words):
    with pytest.raises(ValueError, match=words) as caught:
        cart(**{name: function})
    assert "Remedy: " in str(caught.value)


def test_a_quantity_that_is_not_observed_is_named():
    with pytest.raises(KeyError, match=r"reward: expected quantities among qpos, .*Remedy: observed=\('geom_xpos',\)"):
        cart(reward=lambda before, action, after: after["geom_xpos"][:, 0, 0])


def test_methods_of_a_task_that_return_other_than_rows_are_refused_at_the_first_step():
    class Wrong(Hopper):
        def reward(self, before, action, after):
            return super().reward(before, action, after).mean()

    env = Wrong(2, device="cpu", seed=0)
    with pytest.raises(ValueError, match=r"reward: expected float32 \[N\] with N = 2, received torch.float32 \[\]"):
        env.rollout(1)


@pytest.mark.parametrize(
    ("pose", "words"),
    [
        (lambda env: (env.initial_qpos, env.initial_qvel), r"positions float32 \[2, 6\], received torch.float32 \[6\]"),
        (lambda env: (env.around(0.1), env.normal(0.1).double()), r"velocities .* received torch.float64 \[2, 6\]"),
        (lambda env: (env.around(0.1).numpy(), env.normal(0.1)), r"positions .* received ndarray"),
    ],
)
def test_first_poses_of_another_form_are_refused(pose, words):
    class Posed(Hopper):
        draw_pose = pose

    with pytest.raises(ValueError, match=words):
        Posed(2, device="cpu")


@pytest.mark.parametrize("method", ["features", "reward", "is_terminated"])
def test_methods_of_a_task_that_write_into_states_are_refused_at_the_first_step(method):
    def writes(self, *states):
        states[-1]["qvel"].add_(1.0)
        return getattr(super(Writing, self), method)(*states)

    class Writing(Hopper):
        pass

    setattr(Writing, method, writes)
    with pytest.raises(ValueError, match="leaves states as they are, received one that writes into qvel"):
        Writing(2, device="cpu", seed=0).rollout(1)


def test_models_that_cannot_be_read_or_run_are_refused_with_a_remedy(tmp_path):
    for source, error in ((tmp_path / "none.xml", FileNotFoundError), ("<mujoco><bodi/></mujoco>", ValueError)):
        with pytest.raises(error, match=r"model: expected .* Remedy: "):
            MuJoCoEnv(source, 1, device="cpu")
    with pytest.raises(ValueError, match=r"model: expected joints, received a model without. Remedy: "):
        MuJoCoEnv("<mujoco><worldbody><body><geom size='.1'/></body></worldbody></mujoco>", 1, device="cpu")
    flagged = CART.replace('<option timestep="0.01"/>', '<option><flag midphase="disable"/></option>')
    with pytest.raises(NotImplementedError, match=r"mjDSBL_MIDPHASE is unsupported. Remedy: leave it out .*euler, rk4"):
        MuJoCoEnv(flagged, 1, device="cpu")


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("make_data", RuntimeError("Failed to allocate 8000 bytes on device 'cuda:0'")),
        ("make_data", MemoryError()),
        ("step", RuntimeError("CUDA error 2: out of memory")),
    ],
)
def test_worlds_that_do_not_fit_are_refused_with_a_remedy(monkeypatch, place, fault):
    def full(*args, **kwargs):
        raise fault

    monkeypatch.setattr(mujoco_warp, place, full)
    with pytest.raises(ValueError, match=r"num_envs: expected worlds that fit .* received 3: .*Remedy: fewer worlds"):
        cart(3)


def test_a_fault_that_is_not_of_memory_stays_what_it_is(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("Kernel does not compile")

    monkeypatch.setattr(mujoco_warp, "step", broken)
    with pytest.raises(RuntimeError, match="Kernel does not compile"):
        cart(3)


@pytest.mark.parametrize(("iterations", "old"), [(50, True), (50, False), (5, True)])
def test_an_old_driver_runs_all_iterations_and_is_named(monkeypatch, iterations, old):
    env = cart(1, iterations=iterations)
    simulation, card = env.simulation, torch.device("cuda", 0)
    simulation.model.opt.graph_conditional = True
    monkeypatch.setattr("torchrl_perf.envs.mujoco.simulation.conditional_nodes", lambda: not old)
    said = old and iterations == 50
    with pytest.warns(UserWarning, match=r"driver of 12.4 .* all its 50 .*Remedy:") if said else nullcontext():
        simulation._limit(env.model, PhysicsSettings(), card)
    assert simulation.model.opt.graph_conditional == (not old and iterations == 50)


def test_without_the_package_the_error_says_what_installs_it():
    with pytest.raises(
        ImportError, match=r"expected the package no_warp, .* Remedy: pip install 'torchrl_perf\[mujoco-warp\]'"
    ):
        needed("no_warp")
