"""`roundelay.horovod.torch.elastic`."""

from roundelay.fronts.horovod.torch.elastic import ElasticSampler, TorchState, __getattr__, run

__all__ = ["ElasticSampler", "TorchState", "__getattr__", "run"]
