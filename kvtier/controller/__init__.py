"""One place that knows what every instance holds, and has them move, pin and remove it."""
