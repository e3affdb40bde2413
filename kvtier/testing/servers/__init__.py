"""Real servers of shared pools on loopback, for tests and benchmarks: started, killed, paused, damaged."""
