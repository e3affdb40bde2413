"""Worker threads and task groups."""
