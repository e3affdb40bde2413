"""What a running cache shows of itself: metrics, recordings, and what other settings would hit."""
