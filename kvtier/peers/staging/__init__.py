"""Staging buffers: KV transfers between the GPU memory of two engines, bypassing host memory."""
