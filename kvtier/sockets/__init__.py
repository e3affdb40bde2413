"""Socket primitives: zero-copy sends and receives, message frames, and connection pools."""
