"""TorchRL training loops that stay on the device from the first observation to the last gradient.

Each class is the sync-free, capturable counterpart of a TorchRL class: it takes the same TensorDicts and keys and drops
into an existing script alone. Import from the subpackages (``torchrl_perf.envs``, ``torchrl_perf.collectors``, ...);
this module itself imports none of them.

Dimension key, used in every shape of the package:

    N environments    T time             B minibatch
    A agents          K quantiles or ensemble members
    O observation     D action

Layout: a batch is ``[N, T]``, TorchRL's order, with the last batch dimension named "time". Memory is time-major:
storage is ``[T, N]`` contiguous and the batch its transposed view, so that one step is one contiguous write.

Time: the reward, done, terminated and truncated of step t are under ("next", ...) at index t. ``terminated`` stops the
bootstrap, ``done`` stops the recursion. A truncated step bootstraps from the true final observation, which auto-reset
keeps in ("next", <observation>).
"""

from torchrl_perf.moved import install as _install

__version__ = "0.2.0"

__all__ = ["__version__"]

_install()
