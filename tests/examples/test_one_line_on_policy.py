"""Scripts in TorchRL's own style, and the same with one line of ours: the same losses and parameters in the end."""

import pytest
import torch

SCRIPT = """
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import Compose, DoubleToFloat, GymEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss
from torchrl.objectives.value import GAE
from torchrl_perf.objectives import DeviceClipPPOLoss, DeviceKLPENPPOLoss
from torchrl_perf.transforms import GAETransform

torch.manual_seed(0)
env = TransformedEnv(GymEnv(TASK), Compose(DoubleToFloat(), StepCounter(MAX_STEPS)))
env.set_seed(0)
size = env.observation_spec["observation"].shape[-1]
actions = env.action_spec.shape[-1]
if TASK == "CartPole-v1":
    net, keys = nn.Sequential(nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, actions)), ["logits"]
    distribution, kwargs = OneHotCategorical, {}
else:
    net = nn.Sequential(nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, 2 * actions), NormalParamExtractor())
    keys, distribution = ["loc", "scale"], TanhNormal
    kwargs = {"low": env.action_spec.space.low, "high": env.action_spec.space.high}
policy_module = ProbabilisticActor(
    module=TensorDictModule(net, in_keys=["observation"], out_keys=keys), spec=env.action_spec, in_keys=keys,
    distribution_class=distribution, distribution_kwargs=kwargs, return_log_prob=True,
)
value_module = ValueOperator(nn.Sequential(nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, 1)), in_keys=["observation"])
collector = Collector(
    env, policy_module, frames_per_batch=32, total_frames=64, auto_register_policy_transforms=False
)
replay_buffer = ReplayBuffer(storage=LazyTensorStorage(32), sampler=SamplerWithoutReplacement(), batch_size=16)
advantage_module = GAE(gamma=0.99, lmbda=0.95, value_network=value_module, average_gae=True)
options = {"clip_epsilon": 0.2, "entropy_bonus": True, "entropy_coeff": 1e-3, "loss_critic_type": "smooth_l1"}
loss_module = ClipPPOLoss(actor_network=policy_module, critic_network=value_module, critic_coeff=1.0, **options)
optim = torch.optim.Adam(loss_module.parameters(), 3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 2, 0.0)
history = []
for tensordict_data in collector:
    for _ in range(2):
        advantage_module(tensordict_data)
        replay_buffer.extend(tensordict_data.reshape(-1))
        for _ in range(2):
            loss_vals = loss_module(replay_buffer.sample())
            loss_value = loss_vals["loss_objective"] + loss_vals["loss_critic"] + loss_vals["loss_entropy"]
            loss_value.backward()
            torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
            history.append([loss_vals[f"loss_{key}"].item() for key in ("objective", "critic", "entropy")])
    scheduler.step()
with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
    score = env.rollout(10, policy_module)["next", "reward"].sum().item()
collector.shutdown()
"""

GAE_LINE = "advantage_module = GAE(gamma=0.99, lmbda=0.95, value_network=value_module, average_gae=True)"
LOSS_LINE = next(line for line in SCRIPT.splitlines() if line.startswith("loss_module = "))
KL_LINE = (
    "loss_module = KLPENPPOLoss(policy_module, value_module, beta=0.5, dtarg=1e9, decrement=1.0, entropy_coeff=1e-3)"
)
IN_THE_LOSS = "loss_module = ClipPPOLoss(policy_module, value_module)"
TASKS = {"CartPole-v1": 15, "Pendulum-v1": 25}


def run(task, *changes):
    script = SCRIPT
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    scope = {"TASK": task, "MAX_STEPS": TASKS[task]}
    exec(compile(script, "script", "exec"), scope)
    parameters = [p.detach().clone() for p in scope["loss_module"].parameters()]
    return torch.tensor(scope["history"]), parameters, scope["score"]


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-4, atol=1e-5)
    assert len(one[1]) == len(other[1]) > 0
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert one[2] == pytest.approx(other[2], rel=1e-3)


@pytest.fixture(scope="module")
def stock():
    return {task: run(task) for task in TASKS}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "change",
    [(GAE_LINE, GAE_LINE.replace("GAE(", "GAETransform(")), (LOSS_LINE, LOSS_LINE.replace("Clip", "DeviceClip"))],
    ids=["GAETransform", "DeviceClipPPOLoss"],
)
def test_one_line(stock, task, change):
    assert_same(run(task, change), stock[task])


@pytest.mark.parametrize("task", TASKS)
def test_the_penalised_loss(task):
    ours = run(task, (LOSS_LINE, KL_LINE.replace("KLPEN", "DeviceKLPEN")))
    assert_same(ours, run(task, (LOSS_LINE, KL_LINE)))


def test_the_advantage_in_the_loss():
    """Without GAE in the script, the loss estimates it on what it is given: a whole batch with its time."""
    whole = ("loss_module(replay_buffer.sample())", "loss_module(tensordict_data)")
    silent = ("        advantage_module(tensordict_data)\n", "")
    estimator = "; loss_module.make_value_estimator({}(gamma=0.99, lmbda=0.95, value_network=value_module))"
    theirs = run("Pendulum-v1", (LOSS_LINE, IN_THE_LOSS + estimator.format("GAE")), whole, silent)
    for line in (IN_THE_LOSS, IN_THE_LOSS.replace("Clip", "DeviceClip")):
        assert_same(run("Pendulum-v1", (LOSS_LINE, line + estimator.format("GAETransform")), whole, silent), theirs)


TRAINER = """
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers.algorithms import PPOTrainer
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.transforms import GAETransform

torch.manual_seed(0)
env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
env.set_seed(0)
actor = ProbabilisticActor(
    TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]), in_keys=["logits"],
    distribution_class=OneHotCategorical, return_log_prob=True, spec=env.action_spec,
)
critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
loss = ClipPPOLoss(actor, critic, normalize_advantage=True, loss_critic_type="l2")
gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
collector = Collector(env, actor, frames_per_batch=32, total_frames=96)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(32), sampler=SamplerWithoutReplacement(), batch_size=16)
trainer = PPOTrainer(
    collector=collector, total_frames=96, frame_skip=1, optim_steps_per_batch=2, num_epochs=2, loss_module=loss,
    optimizer=torch.optim.SGD(loss.parameters(), 0.1), gae=gae, replay_buffer=buffer, progress_bar=False,
    enable_logging=False,
)
trainer.train()
"""


@pytest.mark.filterwarnings("ignore:PPOTrainer is an experimental:UserWarning")
@pytest.mark.filterwarnings("ignore:The '.*' hook stage:FutureWarning")
def test_torchrls_trainer():
    results = {}
    for old, new in (("loss", "loss"), ("gae = GAE(", "gae = GAETransform("), ("loss = Clip", "loss = DeviceClip")):
        scope = {}
        exec(compile(TRAINER.replace(old, new), "script", "exec"), scope)
        results[new] = [p.detach().clone() for p in scope["loss"].parameters()]
    stock = results.pop("loss")
    for name, parameters in results.items():
        for one, other in zip(parameters, stock, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
