"""The CUDA layer on a stand-in for CUDA (csrc/tests/cuda_stand_in), without a GPU and a toolkit."""
