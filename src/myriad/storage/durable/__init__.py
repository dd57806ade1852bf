"""Durable checkpoints: PyTorch DCP directories with a manifest, checksums and a commit marker.

``manifest`` is torch-free (listing, committing, pruning). ``checkpoint`` saves and loads, by way of ``reading``, and
``huggingface`` exports and imports, with the names of ``llama``; these import torch.
"""
