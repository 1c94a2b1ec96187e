"""Which class of this package replaces library code that waits, by the place of the wait.

Checked against TorchRL 0.14.1, tensordict 0.14.3 and PyTorch 2.13: a test looks up each place in what is installed.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from torchrl_perf.runtime.waits.frames import Call, package_root
from torchrl_perf.runtime.waits.operators import CUDA_REMEDY, REMEDIES

__all__ = ["REPLACEMENTS", "Replacement", "remedy_for", "replaced_by"]


class Replacement(NamedTuple):
    """What to use instead of a piece of library code.

    Attributes:
        package: name of the package that waits.
        path: start of the file's path inside the package.
        functions: qualified names of the functions, their beginnings, or their last parts; empty for all of the file.
        remedy: what to do.
        name: full name of this package's replacement; "" where there is none.
    """

    package: str
    path: str
    functions: tuple[str, ...]
    remedy: str
    name: str = ""


_PERF = "torchrl_perf."
_SET_UP = "leave it: it happens once, when the object is made"
_COLLECTOR = (
    "collect with DeviceCollector, which merges resets by a mask; with a DeviceEnv the reset lies inside the step"
)
_SIMULATOR = (
    "step gymnasium envs with HostCollector: one packed copy each way for all envs; or port the env to a DeviceEnv"
)
_TRAINER = "call use_device_parts(trainer): hooks that keep batch, losses and metrics on the device"
_SLICES = "sample with DeviceSliceSampler, whose windows are of fixed length"
_BUFFER = "make_replay_buffer keeps cursor and length in tensors on the device"

_EXPLORATION_FILE = "modules/tensordict_module/exploration.py"

EXPLORATION = (
    Replacement(
        "torchrl",
        _EXPLORATION_FILE,
        ("EGreedyModule",),
        "explore with EpsilonGreedy, whose schedule is a formula on the device",
        _PERF + "modules.EpsilonGreedy",
    ),
    Replacement(
        "torchrl",
        _EXPLORATION_FILE,
        ("AdditiveGaussianModule",),
        "explore with GaussianNoise, which clamps to bounds in buffers",
        _PERF + "modules.GaussianNoise",
    ),
    Replacement(
        "torchrl",
        _EXPLORATION_FILE,
        ("OrnsteinUhlenbeckProcessModule", "_OrnsteinUhlenbeckProcess"),
        "explore with OUNoise, whose state is a buffer on the device",
        _PERF + "modules.OUNoise",
    ),
)
"""Functions that draw and project by specs, which wait; their replacements avoid that too."""

REPLACEMENTS = (
    # set-up, which no loop waits for
    Replacement("torchrl", "envs/libs/gym.py", ("convert_box_spec",), _SET_UP),
    Replacement("torchrl", "objectives/ppo.py", ("PPOLoss.__init__",), _SET_UP),
    Replacement("torchrl", "objectives/td3.py", ("TD3Loss.__init__",), _SET_UP),
    Replacement("torchrl", "data/tensor_specs.py", ("ContinuousBox.batch_size",), _SET_UP),
    Replacement("tensordict", "nn/utils.py", ("inv_softplus",), _SET_UP),
    # collection
    Replacement(
        "torchrl",
        "data/tensor_specs.py",
        ("Bounded.rand",),
        "draw random actions with DeviceCollector: policy=None, or init_random_frames",
        _PERF + "collectors.DeviceCollector",
    ),
    Replacement(
        "torchrl",
        "envs/transforms/_normalization.py",
        ("ObservationNorm",),
        "normalise in the policy, by loc and scale in its buffers: this transform asks its flag at each step",
    ),
    Replacement(
        "torchrl",
        "envs/common.py",
        (
            "EnvBase._reset_check_done",
            "EnvBase.maybe_reset",
            "EnvBase._step_and_maybe_reset",
            "EnvBase.any_done",
            "EnvBase.reset",
        ),
        _COLLECTOR,
        _PERF + "collectors.DeviceCollector",
    ),
    Replacement(
        "torchrl",
        "envs/utils.py",
        ("_update_during_reset", "terminated_or_truncated", "check_env_specs"),
        _COLLECTOR,
        _PERF + "collectors.DeviceCollector",
    ),
    Replacement(
        "torchrl",
        "envs/common.py",
        ("EnvBase.rollout", "EnvBase._rollout_stop_early", "EnvBase._rollout_nonstop"),
        "roll out with DeviceCollector, which asks nothing at its steps",
        _PERF + "collectors.DeviceCollector",
    ),
    Replacement(
        "torchrl",
        "collectors/",
        (),
        "collect with DeviceCollector; without it, track_traj_ids=False saves the reads of the trajectory ids",
        _PERF + "collectors.DeviceCollector",
    ),
    Replacement("torchrl", "envs/libs/gym", (), _SIMULATOR, _PERF + "collectors.HostCollector"),
    Replacement("torchrl", "envs/gym_like.py", (), _SIMULATOR, _PERF + "collectors.HostCollector"),
    Replacement("torchrl", "data/tensor_specs.py", ("to_numpy",), _SIMULATOR, _PERF + "collectors.HostCollector"),
    Replacement(
        "torchrl",
        "envs/batched_envs.py",
        (),
        "step processes with HostCollector: one packed copy each way for all envs",
        _PERF + "collectors.HostCollector",
    ),
    # advantages and losses
    Replacement(
        "torchrl",
        "objectives/value/",
        (),
        "compute advantages with GAETransform: a scan of static shape",
        _PERF + "transforms.GAETransform",
    ),
    Replacement(
        "torchrl",
        "objectives/ppo.py",
        ("PPOLoss._get_entropy", "ClipPPOLoss"),
        "use DeviceClipPPOLoss, whose entropy is not checked on the host",
        _PERF + "objectives.DeviceClipPPOLoss",
    ),
    Replacement(
        "torchrl",
        "objectives/ppo.py",
        ("KLPENPPOLoss",),
        "use DeviceKLPENPPOLoss, whose adaptive penalty is a tensor on the device",
        _PERF + "objectives.DeviceKLPENPPOLoss",
    ),
    Replacement(
        "torchrl",
        "objectives/dqn.py",
        ("DistributionalDQNLoss",),
        "use DeviceC51Loss: this loss moves the distribution to the CPU at each update",
        _PERF + "objectives.DeviceC51Loss",
    ),
    Replacement(
        "torchrl",
        "objectives/sac.py",
        (),
        "use DeviceSACLoss, which has no host branch",
        _PERF + "objectives.DeviceSACLoss",
    ),
    # policies
    Replacement(
        "torchrl",
        "modules/distributions/continuous.py",
        ("TanhNormal", "TruncatedNormal"),
        "use SquashedNormal, whose bounds are buffers",
        _PERF + "modules.SquashedNormal",
    ),
    *EXPLORATION,
    Replacement(
        "torchrl",
        "data/tensor_specs.py",
        (),
        "keep specs out of the loop: no safe=True, project or is_in on each action; bound it with SquashedNormal",
        _PERF + "modules.SquashedNormal",
    ),
    Replacement(
        "torch",
        "distributions/",
        (),
        "pass validate_args=False, or torch.distributions.Distribution.set_default_validate_args(False) once",
    ),
    # replay
    Replacement(
        "torchrl",
        "data/replay_buffers/samplers/prioritized",
        (),
        "sample with DevicePrioritizedSampler: the tree and its updates stay on the device",
        _PERF + "replay.DevicePrioritizedSampler",
    ),
    Replacement("torchrl", "data/replay_buffers/samplers/slice", (), _SLICES, _PERF + "replay.DeviceSliceSampler"),
    Replacement(
        "torchrl",
        "data/replay_buffers/utils.py",
        (),
        _SLICES,
        _PERF + "replay.DeviceSliceSampler",
    ),
    Replacement(
        "torchrl",
        "data/replay_buffers/samplers/",
        (),
        "sample with the Device… sampler of the same kind",
        _PERF + "replay.DeviceRandomSampler",
    ),
    Replacement(
        "torchrl",
        "data/replay_buffers/checkpointers.py",
        (),
        "write the buffer once in many iterations: a checkpoint copies all of it",
    ),
    Replacement("torchrl", "data/replay_buffers/", (), _BUFFER, _PERF + "replay.make_replay_buffer"),
    # training and logging
    Replacement(
        "torchrl",
        "trainers/",
        (),
        _TRAINER,
        _PERF + "trainers.use_device_parts",
    ),
    Replacement(
        "torchrl",
        "record/loggers/",
        (),
        "accumulate in DeviceMetrics and flush once per interval",
        _PERF + "metrics.DeviceMetrics",
    ),
    Replacement(
        "torch",
        "nn/utils/clip_grad.py",
        (),
        "step with GuardedAdam, which clips and skips bad gradients on the device; never error_if_nonfinite=True",
        _PERF + "trainers.GuardedAdam",
    ),
    Replacement(
        "torch",
        "amp/grad_scaler.py",
        (),
        "step with GuardedAdam, which skips bad gradients by a flag on the device",
        _PERF + "trainers.GuardedAdam",
    ),
    Replacement(
        "tensordict",
        "nn/cudagraphs.py",
        (),
        "record with capture, which synchronises at the recording alone",
        _PERF + "runtime.capture",
    ),
    Replacement(
        "torchrl",
        "weight_update/",
        (),
        "let collector and learner share one policy: DeviceCollector acts with the tensors that the optimiser writes",
        _PERF + "collectors.DeviceCollector",
    ),
)

_READS = frozenset(("_local_scalar_dense", "tolist", "numpy", "__array__", "cpu", "copy_to_host"))
_NORM = ("grad_norm", "clip_grad", "get_total_norm", "(gn")


def remedy_for(op: str, libraries: Sequence[Call], source: str, *, on_host: bool = False) -> tuple[str, str]:
    """What to write instead of a wait.

    Args:
        op: name of the operation.
        libraries: the frames of libraries between the operation and the script, from the innermost outwards, with
            qualified function names; none where the script waits itself.
        source: the innermost line that is not PyTorch's.
        on_host: whether the env at work steps on the host: its loop is one for HostCollector alone.

    Returns:
        The remedy, and the full name of this package's replacement or "".
    """
    for entries in (EXPLORATION, REPLACEMENTS):
        for call in libraries:
            for entry in entries:
                if _is_at(call, entry):
                    of_device = on_host and entry.name == _PERF + "collectors.DeviceCollector"
                    return (_SIMULATOR, _PERF + "collectors.HostCollector") if of_device else (entry.remedy, entry.name)
    general = REMEDIES.get(op, CUDA_REMEDY)
    if op in _READS and any(word in source for word in _NORM):
        return "keep the norm on the device: GuardedAdam clips without reading it", _PERF + "trainers.GuardedAdam"
    if op in _READS and not libraries:
        return f"{general}: DeviceMetrics does that", _PERF + "metrics.DeviceMetrics"
    return general, ""


def replaced_by(chain: Sequence[Call]) -> str:
    """What to use instead of the innermost library code of a chain that has a replacement; empty where none has.

    Args:
        chain: frames, from the innermost outwards.
    """
    for call in chain:
        for entry in (*EXPLORATION, *REPLACEMENTS):
            if entry.name and _is_at(call, entry):
                return entry.remedy
    return ""


def _is_at(call: Call, entry: Replacement) -> bool:
    root = package_root(entry.package)
    if root is None or not os.path.abspath(call.file).startswith(root + entry.path.replace("/", os.sep)):
        return False
    return (
        not entry.functions
        or call.function.startswith(entry.functions)
        or call.function.rpartition(".")[2] in entry.functions
    )
