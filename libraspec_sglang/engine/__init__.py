"""The plugin inside SGLang: entry point, contract, algorithm and worker."""
