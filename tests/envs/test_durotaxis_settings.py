"""The refusals of Durotaxis with their messages, and the stages of its curriculum."""

import math

import pytest
import torch

from torchrl_perf.envs import ColonyCurriculum, ColonySettings, Durotaxis


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_envs": 0}, ValueError, "num_envs >= 1 .*received 0"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps >= 1 .*received 0"),
        ({"dtype": torch.float16}, TypeError, "float32 or torch.float64, received torch.float16"),
        ({"delete_max": 0.0}, ValueError, r"delete_max: expected a share in \(0, 1\], received 0.0. Remedy"),
        ({"delete_max": 1.2}, ValueError, "delete_max: .*received 1.2"),
        ({"delete_max": math.nan}, ValueError, "delete_max: .*received nan"),
        ({"critical_nodes": 4}, ValueError, "critical_nodes: expected at least start_nodes = 5, received 4.*Remedy"),
        ({"critical_nodes": 10.0}, ValueError, "critical_nodes: expected an int >= 1, received 10.0"),
        ({"start_nodes": 0}, ValueError, "start_nodes: expected an int >= 1, received 0"),
        ({"theta_max": 4.0}, ValueError, "theta_max: expected an angle"),
        ({"size": 400.0}, ValueError, r"size: expected \(width, height\), each at least 20, received 400.0"),
        ({"size": (400.0, 3.0)}, ValueError, "size: expected"),
        ({"field": "quadratic"}, ValueError, "field: expected 'linear' or 'exponential', received 'quadratic'"),
        ({"deletion": "oldest"}, ValueError, "deletion: expected 'leftmost' or 'random'"),
        ({"confine": 1}, ValueError, "confine: expected True or False"),
        ({"slope": -0.01}, ValueError, "slope, intercept: expected a stiffness between 0 and 1e6.*received -2.99 to 1"),
        ({"intercept": 0.0}, ValueError, "slope, intercept: .*Remedy: a positive intercept"),
        ({"field": "exponential", "slope": 5.0}, ValueError, "slope, intercept: "),
        ({"slope": math.nan}, ValueError, "slope, intercept: "),
        ({"reward_mode": "dense"}, ValueError, r"reward_mode: expected one of \('centroid', 'full', 'delete'\)"),
        ({"reward_weights": {"spwan": 1.0}}, ValueError, r"reward_weights: expected names .*received \['spwan'\]"),
        ({"actions": "both"}, ValueError, "actions: expected 'global' or 'per_node', received 'both'"),
        ({"colour": "red"}, TypeError, r"Durotaxis: expected settings among \['size'.*received \['colour'\]"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        Durotaxis(**{"num_envs": 2, **arguments})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"frames": ()}, "frames: expected numbers that rise from 0"),
        ({"frames": (10, 20)}, "frames: .*received .10, 20."),
        ({"frames": (0, 20, 20)}, "frames: .*rise"),
        ({"frames": (0, 20), "goal": (0.5,)}, "goal: expected 2 entries, one for each of frames"),
        ({"frames": (0, 20), "goal": (0.9, 0.5)}, "goal: expected stages that do not go backwards.*Remedy"),
        ({"frames": (0, 20), "goal": (0.9, 1.5)}, "goal: expected shares of the width"),
        ({"frames": (0, 20), "delete_only": (False, True)}, "delete_only: expected stages that do not go backwards"),
        ({"frames": (0, 20), "critical_nodes": (0, 5)}, "critical_nodes: expected ints >= 1"),
    ],
)
def test_curriculum_that_goes_backwards(arguments, words):
    with pytest.raises(ValueError, match=words):
        ColonyCurriculum(**arguments)


@pytest.mark.parametrize(
    ("stages", "arguments", "words"),
    [
        ({"critical_nodes": (101,)}, {}, "critical_nodes: expected start_nodes = 5 to 100, .*received .101,..*Remedy"),
        ({"critical_nodes": (4,)}, {}, "critical_nodes: expected start_nodes = 5"),
        ({"goal": (0.1,)}, {}, "goal: expected more than 0.1, within which colonies start"),
        ({"delete_only": (True,)}, {"actions": "per_node"}, "delete_only: expected it with actions='global'"),
    ],
)
def test_curriculum_that_does_not_fit(stages, arguments, words):
    with pytest.raises(ValueError, match=words):
        Durotaxis(2, curriculum=ColonyCurriculum(**stages), **arguments)


