"""Our side of the benchmarks that need a process of their own."""
