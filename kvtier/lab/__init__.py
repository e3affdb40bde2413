"""What looks at kvtier from outside. Only the command line imports it."""
