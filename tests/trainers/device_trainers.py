"""TorchRL's trainers on the device's collectors, losses and policies, with nothing installed yet."""

from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import DQNLoss, HardUpdate, SACLoss, SoftUpdate
from torchrl.trainers.algorithms import DQNTrainer, PPOTrainer, SACTrainer

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.modules import EpsilonGreedy, GumbelCategorical, SquashedNormal, SquashedNormalHead
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.trainers import GuardedAdam
from torchrl_perf.transforms import GAETransform

NO_PARTS = {"frame_skip": 1, "enable_logging": False, "progress_bar": False}


def make_adam(trainer, **options):
    return GuardedAdam(trainer.loss_module.parameters(), **{"learning_rate": 1e-2, "max_grad_norm": 0.5, **options})


def weights(trainer):
    return [p.detach().clone() for p in trainer.loss_module.parameters()]


def make_ppo(device="cpu", *, total_frames=384, num_envs=8, batch=64, **options):
    env = CartPole(num_envs, device=device)
    net = TensorDictModule(nn.Linear(4, 2, device=device), ["observation"], ["logits"])
    actor = ProbabilisticActor(net, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
    critic = ValueOperator(nn.Linear(4, 1, device=device), in_keys=["observation"])
    settings = {
        "collector": DeviceCollector(
            env, actor, frames_per_batch=batch, total_frames=total_frames, exclude_keys=("logits",)
        ),
        "total_frames": total_frames,
        "optim_steps_per_batch": None,
        "loss_module": DeviceClipPPOLoss(actor, critic),
        "num_epochs": 2,
        "gae": GAETransform(gamma=0.99, lmbda=0.95, value_network=critic),
    }
    return PPOTrainer(**{**NO_PARTS, **settings, **options})


def make_sac(device="cpu", *, total_frames=384, init_random_frames=0, **options):
    env = Pendulum(8, device=device)
    space = env.action_spec_unbatched.space
    keys = SquashedNormalHead.param_keys
    net = nn.Sequential(MLP(3, 2, num_cells=[16], device=device), SquashedNormalHead(space.low, space.high))
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys),
        in_keys=keys,
        distribution_class=SquashedNormal,
        spec=env.full_action_spec_unbatched,
    )
    critic = ValueOperator(
        MLP(4, 1, num_cells=[16], device=device),
        in_keys=["observation", "action"],
        out_keys=["state_action_value"],
    )
    loss = SACLoss(actor, critic, num_qvalue_nets=2, target_entropy=-1.0)
    loss.make_value_estimator(gamma=0.99)
    settings = {
        "collector": DeviceCollector(
            env,
            actor,
            frames_per_batch=64,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            exclude_keys=keys,
        ),
        "total_frames": total_frames,
        "optim_steps_per_batch": 3,
        "loss_module": loss,
        "target_net_updater": SoftUpdate(loss, tau=0.01),
    }
    return SACTrainer(**{**NO_PARTS, **settings, **options})


def make_dqn(device="cpu", *, total_frames=384, init_random_frames=0, **options):
    env = CartPole(8, device=device)
    spec = env.action_spec_unbatched
    value = QValueActor(MLP(4, 2, num_cells=[16], device=device), in_keys=["observation"], spec=spec)
    greedy = EpsilonGreedy(
        nn.Identity(), spec=spec, in_keys=["action_value"], eps_start=1.0, eps_end=0.5, decay_frames=512
    )
    loss = DQNLoss(value, delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.99)
    settings = {
        "collector": DeviceCollector(
            env,
            TensorDictSequential(value, greedy),
            frames_per_batch=64,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            exclude_keys=("action_value", "chosen_action_value"),
        ),
        "total_frames": total_frames,
        "optim_steps_per_batch": 3,
        "loss_module": loss,
        "target_net_updater": HardUpdate(loss, value_network_update_interval=6),
        "greedy_module": greedy,
    }
    return DQNTrainer(**{**NO_PARTS, **settings, **options})
