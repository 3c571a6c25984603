"""`roundelay.horovod.torch.elastic`."""

from roundelay.fronts.horovod.torch.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
