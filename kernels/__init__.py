"""Triton kernels, one file each; installed as libraspec_sglang.kernels."""
