"""The shared parts of commands: options and their values, files, printing, progress, exit codes."""
