"""The model pairs that the demo, the tests and the benchmarks run on."""
