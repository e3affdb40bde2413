"""The controller: an index of the chunks of all instances, and operations that move, pin and clear them."""
