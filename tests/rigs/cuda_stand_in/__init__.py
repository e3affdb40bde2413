"""A stand-in for the CUDA runtime: built, loaded and controlled by tests."""
