"""Disk backend: chunks as files, through io_uring or worker threads."""
