"""Chunk format (keys, layout, header) and chunk memory (the arena and its slices)."""
