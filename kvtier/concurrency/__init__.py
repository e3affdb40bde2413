"""What a process waits for and runs beside its event loop: tasks, threads, children, files and sockets."""
