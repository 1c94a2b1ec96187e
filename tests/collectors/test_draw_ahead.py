"""DeviceCollector: random numbers of many steps drawn at once."""

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardSum

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.runtime import draws
from torchrl_perf.runtime.draws import uniform
from torchrl_perf.trainers import PPOConfig, make_actor

TASKS = {"CartPole": CartPole, "Pendulum": Pendulum}
FRAMES = {"frames_per_batch": 4 * 12}


def make(task="CartPole", *, steps=12, device="cpu", env=None, **options):
    torch.manual_seed(3)
    env = env or TASKS[task](4, device=device, max_episode_steps=5)
    actor = make_actor(env, PPOConfig.without_task(num_envs=4))
    return DeviceCollector(env, actor, frames_per_batch=4 * steps, **{"draw_ahead": True} | options)


def plain_actor():
    torch.manual_seed(3)
    return make_actor(Pendulum(4), PPOConfig.without_task(num_envs=4))


def batches(collector, count=2):
    torch.manual_seed(7)
    return [collector.collect().clone() for _ in range(count)]


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for key in one.keys(True, True):
            assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("task", TASKS)
def test_steps_draw_nothing(task, monkeypatch):
    collector = make(task)
    for name in ("rand", "randn"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: pytest.fail("a step drew by itself"))
    collector._started = True  # the reset before the first step draws as ever
    batch = collector.collect()
    assert batch["action"].to(torch.float32).std() > 0


@pytest.mark.parametrize("task", TASKS)
def test_resets_and_actions_differ_from_step_to_step(task):
    batch = batches(make(task, steps=40), 1)[0]
    starts = batch["observation"][batch["is_init"].squeeze(-1)]
    assert len(starts) >= 4 * 7
    assert torch.unique(starts, dim=0).shape == starts.shape
    rows = batch["action"].reshape(4, -1)
    assert not torch.equal(rows[:, :20], rows[:, 20:])


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for key in one.keys(True, True):
            torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-5, msg=str(key))


@pytest.mark.parametrize("task", TASKS)
def test_equal_compiled(task, device, traced):
    ours, theirs = (batches(make(task, device=device, mode=mode), 5) for mode in ("compile", "eager"))
    assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS)
def test_equal_captured(task, traced):
    ours, theirs = (batches(make(task, device="cuda", mode=mode), 5) for mode in ("graph", "eager"))
    assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(("task", "launches"), [("CartPole", 4), ("Pendulum", 5)])
def test_launches_of_a_captured_step(task, launches):
    """The network, and what Inductor makes of the rest; the docs name the first figure."""
    steps = 64
    collector = make(task, steps=steps, device="cuda", mode="graph")
    for _ in range(4):
        collector.collect()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        collector.collect()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    assert launches * steps <= kernels < (launches + 1) * steps


def test_equal_however_many_steps_are_drawn_at_once_to_itself(monkeypatch):
    monkeypatch.setattr(draws, "LIMIT", 1)
    monkeypatch.setattr(draws.StepDraws.__init__, "__defaults__", (1,))
    assert_equal(batches(make()), batches(make()))
    assert make()._draws.block == 1


def test_goes_on_where_it_stopped():
    collector = make()
    collector.collect()
    state, random = collector.state_dict(), torch.get_rng_state()
    following = collector.collect().clone()
    other = make()
    other.load_state_dict(state)
    torch.set_rng_state(random)
    assert_equal([following], [other.collect()])


def test_single_draws_where_it_is_not_asked_for():
    plain = batches(make("Pendulum", draw_ahead=False))
    assert_equal(plain, batches(DeviceCollector(TASKS["Pendulum"](4, max_episode_steps=5), plain_actor(), **FRAMES)))
    assert not torch.equal(plain[0]["action"], batches(make("Pendulum"))[0]["action"])


def test_envs_below_transforms_draw_by_themselves():
    def env():
        return TransformedEnv(CartPole(4, max_episode_steps=5), RewardSum())

    assert_equal(batches(make(env=env())), batches(make(env=env(), draw_ahead=False)))


def test_a_task_that_makes_its_noise_itself_is_left_alone():
    class Own(CartPole):
        def _reset_noise(self):
            return torch.full((self.num_envs, 4), 0.5)

    assert Own(4).step_draws == ()
    assert len(CartPole(4).step_draws) == 1
    batch = make(env=Own(4, max_episode_steps=2)).collect()
    assert (batch["observation"][batch["is_init"].squeeze(-1)] == 0).all()


def test_random_first_steps():
    batch = make(init_random_frames=8).collect()
    assert batch["action_log_prob"][:, :2].abs().sum() == 0
    assert (batch["action_log_prob"][:, 2:] < 0).all()


def test_a_policy_that_is_compiled_alone():
    with pytest.raises(ValueError, match=r"draw_ahead: expected a policy that runs with its env, received compile_pol"):
        make(compile_policy=True, mode="eager")


def test_numbers_of_the_whole_range():
    batch = batches(make(steps=400), 1)[0]
    starts = batch["observation"][batch["is_init"].squeeze(-1)]
    assert starts.abs().max() <= 0.05
    assert starts.std() == pytest.approx(0.1 / 12**0.5, rel=0.1)
    assert uniform((2,), dtype=torch.float32, device=torch.device("cpu")).shape == (2,)
