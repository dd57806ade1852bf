"""Token shards, memory snapshots and durable checkpoints.

Three rooms that do not know each other: ``memory`` (torch-free: the agent holds snapshots with it),
``datasets`` (numpy: the order of samples and their tokens) and ``durable`` (torch: checkpoints on
storage). Nothing is imported here, so that ``import myriad.storage`` never imports torch.
"""
