"""The repository of `gramwatch-lab`: the package `gramwatch_lab`, its benchmarks and its tests."""
