"""What an instance tells its controller, and does for it."""
