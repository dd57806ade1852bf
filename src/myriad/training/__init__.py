"""PyTorch training: model, mesh, parallelism, step loop, session. See ``session`` for one's own loop."""
