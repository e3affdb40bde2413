"""The traffic of a cache, written to a file without its tokens, and read back."""
