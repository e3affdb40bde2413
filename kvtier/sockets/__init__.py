"""Socket primitives: zero-copy sends and receives, and connection pools."""
