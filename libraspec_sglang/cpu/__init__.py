"""SGLang without a GPU: its real scheduler, cache, HTTP server and FlashInfer backend, on CPU.

``enable`` decides whether and prepares the environment; ``install`` applies the patches;
``flashinfer_leaves`` / ``batch`` / ``attention`` are the reference for FlashInfer's kernels.
"""
