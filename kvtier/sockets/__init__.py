"""What talks over sockets stands on this: bytes in and out of memory, frames, connections kept and shared."""
