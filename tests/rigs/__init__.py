"""What tests of several folders and benchmarks run on: servers, processes, networks and loads."""
