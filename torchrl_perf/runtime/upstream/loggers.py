"""TorchRL's loggers: tensors of a row become numbers by one copy to the host; its own ``log_metrics`` does it so."""

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torchrl.record.loggers.common import _make_metrics_safe


def without_tensors(metrics: Mapping[str, Any] | TensorDictBase, **options: Any) -> dict[str, Any]:
    """Names and values without tensors, in any order; ``keys_sep=`` joins the parts of the keys of a TensorDict."""
    return dict(_make_metrics_safe(metrics, **options))
