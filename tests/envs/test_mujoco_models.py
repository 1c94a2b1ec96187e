"""Models of users on MuJoCo Warp: keyframes, clocks, hidden states, default dtypes, functions that are none."""

import copy
import pickle

import mujoco
import numpy as np
import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_perf.envs import Pendulum
from torchrl_perf.envs.mujoco import Hopper, MuJoCoEnv
from torchrl_perf.envs.mujoco.models import check_state

pytest.importorskip("mujoco_warp", reason="the extra mujoco-warp is not installed")

SLIDER = """
<mujoco>
  <option timestep="0.01"><flag gravity="disable"/></option>
  <worldbody>
    <body name="cart"><joint name="slide" type="slide" axis="1 0 0"/><geom type="box" size="0.1 0.1 0.05"/></body>
    <body name="target" mocap="true" pos="1 0 1"><geom size="0.05" contype="0" conaffinity="0"/></body>
  </worldbody>
  <actuator>
    <general joint="slide" dyntype="filter" dynprm="0.5" gainprm="10" ctrllimited="true" ctrlrange="-1 1"/>
  </actuator>
  <sensor><clock/><jointpos joint="slide"/></sensor>
  <keyframe>
    <key name="home" qpos="2" qvel="0.5" act="0.25" mpos="3 0 1"/>
    <key qpos="-1" mpos="4 0 1"/>
  </keyframe>
</mujoco>
"""


def slider(source=SLIDER, **settings):
    options = {
        "observe": lambda state: torch.cat([state["qpos"], state["qvel"], state["act"], state["sensordata"]], -1),
        "reward": lambda before, action, after: after["qpos"][:, 0],
        "observed": ("sensordata", "xpos"),
        "frame_skip": 2,
        "max_episode_steps": 5,
        "reset_noise": 0.0,
        "device": "cpu",
        **settings,
    }
    return MuJoCoEnv(source, 3, **options)


@pytest.mark.parametrize(
    ("keyframe", "start", "target"),
    [(None, (0, 0, 0), 1.0), ("home", (2, 0.5, 0.25), 3.0), (0, (2, 0.5, 0.25), 3.0), (1, (-1, 0, 0), 4.0)],
)
def test_episodes_begin_at_the_keyframe(keyframe, start, target):
    env = slider(keyframe=keyframe)
    check_env_specs(env)
    steps = env.rollout(12, break_when_any_done=False)
    first = steps["observation"][steps["is_init"][..., 0]]
    assert len(first) == 3 * 3, "the start and two time limits"
    torch.testing.assert_close(first[:, :3], torch.tensor(start).expand(9, 3).float())
    torch.testing.assert_close(env.state_xpos[:, 2, 0], torch.full((3,), target))


def test_noise_is_around_the_keyframe():
    torch.manual_seed(0)
    first = slider(keyframe="home", reset_noise=0.1).reset()["observation"]
    assert ((first[:, 0] - 2).abs() <= 0.1).all() and (first[:, 0] != 2).all()
    assert (first[:, 1] != 0.5).all() and ((first[:, 1] - 0.5).abs() < 1).all()


@pytest.mark.parametrize("keyframe", ["away", 2, -1, True, 0.0])
def test_an_unknown_keyframe_is_refused_with_those_there_are(keyframe):
    with pytest.raises(ValueError, match=r"keyframe: expected .*\(home, 1\).*Remedy"):
        slider(keyframe=keyframe)
    with pytest.raises(ValueError, match=r"keyframe: expected .*\(none\).*Remedy"):
        Hopper(1, device="cpu", keyframe="home")


def test_a_clock_begins_anew_with_each_episode():
    """Of worlds whose ends differ, and of another env of the same model whose arrays have run before."""
    slider().rollout(4)
    env = slider(terminated=lambda state: state["qpos"][:, 0] > 1e9)
    env.reset()
    step = env.rand_step()
    for _ in range(2):
        _, root = env.step_and_maybe_reset(step)
        step = root.set("action", torch.zeros(3, 1))
    mask = torch.tensor([[True], [False], [False]])
    env.reset(root.select("is_init", "observation").set("_reset", mask))
    after = env.step(env.reset(root.clone().set("_reset", mask)).set("action", torch.zeros(3, 1)))
    clock = after["next", "observation"][:, 3]
    assert clock[0] < clock[1] == clock[2], "a sensor reads the start of the last physics step of a step"
    torch.testing.assert_close(clock[:1], torch.tensor([0.01]))


