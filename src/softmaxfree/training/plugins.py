"""Lightning's plugins that a run has in place of its own."""

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.plugins.layer_sync import LayerSync
from timm.layers import convert_sync_batchnorm
from torch import nn


class SynchronisedBatchNorm(LayerSync):
    """Batch normalisation over all processes, which keeps the activation in timm's."""

    def apply(self, model: nn.Module) -> nn.Module:
        converted: nn.Module = convert_sync_batchnorm(model)
        return converted

    def revert(self, model: nn.Module) -> nn.Module:
        """Changes nothing: outside training nothing is synchronised."""
        return model


def cluster() -> list[SLURMEnvironment]:
    """Slurm without Lightning's signal handlers; RunCheckpoint has ours."""
    return [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
