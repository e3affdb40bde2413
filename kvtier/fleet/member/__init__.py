"""Instance's end of the controller connection: report chunks, execute commands."""