@pytest.mark.parametrize(
    "names", [("sensordata", "xpos", "sensordata"), iter(["xpos", "sensordata"]), {"xpos": 1, "sensordata": 2}]
)
def test_quantities_are_observed_once_of_any_iterable(names):
    env = slider(observed=names)
    assert sorted(env.simulation.observed) == ["sensordata", "xpos"]
    assert env.rollout(2).shape == (3, 2)


@pytest.mark.parametrize("names", [None, 3, "xpos", (3, "a"), ("qpos",)])
def test_what_names_no_quantities_is_refused(names):
    with pytest.raises(ValueError, match=r"observed: expected a sequence of names .*Remedy: these"):
        slider(observed=names)


@pytest.mark.parametrize(
    ("name", "value"),
    [("deterministic", "no"), ("deterministic", 1), ("integrator", []), ("solver", {}), ("cone", 1)],
)
def test_settings_of_other_types_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}: expected .*Remedy"):
        slider(**{name: value})


def test_a_spec_is_compiled():
    spec = mujoco.MjSpec.from_string(SLIDER)
    assert slider(spec, keyframe="home").reset()["observation"][0, 0] == 2
    spec.body("cart").add_joint(type=mujoco.mjtJoint.mjJNT_HINGE, axis=[0, 0, 0])
    with pytest.raises(ValueError, match=r"model: expected MJCF that MuJoCo reads, received an MjSpec.*Remedy"):
        slider(spec)


def test_bodies_that_sleep_are_refused():
    asleep = SLIDER.replace("<flag ", '<flag sleep="enable" ')
    if "sleep" not in "".join(dir(mujoco.mjtEnableBit)).lower():
        pytest.skip("this MuJoCo has no sleep")
    with pytest.raises(NotImplementedError, match=r"awake.*Remedy"):
        slider(asleep)


def test_states_of_other_kinds_are_refused(monkeypatch):
    model = mujoco.MjModel.from_xml_string(SLIDER)
    check_state(model)
    whole = mujoco.mj_stateSize
    sizes = lambda model, kind: 4 if kind == mujoco.mjtState.mjSTATE_PLUGIN else whole(model, kind)  # noqa: E731
    monkeypatch.setattr(mujoco, "mj_stateSize", sizes)
    with pytest.raises(NotImplementedError, match=r"4 numbers of plugin state.*Remedy"):
        check_state(model)


