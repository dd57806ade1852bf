"""Durable checkpoints: PyTorch DCP directories with a manifest, checksums and a commit marker.

``manifest`` is torch-free (listing, committing, pruning); ``checkpoint`` saves and loads and imports torch.
"""
