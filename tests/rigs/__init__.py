"""Stand-ins and loads that several folders of tests share, and the benchmarks."""
