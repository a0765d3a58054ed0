"""Attention kernels: tensors in, tensors out; no batch, no pool."""