@pytest.mark.parametrize("settings", [{}, {"mass_noise": 0.1, "friction_noise": 0.1, "gain_noise": 0.1}])
def test_states_are_float32_whatever_the_default_dtype_is(settings):
    torch.set_default_dtype(torch.float64)
    try:
        envs = [Hopper(2, device="cpu", **settings), slider(reset_noise=0.1, **settings)]
        for env in envs:
            check_env_specs(env)
            assert env.rollout(3)["observation"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_worlds_are_not_copied():
    env = slider()
    for call in (copy.deepcopy, lambda each: pickle.dumps(each.simulation)):
        with pytest.raises(TypeError, match=r"copies or pickles.*Remedy: another env"):
            call(env)


def test_a_copy_goes_on_by_the_state():
    torch.manual_seed(0)
    env, other = slider(keyframe="home", reset_noise=0.1), slider(keyframe="home")
    env.rollout(3)
    other.load_state_dict(env.state_dict())
    for name in ("qpos", "qvel", "act", "time"):
        assert torch.equal(getattr(env, f"state_{name}"), getattr(other, f"state_{name}")), name


@pytest.mark.parametrize("name", ["observe", "reward", "terminated"])
def test_functions_that_are_none_and_functions_that_write_are_refused(name):
    with pytest.raises(TypeError, match=rf"{name}: expected a function .* received int. Remedy"):
        slider(**{name: 3})

    def write(*states):
        state = states[-1]
        state["qvel"] += 1
        return {"observe": state["qpos"], "reward": state["qpos"][:, 0], "terminated": state["qpos"][:, 0] > 9}[name]

    with pytest.raises(ValueError, match=rf"{name}: expected .* writes into qvel. Remedy: new tensors"):
        slider(**{name: write})


@pytest.mark.parametrize("model", [None, 3, b"<mujoco/>"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"model: expected the path of an MJCF file.*Remedy"):
        slider(model)


@pytest.mark.parametrize("value", ["0.1", True, None])
@pytest.mark.parametrize("name", ["reset_noise", "mass_noise", "friction_noise", "gain_noise"])
def test_noises_that_are_no_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}: expected .*Remedy"):
        slider(**{name: value})


@pytest.mark.parametrize("make", [slider, lambda **settings: Pendulum(2, **settings)])
def test_seeds_are_integers_of_any_kind(make):
    for seed in ("3", 1.5, True):
        with pytest.raises(TypeError, match=r"expected seed \(int\), received .*Remedy"):
            make(seed=seed)
    roots = [make(seed=seed).rollout(3) for seed in (3, np.int64(3))]
    assert torch.equal(roots[0]["observation"], roots[1]["observation"])


FLEX = """
<mujoco><worldbody>
  <flexcomp name="cloth" type="grid" count="3 3 1" spacing=".1 .1 .1" dim="2" radius=".01"/>
</worldbody></mujoco>
"""
PULLED = """
<mujoco>
  <worldbody><body>
    <joint name="hinge" axis="0 1 0"/><geom size=".1" pos=".2 0 0"/><site name="moved" pos=".1 0 0"/>
  </body><site name="fixed" pos=".1 0 .3"/></worldbody>
  <tendon><spatial name="string"><site site="fixed"/><site site="moved"/></spatial></tendon>
  <actuator>%s</actuator>
</mujoco>
"""


@pytest.mark.parametrize("force", ["", "force='200'"], ids=["by its scale", "given"])
def test_noise_of_a_muscle_is_of_its_force_and_not_of_its_shape(force):
    def forces(**noise):
        model = PULLED % f"<muscle tendon='string' lengthrange='.1 .5' {force}/>"
        names = {"observed": ("actuator_force",), "reset_noise": 0.0, "frame_skip": 1}
        env = MuJoCoEnv(
            model, 5, reward=lambda before, action, after: after["qpos"][:, 0], **names, **noise, device="cpu"
        )
        root = env.reset()
        env.state_act[:] = 0.5
        env.step(root.set("action", torch.ones(5, 1)))
        return env, env.state_actuator_force[:, 0]

    usual = forces()[1]
    env, varied = forces(gain_noise=0.5)
    kept = torch.as_tensor(env.model.actuator_gainprm[0], dtype=torch.float32)
    factor = env.state_actuator_gainprm[:, 0, 3] / kept[3]
    assert factor.std() > 0.05
    assert usual.min() == usual.max() < -1
    torch.testing.assert_close(varied, factor * usual, rtol=1e-5, atol=1e-5)  # a muscle's force is its peak's share
    shape = [0, 1, *range(4, 10)]
    assert torch.equal(env.state_actuator_gainprm[:, 0, shape], kept[shape].expand(5, -1))


@pytest.mark.parametrize(
    ("model", "noise", "words"),
    [
        (
            PULLED % "<pid joint='hinge' kp='1'/>",
            "gain_noise",
            "gain_noise: expected actuators whose gaintype is one of",
        ),
        (FLEX, "friction_noise", "friction_noise: expected geoms alone"),
    ],
)
def test_noise_that_would_not_be_felt_is_refused(model, noise, words):
    with pytest.raises(NotImplementedError, match=words) as caught:
        MuJoCoEnv(model, 1, reward=lambda before, action, after: after["qpos"][:, 0], device="cpu", **{noise: 0.2})
    assert "Remedy: " in str(caught.value)