def test_actions_of_the_wrong_kind():
    env = Durotaxis(2)
    with pytest.raises(ValueError, match=r"expected action \(2, 5\) of floats, received \(2, 4\)"):
        env.step(env.reset().set("action", torch.zeros(2, 4)))
    with pytest.raises(KeyError, match="expected the key 'action', received"):
        env.step(env.reset())
    env = Durotaxis(2, actions="per_node", critical_nodes=8)
    td = env.reset().set(("action", "kind"), torch.zeros(2, 16)).set(("action", "growth"), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"\('action', 'kind'\) \(2, 16\) of integer indices"):
        env.step(td)


STAGES = ColonyCurriculum(
    frames=(0, 8, 16), delete_only=(True, False, False), goal=(0.3, 0.3, 0.95), critical_nodes=(20, 10, 10)
)


def test_stages_begin_at_their_frames_and_at_a_reset():
    env = Durotaxis(2, critical_nodes=20, curriculum=STAGES, max_episode_steps=3, seed=0)
    action = torch.tensor([[0.5, 0.5, 4.0, 0.05, 0.5]]).repeat(2, 1)
    td, stages, ages, goals = env.reset(), [], [], []
    pointer = env.state_x.data_ptr()
    for _ in range(12):
        stages.append(env.state_stage.tolist())
        goals.append(float((td["nodes"][0, 0, 8] + td["nodes"][0, 0, 0]).item()))
        before = env.state_x[:, :5].amax(-1)
        out, td = env.step_and_maybe_reset(td.set("action", action))
        ages.append((400.0 * out["next", "nodes"][..., 0].amax(-1) - before)[0].item())
    # 2 frames a step: stage 1 from the reset after step 6, stage 2 from that after step 9
    assert stages == [[0, 0]] * 6 + [[1, 1]] * 3 + [[2, 2]] * 3
    assert env.frames.item() == 24
    assert env.state_x.data_ptr() == pointer
    assert goals == pytest.approx([0.3] * 9 + [0.95] * 3)
    # gamma 5, alpha 2, noise .5, theta 0 in stage 0, whatever the action says
    assert all(step > 1.4 for step in ages[:6])
    assert all(step < 0.2 for step in ages[6:])


def test_stage_has_its_own_number_of_nodes_and_goal():
    curriculum = ColonyCurriculum(frames=(0,), goal=(0.2,), critical_nodes=(10,))
    env = Durotaxis(4, curriculum=curriculum, seed=0)
    grow = torch.tensor([[0.0, 5.0, 2.0, 0.5, 0.0]]).repeat(4, 1)
    out, td = env.step_and_maybe_reset(env.reset().set("action", grow))
    assert (out["next", "graph"][:, 0] == 1.0).all()
    out, td = env.step_and_maybe_reset(td.set("action", grow))
    assert (out["next", "outcome"] == 2).all()
    hold = torch.tensor([[0.5, 15.0, 0.5, 0.5, 0.0]]).repeat(4, 1)
    for _ in range(8):
        out, td = env.step_and_maybe_reset(td.set("action", hold))
        if out["next", "done"].any():
            break
    assert (out["next", "outcome"] == 1).any()
    reached = out["next", "graph"][out["next", "outcome"].squeeze(-1) == 1]
    assert (reached[:, 7] >= 0.2).all() and (reached[:, 7] < 0.3).all()


def test_state_resumes_bitwise(tmp_path):
    def go_on(env, td):
        env.set_seed(5)
        log = []
        for _ in range(8):
            out, td = env.step_and_maybe_reset(env.rand_action(td))
            log.append(out.clone())
        return torch.stack(log)

    env = Durotaxis(3, critical_nodes=20, curriculum=STAGES, max_episode_steps=4, seed=0)
    td = env.rollout(6, break_when_any_done=False)[:, -1].get("next")
    torch.save(env.state_dict(), tmp_path / "env.pt")
    root = env._reset(td.clone().set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
    expected = go_on(env, root.clone())
    other = Durotaxis(3, critical_nodes=20, curriculum=STAGES, max_episode_steps=4, seed=9)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    assert {"frames", "reward_weights", "elapsed", "state_stage", "state_x"} <= set(other.state_dict())
    assert not [name for name in other.state_dict() if name.startswith("_")]
    got = go_on(other, root.clone())
    for key, value in expected.items(True, True):
        assert torch.equal(value, got[key]), key


def test_settings_compare_by_value():
    assert ColonySettings(critical_nodes=7) == ColonySettings(critical_nodes=7)
    assert ColonySettings().slots == 200
    assert ColonySettings(size=(600.0, 100.0)).margin == (6.0, 2.0)
    assert ColonySettings().stiffness_range == pytest.approx((1.0, 4.99))
